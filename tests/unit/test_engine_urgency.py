"""Priorities and deadlines in the engine: who runs first, who gives way, who is out of time."""

from __future__ import annotations

import numpy as np
import pytest

from homing.engine.deadlines import Deadlines
from homing.engine.engine import DEADLINE_PASSED, Engine
from homing.engine.request import Phase, Request
from homing.engine.scheduler import Scheduler
from homing.params import SamplingParams
from homing.wire import Finish, FinishReason
from tests.support.engine_run import run
from tests.support.fake_model import make_engine
from tests.unit.test_scheduler import BLOCK_SIZE, add, make_scheduler, step

PARAMS = SamplingParams(temperature=0.0, num_tokens_to_generate=6, ignore_eos=True)


def request(name: str, num_tokens: int, *, priority: int, first_token: int) -> Request:
    prompt = np.arange(num_tokens, dtype=np.int32) + 1000 * first_token
    return Request(
        name,
        prompt,
        SamplingParams(),
        seed=0,
        block_size=BLOCK_SIZE,
        max_new_tokens=100,
        priority=priority,
    )


def names(requests: list[Request]) -> str:
    return "".join(str(each.key) for each in requests)


def with_requests(scheduler: Scheduler, priorities: dict[str, int], num_tokens: int) -> Scheduler:
    for number, (name, priority) in enumerate(priorities.items()):
        add(scheduler, request(name, num_tokens, priority=priority, first_token=number))
    return scheduler


def test_the_lower_number_goes_first_and_equals_go_by_age():
    scheduler = with_requests(make_scheduler(max_batch=2), {"a": 0, "b": 5, "c": -1, "d": 0}, 4)
    assert names(scheduler.waiting) == "cadb"
    step(scheduler)
    assert names(scheduler.running) == "ca"


def test_an_urgent_request_takes_the_place_of_the_least_urgent_one_in_a_full_batch():
    scheduler = with_requests(make_scheduler(max_batch=3), {"a": 0, "b": 7, "c": 7}, 4)
    step(scheduler)
    add(scheduler, request("u", 4, priority=-3, first_token=9))
    step(scheduler)
    assert (names(scheduler.running), names(scheduler.waiting)) == ("uab", "c")


def test_an_urgent_request_takes_blocks_of_less_urgent_ones_and_no_more_than_it_needs():
    scheduler = with_requests(make_scheduler(num_blocks=16), {"a": 5, "b": 5, "c": 5}, 15)
    step(scheduler)
    assert names(scheduler.running) == "abc"
    add(scheduler, request("u", 15, priority=0, first_token=9))
    step(scheduler)
    assert (names(scheduler.running), names(scheduler.waiting)) == ("uab", "c")


@pytest.mark.parametrize("priority", [3, 4])
def test_nobody_gives_way_to_an_equal_or_a_less_urgent_one(priority: int):
    scheduler = with_requests(make_scheduler(max_batch=1), {"a": 3}, 4)
    step(scheduler)
    add(scheduler, request("b", 4, priority=priority, first_token=9))
    step(scheduler)
    assert (names(scheduler.running), scheduler.num_preemptions) == ("a", 0)


def test_where_blocks_run_out_the_least_urgent_is_preempted_not_the_newest():
    scheduler = with_requests(make_scheduler(num_blocks=6), {"a": 5, "b": 0}, 7)
    step(scheduler)
    assert names(scheduler.running) == "ba"
    for _ in range(2):
        step(scheduler)
    assert (names(scheduler.running), names(scheduler.waiting)) == ("b", "a")


def test_an_urgent_request_that_comes_in_a_waiting_pause_preempts_nobody():
    scheduler = with_requests(make_scheduler(max_batch=1), {"a": 3}, 4)
    step(scheduler)
    scheduler.close()
    add(scheduler, request("u", 4, priority=-1, first_token=9))
    step(scheduler)
    assert names(scheduler.running) == "a"
    scheduler.open()
    step(scheduler)
    assert names(scheduler.running) == "u"


def test_priorities_change_no_token():
    prompts = [np.arange(3, 3 + length) for length in (9, 14, 5, 20, 12, 7)]
    engine, _ = make_engine(num_blocks=14, block_size=4, max_batch_requests=4)
    plain, _ = make_engine()
    for number, prompt in enumerate(prompts):
        plain.add_request(number, prompt, PARAMS)

    to_come = list(enumerate(prompts))

    def arrive(_: int) -> None:
        if to_come:
            number, prompt = to_come.pop(0)
            engine.add_request(number, prompt, PARAMS, priority=-number)

    answers = run(engine, before_step=arrive)
    assert engine.scheduler.num_preemptions > 0
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in run(plain).items()
    }


# Deadlines


def ends(engine: Engine) -> dict[object, Finish]:
    return {out.request.key: out.finish for out in engine.step() if out.finish}


LATE = Finish(FinishReason.ABORT, detail=DEADLINE_PASSED)


def test_a_deadline_ends_what_runs_and_what_waits_and_keeps_what_was_generated():
    engine, _ = make_engine(max_batch_requests=1)
    engine.add_request("running", np.array([5, 6]), PARAMS, deadline=10.0)
    engine.add_request("waiting", np.array([7, 8]), PARAMS, deadline=11.0)
    engine.add_request("endless", np.array([9, 9]), PARAMS)
    engine.expire(9.9)
    assert ends(engine) == {}
    engine.expire(10.0)
    assert ends(engine) == {"running": LATE}
    engine.expire(11.5)
    assert ends(engine)["waiting"] == LATE
    while engine.has_unfinished_requests:
        assert set(ends(engine)) <= {"endless"}
    assert engine.block_pool.num_held == 0


def test_a_deadline_passes_in_a_pause_too():
    engine, _ = make_engine()
    engine.add_request("a", np.array([5, 6]), PARAMS, deadline=10.0)
    engine.lifecycle.pause()
    assert not engine.has_work
    engine.expire(10.0)
    assert engine.has_work
    assert ends(engine) == {"a": LATE}


def test_deadlines_of_requests_that_ended_are_not_remembered_for_long():
    deadlines = Deadlines()
    late = request("late", 1, priority=0, first_token=1)
    deadlines.add(late, 5.0)
    for number in range(1000):
        ended = request(str(number), 1, priority=0, first_token=1)
        deadlines.add(ended, 600.0)
        ended.phase = Phase.FINISHED
    assert len(deadlines) < 100
    assert deadlines.passed(10.0) == [late]


def test_the_deadline_of_a_request_that_ended_does_nothing():
    engine, _ = make_engine()
    engine.add_request("a", np.array([5, 6]), PARAMS, deadline=10.0)
    run(engine)
    engine.add_request("a", np.array([5, 6]), PARAMS, deadline=20.0)
    engine.expire(10.0)
    assert ends(engine) == {}
    engine.expire(20.0)
    assert ends(engine) == {"a": LATE}
