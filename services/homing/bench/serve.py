"""`homing bench serve`: streamed completions against any OpenAI server, measured at the client.

The prompts are random and fresh, so what a server has cached is the shared prefix that was asked
for. Should it report more, the run measured a cache and is void.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import httpx
import numpy as np
import tyro

from homing.bench.completion import Completion, stream_completion
from homing.bench.prompts import PromptSource
from homing.errors import ConfigError

# Two fresh prompts may begin alike by chance: a word or two. A KV block is 16 tokens or more.
CHANCE_CACHED_TOKENS = 8
CALIBRATION_WORDS = 64


@dataclass(frozen=True)
class ServeBenchConfig:
    """Measure any OpenAI server with streamed completions; print one JSON object."""

    base_url: str = "http://127.0.0.1:5000/v1"
    """The server, with or without /v1."""
    model: str | None = None
    """Model name to ask for. Default: the first that the server lists."""
    concurrency: tuple[int, ...] = (8,)
    """Requests in flight at a time. Several numbers give one result each."""
    num_prompts: int = 64
    """Requests of each result."""
    prompt_tokens: int = 128
    """Tokens of each prompt, about: the result has the server's count."""
    shared_prefix_tokens: int = 0
    """Of those, the tokens at the start that all prompts of the run share."""
    long_prompt_tokens: int = 0
    """Keep one more request at the server, of so many prompt tokens and one of answer, which is not
    measured: how long do the others wait beside a long prompt? 0: none."""
    max_tokens: int = 64
    """Tokens to generate for each prompt."""
    ignore_eos: bool = True
    """Generate max_tokens even where the model would stop. Not every server knows this field."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int | None = None
    """Makes the prompts repeat from run to run: the second run meets a full cache and is void."""
    api_key: str | None = None
    """Sent as a bearer token."""
    timeout_s: float = 600.0
    """Longest wait for the next bytes of an answer, in seconds."""

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens:
            raise ConfigError(
                f"--shared-prefix-tokens {self.shared_prefix_tokens} must be less than "
                f"--prompt-tokens {self.prompt_tokens}"
            )
        if min(self.concurrency, default=0) < 1 or self.num_prompts < 1 or self.max_tokens < 1:
            raise ConfigError("--concurrency, --num-prompts and --max-tokens start at 1")

    @property
    def api_root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + "/v1/"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 0 when every request succeeded and none met an unexpected cache."""
    config = tyro.cli(ServeBenchConfig, prog="homing bench serve", args=argv)
    report = asyncio.run(run(config))
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0 if all(result["valid"] for result in report["results"]) else 1


async def run(config: ServeBenchConfig) -> dict:
    """Measure each concurrency in turn. Raises ConfigError when the server does not answer."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=config.api_root, headers=headers, limits=limits, timeout=config.timeout_s
    ) as client:
        model = config.model or await _first_model(client)
        tokens_per_word = await _calibrate(client, config, model)
        results = [
            await _measure(client, config, model, concurrency, tokens_per_word)
            for concurrency in config.concurrency
        ]
    settings = asdict(config) | {"model": model}
    del settings["api_key"]  # reports are passed around
    return {"bench": "serve", **settings, "results": results}


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("models")
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise ConfigError(f"{client.base_url}models does not name a model: {error}") from error


async def _calibrate(client: httpx.AsyncClient, config: ServeBenchConfig, model: str) -> float:
    """The server's tokens per word, by a first request that is not measured."""
    prompt = PromptSource(num_words=CALIBRATION_WORDS, num_shared_words=0, seed=None).next_prompt()
    completion = await stream_completion(client, _body(config, model, prompt))
    if completion.error is not None:
        raise ConfigError(f"{client.base_url}completions does not answer: {completion.error}")
    return (completion.prompt_tokens or CALIBRATION_WORDS) / CALIBRATION_WORDS


def _body(config: ServeBenchConfig, model: str, prompt: str) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | {"ignore_eos": True} if config.ignore_eos else body


async def _measure(
    client: httpx.AsyncClient,
    config: ServeBenchConfig,
    model: str,
    concurrency: int,
    tokens_per_word: float,
) -> dict:
    source = PromptSource(
        num_words=round(config.prompt_tokens / tokens_per_word),
        num_shared_words=round(config.shared_prefix_tokens / tokens_per_word),
        seed=config.seed,
    )
    bodies = iter([_body(config, model, source.next_prompt()) for _ in range(config.num_prompts)])
    completions: list[Completion] = []

    async def send_one_after_another() -> None:
        for body in bodies:
            completions.append(await stream_completion(client, body))

    async with _beside_long_prompts(client, config, model, tokens_per_word) as long_prompts:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(send_one_after_another())
        wall_s = time.perf_counter() - started
    max_cached = config.shared_prefix_tokens + CHANCE_CACHED_TOKENS
    result = {"concurrency": concurrency} | summarize(completions, wall_s, max_cached)
    if config.long_prompt_tokens:
        result["long_prompt_ttft_ms"] = _spread(_first_token_times(long_prompts))
        for failed in (each for each in long_prompts if each.error is not None):
            result |= {"valid": False, "first_error": failed.error}
    return result


@asynccontextmanager
async def _beside_long_prompts(
    client: httpx.AsyncClient, config: ServeBenchConfig, model: str, tokens_per_word: float
) -> AsyncIterator[list[Completion]]:
    """One long prompt after the other, if any are asked for; yields those that were answered."""
    answered: list[Completion] = []
    num_words = round(config.long_prompt_tokens / tokens_per_word)
    source = PromptSource(num_words=num_words, num_shared_words=0, seed=None)

    async def send() -> None:
        while True:
            body = _body(config, model, source.next_prompt()) | {"max_tokens": 1}
            answered.append(await stream_completion(client, body))
            if answered[-1].error is not None:
                return

    async with asyncio.TaskGroup() as group:
        task = group.create_task(send()) if config.long_prompt_tokens else None
        yield answered
        if task:
            task.cancel()


def _first_token_times(completions: Iterable[Completion]) -> Iterator[float]:
    """Seconds until the first token."""
    for completion in completions:
        if completion.content_times:
            yield completion.content_times[0] - completion.started


def summarize(completions: Sequence[Completion], wall_s: float, max_cached_tokens: int) -> dict:
    """One result: latencies in milliseconds, rates over the whole `wall_s`.

    `valid` is false when a request failed, or had more than `max_cached_tokens` from a cache.
    """
    done = [completion for completion in completions if completion.error is None]
    errors = [completion.error for completion in completions if completion.error is not None]
    output_tokens = sum(completion.num_output_tokens for completion in done)
    cached = [c.cached_tokens for c in done if c.cached_tokens is not None]
    unexpected = sum(tokens > max_cached_tokens for tokens in cached)
    return {
        "valid": not errors and not unexpected and bool(done),
        "num_requests": len(completions),
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(done) / wall_s, 3),
        "output_tokens_per_s": round(output_tokens / wall_s, 2),
        "output_tokens": output_tokens,
        "prompt_tokens_mean": _mean(c.prompt_tokens for c in done if c.prompt_tokens is not None),
        "cached_tokens": sum(cached) if cached else None,
        "requests_with_unexpected_cached_tokens": unexpected,
        "ttft_ms": _spread(_first_token_times(done)),
        "itl_ms": _spread(gap for c in done for gap in np.diff(c.content_times)),
        "e2e_ms": _spread(c.ended - c.started for c in done),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.fmean(found), 2) if found else None


def _spread(seconds: Iterable[float]) -> dict[str, float] | None:
    milliseconds = [1e3 * value for value in seconds]
    if not milliseconds:
        return None
    p50, p90, p99 = np.percentile(milliseconds, [50, 90, 99])
    figures = {"mean": statistics.fmean(milliseconds), "p50": p50, "p90": p90, "p99": p99}
    return {name: round(float(value), 3) for name, value in figures.items()}
