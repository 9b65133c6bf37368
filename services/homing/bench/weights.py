"""`homing bench weights`: how long an engine takes to get new weights, beside a plain memcpy.

All parameters of a model, from an iterator of this process and from a file in shared memory, as
another process puts it there. The copy is of the same bytes, once into memory that is there already
and once into memory that the system must find first, as it must for an update. Both are measured
beside each update: all of it moves with the machine's neighbours.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch import Tensor

from homing.engine.memory import trim
from homing.engine.models import Model
from homing.engine.models.checkpoint import TensorFiles, weight_files
from homing.engine.weight_update import StagedWeights, open_source, stage
from homing.engine.weights import (
    DTYPES,
    ModelFiles,
    load_model,
    resolve_model,
    say,
)
from homing.errors import ConfigError
from homing.llm.weights import weight_update
from homing.native import default_cache_dir
from homing.wire import InFlightKV

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class WeightsBenchConfig:
    """Measure updates of a model's weights in this process; print one JSON object."""

    model: Annotated[str | None, tyro.conf.Positional] = None
    """Hugging Face directory or .gguf file. None: the demo model."""
    dtype: str = "bf16"
    """Of the engine."""
    trainer_dtype: str = "bf16"
    """Of the tensors that it gets."""
    repeats: int = 7
    """Updates from each source; the medians are told."""
    num_threads: int = len(os.sched_getaffinity(0))
    """Threads of the engine."""

    def __post_init__(self) -> None:
        for flag, dtype in (("dtype", self.dtype), ("trainer-dtype", self.trainer_dtype)):
            if dtype not in DTYPES:
                raise ConfigError(f"--{flag} {dtype}: there are {', '.join(DTYPES)}")
        if min(self.repeats, self.num_threads) < 1:
            raise ConfigError("--repeats and --num-threads start at 1")


@dataclass(frozen=True)
class Update:
    """One update; seconds."""

    memcpy_s: float
    fresh_memcpy_s: float
    """The same into new memory."""
    transfer_s: float
    """Until the engine has the parameters in its dtype, where nobody changes them."""
    check_s: float
    """Looking for values that are not finite."""
    pack_s: float
    """The repacking for the kernels."""
    release_s: float
    """Giving back the memory that the parameters came in: for a file, the end of its mapping."""
    publish_s: float | None = None
    """The trainer's part, before the engine's: its tensors' way into shared memory."""


def main(argv: Sequence[str] | None = None) -> int:
    config = tyro.cli(WeightsBenchConfig, prog="homing bench weights", args=argv)
    torch.set_num_threads(config.num_threads)
    cache_dir = default_cache_dir(os.environ)
    files = resolve_model(config.model, cache_dir=cache_dir)
    model = load_model(
        files,
        dtype=config.dtype,
        num_threads=config.num_threads,
        cache_dir=cache_dir,
    )
    tensors = _trainer_tensors(files, DTYPES[config.trainer_dtype])
    memcpy = Memcpy(tensors)
    results: list[dict[str, Any]] = []
    for source, update in (("iterator", _from_iterator), ("shared_memory", _from_shared_memory)):
        say(f"updating from {source}, {config.repeats} times")
        runs: list[Update] = []
        for _ in range(1 + config.repeats):
            runs.append(update(model, tensors, memcpy))
            trim()  # an engine gives the old model's memory back, too, when it swaps
        # The first one met memory that nobody had before.
        results.append({"source": source} | _medians(runs[1:]))
    settings = asdict(config) | {"model": files.name, "num_bytes": memcpy.num_bytes}
    json.dump({"bench": "weights", **settings, "results": results}, sys.stdout, indent=2)
    print()
    return 0


def _trainer_tensors(files: ModelFiles, dtype: torch.dtype) -> Tensors:
    checkpoint = TensorFiles(weight_files(files.directory))
    try:
        return {name: tensor.to(dtype, copy=True) for name, tensor in checkpoint.items()}
    finally:
        checkpoint.close()


class Memcpy:
    """libc's, of as many bytes as the tensors have."""

    def __init__(self, tensors: Tensors) -> None:
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._from = torch.ones(self.num_bytes, dtype=torch.uint8)
        self._to = torch.ones_like(self._from)

    def seconds(self) -> tuple[float, float]:
        """Into memory that is there, and into new memory."""
        start = time.perf_counter()
        ctypes.memmove(self._to.data_ptr(), self._from.data_ptr(), self.num_bytes)
        between = time.perf_counter()
        fresh = np.empty(self.num_bytes, np.uint8)  # in huge pages, as `Arena`
        ctypes.memmove(fresh.ctypes.data, self._from.data_ptr(), self.num_bytes)
        return between - start, time.perf_counter() - between


def _from_iterator(model: Model, tensors: Tensors, memcpy: Memcpy) -> Update:
    copies_s = memcpy.seconds()
    return _update(copies_s, stage(model, tensors.items(), partial=False))


def _from_shared_memory(model: Model, tensors: Tensors, memcpy: Memcpy) -> Update:
    start = time.perf_counter()
    how = {"partial": False, "in_flight": InFlightKV.KEEP, "epoch": None}
    with weight_update(tensors, **how) as update:
        publish_s = time.perf_counter() - start
        copies_s = memcpy.seconds()
        start = time.perf_counter()
        with open_source(update, model, None) as source:
            opening_s = time.perf_counter() - start
            staged = stage(model, source, partial=False, owned=True)
    return _update(copies_s, staged, opening_s, publish_s)


def _update(
    copies_s: tuple[float, float],
    staged: StagedWeights,
    opening_s: float = 0.0,
    publish_s: float | None = None,
) -> Update:
    transfer_s = staged.transfer_s + opening_s
    return Update(*copies_s, transfer_s, staged.check_s, staged.pack_s, staged.release_s, publish_s)


def _medians(runs: Sequence[Update]) -> dict[str, float | None]:
    def median(part: Callable[[Update], float]) -> float:
        return round(statistics.median(map(part, runs)), 4)

    return {
        "memcpy_s": median(lambda run: run.memcpy_s),
        "fresh_memcpy_s": median(lambda run: run.fresh_memcpy_s),
        "publish_s": None if runs[0].publish_s is None else median(lambda run: run.publish_s or 0),
        "transfer_s": median(lambda run: run.transfer_s),
        "transfer_per_memcpy": median(lambda run: run.transfer_s / run.memcpy_s),
        "transfer_per_fresh_memcpy": median(lambda run: run.transfer_s / run.fresh_memcpy_s),
        "check_s": median(lambda run: run.check_s),
        "pack_s": median(lambda run: run.pack_s),
        "release_s": median(lambda run: run.release_s),
    }
