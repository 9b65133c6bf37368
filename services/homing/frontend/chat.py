"""/v1/chat/completions: messages become token ids, by the model's own chat template."""

from __future__ import annotations

import json
from typing import Any

from homing.errors import InvalidRequest
from homing.frontend.openai.requests import ChatRequest
from homing.frontend.service import ServedModel
from homing.frontend.tokenizing import Prompt, encode_within
from homing.tokenizer import Tokenizer

# What a request says in fields of its own.
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)


async def chat_prompt(request: ChatRequest, model: ServedModel) -> Prompt:
    """The prompt that asks for the next message. Raises `InvalidRequest`."""
    if not request.messages:
        raise InvalidRequest("messages is an empty list", field="messages")
    messages = [_message(message) for message in request.messages]
    variables = _variables(request)

    def render_and_encode(tokenizer: Tokenizer) -> Prompt:
        text = tokenizer.render_chat(messages, **variables)
        max_tokens = model.card.max_context_tokens
        return Prompt(encode_within(tokenizer, text, max_tokens, add_special_tokens=False))

    prompt = await model.thread.run(render_and_encode)
    if not prompt.token_ids:
        raise InvalidRequest("the chat template makes an empty prompt of this", field="messages")
    return prompt


def _variables(request: ChatRequest) -> dict[str, Any]:
    """What the template is told besides the messages."""
    continue_final = bool(request.continue_final_message)
    if continue_final and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            field="continue_final_message",
        )
    variables = dict(request.chat_template_kwargs or {})
    for name in sorted(_RESERVED_VARIABLES & variables.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not set {name}", field="chat_template_kwargs"
        )
    for name in ("documents", "reasoning_effort"):
        if (value := getattr(request, name)) is not None:
            variables[name] = value
    add_prompt = request.add_generation_prompt
    variables["add_generation_prompt"] = not continue_final if add_prompt is None else add_prompt
    variables["continue_final_message"] = continue_final
    return variables


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: its content is a string, arguments of calls are objects."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequest("a message has no role", field="messages")
    plain = {**message, "content": _content(message.get("content"))}
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = _tool_calls(calls)
    return plain


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


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls that the model made earlier. Their arguments travel as JSON text."""
    if not isinstance(calls, list):
        raise InvalidRequest("tool_calls is not a list", field="messages")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("a tool call has no function name", field="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"the arguments of a call to {function['name']} are not JSON: {error}",
                field="messages",
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
