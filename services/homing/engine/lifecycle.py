"""What may be done to an engine as a whole: pause it, suspend it, give it other weights.

    running --pause--> paused --suspend--> suspended
            <-unpause--       <--resume---

Requests survive all of it, but for those that `pause(ABORT)` or `reset` end. Everything here takes
effect between two steps, as it must be called by the engine's own thread; only `stage` may run on
another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from homing.engine.block_pool import BlockPool
from homing.engine.memory import trim
from homing.engine.runner import Runner
from homing.engine.scheduler import Scheduler
from homing.engine.suspension import Suspension
from homing.engine.weight_update.staging import StagedWeights, stage
from homing.errors import NotAllowed
from homing.wire import FleetState, InFlightKV, KVMode, PauseMode, WeightsMode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Released:
    """Memory that a suspension gave back to the system."""

    kv_bytes: int
    weight_bytes: int


class Lifecycle:
    def __init__(
        self,
        scheduler: Scheduler,
        block_pool: BlockPool,
        runner: Runner,
        abort_all: Callable[[], None],
    ) -> None:
        self.epoch = 0
        """Of the weights. Counts their updates, and only grows."""
        self._scheduler = scheduler
        self._block_pool = block_pool
        self._runner = runner
        self._abort_all = abort_all
        self._suspension = Suspension()

    @property
    def state(self) -> FleetState:
        if self._suspension.is_active:
            return FleetState.SUSPENDED
        return FleetState.PAUSED if self._scheduler.paused else FleetState.RUNNING

    # Pausing

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Run no request until `unpause`, which what comes meanwhile waits for, too.

        WAIT: what is there runs to its end first; `is_draining` until then.
        """
        if mode is PauseMode.ABORT:
            self._abort_all()
        if mode is PauseMode.WAIT and not self._scheduler.paused:
            self._scheduler.close()
            self.after_step()
        else:
            self._scheduler.open()
            self._scheduler.paused = True

    @property
    def is_draining(self) -> bool:
        """A pause waits for requests to end."""
        return self._scheduler.is_closed

    def after_step(self) -> None:
        """The pause that waited for requests to end begins, if they have."""
        if self._scheduler.is_closed and not self._scheduler.num_admissible:
            self.pause()

    def unpause(self) -> None:
        if self._suspension.is_active:
            raise NotAllowed("the engine is suspended: resume it before you unpause it")
        self._scheduler.open()
        self._scheduler.paused = False

    # Giving memory back

    def suspend(
        self, kv: KVMode = KVMode.PERSIST, weights: WeightsMode = WeightsMode.KEEP
    ) -> Released:
        """Give memory back to the system; called again, more of it. Raises NotAllowed while the
        engine runs, and OSError, with nothing given back, when offloaded memory has no room."""
        if not self._scheduler.paused:
            raise NotAllowed("the engine is running: pause it before you suspend it")
        keeps_all = kv is KVMode.PERSIST and weights is WeightsMode.KEEP
        if self._runner.model.shape.device.type != "cpu" and not keeps_all:
            raise NotAllowed("a GPU's memory cannot be given back: suspend with all of it kept")
        weight_bytes = kv_bytes = 0
        if weights is WeightsMode.OFFLOAD:
            weight_bytes = self._suspension.offload_weights(self._runner.model)
        if kv is KVMode.OFFLOAD:
            blocks = self._block_pool.blocks_in_use
            kv_bytes = self._suspension.offload_kv(self._runner.cache, blocks)
        elif kv is KVMode.DISCARD:
            self._scheduler.preempt_all()
            self._scheduler.clear_prefix_cache()
            kv_bytes = self._suspension.discard_kv(self._runner.cache)
        self._suspension.is_active = True
        return Released(kv_bytes, weight_bytes)

    def resume(self) -> None:
        """Get all memory back. The engine is paused then."""
        if not self._scheduler.paused:
            raise NotAllowed("the engine is running: there is nothing to resume")
        self._suspension.end(self._runner.cache)

    # Forgetting

    def reset_prefix_cache(self) -> int:
        """Forget every prefix. Returns how many blocks were in the index."""
        return self._scheduler.clear_prefix_cache()

    def reset(self) -> int:
        """End every request as aborted, and forget every prefix; in any state."""
        self._abort_all()
        return self.reset_prefix_cache()

    # Other weights

    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        partial: bool = False,
        owned: bool = False,
        in_flight: InFlightKV = InFlightKV.KEEP,
        epoch: int | None = None,
    ) -> StagedWeights:
        """`stage` and `swap` in one. Raises what `stage` does; then the old weights serve on."""
        staged = self.stage(tensors, partial=partial, owned=owned)
        self.swap(staged, in_flight=in_flight, epoch=epoch)
        return staged

    def stage(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        partial: bool = False,
        owned: bool = False,
    ) -> StagedWeights:
        """A model with these parameters, by their Hugging Face names, beside the one that serves.
        owned: nobody changes the tensors meanwhile.

        May run on another thread, but not during another `stage`, `suspend` or `resume`. Raises
        InvalidRequest for names, shapes, dtypes and values that cannot be right.
        """
        if partial and self._suspension.has_weights:
            raise NotAllowed("the weights are offloaded: resume before you update some of them")
        return stage(self._runner.model, tensors, partial=partial, owned=owned)

    def swap(
        self,
        staged: StagedWeights,
        *,
        in_flight: InFlightKV = InFlightKV.KEEP,
        epoch: int | None = None,
    ) -> None:
        """Serve the staged model from the next step on, under `epoch` (None: the next one).

        in_flight: requests that have keys and values of the old weights keep them, and enter no
        more blocks into the prefix cache, or compute them again.
        """
        self._runner.model = staged.model
        self._suspension.forget_weights()
        trim()
        self.begin_epoch(self.epoch + 1 if epoch is None else epoch, in_flight)

    def begin_epoch(self, epoch: int, in_flight: InFlightKV = InFlightKV.KEEP) -> None:
        """Tokens are of `epoch` from now on, and no prefix from before is found again. Repeating
        the epoch does nothing; an earlier one raises NotAllowed."""
        if epoch < self.epoch:
            raise NotAllowed(f"epochs only increase: the engine's is {self.epoch}, not {epoch}")
        if epoch == self.epoch:
            return
        self.epoch = epoch
        if in_flight is InFlightKV.RECOMPUTE:
            self._scheduler.preempt_all()
        self._scheduler.begin_epoch(epoch)
        log.info("a new epoch", extra={"epoch": epoch})
