"""The coordinator bench's processes around the coordinator: engines that answer at once, clients
that keep it busy, and the bare loop that it is compared with.

    python -m homing.bench.coordinator_peers engine|client|bare ...

They speak the real messages over the real transport and compute nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import tyro
from typing_extensions import Buffer

from homing.bench.engine_peer import BLOCK_SIZE, HEARTBEAT_S, join_as_engine
from homing.coordinator.memory import keep_large_buffers
from homing.native import default_cache_dir
from homing.observe import watch_lifeline
from homing.prefix import DIGEST_BYTES, TOKEN_BYTES, num_routing_points
from homing.transport import Dealer, Lender, Loan, Router, borrow, peer_identity
from homing.wire import (
    PROTOCOL_VERSION,
    Delta,
    FinishedRequest,
    FinishReason,
    Fleet,
    Heartbeat,
    Hello,
    Lost,
    Output,
    Role,
    Submit,
    Welcome,
    pack,
    pack_payload,
    parse,
    read_payload,
)

POOL_SIZE = 64
"""Prompts that a client sends again and again: a prompt of these is a full prefix hit."""


@dataclass(frozen=True)
class Engine:
    """Answers each Submit with as many Outputs as it asks for tokens, one token each."""

    address: str
    rank: int
    lifeline_fd: int

    def run(self) -> None:
        dealer = join_as_engine(self.address, self.rank)
        next_beat = time.monotonic()
        while True:
            for frames in dealer.receive(HEARTBEAT_S):
                message = parse(frames)
                if isinstance(message, Submit):
                    self._answer(dealer, message)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                dealer.send(pack(Heartbeat(0)))

    def _answer(self, dealer: Dealer, submit: Submit) -> None:
        if submit.lent_at is not None:
            borrow(submit.lent_at, TOKEN_BYTES * submit.num_prompt_tokens)
        ids = submit.request_id, submit.attempt
        deltas = pack_payload([Delta(*ids, tokens=b"\0\0\0\0")])
        step = pack(Output(submit.client, 1, 0, None, deltas))
        for _ in range(submit.max_new_tokens - 1):
            dealer.send(step)
        end = FinishedRequest(*ids, FinishReason.LENGTH, 0, submit.max_new_tokens)
        dealer.send(pack(Output(submit.client, 1, 1, pack_payload([end]), deltas)))


@dataclass(frozen=True)
class Client:
    """Keeps a number of requests outstanding for a time; prints what it saw as JSON.

    A Submit that comes back, as the bare loop sends it, counts as its answer.
    """

    address: str
    ranks: int
    """Begin when so many serve."""
    prompt_tokens: int
    outputs: int
    outstanding: int
    hit_share: float
    """Share of requests that repeat a prompt of the client's pool; the others are new."""
    lends: bool
    """Long prompts, as a client on the coordinator's machine does; else they are sent."""
    seconds: float
    max_requests: int | None
    """Stop after so many, even if time is left."""
    lifeline_fd: int

    def run(self) -> None:
        uid = secrets.randbits(63)
        dealer = Dealer(self.address, peer_identity(Role.CLIENT.value, uid))
        dealer.send(pack(Hello(PROTOCOL_VERSION, Role.CLIENT, uid, 0)))
        self._wait_for_ranks(dealer)
        prompt = bytes(TOKEN_BYTES * self.prompt_tokens)
        pool = [self._new_hashes() for _ in range(POOL_SIZE)]
        request_ids = count()
        lender = Lender()
        loans: dict[int, Loan] = {}  # request id -> of its prompt
        started = time.monotonic()
        stop_at = started + self.seconds

        def submit() -> None:
            request_id = next(request_ids)
            repeats = (request_id * self.hit_share) % 1 + self.hit_share >= 1
            hashes = pool[request_id % POOL_SIZE] if repeats else self._new_hashes()
            loan = lender.lend(prompt) if self.lends else None
            if loan:
                loans[request_id] = loan
            message = Submit(
                uid,
                request_id,
                attempt=0,
                num_prompt_tokens=self.prompt_tokens,
                num_resumed_tokens=0,
                max_new_tokens=self.outputs,
                lent_at=loan.place if loan else None,
                prompt=None if loan else prompt,
                sampling=b"\x80",
                block_hashes=hashes,
            )
            dealer.send(pack(message))

        for _ in range(self.outstanding):
            submit()
        open_requests, ended = self.outstanding, 0
        next_beat = started
        while open_requests:
            for frames in dealer.receive(HEARTBEAT_S):
                for request_id in ended_by(frames):
                    if loan := loans.pop(request_id, None):
                        loan.returned()
                    ended += 1
                    open_requests -= 1
                    more = self.max_requests is None or ended + open_requests < self.max_requests
                    if more and time.monotonic() < stop_at:
                        submit()
                        open_requests += 1
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                dealer.send(pack(Heartbeat(0)))
        print(json.dumps({"requests": ended, "started": started, "ended": time.monotonic()}))
        dealer.close(linger_s=1.0)

    def _wait_for_ranks(self, dealer: Dealer) -> None:
        while True:
            for frames in dealer.receive(HEARTBEAT_S):
                match parse(frames):
                    case Welcome(live_ranks=live) | Fleet(live_ranks=live) if live >= self.ranks:
                        return
                    case Hello():  # the bare loop
                        return
                    case _:
                        dealer.send(pack(Heartbeat(0)))

    def _new_hashes(self) -> bytes:
        return os.urandom(DIGEST_BYTES * num_routing_points(self.prompt_tokens // BLOCK_SIZE))


@dataclass(frozen=True)
class Bare:
    """A loop that sends each message back to its sender: what no router in Python can undercut."""

    address: str
    lifeline_fd: int

    def run(self) -> None:
        keep_large_buffers()
        router = Router(self.address, send_queue=0, cache_dir=default_cache_dir(os.environ))
        while True:
            router.send_all(router.receive(1.0))


def ended_by(frames: Sequence[Buffer]) -> list[int]:
    """The ids of this client's requests that a message ends."""
    message = parse(frames)
    match message:
        case Output():
            ends = read_payload(message.finished or b"\x90", list[FinishedRequest])
            return [end.request_id for end in ends]
        case Submit():
            return [message.request_id]
        case Lost():
            sys.exit(f"the coordinator refused a request: {message.detail}")
        case _:
            return []


def main() -> None:
    kinds = {"engine": Engine, "client": Client, "bare": Bare}
    peer = tyro.extras.subcommand_cli_from_dict(kinds)
    watch_lifeline(peer.lifeline_fd)
    peer.run()


if __name__ == "__main__":
    main()
