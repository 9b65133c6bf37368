"""The engine on a real decoder: the same bits whatever happens around a request, and the greedy
tokens of transformers."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest

from homing.engine.engine import Engine
from homing.engine.models import Model
from homing.params import SamplingParams
from tests.support.backends import BACKENDS, Oracle, load_backend
from tests.support.engine_run import Answer, run, small_engine
from tests.support.tiny_families import VOCAB_SIZE
from tests.support.tiny_models import make_tiny_model

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_TOKENS)
SEEDED = SamplingParams(
    seed=5, top_p=0.95, num_tokens_to_generate=NUM_TOKENS, return_log_probs=True, top_n_logprobs=2
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=BACKENDS)
def model(directory: Path, request: pytest.FixtureRequest) -> Model:
    return load_backend(directory, request.param)


def make_engine(model: Model, *, num_blocks: int = 200, max_step_tokens: int = 256) -> Engine:
    batch = min(16, max_step_tokens)
    return small_engine(
        model, num_blocks, max_batch_requests=batch, max_step_tokens=max_step_tokens
    )


def prompt_of(number: int) -> np.ndarray:
    """150 tokens, across the kernel's split of the cache; odd numbers share 100 of them."""
    tokens = np.random.default_rng(number).integers(8, VOCAB_SIZE, 150)
    if number % 2:
        tokens[:100] = np.random.default_rng(999).integers(8, VOCAB_SIZE, 100)
    return tokens


def params_of(number: int) -> SamplingParams:
    return SEEDED if number % 3 else GREEDY


def submit(engine: Engine, *numbers: int) -> dict[Hashable, Answer]:
    for number in numbers:
        engine.add_request(number, prompt_of(number), params_of(number))
    return run(engine)


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Answer]:
    return [submit(make_engine(model), number)[number] for number in range(6)]


def assert_same(answer: Answer, reference: Answer) -> None:
    assert answer.token_ids == reference.token_ids
    assert answer.log_probs == reference.log_probs
    assert answer.finish == reference.finish


def test_greedy_tokens_are_those_of_transformers(directory: Path, alone: list[Answer]) -> None:
    oracle = Oracle(directory)
    for number in (0, 3):
        assert alone[number].token_ids == oracle.greedy(prompt_of(number).tolist(), NUM_TOKENS)


def test_in_a_batch(model: Model, alone: list[Answer]) -> None:
    answers = submit(make_engine(model), *range(6))
    for number in range(6):
        assert_same(answers[number], alone[number])


@pytest.mark.parametrize("max_step_tokens", [5, 64])
def test_in_chunks(model: Model, alone: list[Answer], max_step_tokens: int) -> None:
    answers = submit(make_engine(model, max_step_tokens=max_step_tokens), 0, 1)
    for number in (0, 1):
        assert_same(answers[number], alone[number])


def test_with_a_prefix_hit(model: Model, alone: list[Answer]) -> None:
    engine = make_engine(model)
    submit(engine, 1)
    answers = submit(engine, 1, 3)
    assert [answers[number].num_cached_tokens for number in (1, 3)] == [144, 96]
    for number in (1, 3):
        assert_same(answers[number], alone[number])


def test_with_preemptions(model: Model, alone: list[Answer]) -> None:
    engine = make_engine(model, num_blocks=22)
    answers = submit(engine, *range(6))
    assert engine.scheduler.num_preemptions > 0
    for number in range(6):
        assert_same(answers[number], alone[number])


@pytest.mark.parametrize("number", [0, 1])
def test_resubmitted(model: Model, alone: list[Answer], number: int) -> None:
    received = alone[number].token_ids[:9]
    engine = make_engine(model)
    engine.add_request(
        number, np.append(prompt_of(number), received), params_of(number), num_resumed=9
    )
    answer = run(engine)[number]
    assert received + answer.token_ids == alone[number].token_ids
    assert answer.log_probs == alone[number].log_probs[9:]
