"""Which ranks get new work: breakers, late ranks, slow ranks, fair shares, by literal events."""

from __future__ import annotations

from typing import Any

import pytest

from homing.coordinator.fairness import CONTENTION_S, MAX_REFUSED, FairShares
from homing.coordinator.health import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    MAX_FAILURES,
    WINDOW_S,
    Breaker,
    Circuit,
    FleetHealth,
    RankSigns,
)
from homing.coordinator.records import Client, RankId
from homing.wire import (
    FinishReason,
    Goodbye,
    Heartbeat,
    Lost,
    LostReason,
    Message,
    Submit,
    pack_payload,
)
from tests.support.coordinator_fleet import Fleet, joined_fleet, kinds, output, submit, to

WELL = RankSigns(silent_s=0.0, slowness=1.0)
LEAVING = RankSigns(silent_s=0.0, slowness=1.0, leaving=True)


def ranks(*signs: RankSigns) -> dict[RankId, RankSigns]:
    return {RankId(number): sign for number, sign in enumerate(signs)}


def limits(
    health: FleetHealth, *signs: RankSigns, mean: float = 4.0, now: float = 0.0
) -> list[int]:
    return list(health.limits(ranks(*signs), mean, now).values())


def health_of(failures: int, *, now: float = 0.0) -> FleetHealth:
    """A fleet of which rank 0 failed so often."""
    health = FleetHealth(max_requests=100, timeout_s=10.0)
    for _ in range(failures):
        health.fail(RankId(0), now)
    return health


# The breaker


def test_a_breaker_opens_at_the_third_failure_of_a_minute() -> None:
    breaker = Breaker()
    for now in (0.0, 10.0):
        breaker.fail(now)
        assert breaker.circuit is Circuit.CLOSED
    breaker.fail(20.0)
    assert (breaker.circuit, breaker.opened_until) == (Circuit.OPEN, 20.0 + FIRST_BACKOFF_S)


def test_failures_that_are_far_apart_open_nothing() -> None:
    breaker = Breaker()
    for number in range(10):
        breaker.fail(number * WINDOW_S / 2)
        assert breaker.circuit is Circuit.CLOSED


def test_a_breaker_goes_from_open_to_probed_to_closed() -> None:
    breaker = Breaker()
    for _ in range(MAX_FAILURES):
        breaker.fail(0.0)
    breaker.wait(FIRST_BACKOFF_S - 0.01)
    assert breaker.circuit is Circuit.OPEN
    breaker.serve()
    assert breaker.circuit is Circuit.OPEN, "what it had before it was barred proves nothing"
    breaker.wait(FIRST_BACKOFF_S)
    assert breaker.circuit is Circuit.HALF_OPEN
    breaker.serve()
    assert breaker.circuit is Circuit.CLOSED
    breaker.fail(2.0)
    assert breaker.circuit is Circuit.CLOSED, "it starts anew"


def test_each_failed_probe_doubles_the_backoff_up_to_a_limit() -> None:
    breaker, now, backoffs = Breaker(), 0.0, []
    for _ in range(MAX_FAILURES):
        breaker.fail(now)
    for _ in range(7):
        backoffs.append(breaker.backoff_s)
        now = breaker.opened_until
        breaker.wait(now)
        breaker.fail(now)
    assert backoffs == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S]


# What ranks may have


def test_a_rank_that_fails_repeatedly_gets_nothing_then_one_request_then_its_full_load() -> None:
    health = health_of(MAX_FAILURES)
    assert limits(health, WELL, WELL, now=0.5) == [0, 100]
    assert limits(health, WELL, WELL, now=1.0) == [1, 100]
    assert health.serve(RankId(0))
    assert limits(health, WELL, WELL, now=1.1) == [100, 100]


def test_a_late_rank_gets_nothing_until_it_is_heard() -> None:
    health = health_of(0)
    assert limits(health, WELL._replace(silent_s=4.1), WELL) == [0, 100]
    assert limits(health, WELL._replace(silent_s=0.3), WELL) == [100, 100]


@pytest.mark.parametrize(("slowness", "limit"), [(2.9, 100), (4.0, 2), (100.0, 1)])
def test_a_slow_rank_gets_so_much_less_than_the_others_have(slowness: float, limit: int) -> None:
    signs = (WELL._replace(slowness=slowness), WELL, WELL)
    assert limits(health_of(0), *signs, mean=8.0) == [limit, 100, 100]


def test_a_rank_that_was_slow_gets_its_full_load_when_it_is_clearly_better() -> None:
    health = health_of(0)
    given = [
        limits(health, WELL._replace(slowness=slowness), WELL, WELL, mean=12.0)[0]
        for slowness in (2.9, 3.1, 2.9, 2.1, 3.1, 1.9, 2.1, 2.9, 3.1)
    ]
    assert given == [100, 3, 4, 5, 3, 100, 100, 100, 3]


def test_a_slow_rank_that_comes_back_as_another_process_starts_anew() -> None:
    health = health_of(0)
    slow = WELL._replace(slowness=4.0)
    assert limits(health, slow, WELL, WELL)[0] == 1
    assert health.limits({RankId(1): WELL, RankId(2): WELL}, 4.0, 0.0)
    assert limits(health, WELL._replace(slowness=2.5), WELL, WELL)[0] == 100


def test_of_ranks_that_are_all_slow_none_is() -> None:
    slow = WELL._replace(slowness=9.0)
    assert limits(health_of(0), slow, slow) == [100, 100]


def test_the_last_rank_is_never_barred() -> None:
    assert limits(health_of(MAX_FAILURES), WELL) == [100]
    late = WELL._replace(silent_s=9.0)
    assert limits(health_of(0), late, late) == [100, 100]
    assert limits(health_of(MAX_FAILURES), WELL, late) == [100, 100]


def test_a_rank_that_leaves_gets_nothing_even_if_no_other_is_there() -> None:
    assert limits(health_of(0), LEAVING) == [0]
    assert limits(health_of(MAX_FAILURES), WELL, LEAVING) == [100, 0]


def test_a_rank_that_serves_again_has_its_full_load_for_the_rest_of_the_burst() -> None:
    fleet = joined_fleet(engines=1, max_queued_requests=8)
    for _ in range(MAX_FAILURES):
        fleet.fail(b"e0")
        fleet.tick()
        fleet.join_engine(0)
    while fleet.coordinator.admission.circuit(RankId(0)) != Circuit.HALF_OPEN.value:
        fleet.tick()
        fleet.beat(b"e0", b"c1")
    fleet.say(b"c1", submit(request_id=1))
    more = [(b"c1", submit(request_id=number)) for number in (2, 3, 4)]
    seen = fleet.burst((b"e0", output((1, 0))), *more)
    assert kinds(seen) == [(b"c1", "Output"), *[(b"e0", "Submit")] * 3]


# Fair shares


def holder(shares: FairShares, num_requests: int) -> Client:
    client = Client(b"c", 1, 0.0)
    for _ in range(num_requests):
        shares.took(client)
    return client


def test_without_a_refusal_nobody_has_a_share() -> None:
    shares = FairShares()
    holder(shares, 9)
    assert shares.contended_until <= 0.0


def test_a_client_that_was_refused_claims_its_share_for_a_while() -> None:
    shares = FairShares()
    holder(shares, 10)
    shares.refused(Client(b"d", 2, 0.0), 0.0)
    assert shares.share(10, 0.0) == 5
    assert shares.contended_until == CONTENTION_S
    assert shares.share(10, CONTENTION_S + 0.1) == 10


def test_who_holds_nothing_any_more_claims_nothing() -> None:
    shares = FairShares()
    client = holder(shares, 2)
    other = holder(shares, 1)
    assert (shares.num_holders, shares.num_held(client)) == (2, 2)
    for _ in range(2):
        shares.gave_back(client, 0.0)
    assert (shares.num_holders, shares.num_held(client)) == (1, 0)
    assert shares.share(10, 0.0) == 10
    assert shares.num_held(other) == 1


def test_of_how_many_it_is_known_that_they_were_refused_is_bounded() -> None:
    shares = FairShares()
    for tenant in range(MAX_REFUSED + 500):
        shares.refused(tenant, 0.0)
    assert len(shares._refused_at) == MAX_REFUSED
    assert shares.share(10, CONTENTION_S + 0.1) == 10
    assert not shares._refused_at


def test_every_claimant_has_a_share_of_at_least_one() -> None:
    shares = FairShares()
    for _ in range(30):
        holder(shares, 1)
    assert shares.share(10, 0.0) == 1


def test_the_time_to_retry_follows_the_pace_of_ends_and_the_number_that_wait() -> None:
    shares = FairShares()
    client = holder(shares, 200)
    assert shares.retry_after_s(0.0) == 1.0
    for second in range(20):
        shares.gave_back(client, float(second))
    for _ in range(9):
        shares.refused(client, 20.0)
    assert shares.retry_after_s(20.0) == 10.0
    for _ in range(500):
        shares.refused(client, 20.0)
    assert shares.retry_after_s(20.0) == 60.0


# In the coordinator


def lost(sent: list[tuple[bytes, Message]]) -> list[Lost]:
    return [message for _, message in sent if isinstance(message, Lost)]


def ranks_of(sent: list[tuple[bytes, Message]]) -> list[bytes]:
    return [peer for peer, message in sent if isinstance(message, Submit)]


def test_a_rank_that_dies_again_and_again_gets_a_probe_and_then_work() -> None:
    fleet = Fleet(policy="load_balanced")
    fleet.join_client()
    fleet.join_engine(1)
    for life in range(3):
        fleet.join_engine(0)
        fleet.fail(b"e0") if life < 2 else None
    fleet.say(b"e0", Goodbye(failed=True))
    fleet.join_engine(0)
    barred = [ranks_of(fleet.say(b"c1", submit(request_id=n))) for n in range(4)]
    assert barred == [[b"e1"]] * 4
    fleet.beat(b"e0", b"e1", b"c1")
    fleet.tick(1.0)
    probe = [ranks_of(fleet.say(b"c1", submit(request_id=n))) for n in range(10, 14)]
    assert probe.count([b"e0"]) == 1, "one at a time"
    number = 10 + probe.index([b"e0"])
    fleet.say(b"e0", output((number, 0)))
    after = [ranks_of(fleet.say(b"c1", submit(request_id=n))) for n in range(20, 24)]
    assert after == [[b"e0"]] * 4, "it is the least loaded one again"


def test_a_hung_rank_gets_no_new_work_before_it_counts_as_dead() -> None:
    fleet = Fleet(policy="round_robin", heartbeat_timeout_s=10.0)
    for number in (0, 1):
        fleet.join_engine(number)
    fleet.join_client()
    for _ in range(5):
        fleet.tick()
        fleet.beat(b"e1", b"c1")
    sent = [ranks_of(fleet.say(b"c1", submit(request_id=n))) for n in range(4)]
    assert sent == [[b"e1"]] * 4
    fleet.beat(b"e0")
    fleet.tick()
    sent = [ranks_of(fleet.say(b"c1", submit(request_id=n))) for n in range(4, 8)]
    assert [b"e0"] in sent


def test_a_rank_of_slow_steps_gets_less() -> None:
    fleet = Fleet(policy="round_robin")
    for number in range(3):
        fleet.join_engine(number)
    fleet.join_client()
    for beat in range(1, 120):
        fleet.tick(0.5)
        fleet.beat(b"c1")
        for number, step_s in enumerate((0.5, 0.01, 0.01)):
            counters = {"steps": 10 * beat, "decode_rows": 40 * beat}
            counters |= {"decode_context_tokens": 4000 * beat, "decode_step_s": 10 * step_s * beat}
            fleet.say(b"e%d" % number, Heartbeat(0, counters=pack_payload(counters)))
    fleet.tick(0.5)
    sent = [ranks_of(fleet.say(b"c1", submit(request_id=n)))[0] for n in range(30)]
    assert sent.count(b"e0") <= 1


def test_an_engine_s_death_and_its_leave_are_told_apart() -> None:
    for goodbye, reason in (
        (Goodbye(), LostReason.RANK_LEFT),
        (Goodbye(failed=True), LostReason.RANK_LOST),
    ):
        fleet = Fleet()
        fleet.join_engine()
        fleet.join_client()
        fleet.say(b"c1", submit())
        assert [message.reason for message in lost(fleet.say(b"e0", goodbye))] == [reason]


def full_fleet(**settings: Any) -> Fleet:
    """Client 1 holds all four places."""
    fleet = Fleet(**settings)
    fleet.join_engine()
    for number in (1, 2):
        fleet.join_client(number)
    for number in range(4):
        assert ranks_of(fleet.say(b"c1", submit(1, number)))
    return fleet


def test_a_client_above_its_share_is_refused_first() -> None:
    fleet = full_fleet(max_queued_requests=4)
    [refusal] = lost(fleet.say(b"c2", submit(2, 1)))
    assert refusal.reason is LostReason.OVERLOADED
    fleet.say(b"e0", output((0, 0)))
    [refusal] = lost(fleet.say(b"c1", submit(1, 10)))
    assert "share of 2" in refusal.detail
    assert ranks_of(fleet.say(b"c2", submit(2, 2))), "there was a place, and it was for this one"
    fleet.now += CONTENTION_S
    fleet.say(b"e0", output((1, 0)))
    assert ranks_of(fleet.say(b"c1", submit(1, 11))), "nobody else wants it any more"


def test_tenants_share_places_whichever_clients_submit_for_them() -> None:
    """Two frontends, two API keys: who floods both has one share, not one of each."""
    fleet = Fleet(max_queued_requests=4)
    fleet.join_engine()
    for number in (1, 2):
        fleet.join_client(number)
    for number in range(4):
        client = 1 + number % 2
        assert ranks_of(fleet.say(b"c%d" % client, submit(client, number, tenant=7)))
    [refusal] = lost(fleet.say(b"c1", submit(1, 10, tenant=8)))
    assert refusal.reason is LostReason.OVERLOADED
    fleet.say(b"e0", output((0, 0), client=1))
    for client in (1, 2):
        [refusal] = lost(fleet.say(b"c%d" % client, submit(client, 20, tenant=7)))
        assert "this tenant has its share of 2" in refusal.detail
    assert ranks_of(fleet.say(b"c1", submit(1, 11, tenant=8)))
    fleet.say(b"e0", output((11, 0), client=1))
    fleet.say(b"c1", Goodbye())
    fleet.say(b"c2", Goodbye())
    assert fleet.coordinator.admission.shares.num_holders == 0


def test_a_rank_with_too_many_prompt_tokens_takes_no_more_requests() -> None:
    fleet = Fleet(max_queued_tokens=20)
    fleet.join_engine()
    fleet.join_client()
    for number in range(3):  # of nine tokens each: two are less than the bound
        assert ranks_of(fleet.say(b"c1", submit(request_id=number)))
    [refusal] = lost(fleet.say(b"c1", submit(request_id=3)))
    assert (refusal.reason, refusal.retry_after_s) == (LostReason.OVERLOADED, 1.0)
    assert "20 prompt tokens" in refusal.detail
    fleet.say(b"e0", output((0, 0), reason=FinishReason.ABORT))
    assert ranks_of(fleet.say(b"c1", submit(request_id=4)))


def test_a_clock_that_jumps_back_or_far_ahead_harms_nobody() -> None:
    fleet = Fleet()
    fleet.join_engine()
    fleet.join_client()
    fleet.say(b"c1", submit())
    fleet.tick(100.0)  # it stood still, or the clock jumped: nobody was silent
    fleet.now = -1e6
    for _ in range(20):
        sent = fleet.tick(1.0)
        assert kinds(sent) == [(b"e0", "Heartbeat"), (b"c1", "Heartbeat")]
    fleet.now = 1e9
    assert kinds(fleet.tick()) == [(b"e0", "Heartbeat"), (b"c1", "Heartbeat")]
    assert to(b"c1", fleet.say(b"e0", output((1, 0))))
