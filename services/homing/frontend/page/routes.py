"""The page's routes: its files, as they are on disk, and the fleet as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from quart import Blueprint, Response, jsonify

from homing.client import FleetView
from homing.frontend.page.fleet import fleet_json

_ASSETS = Path(__file__).parent / "assets"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    # All that the page needs comes from here, whatever a model writes into it.
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes(
    get_stats: Callable[[], Awaitable[dict[str, Any]]], get_fleet: Callable[[], FleetView]
) -> Blueprint:
    """`get_stats`: the coordinator's snapshot; `get_fleet`: what the client knows of the fleet."""
    routes = Blueprint("page", __name__)
    for suffix, content_type in _CONTENT_TYPES.items():
        for file in _ASSETS.glob(f"*{suffix}"):
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            serve = _serve(file.read_bytes(), content_type)
            routes.add_url_rule(path, file.name.replace(".", "_"), serve)

    @routes.get("/fleet")
    async def fleet() -> Response:
        response = jsonify(fleet_json(await get_stats(), get_fleet()))
        response.headers["Cache-Control"] = "no-store"
        return response

    return routes


def _serve(body: bytes, content_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(body, headers=_HEADERS, content_type=content_type)

    return serve
