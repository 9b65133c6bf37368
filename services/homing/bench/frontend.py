"""`homing bench frontend`: what one frontend process costs, and what it adds to an answer's time.

The real frontend and coordinator processes; an engine that computes nothing and gives each running
request a token a step. CPU is the frontend's own, of all its threads, so that

    requests or tokens / CPU seconds

is what one core sustains, whatever else the machine is doing. A bare Quart app on Hypercorn answers
the same clients in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from homing.bench.processes import Processes, cpu_seconds, processes
from homing.engine.weights import resolve_model
from homing.launch.readiness import Fleet, wait_until_ready
from homing.native import default_cache_dir
from homing.tokenizer import Tokenizer

PEERS = "homing.bench.frontend_peers"
READY_S = 60.0
LATENCY_ROUNDS = 5
FILLER = " the quick brown fox jumps over the lazy dog and"


@dataclass(frozen=True)
class FrontendBenchConfig:
    """Measure one frontend process; print one JSON object."""

    prompt_tokens: int = 128
    """Tokens of each prompt, about: they are sent as text."""
    max_tokens: int = 64
    """Tokens of each streamed answer. Answers that are not streamed have one."""
    connections: int = 64
    """Of clients; each has one request under way."""
    step_ms: float = 10.0
    """Between two tokens of an answer, while it is streamed."""
    long_prompts: int = 5
    """Requests with one, while others stream."""
    long_prompt_tokens: int = 100_000
    """Of each."""
    seconds: float = 4.0
    """Duration of each run."""


class Bench:
    def __init__(self, config: FrontendBenchConfig, family: Processes) -> None:
        self.config = config
        self._family = family
        cache_dir = default_cache_dir(os.environ)
        self._tokenizer_dir = str(resolve_model(None, cache_dir=cache_dir).directory)
        tokenizer = Tokenizer.from_dir(self._tokenizer_dir)
        self._token_id = tokenizer.encode(" word")[0]
        self._tokens_of_filler = len(tokenizer.encode(FILLER))

    def fleet(self, name: str, step_s: float) -> tuple[subprocess.Popen[str], str, str]:
        """A coordinator, an engine and a frontend: the last, its URL and the coordinator's."""
        address = self._family.address(name)
        self._family.start("homing.coordinator", "--bind", address, quiet=True)
        words = ("engine", "--address", address, "--tokenizer-dir", self._tokenizer_dir)
        words += ("--token-id", str(self._token_id), "--step-s", str(step_s))
        self._family.start(PEERS, *words)
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port, fd = listener.getsockname()[1], listener.fileno()
            flags = ("--coordinator", address, "--fd", str(fd))
            frontend = self._family.start("homing.frontend", *flags, fds=(fd,), quiet=True)
        fleet = Fleet("127.0.0.1", port, num_frontends=1, num_ranks=1)
        asyncio.run(wait_until_ready(fleet, timeout_s=READY_S))
        return frontend, f"http://127.0.0.1:{port}/v1/completions", address

    def bare(self, step_s: float) -> tuple[subprocess.Popen[str], str]:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port, fd = listener.getsockname()[1], listener.fileno()
            words = ("--fd", str(fd), "--events", str(self.config.max_tokens))
            words += ("--step-s", str(step_s))
            app = self._family.start("homing.bench.bare_app", *words, fds=(fd,))
        return app, f"http://127.0.0.1:{port}/v1/completions"

    def load(self, url: str, *, stream: bool, **changes: Any) -> dict[str, Any]:
        """What the clients saw."""
        config = self.config
        body = self.body(config.prompt_tokens, stream=stream)
        flags = {"url": url, "body": body, "connections": config.connections}
        flags |= {"seconds": config.seconds} | changes
        words = [str(w) for k, value in flags.items() for w in (f"--{k}", value)]
        client = self._family.start(PEERS, "load", *words)
        output = client.communicate()[0]
        if client.returncode:
            raise SystemExit("the clients failed")
        return json.loads(output)

    def direct(self, address: str, seconds: float) -> dict[str, float]:
        """The same without HTTP, by one client."""
        words = ("direct", "--address", address, "--prompt-tokens", str(self.config.prompt_tokens))
        words += ("--max-tokens", "1", "--seconds", str(seconds))
        return json.loads(self._family.start(PEERS, *words).communicate()[0])

    def body(self, prompt_tokens: int, *, stream: bool) -> str:
        prompt = "@" + FILLER * max(1, prompt_tokens // self._tokens_of_filler)
        max_tokens = self.config.max_tokens if stream else 1
        return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": stream})


def run(config: FrontendBenchConfig) -> dict[str, Any]:
    """Measure; returns what is printed."""
    with processes() as family:
        bench = Bench(config, family)
        frontend, url, address = bench.fleet("at-once", 0.0)
        app, bare_url = bench.bare(config.step_ms / 1e3)
        plain = _cost(bench, frontend, url, stream=False)
        bare_plain = _cost(bench, app, bare_url, stream=False)
        latency = _latency(bench, url, bare_url, address)
        frontend, url, _ = bench.fleet("in-steps", config.step_ms / 1e3)
        streamed = _cost(bench, frontend, url, stream=True)
        bare_streamed = _cost(bench, app, bare_url, stream=True)
        gaps = _gaps(bench, url)
    results = [
        {"kind": "not streamed", **plain, "bare_app": bare_plain},
        {"kind": "streamed", **streamed, "bare_app": bare_streamed},
        {"kind": "time to the answer, one token, one client", **latency},
        {"kind": f"prompts of {config.long_prompt_tokens} tokens while others stream", **gaps},
    ]
    return {
        "bench": "frontend",
        "prompt_tokens": config.prompt_tokens,
        "max_tokens": config.max_tokens,
        "connections": config.connections,
        "step_ms": config.step_ms,
        "cpus": len(os.sched_getaffinity(0)),
        "results": results,
    }


def _cost(
    bench: Bench, process: subprocess.Popen[str], url: str, *, stream: bool
) -> dict[str, float]:
    bench.load(url, stream=stream, seconds=0.5)  # warm
    before = cpu_seconds(process)
    seen = bench.load(url, stream=stream)
    cpu_s = cpu_seconds(process) - before
    per_core = {"requests_per_cpu_s": round(seen["requests"] / cpu_s, 1)}
    if stream:
        per_core["events_per_cpu_s"] = round(seen["events"] / cpu_s, 1)
    return per_core | {
        "requests_per_s": round(seen["requests"] / seen["seconds"], 1),
        "cpu_share": round(cpu_s / seen["seconds"], 3),
    }


def _latency(bench: Bench, url: str, bare_url: str, address: str) -> dict[str, float]:
    """Of one client, and of a bare app's. In turns, as the machine's pace wanders: what HTTP adds
    is the median of the rounds' own differences."""
    ours: list[float] = []
    bare: list[float] = []
    direct: list[float] = []
    for _ in range(LATENCY_ROUNDS):
        seconds = bench.config.seconds / LATENCY_ROUNDS
        for times, at in ((ours, url), (bare, bare_url)):
            seen = bench.load(at, stream=False, connections=1, seconds=seconds)
            times.append(seen["first_event_p50_ms"])
        direct.append(bench.direct(address, seconds)["first_token_p50_ms"])
    added = [over_http - without for over_http, without in zip(ours, direct, strict=True)]
    return {
        "over_http_p50_ms": round(statistics.median(ours), 3),
        "without_http_p50_ms": round(statistics.median(direct), 3),
        "added_p50_ms": round(statistics.median(added), 3),
        "bare_app_p50_ms": round(statistics.median(bare), 3),
    }


def _gaps(bench: Bench, url: str) -> dict[str, list[float]]:
    """The longest between two tokens of others while each long prompt is served, and in a time of
    the same length before it."""
    config = bench.config
    long = {"num-long-prompts": config.long_prompts}
    long |= {"long-prompt-tokens": config.long_prompt_tokens}
    seen = bench.load(url, stream=True, connections=4, **long)
    return {
        "longest_gaps_ms": [round(gap, 1) for gap in seen["longest_gaps_ms"]],
        "calm_gaps_ms": [round(gap, 1) for gap in seen["calm_gaps_ms"]],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and print its JSON."""
    config = tyro.cli(FrontendBenchConfig, prog="homing bench frontend", args=argv)
    json.dump(run(config), sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
