"""The HTTP frontend: OpenAI's API over the fleet.

One request, in the order in which the files take it up:

    app.py          the route
    openai/         requests.py: body -> struct; sampling.py: struct -> SamplingParams
    completions.py, chat.py     prompt or messages -> token ids, in tokenizing.py's thread
    generations.py  token ids -> client -> parts of tokens
    text.py         parts -> pieces of text
    stream.py       pieces -> JSON or server-sent events, shaped by openai/*_reply.py

Holds no state that outlives a request; runs no model, and imports neither torch nor transformers.
"""
