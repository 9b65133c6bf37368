"""A whole engine on stand-ins for FlashInfer and CUDA graphs: the texts of the reference."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from homing.engine.attention.flashinfer import GraphAttention
from homing.engine.batch import Batch
from homing.engine.config import EngineConfig
from homing.engine.engine import Engine
from homing.engine.kv_cache import KVCache
from homing.engine.models.graphed import GraphedDecoder
from homing.engine.models.llama import TorchDecoder
from homing.engine.parts import EngineParts
from homing.engine.sampling import Sampler
from homing.engine.sampling.on_device import FlashInferSampler
from homing.engine.startup import load_engine
from homing.params import SamplingParams
from homing.wire import InFlightKV
from tests.support import fake_flashinfer, late_device
from tests.support.engine_run import Answer, run
from tests.support.late_device import LateDevice, LateRunner
from tests.support.tiny_families import VOCAB_SIZE
from tests.support.tiny_models import make_tiny_model

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("mistral", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engines(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    """The reference, and one on the stand-ins whose cache is too small for all requests."""
    fake_flashinfer.pretend(monkeypatch)
    made = load(model, "torch", kv_cache_gb=0.02), load(model, "flashinfer", kv_cache_gb=0.000045)
    yield made
    for engine in made:
        engine.close()


def load(
    model: Path,
    backend: Literal["torch", "flashinfer"],
    parts: EngineParts | None = None,
    **settings: Any,
) -> Engine:
    config = EngineConfig(
        model=str(model),
        coordinator="",
        device="cpu",
        attention_backend=backend,
        sampling_backend=backend,
        max_model_len=64,
        block_size=4,
        max_batch_requests=6,
        max_step_tokens=16,
        num_threads=1,
        **settings,
    )
    return load_engine(config, parts)[0]


def answers(
    engine: Engine, params: SamplingParams, after: int | None = None
) -> dict[Hashable, Answer]:
    """Of ten requests; before step `after` the weights become others."""
    for number in range(10):
        prompt = np.random.default_rng(number).integers(8, VOCAB_SIZE, 5 + 3 * number)
        engine.add_request(number, prompt, params)

    def update(step: int) -> None:
        if step == after:
            name = "model.layers.1.mlp.down_proj.weight"
            generator = torch.Generator().manual_seed(0)
            shape = engine.runner.model.parameter_shapes[name]
            tensor = 0.1 * torch.randn(shape, generator=generator)
            engine.lifecycle.update_weights(
                [(name, tensor)], partial=True, in_flight=InFlightKV.RECOMPUTE
            )

    return run(engine, before_step=update)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_TOKENS, ignore_eos=True),
        SamplingParams(seed=3, num_tokens_to_generate=NUM_TOKENS, ignore_eos=True),
    ],
    ids=["greedy", "seeded"],
)
def test_texts_are_those_of_the_reference(
    engines: tuple[Engine, Engine], params: SamplingParams
) -> None:
    reference, ours = engines
    assert isinstance(ours.runner.model, GraphedDecoder)
    assert isinstance(ours.runner.sampler, FlashInferSampler)
    assert type(reference.runner.sampler) is Sampler
    expected, given = (answers(engine, params) for engine in engines)
    assert ours.counters.preemptions > 0 == reference.counters.preemptions
    for number, answer in expected.items():
        assert given[number].token_ids == answer.token_ids
        assert len(answer.token_ids) == NUM_TOKENS


def test_updated_weights_are_served_from_the_next_step_on(engines: tuple[Engine, Engine]) -> None:
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=6, ignore_eos=True)
    reference, ours = engines
    answers(ours, params, after=4)
    answers(reference, params, after=4)
    expected, given = answers(reference, params), answers(ours, params)
    for number, answer in expected.items():
        assert given[number].token_ids == answer.token_ids


# While a step runs the next one is prepared, on a device that is late with everything


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    fake_flashinfer.pretend(monkeypatch)
    device = late_device.install(monkeypatch)
    with device:
        yield device


def late_engine(model: Path) -> Engine:
    return load(model, "flashinfer", EngineParts(runner=LateRunner), kv_cache_gb=0.02)


def answers_beside(engine: Engine, params: SamplingParams, *, prepares: bool) -> list[list[int]]:
    """Of six requests, of which one comes and one ends while the others go on."""
    tokens: list[list[int]] = [[] for _ in range(6)]

    def add(number: int, length: int = NUM_TOKENS) -> None:
        prompt = np.random.default_rng(number).integers(8, VOCAB_SIZE, 2 + number)
        ends = replace(params, num_tokens_to_generate=length)
        engine.add_request(number, prompt, ends)

    for number in range(5):
        add(number, 8 if number == 3 else NUM_TOKENS)
    num_steps = 0
    while engine.has_work:
        step = engine.begin_step()
        if num_steps == 4:
            add(5)
        if prepares:
            engine.prepare_next(step)
        engine.end_step(step)
        for output in engine.take_outputs():
            tokens[int(str(output.request.key))] += output.token_ids
        num_steps += 1
    return tokens


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(seed=3, top_p=0.9, ignore_eos=True)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_prepared_step_computes_what_a_built_one_does(
    device: LateDevice, model: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told the same: the graph's inputs, and the arrays of the last plan, when it runs."""
    told: list[list[list[int]]] = []
    compute = TorchDecoder.compute

    def watched(model: TorchDecoder, batch: Batch, cache: KVCache, attention: Any) -> Tensor:
        if isinstance(attention, GraphAttention):
            [wrapper] = attention._wrappers.values()
            pages = (wrapper.kv_indptr, wrapper.kv_indices, wrapper.last_page_len)
            inputs = (batch.token_ids, batch.positions, batch.slot_mapping)
            num_pages = int(wrapper.kv_indptr[-1])  # the rest of the buffer is of earlier plans
            told.append([array.tolist()[:num_pages] for array in (*inputs, *pages)])
        return compute(model, batch, cache, attention)

    monkeypatch.setattr(TorchDecoder, "compute", watched)
    runs: list[tuple[list[list[int]], list[list[list[int]]]]] = []
    for prepares in (False, True):
        engine = late_engine(model)
        told.clear()
        num_replays = device.num_replays
        tokens = answers_beside(engine, params, prepares=prepares)
        engine.close()
        runs.append((tokens, list(told)))
        assert len(told) == device.num_replays - num_replays
        assert (engine.runner.num_foreseen_steps >= 8) == prepares
    (built, told_built), (prepared, told_prepared) = runs
    assert prepared == built
    assert [len(tokens) for tokens in prepared] == [12, 12, 12, 8, 12, 12]
    assert told_prepared == told_built


def test_without_its_fence_a_plan_would_be_written_over_before_it_is_copied(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stand-ins are good for: they show the race that the fence is there for."""
    fake_flashinfer.pretend(monkeypatch)
    with late_device.install(monkeypatch, has_fences=False):
        engine = late_engine(model)
        with pytest.raises(AssertionError, match="the schedule is another plan's"):
            answers_beside(engine, GREEDY, prepares=True)
        engine.close()
