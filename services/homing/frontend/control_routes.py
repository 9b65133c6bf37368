"""The control routes: for trainers and operators, see `access`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from quart import Blueprint, Response, request

from homing.errors import InvalidRequest
from homing.frontend import control
from homing.frontend.access import Access
from homing.frontend.openai.reading import field_of
from homing.frontend.service import Service
from homing.frontend.stream import json_response
from homing.wire import FleetState

B = TypeVar("B", bound=Struct)


def control_routes(service: Service, access: Access) -> Blueprint:
    routes = Blueprint("control", __name__)
    client = service.client

    @routes.before_request
    async def check() -> None:
        access.check_admin()

    def with_body(
        kind: type[B], act: Callable[..., Awaitable[Struct]], *paths: str, **defaults: Any
    ) -> None:
        """POST on these paths does `act`; `defaults` are for fields that are not given."""

        async def post() -> Response:
            return json_response(await act(client, await _read(kind, defaults)))

        for path in paths:
            routes.add_url_rule(path, path.strip("/"), post, methods=["POST"])

    def without_body(act: Callable[..., Awaitable[Struct]], *paths: str) -> None:
        async def post() -> Response:
            return json_response(await act(client))

        for path in paths:
            routes.add_url_rule(path, path.strip("/"), post, methods=["POST"])

    with_body(control.PauseBody, control.pause, "/pause")
    with_body(control.PauseBody, control.pause, "/pause_generation", mode="abort")
    without_body(control.resume, "/resume", "/continue_generation")
    with_body(control.SleepBody, control.sleep, "/sleep", "/release_memory_occupation")
    with_body(control.WakeBody, control.wake_up, "/wake_up", "/resume_memory_occupation")
    with_body(
        control.UpdateBody, control.update_weights, "/update_weights", "/update_weights_from_disk"
    )
    with_body(control.VersionBody, control.set_weight_version, "/update_weight_version")
    with_body(control.DrainBody, control.drain, "/drain")
    with_body(control.AbortBody, control.abort, "/abort", "/abort_request", "/abort_requests")
    without_body(control.reset_prefix_cache, "/reset_prefix_cache", "/flush_cache")

    @routes.get("/is_paused")
    async def is_paused() -> Response:
        return json_response(control.Paused(client.fleet.state is not FleetState.RUNNING))

    @routes.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_response(control.Sleeping(client.fleet.state is FleetState.SUSPENDED))

    @routes.get("/weight_version")
    async def weight_version() -> Response:
        return json_response(control.WeightVersion(client.fleet.epoch))

    return routes


async def _read(kind: type[B], defaults: dict[str, Any]) -> B:
    """Fields come as JSON, in the query, or both. Raises `InvalidRequest`."""
    text = await request.get_data()
    try:
        body = msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
        given = {k: v for k, v in body.items() if v is not None}
        return msgspec.convert({**defaults, **request.args.to_dict(), **given}, kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"invalid request: {error}", field=field_of(str(error))) from error
