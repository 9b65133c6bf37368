"""Arrivals and aborts at random, on a cache so small that requests are preempted all the time."""

from __future__ import annotations

import random
from collections.abc import Hashable

import numpy as np
import pytest

from homing.engine.engine import Engine
from homing.params import SamplingParams
from homing.wire import FinishReason
from tests.support.engine_run import Answer, run
from tests.support.fake_model import make_engine
from tests.support.random_requests import random_params, random_prompt

NUM_REQUESTS = 60


def small_engine(source: random.Random) -> Engine:
    block_size = source.choice([2, 4, 8])
    engine, _ = make_engine(
        num_blocks=64 // block_size + 1 + source.randrange(4),
        block_size=block_size,
        max_context_tokens=64,
        max_step_tokens=source.choice([8, 16, 64]),
        max_batch_requests=8,
    )
    return engine


@pytest.mark.parametrize("seed", range(8))
def test_all_answers_are_right_and_nothing_leaks(seed: int):
    source = random.Random(seed)
    engine = small_engine(source)
    requests = [(random_prompt(source), random_params(source)) for _ in range(NUM_REQUESTS)]
    to_come = list(reversed(range(NUM_REQUESTS)))
    aborted: set[Hashable] = set()

    def disturb(_: int) -> None:
        while to_come and (source.random() < 0.4 or not engine.has_work):
            number = to_come.pop()
            priority = source.choice([0, 0, 0, -1, 1])
            engine.add_request(number, *requests[number], priority=priority)
        if source.random() < 0.1:
            victims = [*engine.scheduler.running, *engine.scheduler.waiting]
            for victim in source.sample(victims, min(1, len(victims))):
                aborted.add(victim.key)
                engine.abort(victim.key)
        if source.random() < 0.02:
            engine.lifecycle.reset_prefix_cache()

    answers = run(engine, before_step=disturb)
    assert set(answers) == set(range(NUM_REQUESTS))
    assert engine.scheduler.num_preemptions > 0
    assert engine.block_pool.num_held == 0
    engine.block_pool.check([])
    for number, (prompt, params) in enumerate(requests):
        check(answers[number], alone(prompt, params), aborted=number in aborted)


def alone(prompt: np.ndarray, params: SamplingParams) -> Answer:
    engine, _ = make_engine(max_context_tokens=64)
    engine.add_request("alone", prompt, params)
    return run(engine)["alone"]


def check(answer: Answer, reference: Answer, *, aborted: bool) -> None:
    """What was aborted is the beginning of what it would have been."""
    length = len(answer.token_ids)
    assert answer.finish is not None
    assert answer.token_ids == reference.token_ids[:length]
    assert answer.log_probs == reference.log_probs[:length]
    if length:
        assert answer.prompt_log_probs == reference.prompt_log_probs
    if aborted:
        assert answer.finish.reason is FinishReason.ABORT
    else:
        assert answer.finish == reference.finish
        assert length == len(reference.token_ids)
