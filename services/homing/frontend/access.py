"""Who may do what: API keys, an admin key for control, and pages of other origins.

/health, /metrics, /version, the page     everybody
control routes                            the admin key; without one, on loopback only
everything else                           an API key, or the admin key, if any is set
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from quart import Response, request
from werkzeug.exceptions import Forbidden, Unauthorized

_PROBES = {"/health", "/ready", "/ping", "/liveness", "/metrics", "/version"}
_OPEN_PATHS = _PROBES | {"/", "/fleet", "/openapi.json"}
_OPEN_PREFIX = "/page/"
_PREFLIGHT_AGE_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    api_keys: tuple[str, ...] = ()
    """None: everybody may use the model."""
    admin_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    """Of pages that browsers let read our answers; `*` is any."""
    is_public: bool = False
    """Other machines can connect."""


class Access:
    """Checks the request of the current context."""

    def __init__(self, settings: AccessSettings) -> None:
        self._api_keys = _digests(settings.api_keys)
        self._admin_keys = _digests(settings.admin_keys)
        self._origins = frozenset(settings.allowed_origins)
        self._is_public = settings.is_public

    def check_user(self) -> int | None:
        """Whose key the request carries, as a number; None where it needs none. Raises
        `Unauthorized` unless the request may use the model."""
        path = request.path.rstrip("/") or "/"
        if not self._api_keys or path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return None
        key = _given_key()
        if not _matches(key, [*self._api_keys, *self._admin_keys]):
            raise Unauthorized("the request carries no valid API key: Authorization: Bearer KEY")
        return int.from_bytes(key[:8]) >> 1

    def check_admin(self) -> None:
        """Raises `Unauthorized` or `Forbidden` unless the request may control the fleet."""
        if self._admin_keys:
            if not _matches(_given_key(), self._admin_keys):
                raise Unauthorized("this needs the admin key: Authorization: Bearer KEY")
        elif self._is_public:
            raise Forbidden("control is off: it needs --admin-api-key where others can connect")

    def preflight(self) -> Response | None:
        """The answer to a browser that asks whether a page may send a request."""
        if request.method != "OPTIONS" or self._allowed_origin() is None:
            return None
        if "Access-Control-Request-Method" not in request.headers:
            return None
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", "authorization, content-type"
            ),
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        }
        return Response("", 204, headers)

    def mark(self, response: Response) -> None:
        """Tell a browser that its page may read the response."""
        if not self._origins:
            return
        response.headers["Vary"] = "Origin"
        if origin := self._allowed_origin():
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"

    def _allowed_origin(self) -> str | None:
        origin = request.headers.get("Origin")
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None


def is_public(listener: socket.socket) -> bool:
    """Whether other machines can connect to a listening socket."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return not ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _given_key() -> bytes:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return _digest(key.strip()) if scheme.lower() == "bearer" else b""


def _matches(given: bytes, digests: Iterable[bytes]) -> bool:
    """In a time that tells nothing of the keys: digests, whole, all of them."""
    return bool(sum([hmac.compare_digest(given, digest) for digest in digests]))


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [_digest(key) for key in keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
