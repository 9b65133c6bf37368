"""What an engine is built from besides a model: each part can be replaced by a subclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from homing.engine.block_pool import BlockPool
from homing.engine.kv_cache import KVCache
from homing.engine.models import Model
from homing.engine.runner import Runner
from homing.engine.sampling import Sampler
from homing.engine.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A class for each part that depends on the model or its cache, and the sampler itself.

    The engine calls the classes, or anything callable, as the annotations say.
    """

    block_pool: Callable[[int], BlockPool] = BlockPool
    scheduler: Callable[[BlockPool, int, SchedulerLimits], Scheduler] = Scheduler
    runner: Callable[[Model, KVCache, int, Sampler], Runner] = Runner
    sampler: Sampler = field(default_factory=Sampler)
