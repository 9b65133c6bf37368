"""/v1/chat/completions: messages become token ids, by the model's own chat template."""

from __future__ import annotations

from typing import Any

from homing.errors import InvalidRequest
from homing.frontend.answer_reader import AnswerReading
from homing.frontend.completions import check_token_ids
from homing.frontend.job import Call, Job
from homing.frontend.openai.chat_reply import ChatReply
from homing.frontend.openai.reading import one_of
from homing.frontend.openai.reply import Reply
from homing.frontend.openai.requests import ChatRequest, read_chat
from homing.frontend.openai.sampling import chat_params
from homing.frontend.openai.tools import tool_choice
from homing.frontend.parsers import (
    AnswerFormat,
    ToolChoice,
    ToolChoiceMode,
    template_messages,
)
from homing.frontend.parsers.reasoning import REASONING_FORMATS
from homing.frontend.service import ServedModel
from homing.frontend.thinking import ThinkingLimit
from homing.frontend.tokenizing import Prompt, encode_within
from homing.frontend.tool_prompt import knows_tools, with_tools_told
from homing.frontend.turns import Message, exact_prefix, text_behind, without_tokens
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer
from homing.wire import ModelCard, pack_tokens

# What a request says in fields of its own.
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_END_CHARACTERS = 64
"""Of a prompt: enough to see whether it opens the thoughts."""
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that turns thinking off."""


def prepare_chat(body: bytes, model: ServedModel, call: Call) -> tuple[Job, Reply]:
    """See completions.py."""
    request = read_chat(body)
    name = model.answers_to(request.model)
    job = _job(request, model)
    return job, ChatReply(request, name, model.tokenizer, job.prompts[0].token_ids)


def _job(request: ChatRequest, model: ServedModel) -> Job:
    choice = tool_choice(request)
    params = chat_params(request, choice, model.answer_format.tools)
    can_think = params.structured_output is None and request.separate_reasoning is not False
    answer_format = model.answer_format if can_think else model.answer_format.without_reasoning
    held = params.structured_output is not None
    prompt = chat_prompt(request, choice, model, held=held)
    reading = AnswerReading(
        answer_format, choice, prompt.end, show_reasoning=request.include_reasoning is not False
    )
    thinking = _thinking_limit(request, params, prompt, answer_format, model)
    marks_are_special = answer_format.needs_special_tokens
    return Job(
        request,
        [prompt],
        params,
        reading=reading,
        skip_special_tokens=request.skip_special_tokens is not False and not marks_are_special,
        thinking=thinking,
    )


def _thinking_limit(
    request: ChatRequest,
    params: SamplingParams,
    prompt: Prompt,
    answer_format: AnswerFormat,
    model: ServedModel,
) -> ThinkingLimit | None:
    """None: nothing to limit, or the answer ends before."""
    budget = request.thinking_token_budget
    if budget is None:
        return None
    if budget < 1:
        raise InvalidRequest(
            f"thinking_token_budget is {budget}; it must be at least 1. "
            "For no thoughts at all say reasoning_effort 'none'",
            field="thinking_token_budget",
        )
    if model.answer_format.reasoning is None:
        raise InvalidRequest(
            "this model's thoughts have no marks that are known here: see --reasoning-parser",
            field="thinking_token_budget",
        )
    if answer_format.reasoning is None:
        return None
    reasoning_format = REASONING_FORMATS[answer_format.reasoning]
    limit = ThinkingLimit(budget, reasoning_format, prompt.end, model.tokenizer)
    room = model.card.max_context_tokens - len(prompt.token_ids)
    if params.num_tokens_to_generate is not None:
        room = min(room, params.num_tokens_to_generate)
    return limit if budget + len(limit.closer) < room else None


def chat_prompt(
    request: ChatRequest, choice: ToolChoice, model: ServedModel, *, held: bool = False
) -> Prompt:
    """The prompt that asks for the next message. Raises `InvalidRequest`.

    held: the answer is held to a shape, which leaves no room for thoughts.
    """
    # Checked where token ids replace them, too: what is wrong in a request is refused.
    plain = [_message(message) for message in request.messages]
    given = one_of(prompt_token_ids=request.prompt_token_ids, input_ids=request.input_ids)
    if given:
        field = "prompt_token_ids" if request.prompt_token_ids else "input_ids"
        check_token_ids(given, model.card.vocab_size, field=field)
        end = model.tokenizer.decode(given[-_END_CHARACTERS:], skip_special_tokens=False)
        return Prompt(given, pack_tokens(given), end=end)
    if not plain:
        raise InvalidRequest("messages is an empty list", field="messages")
    messages = template_messages(plain)
    variables = _variables(request, think=not held)
    if choice.tools and choice.mode is not ToolChoiceMode.NONE:
        assert request.tools is not None
        if knows_tools(model.tokenizer.chat_template):
            variables["tools"] = request.tools
        else:
            messages = with_tools_told(messages, request.tools)
    prompt = _render_and_encode(messages, variables, model.card, model.tokenizer)
    if not prompt.token_ids:
        raise InvalidRequest("the chat template makes an empty prompt of this", field="messages")
    return prompt


def _render_and_encode(
    messages: list[Message], variables: dict[str, Any], card: ModelCard, tokenizer: Tokenizer
) -> Prompt:
    def render(messages: list[Message]) -> str:
        return tokenizer.render_chat(messages, **variables)

    prefix = exact_prefix(messages)
    messages = [without_tokens(message) for message in messages]
    if prefix is None:
        ids, text = [], render(messages)
    else:
        ids = check_token_ids(prefix.token_ids, card.vocab_size, field="messages")
        eos_texts = {token: tokenizer.token_text(token) for token in card.eos_token_ids}
        text = text_behind(prefix, messages, render, eos_texts)
    encoded = encode_within(tokenizer, text, card.max_context_tokens, add_special_tokens=False)
    token_ids = [*ids, *encoded]
    return Prompt(token_ids, pack_tokens(token_ids), end=text[-_END_CHARACTERS:])


def _variables(request: ChatRequest, *, think: bool) -> dict[str, Any]:
    """What the template is told besides messages and tools."""
    continue_final = bool(request.continue_final_message)
    if continue_final and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            field="continue_final_message",
        )
    given = request.chat_template_kwargs or {}
    for name in sorted(_RESERVED_VARIABLES & given.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not set {name}", field="chat_template_kwargs"
        )
    add_prompt = request.add_generation_prompt
    return {
        **_thinking(request, think=think),
        **({} if request.documents is None else {"documents": request.documents}),
        **given,
        "add_generation_prompt": not continue_final if add_prompt is None else add_prompt,
        "continue_final_message": continue_final,
    }


def _thinking(request: ChatRequest, *, think: bool) -> dict[str, Any]:
    """Switches, unless the template is to do as it is used to."""
    effort = request.reasoning_effort
    wanted = request.enable_thinking
    if wanted is None and (effort == "none" or not think):
        wanted = False
    variables: dict[str, Any] = {} if wanted is None else dict.fromkeys(_THINKING_SWITCHES, wanted)
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text. Raises `InvalidRequest` for what is no message."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequest("a message has no role", field="messages")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise InvalidRequest("a tool call has no function name", field="messages")
    plain = {**message, "content": _content(message.get("content"))}
    if not calls:
        plain.pop("tool_calls", None)  # templates take an empty list for calls
    return plain


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _content(content: Any) -> str:
    """The text of a message: null is none, parts are joined in order."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("a message's content is neither text nor parts", field="messages")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f"a content part of type {kind!r} is not supported, or has no text", field="messages"
        )
    return text
