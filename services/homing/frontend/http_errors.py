"""From the tree of errors to HTTP, once."""

from __future__ import annotations

import math
from typing import NamedTuple

from homing.errors import (
    CommandFailed,
    ContextLengthExceeded,
    HomingError,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    Overloaded,
    Unavailable,
)


class _Mapping(NamedTuple):
    status: int
    type: str
    code: str | None


# The first class that an error is an instance of decides, so subclasses come first.
_MAPPINGS: dict[type[HomingError], _Mapping] = {
    ModelNotFound: _Mapping(404, "invalid_request_error", "model_not_found"),
    ContextLengthExceeded: _Mapping(400, "invalid_request_error", "context_length_exceeded"),
    InvalidRequest: _Mapping(400, "invalid_request_error", None),
    Overloaded: _Mapping(429, "rate_limit_error", "overloaded"),
    Unavailable: _Mapping(503, "service_unavailable_error", "unavailable"),
    NotAllowed: _Mapping(409, "invalid_request_error", "not_allowed"),
    CommandFailed: _Mapping(500, "server_error", "command_failed"),
    HomingError: _Mapping(500, "server_error", "internal_error"),
}


def _mapping(error: HomingError) -> _Mapping:
    return next(m for kind, m in _MAPPINGS.items() if isinstance(error, kind))


def status_of(error: HomingError) -> int:
    return _mapping(error).status


def headers_of(error: HomingError) -> dict[str, str]:
    """`Retry-After` where trying again can help."""
    if isinstance(error, Overloaded | Unavailable):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {}


def error_body(error: HomingError) -> dict[str, dict[str, str | None]]:
    mapping = _mapping(error)
    field = error.field if isinstance(error, InvalidRequest) else None
    if field == "structured_output":  # an engine refused it, and knows no field of HTTP
        field = "response_format"
    return _body(str(error), mapping.type, field, mapping.code)


def http_error_body(status: int, message: str) -> dict[str, dict[str, str | None]]:
    """For what goes wrong before a request is one of ours: no such path, too large a body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _body(message, kind, None, "invalid_api_key" if status == 401 else None)


def _body(
    message: str, kind: str, param: str | None, code: str | None
) -> dict[str, dict[str, str | None]]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
