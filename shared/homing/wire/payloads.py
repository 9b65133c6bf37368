"""What is inside the payload frames: msgpack structs, with arrays of numbers as raw bytes.

Token ids are little-endian uint32, log-probabilities little-endian float32: viewed, never decoded
element by element.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from typing_extensions import Buffer

from homing.errors import WireError
from homing.wire.commands import FleetState


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop word
    LENGTH = "length"  # its token limit, or the end of the context
    ABORT = "abort"  # its client asked, or went away
    ERROR = "error"  # the engine cannot serve it; `Finish.detail` says why
    UNREAD = "unread"  # the engine cannot see the prompt where it is lent: submit it again, sent


FAILED = frozenset((FinishReason.ERROR, FinishReason.UNREAD))
"""Ends of what was never begun, or cannot go on."""


class ModelCard(Struct, frozen=True, kw_only=True):
    """What a frontend must know of the model to talk to it."""

    name: str
    tokenizer_dir: str
    """Directory that holds tokenizer.json, tokenizer_config.json and perhaps
    chat_template.jinja."""
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    dtype: str = ""


class RankInfo(Struct, frozen=True, array_like=True):
    """One engine rank, as clients see it."""

    rank: int
    state: FleetState
    live: bool
    """False: it was here, and is gone."""


class TopLogProbs(Struct, frozen=True, array_like=True):
    """The n most probable tokens at each of k positions, most probable first."""

    n: int
    token_ids: bytes  # uint32 [k, n]
    log_probs: bytes  # float32 [k, n]


class PromptLogProbs(Struct, frozen=True, array_like=True):
    """Of prompt tokens `[1, n)`: the first has no log-probability."""

    log_probs: bytes  # float32 [n - 1]
    top: TopLogProbs | None = None


class Finish(Struct, frozen=True, array_like=True):
    """How a request ended."""

    reason: FinishReason
    stop: int | str | None = None
    """The token id or the stop word that ended it."""
    detail: str = ""
    """Of an error: what was wrong, for a person."""
    field: str = ""
    """Of an error: the parameter at fault."""


class Delta(Struct, frozen=True, array_like=True, gc=False):
    """What one step brought for one request."""

    request_id: int
    attempt: int
    tokens: bytes  # uint32 [k]
    log_probs: bytes | None = None  # float32 [k]
    top: TopLogProbs | None = None
    num_cached_tokens: int | None = None
    """On the attempt's first delta: prompt tokens found in the cache."""
    prompt: PromptLogProbs | None = None
    """On the attempt's first delta, when asked for."""
    epoch: int = 0
    """Weight epoch under which `tokens` were sampled."""
    finish: Finish | None = None


class FinishedRequest(Struct, frozen=True, array_like=True, gc=False):
    """What the coordinator must know of a request that ended."""

    request_id: int
    attempt: int
    reason: FinishReason
    num_cached_tokens: int
    num_generated_tokens: int
    """In this attempt."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

T = TypeVar("T")


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as frames and deltas carry them: uint32."""
    return array("I", token_ids).tobytes()


def pack_payload(value: Any) -> bytes:
    """msgpack of a struct above, or of a list or map of them."""
    return _ENCODER.encode(value)


def read_payload(data: Buffer, kind: type[T]) -> T:
    """Decode a payload as `kind`, such as `list[Delta]`. Raises `WireError` if it is not one."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(f"payload: {error}") from error
