from __future__ import annotations

from homing.launch.restart import HEALTHY_AFTER_S, LONGEST_DELAY_S, Restarts


def test_the_delay_doubles_from_a_tenth_of_a_second_to_ten_seconds() -> None:
    restarts = Restarts()
    delays = [restarts.record_exit(lived_s=1.0) for _ in range(9)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_process_that_was_healthy_starts_again_at_once() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.record_exit(lived_s=1.0)
    assert restarts.record_exit(lived_s=HEALTHY_AFTER_S) == 0.1
    assert restarts.failures == 1


def test_a_long_outage_keeps_the_longest_delay() -> None:
    restarts = Restarts()
    delays = [restarts.record_exit(lived_s=0.0) for _ in range(5000)]
    assert delays[-1] == LONGEST_DELAY_S
