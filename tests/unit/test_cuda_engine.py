"""A whole engine on stand-ins for FlashInfer and CUDA graphs: the texts of the reference."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from homing.engine.config import EngineConfig
from homing.engine.engine import Engine
from homing.engine.models.graphed import GraphedDecoder
from homing.engine.sampling import Sampler
from homing.engine.sampling.on_device import FlashInferSampler
from homing.engine.startup import load_engine
from homing.params import SamplingParams
from homing.wire import InFlightKV
from tests.support import fake_flashinfer
from tests.support.engine_run import Answer, run
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


def load(model: Path, backend: Literal["torch", "flashinfer"], **settings: Any) -> Engine:
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
    return load_engine(config)[0]


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
