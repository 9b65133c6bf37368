"""Commands to the whole fleet, and their arguments: a msgpack map of one of the structs below.

    running --PAUSE--> paused --SUSPEND--> suspended
            <-UNPAUSE--       <--RESUME---

The other commands leave the state as it is. A command without a struct here takes no arguments.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class FleetState(StrEnum):
    """What the fleet, and each engine in it, is doing."""

    RUNNING = "running"
    PAUSED = "paused"  # no steps; requests stay, and new ones queue
    SUSPENDED = "suspended"  # paused, and memory was given back


class Command(StrEnum):
    """What a client may tell the whole fleet to do."""

    PAUSE = "pause"  # `Pause`
    UNPAUSE = "unpause"
    SUSPEND = "suspend"  # `Suspend`
    RESUME = "resume"
    UPDATE_WEIGHTS = "update_weights"  # `UpdateWeights`
    SET_EPOCH = "set_epoch"  # `SetEpoch`
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    RESET = "reset"  # end every request as aborted, forget every prefix
    SHUTDOWN = "shutdown"  # end every request as aborted; the engine processes exit


class PauseMode(StrEnum):
    """What becomes of the requests that are there."""

    KEEP = "keep"  # they stay, and go on at UNPAUSE
    WAIT = "wait"  # they run to their ends first; what comes meanwhile waits for UNPAUSE
    ABORT = "abort"  # they end now, with what they generated


class KVMode(StrEnum):
    """What becomes of the KV cache in a suspension."""

    PERSIST = "persist"  # it stays in memory
    OFFLOAD = "offload"  # what is in use goes to a file, and comes back
    DISCARD = "discard"  # it is forgotten; requests are computed again


class WeightsMode(StrEnum):
    """What becomes of the weights in a suspension."""

    KEEP = "keep"
    OFFLOAD = "offload"  # they go to a file, and come back


class WeightSource(StrEnum):
    """Where new weights come from."""

    DIRECTORY = "directory"  # a Hugging Face directory that stays: who joins later loads it, too
    SHARED_MEMORY = "shared_memory"  # a safetensors file, gone when the command is answered
    GROUP = "group"  # broadcast by a trainer in a process group


class InFlightKV(StrEnum):
    """What becomes of the keys and values of requests that are in flight during an update."""

    KEEP = "keep"  # they stay: computed by old weights, read by new ones
    RECOMPUTE = "recompute"  # they are computed again by the new weights


class UpdatePhase(StrEnum):
    """What an engine is told to do of an update. Clients leave it out."""

    PREPARE = "prepare"  # get the weights, check them, build the model beside the one that serves
    COMMIT = "commit"  # between two steps, serve the one that was prepared
    ROLLBACK = "rollback"  # drop it
    APPLY = "apply"  # prepare and commit: for an engine that joins with older weights


class TensorInfo(Struct, frozen=True, array_like=True):
    """One tensor that is broadcast."""

    name: str
    """Of the parameter, as Hugging Face has it."""
    dtype: str
    """As torch has it, such as "bfloat16"."""
    shape: tuple[int, ...]


class WeightGroup(Struct, frozen=True, kw_only=True):
    """A gloo process group: the trainer is rank 0, the engine `ranks[i]` is rank i + 1."""

    host: str
    port: int
    """Of the trainer's TCPStore."""
    ranks: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    """In the order in which they are broadcast."""
    timeout_s: float = 300.0


class Pause(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: PauseMode = PauseMode.KEEP


class Suspend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kv: KVMode = KVMode.PERSIST
    weights: WeightsMode = WeightsMode.KEEP


class UpdateWeights(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    source: WeightSource
    path: str = ""
    """A directory or a .safetensors file that every engine can read."""
    group: WeightGroup | None = None
    partial: bool = False
    """Some parameters are new, the others stay; else all must be there."""
    in_flight: InFlightKV = InFlightKV.KEEP
    epoch: int | None = None
    """Of the new weights, higher than the fleet's. None: the fleet's + 1."""
    phase: UpdatePhase = UpdatePhase.PREPARE
    base_epoch: int = 0
    """Of the weights that a partial update changes."""


class SetEpoch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    epoch: int
