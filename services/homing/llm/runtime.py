"""What `LLM` and `AsyncLLM` share in coordinator mode: a fleet on a loop of its own."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeAlias, TypeVar

from homing.launch.torchrun.config import JobRank
from homing.llm.config import EngineConfig
from homing.llm.fleet import Fleet
from homing.llm.loop_thread import LoopThread
from homing.llm.model_files import ModelLike, TokenizerLike, dtype_of, model_path
from homing.llm.prompts import Batch
from homing.llm.requests import OnDelta
from homing.llm.results import Result
from homing.llm.text import TextHooks
from homing.llm.weights import WeightsLike, given_or_own

T = TypeVar("T")

RankResults: TypeAlias = dict[int, dict[str, Any]]
"""Rank -> what it says of a command that it carried out."""


class Runtime:
    """Starts at once; `started` tells when it is done, or why it could not be."""

    def __init__(
        self,
        model: ModelLike,
        tokenizer: TokenizerLike | None,
        config: EngineConfig,
        hooks: TextHooks,
        data_parallel_size: int | None,
    ) -> None:
        self.job = JobRank.of()
        self.config = config
        self._model = model
        num_engines = _num_engines(data_parallel_size, self.job)
        resources = ExitStack()
        try:
            path = model_path(model, tokenizer, resources)
            config = dataclasses.replace(
                config,
                dtype=config.dtype or dtype_of(model),
                num_threads=config.num_threads or (self.job and self.job.num_threads),
            )
            self.thread = LoopThread("homing-llm")
            self.fleet = Fleet(config.of_launch(path, num_engines), hooks, self.job, resources)
        except BaseException:
            resources.close()
            raise
        self.started: Future[None] = self.thread.submit(self.fleet.start())
        # Also when the interpreter ends, or nobody refers to it any more.
        self.close = weakref.finalize(self, _close, self.thread, self.fleet, self.started)

    @property
    def is_primary_rank(self) -> bool:
        return self.job is None or self.job.is_primary

    def wait_until_started(self) -> None:
        """Raises why it could not be; then it is closed."""
        try:
            self.started.result()
        except BaseException:
            self.close()
            raise

    def generate(self, what: str, batch: Batch, on_delta: OnDelta) -> Future[list[Result]]:
        """Begin it. `on_delta` is called on the fleet's thread."""
        self._check(what)
        return self.thread.submit(self.fleet.requests.generate(batch, on_delta))

    def submit(self, what: str, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begin what only the primary rank may."""
        self._check(what)
        return self.thread.submit(work(self.fleet))

    def run(self, what: str, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        """Do it, and wait."""
        self._check(what)
        return self.thread.run(work(self.fleet))

    def weights(self, source: WeightsLike | None) -> WeightsLike:
        return given_or_own(source, self._model)

    def wait_until_closed(self) -> None:
        if self.close.alive:
            self.thread.run(self.fleet.closed())

    def _check(self, what: str) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(f"{what}: on the primary rank alone; see is_primary_rank")
        if not self.close.alive:
            raise RuntimeError(f"{what}: it was shut down")


def _close(thread: LoopThread, fleet: Fleet, started: Future[None]) -> None:
    if thread.is_current:  # the garbage collector may run on any thread; this one must not wait
        threading.Thread(target=_close, args=(thread, fleet, started)).start()
        return
    started.cancel()
    thread.run(fleet.close())
    thread.close()


def _num_engines(asked: int | None, job: JobRank | None) -> int:
    if asked is not None and asked < 1:
        raise ValueError(f"data_parallel_size is {asked}; it must be at least 1")
    if job is None:
        return asked or 1
    if asked not in (None, job.world_size):
        raise ValueError(
            f"data_parallel_size is {asked}, but torchrun started {job.world_size} ranks: leave "
            "it out"
        )
    return job.world_size
