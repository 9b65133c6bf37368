"""Requests at the coordinator: dispatch, refusal, and the one end of each."""

from __future__ import annotations

import msgspec
import pytest

from homing.coordinator.events import Forward, Received
from homing.prefix import block_hashes
from homing.wire import (
    Abort,
    AbortMatched,
    AbortMatching,
    FinishReason,
    Heartbeat,
    Lost,
    LostReason,
    Output,
    Submit,
    pack,
)
from tests.support.coordinator_fleet import (
    Failure,
    Fleet,
    client_hello,
    engine_hello,
    kinds,
    output,
    submit,
    to,
    tokens,
)


@pytest.fixture
def fleet() -> Fleet:
    """One client, two engines."""
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.join_engine(1)
    return fleet


def lost(fleet_sends: list, client: bytes = b"c1") -> list[tuple[int, int, LostReason]]:
    messages = to(client, fleet_sends)
    return [(m.request_id, m.attempt, m.reason) for m in messages if isinstance(m, Lost)]


# Dispatch


def test_a_submission_is_forwarded_at_once_without_its_hashes(fleet: Fleet) -> None:
    message = submit()
    assert fleet.say(b"c1", message) == [
        (b"e0", msgspec.structs.replace(message, block_hashes=None))
    ]
    assert fleet.loads == {0: 1, 1: 0}


def test_the_metadata_and_payload_frames_are_forwarded_as_they_came(fleet: Fleet) -> None:
    frames = pack(submit())
    [instruction] = fleet.raw(Received(b"c1", submit(), frames))
    assert isinstance(instruction, Forward)
    assert all(sent is came for sent, came in zip(instruction.frames[:3], frames, strict=False))
    assert bytes(instruction.frames[3]) == b"\xc0"


def test_an_output_is_forwarded_to_its_client_as_it_came(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    assert fleet.say(b"e0", output()) == [(b"c1", output())]
    assert fleet.loads == {0: 1, 1: 0}
    assert fleet.say(b"e0", output((1, 0))) == [(b"c1", output((1, 0)))]
    assert fleet.loads == {0: 0, 1: 0}


def test_an_output_whose_deltas_are_noise_is_forwarded_unread(fleet: Fleet) -> None:
    noise = Output(1, 1, 0, None, b"\xff\x00noise")
    assert fleet.say(b"e0", noise) == [(b"c1", noise)]


def test_the_second_of_two_equal_prompts_goes_where_the_first_went(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1))
    fleet.say(b"e0", output((1, 0)))
    fleet.say(b"c1", submit(request_id=2, prompt=tokens(*range(50, 60))))  # to the other
    fleet.say(b"e1", output((2, 0)))
    assert to(b"e0", fleet.say(b"c1", submit(request_id=3)))
    assert to(b"e1", fleet.say(b"c1", submit(request_id=4, prompt=tokens(*range(50, 60)))))


def test_a_prompt_that_was_not_hashed_is_routed_by_load(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1))
    assert to(b"e1", fleet.say(b"c1", submit(request_id=2, hashed=False)))


def test_not_hashed_and_no_full_block_are_both_served(fleet: Fleet) -> None:
    short = tokens(1, 2)
    sent = fleet.say(b"c1", submit(request_id=1, prompt=short))
    assert kinds(sent) == [(b"e0", "Submit")]
    sent = fleet.say(b"c1", submit(request_id=2, prompt=short, hashed=False))
    assert kinds(sent) == [(b"e1", "Submit")]


def test_ten_requests_that_share_a_prefix_do_not_all_queue_on_one_idle_rank(fleet: Fleet) -> None:
    shared = list(range(40))
    for number in range(10):
        fleet.say(b"c1", submit(request_id=number, prompt=tokens(*shared, number, number)))
    assert min(fleet.loads.values()) >= 3


@pytest.mark.parametrize("policy", ["load_balanced", "round_robin"])
def test_other_policies_do_not_look_at_hashes(policy: str) -> None:
    fleet = Fleet(policy=policy)
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.join_engine(1)
    message = submit(block_hashes=b"not hashes at all")
    assert kinds(fleet.say(b"c1", message)) == [(b"e0", "Submit")]
    assert kinds(fleet.say(b"c1", submit(request_id=2))) == [(b"e1", "Submit")]
    assert fleet.coordinator.index.num_entries == 0


def test_predicted_and_actual_cached_tokens_are_of_the_same_finished_requests(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1))
    fleet.say(b"e0", output((1, 0)))
    fleet.say(b"c1", submit(request_id=2))  # 9 tokens: two full blocks of four are expected
    assert fleet.stats()["predicted_cached_tokens"] == 0
    fleet.say(b"e0", output((2, 0), num_cached_tokens=4))
    assert fleet.stats()["predicted_cached_tokens"] == 8
    assert fleet.stats()["actual_cached_tokens"] == 4


# Refusal


def test_without_an_engine_a_submission_is_refused_as_such() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    [(_, message)] = fleet.say(b"c1", submit())
    assert isinstance(message, Lost)
    assert (message.reason, message.request_id) == (LostReason.NO_RANK, 1)
    assert message.retry_after_s > 0


def test_beyond_the_bound_of_every_rank_submissions_are_refused_with_a_time_to_retry() -> None:
    fleet = Fleet(max_queued_requests=2)
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.join_engine(1)
    for number in range(4):
        assert kinds(fleet.say(b"c1", submit(request_id=number))) in (
            [(b"e0", "Submit")],
            [(b"e1", "Submit")],
        )
    [(_, message)] = fleet.say(b"c1", submit(request_id=9))
    assert isinstance(message, Lost)
    assert message.reason is LostReason.OVERLOADED
    assert message.retry_after_s > 0
    fleet.say(b"e0", output((0, 0)))
    assert kinds(fleet.say(b"c1", submit(request_id=9))) == [(b"e0", "Submit")]


def test_a_rank_at_its_bound_is_passed_over_even_for_a_full_hit() -> None:
    fleet = Fleet(max_queued_requests=1, alpha=0.0)
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.join_engine(1)
    assert to(b"e0", fleet.say(b"c1", submit(request_id=1)))
    assert to(b"e1", fleet.say(b"c1", submit(request_id=2)))


@pytest.mark.parametrize(
    "change",
    [
        {"client": 2},
        {"prompt": None},
        {"sampling": None},
        {"num_prompt_tokens": 8},
        {"num_prompt_tokens": 2**63 - 1},
        {"num_prompt_tokens": 0, "prompt": b""},
        {"num_resumed_tokens": 10},
        {"block_hashes": b""},
        {"block_hashes": b"x" * 31},
        {"block_hashes": b"x" * 48},
    ],
    ids=str,
)
def test_a_submission_that_contradicts_itself_is_answered_invalid(
    fleet: Fleet, change: dict
) -> None:
    message = msgspec.structs.replace(submit(), **change)
    assert lost(fleet.say(b"c1", message)) == [(1, 0, LostReason.INVALID)]
    assert fleet.loads == {0: 0, 1: 0}
    assert fleet.stats()["refused"] == {"invalid": 1}


def test_a_submission_that_cannot_be_parsed_but_identified_is_answered_invalid(
    fleet: Fleet,
) -> None:
    frames = pack(submit(request_id=5, attempt=2))
    assert lost(fleet.frames(b"c1", frames[:-1])) == [(5, 2, LostReason.INVALID)]
    wrong_type = msgspec.msgpack.encode([Submit.TAG, 1, 6, 0, "nine", 0, 8])
    assert lost(fleet.frames(b"c1", [wrong_type, *frames[1:]])) == [(6, 0, LostReason.INVALID)]
    assert fleet.stats()["garbage"] == 2


def test_a_submission_in_another_clients_name_that_cannot_be_parsed_is_only_counted(
    fleet: Fleet,
) -> None:
    assert fleet.frames(b"c1", pack(submit(client=2))[:-1]) == []
    assert fleet.stats()["garbage"] == 1


# Attempts


def test_the_same_attempt_again_is_ignored(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    assert fleet.say(b"c1", submit()) == []
    assert fleet.loads == {0: 1, 1: 0}
    assert fleet.stats()["duplicates"] == 1


def test_a_higher_attempt_of_a_live_request_takes_its_place(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(attempt=0, hashed=False))
    sent = fleet.say(b"c1", submit(attempt=1, hashed=False))
    assert kinds(sent) == [(b"e0", "Abort"), (b"e1", "Submit")]
    assert to(b"e0", sent) == [Abort(1, 1, 0)]
    assert fleet.loads == {0: 0, 1: 1}
    assert fleet.say(b"c1", submit(attempt=0, hashed=False)) == []
    assert fleet.stats()["resubmissions"] == 1


def test_the_end_of_a_superseded_attempt_frees_nothing(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(attempt=0, hashed=False))
    fleet.say(b"c1", submit(attempt=1, hashed=False))
    fleet.say(b"e0", output((1, 0), reason=FinishReason.ABORT))
    assert fleet.loads == {0: 0, 1: 1}
    fleet.say(b"e1", output((1, 1)))
    assert fleet.loads == {0: 0, 1: 0}
    assert fleet.stats()["stale_finishes"] == 1


def test_an_end_told_twice_or_by_another_engine_frees_nothing_twice(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1, hashed=False))
    fleet.say(b"c1", submit(request_id=2, hashed=False))
    fleet.say(b"e1", output((1, 0)))
    assert fleet.loads == {0: 1, 1: 1}
    fleet.say(b"e0", output((1, 0)))
    fleet.say(b"e0", output((1, 0)))
    assert fleet.loads == {0: 0, 1: 1}
    assert fleet.stats()["stale_finishes"] == 2


def test_an_output_from_a_sender_that_is_no_engine_frees_nothing(fleet: Fleet) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit())
    assert fleet.say(b"c2", output((1, 0))) == []
    assert kinds(fleet.say(b"stranger", output((1, 0)))) == [(b"stranger", "Rejoin")]
    assert fleet.loads == {0: 1, 1: 0}


def test_an_output_for_a_client_that_is_not_there_is_dropped(fleet: Fleet) -> None:
    assert fleet.say(b"e0", output((1, 0), client=9)) == []
    assert fleet.stats()["outputs_dropped"] == 1


def test_an_unreadable_list_of_ends_loses_the_engine_not_the_requests(fleet: Fleet) -> None:
    """Some request ended and nobody can tell which: none may wait for ever."""
    fleet.say(b"c1", submit())
    sent = fleet.say(b"e0", Output(1, 1, 1, b"\xff", b"\x90"))
    assert lost(sent) == [(1, 0, LostReason.RANK_LOST)]
    assert fleet.loads == {1: 0}


# Abort


def test_an_abort_is_forwarded_and_its_end_comes_from_the_engine(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    assert fleet.say(b"c1", Abort(1, 1, 0)) == [(b"e0", Abort(1, 1, 0))]
    assert fleet.loads == {0: 1, 1: 0}
    ended = output((1, 0), reason=FinishReason.ABORT)
    assert fleet.say(b"e0", ended) == [(b"c1", ended)]
    assert fleet.loads == {0: 0, 1: 0}


def test_an_abort_told_twice_reaches_the_engine_once(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    fleet.say(b"c1", Abort(1, 1, 0))
    assert fleet.say(b"c1", Abort(1, 1, 0)) == []


def test_an_abort_of_what_is_not_alive_is_answered_so_that_nobody_waits(fleet: Fleet) -> None:
    assert lost(fleet.say(b"c1", Abort(1, 7, 0))) == [(7, 0, LostReason.INVALID)]
    fleet.say(b"c1", submit())
    assert lost(fleet.say(b"c1", Abort(1, 1, 3))) == [(1, 3, LostReason.INVALID)]


def test_an_abort_of_an_earlier_attempt_is_ignored(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(attempt=2))
    assert fleet.say(b"c1", Abort(1, 1, 1)) == []


def test_an_abort_in_another_clients_name_is_garbage(fleet: Fleet) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit())
    assert fleet.say(b"c2", Abort(1, 1, 0)) == []
    assert fleet.stats()["garbage"] == 1


def test_an_aborting_request_whose_engine_dies_still_ends(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    fleet.say(b"c1", Abort(1, 1, 0))
    assert lost(fleet.fail(b"e0")) == [(1, 0, LostReason.ABORTED)]
    assert fleet.loads == {1: 0}


def test_requests_are_aborted_by_their_outside_name_whichever_client_submitted_them(
    fleet: Fleet,
) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit(external_digest=7))
    fleet.say(b"c1", submit(request_id=2, external_digest=8))
    fleet.say(b"c1", submit(request_id=3))
    fleet.say(b"c2", submit(client=2, request_id=9, external_digest=7))
    sent = fleet.say(b"c2", AbortMatching(5, 7))
    assert to(b"c2", sent) == [AbortMatched(5, 2)]
    aborts = [message for _, message in sent if isinstance(message, Abort)]
    assert sorted((a.client, a.request_id) for a in aborts) == [(1, 1), (2, 9)]
    again = fleet.say(b"c2", AbortMatching(6, 7))
    assert again == [(b"c2", AbortMatched(6, 2))]  # their engines know
    fleet.say(b"e0", output((1, 0)))
    fleet.say(b"e1", output((1, 0)))
    assert to(b"c2", fleet.say(b"c2", AbortMatching(7, 7))) == [AbortMatched(7, 1)]


def test_all_requests_of_the_fleet_are_aborted_at_once(fleet: Fleet) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit(external_digest=7))
    fleet.say(b"c2", submit(client=2, request_id=9))
    sent = fleet.say(b"c2", AbortMatching(5, None))
    assert to(b"c2", sent) == [AbortMatched(5, 2)]
    assert len([message for _, message in sent if isinstance(message, Abort)]) == 2


def test_nothing_to_abort_is_said_to_be_nothing(fleet: Fleet) -> None:
    assert fleet.say(b"c1", AbortMatching(5, 7)) == [(b"c1", AbortMatched(5, 0))]
    assert fleet.say(b"c1", AbortMatching(5, None)) == [(b"c1", AbortMatched(5, 0))]


# Loss


def test_each_client_is_told_of_each_request_of_a_lost_rank(fleet: Fleet) -> None:
    fleet.join_client(2)
    prompt = tokens(1)
    fleet.say(b"c1", submit(1, 1, prompt=prompt))  # e0
    fleet.say(b"c1", submit(1, 2, prompt=prompt))  # e1
    fleet.say(b"c2", submit(2, 1, prompt=prompt))  # e0
    sent = fleet.fail(b"e0")
    assert lost(sent, b"c1") == [(1, 0, LostReason.RANK_LOST)]
    assert lost(sent, b"c2") == [(1, 0, LostReason.RANK_LOST)]
    assert fleet.loads == {1: 1}


def test_a_request_can_be_submitted_again_after_its_rank_was_lost(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    fleet.fail(b"e0")
    again = submit(attempt=1, num_resumed_tokens=2)
    assert kinds(fleet.say(b"c1", again)) == [(b"e1", "Submit")]


def test_a_clients_requests_are_aborted_on_their_engines_when_it_is_gone(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1, hashed=False))
    fleet.say(b"c1", submit(request_id=2, hashed=False))
    assert fleet.fail(b"c1") == [(b"e0", Abort(1, 1, 0)), (b"e1", Abort(1, 2, 0))]
    assert fleet.loads == {0: 0, 1: 0}
    assert fleet.say(b"e0", output((1, 0))) == []


def test_a_client_that_does_not_read_is_cut_off_and_nobody_else_notices(fleet: Fleet) -> None:
    fleet.join_client(2)
    fleet.say(b"c1", submit(1, 1))
    fleet.say(b"c2", submit(2, 1))
    assert fleet.fail(b"c1", Failure.FULL) == [(b"e0", Abort(1, 1, 0))]
    assert fleet.say(b"e1", output((1, 0), client=2)) == [(b"c2", output((1, 0), client=2))]
    assert kinds(fleet.say(b"c1", Heartbeat(0))) == [(b"c1", "Rejoin")]


def test_an_engine_that_does_not_read_is_lost(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    assert lost(fleet.fail(b"e0", Failure.FULL)) == [(1, 0, LostReason.RANK_LOST)]


def test_an_engine_that_says_hello_again_has_lost_its_requests(fleet: Fleet) -> None:
    """What it was given after it spoke it has not dropped: it is told to."""
    fleet.say(b"c1", submit())
    sent = fleet.say(b"e0", engine_hello(100, 0, incarnation=1))
    assert lost(sent) == [(1, 0, LostReason.RANK_LEFT)]
    assert [type(m).__name__ for m in to(b"e0", sent)] == ["Welcome", "Abort"]
    assert fleet.loads == {0: 0, 1: 0}
    fleet.say(b"e0", output((1, 0)))
    assert fleet.loads == {0: 0, 1: 0}


def test_a_client_that_says_hello_again_is_told_that_its_requests_are_over(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    sent = fleet.say(b"c1", client_hello(1, incarnation=1))
    assert to(b"e0", sent) == [Abort(1, 1, 0)]
    assert lost(sent) == [(1, 0, LostReason.RANK_LEFT)]
    assert fleet.loads == {0: 0, 1: 0}


def test_a_rank_that_comes_back_has_no_credit_for_what_it_held(fleet: Fleet) -> None:
    fleet.say(b"c1", submit(request_id=1))
    fleet.say(b"e0", output((1, 0)))
    fleet.fail(b"e0")
    fleet.join_engine(2, rank=0)
    fleet.say(b"c1", submit(request_id=2))
    fleet.say(b"e2", output((2, 0)))
    fleet.say(b"e1", output((2, 0)))
    assert fleet.stats()["predicted_cached_tokens"] == 0


def test_a_fleet_of_one_block_size_takes_hashes_at_its_points_only(fleet: Fleet) -> None:
    prompt = tokens(*range(200))  # 50 blocks: points 1..16, 32, 48, 50
    every_block = b"".join(block_hashes(prompt, 4))
    sent = fleet.say(b"c1", submit(prompt=prompt, block_hashes=every_block))
    assert lost(sent) == [(1, 0, LostReason.INVALID)]
    assert kinds(fleet.say(b"c1", submit(prompt=prompt))) == [(b"e0", "Submit")]
    assert fleet.coordinator.index.num_entries == 19
