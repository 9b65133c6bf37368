"""Sessions: how peers join and how their time here ends.

    Hello --> admitted: Welcome; an engine behind the fleet's state is told to reach it first
          --> refused:  Refused, in one sentence
    the end:  Goodbye, a new Hello, a message that cannot be sent, silence
              --> its requests end (`requests`), commands do not wait for it (`control`)

**Who is alive.** Each peer says something at least every `heartbeat_s`, and so does the
coordinator. A peer is lost when a message to it cannot be sent, which the next heartbeat notices
if nothing else does, or when it was silent for `heartbeat_timeout_s`. Its record goes; should it
speak again it is a stranger, and told Rejoin: drop all work, say Hello.
"""

from __future__ import annotations

import logging

from homing.coordinator.admission import Admission
from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.control import MAX_SEQUENCE, FleetControl
from homing.coordinator.draining import Draining
from homing.coordinator.events import Outbox, Send
from homing.coordinator.history import History
from homing.coordinator.peers import TRANSITIONS, PeerEvent, Peers, Refusal, read_card
from homing.coordinator.records import Client, Engine, Peer, PeerState
from homing.coordinator.requests import Requests
from homing.coordinator.router import RankRouter
from homing.coordinator.totals import ReportedCounters, Totals
from homing.coordinator.weights import MAX_EPOCH
from homing.wire import (
    PROTOCOL_VERSION,
    Command,
    ControlDone,
    Fleet,
    Heartbeat,
    Hello,
    LostReason,
    ModelCard,
    Payload,
    Refused,
    Role,
    Welcome,
    pack_payload,
)
from homing.wire.messages import clip

log = logging.getLogger(__name__)


class Sessions:
    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        incarnation: int,
        now: float,
        requests: Requests,
        control: FleetControl,
        admission: Admission,
        draining: Draining,
        router: RankRouter,
        totals: Totals,
        counters: ReportedCounters,
        outbox: Outbox,
        history: History,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._ticked_at = now
        self._requests = requests
        self._control = control
        self._admission = admission
        self._draining = draining
        self._router = router
        self._totals = totals
        self._counters = counters
        self._outbox = outbox
        self._history = history
        self.peers = Peers(max_clients=config.max_clients)
        self._card: ModelCard | None = None
        self._card_frame: Payload = None
        self._card_is_new = False
        self._fleet_sequence = 0
        self._fleet_changed = False

    # Joining

    def hello(self, sender: bytes, hello: Hello, now: float) -> None:
        """Whoever says Hello begins a new session; an earlier one of this sender ends."""
        if hello.protocol_version != PROTOCOL_VERSION:
            self.refuse_version(sender, hello.protocol_version)
            return
        known = self.peers.by_identity.get(sender)
        former = self._requests.of(known) if known else []
        if known:
            self.end(known, PeerEvent.CUT_OFF, "began a new session", now)
        try:
            if sender[:1] != hello.role.value[:1].encode():
                raise Refusal(f"its identity is not that of a peer that is {hello.role.value}")
            if hello.role is Role.CLIENT:
                self._admit_client(sender, hello, now)
            else:
                self._admit_engine(sender, hello, now)
        except Refusal as refusal:
            self._refuse(sender, str(refusal))
        # What the sender had may have come after it spoke: then it has not dropped it itself.
        for request in former:
            if hello.role is Role.CLIENT:
                why = "its client began a new session"
                self._requests.send_lost(request, why, LostReason.RANK_LEFT)
            else:
                self._requests.send_abort(request)

    def refuse_version(self, sender: bytes, version: int) -> None:
        reason = f"protocol version {version}; this coordinator speaks {PROTOCOL_VERSION}"
        self._refuse(sender, reason)

    def _refuse(self, sender: bytes, reason: str) -> None:
        log.warning("refused", extra={"sender": sender.hex(), "reason": reason})
        self._outbox.append(Send(sender, Refused(clip(reason))))

    def _admit_client(self, sender: bytes, hello: Hello, now: float) -> None:
        self.peers.check_client(hello)
        client = Client(sender, hello.uid, now)
        self.peers.add(client)
        self._counters.join(client.uid)
        self._move(client, PeerEvent.IN_STEP)
        self._welcome(client)

    def _admit_engine(self, sender: bytes, hello: Hello, now: float) -> None:
        is_first = not self.peers.engine_of_rank
        card = read_card(hello, None if is_first else self._card)
        if hello.control_sequence > MAX_SEQUENCE or hello.epoch > MAX_EPOCH:
            numbers = f"control sequence {hello.control_sequence}, epoch {hello.epoch}"
            raise Refusal(f"{numbers}: out of range")
        rank = self.peers.choose_rank(hello)
        if former := self.peers.engine_of_rank.get(rank):
            self.end(former, PeerEvent.LOST, "was replaced", now)
        slot = self._router.open_slot()
        engine = Engine(sender, hello.uid, rank, slot, hello, now, hello.state, hello.epoch)
        if is_first:
            self._card_is_new |= card != self._card
            self._card, self._card_frame = card, hello.model_card
            self._requests.block_size = card.block_size
        self._counters.join(engine.uid)
        self._welcome(engine)
        self._control.catch_up(engine, self.peers.engines, now)
        self.peers.add(engine)
        is_in_step = self._control.is_in_step(engine) and not engine.owed
        self._move(engine, PeerEvent.IN_STEP if is_in_step else PeerEvent.BEHIND)
        self._fleet_changed = True

    def _welcome(self, peer: Peer) -> None:
        is_client = isinstance(peer, Client)
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            incarnation=self._incarnation,
            rank=None if is_client else peer.rank,
            state=self._control.state,
            epoch=self._control.weights.epoch,
            control_sequence=self._control.sequence,
            policy=self._config.policy,
            reads_prefixes=self._router.reads_prefixes,
            live_ranks=self._router.loads.num_open,
            heartbeat_s=self._config.heartbeat_s,
            model_card=self._card_frame if is_client else None,
            ranks=pack_payload(self.peers.rank_infos()) if is_client else None,
        )
        self._outbox.append(Send(peer.identity, welcome))
        log.info("joined", extra={"peer": str(peer), "uid": f"{peer.uid:x}"})

    # Being there

    def tick(self, now: float) -> None:
        """Show everybody that the coordinator is alive; find who is not.

        Silence does not count when it was the coordinator that stood still (stopped, or swapped
        out): what its peers said meanwhile is in the socket.
        """
        timeout_s = self._config.heartbeat_timeout_s
        stood_still = now - self._ticked_at > timeout_s / 2
        self._ticked_at = now
        state, epoch = self._control.state, self._control.weights.epoch
        beat = Heartbeat(self._incarnation, state=state, epoch=epoch)
        for peer in list(self.peers.by_identity.values()):
            if stood_still:
                peer.last_seen = now
            if now - peer.last_seen > timeout_s:
                self.end(peer, PeerEvent.LOST, f"was silent for {timeout_s:g} s", now)
            else:
                self._outbox.append(Send(peer.identity, beat))
        for engine in self._control.overdue(self.peers.engines, now):
            self.end(engine, PeerEvent.LOST, "did not carry out a command in time", now)
        self._admission.is_stale = True
        self._router.advance(now)

    def control_done(self, engine: Engine, message: ControlDone, now: float) -> None:
        """An engine carried out a command: it may have caught up, or fallen behind."""
        before = engine.fleet_state
        self._control.done(engine, message, now)
        self._fleet_changed |= engine.fleet_state is not before
        if engine.state is PeerState.CATCHING_UP:
            if not message.ok and message.command is not Command.UPDATE_WEIGHTS:
                self._refuse(engine.identity, f"did not reach the fleet's state: {message.detail}")
                self.end(engine, PeerEvent.LOST, "did not reach the fleet's state", now)
            elif self._control.is_in_step(engine) and not engine.owed:
                self._move(engine, PeerEvent.IN_STEP)
        elif not self._control.will_be_in_step(engine):
            self.end(engine, PeerEvent.LOST, "did not take the fleet's weights", now)

    def settle(self, now: float) -> None:
        """After each event that may have changed more than requests: begin the commands whose turn
        it is, tell clients what changed."""
        control = self._control
        # Asked often, and hardly ever true: attributes before a call.
        while control.epoch_moved or (control.waiting and control.is_next_due):
            if control.epoch_moved:
                self._begin_epoch(now)
            elif operation := control.start_next(self.peers.engines, now):
                if operation.empties_caches:
                    self._router.clear()
                self._fleet_changed = True
        if self._admission.is_stale:
            self._admission.weigh(self.peers.engines, now)
        if self._fleet_changed:
            self._announce()

    def _begin_epoch(self, now: float) -> None:
        """Prompts have other hashes from now on; whoever serves older weights stops."""
        self._control.epoch_moved = False
        self._router.clear()
        self._fleet_changed = True
        for engine in list(self.peers.engines):
            if engine.state is PeerState.LIVE and not self._control.will_be_in_step(engine):
                self.end(engine, PeerEvent.CUT_OFF, "has older weights than the fleet", now)

    def _announce(self) -> None:
        self._fleet_sequence += 1
        fleet = Fleet(
            sequence=self._fleet_sequence,
            state=self._control.state,
            epoch=self._control.weights.epoch,
            policy=self._config.policy,
            reads_prefixes=self._router.reads_prefixes,
            live_ranks=self._router.loads.num_open,
            model_card=self._card_frame if self._card_is_new else None,
            ranks=pack_payload(self.peers.rank_infos()),
        )
        self._outbox += [Send(client.identity, fleet) for client in self.peers.clients]
        self._fleet_changed = self._card_is_new = False

    # Leaving

    def end(self, peer: Peer, event: PeerEvent, why: str, now: float) -> None:
        """This session is over: nothing of it is left behind but what was counted."""
        self._move(peer, event)
        self.peers.remove(peer)
        log.info("left", extra={"peer": str(peer), "why": why, "requests": len(peer.requests)})
        self._counters.leave(peer.uid)
        was_lost = event is not PeerEvent.LEFT
        if isinstance(peer, Client):
            self._totals.lost_clients += was_lost
            self._requests.lose_client(peer)
            self._control.forget_client(peer)
        else:
            self._totals.lost_ranks += was_lost
            self._requests.lose_engine(peer, f"{peer} {why}", died=event is PeerEvent.LOST)
            self._control.forget_engine(peer, now)
            self._draining.ended(peer, left=not was_lost)
            self._admission.forget(peer)
            if was_lost:
                self._admission.failed(peer, now)
            self._router.close_slot(peer.slot)
            self._fleet_changed = True

    def _move(self, peer: Peer, event: PeerEvent) -> None:
        self._history.move(TRANSITIONS, peer, event)
        if isinstance(peer, Engine) and peer.state is PeerState.LIVE:
            self._requests.open_engine(peer)
            self._admission.is_stale = True
            self._fleet_changed = True

    def check(self) -> None:
        """Assert that the containers agree."""
        peers = self.peers.by_identity
        assert {p for p in peers.values() if isinstance(p, Client)} == set(self.peers.clients)
        assert {p for p in peers.values() if isinstance(p, Engine)} == set(self.peers.engines)
        for identity, peer in peers.items():
            assert peer.identity == identity
            if isinstance(peer, Client):
                assert self.peers.client_of_uid[peer.uid] is peer
                assert peer.state is PeerState.LIVE
            else:
                assert self.peers.engine_of_rank[peer.rank] is peer
                assert peer.state in (PeerState.LIVE, PeerState.CATCHING_UP)
                is_live = peer.state is PeerState.LIVE
                assert peer.owed or is_live or not self._control.is_in_step(peer)
