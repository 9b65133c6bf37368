"""Preparing the next step while one runs: it changes nothing, and it is used. On a fake model, with
a runner that stands for one on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from homing.engine.batch import Batch, build_batch
from homing.engine.engine import Engine
from homing.engine.foresight import Foreseen
from homing.engine.models import Model
from homing.engine.parts import EngineParts
from homing.engine.plan import Chunk
from homing.params import SamplingParams
from homing.wire import InFlightKV
from tests.support.engine_run import Answer
from tests.support.fake_model import SHIFT, FakeModel, make_engine
from tests.support.overlapping import OverlappingRunner
from tests.support.random_requests import random_params, random_prompt

BLOCK_SIZE = 4


def preparing_engine(**sizes: int) -> Engine:
    parts = EngineParts(runner=OverlappingRunner)
    return make_engine(**{"eos": (), "block_size": BLOCK_SIZE, **sizes}, parts=parts)[0]


def greedy(num_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_tokens_to_generate=num_tokens, **params)


def add(engine: Engine, key: Hashable, prompt: Sequence[int], params: SamplingParams) -> None:
    engine.add_request(key, np.array(prompt), params)


def step(engine: Engine, beside: Callable[[], None] = lambda: None) -> bool:
    """As the worker does it; new requests may come `beside`. Whether it had been prepared."""
    before = engine.runner.num_foreseen_steps
    running = engine.begin_step()
    beside()
    engine.prepare_next(running)
    engine.scheduler.check()
    engine.end_step(running)
    engine.scheduler.check()
    engine.take_outputs()
    return engine.runner.num_foreseen_steps > before


def decoding(num_requests: int = 3, num_tokens: int = 40, **sizes: int) -> Engine:
    """An engine whose next step is prepared: prompts are read, and one token of each is decoded."""
    engine = preparing_engine(**sizes)
    for number in range(num_requests):
        add(engine, number, [5 + number, 6, 7], greedy(num_tokens))
    assert not step(engine)
    assert not step(engine)
    return engine


# It is used


def test_all_steps_of_steady_decoding_but_the_first_are_prepared() -> None:
    engine = decoding(num_tokens=22)
    prepared = 0
    while engine.has_work:
        prepared += step(engine)
    assert engine.counters.steps == 22  # the prompts, and 21 decodes
    assert prepared == 20
    assert engine.block_pool.num_held == 0


def test_a_step_that_may_be_a_requests_last_prepares_nothing() -> None:
    engine = decoding(num_tokens=22)
    add(engine, "short", [9, 8, 7], greedy(6))
    steps = [step(engine) for _ in range(8)]
    # Its prompt, a first decode, three that are prepared, the last of which ends it; then again.
    assert steps == [False, False, True, True, True, True, False, True]


def test_without_a_device_that_computes_by_itself_nothing_is_prepared() -> None:
    engine, _ = make_engine(eos=())
    add(engine, 1, [5, 6], greedy(20))
    while engine.has_work:
        assert not step(engine)
        assert engine.runner._foreseen is None


def test_a_step_in_one_call_prepares_too() -> None:
    engine = preparing_engine()
    add(engine, 1, [5, 6], greedy(12))
    while engine.has_work:
        engine.step()
    assert engine.runner.num_foreseen_steps == 10


# It is thrown away


def test_a_request_that_joins_has_the_step_built_anew() -> None:
    engine = decoding()
    assert step(engine, beside=lambda: add(engine, "new", [9, 8], greedy(5)))
    assert not step(engine)  # with the new one's prompt
    assert not step(engine)  # its first decode
    assert step(engine)


def test_a_request_that_stops_has_the_step_built_anew() -> None:
    alone = decoding(num_requests=1)
    for _ in range(6):
        step(alone)
    stop = next(iter(alone.scheduler.running)).generated.tolist()[4]
    engine = preparing_engine()
    add(engine, 0, [5, 6, 7], greedy(40, stop_token_ids=(stop,)))
    add(engine, 1, [6, 6, 7], greedy(40))
    steps = [step(engine) for _ in range(7)]
    assert steps == [False, False, True, True, True, False, True]
    assert len(engine.scheduler.running) == 1


def test_an_abort_has_the_step_built_anew() -> None:
    engine = decoding()
    engine.abort(1)
    assert not step(engine)
    assert step(engine)


def test_a_preemption_has_the_step_built_anew() -> None:
    engine = decoding()
    engine.scheduler.preempt_all()
    assert not step(engine)


def test_other_weights_have_the_step_built_anew() -> None:
    engine = decoding()
    engine.lifecycle.update_weights([(SHIFT, torch.tensor([1.0]))], in_flight=InFlightKV.KEEP)
    assert not step(engine)
    assert step(engine)


def test_a_pause_leaves_a_prepared_step_as_it_is() -> None:
    engine = decoding()
    engine.lifecycle.pause()
    assert engine.begin_step() is None
    engine.lifecycle.unpause()
    assert step(engine)


def test_a_block_exchanged_for_its_twin_has_the_step_built_anew() -> None:
    """Two requests generate the same: where both fill a block, one gets the other's for it."""
    engine = preparing_engine()
    for number in range(2):
        add(engine, number, [5, 6], greedy(12))
    tables = []
    steps = []
    while engine.has_work:
        steps.append(step(engine))
        tables.append([request.blocks.tolist() for request in engine.scheduler.running])
    assert tables[4][0][:1] == tables[4][1][:1]
    positions = range(2, 2 + len(steps) - 1)  # of the decodes
    filled = [position % BLOCK_SIZE == 0 for position in positions]
    assert steps[2:-1] == [not is_filled for is_filled in filled[1:-1]]


# Blocks


def test_a_block_that_a_request_begins_is_foreseen_but_not_taken() -> None:
    engine = decoding(num_requests=1)  # four tokens are computed, and fill its first block
    [request] = engine.scheduler.running
    assert request.num_blocks == engine.block_pool.num_held == 1
    assert step(engine)
    assert request.num_blocks == 2


def test_a_step_that_has_to_evict_for_a_block_is_not_prepared() -> None:
    engine = preparing_engine(num_blocks=5, max_context_tokens=16)
    add(engine, "before", range(10, 22), greedy(1))
    assert not step(engine)
    assert engine.block_pool.num_cached == 3  # and one is free
    add(engine, 0, [5, 6, 7], greedy(12))
    assert [step(engine) for _ in range(4)] == [False, False, False, True]
    assert engine.block_pool.num_cached == 2


# What is prepared


def test_a_prepared_batch_is_the_built_one_but_for_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts: list[Batch] = []
    num_compared = 0
    is_of = Foreseen.is_of

    class Watched(FakeModel):
        def forward(self, batch: Batch, cache: Any) -> Tensor:
            layouts.append(batch)
            return super().forward(batch, cache)

    def watched(foreseen: Foreseen, chunks: Sequence[Chunk], model: Model) -> bool:
        nonlocal num_compared
        if fits := is_of(foreseen, chunks, model):
            built = build_batch(chunks, BLOCK_SIZE)
            foreseen.compute(built.token_ids)
            for name in Batch.__slots__:
                ours, theirs = getattr(layouts[-1], name), getattr(built, name)
                assert ours.dtype is theirs.dtype is torch.int32
                assert ours.shape == theirs.shape
                assert torch.equal(ours, theirs), name
            num_compared += 1
        return fits

    monkeypatch.setattr(Foreseen, "is_of", watched)
    monkeypatch.setattr("tests.support.fake_model.FakeModel", Watched)
    engine = decoding(num_requests=5, num_tokens=30)
    while engine.has_work:
        step(engine)
    assert num_compared == 28


# It changes nothing


class Traffic:
    """The same for every engine: what is done before each step, and beside it."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.block_size = source.choice([2, 4, 8])
        self.sizes: dict[str, Any] = {
            "num_blocks": 64 // self.block_size + 1 + source.randrange(4),
            "block_size": self.block_size,
            "max_context_tokens": 64,
            "max_step_tokens": source.choice([8, 16, 64]),
        }
        self.requests = [
            (random_prompt(source), random_params(source), source.choice([0, 0, 0, -1, 1]))
            for _ in range(40)
        ]
        self.arrivals = [sorted(source.sample(range(150), 40)), source.choices([0, 1], k=40)]
        self.acts = {n: source.choice(ACTS) for n in source.sample(range(150), 30)}
        self.seed = seed

    def run(self, engine: Engine, *, prepares: bool) -> dict[Hashable, Answer]:
        answers: dict[Hashable, Answer] = {}
        coming = list(zip(*self.arrivals, range(len(self.requests)), strict=True))

        def arrive(number: int, beside: int) -> None:
            while coming and coming[0][:2] <= (number, beside):
                key = coming.pop(0)[2]
                prompt, params, priority = self.requests[key]
                engine.add_request(key, prompt, params, priority=priority)

        for number in range(2000):
            arrive(number, 0)
            if number in self.acts:
                self.acts[number](engine, random.Random(number))
            running = engine.begin_step()
            arrive(number, 1)
            if prepares:
                engine.prepare_next(running)
            engine.end_step(running)
            engine.scheduler.check()
            for output in engine.take_outputs():
                answers.setdefault(output.request.key, Answer()).add(output)
            if not coming and not engine.has_unfinished_requests:
                return answers
        raise AssertionError("it did not end")


def abort_one(engine: Engine, source: random.Random) -> None:
    engine.abort(source.randrange(40))


def pause(engine: Engine, _: random.Random) -> None:
    engine.lifecycle.pause()
    engine.begin_step()
    engine.lifecycle.unpause()


def reset_cache(engine: Engine, _: random.Random) -> None:
    engine.lifecycle.reset_prefix_cache()


def update(engine: Engine, source: random.Random) -> None:
    in_flight = source.choice(list(InFlightKV))
    weights = [(SHIFT, torch.tensor([float(source.randrange(1, 9))]))]
    engine.lifecycle.update_weights(weights, in_flight=in_flight)


ACTS = [abort_one, abort_one, pause, reset_cache, update]


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_has_the_same_answers_with_and_without_it(seed: int) -> None:
    traffic = Traffic(seed)
    engines = [
        make_engine(**traffic.sizes, parts=EngineParts(runner=OverlappingRunner))[0]
        for _ in range(2)
    ]
    plain, prepared = (
        traffic.run(engine, prepares=prepares)
        for engine, prepares in zip(engines, [False, True], strict=True)
    )
    assert plain == prepared
    assert len(plain) == 40
    assert engines[0].runner.num_foreseen_steps == 0 < engines[1].runner.num_foreseen_steps
    for counter in ("steps", "preemptions", "cached_tokens"):
        assert getattr(engines[0].counters, counter) == getattr(engines[1].counters, counter) > 0
    assert engines[1].block_pool.num_held == 0
    engines[1].block_pool.check([])
