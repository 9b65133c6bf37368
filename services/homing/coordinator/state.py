"""Coordinator: all that it decides, without a socket, a clock or a sleep.

`handle(event, now)` changes the state and returns what to send, in the order in which it must be
sent. This file says which part a message concerns; the parts, each in its own file:

    admission   who is let in, and which ranks may get work (health, fairness)
    draining    ranks that finish what they have and go
    sessions    who is there: Hello and Welcome, heartbeats, loss; what clients know of the fleet
    requests    where each request is: dispatch (routing, prefix_index, loads) and its one end
    control     the fleet's state; commands to all engines
    totals      what was counted, for `snapshot`
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, assert_never

from typing_extensions import Buffer

from homing.coordinator.admission import Admission
from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.control import FleetControl
from homing.coordinator.draining import Draining
from homing.coordinator.events import (
    Event,
    Failure,
    Forward,
    Garbage,
    GarbageSubmit,
    Incident,
    Instruction,
    OtherVersion,
    Outbox,
    Received,
    Send,
    Tick,
    Unsent,
)
from homing.coordinator.history import History
from homing.coordinator.kv_events import correct_guess
from homing.coordinator.peers import PeerEvent, Strangers
from homing.coordinator.records import Client, Engine, Peer, PeerState, RankId
from homing.coordinator.requests import Requests
from homing.coordinator.router import RankRouter, Record
from homing.coordinator.sessions import Sessions
from homing.coordinator.snapshot import fleet_snapshot
from homing.coordinator.totals import ReportedCounters, Totals, read_counters, read_report
from homing.errors import WireError
from homing.wire import (
    Abort,
    AbortMatched,
    AbortMatching,
    Control,
    ControlDone,
    Drain,
    FinishedRequest,
    Goodbye,
    Heartbeat,
    Hello,
    KvEvents,
    Output,
    Rejoin,
    Stats,
    StatsReply,
    Submit,
    pack_payload,
    read_payload,
)
from homing.wire.messages import ToCoordinator

log = logging.getLogger(__name__)

ENDS = list[FinishedRequest]  # written once: making such a type costs as much as decoding one


class Coordinator:
    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        incarnation: int,
        now: float,
        record: Record | None = None,
    ) -> None:
        """`incarnation` is random: it tells peers this coordinator from the one before it.

        `record` is told all that is done to the router.
        """
        self._config = config
        self._incarnation = incarnation
        self._started_at = self._now = now
        self._outbox: Outbox = []
        history = History()
        self.totals = Totals()
        self.counters = ReportedCounters()
        self._router = RankRouter(config.routing, now=now, record=record, explain=True)
        self.index, self.loads = self._router.index, self._router.loads
        self.admission = Admission(config, self._router)
        self.requests = Requests(self._router, self.admission, self._outbox, history, self.totals)
        self.draining = Draining(self.admission, self._outbox)
        self.control = FleetControl(self._outbox, history)
        self.sessions = Sessions(
            config,
            incarnation=incarnation,
            now=now,
            requests=self.requests,
            control=self.control,
            admission=self.admission,
            draining=self.draining,
            router=self._router,
            totals=self.totals,
            counters=self.counters,
            outbox=self._outbox,
            history=history,
        )
        self.peers = self.sessions.peers
        self._strangers = Strangers(interval_s=config.heartbeat_s)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in one event at `now`, in seconds. A clock that falls is taken to stand still."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """Take in events that came together, one after the other."""
        now = self._now = max(now, self._now)
        by_identity, settle = self.peers.by_identity, self.sessions.settle
        for event in events:
            if isinstance(event, Received):
                message, peer = event.message, by_identity.get(event.sender)
                # The usual ones first, without a `match`, whose class patterns are slow.
                if isinstance(peer, Engine) and isinstance(message, Output):
                    peer.last_seen = now
                    self._on_output(peer, message, event.frames, now)
                    if not self.admission.is_stale:  # no rank was lost, none serves again
                        continue
                elif isinstance(peer, Client) and isinstance(message, Submit):
                    peer.last_seen = now
                    self.requests.submit(peer, message, event.frames, now)
                    continue
                else:
                    self._on_message(peer, event, now)
            else:
                self._on_incident(event, now)
            settle(now)
        instructions = self._outbox.copy()
        self._outbox.clear()
        return instructions

    def _on_incident(self, event: Incident, now: float) -> None:
        match event:
            case Unsent(identity, failure):
                if peer := self.peers.by_identity.get(identity):
                    why = "is not connected" if failure is Failure.GONE else "does not read"
                    self.sessions.end(peer, PeerEvent.LOST, why, now)
            case Tick():
                self.sessions.tick(now)
            case Garbage() | GarbageSubmit():
                self._on_garbage(event, now)
            case OtherVersion(sender, version):
                self.totals.garbage += 1
                self.sessions.refuse_version(sender, version)
            case _:
                assert_never(event)

    def _on_message(self, peer: Peer | None, event: Received, now: float) -> None:
        sender, message = event.sender, event.message
        if peer is not None:
            peer.last_seen = now
        if isinstance(message, Hello):
            self._strangers.forget(sender)
            self.sessions.hello(sender, message, now)
        elif isinstance(peer, Engine):
            self._from_engine(peer, message, now)
        elif peer is not None:
            self._from_client(peer, message, event.frames, now)
        elif not isinstance(message, Goodbye) and self._strangers.may_tell(sender, now):
            self._outbox.append(Send(sender, Rejoin(self._incarnation)))

    def _from_engine(self, engine: Engine, message: ToCoordinator, now: float) -> None:
        match message:
            case Heartbeat():
                self._on_report(engine, message, now)
            case KvEvents():
                self._on_kv_events(engine, message)
            case ControlDone():
                self.sessions.control_done(engine, message, now)
            case Drain(timeout_s=timeout_s) if 0.0 <= timeout_s < float("inf"):
                self.draining.begin(engine, timeout_s)
            case Goodbye(failed=True):
                self.sessions.end(engine, PeerEvent.LOST, "failed", now)
            case Goodbye():
                self.sessions.end(engine, PeerEvent.LEFT, "left", now)
            case _:
                self._drop(engine, f"{type(message).__name__} is not for an engine to say")

    def _from_client(
        self, client: Client, message: ToCoordinator, frames: Sequence[Buffer], now: float
    ) -> None:
        match message:
            case Heartbeat():
                self._count(client, message)
            case Abort() if message.client == client.uid:
                self.requests.abort(client, message, frames)
            case AbortMatching():
                count = self.requests.abort_matching(message.external_digest)
                self._outbox.append(Send(client.identity, AbortMatched(message.token, count)))
            case Drain(rank=int(rank)):
                engine = self.peers.engine_of_rank.get(RankId(rank))
                self.draining.ask(client, message, engine)
            case Control():
                self.control.request(client, message)
            case Stats():
                frame = pack_payload(self.snapshot(now))
                self._outbox.append(Send(client.identity, StatsReply(message.token, frame)))
            case Goodbye():
                self.sessions.end(client, PeerEvent.LEFT, "left", now)
            case _:
                self._drop(client, f"{type(message).__name__} is not for this client to say")

    def _on_output(
        self, engine: Engine, output: Output, frames: Sequence[Buffer], now: float
    ) -> None:
        """Constant work per step and client, and per request that ended: deltas are not read."""
        self.totals.outputs += 1
        client = self.peers.client_of_uid.get(output.client)
        if output.finished is not None:
            try:
                ends = read_payload(output.finished, ENDS)
            except WireError as error:
                # Requests ended and nobody can tell which: none of them may wait for ever.
                self._drop(engine, f"finished: {error}")
                self.sessions.end(engine, PeerEvent.LOST, "sent an unreadable list of ends", now)
                return
            self.requests.finish(engine, client, ends, now)
        if client is None:
            self.totals.outputs_dropped += 1
        else:
            self._outbox.append(Forward(client.identity, frames))

    def _on_report(self, engine: Engine, report: Heartbeat, now: float) -> None:
        engine.report = report
        if self._count(engine, report) and engine.state is PeerState.LIVE:
            rank_report = read_report(report, self.counters.of(engine.uid))
            self._router.reported(engine.slot, rank_report, now)
            self.admission.took_steps(engine, rank_report.steps)

    def _on_kv_events(self, engine: Engine, events: KvEvents) -> None:
        if engine.state is not PeerState.LIVE or not self._router.reads_prefixes:
            return
        try:
            num_stored, num_dropped = correct_guess(self._router, engine.slot, events)
        except WireError as error:
            self._drop(engine, f"KvEvents: {error}")
            return
        self.totals.kv_stored += num_stored
        self.totals.kv_dropped += num_dropped

    def _count(self, peer: Peer, report: Heartbeat) -> bool:
        """Take over a peer's counters; False if they cannot be read."""
        try:
            self.counters.update(peer.uid, read_counters(report.counters))
        except WireError as error:
            self._drop(peer, f"counters: {error}")
            return False
        return True

    def _on_garbage(self, event: Garbage | GarbageSubmit, now: float) -> None:
        peer = self.peers.by_identity.get(event.sender)
        if peer is not None:
            peer.last_seen = now
        self._drop(peer or event.sender, event.reason)
        if (
            isinstance(event, GarbageSubmit)
            and isinstance(peer, Client)
            and peer.uid == event.client
        ):
            self.requests.submit_unread(peer, event)

    def _drop(self, source: Peer | bytes, reason: str) -> None:
        """Count garbage; log only the first of each sender."""
        self.totals.garbage += 1
        if isinstance(source, bytes):
            first, name = self._strangers.may_warn(source), source.hex()
        else:
            first, name = not source.sent_garbage, str(source)
            source.sent_garbage = True
        if first:
            log.warning("dropped garbage", extra={"sender": name, "reason": reason})

    def snapshot(self, now: float) -> dict[str, Any]:
        """What Stats is answered with."""
        return {
            "incarnation": self._incarnation,
            "uptime_s": now - self._started_at,
            "policy": self._config.policy,
            "state": self.control.state.value,
            "epoch": self.control.weights.epoch,
            "index_entries": self.index.num_entries,
            "recent": self._router.explanations.snapshot(self.peers.rank_of_slot(), now),
            **fleet_snapshot(
                self.peers, self.loads, self.totals, self.counters, self.admission.circuit
            ),
        }

    def check(self) -> None:
        """Assert that what is kept in two places agrees. For tests, after every event."""
        self.sessions.check()
        self.requests.check(self.peers.clients, self.peers.engines)
        self.loads.check()
