"""The HTTP frontend: OpenAI's API over the fleet.

One request, in the order in which the files take it up:

    access.py       whether it may; app.py: the route
    openai/         requests.py: body -> struct; sampling.py: struct -> SamplingParams
    completions.py, chat.py     prompt or messages -> token ids -> job.py: what the fleet is to do;
                    all of that in tokenizing.py's thread where the body is long
    generations.py  token ids -> client -> parts of tokens
    text.py         parts -> pieces of text
    answer_reader.py            pieces of a chat -> content, thoughts, tool calls, by parsers/
    stream.py       pieces -> JSON or server-sent events, shaped by openai/*_reply.py

Beside it: native/ for trainers' own routes, control.py for commands to the fleet, status.py,
metrics.py and page/ for what is going on, openapi.py for what there is.

Holds no state that outlives a request; runs no model, and imports neither torch nor transformers.
"""
