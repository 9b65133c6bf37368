"""Whatever comes, in whatever order: no exception, the invariants hold, loads return to zero."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from homing.coordinator.events import Failure, Garbage, GarbageSubmit, read_event
from homing.wire import (
    Abort,
    Command,
    Control,
    ControlDone,
    FleetState,
    Goodbye,
    Heartbeat,
    Lost,
    LostReason,
    Message,
    Rejoin,
    Stats,
    Submit,
    pack,
)
from tests.support.coordinator_fleet import (
    Fleet,
    client_hello,
    engine_hello,
    output,
    submit,
    tokens,
)


@given(st.lists(st.binary(max_size=600), max_size=6))
@settings(max_examples=500)
def test_random_bytes_are_garbage_or_a_message(frames: list[bytes]) -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    for sender in (b"c1", b"e0", b"stranger"):
        fleet.frames(sender, frames)
    assert fleet.stats()["garbage"] <= 3


def test_an_empty_message_makes_nobody_an_engine() -> None:
    """Nor does any other message but Hello: who sends it is a stranger, and gets no prompts."""
    fleet = Fleet()
    fleet.join_client(1)
    for frames in ([], [b""], [b"", b""]):
        assert fleet.frames(b"e7", frames) == []
    [(peer, message)] = fleet.say(b"e7", Heartbeat(0))
    assert (peer, type(message)) == (b"e7", Rejoin)
    [(peer, refusal)] = fleet.say(b"c1", submit())
    assert isinstance(refusal, Lost)
    assert (peer, refusal.reason) == (b"c1", LostReason.NO_RANK)


def test_many_thousand_mutated_messages_raise_nothing() -> None:
    random_ = random.Random(3)
    samples = [
        pack(message)
        for message in (
            submit(),
            output((1, 0)),
            Abort(1, 1, 0),
            Control(Command.PAUSE, 1),
            ControlDone(Command.PAUSE, 1, True),
            Heartbeat(0),
            Stats(1),
            Goodbye(),
            client_hello(1),
            engine_hello(100),
        )
    ]
    fleet = Fleet()
    for _ in range(20_000):
        frames = [bytearray(frame) for frame in random_.choice(samples)]  # type: ignore[arg-type]
        for _ in range(random_.randint(0, 3)):
            frame = random_.choice(frames)
            if frame:
                frame[random_.randrange(len(frame))] = random_.randrange(256)
        match random_.randrange(8):
            case 0:
                frames.pop(random_.randrange(len(frames)))
            case 1:
                frames.insert(random_.randrange(len(frames) + 1), bytearray(b"\xc0"))
        event = read_event(random_.choice([b"c1", b"e0", b"s"]), frames)
        fleet.coordinator.handle(event, fleet.now)
    fleet.coordinator.check()


def test_a_submission_is_identified_as_far_as_it_can_be_read() -> None:
    frames = pack(submit(client=5, request_id=6, attempt=7))
    assert read_event(b"c", frames[:2]) == GarbageSubmit(
        b"c", "Submit: 1 payload frames; it has 3", 5, 6, 7
    )
    assert isinstance(read_event(b"c", []), Garbage)
    assert isinstance(read_event(b"c", [b"\x93\x06\x01\xff"]), Garbage)
    assert isinstance(read_event(b"c", [b"\x94\x06\x01\x01\xff"]), Garbage)


class RandomWalk:
    """Peers that do anything they may, and some that they may not, in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fleet = Fleet(max_queued_requests=3, heartbeat_timeout_s=4.0, prefix_ttl_s=20.0)
        self.at_engine: dict[bytes, list[Submit]] = {}
        self.owed: dict[bytes, list[Control]] = {}
        self.waiting: set[tuple[bytes, int, int]] = set()  # (client, request, attempt) accepted
        self.next_uid = 1000

    def step(self) -> None:
        number = self.random.randrange(1, 4)
        client, engine = b"c%d" % number, b"e%d" % self.random.randrange(4)
        either = self.random.choice([client, engine])
        actions = {
            lambda: self._submit(client, number): 12,
            lambda: self._output(engine): 12,
            lambda: self._answer(engine): 8,
            lambda: self._hello(client, engine): 5,
            lambda: self._abort(client, number): 2,
            lambda: self._take(self.fleet.tick(self.random.choice([0.1, 0.5, 3.0]))): 1,
            lambda: self._take(self.fleet.fail(either, self.random.choice(list(Failure)))): 0.3,
            lambda: self._take(self.fleet.say(either, Goodbye())): 0.3,
            lambda: self._command(client): 0.5,
            lambda: self._take(self.fleet.frames(client, pack(submit(number))[:-1])): 0.5,
        }
        [action] = self.random.choices(list(actions), list(actions.values()))
        action()

    def _hello(self, client: bytes, engine: bytes) -> None:
        """Of a peer that is away, mostly; of one that is there, sometimes."""
        here = self.fleet.coordinator.peers.by_identity
        for identity in (client, engine):
            if identity in here and self.random.random() < 0.98:
                continue
            if identity is client:
                hello = client_hello(int(client[1:]), self.random.randrange(2))
            else:
                self.next_uid += 1
                hello = engine_hello(
                    self.random.choice([self.next_uid, 100 + int(engine[1:])]),
                    self.random.choice([None, 0, 1, 2, 3]),
                    incarnation=self.random.randrange(3),
                    state=self.random.choice(list(FleetState)),
                )
            self._take(self.fleet.say(identity, hello))

    def _answer(self, engine: bytes) -> None:
        if self.owed.get(engine):
            control = self.owed[engine].pop(0)
            ok = self.random.random() < 0.95
            self._take(self.fleet.say(engine, ControlDone(control.command, control.sequence, ok)))

    def _abort(self, client: bytes, number: int) -> None:
        abort = Abort(number, self.random.randrange(6), self.random.randrange(3))
        self._take(self.fleet.say(client, abort))

    def _command(self, client: bytes) -> None:
        command = Control(self.random.choice(list(Command)), self.random.randrange(5))
        self._take(self.fleet.say(client, command))

    def _submit(self, client: bytes, number: int) -> None:
        request_id, attempt = self.random.randrange(6), self.random.randrange(3)
        prompt = tokens(*range(self.random.randrange(1, 30)))
        message = submit(
            number, request_id, attempt, prompt=prompt, hashed=self.random.random() < 0.8
        )
        self._take(self.fleet.say(client, message))

    def _output(self, engine: bytes) -> None:
        work = self.at_engine.get(engine, [])
        ended = [work.pop(self.random.randrange(len(work)))] if work else []
        client = ended[0].client if ended else 1
        ends = [(s.request_id, s.attempt) for s in ended]
        self._take(self.fleet.say(engine, output(*ends, client=client)))

    def _take(self, sends: list[tuple[bytes, Message]]) -> None:
        for peer, message in sends:
            match message:
                case Submit():
                    self.at_engine.setdefault(peer, []).append(message)
                    client = b"c%d" % message.client
                    self.waiting = {
                        w for w in self.waiting if w[:2] != (client, message.request_id)
                    }
                    self.waiting.add((client, message.request_id, message.attempt))
                case Control():
                    self.owed.setdefault(peer, []).append(message)
                case Lost():
                    self.waiting.discard((peer, message.request_id, message.attempt))
                case _:
                    pass

    @property
    def alive(self) -> set[tuple[bytes, int, int]]:
        clients = self.fleet.coordinator.peers.clients
        return {(c.identity, r.request_id, r.attempt) for c in clients for r in c.requests.values()}


def test_invariants_hold_on_random_walks_and_loads_return_to_zero() -> None:
    """`Fleet` calls check() after every event."""
    for seed in range(10):
        walk = RandomWalk(seed)
        for _ in range(1500):
            walk.step()
            assert walk.alive <= walk.waiting, "what is alive was accepted and has not ended"
        stats = walk.fleet.stats()
        assert stats["dispatched"] > 100
        ended = sum(stats["finished"].values()) + sum(
            stats[name] for name in ("lost_requests", "orphaned_requests", "superseded")
        )
        assert ended + stats["requests"] == stats["dispatched"], "each has exactly one end"
        for number in range(1, 4):
            walk.fleet.fail(b"c%d" % number)
        assert walk.fleet.coordinator.loads.total == 0
        assert set(walk.fleet.loads.values()) <= {0}
