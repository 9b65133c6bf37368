"""Chats that go on from exact tokens: a message brings the ids that it was made of.

A model's answer, encoded again from its text, need not give the tokens that the model wrote. A
trainer that sends a chat back therefore leaves `prompt_token_ids` and `generation_token_ids` in the
messages, and the next prompt is

    [0, n)   prompt and answer of the last message that has them, as they were
    [n, ..)  the rest of the chat, rendered and encoded: the answer's end of turn, what follows it

The rest is found by a mark that stands in for that message's content when the chat is rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from homing.errors import InvalidRequest

_PROMPT, _ANSWER = "prompt_token_ids", "generation_token_ids"
_OF_TRAINERS = (_PROMPT, _ANSWER, "generation_log_probs")
_MARK = "EXACT_TOKENS_END_HERE"

Message = dict[str, Any]
Render = Callable[[list[Message]], str]


class ExactPrefix(NamedTuple):
    """The tokens that a chat goes on from."""

    token_ids: list[int]
    end: int
    """Index of the message that they end with."""


def exact_prefix(messages: Sequence[Message]) -> ExactPrefix | None:
    """Of the last message that brings its tokens. Raises `InvalidRequest` for what are none."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.get(_ANSWER) is None:
            continue
        ids = [message.get(_PROMPT), message[_ANSWER]]
        if not all(isinstance(part, list) and all(map(_is_id, part)) for part in ids):
            raise InvalidRequest(
                f"a message with {_ANSWER} has {_PROMPT} too, both lists of token ids",
                field="messages",
            )
        return ExactPrefix([*ids[0], *ids[1]], index)
    return None


def without_tokens(message: Message) -> Message:
    """The message as templates know it."""
    return {name: value for name, value in message.items() if name not in _OF_TRAINERS}


def text_behind(
    prefix: ExactPrefix,
    messages: Sequence[Message],
    render: Render,
    eos_texts: Mapping[int, str],
) -> str:
    """The text behind the prefix. `eos_texts`: how the model's end-of-sequence ids are spelled.

    Raises `InvalidRequest`.
    """
    marked = [*messages]
    marked[prefix.end] = {"role": messages[prefix.end]["role"], "content": _MARK}
    _, found, rest = render(marked).rpartition(_MARK)
    if not found:
        raise InvalidRequest(
            f"the chat template does not show message {prefix.end}, "
            "so the chat cannot go on from its tokens",
            field="messages",
        )
    if prefix.token_ids[-1:] and prefix.token_ids[-1] in eos_texts:
        # The model wrote the end of its turn itself.
        written = next(filter(rest.startswith, filter(None, eos_texts.values())), "")
        rest = rest.removeprefix(written)
    return rest


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
