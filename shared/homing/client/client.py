"""Client: submits requests to the fleet and sees each through to its one end.

What a dead engine was working on is submitted again, prompt and received tokens, as the next
attempt. After a rejoin everything unfinished is. Every request that `submit` returned ends once,
with tokens or an error, also when nothing answers any more: then after `patience_s`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from itertools import count
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from homing.client.checks import check_request, check_urgency
from homing.client.fleet import FleetView
from homing.client.generation import Generation, external_digest
from homing.client.refusals import MAY_PASS, error_of
from homing.client.session import Session
from homing.client.submitter import Submitter
from homing.client.suspects import Suspects
from homing.errors import (
    HomingError,
    Overloaded,
    RequestLost,
    Unavailable,
)
from homing.params import SamplingParams
from homing.transport import may_lend, read_keys
from homing.wire import (
    Abort,
    Command,
    Delta,
    FinishReason,
    KVMode,
    Lost,
    LostReason,
    ModelCard,
    Output,
    Pause,
    PauseMode,
    SetEpoch,
    Suspend,
    UpdateWeights,
    WeightsMode,
    WeightSource,
    read_payload,
    request_name,
)

log = logging.getLogger(__name__)

DEADLINE_GRACE_S = 2.0
"""How long after a deadline an engine may take to say that it passed."""


class Client:
    """Use from one event loop: `start`, then `submit` and the rest, then `close`."""

    def __init__(
        self,
        address: str,
        *,
        max_engine_deaths: int = 2,
        max_inflight: int = 4096,
        patience_s: float = 30.0,
        counters: Callable[[], Mapping[str, float]] = dict,
        keys: Path | None = None,
    ) -> None:
        """
        max_engine_deaths: a request that so many engines died on fails with `RequestLost`: it may
        be what kills them. Engines that leave on purpose, and coordinators, do not count.
        max_inflight: unfinished requests at most; beyond it `submit` raises `Overloaded`.
        patience_s: how long unfinished requests wait for a coordinator that went away, and then
        for its first engine, before they fail with `Unavailable`.
        counters: what this process counted, by name; the coordinator adds it up over all processes.
        keys: a client's key file, or its directory, for a coordinator that asks for keys.
        """
        self._max_engine_deaths = max_engine_deaths
        self._max_inflight = max_inflight
        self._patience_s = patience_s
        self._generations: dict[int, Generation] = {}  # request id -> unfinished request
        self._request_ids = count(1)
        self._homeless: dict[int, Generation] = {}  # those that wait for a rank to go on with them
        self._suspects = Suspects(self._resubmit)
        self._session = Session(
            address,
            on_request_message=self._on_request_message,
            on_fleet=self._on_fleet,
            on_rejoined=self._on_rejoined,
            on_failure=self._fail_all,
            counters=counters,
            keys=read_keys(keys, "client") if keys else None,
        )
        self._submitter = Submitter(self._session, self._wait_for_rank, lends=may_lend(address))

    @property
    def fleet(self) -> FleetView:
        return self._session.fleet

    async def start(self, timeout_s: float = 30.0) -> None:
        """Join the coordinator. Raises `Unavailable` when none answers in time, `ConfigError`
        when it refuses (another protocol version)."""
        await self._session.start(timeout_s)

    async def wait_for_model(self, timeout_s: float = 300.0) -> ModelCard:
        """The model's card, as soon as an engine has joined; `Unavailable` after `timeout_s`."""
        await self._session.until(
            lambda: self.fleet.card is not None, timeout_s, "no engine has joined"
        )
        assert self.fleet.card is not None
        return self.fleet.card

    async def wait_for_ranks(self, num_ranks: int, timeout_s: float = 300.0) -> None:
        """Until so many engine ranks serve; `Unavailable` after `timeout_s`."""
        missing = f"not all of {num_ranks} engine ranks serve"
        await self._session.until(lambda: self.fleet.live_ranks >= num_ranks, timeout_s, missing)

    async def close(self) -> None:
        """Leave: unfinished requests are aborted and fail with `Unavailable`. Idempotent."""
        self._submitter.close()
        self._session.close()
        self._fail_all(Unavailable("the client was closed: its process is shutting down"))

    def submit(
        self,
        prompt_tokens: bytes,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        external_id: str | None = None,
        num_resumed_tokens: int = 0,
        priority: int = 0,
        timeout_s: float | None = None,
        tenant: int | None = None,
    ) -> Generation:
        """Start a generation from `prompt_tokens` (little-endian uint32).

        num_resumed_tokens: how many of the last prompt tokens an earlier generation had brought
        when it was aborted. They count as generated, in `num_tokens_to_generate` too; with the same
        prompt and `Generation.seed` the tokens go on as they would have.
        external_id: a name, not necessarily unique, for any client's `abort_matching`.
        priority: lower is sooner; engines let such requests run in place of others.
        timeout_s: after which it ends as aborted, wherever it is, with what there is.
        tenant: of those that share this client, whose it is, a number below 2^63: while places are
        short each tenant has a fair share, whichever clients submit for it.

        Raises `InvalidRequest`, `ContextLengthExceeded`, `Overloaded` or `Unavailable` without
        having started anything. What goes wrong later is raised by iterating the result.
        """
        card = self._require_service()
        max_new_tokens = check_request(
            prompt_tokens, params, cache_salt, card, num_resumed_tokens=num_resumed_tokens
        )
        check_urgency(priority, timeout_s)
        if len(self._generations) >= self._max_inflight:
            raise Overloaded(f"{self._max_inflight} requests are unfinished; that is the limit")
        if params.seed is None:
            # Drawn here, so that a resubmitted request goes on with the noise it began with.
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        generation = Generation(
            next(self._request_ids),
            prompt_tokens,
            params,
            cache_salt=cache_salt,
            external_digest=None if external_id is None else external_digest(external_id),
            num_resumed_tokens=num_resumed_tokens,
            max_new_tokens=max_new_tokens,
            priority=priority,
            deadline=None if timeout_s is None else self._session.now() + timeout_s,
            tenant=tenant,
            send_abort=self._send_abort,
            forget=self._forget,
        )
        self._generations[generation.request_id] = generation
        if self._session.awaits_ranks:  # as those wait that were there before
            self._wait_for_rank(generation)
        else:
            self._submitter.send(generation)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("submitted", extra=self._names(generation) | {"external_id": external_id})
        return generation

    # Commands to the whole fleet

    async def control(
        self,
        command: Command,
        arguments: Struct | dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> dict[int, dict[str, Any]]:
        """Carry out a command on every rank; returns each rank's results. Repeats are harmless.

        Raises `NotAllowed` when the fleet's state forbids it, `CommandFailed` when a rank could not
        carry it out, `Unavailable` when no answer comes in time: the command goes on then.
        """
        await self._submitter.flush()
        return await self._session.control(command, arguments, timeout_s)

    async def pause(
        self, mode: PauseMode | str = PauseMode.KEEP, *, timeout_s: float = 60.0
    ) -> dict[int, dict[str, Any]]:
        """Stop stepping. Requests that are there stay ("keep"), run to their ends first ("wait") or
        end now ("abort"); new ones queue."""
        return await self.control(Command.PAUSE, Pause(mode=PauseMode(mode)), timeout_s=timeout_s)

    async def unpause(self) -> dict[int, dict[str, Any]]:
        return await self.control(Command.UNPAUSE)

    async def suspend(
        self,
        kv: KVMode | str = KVMode.PERSIST,
        weights: WeightsMode | str = WeightsMode.KEEP,
        *,
        timeout_s: float = 60.0,
    ) -> dict[int, dict[str, Any]]:
        """Give memory of a paused fleet back to its system; "offload" needs room for files."""
        suspend = Suspend(kv=KVMode(kv), weights=WeightsMode(weights))
        return await self.control(Command.SUSPEND, suspend, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float = 60.0) -> dict[int, dict[str, Any]]:
        """Get the memory back. The fleet is paused then."""
        return await self.control(Command.RESUME, timeout_s=timeout_s)

    async def update_weights(
        self, update: UpdateWeights | str | PathLike[str], *, timeout_s: float = 900.0
    ) -> dict[int, dict[str, Any]]:
        """Give every rank the same new weights between two of its steps, or none of them.

        update: what to take, or the path of a Hugging Face directory that every rank can read.
        The results tell what it took. On `CommandFailed` the old weights serve on, everywhere.
        """
        if not isinstance(update, UpdateWeights):
            update = UpdateWeights(source=WeightSource.DIRECTORY, path=fspath(update))
        return await self.control(Command.UPDATE_WEIGHTS, update, timeout_s=timeout_s)

    async def set_epoch(self, epoch: int) -> dict[int, dict[str, Any]]:
        """Count the weights that are there as those of `epoch`; no prefix from before is found."""
        return await self.control(Command.SET_EPOCH, SetEpoch(epoch=epoch))

    async def reset_prefix_cache(self) -> dict[int, dict[str, Any]]:
        return await self.control(Command.RESET_PREFIX_CACHE)

    async def reset(self) -> dict[int, dict[str, Any]]:
        """End every request as aborted, whichever client's it is, and forget every prefix."""
        return await self.control(Command.RESET)

    async def shutdown(self) -> dict[int, dict[str, Any]]:
        """End every request as aborted, and the engine processes. A supervisor may start others."""
        return await self.control(Command.SHUTDOWN)

    async def abort_matching(self, external_id: str | None, *, timeout_s: float = 5.0) -> int:
        """Abort the requests of this name, whichever client submitted them; None: all of the fleet.

        Returns how many there were. Each ends as `Generation.abort` would end it. Raises
        `Unavailable`.
        """
        await self._submitter.flush()
        digest = None if external_id is None else external_digest(external_id)
        return await self._session.abort_matching(digest, timeout_s)

    async def drain(self, rank: int, *, timeout_s: float = 30.0) -> None:
        """Let a rank finish what it has, for so long, and leave. The rest goes on elsewhere. Raises
        `NotAllowed` if there is no such rank or it was lost, `Unavailable`."""
        await self._session.drain(rank, timeout_s)

    async def stats(self, *, timeout_s: float = 5.0) -> dict[str, Any]:
        """The coordinator's snapshot of the fleet; docs/wire.md lists its keys."""
        return await self._session.stats(timeout_s)

    # What comes in

    def _on_request_message(self, message: Output | Lost) -> None:
        if isinstance(message, Lost):
            generation = self._generations.get(message.request_id)
            if generation is not None and generation.attempt == message.attempt:
                self._on_lost(generation, message)
        elif message.deltas is not None:
            for delta in read_payload(message.deltas, list[Delta]):
                if generation := self._generations.get(delta.request_id):
                    self._on_delta(generation, delta)

    def _on_delta(self, generation: Generation, delta: Delta) -> None:
        if delta.attempt != generation.attempt:
            return
        finish = delta.finish
        if finish is not None and finish.reason is FinishReason.UNREAD and generation.loan:
            log.info("prompts are sent from now on", extra={"cause": finish.detail})
            self._submitter.lends = False
            self._resubmit(generation)
        else:
            generation.receive(delta)
            self._suspects.cleared(generation, self._session.now())

    def _on_lost(self, generation: Generation, lost: Lost) -> None:
        if generation.abort_asked or lost.reason is LostReason.ABORTED:
            generation.end_aborted()
        elif lost.reason is LostReason.RANK_LOST:
            deaths = generation.engine_deaths = generation.engine_deaths + 1
            if deaths >= self._max_engine_deaths:
                generation.fail(RequestLost(f"{deaths} engines died while they worked on it"))
            else:  # after this burst of losses: all suspects of one death are known then
                self._suspects.add(generation)
                self._session.call_soon(lambda: self._suspects.release(self._session.now()))
        elif lost.reason is LostReason.RANK_LEFT:
            self._resubmit(generation)
        elif lost.reason in MAY_PASS and (generation.attempt or self._session.awaits_ranks):
            # It had a rank, and another may come; or it was on its way when the coordinator was
            # met anew, and the ranks will come.
            self._wait_for_rank(generation)
        else:
            generation.fail(error_of(lost))

    def _on_rejoined(self) -> None:
        self._suspects.forget_all()
        self._homeless.clear()
        for generation in self._generations.values():  # the oldest first
            self._wait_for_rank(generation)
        self._on_fleet()

    def _wait_for_rank(self, generation: Generation) -> None:
        generation.homeless_since = generation.homeless_since or self._session.now()
        self._submitter.withdraw(generation)
        self._homeless[generation.request_id] = generation

    def _on_fleet(self) -> None:
        """House the homeless when an engine is there; give up on what waited too long."""
        self._end_overdue()
        self._suspects.release(self._session.now())
        latest = self._session.now() - self._patience_s
        for generation in list(self._homeless.values()):
            if generation.homeless_since and generation.homeless_since < latest:
                generation.fail(Unavailable("no engine has come to go on with the request"))
        serves = self._session.welcomed and self.fleet.connected and self.fleet.live_ranks
        if self._homeless and serves:
            for generation in list(self._homeless.values()):
                self._resubmit(generation)
        elif self._session.silence_s > self._patience_s:
            self._fail_all(Unavailable("the coordinator does not answer"))

    def _end_overdue(self) -> None:
        """End what its engine should have ended: it hangs, or there is none."""
        latest = self._session.now() - DEADLINE_GRACE_S
        for generation in list(self._generations.values()):
            if generation.deadline is not None and generation.deadline < latest:
                self._send_abort(generation)
                generation.end_aborted("its deadline passed")

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation.request_id, None)
        self._submitter.withdraw(generation)
        self._homeless.pop(generation.request_id, None)
        self._suspects.cleared(generation, self._session.now())

    def _fail_all(self, error: HomingError) -> None:
        for generation in list(self._generations.values()):
            generation.fail(error)

    # What goes out

    def _require_service(self) -> ModelCard:
        if not self.fleet.connected:
            raise Unavailable("the coordinator does not answer")
        is_served = self.fleet.live_ranks or self._session.awaits_ranks
        if self.fleet.card is None or not is_served:
            raise Unavailable("no engine is serving")
        return self.fleet.card

    def _resubmit(self, generation: Generation) -> None:
        self._homeless.pop(generation.request_id, None)
        if generation.abort_asked:
            generation.end_aborted()
            return
        generation.attempt += 1
        self._submitter.send(generation)
        log.info(
            "submitted again",
            extra=self._names(generation) | {"received_tokens": generation.num_resumed_tokens},
        )

    def _names(self, generation: Generation) -> dict[str, Any]:
        ids = self._session.uid, generation.request_id
        return {"request": request_name(*ids), "attempt": generation.attempt}

    def _send_abort(self, generation: Generation) -> None:
        if self._submitter.withdraw(generation):
            generation.end_aborted()
            return
        self._session.send(Abort(self._session.uid, generation.request_id, generation.attempt))
        if generation.request_id in self._homeless:
            generation.end_aborted()
