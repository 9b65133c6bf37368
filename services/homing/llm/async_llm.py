"""AsyncLLM: the asyncio face of a fleet. Works on any event loop, and on several in turn: the
fleet's own is on another thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, overload

from homing.client import Client
from homing.llm.config import EngineConfig, ServeConfig
from homing.llm.fleet import Fleet
from homing.llm.model_files import ModelLike, TokenizerLike
from homing.llm.progress import BatchProgress
from homing.llm.prompts import GivenParams, PromptLike, Prompts, read_batch
from homing.llm.results import Delta, Result, raise_first_error
from homing.llm.runtime import RankResults, Runtime
from homing.llm.text import DetokenizeGenerations, TextHooks, TokenizePrompt
from homing.llm.weights import WeightsLike, weight_update
from homing.wire import InFlightKV, KVMode, PauseMode, WeightsMode

T = TypeVar("T")


class AsyncLLM:
    """A language model for asyncio, in coordinator mode; see `LLM` for what the arguments mean.

    The constructor returns while the engines start; `async with`, or the first call, waits for
    them, and raises why they could not.
    """

    def __init__(
        self,
        model: ModelLike = None,
        *,
        tokenizer: TokenizerLike | None = None,
        engine_config: EngineConfig | None = None,
        use_coordinator: bool = True,
        data_parallel_size: int | None = None,
        tokenize_prompt: TokenizePrompt | None = None,
        detokenize_generations: DetokenizeGenerations | None = None,
    ) -> None:
        if not use_coordinator:
            raise ValueError("AsyncLLM needs use_coordinator=True; for direct mode there is LLM")
        hooks = TextHooks(tokenize_prompt, detokenize_generations)
        config = engine_config or EngineConfig()
        self._runtime = Runtime(model, tokenizer, config, hooks, data_parallel_size)

    @property
    def is_primary_rank(self) -> bool:
        """Whether this process may generate: of a torchrun job, only global rank 0."""
        return self._runtime.is_primary_rank

    # Generating

    # A text is a sequence of texts, too: the first that fits counts.
    @overload
    async def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompts: PromptLike | Result,
        sampling_params: GivenParams = None,
        *,
        multi_modal_data: Any = None,
        progress: bool | None = None,
        raise_errors: bool = True,
    ) -> Result: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[PromptLike | Result],
        sampling_params: GivenParams = None,
        *,
        multi_modal_data: Any = None,
        progress: bool | None = None,
        raise_errors: bool = True,
    ) -> list[Result]: ...

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: GivenParams = None,
        *,
        multi_modal_data: Any = None,
        progress: bool | None = None,
        raise_errors: bool = True,
    ) -> Result | list[Result]:
        """One `Result` for one prompt; for a list, their list in the same order.

        Arguments and errors as of `LLM.generate`. Cancelling it aborts its requests.
        """
        batch = read_batch(prompts, sampling_params, multi_modal_data)
        await self._started()
        with BatchProgress(len(batch), progress) as bar:
            running = self._runtime.generate("generate", batch, bar.on_delta)
            results = await asyncio.wrap_future(running)
        if raise_errors:
            raise_first_error(results)
        return results[0] if batch.is_single else results

    async def stream(
        self,
        prompts: Prompts,
        sampling_params: GivenParams = None,
        *,
        multi_modal_data: Any = None,
    ) -> AsyncIterator[Delta]:
        """What is new of each answer, as it comes; several prompts' answers are interleaved.

        An error that ends a request is raised. Leaving the iterator aborts what is unfinished.
        """
        batch = read_batch(prompts, sampling_params, multi_modal_data)
        await self._started()
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta | Future[list[Result]]] = asyncio.Queue()

        def put(item: Delta | Future[list[Result]]) -> None:
            with suppress(RuntimeError):  # that loop has ended: nobody waits any more
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        running = self._runtime.generate("stream", batch, put)
        running.add_done_callback(put)
        try:
            while isinstance(item := await inbox.get(), Delta):
                if item.result is not None:
                    raise_first_error([item.result])
                yield item
            item.result()
        finally:
            running.cancel()

    async def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End these requests, or all; their results have what was generated until then."""
        await self._run("abort", lambda fleet: fleet.requests.abort(request_ids))

    # Lifecycle

    async def pause(self, mode: PauseMode | str = PauseMode.KEEP) -> RankResults:
        """As `LLM.pause`."""
        return await self._command("pause", lambda client: client.pause(mode))

    async def unpause(self) -> RankResults:
        """As `LLM.unpause`."""
        return await self._command("unpause", lambda client: client.unpause())

    async def suspend(
        self, kv: KVMode | str | None = None, weights: WeightsMode | str = WeightsMode.KEEP
    ) -> RankResults:
        """As `LLM.suspend`."""
        mode = kv or self._runtime.config.kv_cache_management_mode
        return await self._command("suspend", lambda client: client.suspend(mode, weights))

    async def resume(self) -> RankResults:
        """As `LLM.resume`."""
        return await self._command("resume", lambda client: client.resume())

    async def reset(self) -> RankResults:
        """As `LLM.reset`."""
        return await self._command("reset", lambda client: client.reset())

    async def set_generation_epoch(self, epoch: int) -> RankResults:
        """As `LLM.set_generation_epoch`."""
        return await self._command("set_generation_epoch", lambda client: client.set_epoch(epoch))

    async def update_weights(
        self,
        source: WeightsLike | None = None,
        *,
        partial: bool = False,
        in_flight: InFlightKV | str = InFlightKV.KEEP,
        epoch: int | None = None,
    ) -> RankResults:
        """As `LLM.update_weights`. Tensors are copied before the event loop goes on."""
        weights = self._runtime.weights(source)
        with weight_update(weights, partial=partial, in_flight=in_flight, epoch=epoch) as update:
            return await self._command(
                "update_weights", lambda client: client.update_weights(update)
            )

    async def serve(self, config: ServeConfig | None = None, *, blocking: bool = True) -> str:
        """Serve the OpenAI API over HTTP beside this; returns the URL once it answers.

        blocking: return only when somebody calls `shutdown`.
        """
        url = await self._run("serve", lambda fleet: fleet.serve(config or ServeConfig()))
        if blocking:
            await self.wait_for_shutdown()
        return url

    async def wait_for_shutdown(self) -> None:
        """Wait until `shutdown` is called: here or, in a torchrun job, on the primary rank."""
        await asyncio.to_thread(self._runtime.wait_until_closed)

    async def shutdown(self) -> None:
        """Stop everything; on the primary rank, that of all ranks. Idempotent."""
        await asyncio.to_thread(self._runtime.close)

    async def _started(self) -> None:
        # Not cancelled with the caller: others may wait for it, too.
        await asyncio.shield(asyncio.wrap_future(self._runtime.started))

    async def _run(self, what: str, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        await self._started()
        return await asyncio.wrap_future(self._runtime.submit(what, work))

    async def _command(
        self, what: str, command: Callable[[Client], Coroutine[Any, Any, RankResults]]
    ) -> RankResults:
        return await self._run(what, lambda fleet: command(fleet.client))

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self._started()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut down. A rank that is not the primary first waits for that one to do so."""
        if kind is None and not self.is_primary_rank:
            await self.wait_for_shutdown()
        await self.shutdown()
