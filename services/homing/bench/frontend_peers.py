"""The frontend bench's processes around the frontend: an engine that computes nothing, and clients.

    python -m homing.bench.frontend_peers engine|load|direct ...

The engine answers as a real one does: each step brings one token for every request that runs, and
one Output to each client.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import urlsplit

import tyro

from homing.bench.engine_peer import HEARTBEAT_S, join_as_engine
from homing.client import Client
from homing.observe import watch_lifeline
from homing.params import SamplingParams
from homing.transport import Dealer
from homing.wire import (
    Abort,
    Delta,
    Finish,
    FinishedRequest,
    FinishReason,
    Heartbeat,
    Output,
    Submit,
    pack,
    pack_payload,
    pack_tokens,
    parse,
)

PAUSE_S = 0.5
"""Before a long prompt."""


@dataclass
class Running:
    """A request that the engine is answering."""

    submit: Submit
    num_left: int


@dataclass(frozen=True)
class Engine:
    """Gives every running request a token in each step; steps are `step_s` apart."""

    address: str
    tokenizer_dir: str
    token_id: int
    """That it says all the time."""
    step_s: float
    lifeline_fd: int

    def run(self) -> None:
        dealer = join_as_engine(self.address, 0, tokenizer_dir=self.tokenizer_dir)
        running: dict[tuple[int, int], Running] = {}
        now = time.monotonic()
        next_beat = next_step = now
        while True:
            until = next_step if running else next_beat
            for frames in dealer.receive(max(0.001, until - now)):
                match parse(frames):
                    case Submit() as submit:
                        running[submit.client, submit.request_id] = Running(
                            submit, submit.max_new_tokens
                        )
                    case Abort(client=client, request_id=request_id):
                        if request := running.get((client, request_id)):
                            request.num_left = 1
                    case _:
                        pass
            now = time.monotonic()
            if running and now >= next_step:
                self._step(dealer, running)
                next_step = max(next_step + self.step_s, now)
            if now >= next_beat:
                dealer.send(pack(Heartbeat(0, running=len(running))))
                next_beat = now + HEARTBEAT_S

    def _step(self, dealer: Dealer, running: dict[tuple[int, int], Running]) -> None:
        token = struct.pack("<I", self.token_id)
        deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        ends: defaultdict[int, list[FinishedRequest]] = defaultdict(list)
        for (client, request_id), request in list(running.items()):
            attempt = request.submit.attempt
            request.num_left -= 1
            finish = None if request.num_left else Finish(FinishReason.LENGTH)
            deltas[client].append(Delta(request_id, attempt, tokens=token, finish=finish))
            if finish:
                num_tokens = request.submit.max_new_tokens
                ends[client].append(
                    FinishedRequest(request_id, attempt, FinishReason.LENGTH, 0, num_tokens)
                )
                del running[client, request_id]
        for client, of_client in deltas.items():
            ended = ends.get(client)
            finished = pack_payload(ended) if ended else None
            output = Output(
                client, len(of_client), len(ended or ()), finished, pack_payload(of_client)
            )
            dealer.send(pack(output))


@dataclass
class Seen:
    """What the clients of a load saw."""

    num_requests: int = 0
    num_events: int = 0
    first_event_s: list[float] = field(default_factory=list)
    """From a request to the first bytes of its answer's body, each."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Between two events of an answer: when the second came, and how long after the first."""

    def longest_gap_s(self, since: float, until: float) -> float:
        """Of the gaps that lie within that time, at least in part."""
        return max((gap for at, gap in self.gaps if since < at and at - gap < until), default=0.0)


@dataclass(frozen=True)
class Load:
    """Keeps a number of connections busy for a time at least; prints what they saw as JSON."""

    url: str
    body: str
    """The JSON of every request; `@` stands for a number that is new each time."""
    connections: int
    seconds: float
    lifeline_fd: int
    num_long_prompts: int = 0
    """Requests besides, one after the other, with pauses in which nothing disturbs the others."""
    long_prompt_tokens: int = 0
    """Of each of them."""

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        seen, numbers = Seen(), count(secrets.randbits(40))
        started = time.monotonic()
        disturbing = asyncio.create_task(self._disturb())

        def is_over() -> bool:
            return time.monotonic() > started + self.seconds and disturbing.done()

        jobs = [self._keep_busy(seen, numbers, is_over) for _ in range(self.connections)]
        disturbed, *_ = await asyncio.gather(disturbing, *jobs)
        report = {
            "requests": seen.num_requests,
            "events": seen.num_events,
            "seconds": time.monotonic() - started,
            "first_event_p50_ms": 1e3 * statistics.median(seen.first_event_s),
            "longest_gaps_ms": [1e3 * seen.longest_gap_s(*times) for times in disturbed],
            "calm_gaps_ms": [
                1e3 * seen.longest_gap_s(2 * since - until, since) for since, until in disturbed
            ],
        }
        print(json.dumps(report))

    async def _keep_busy(
        self, seen: Seen, numbers: count[int], is_over: Callable[[], bool]
    ) -> None:
        connection = await Connection.open(self.url)
        while not is_over():
            await connection.post(self.body.replace("@", str(next(numbers))), seen)
        connection.close()

    async def _disturb(self) -> list[tuple[float, float]]:
        """When each long prompt was sent, and when its answer was there. The pause before it is at
        least as long as that."""
        body = json.dumps({"prompt": " word" * self.long_prompt_tokens, "max_tokens": 1})
        connection = await Connection.open(self.url)
        times: list[tuple[float, float]] = []
        pause_s = PAUSE_S
        for _ in range(self.num_long_prompts):
            await asyncio.sleep(pause_s)
            sent_at = time.monotonic()
            await connection.post(body, Seen())
            times.append((sent_at, time.monotonic()))
            pause_s = max(PAUSE_S, 2 * (times[-1][1] - sent_at))
        connection.close()
        return times


class Connection:
    """HTTP/1.1 with as little work as it takes: a client library would be the limit."""

    def __init__(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._target, self._reader, self._writer = target, reader, writer

    @classmethod
    async def open(cls, url: str) -> Connection:
        parts = urlsplit(url)
        streams = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
        return cls(parts.path, *streams)

    async def post(self, body: str, seen: Seen) -> None:
        """One request and its whole answer. Raises `SystemExit` unless its status is 200."""
        head = (
            f"POST {self._target} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        started = time.monotonic()
        self._writer.write((head + body).encode())
        reply = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not reply.startswith(b"http/1.1 200"):
            raise SystemExit(f"refused: {reply.decode()}")
        if b"transfer-encoding: chunked" in reply:
            await self._read_events(seen, started)
        else:
            length = int(reply.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await self._reader.readexactly(length)
            seen.first_event_s.append(time.monotonic() - started)
        seen.num_requests += 1

    async def _read_events(self, seen: Seen, started: float) -> None:
        last = None
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            chunk = await self._reader.readexactly(size + 2)
            now = time.monotonic()
            if last is None:
                seen.first_event_s.append(now - started)
            else:
                seen.gaps.append((now, now - last))
            last = now
            seen.num_events += chunk.count(b"data: ")
        await self._reader.readexactly(2)

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class Direct:
    """The same requests without HTTP, one after the other: prints the median time to the first
    token as JSON."""

    address: str
    prompt_tokens: int
    max_tokens: int
    seconds: float
    lifeline_fd: int

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        client = Client(self.address)
        await client.start()
        await client.wait_for_ranks(1)
        times: list[float] = []
        stop_at = time.monotonic() + self.seconds
        while time.monotonic() < stop_at:
            prompt = secrets.token_bytes(2 * self.prompt_tokens)
            ids = struct.unpack(f"<{self.prompt_tokens}H", prompt)
            started = time.monotonic()
            generation = client.submit(
                pack_tokens(ids),
                SamplingParams(num_tokens_to_generate=self.max_tokens),
            )
            first = None
            async for _ in generation:
                first = first or time.monotonic()
            times.append((first or 0.0) - started)
        await client.close()
        print(json.dumps({"first_token_p50_ms": 1e3 * statistics.median(times)}))


def main() -> None:
    kinds = {"engine": Engine, "load": Load, "direct": Direct}
    peer = tyro.extras.subcommand_cli_from_dict(kinds)
    watch_lifeline(peer.lifeline_fd)
    peer.run()


if __name__ == "__main__":
    main()
