"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class TokenizeRequest(Struct, kw_only=True):
    """A text; or a chat, with the fields that a chat completion has for its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Of a text, true unless given: with what the model wants around it. A chat's template writes
    them itself."""
    return_token_strs: bool | None = None


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None
    """False unless given: what was tokenized comes back whole."""


class Detokenized(Struct):
    prompt: str
