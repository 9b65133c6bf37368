"""From a request's bytes to its struct, and errors that name the field at fault."""

from __future__ import annotations

import re
from functools import cache
from typing import TypeVar

import msgspec
from msgspec import Struct

from homing.errors import InvalidRequest

S = TypeVar("S", bound=Struct)
T = TypeVar("T")


def read_body(kind: type[S], body: bytes | str) -> S:
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
def _decoder(kind: type[S]) -> msgspec.json.Decoder[S]:
    return msgspec.json.Decoder(kind)


def field_of(message: str) -> str | None:
    """The field that msgspec's message is about: `... at `$.stop[0]`` or `missing ... `prompt``."""
    match = re.search(r"`(?:.* in `)?\$\.(\w+)", message) or re.search(r"field `(\w+)`", message)
    return match[1] if match else None


def one_of(**fields: T | None) -> T | None:
    """The value of a field that goes by several names. Raises `InvalidRequest` where two of them
    say different things: one would be dropped."""
    given = {name: value for name, value in fields.items() if value}
    for name, value in given.items():
        if value != next(iter(given.values())):
            raise InvalidRequest(f"{' and '.join(given)} mean the same; give one", field=name)
    return next(iter(given.values()), None)
