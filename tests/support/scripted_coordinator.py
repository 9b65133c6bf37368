"""A coordinator that does only what a test tells it to: a bound router and the messages it
heard."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from homing.transport import Router
from homing.wire import (
    PROTOCOL_VERSION,
    FleetState,
    Heartbeat,
    Hello,
    Message,
    ModelCard,
    RankInfo,
    Welcome,
    pack,
    pack_payload,
    parse,
)

M = TypeVar("M", bound=Message)

CARD = ModelCard(
    name="scripted",
    tokenizer_dir="",
    max_context_tokens=100,
    vocab_size=1000,
    eos_token_ids=(2,),
    block_size=4,
)


class ScriptedCoordinator:
    """Use as a context manager. `heard` holds (sender, message), heartbeats left out."""

    def __init__(self, address: str = "tcp://127.0.0.1:0", incarnation: int = 7) -> None:
        self.router = Router(address, send_queue=1000)
        self.address = self.router.address
        self.incarnation = incarnation
        self.heard: list[tuple[bytes, Message]] = []

    def __enter__(self) -> ScriptedCoordinator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.router.close()

    def hear(self) -> None:
        for sender, frames in self.router.receive(0):
            message = parse(frames)
            if not isinstance(message, Heartbeat):
                self.heard.append((sender, message))

    async def next(self, kind: type[M], timeout_s: float = 30.0) -> tuple[bytes, M]:
        """The next message of this kind, with its sender; what came before it is dropped."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.hear()
            while self.heard:
                sender, message = self.heard.pop(0)
                if isinstance(message, kind):
                    return sender, message
            await asyncio.sleep(0.002)
        raise AssertionError(f"no {kind.__name__} came within {timeout_s} s")

    def send(self, peer: bytes, message: Message) -> None:
        self.router.send(peer, pack(message))

    async def welcome(
        self, *, live_ranks: int = 2, heartbeat_s: float = 0.05, reads_prefixes: bool = True
    ) -> bytes:
        """Take the next Hello and welcome its sender, whose identity is returned."""
        sender, _ = await self.next(Hello)
        self.send(
            sender,
            Welcome(
                protocol_version=PROTOCOL_VERSION,
                incarnation=self.incarnation,
                rank=None,
                state=FleetState.RUNNING,
                epoch=0,
                control_sequence=0,
                policy="prefix_affinity",
                reads_prefixes=reads_prefixes,
                live_ranks=live_ranks,
                heartbeat_s=heartbeat_s,
                model_card=pack_payload(CARD),
                ranks=pack_payload(
                    [RankInfo(rank, FleetState.RUNNING, True) for rank in range(live_ranks)]
                ),
            ),
        )
        return sender
