"""Requests: from a client's Submit to the one end that each attempt has.

    Submit --> dispatched to a rank at once, or refused at once (engines queue, this does not)
    then it ends by the engine's word (Output), or with the engine (Lost), or because nobody
    waits for it any more: its client is gone, or submitted a higher attempt (Abort to the engine)

The rank's load is charged at dispatch and given back at the end, whichever it is.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from typing_extensions import Buffer

from homing.coordinator.admission import Admission
from homing.coordinator.events import Forward, GarbageSubmit, Outbox, Send
from homing.coordinator.history import History
from homing.coordinator.loads import Slot
from homing.coordinator.records import Client, Engine, Holder, Request, RequestState
from homing.coordinator.router import RankRouter
from homing.coordinator.totals import Totals
from homing.prefix import DIGEST_BYTES, TOKEN_BYTES, num_routing_points
from homing.transport import MAX_LOAN_BYTES
from homing.wire import (
    FAILED,
    Abort,
    FinishedRequest,
    FinishReason,
    Lost,
    LostReason,
    Submit,
    request_name,
)
from homing.wire.codec import NIL
from homing.wire.messages import clip

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""What a client is told to wait for a rank to come."""

TOKEN_BITS = 32
"""A number of tokens with more bits, or below 0, is an engine's mistake, and is not let spoil the
sums: `number >> TOKEN_BITS` is not 0 then."""

WHOLE = frozenset((FinishReason.STOP, FinishReason.LENGTH))
"""Ends that say how long an answer is."""


class RequestEvent(StrEnum):
    DISPATCHED = "dispatched"
    ABORT_ASKED = "abort asked"
    FINISHED = "finished"
    ENGINE_GONE = "engine gone"
    CLIENT_GONE = "client gone"
    SUPERSEDED = "superseded"


# To read an attribute of an enum takes as long as a call; these two are read for each request.
DISPATCHED, FINISHED = RequestEvent.DISPATCHED, RequestEvent.FINISHED

_S, _E = RequestState, RequestEvent
TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_S.NEW, _E.DISPATCHED): _S.RUNNING,
    (_S.RUNNING, _E.ABORT_ASKED): _S.ABORTING,
    (_S.ABORTING, _E.ABORT_ASKED): _S.ABORTING,  # a repeat: told the engine already
    (_S.RUNNING, _E.FINISHED): _S.ENDED,
    (_S.RUNNING, _E.ENGINE_GONE): _S.ENDED,
    (_S.RUNNING, _E.CLIENT_GONE): _S.ENDED,
    (_S.RUNNING, _E.SUPERSEDED): _S.ENDED,
    (_S.ABORTING, _E.FINISHED): _S.ENDED,
    (_S.ABORTING, _E.ENGINE_GONE): _S.ENDED,
    (_S.ABORTING, _E.CLIENT_GONE): _S.ENDED,
    (_S.ABORTING, _E.SUPERSEDED): _S.ENDED,
}

assert Submit.__struct_fields__[-1] == "block_hashes", "forwarded without its last frame"


class Refusal(NamedTuple):
    reason: LostReason
    why: str
    retry_after_s: float = 0.0


class Requests:
    def __init__(
        self,
        router: RankRouter,
        admission: Admission,
        outbox: Outbox,
        history: History,
        totals: Totals,
    ) -> None:
        self._router = router
        self._admission = admission
        self._shares = admission.shares
        self._loads = router.loads
        self._reads_prefixes = router.reads_prefixes
        self._outbox = outbox
        self._history = history
        self._totals = totals
        self._engine_of_slot: dict[Slot, Engine] = {}
        self._logs_requests = log.isEnabledFor(logging.DEBUG)  # asked once: it is asked often
        self._of_digest: defaultdict[int, set[Request]] = defaultdict(set)  # external digest
        self.block_size: int | None = None
        """Of the fleet's model; None before an engine joined."""

    def submit(self, client: Client, submit: Submit, frames: Sequence[Buffer], now: float) -> None:
        """Dispatch or refuse. `frames` are the message as it came."""
        request_id, attempt = submit.request_id, submit.attempt
        if self._is_repeat(client, request_id, attempt):
            return
        holder = client if submit.tenant is None else submit.tenant
        if refusal := self._refusal(client, holder, submit, now):
            self._refuse(client, submit, refusal)
            return
        hashes, digest = submit.block_hashes, submit.external_digest
        if hashes is not None and not isinstance(hashes, bytes):  # it nearly always is
            hashes = bytes(hashes)
        assert self.block_size is not None
        decision = self._router.route(hashes, submit.num_prompt_tokens, self.block_size, now)
        engine = self._engine_of_slot[decision.slot]
        request = Request(client, engine, request_id, attempt, decision, holder, digest)
        self._history.move(TRANSITIONS, request, DISPATCHED)
        client.requests[request_id] = request
        engine.requests.add(request)
        self._shares.took(holder)
        if digest is not None:
            self._of_digest[digest].add(request)
        self._totals.dispatched_to_rank[engine.rank] += 1
        forwarded = [*frames]  # as it came, but for the hashes, its last frame
        forwarded[-1] = NIL
        self._outbox.append(Forward(engine.identity, forwarded))
        if self._logs_requests:
            log.debug("dispatched", extra=_names(request) | {"rank": engine.rank})

    def submit_unread(self, client: Client, submit: GarbageSubmit) -> None:
        """Refuse a submission of which only the ids could be read."""
        if not self._is_repeat(client, submit.request_id, submit.attempt):
            self._refuse(client, submit, _invalid(submit.reason))

    def abort(self, client: Client, abort: Abort, frames: Sequence[Buffer]) -> None:
        """Tell the engine; its last Output tells the client.

        What is not alive here has been answered: its end was sent before this. The client is told
        so again, because it may ask for something that never was, and must not wait for ever.
        """
        request = client.requests.get(abort.request_id)
        if request is None or request.attempt < abort.attempt:
            ids = abort.request_id, abort.attempt
            never_was = _lost(ids, LostReason.INVALID, "no such request")
            self._outbox.append(Send(client.identity, never_was))
        elif request.attempt == abort.attempt:
            if request.state is RequestState.RUNNING:
                self._outbox.append(Forward(request.engine.identity, frames))
            self._history.move(TRANSITIONS, request, RequestEvent.ABORT_ASKED)

    def abort_matching(self, external_digest: int | None) -> int:
        """Abort the requests with this digest, whichever client's; None: all. Says how many."""
        if external_digest is None:
            engines = self._engine_of_slot.values()
            matching = [request for engine in engines for request in engine.requests]
        else:
            matching = list(self._of_digest.get(external_digest, ()))
        for request in matching:
            if request.state is RequestState.RUNNING:
                self.send_abort(request)
            self._history.move(TRANSITIONS, request, RequestEvent.ABORT_ASKED)
        return len(matching)

    def finish(
        self, engine: Engine, client: Client | None, ends: list[FinishedRequest], now: float
    ) -> None:
        """An engine ended these requests of one client."""
        for end in ends:
            request = client.requests.get(end.request_id) if client else None
            if not request or request.engine is not engine or request.attempt != end.attempt:
                self._totals.stale_finishes += 1
                continue
            self._end(request, FINISHED, end, now)
            self._totals.finished[end.reason] += 1
            if end.reason not in FAILED:
                self._count_answer(request.decision.num_cached_tokens, end)
                if engine.rank in self._admission.failed_ranks:
                    self._admission.served(engine)

    def _count_answer(self, predicted: int, end: FinishedRequest) -> None:
        """`predicted`: prompt tokens that its engine was believed to hold."""
        totals, actual, generated = self._totals, end.num_cached_tokens, end.num_generated_tokens
        if actual >> TOKEN_BITS:
            actual = 0
        totals.predicted_cached_tokens += predicted
        totals.actual_cached_tokens += actual
        totals.mispredicted_cached_tokens += abs(predicted - actual)
        if not generated >> TOKEN_BITS:
            totals.generated_tokens += generated

    def open_engine(self, engine: Engine) -> None:
        """Let this engine be chosen."""
        self._engine_of_slot[engine.slot] = engine
        self._router.open(engine.slot)

    def of(self, peer: Client | Engine) -> list[Request]:
        """Those of a client, or at an engine."""
        return list(peer.requests.values() if isinstance(peer, Client) else peer.requests)

    def lose_engine(self, engine: Engine, why: str, *, died: bool) -> None:
        """End all its requests, telling their clients, and that one may be what it died of."""
        reason = LostReason.RANK_LOST if died else LostReason.RANK_LEFT
        for request in self.of(engine):
            aborting = request.state is RequestState.ABORTING
            self._end(request, RequestEvent.ENGINE_GONE)
            self._totals.lost_requests += 1
            self.send_lost(request, why, LostReason.ABORTED if aborting else reason)
        if self._engine_of_slot.pop(engine.slot, None):
            self._router.close(engine.slot)

    def lose_client(self, client: Client) -> None:
        """End all its requests, telling their engines."""
        self._shares.forget(client)
        for request in self.of(client):
            self._end(request, RequestEvent.CLIENT_GONE)
            self._totals.orphaned_requests += 1
            self.send_abort(request)

    def _is_repeat(self, client: Client, request_id: int, attempt: int) -> bool:
        """Whether this attempt, or a later one, is alive. An earlier one that is gives way."""
        request = client.requests.get(request_id)
        if request is not None:
            if attempt <= request.attempt:
                self._totals.duplicates += 1
                return True
            self._end(request, RequestEvent.SUPERSEDED)
            self._totals.superseded += 1
            self.send_abort(request)
        self._totals.submitted += 1
        if attempt:
            self._totals.resubmissions += 1
        return False

    def _refusal(
        self, client: Client, holder: Holder, submit: Submit, now: float
    ) -> Refusal | None:
        """Why a submission cannot be dispatched, if it cannot. Reads no prompt."""
        if submit.client != client.uid:
            return _invalid(f"client {submit.client} is not the sender's uid")
        num_tokens = submit.num_prompt_tokens
        num_bytes = num_tokens * TOKEN_BYTES
        prompt: Any = submit.prompt  # buffers whose length is in bytes
        hashes: Any = submit.block_hashes
        if submit.sampling is None or (prompt is None) is (submit.lent_at is None):
            return _invalid(
                "the prompt or the sampling frame is absent, or the prompt is both sent and lent"
            )
        num_there = len(prompt) if prompt is not None else min(num_bytes, MAX_LOAN_BYTES)
        if num_there != num_bytes or not num_tokens:
            return _invalid(f"{num_tokens} prompt tokens in {num_there} bytes")
        if submit.num_resumed_tokens > num_tokens:
            return _invalid(f"{submit.num_resumed_tokens} of {num_tokens} tokens are resumed")
        if hashes is not None and self._reads_prefixes and self.block_size:
            num_points = num_routing_points(num_tokens // self.block_size)
            if len(hashes) != num_points * DIGEST_BYTES:
                return _invalid(f"{len(hashes)} bytes of hashes for {num_points} routing points")
        if not self._loads.num_open or self.block_size is None:
            return Refusal(LostReason.NO_RANK, "no engine is serving", RETRY_AFTER_S)
        if why := self._admission.why_not(holder, now):
            return Refusal(LostReason.OVERLOADED, why, self._shares.retry_after_s(now))
        return None

    def _refuse(self, client: Client, submit: Submit | GarbageSubmit, refusal: Refusal) -> None:
        lost = _lost((submit.request_id, submit.attempt), *refusal)
        self._totals.refused[lost.reason.value] += 1
        self._outbox.append(Send(client.identity, lost))

    def send_lost(self, request: Request, why: str, reason: LostReason) -> None:
        lost = _lost((request.request_id, request.attempt), reason, why)
        self._outbox.append(Send(request.client.identity, lost))

    def send_abort(self, request: Request) -> None:
        abort = Abort(request.client.uid, request.request_id, request.attempt)
        self._outbox.append(Send(request.engine.identity, abort))

    def _end(
        self,
        request: Request,
        event: RequestEvent,
        end: FinishedRequest | None = None,
        now: float | None = None,
    ) -> None:
        self._history.move(TRANSITIONS, request, event)
        del request.client.requests[request.request_id]
        request.engine.requests.remove(request)
        self._shares.gave_back(request.holder, now)
        if request.external_digest is not None:
            self._forget_digest(request.external_digest, request)
        num_generated = None
        if end and end.reason in WHOLE and not end.num_generated_tokens >> TOKEN_BITS:
            num_generated = end.num_generated_tokens
        self._router.end(request.decision, num_generated)
        if self._logs_requests:
            extra = {
                "reason": end.reason.value if end else event.value,
                "predicted_cached_tokens": request.decision.num_cached_tokens,
                "actual_cached_tokens": end.num_cached_tokens if end else None,
            }
            log.debug("ended", extra=_names(request) | extra)

    def _forget_digest(self, digest: int, request: Request) -> None:
        same = self._of_digest[digest]
        same.remove(request)
        if not same:
            del self._of_digest[digest]

    def check(self, clients: Iterable[Client], engines: Iterable[Engine]) -> None:
        """Assert that the containers agree."""
        of_clients = {request for client in clients for request in client.requests.values()}
        of_engines = {request for engine in engines for request in engine.requests}
        assert of_clients == of_engines
        named = {request for request in of_clients if request.external_digest is not None}
        assert named == {request for same in self._of_digest.values() for request in same}
        assert self._loads.total == sum(request.decision.load for request in of_clients)
        for request in of_clients:
            assert request.client.requests[request.request_id] is request
            assert request.state in (RequestState.RUNNING, RequestState.ABORTING)
        held = Counter(request.holder for request in of_clients)
        assert held == {holder: self._shares.num_held(holder) for holder in held}
        assert self._shares.num_holders == len(held)
        for slot, engine in self._engine_of_slot.items():
            assert engine.slot == slot
            assert self._loads.load(slot) == sum(r.decision.load for r in engine.requests)


def _invalid(problem: str) -> Refusal:
    return Refusal(LostReason.INVALID, problem)


def _lost(
    ids: tuple[int, int], reason: LostReason, detail: str, retry_after_s: float = 0.0
) -> Lost:
    """ids: of the request and of the attempt."""
    return Lost(*ids, reason, retry_after_s, clip(detail))


def _names(request: Request) -> dict[str, Any]:
    name = request_name(request.client.uid, request.request_id)
    return {"request": name, "attempt": request.attempt}
