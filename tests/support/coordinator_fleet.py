"""A coordinator without sockets or clock: literal events in, instructions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.events import (
    Failure,
    Forward,
    Instruction,
    Received,
    Send,
    Tick,
    Unsent,
    read_event,
)
from homing.coordinator.state import Coordinator
from homing.prefix import routing_hashes
from homing.wire import (
    PROTOCOL_VERSION,
    FinishedRequest,
    FinishReason,
    Heartbeat,
    Hello,
    Lost,
    LostReason,
    Message,
    ModelCard,
    Output,
    Role,
    Submit,
    pack,
    pack_payload,
    parse,
)

BLOCK_SIZE = 4
INCARNATION = 77

CARD = ModelCard(
    name="tiny",
    tokenizer_dir="/models/tiny",
    max_context_tokens=4096,
    vocab_size=64,
    eos_token_ids=(0,),
    block_size=BLOCK_SIZE,
)


def tokens(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def engine_hello(uid: int, rank: int | None = None, **fields: Any) -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        Role.ENGINE,
        uid,
        fields.pop("incarnation", 0),
        rank,
        model_card=fields.pop("model_card", pack_payload(CARD)),
        **fields,
    )


def client_hello(uid: int, incarnation: int = 0) -> Hello:
    return Hello(PROTOCOL_VERSION, Role.CLIENT, uid, incarnation)


def submit(
    client: int = 1,
    request_id: int = 1,
    attempt: int = 0,
    *,
    prompt: bytes = tokens(*range(9)),
    hashed: bool = True,
    **fields: Any,
) -> Submit:
    values: dict[str, Any] = {
        "num_prompt_tokens": len(prompt) // 4,
        "num_resumed_tokens": 0,
        "max_new_tokens": 8,
        "prompt": prompt,
        "sampling": b"\x80",
        "block_hashes": routing_hashes(prompt, BLOCK_SIZE) if hashed else None,
    }
    return Submit(client, request_id, attempt, **(values | fields))


def output(
    *finished: tuple[int, int],
    client: int = 1,
    reason: FinishReason = FinishReason.LENGTH,
    num_cached_tokens: int = 0,
) -> Output:
    """The last Output of these (request id, attempt); of none: one that ends nothing."""
    ends = [FinishedRequest(i, a, reason, num_cached_tokens, 8) for i, a in finished]
    return Output(client, 1, len(ends), pack_payload(ends) if ends else None, b"\x90")


class Fleet:
    """`sends` of an event are what the coordinator does about it, as (peer, message)."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {"heartbeat_s": 1.0, "heartbeat_timeout_s": 10.0}
        self.config = replace(CoordinatorConfig(), **(defaults | settings))
        self.coordinator = Coordinator(self.config, incarnation=INCARNATION, now=0.0)
        self.now = 0.0

    def raw(self, event: Any) -> list[Instruction]:
        instructions = self.coordinator.handle(event, self.now)
        self.coordinator.check()
        return instructions

    def frames(self, sender: bytes, frames: list[Any]) -> list[tuple[bytes, Message]]:
        return [_seen(i) for i in self.raw(read_event(sender, frames))]

    def say(self, sender: bytes, message: Message) -> list[tuple[bytes, Message]]:
        return [_seen(i) for i in self.raw(_received(sender, message))]

    def burst(self, *said: tuple[bytes, Message]) -> list[tuple[bytes, Message]]:
        """They come together."""
        events = [_received(sender, message) for sender, message in said]
        instructions = self.coordinator.handle_all(events, self.now)
        self.coordinator.check()
        return [_seen(i) for i in instructions]

    def fail(self, peer: bytes, failure: Failure = Failure.GONE) -> list[tuple[bytes, Message]]:
        return [_seen(i) for i in self.raw(Unsent(peer, failure))]

    def tick(self, seconds: float = 1.0) -> list[tuple[bytes, Message]]:
        self.now += seconds
        return [_seen(i) for i in self.raw(Tick())]

    # Peers that join and speak. Engine n is b"e<n>" with uid 100 + n, client n is b"c<n>", uid n.

    def join_engine(self, number: int = 0, **fields: Any) -> bytes:
        identity = b"e%d" % number
        self.say(identity, engine_hello(100 + number, fields.pop("rank", number), **fields))
        return identity

    def join_client(self, number: int = 1) -> bytes:
        identity = b"c%d" % number
        self.say(identity, client_hello(number))
        return identity

    def beat(self, *identities: bytes) -> None:
        for identity in identities:
            assert self.say(identity, Heartbeat(0)) == []

    @property
    def loads(self) -> dict[int, int]:
        return {
            engine.rank: self.coordinator.loads.load(engine.slot)
            for engine in self.coordinator.peers.engines
            if engine.slot in self.coordinator.loads
        }

    def stats(self) -> dict[str, Any]:
        return self.coordinator.snapshot(self.now)


def joined_fleet(*, engines: int = 2, clients: int = 1, **settings: Any) -> Fleet:
    """Engines 0, 1... have joined, then clients 1, 2..."""
    fleet = Fleet(**settings)
    for number in range(engines):
        fleet.join_engine(number)
    for number in range(1, clients + 1):
        fleet.join_client(number)
    return fleet


def _received(sender: bytes, message: Message) -> Received:
    frames = pack(message)
    parsed: Any = parse(frames)  # of any kind, also of those that are not for the coordinator
    return Received(sender, parsed, frames)


def _seen(instruction: Instruction) -> tuple[bytes, Message]:
    """What the peer would receive."""
    if isinstance(instruction, Send):
        return instruction.peer, parse(pack(instruction.message))
    assert isinstance(instruction, Forward)
    return instruction.peer, parse(instruction.frames)


def kinds(seen: list[tuple[bytes, Message]]) -> list[tuple[bytes, str]]:
    return [(peer, type(message).__name__) for peer, message in seen]


def only(seen: list[tuple[bytes, Message]]) -> Message:
    [(_, message)] = seen
    return message


def lost(
    seen: list[tuple[bytes, Message]], client: bytes = b"c1"
) -> list[tuple[int, int, LostReason]]:
    messages = to(client, seen)
    return [(m.request_id, m.attempt, m.reason) for m in messages if isinstance(m, Lost)]


def to(peer: bytes, seen: list[tuple[bytes, Message]]) -> list[Message]:
    return [message for receiver, message in seen if receiver == peer]
