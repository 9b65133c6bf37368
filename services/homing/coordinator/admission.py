"""Admission: which requests are let in, and which ranks they may go to.

Puts together what `health` says of each rank, which ranks are leaving, the bounds on what a rank
may have, and the fair share of each client or tenant. How to choose among the ranks that are left
is `router`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.fairness import FairShares
from homing.coordinator.health import FleetHealth, RankSigns
from homing.coordinator.records import Engine, Holder, PeerState, RankId
from homing.coordinator.router import RankRouter
from homing.coordinator.step_model import StepModel, StepSums

log = logging.getLogger(__name__)


class Admission:
    def __init__(self, config: CoordinatorConfig, router: RankRouter) -> None:
        self.shares = FairShares()
        self.is_stale = False
        """Something happened since `weigh` that may change what a rank may have."""
        self._config = config
        self._router = router
        self._health = FleetHealth(
            max_requests=config.max_queued_requests, timeout_s=config.heartbeat_timeout_s
        )
        self.failed_ranks = self._health.breakers.keys()
        """Those that ever failed."""
        self._steps = StepModel()

    # Ranks

    def failed(self, engine: Engine, now: float) -> None:
        """Its session ended, and not because it wished."""
        self._health.fail(engine.rank, now)
        self.is_stale = True

    def served(self, engine: Engine) -> None:
        """One that ever failed finished a request."""
        if self._health.serve(engine.rank):
            log.info("serves again", extra={"peer": str(engine)})
            self.is_stale = True

    def took_steps(self, engine: Engine, sums: StepSums) -> None:
        """What its steps held and took since its process started."""
        if engine.steps is not None:
            self._steps.learn(engine.slot, sums.since(engine.steps))
        engine.steps = sums

    def forget(self, engine: Engine) -> None:
        self._steps.forget(engine.slot)

    def weigh(self, engines: Iterable[Engine], now: float) -> None:
        """Set how many requests each live rank may have."""
        self.is_stale = False
        live = {engine.rank: engine for engine in engines if engine.state is PeerState.LIVE}
        signs = {
            rank: RankSigns(
                silent_s=now - engine.last_seen,
                slowness=self._steps.factor(engine.slot),
                leaving=engine.leaving,
            )
            for rank, engine in live.items()
        }
        num_requests = sum(len(engine.requests) for engine in live.values())
        limits = self._health.limits(signs, num_requests / max(1, len(live)), now)
        for rank, limit in limits.items():
            self._set_limit(live[rank], limit)

    def _set_limit(self, engine: Engine, limit: int) -> None:
        whole = self._config.max_queued_requests
        before = whole if engine.max_requests is None else engine.max_requests
        if limit == before:
            return
        if whole in (limit, before) and min(limit, before) <= 1:  # not each wink of a slow one
            circuit = self._health.circuit(engine.rank).value
            extra = {"peer": str(engine), "max_requests": limit, "circuit": circuit}
            log.info("takes less" if limit < whole else "takes its full load", extra=extra)
        engine.max_requests = limit
        self._router.limit(engine.slot, limit)

    def circuit(self, rank: RankId) -> str:
        """For people: whether the rank is trusted."""
        return self._health.circuit(rank).value

    # Requests

    def why_not(self, holder: Holder, now: float) -> str | None:
        """Why this client or tenant may have no further request now; None if it may."""
        loads = self._router.loads
        if not loads.available:
            self.shares.refused(holder, now)
            config = self._config
            return (
                f"every rank has its limit of {config.max_queued_requests} requests or "
                f"{config.max_queued_tokens} prompt tokens"
            )
        if now < self.shares.contended_until:
            share = self.shares.share(loads.num_places, now)
            if self.shares.num_held(holder) >= share:
                who = "tenant" if isinstance(holder, int) else "client"
                return f"the fleet is full and this {who} has its share of {share} requests"
        return None
