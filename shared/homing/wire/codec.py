"""pack and parse: message <-> `[metadata, frame, ...]`, derived from the declarations in
`messages`.

The metadata codec is msgspec's: the array of each class becomes a tagged struct, so that types,
ranges and the kind are checked in one C call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from typing_extensions import Buffer

from homing.errors import WireError
from homing.wire import messages
from homing.wire.messages import FrameMark, Message

Payload = Buffer | None

MAX_METADATA_BYTES = 512
NIL = b"\xc0"
"""An absent frame: msgpack's nil. No payload is one byte long: arrays of uint32, digests, msgpack
containers."""

M = TypeVar("M", bound=Message)


class _Layout(NamedTuple):
    message: type[Message]
    metadata: type[msgspec.Struct]  # tagged array struct of the metadata fields alone
    num_fields: int
    num_frames: int


def _is_frame(hint: Any) -> bool:
    return get_origin(hint) is Annotated and any(isinstance(x, FrameMark) for x in get_args(hint))


def _layout(message: type[Message]) -> _Layout:
    hints = get_type_hints(message, include_extras=True)
    names = message.__struct_fields__
    num_frames = sum(_is_frame(hints[name]) for name in names)
    num_fields = len(names) - num_frames
    assert all(_is_frame(hints[name]) for name in names[num_fields:]), f"{message}: frames go last"
    defaults = dict(
        zip(reversed(names), reversed(message.__struct_defaults__), strict=False)
    )  # struct defaults belong to the last fields
    fields = [
        (name, hints[name], defaults[name]) if name in defaults else (name, hints[name])
        for name in names[:num_fields]
    ]
    metadata = msgspec.defstruct(
        message.__name__, fields, array_like=True, tag=message.TAG, frozen=True, gc=False
    )
    return _Layout(message, metadata, num_fields, num_frames)


_MESSAGES: list[type[Message]] = [
    item
    for item in vars(messages).values()
    if isinstance(item, type) and issubclass(item, Message) and item is not Message
]
_LAYOUTS = [_layout(message) for message in _MESSAGES]
_LAYOUT_OF_MESSAGE = {layout.message: layout for layout in _LAYOUTS}
_LAYOUT_OF_METADATA = {layout.metadata: layout for layout in _LAYOUTS}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Union[tuple(layout.metadata for layout in _LAYOUTS)]  # noqa: UP007 - built at run time
)
_decode, _astuple = _DECODER.decode, msgspec.structs.astuple  # looked up once: it is done often


def pack(message: Message) -> list[Buffer]:
    """The multipart frames of a message. Raises `WireError` if its metadata is too large."""
    layout = _LAYOUT_OF_MESSAGE[type(message)]
    values = msgspec.structs.astuple(message)
    metadata = _ENCODER.encode((layout.message.TAG, *values[: layout.num_fields]))
    if len(metadata) > MAX_METADATA_BYTES:
        raise WireError(
            f"{layout.message.__name__}: metadata of {len(metadata)} bytes; "
            f"the limit is {MAX_METADATA_BYTES}"
        )
    return [metadata, *(NIL if f is None else f for f in values[layout.num_fields :])]


def parse(frames: Sequence[Buffer]) -> Message:
    """The message of these frames. Raises `WireError`, and nothing else, whatever they hold.

    Payload frames are handed on as they came, without a copy.
    """
    if not frames:
        raise WireError("a message of no frames")
    head: Any  # a buffer whose length is in bytes
    payloads: list[Any]
    head, *payloads = frames
    if len(head) > MAX_METADATA_BYTES:
        raise WireError(f"metadata of {len(head)} bytes; the limit is {MAX_METADATA_BYTES}")
    try:
        metadata = _decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(f"metadata: {error}") from error
    layout = _LAYOUT_OF_METADATA[type(metadata)]
    if len(payloads) != layout.num_frames:
        raise WireError(
            f"{layout.message.__name__}: {len(payloads)} payload frames; it has {layout.num_frames}"
        )
    # Large frames are zmq's own objects, equal to nothing but themselves; none of them is nil.
    if NIL in payloads:
        for place, frame in enumerate(payloads):  # a comprehension would be a call more
            if frame == NIL:
                payloads[place] = None
    return layout.message(*_astuple(metadata) + tuple(payloads))
