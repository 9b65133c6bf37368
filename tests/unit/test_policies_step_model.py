"""What is learned of the engines' steps, and what each rank is believed to owe."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.coordinator.backlog import Backlog, RankReport
from homing.coordinator.loads import Slot
from homing.coordinator.step_model import GUESS, StepModel, StepSums, StepTimes

TRUTH = StepTimes(base=20e-3, prefill=900e-6, attention=3e-9, row=2e-3, kv=400e-9)
"""Far from the guess: a small model on a CPU."""


def sums_of(rng: random.Random, truth: StepTimes, *, noise: float = 0.0) -> StepSums:
    """Half a second of steps of some rank."""
    total = StepSums()
    for _ in range(rng.randint(2, 30)):
        tokens = rng.choice([0, 0, rng.randint(1, 512)])
        pairs = tokens * rng.randint(0, 8000)
        rows = rng.randint(0, 16)
        context = rows * rng.randint(50, 4000)
        held = StepSums(1, tokens, pairs, rows, context)
        seconds = sum(x * y for x, y in zip(truth, held, strict=False))
        seconds *= rng.lognormvariate(0.0, noise) if noise else 1.0
        total = StepSums._make(
            a + b for a, b in zip(total, held._replace(seconds=seconds), strict=True)
        )
    return total


def test_the_true_times_are_found_however_far_the_guess() -> None:
    model, rng = StepModel(), random.Random(1)
    for _ in range(300):
        model.learn(Slot(0), sums_of(rng, TRUTH))
    assert list(model.times) == pytest.approx(list(TRUTH), rel=0.1)


def test_a_step_is_predicted_well_through_noise() -> None:
    model, rng = StepModel(), random.Random(2)
    for _ in range(300):
        model.learn(Slot(0), sums_of(rng, TRUTH, noise=0.3))
    held = (1, 512, 512 * 4000, 8, 16_000)
    expected = sum(x * y for x, y in zip(TRUTH, held, strict=True))
    assert sum(x * y for x, y in zip(model.times, held, strict=True)) == pytest.approx(
        expected, rel=0.1
    )


def test_what_no_report_tells_of_stays_as_it_was_guessed() -> None:
    """Decodes alone: nothing is learned of prefill, and it is not forgotten either."""
    model, rng = StepModel(), random.Random(3)
    for _ in range(5000):
        rows = rng.randint(1, 16)
        seconds = 10 * (TRUTH.base + rows * TRUTH.row)
        model.learn(Slot(0), StepSums(10, 0, 0, 10 * rows, 0, seconds))
    assert model.times.prefill == GUESS.prefill
    assert model.times.row == pytest.approx(TRUTH.row, rel=0.05)


def test_other_times_are_learned_when_the_engines_change() -> None:
    model, rng = StepModel(), random.Random(4)
    for _ in range(300):
        model.learn(Slot(0), sums_of(rng, GUESS))
    for _ in range(3000):
        model.learn(Slot(0), sums_of(rng, TRUTH))
    assert list(model.times) == pytest.approx(list(TRUTH), rel=0.15)


def test_a_rank_three_times_as_slow_as_the_others_is_known_for_it() -> None:
    model, rng = StepModel(), random.Random(5)
    for _ in range(200):
        for slot in range(8):
            factor = 3.0 if slot == 5 else 1.0
            truth = StepTimes(*(factor * value for value in TRUTH))
            model.learn(Slot(slot), sums_of(rng, truth))
    assert model.factor(Slot(5)) == pytest.approx(3.0, rel=0.3)
    assert [model.factor(Slot(s)) for s in (0, 1, 7)] == [1.0, 1.0, 1.0]
    model.forget(Slot(5))
    assert model.factor(Slot(5)) == 1.0


@pytest.mark.parametrize(
    "odd",
    [
        StepSums(),
        StepSums(0, 5, 5, 5, 5, 1.0),
        StepSums(3, 5, 5, 5, 5, 0.0),
        StepSums(3, -5, 5, 5, 5, 1.0),
        StepSums(-3, 5, 5, 5, 5, 1.0),
    ],
)
def test_odd_sums_teach_nothing(odd: StepSums) -> None:
    model = StepModel()
    model.learn(Slot(0), odd)
    assert model.times == GUESS


counts = st.integers(0, 2**50)


@given(st.lists(st.tuples(counts, counts, counts, counts, counts, st.floats(0, 1e9)), max_size=30))
def test_whatever_is_reported_no_time_is_negative_or_odd(
    reports: list[tuple[int, int, int, int, int, float]],
) -> None:
    model = StepModel()
    for report in reports:
        model.learn(Slot(0), StepSums(*report))
    assert all(0.0 <= value < 1e12 for value in model.times)
    assert 0.1 <= model.factor(Slot(0)) <= 10.0


# What a rank owes


def backlog_of(num_ranks: int) -> Backlog:
    backlog = Backlog()
    for slot in range(num_ranks):
        backlog.open(Slot(slot))
    return backlog


def wait_s(backlog: Backlog, slot: int, now: float) -> float:
    return max(0.0, backlog.prices[Slot(slot)].clear_at - now)


def report(num_requests: int, owed_tokens: int) -> RankReport:
    return RankReport(num_requests, owed_tokens, StepSums())


def test_what_a_rank_owes_grows_with_each_dispatch_and_shrinks_with_time() -> None:
    backlog = backlog_of(1)
    each_s = GUESS.prefill_s(0, 1000)
    backlog.sent(Slot(0), 1000, 0, now=0.0)
    backlog.sent(Slot(0), 1000, 0, now=0.0)
    assert wait_s(backlog, 0, 0.0) == pytest.approx(2 * each_s)
    assert wait_s(backlog, 0, each_s) == pytest.approx(each_s)
    assert wait_s(backlog, 0, 9.0) == 0.0
    backlog.sent(Slot(0), 1000, 500, now=9.0)
    assert wait_s(backlog, 0, 9.0) == pytest.approx(GUESS.prefill_s(500, 1000))


def test_a_report_overrides_what_was_believed() -> None:
    backlog = backlog_of(1)
    backlog.sent(Slot(0), 1000, 0, now=0.0)
    backlog.reported(Slot(0), report(1, owed_tokens=250), now=0.01)
    assert wait_s(backlog, 0, 0.01) == pytest.approx(GUESS.prefill_s(0, 1000) / 4)
    backlog.reported(Slot(0), report(1, owed_tokens=0), now=0.02)
    assert wait_s(backlog, 0, 0.02) == 0.0


def test_requests_on_their_way_while_a_rank_reports_are_added() -> None:
    """The report counts one request of two: the second had not arrived when it was written."""
    backlog = backlog_of(1)
    backlog.sent(Slot(0), 1000, 0, now=0.0)
    backlog.sent(Slot(0), 3000, 0, now=1.0)
    backlog.reported(Slot(0), report(1, owed_tokens=0), now=1.0)
    assert wait_s(backlog, 0, 1.0) == pytest.approx(GUESS.prefill_s(0, 3000))


def test_tokens_that_were_believed_cached_and_were_not_are_waited_for() -> None:
    backlog = backlog_of(1)
    backlog.sent(Slot(0), 4000, 3900, now=0.0)
    believed = wait_s(backlog, 0, 0.0)
    backlog.reported(Slot(0), report(1, owed_tokens=4000), now=0.0)
    assert wait_s(backlog, 0, 0.0) == pytest.approx(40 * believed)


def test_a_rank_that_did_all_its_work_costs_what_an_idle_one_does() -> None:
    backlog = backlog_of(2)
    for n in range(200):
        backlog.sent(Slot(0), 100 + n, 50, now=float(n))
        backlog.ended(Slot(0), 100 + n, None)
    backlog.reported(Slot(0), report(0, 0), now=500.0)
    idle, used = backlog.prices[Slot(1)], backlog.prices[Slot(0)]
    assert used._replace(clear_at=0.0) == idle._replace(clear_at=0.0)
    assert wait_s(backlog, 0, 500.0) == 0.0


def test_the_usual_length_of_an_answer_is_learned_from_whole_ones_only() -> None:
    backlog = backlog_of(1)
    for n in range(1000):
        backlog.sent(Slot(0), 10, 0, now=0.0)
        backlog.ended(Slot(0), 10, 40 if n % 2 else None)
    assert backlog.answer_tokens == pytest.approx(40, rel=0.1)
