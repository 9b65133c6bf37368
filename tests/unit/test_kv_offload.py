"""Preempted requests whose keys and values are kept elsewhere: the same answers, less computed."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
import torch

from homing.engine.engine import Engine
from homing.engine.kv_cache import KVCache
from homing.engine.kv_offload import KVOffload
from homing.engine.models import Model
from homing.engine.request import Request
from homing.params import SamplingParams
from homing.wire import InFlightKV
from tests.support.backends import load_backend
from tests.support.engine_run import BLOCK_SIZE, Answer, run, small_engine
from tests.support.tiny_families import VOCAB_SIZE
from tests.support.tiny_models import make_tiny_model

PARAMS = SamplingParams(
    seed=5,
    num_tokens_to_generate=40,
    ignore_eos=True,
    return_log_probs=True,
    skip_prompt_log_probs=False,
)


@pytest.fixture(scope="module", params=["auto", "int8", "fp8"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Model:
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_backend(directory, "c", dtype="bf16", kv_cache_dtype=request.param)


def submit(engine: Engine, numbers: range, priority: int = 0) -> None:
    for number in numbers:
        prompt = np.random.default_rng(number % 4).integers(8, VOCAB_SIZE, 70 + number)
        params = PARAMS if number % 2 else SamplingParams(seed=5, num_tokens_to_generate=40)
        engine.add_request(number, prompt, params, priority=priority)


def run_two_waves(engine: Engine) -> dict[Hashable, Answer]:
    """The second one is more urgent, and comes while the first decodes and prefills."""
    submit(engine, range(4))

    def urgent_ones(step: int) -> None:
        if step == 6:
            submit(engine, range(4, 8), priority=-1)

    return run(engine, before_step=urgent_ones)


def run_to_the_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


def assert_same(answers: dict[Hashable, Answer], expected: dict[Hashable, Answer]) -> None:
    for number, answer in expected.items():
        assert answers[number].token_ids == answer.token_ids
        assert answers[number].log_probs == answer.log_probs
        assert answers[number].prompt_log_probs == answer.prompt_log_probs


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_answers_have_the_bits_of_an_engine_that_never_preempts(
    model: Model, prefix_caching: bool
) -> None:
    roomy, small = (
        small_engine(model, num_blocks, preemption="offload", prefix_caching=prefix_caching)
        for num_blocks in (200, 22)
    )
    expected, answers = run_two_waves(roomy), run_two_waves(small)
    assert roomy.counters.preemptions == 0 < small.counters.preemptions
    assert_same(answers, expected)
    offload = small.scheduler.offload
    assert offload is not None
    assert offload.num_blocks == 0


def test_it_computes_less_than_by_recomputing(model: Model) -> None:
    computed = {}
    for preemption in ("recompute", "offload"):
        engine = small_engine(model, 22, preemption=preemption, prefix_caching=False)
        run_two_waves(engine)
        assert engine.counters.preemptions > 0
        computed[preemption] = engine.counters.prefilled_tokens
    assert computed["offload"] < computed["recompute"]


def preempted_engine(model: Model) -> Engine:
    """Stepped until some request waits with its keys and values elsewhere."""
    engine = small_engine(model, 22, preemption="offload")
    submit(engine, range(4))
    for _ in range(6):
        engine.step()
    submit(engine, range(4, 8), priority=-1)
    offload = engine.scheduler.offload
    assert offload is not None
    for _ in range(100):
        if offload.num_blocks:
            return engine
        engine.step()
    raise AssertionError("nothing was offloaded")


def test_aborts_and_resets_give_back_what_was_kept(model: Model) -> None:
    engine = preempted_engine(model)
    offload = engine.scheduler.offload
    assert offload is not None
    engine.lifecycle.reset()
    assert offload.num_blocks == 0
    run_to_the_end(engine)


def test_what_other_weights_computed_is_not_copied_back_after_an_update(model: Model) -> None:
    engine = preempted_engine(model)
    engine.lifecycle.begin_epoch(1, InFlightKV.KEEP)
    offload = engine.scheduler.offload
    assert offload is not None
    assert offload.num_blocks == 0
    assert all(request.saved_kv is None for request in engine.scheduler.waiting)
    run_to_the_end(engine)


def test_a_request_older_than_its_weights_comes_back_but_is_shared_with_nobody(
    model: Model,
) -> None:
    engine = small_engine(model, 22, preemption="offload")
    submit(engine, range(4))
    for _ in range(6):
        engine.step()
    submit(engine, range(4, 8), priority=-1)
    engine.lifecycle.begin_epoch(1, InFlightKV.KEEP)
    old, returned = set[Request](), 0
    while engine.has_work:
        waiting = engine.scheduler.waiting
        old |= {r for r in waiting if r.saved_kv and not r.saved_kv.shareable}
        engine.step()
        engine.scheduler.check()
        came_back = [request for request in engine.scheduler.running if request in old]
        returned += len(came_back)
        assert not any(request.registers_blocks for request in came_back)
    assert returned


def test_without_room_it_keeps_nothing(model: Model) -> None:
    cache = KVCache.allocate(model.shape, 8, BLOCK_SIZE)
    offload = KVOffload(cache, max_blocks=3)
    first = offload.save([1, 2], 20, shareable=True)
    assert first is not None
    assert offload.save([3, 4], 20, shareable=True) is None
    offload.drop(first)
    assert offload.save([3, 4], 20, shareable=True) is not None


def test_blocks_come_back_with_their_bits(model: Model) -> None:
    cache = KVCache.allocate(model.shape, 8, BLOCK_SIZE)
    for layer in (*cache.keys, *cache.values):
        layer.view(torch.uint8).random_()
    saved = (offload := KVOffload(cache, 8)).save([1, 2, 3], 40, shareable=True)
    assert saved is not None
    before = [layer.clone() for layer in cache.keys]
    offload.load(saved, 1, [6, 7])
    for layer, old in zip(cache.keys, before, strict=True):
        assert layer[6].view(torch.uint8).equal(old[2].view(torch.uint8))
        assert layer[7].view(torch.uint8).equal(old[3].view(torch.uint8))
