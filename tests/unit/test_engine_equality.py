"""A request's tokens and log-probabilities have the same bits, whatever happens around it.

The reference is the request alone, in an engine of its own with room for everything. The fake model
answers from what the cache really holds, so that each of these would show a wrong block or slot.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest

from homing.engine.engine import Engine
from homing.params import SamplingParams
from tests.support.engine_run import Answer, run
from tests.support.fake_model import expected_greedy, make_engine

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(seed=11, num_tokens_to_generate=NUM_TOKENS, ignore_eos=True)
RICH = SamplingParams(
    seed=12,
    temperature=1.3,
    top_p=0.95,
    top_k=20,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=0.1,
    min_tokens=16,
    num_tokens_to_generate=NUM_TOKENS,
    return_log_probs=True,
    top_n_logprobs=3,
)
SCORED = SamplingParams(
    seed=13,
    ignore_eos=True,
    num_tokens_to_generate=NUM_TOKENS,
    return_log_probs=True,
    skip_prompt_log_probs=False,
    top_n_logprobs=2,
)
PARAMS = {"greedy": GREEDY, "seeded": SEEDED, "rich": RICH, "scored": SCORED}

each_kind = pytest.mark.parametrize("kind", PARAMS)


def prompt_of(number: int, length: int = 30) -> np.ndarray:
    """Prompts of odd numbers share their first half."""
    tokens = np.random.default_rng(number).integers(3, 32, length)
    if number % 2:
        tokens[: length // 2] = np.random.default_rng(999).integers(3, 32, length // 2)
    return tokens


def add(engine: Engine, number: int, params: SamplingParams) -> None:
    engine.add_request(number, prompt_of(number), params)


def alone(number: int, params: SamplingParams) -> Answer:
    engine, _ = make_engine(num_blocks=100, max_step_tokens=128)
    add(engine, number, params)
    return run(engine)[number]


def same(answer: Answer, reference: Answer) -> bool:
    return (
        answer.token_ids == reference.token_ids
        and answer.log_probs == reference.log_probs
        and answer.prompt_log_probs == reference.prompt_log_probs
        and answer.finish == reference.finish
    )


def test_greedy_tokens_are_those_of_the_model_without_a_cache():
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_TOKENS)
    assert alone(1, params).token_ids == expected_greedy(prompt_of(1).tolist(), NUM_TOKENS)


@each_kind
def test_a_request_in_a_mixed_batch_equals_itself_alone(kind: str):
    engine, _ = make_engine(num_blocks=400, max_step_tokens=64, max_batch_requests=16)
    for number in range(12):
        add(engine, number, PARAMS[kind] if number == 5 else list(PARAMS.values())[number % 4])
    assert same(run(engine)[5], alone(5, PARAMS[kind]))


@each_kind
@pytest.mark.parametrize("max_step_tokens", [1, 3, 4, 7, 16])
def test_a_prompt_in_chunks_equals_a_prompt_in_one_piece(kind: str, max_step_tokens: int):
    engine, _ = make_engine(max_step_tokens=max_step_tokens, max_batch_requests=1)
    add(engine, 3, PARAMS[kind])
    assert same(run(engine)[3], alone(3, PARAMS[kind]))


@each_kind
@pytest.mark.parametrize("block_size", [1, 2, 8, 16])
def test_the_block_size_changes_nothing(kind: str, block_size: int):
    engine, _ = make_engine(block_size=block_size, num_blocks=200)
    add(engine, 3, PARAMS[kind])
    add(engine, 5, PARAMS[kind])
    answers = run(engine)
    assert same(answers[3], alone(3, PARAMS[kind]))
    assert same(answers[5], alone(5, PARAMS[kind]))


@each_kind
def test_a_prefix_hit_changes_nothing(kind: str):
    engine, _ = make_engine()
    add(engine, 3, PARAMS[kind])
    run(engine)
    add(engine, 3, PARAMS[kind])  # all of it
    add(engine, 5, PARAMS[kind])  # half of it
    answers = run(engine)
    assert same(answers[3], alone(3, PARAMS[kind]))
    assert same(answers[5], alone(5, PARAMS[kind]))
    hits = (answers[3].num_cached_tokens, answers[5].num_cached_tokens)
    assert hits == ((0, 0) if kind == "scored" else (28, 12))


@each_kind
def test_a_fully_cached_prompt_changes_nothing_and_leaves_shared_blocks_alone(kind: str):
    """Prompts of whole blocks, one after the other and side by side; block 7 is shared to its last
    token."""
    engine, model = make_engine()
    rounds: list[dict[Hashable, Answer]] = []
    for _ in range(2):
        for number in range(3):
            engine.add_request(number, prompt_of(1, 28), PARAMS[kind])
        rounds.append(run(engine))
    for answer in (*rounds[0].values(), *rounds[1].values()):
        assert same(answer, rounds[0][0])
    if kind != "scored":
        assert rounds[1][0].num_cached_tokens == 27
        assert 3 in model.num_rows_of_steps  # the three of the second round: one token each


@each_kind
def test_constant_preemption_changes_nothing(kind: str):
    engine, _ = make_engine(num_blocks=18, max_step_tokens=16, max_context_tokens=64)
    for number in range(8):
        add(engine, number, PARAMS[kind])
    answers = run(engine)
    assert engine.scheduler.num_preemptions >= 3
    for number in range(8):
        assert same(answers[number], alone(number, PARAMS[kind]))


@each_kind
@pytest.mark.parametrize("num_received", [1, 7, 8, 16])
def test_a_resubmitted_request_goes_on_as_if_nothing_had_happened(kind: str, num_received: int):
    """Its engine died after some tokens; another one gets prompt and tokens as one prompt."""
    params, reference = PARAMS[kind], alone(3, PARAMS[kind])
    received = reference.token_ids[:num_received]
    engine, _ = make_engine()
    add(engine, 4, SEEDED)
    engine.add_request(
        3, np.append(prompt_of(3), received), params, num_resumed=num_received, max_new_tokens=99
    )
    answer = run(engine)[3]
    assert received + answer.token_ids == reference.token_ids
    assert answer.log_probs == reference.log_probs[num_received:]
    assert answer.finish == reference.finish
    assert answer.prompt_log_probs == reference.prompt_log_probs


@each_kind
def test_pausing_changes_nothing(kind: str):
    engine, _ = make_engine()
    add(engine, 3, PARAMS[kind])
    answers: dict[Hashable, Answer] = {}
    for _ in range(5):
        answers.setdefault(3, Answer())
        for output in engine.step():
            answers[3].add(output)
    engine.lifecycle.pause()
    assert not engine.has_work
    assert engine.step() == []
    engine.lifecycle.unpause()
    assert same(run(engine, answers)[3], alone(3, PARAMS[kind]))


@each_kind
def test_clearing_the_prefix_cache_amid_an_answer_changes_nothing(kind: str):
    engine, _ = make_engine()
    add(engine, 3, PARAMS[kind])
    add(engine, 5, PARAMS[kind])

    def clear(step: int) -> None:
        if step in (1, 4):
            engine.lifecycle.reset_prefix_cache()

    answers = run(engine, before_step=clear)
    assert same(answers[3], alone(3, PARAMS[kind]))
    assert same(answers[5], alone(5, PARAMS[kind]))
    add(engine, 3, PARAMS[kind])
    again = run(engine)[3]
    assert again.num_cached_tokens == 0
    assert same(again, alone(3, PARAMS[kind]))
