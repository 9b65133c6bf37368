"""Histograms that are added up over processes."""

from __future__ import annotations

from collections import Counter

from homing.observe import Histogram, read_histogram


def test_a_value_is_counted_up_to_each_bound_that_is_not_below_it() -> None:
    histogram = Histogram("t", (0.5, 2))
    for value in (0.1, 0.5, 0.6, 2, 3):
        histogram.observe(value)
    assert histogram.counters() == {"t.le.0.5": 2, "t.le.2": 4, "t.sum": 6.2, "t.count": 5}


def test_a_value_may_count_several_times() -> None:
    histogram = Histogram("t", (1,))
    histogram.observe(0.25, 4)
    assert histogram.counters() == {"t.le.1": 4, "t.sum": 1.0, "t.count": 4}


def test_the_sum_of_two_processes_reads_as_one_histogram() -> None:
    one, other = Histogram("t", (1, 5, 10)), Histogram("t", (1, 5, 10))
    one.observe(3)
    other.observe(7)
    other.observe(20)
    sums = Counter(one.counters())
    sums.update(other.counters())
    buckets, total = read_histogram("t", {**sums, "u.le.3": 9, "steps": 1})
    assert buckets == [("1", 0), ("5", 1), ("10", 2), ("+Inf", 3)]
    assert total == 30


def test_a_histogram_that_nobody_reported_is_empty() -> None:
    assert read_histogram("t", {}) == ([("+Inf", 0)], 0.0)
