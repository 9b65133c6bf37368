"""What control routes do to the fleet, in our words and in those of vLLM and SGLang.

All may be repeated: a command that holds already is carried out again, without harm.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, to_builtins

from homing.client import Client
from homing.errors import InvalidRequest
from homing.wire import (
    Command,
    FleetState,
    InFlightKV,
    KVMode,
    Pause,
    PauseMode,
    Suspend,
    UpdateWeights,
    WeightGroup,
    WeightsMode,
    WeightSource,
)

COMMAND_S = 60.0
WAIT_S = 3600.0
"""For running requests to end."""
UPDATE_S = 960.0

_PAUSE_MODES = {
    **{mode.value: mode for mode in PauseMode},
    "in_place": PauseMode.KEEP,
    "retract": PauseMode.KEEP,
}
_REPLY_PREFIXES = ("chatcmpl-", "cmpl-")
_KV_TAG = "kv_cache"


class FleetStatus(Struct):
    """After a command."""

    status: str
    """running, paused or suspended."""
    weight_version: int


class Aborted(Struct):
    aborted: int
    """Requests that were found; they end at once."""


class Dropped(Struct):
    dropped_blocks: int


class Paused(Struct):
    is_paused: bool


class Sleeping(Struct):
    is_sleeping: bool


class WeightVersion(Struct):
    weight_version: int


class Drained(Struct):
    rank: int
    """It has left."""


class PauseBody(Struct, kw_only=True):
    mode: str = "keep"
    """keep: requests stay, and go on at `/resume`. wait: they end first. abort: they end now."""
    clear_cache: bool = False
    """Forget cached prefixes, too."""


async def pause(client: Client, body: PauseBody) -> FleetStatus:
    mode = _PAUSE_MODES.get(body.mode)
    if mode is None:
        raise InvalidRequest(
            f"mode is {body.mode!r}; it must be one of: {', '.join(_PAUSE_MODES)}", field="mode"
        )
    timeout_s = WAIT_S if mode is PauseMode.WAIT else COMMAND_S
    await _command(client, Command.PAUSE, Pause(mode=mode), timeout_s=timeout_s)
    if body.clear_cache:
        await _command(client, Command.RESET_PREFIX_CACHE)
    return _state(client)


async def resume(client: Client) -> FleetStatus:
    await _command(client, Command.UNPAUSE)
    return _state(client)


class SleepBody(Struct, kw_only=True):
    level: int = 1
    """0 only pauses, 1 and 2 give memory back."""
    mode: str = "keep"
    """Of the pause, if the fleet runs."""
    tags: str | list[str] | None = None
    """What to give back: `weights`, `kv_cache` or both. None: both."""
    kv: KVMode | None = None
    """Instead of what level and tags say."""
    weights: WeightsMode | None = None


async def sleep(client: Client, body: SleepBody) -> FleetStatus:
    tags = _tags(body.tags) or {"weights", _KV_TAG}
    if client.fleet.state is FleetState.RUNNING:
        await pause(client, PauseBody(mode=body.mode))
    if body.level > 0:
        kv = body.kv or (KVMode.DISCARD if _KV_TAG in tags else KVMode.PERSIST)
        weights = body.weights or (WeightsMode.OFFLOAD if "weights" in tags else WeightsMode.KEEP)
        await _command(client, Command.SUSPEND, Suspend(kv=kv, weights=weights), timeout_s=UPDATE_S)
    return _state(client)


class WakeBody(Struct, kw_only=True):
    tags: str | list[str] | None = None
    """With `weights` alone the fleet stays paused, for an update before it goes on."""


async def wake_up(client: Client, body: WakeBody) -> FleetStatus:
    tags = _tags(body.tags)
    if client.fleet.state is FleetState.SUSPENDED:
        await _command(client, Command.RESUME, timeout_s=UPDATE_S)
    if not tags or _KV_TAG in tags:
        await _command(client, Command.UNPAUSE)
    return _state(client)


def _tags(tags: str | list[str] | None) -> set[str]:
    named = set(tags.split(",") if isinstance(tags, str) else tags or ())
    if unknown := named - {"weights", _KV_TAG}:
        raise InvalidRequest(f"there is no tag {unknown.pop()!r}", field="tags")
    return named


class UpdateBody(Struct, kw_only=True):
    path: str = ""
    """A Hugging Face directory that every engine can read."""
    weight_dir: str = ""
    model_path: str = ""
    """The same, as prime-rl and as SGLang call it."""
    group: WeightGroup | None = None
    """Instead of a directory: a process group in which a trainer broadcasts them."""
    partial: bool = False
    """Some parameters are new, the others stay."""
    in_flight: InFlightKV = InFlightKV.KEEP
    weight_version: int | None = None
    """Higher than the fleet's. None: the fleet's + 1."""


async def update_weights(client: Client, body: UpdateBody) -> FleetStatus:
    path = body.path or body.weight_dir or body.model_path
    if bool(path) == (body.group is not None):
        raise InvalidRequest("give either path or group", field="path")
    update = UpdateWeights(
        source=WeightSource.GROUP if body.group else WeightSource.DIRECTORY,
        path=path,
        group=body.group,
        partial=body.partial,
        in_flight=body.in_flight,
        epoch=body.weight_version,
    )
    await _command(client, Command.UPDATE_WEIGHTS, update, timeout_s=UPDATE_S)
    return _state(client)


class VersionBody(Struct, kw_only=True):
    weight_version: int


async def set_weight_version(client: Client, body: VersionBody) -> FleetStatus:
    """For weights that the trainer changed by other means."""
    await client.control(Command.SET_EPOCH, {"epoch": body.weight_version})
    return _state(client)


class AbortBody(Struct, kw_only=True):
    request_id: str | None = None
    rid: str | None = None
    """The same, as SGLang calls it."""
    request_ids: list[str] = []
    abort_all: bool = False


async def abort(client: Client, body: AbortBody) -> Aborted:
    """By exact name. Each request answers with what it generated, finish_reason `abort`."""
    names = [*filter(None, (body.request_id, body.rid)), *body.request_ids]
    if body.abort_all:
        return Aborted(await client.abort_matching(None))
    if not names:
        raise InvalidRequest("give request_id, request_ids or abort_all", field="request_id")
    return Aborted(sum([await _abort_named(client, name) for name in names]))


async def _abort_named(client: Client, name: str) -> int:
    """Or the request whose reply has this id."""
    count = await client.abort_matching(name)
    prefix = next((p for p in _REPLY_PREFIXES if name.startswith(p)), None)
    if count or prefix is None:
        return count
    return await client.abort_matching(name.removeprefix(prefix))


class DrainBody(Struct, kw_only=True):
    rank: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """How long it may go on working."""


async def drain(client: Client, body: DrainBody) -> Drained:
    """Let a rank finish, and go; what it has not finished by then goes on elsewhere."""
    await client.drain(body.rank, timeout_s=body.timeout_s)
    return Drained(body.rank)


async def reset_prefix_cache(client: Client) -> Dropped:
    """Also prefixes of requests that run: they go on, and nobody shares their blocks."""
    ranks = await _command(client, Command.RESET_PREFIX_CACHE)
    return Dropped(sum(result.get("dropped_blocks", 0) for result in ranks.values()))


async def _command(
    client: Client,
    command: Command,
    arguments: Struct | None = None,
    *,
    timeout_s: float = COMMAND_S,
) -> dict[int, dict[str, Any]]:
    plain = None if arguments is None else to_builtins(arguments)
    return await client.control(command, plain, timeout_s=timeout_s)


def _state(client: Client) -> FleetStatus:
    return FleetStatus(client.fleet.state.value, client.fleet.epoch)
