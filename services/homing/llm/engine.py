"""Engine: one engine in this process, driven by hand or by `LLM`.

with Engine("path/to/model") as engine:
    engine.add_request("Once upon a time", SamplingParams(num_tokens_to_generate=32))
    while engine.has_unfinished_requests:
        for delta in engine.step():
            print(delta.text, end="")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from os import PathLike

import numpy as np

from homing import params
from homing.client import Part
from homing.engine.block_pool import BlockPool
from homing.engine.engine import Engine as CoreEngine
from homing.engine.engine import RequestOutput
from homing.engine.kv_cache import KVCache
from homing.engine.log_probs import LogProbs
from homing.engine.models import Model
from homing.engine.parts import EngineParts
from homing.engine.runner import Runner
from homing.engine.sampling import Sampler
from homing.engine.scheduler import Scheduler, SchedulerLimits
from homing.engine.startup import load_engine
from homing.engine.weight_update import open_source
from homing.errors import HomingError, InternalError, InvalidRequest
from homing.llm.answer import Answer
from homing.llm.config import EngineConfig
from homing.llm.model_files import ModelLike, TokenizerLike, dtype_of, model_path
from homing.llm.params import SamplingParams
from homing.llm.prompts import GivenPrompt, Prompt, PromptLike, prepare, read_prompts
from homing.llm.results import Alternatives, Delta, Result
from homing.llm.text import DetokenizeGenerations, TextCodec, TextHooks, TokenizePrompt
from homing.llm.weights import WeightsLike, given_or_own, named_tensors, weight_update
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason, InFlightKV

GRAMMAR_WAIT_S = 0.05
"""A step that has nothing to run waits so long for what runs beside it: a grammar's compilation."""


@dataclass(slots=True)
class _Running:
    answer: Answer
    on_delta: Callable[[Delta], None] | None
    """Gets what concerns this request, instead of the caller of `step`."""


class Engine:
    """Model, KV cache and requests. Calls from several threads take turns."""

    def __init__(
        self,
        model: ModelLike = None,
        tokenizer: TokenizerLike | None = None,
        config: EngineConfig | None = None,
        *,
        block_pool: Callable[[int], BlockPool] = BlockPool,
        scheduler: Callable[[BlockPool, int, SchedulerLimits], Scheduler] = Scheduler,
        runner: Callable[[Model, KVCache, int, Sampler], Runner] = Runner,
        sampler: Sampler | None = None,
        tokenize_prompt: TokenizePrompt | None = None,
        detokenize_generations: DetokenizeGenerations | None = None,
    ) -> None:
        """
        model: a Hugging Face directory, a .gguf file, None for the demo model, or a transformers
        model; tokenizer: a directory or a transformers tokenizer, in place of the model's own.
        block_pool, scheduler, runner: classes that replace the engine's own. They depend on the
        model's size, so the engine makes the instances.
        tokenize_prompt, detokenize_generations: functions that replace the tokenizer's; see
        `homing.llm.text`.
        """
        config = config or EngineConfig()
        parts = EngineParts(block_pool, scheduler, runner, sampler or Sampler())
        hooks = TextHooks(tokenize_prompt, detokenize_generations)
        with ExitStack() as stack:
            path = model_path(model, tokenizer, stack)
            settings = replace(config, dtype=config.dtype or dtype_of(model)).of_engine(path)
            self._core, card = load_engine(settings, parts)
            stack.callback(self._core.close)
            self._codec = TextCodec(Tokenizer.from_dir(card.tokenizer_dir), hooks)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="homing-engine")
            stack.callback(self._executor.shutdown)
            self._resources = stack.pop_all()
        self._model = model
        self.card = card
        """What the model is: its name, context length, vocabulary and the like."""
        self._request_ids = count(1)
        self._running: dict[int, _Running] = {}
        self._lock = threading.RLock()
        self._awake = threading.Event()
        self._core.wake = self._awake.set

    # What it is made of

    @property
    def core(self) -> CoreEngine:
        """The engine proper, which knows tokens alone."""
        return self._core

    @property
    def scheduler(self) -> Scheduler:
        return self._core.scheduler

    @property
    def block_pool(self) -> BlockPool:
        return self._core.block_pool

    @property
    def runner(self) -> Runner:
        return self._core.runner

    # Requests

    def add_request(
        self, prompt: PromptLike | Result, sampling_params: SamplingParams | None = None
    ) -> int:
        """Take a request on; returns its id. Raises `InvalidRequest`, a `ValueError`."""
        given, is_single = read_prompts(prompt)
        if not is_single and given:
            raise InvalidRequest("add_request takes one prompt", field="prompt")
        sampling = sampling_params or SamplingParams()
        read, for_engine = self.prepare(given[0] if given else [], sampling)
        return self.start(read, sampling, for_engine)

    def prepare(
        self, given: GivenPrompt, sampling: SamplingParams
    ) -> tuple[Prompt, params.SamplingParams]:
        """Tokenize and check; nothing is started."""
        with self._lock:
            return prepare(given, sampling, self._codec, self.card)

    def start(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        for_engine: params.SamplingParams,
        *,
        index: int = 0,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> int:
        """Begin what `prepare` gave. `on_delta` gets what is new of this request, in place of the
        caller of `step`."""
        request_id = next(self._request_ids)
        answer = Answer(request_id, index, prompt, sampling, for_engine, self._codec)
        with self._lock:
            self._core.add_request(
                request_id,
                np.array(prompt.all_tokens, dtype=np.int32),
                for_engine,
                num_resumed=len(prompt.resumed_tokens),
                priority=sampling.priority,
            )
            self._running[request_id] = _Running(answer, on_delta)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request now; the next step gives its result, with what was generated. One that has
        ended, or never was, is ignored."""
        with self._lock:
            self._core.abort(request_id)

    def abort_requests(self, request_ids: Iterable[int] | None) -> None:
        """End these, or all."""
        with self._lock:
            for request_id in list(self._running) if request_ids is None else request_ids:
                self._core.abort(request_id)

    def reset(self) -> list[Delta]:
        """End every request, and forget every prefix. Returns the ends, as a step would."""
        with self._lock:
            self._core.abort_all()
            deltas = self._deltas(self._core.step())
            self._core.lifecycle.reset_prefix_cache()
            return deltas

    def update_weights(
        self,
        source: WeightsLike | None = None,
        *,
        partial: bool = False,
        in_flight: InFlightKV | str = InFlightKV.KEEP,
        epoch: int | None = None,
    ) -> int:
        """Serve other weights from the next step on; returns their epoch. As `LLM.update_weights`,
        but that tensors are taken from this process without a detour."""
        source = given_or_own(source, self._model)
        lifecycle = self._core.lifecycle
        options = {"partial": partial, "in_flight": InFlightKV(in_flight), "epoch": epoch}
        is_file = isinstance(source, str | PathLike)
        with self._lock, ExitStack() as stack:
            if is_file:
                update = stack.enter_context(weight_update(source, **options))
                tensors = stack.enter_context(open_source(update, self.runner.model, None))
            else:
                tensors = named_tensors(source)
            lifecycle.update_weights(tensors, owned=is_file, **options)
            return lifecycle.epoch

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    # The loop's body

    def step(self) -> list[Delta]:
        """Run one step; returns what is new of each request. A request's last delta has its
        result."""
        with self._lock:
            if self._running and not self._core.has_work:
                self._awake.wait(GRAMMAR_WAIT_S)
                self._awake.clear()
            return self._deltas(self._core.step())

    async def async_step(self) -> list[Delta]:
        """As `step`, on the engine's own thread, while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.step)

    def step_aside(self) -> list[Delta]:
        """As `step`, on the engine's own thread: KeyboardInterrupt ends the waiting for it, never
        the step."""
        return self._executor.submit(self.step).result()

    def _deltas(self, outputs: Iterable[RequestOutput]) -> list[Delta]:
        deltas: list[Delta] = []
        for output in outputs:
            request_id = output.request.key
            assert isinstance(request_id, int)
            running = self._running[request_id]
            if output.finish is not None:
                del self._running[request_id]
            delta = self._delta(running.answer, output)
            if delta is not None and running.on_delta:
                running.on_delta(delta)
            elif delta is not None:
                deltas.append(delta)
        return deltas

    def _delta(self, answer: Answer, output: RequestOutput) -> Delta | None:
        finish = output.finish
        if finish is not None and finish.reason is FinishReason.ERROR:
            return answer.fail(_error_of(finish))
        return answer.push(self._part(output))

    def _part(self, output: RequestOutput) -> Part:
        scores, prompt = output.log_probs, output.prompt_log_probs
        return Part(
            token_ids=output.token_ids,
            log_probs=None if scores is None else scores.chosen.tolist(),
            top=None if scores is None or not scores.num_top else _alternatives(scores),
            num_cached_tokens=output.request.num_cached_at_start if output.is_first else None,
            prompt_log_probs=None if prompt is None else [None, *prompt.chosen.tolist()],
            prompt_top=(
                None if prompt is None or not prompt.num_top else [None, *_alternatives(prompt)]
            ),
            epoch=output.epoch,
            finish=output.finish,
        )

    # Its end

    def close(self) -> None:
        """Drop everything. Idempotent."""
        self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _alternatives(scores: LogProbs) -> list[Alternatives]:
    pairs = zip(scores.top_ids.tolist(), scores.top.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]


def _error_of(finish: Finish) -> HomingError:
    if finish.field:
        return InvalidRequest(finish.detail, field=finish.field)
    return InternalError(finish.detail)
