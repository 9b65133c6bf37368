"""What answers to completions and to chats have in common."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from homing.frontend.openai.requests import GenerationRequest
from homing.frontend.openai.schemas import TokenIds, Usage, Versions
from homing.frontend.text import Piece
from homing.tokenizer import Tokenizer


class Reply(Protocol):
    """How one request is answered."""

    def opening(self) -> Sequence[Struct]:
        """Chunks that come before any piece."""
        ...

    def chunks(self, index: int, piece: Piece, usage: Usage | UnsetType) -> Sequence[Struct]:
        """The chunks, at least one, that show a piece of choice `index`."""
        ...

    def usage_chunk(self, usage: Usage) -> Struct | None:
        """The chunk without choices that ends a stream, when asked for; None: there is none."""
        ...

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Struct | list[Struct]:
        """The answer that is not streamed; each choice is one piece."""
        ...


class Head:
    """What every part of one answer begins with."""

    def __init__(self, prefix: str, request: GenerationRequest, model: str) -> None:
        """The id has the name that the client gave the request, if it did."""
        self.id = f"{prefix}-{request.external_id or secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model


def spelling_of(request: GenerationRequest, tokenizer: Tokenizer) -> Callable[[int], str]:
    """How log-probabilities name a token."""
    if request.return_tokens_as_token_ids:
        return lambda token_id: f"token_id:{token_id}"
    return tokenizer.token_text


def token_ids(request: GenerationRequest, piece: Piece) -> TokenIds:
    """On request."""
    if not request.return_token_ids:
        return UNSET
    return [token.token_id for token in piece.tokens]


def token_weight_versions(request: GenerationRequest, piece: Piece) -> TokenIds:
    """On request."""
    if not request.return_weight_versions:
        return UNSET
    return [token.epoch for token in piece.tokens]


def stamp(reply: Versions, pieces: Iterable[Piece]) -> None:
    """Note on a reply or chunk which weights its pieces come from."""
    oldest: int | None = None
    newest = 0
    for piece in pieces:
        if piece.oldest_epoch is not None:
            oldest = piece.oldest_epoch if oldest is None else min(oldest, piece.oldest_epoch)
            newest = max(newest, piece.newest_epoch)
    if oldest is not None:
        reply.weight_version = newest
        if oldest != newest:
            reply.oldest_weight_version = oldest
