"""`homing bench suspend`: the memory of an engine process that serves, is suspended, and serves on.

Resident memory (RSS), as the system counts it: of one engine behind a coordinator, after it has
filled KV blocks, after it was told to discard them and then to offload its weights, and after all
of it came back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import psutil
import tyro

from homing.errors import ConfigError
from homing.llm import LLM, EngineConfig, SamplingParams

MIB = 2**20


@dataclass(frozen=True)
class SuspendBenchConfig:
    """Measure what a suspended engine gives back to the system; print one JSON object."""

    model: Annotated[str | None, tyro.conf.Positional] = None
    """Hugging Face directory or .gguf file. None: the demo model."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    kv_cache_gb: float = 0.5
    prompts: int = 8
    """Requests that fill KV blocks first."""
    prompt_tokens: int = 1000
    """Of each."""
    num_threads: int = len(os.sched_getaffinity(0))

    def __post_init__(self) -> None:
        if min(self.prompts, self.prompt_tokens, self.num_threads) < 1:
            raise ConfigError("--prompts, --prompt-tokens and --num-threads start at 1")


def main(argv: Sequence[str] | None = None) -> int:
    config = tyro.cli(SuspendBenchConfig, prog="homing bench suspend", args=argv)
    engine_config = EngineConfig(
        dtype=config.dtype, buffer_size_gb=config.kv_cache_gb, num_threads=config.num_threads
    )
    with LLM(config.model, engine_config=engine_config, use_coordinator=True) as llm:
        results = _measure(llm, config)
    json.dump({"bench": "suspend", **asdict(config), "results": results}, sys.stdout, indent=2)
    print()
    return 0


def _measure(llm: LLM, config: SuspendBenchConfig) -> list[dict[str, Any]]:
    engine = _engine_process()
    results: list[dict[str, Any]] = []

    def note(state: str, do: Callable[[], Any]) -> None:
        start = time.perf_counter()
        do()
        seconds = time.perf_counter() - start
        rss = engine.memory_info().rss
        results.append(
            {"state": state, "rss_mib": round(rss / MIB, 1), "seconds": round(seconds, 3)}
        )

    note("loaded", lambda: None)
    note("has served", lambda: _fill(llm, config))
    llm.pause()
    note("KV discarded", lambda: llm.suspend(kv="discard"))
    note("weights offloaded, too", lambda: llm.suspend(kv="discard", weights="offload"))
    note("resumed", llm.resume)
    llm.unpause()
    note("has served again", lambda: _fill(llm, config))
    return results


def _fill(llm: LLM, config: SuspendBenchConfig) -> None:
    """Prompts without a common prefix: each fills blocks of its own."""
    prompts = [
        [5 + (number + place) % 250 for place in range(config.prompt_tokens)]
        for number in range(config.prompts)
    ]
    llm.generate(prompts, SamplingParams(num_tokens_to_generate=1), progress=False)


def _engine_process() -> psutil.Process:
    [engine] = filter(_is_engine, psutil.Process().children(recursive=True))
    return engine


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "homing.engine" in process.cmdline()
    except psutil.Error:  # it has ended; whoever runs this may have children of its own
        return False
