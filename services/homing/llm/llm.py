"""LLM: the blocking face, with the engine in this process or behind a coordinator."""

from __future__ import annotations

import queue
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from homing.client import Client
from homing.launch.torchrun.config import JobRank
from homing.llm import local
from homing.llm.config import EngineConfig, ServeConfig
from homing.llm.model_files import ModelLike, TokenizerLike
from homing.llm.progress import BatchProgress
from homing.llm.prompts import Batch, GivenParams, Prompts, read_batch
from homing.llm.results import Delta, Result, raise_first_error, raising_errors
from homing.llm.runtime import RankResults, Runtime
from homing.llm.text import DetokenizeGenerations, TextHooks, TokenizePrompt
from homing.llm.weights import WeightsLike, weight_update
from homing.wire import InFlightKV, KVMode, PauseMode, WeightsMode

if TYPE_CHECKING:
    from homing.engine.block_pool import BlockPool
    from homing.engine.runner import Runner
    from homing.engine.scheduler import Scheduler
    from homing.llm.engine import Engine


class LLM:
    """A language model for scripts and notebooks; usable from any thread.

    Direct mode: the engine is in this process. Coordinator mode: `data_parallel_size` engines are
    processes, started and kept running by this one, or one of each rank of a torchrun job.
    """

    def __init__(
        self,
        model: ModelLike = None,
        *,
        tokenizer: TokenizerLike | None = None,
        engine_config: EngineConfig | None = None,
        use_coordinator: bool = False,
        data_parallel_size: int | None = None,
        engine: Engine | None = None,
        tokenize_prompt: TokenizePrompt | None = None,
        detokenize_generations: DetokenizeGenerations | None = None,
    ) -> None:
        """
        model: a Hugging Face directory, a .gguf file, a transformers model, or None for the demo
        model; tokenizer: a directory or a transformers tokenizer, in place of the model's own.
        data_parallel_size: engines in coordinator mode. None: one, or one a rank under torchrun.
        engine: one of your own making, for direct mode, in place of all of the above.
        tokenize_prompt, detokenize_generations: functions that replace the tokenizer's.
        """
        self._engine: Engine | None = None
        self._runtime: Runtime | None = None
        self._owns_engine = engine is None
        config = engine_config or EngineConfig()
        if use_coordinator:
            if engine is not None:
                raise ValueError("engine= is for direct mode: a coordinator has other processes'")
            hooks = TextHooks(tokenize_prompt, detokenize_generations)
            self._runtime = Runtime(model, tokenizer, config, hooks, data_parallel_size)
            self._runtime.wait_until_started()
            return
        if data_parallel_size not in (None, 1):
            raise ValueError(
                f"data_parallel_size is {data_parallel_size}; without use_coordinator it must be 1"
            )
        # It loads torch, which coordinator mode does without.
        from homing.llm.engine import Engine

        self._engine = engine or Engine(
            model,
            tokenizer,
            config,
            tokenize_prompt=tokenize_prompt,
            detokenize_generations=detokenize_generations,
        )

    # What it is made of

    @property
    def is_primary_rank(self) -> bool:
        """Whether this process may generate: of a torchrun job in coordinator mode, only global
        rank 0."""
        if self._runtime is not None:
            return self._runtime.is_primary_rank
        job = JobRank.of()
        return job is None or job.is_primary

    @property
    def engine(self) -> Engine:
        """Direct mode's engine."""
        if self._runtime is not None:
            raise RuntimeError("engine: in coordinator mode the engines are other processes")
        if self._engine is None:
            raise RuntimeError("it was shut down")
        return self._engine

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def block_pool(self) -> BlockPool:
        return self.engine.block_pool

    @property
    def runner(self) -> Runner:
        return self.engine.runner

    # Generating

    def generate(
        self,
        prompts: Prompts,
        sampling_params: GivenParams = None,
        *,
        multi_modal_data: Any = None,
        progress: bool | None = None,
        raise_errors: bool = True,
    ) -> list[Result]:
        """The results in the order of the prompts, a list for a single prompt, too.

        prompts: a text, a list of texts, a list of token ids, or a list of those.
        sampling_params: for all, or a list with one for each.
        multi_modal_data: None; no model that is served here takes media.
        progress: show a progress bar on stderr. None: for long batches on a terminal.
        raise_errors: raise the first error that ends a request, rather than return a result with
        status FAILED for it. What is wrong with a request as such is always raised, as a
        `ValueError`, before any is started.
        """
        batch = read_batch(prompts, sampling_params, multi_modal_data)
        with BatchProgress(len(batch), progress) as bar:
            if self._runtime is None:
                results = local.generate(self.engine, batch, bar.on_delta)
            else:
                results = self._runtime.generate("generate", batch, bar.on_delta).result()
        if raise_errors:
            raise_first_error(results)
        return results

    def stream(
        self,
        prompts: Prompts,
        sampling_params: GivenParams = None,
        *,
        multi_modal_data: Any = None,
    ) -> Iterator[Delta]:
        """What is new of each answer, as it comes; several prompts' answers are interleaved.

        An error that ends a request is raised. Leaving the iterator aborts what is unfinished.
        """
        batch = read_batch(prompts, sampling_params, multi_modal_data)
        if self._runtime is None:
            return raising_errors(local.deltas(self.engine, batch))
        return raising_errors(_fleet_deltas(self._runtime, batch))

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End these requests, or all; their results have what was generated until then."""
        if self._runtime is not None:
            self._runtime.run("abort", lambda fleet: fleet.requests.abort(request_ids))
        else:
            self.engine.abort_requests(request_ids)

    # Lifecycle

    def pause(self, mode: PauseMode | str = PauseMode.KEEP) -> RankResults:
        """Have every engine stop between two steps.

        mode: requests stay and new ones queue ("keep"), or run to their ends first ("wait"), or end
        now, with what they generated ("abort").
        """
        return self._command("pause", lambda client: client.pause(mode))

    def unpause(self) -> RankResults:
        """Undo `pause`."""
        return self._command("unpause", lambda client: client.unpause())

    def suspend(
        self, kv: KVMode | str | None = None, weights: WeightsMode | str = WeightsMode.KEEP
    ) -> RankResults:
        """Give memory of paused engines back to the system.

        kv: keep the KV cache ("persist"), move what is in use to files ("offload") or forget it,
        and compute it again ("discard"). None: what `EngineConfig.kv_cache_management_mode` says.
        weights: "keep" or "offload".
        """
        mode = kv or self._coordinated("suspend").config.kv_cache_management_mode
        return self._command("suspend", lambda client: client.suspend(mode, weights))

    def resume(self) -> RankResults:
        """Undo `suspend`. The engines are paused then."""
        return self._command("resume", lambda client: client.resume())

    def reset(self) -> RankResults:
        """End every request as aborted, and forget every prefix; in any state."""
        return self._command("reset", lambda client: client.reset())

    def set_generation_epoch(self, epoch: int) -> RankResults:
        """Count the weights as those of `epoch` from now on. Epochs only increase."""
        return self._command("set_generation_epoch", lambda client: client.set_epoch(epoch))

    def update_weights(
        self,
        source: WeightsLike | None = None,
        *,
        partial: bool = False,
        in_flight: InFlightKV | str = InFlightKV.KEEP,
        epoch: int | None = None,
    ) -> RankResults:
        """Give every engine the same new weights between two of its steps, or none of them.

        source: a Hugging Face directory, (name, tensor) pairs or a mapping of them, or a torch
        module; None: the model that this was made with, as it is now.
        partial: some parameters are new, the others stay.
        in_flight: requests that are running keep their keys and values ("keep") or compute them
        again by the new weights ("recompute").
        epoch: of the new weights; None: the next one.
        """
        runtime = self._coordinated("update_weights")
        weights = runtime.weights(source)
        with weight_update(weights, partial=partial, in_flight=in_flight, epoch=epoch) as update:
            return self._command("update_weights", lambda client: client.update_weights(update))

    def serve(self, config: ServeConfig | None = None, *, blocking: bool = True) -> str:
        """Serve the OpenAI API over HTTP beside this; returns the URL once it answers.

        blocking: return only when somebody calls `shutdown`.
        """
        runtime = self._coordinated("serve")
        url = runtime.run("serve", lambda fleet: fleet.serve(config or ServeConfig()))
        if blocking:
            self.wait_for_shutdown()
        return url

    def wait_for_shutdown(self) -> None:
        """Wait until `shutdown` is called: here or, in a torchrun job, on the primary rank."""
        self._coordinated("wait_for_shutdown").wait_until_closed()

    def shutdown(self) -> None:
        """Stop everything; on the primary rank, that of all ranks. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None and self._owns_engine:
            engine.close()
        if self._runtime is not None:
            self._runtime.close()

    def _command(
        self, what: str, command: Callable[[Client], Coroutine[Any, Any, RankResults]]
    ) -> RankResults:
        return self._coordinated(what).run(what, lambda fleet: command(fleet.client))

    def _coordinated(self, what: str) -> Runtime:
        if self._runtime is None:
            raise RuntimeError(f"{what}: needs a coordinator: LLM(..., use_coordinator=True)")
        return self._runtime

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut down. A rank that is not the primary first waits for that one to do so."""
        if kind is None and self._runtime is not None and not self.is_primary_rank:
            self.wait_for_shutdown()
        self.shutdown()


def _fleet_deltas(runtime: Runtime, batch: Batch) -> Iterator[Delta]:
    inbox: queue.SimpleQueue[Delta | Future[list[Result]]] = queue.SimpleQueue()
    running = runtime.generate("stream", batch, inbox.put)
    running.add_done_callback(inbox.put)
    try:
        while isinstance(item := inbox.get(), Delta):
            yield item
        item.result()
    finally:
        running.cancel()
