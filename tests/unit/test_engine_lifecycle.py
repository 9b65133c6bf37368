"""Pausing, suspending and updating an engine, on a model whose logits tell under which weights each
position was computed."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
import torch

from homing.engine.engine import Engine
from homing.errors import InvalidRequest, NotAllowed
from homing.params import SamplingParams
from homing.wire import FinishReason, FleetState, InFlightKV, KVMode, PauseMode, WeightsMode
from tests.support.engine_run import Answer, run
from tests.support.fake_model import SHIFT, expected_greedy, logits_of, make_engine, shifted

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def greedy(num_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_tokens_to_generate=num_tokens, ignore_eos=True)


def ask(engine: Engine, key: Hashable, prompt: list[int] = PROMPT, num_tokens: int = 8) -> None:
    engine.add_request(key, np.array(prompt), greedy(num_tokens))


def shift_to(shift: int) -> list[tuple[str, torch.Tensor]]:
    return [(SHIFT, torch.tensor([float(shift)]))]


def answer(engine: Engine, prompt: list[int], num_tokens: int = 8) -> Answer:
    ask(engine, "once", prompt, num_tokens)
    return run(engine)["once"]


def expected(prompt: list[int], num_tokens: int, shift: int = 0) -> list[int]:
    """Greedy, beyond ends of sequences."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += expected_greedy([*prompt, *tokens], num_tokens - len(tokens), shift=shift)
    return tokens


# States


def test_the_states_follow_one_another_and_nothing_else() -> None:
    engine, _ = make_engine()
    lifecycle = engine.lifecycle
    with pytest.raises(NotAllowed, match="pause it before"):
        lifecycle.suspend()
    with pytest.raises(NotAllowed, match="nothing to resume"):
        lifecycle.resume()
    lifecycle.pause()
    lifecycle.pause()
    assert lifecycle.state is FleetState.PAUSED
    lifecycle.suspend()
    lifecycle.suspend(KVMode.DISCARD)
    lifecycle.pause()
    assert lifecycle.state is FleetState.SUSPENDED
    with pytest.raises(NotAllowed, match="resume it before"):
        lifecycle.unpause()
    lifecycle.resume()
    lifecycle.resume()
    assert lifecycle.state is FleetState.PAUSED
    lifecycle.unpause()
    lifecycle.unpause()
    assert lifecycle.state is FleetState.RUNNING


def test_a_pause_that_keeps_lets_requests_go_on_afterwards() -> None:
    engine, _ = make_engine()
    answers: dict[Hashable, Answer] = {}
    ask(engine, "a")
    run_steps(engine, answers, 1)
    engine.lifecycle.pause(PauseMode.KEEP)
    ask(engine, "b")
    assert not engine.has_work
    engine.lifecycle.unpause()
    run(engine, answers)
    assert answers["a"].token_ids == expected(PROMPT, 8)
    assert answers["b"].token_ids == expected(PROMPT, 8)


def test_a_pause_that_waits_lets_what_is_there_end_and_holds_back_what_comes() -> None:
    engine, _ = make_engine(max_batch_requests=1)
    answers: dict[Hashable, Answer] = {}
    ask(engine, "running")
    ask(engine, "waiting")
    run_steps(engine, answers, 1)
    engine.lifecycle.pause(PauseMode.WAIT)
    ask(engine, "late")
    assert engine.lifecycle.is_draining
    assert engine.lifecycle.state is FleetState.RUNNING
    run(engine, answers)
    assert answers["running"].finish is not None
    assert answers["waiting"].finish is not None
    assert "late" not in answers
    assert engine.lifecycle.state is FleetState.PAUSED
    assert not engine.lifecycle.is_draining
    engine.lifecycle.unpause()
    assert run(engine)["late"].token_ids == expected(PROMPT, 8)


def test_a_pause_that_waits_for_nothing_begins_at_once() -> None:
    engine, _ = make_engine()
    engine.lifecycle.pause(PauseMode.WAIT)
    assert engine.lifecycle.state is FleetState.PAUSED


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
def test_another_pause_ends_the_waiting(mode: PauseMode) -> None:
    engine, _ = make_engine()
    ask(engine, "a")
    engine.step()
    engine.lifecycle.pause(PauseMode.WAIT)
    engine.lifecycle.pause(mode)
    assert engine.lifecycle.state is FleetState.PAUSED
    ended = [output.finish is not None for output in engine.take_outputs()]
    assert ended == ([True] if mode is PauseMode.ABORT else [])


def test_an_unpause_ends_the_waiting_and_admits_what_was_held_back() -> None:
    engine, _ = make_engine()
    ask(engine, "a")
    engine.lifecycle.pause(PauseMode.WAIT)
    ask(engine, "b")
    engine.lifecycle.unpause()
    assert set(run(engine)) == {"a", "b"}
    assert engine.lifecycle.state is FleetState.RUNNING


def test_aborting_the_last_request_that_a_pause_waits_for_begins_it() -> None:
    engine, _ = make_engine()
    ask(engine, "a")
    engine.lifecycle.pause(PauseMode.WAIT)
    engine.abort("a")
    run(engine)
    assert engine.lifecycle.state is FleetState.PAUSED


def test_a_pause_that_aborts_ends_requests_with_what_they_have() -> None:
    engine, _ = make_engine(max_batch_requests=1)
    ask(engine, "running")
    ask(engine, "waiting")
    answers = {o.request.key: o.token_ids for _ in range(3) for o in engine.step()}
    engine.lifecycle.pause(PauseMode.ABORT)
    ends = engine.take_outputs()
    assert {o.request.key for o in ends} == {"running", "waiting"}
    assert all(o.finish and o.finish.reason is FinishReason.ABORT for o in ends)
    assert list(answers) == ["running"]
    assert engine.block_pool.num_held == 0


def test_reset_ends_everything_in_any_state() -> None:
    engine, _ = make_engine()
    for prepare in (
        lambda: None,
        engine.lifecycle.pause,
        lambda: engine.lifecycle.suspend(KVMode.DISCARD),
    ):
        prepare()
        ask(engine, "a")
        state = engine.lifecycle.state
        engine.step()
        engine.lifecycle.reset()
        assert [o.finish.reason for o in engine.step() if o.finish] == [FinishReason.ABORT]
        assert engine.lifecycle.state is state
        assert engine.block_pool.num_available == engine.block_pool.capacity
        assert not engine.has_unfinished_requests


# Suspending


@pytest.mark.parametrize("weights", WeightsMode)
@pytest.mark.parametrize("kv", KVMode)
def test_requests_go_on_as_if_there_had_been_no_suspension(
    kv: KVMode, weights: WeightsMode
) -> None:
    engine, _ = make_engine(max_batch_requests=2)
    prompts = {key: [*PROMPT, key] for key in range(4)}
    for key, prompt in prompts.items():
        ask(engine, key, prompt)
    answers: dict[Hashable, Answer] = {}
    run_steps(engine, answers, 4)
    engine.lifecycle.pause()
    engine.lifecycle.suspend(kv, weights)
    engine.scheduler.check()
    ask(engine, 4, [*PROMPT, 4])
    engine.lifecycle.resume()
    engine.lifecycle.unpause()
    run(engine, answers)
    for key in range(5):
        assert answers[key].token_ids == expected([*PROMPT, key], 8)


def run_steps(engine: Engine, answers: dict[Hashable, Answer], num_steps: int) -> None:
    for _ in range(num_steps):
        for output in engine.step():
            answers.setdefault(output.request.key, Answer()).add(output)


# Updating


def test_no_prefix_of_the_old_weights_is_found_again() -> None:
    engine, _ = make_engine()
    answer(engine, PROMPT)
    assert answer(engine, PROMPT).num_cached_tokens == 8
    engine.lifecycle.update_weights(shift_to(3))
    again = answer(engine, PROMPT)
    assert again.num_cached_tokens == 0
    assert again.token_ids == expected(PROMPT, 8, shift=3)
    assert answer(engine, PROMPT).num_cached_tokens == 8


@pytest.mark.parametrize("in_flight", InFlightKV)
def test_requests_in_flight_go_on_under_the_new_weights(in_flight: InFlightKV) -> None:
    """One is decoding, one in the middle of its prompt, one waits."""
    engine, _ = make_engine(max_batch_requests=2, max_step_tokens=8)
    prompts = {"decoding": PROMPT, "prefilling": list(range(3, 31)), "waiting": [*PROMPT, 9]}
    answers: dict[Hashable, Answer] = {}
    ask(engine, "decoding", prompts["decoding"], 20)
    run_steps(engine, answers, 3)
    ask(engine, "prefilling", prompts["prefilling"], 20)
    ask(engine, "waiting", prompts["waiting"], 20)
    run_steps(engine, answers, 2)
    [prefilling] = [r for r in engine.scheduler.running if r.key == "prefilling"]
    computed = {
        "decoding": len(PROMPT) + len(answers["decoding"].token_ids) - 1,
        "prefilling": prefilling.num_computed,
        "waiting": 0,
    }
    assert 0 < computed["prefilling"] < 28

    engine.lifecycle.update_weights(shift_to(1), in_flight=in_flight)
    before = {key: list(answers[key].token_ids) if key in answers else [] for key in prompts}
    run(engine, answers)
    for key, prompt in prompts.items():
        num_old = computed[key] if in_flight is InFlightKV.KEEP else 0
        tokens = [*prompt, *before[key]]
        while len(tokens) < len(prompt) + 20:
            old, new = np.array(tokens[:num_old]), np.array(tokens[num_old:])
            found = np.concatenate([shifted(old, 0), shifted(new, 1)])
            tokens.append(int(logits_of(found, 32).argmax()))
        assert answers[key].token_ids == tokens[len(prompt) :], key


@pytest.mark.parametrize("in_flight", InFlightKV)
def test_what_was_in_flight_leaves_no_stale_prefix(in_flight: InFlightKV) -> None:
    engine, _ = make_engine()
    both: dict[Hashable, Answer] = {}
    ask(engine, "a", num_tokens=12)
    run_steps(engine, both, 4)
    engine.lifecycle.update_weights(shift_to(1), in_flight=in_flight)
    run_steps(engine, both, 4)
    ask(engine, "b", PROMPT)
    run(engine, both)
    if in_flight is InFlightKV.KEEP:
        assert both["b"].num_cached_tokens == 0
    assert both["b"].token_ids == expected(PROMPT, 8, shift=1)
    longer = [*PROMPT, *expected(PROMPT, 8, shift=1), 7]
    assert answer(engine, longer).token_ids == expected(longer, 8, shift=1)


def test_a_request_preempted_after_an_update_is_computed_by_the_new_weights_and_shared() -> None:
    engine, _ = make_engine()
    answers: dict[Hashable, Answer] = {}
    ask(engine, "a", num_tokens=12)
    run_steps(engine, answers, 3)
    engine.lifecycle.update_weights(shift_to(1))
    engine.scheduler.preempt_all()
    run(engine, answers)
    assert answer(engine, PROMPT).num_cached_tokens == 8
    assert answer(engine, PROMPT).token_ids == expected(PROMPT, 8, shift=1)


def test_each_token_tells_the_epoch_that_it_was_sampled_under() -> None:
    engine, _ = make_engine()
    ask(engine, "a", num_tokens=6)
    epochs = []
    for update in (None, None, 4, None, 9, None):
        if update:
            engine.lifecycle.update_weights(shift_to(update), epoch=update)
        epochs += [output.epoch for output in engine.step() if output.token_ids]
    assert epochs == [0, 0, 4, 4, 9, 9]


def test_an_epoch_may_be_set_without_new_weights_but_never_back() -> None:
    engine, _ = make_engine()
    answer(engine, PROMPT)
    engine.lifecycle.begin_epoch(5)
    engine.lifecycle.begin_epoch(5)
    assert answer(engine, PROMPT).num_cached_tokens == 0
    engine.lifecycle.begin_epoch(5)
    assert answer(engine, PROMPT).num_cached_tokens == 8, "the same epoch again changes nothing"
    with pytest.raises(NotAllowed, match="only increase"):
        engine.lifecycle.begin_epoch(4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "missing"),
        ([("shift", torch.ones(2))], "is \\[2\\]"),
        ([("shift", torch.ones(1, dtype=torch.int32))], "float dtype"),
        ([("shift", torch.tensor([torch.nan]))], "not finite"),
        ([("shift", torch.tensor([-torch.inf]))], "not finite"),
        ([("shift", torch.tensor([1e300], dtype=torch.float64))], "not finite"),
        ([("shift", torch.ones(1)), ("shift", torch.ones(1))], "twice"),
        ([("shift", torch.ones(1)), ("other", torch.ones(1))], "no parameter 'other'"),
    ],
)
def test_an_update_that_cannot_be_right_changes_nothing(
    tensors: list[tuple[str, torch.Tensor]], message: str
) -> None:
    engine, _ = make_engine()
    answer(engine, PROMPT)
    with pytest.raises(InvalidRequest, match=message):
        engine.lifecycle.update_weights(tensors)
    assert engine.lifecycle.epoch == 0
    again = answer(engine, PROMPT)
    assert again.num_cached_tokens == 8
    assert again.token_ids == expected(PROMPT, 8)


def test_a_source_that_fails_in_its_middle_changes_nothing() -> None:
    def broken():
        yield from shift_to(1)
        raise RuntimeError("the trainer is gone")

    engine, _ = make_engine()
    with pytest.raises(RuntimeError, match="gone"):
        engine.lifecycle.update_weights(broken())
    assert answer(engine, PROMPT).token_ids == expected(PROMPT, 8)
