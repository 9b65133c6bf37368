"""From a request's bytes to its struct, and errors that name the field at fault."""

from __future__ import annotations

import re
from functools import cache
from typing import TypeVar

import msgspec
from msgspec import Struct

from homing.errors import InvalidRequest

T = TypeVar("T", bound=Struct)


def read_body(kind: type[T], body: bytes | str) -> T:
    """Decode a JSON body. Raises `InvalidRequest` naming what is wrong."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"invalid request body: {error}", field=field_of(str(error))
        ) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def field_of(message: str) -> str | None:
    """The field that msgspec's message is about: `... at `$.stop[0]`` or `missing ... `prompt``."""
    match = re.search(r"`(?:.* in `)?\$\.(\w+)", message) or re.search(r"field `(\w+)`", message)
    return match[1] if match else None
