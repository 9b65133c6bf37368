"""Requests at the coordinator: which rank gets each, which are refused, which attempt counts."""

from __future__ import annotations

import msgspec
import pytest

from homing.coordinator.events import Forward, Received
from homing.prefix import block_hashes
from homing.wire import Abort, FinishReason, Goodbye, Lost, LostReason, Output, Submit, pack
from tests.support.coordinator_fleet import (
    Fleet,
    joined_fleet,
    kinds,
    lost,
    output,
    submit,
    to,
    tokens,
)


@pytest.fixture
def fleet() -> Fleet:
    """One client, two engines."""
    return joined_fleet()


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


def test_a_prompt_that_is_lent_is_routed_as_if_it_had_been_sent(fleet: Fleet) -> None:
    lent = msgspec.structs.replace(submit(request_id=1), prompt=None, lent_at=(7, 8, 9))
    [(peer, forwarded)] = fleet.say(b"c1", lent)
    assert (peer, forwarded) == (b"e0", msgspec.structs.replace(lent, block_hashes=None))
    fleet.say(b"e0", output((1, 0)))
    assert to(b"e0", fleet.say(b"c1", submit(request_id=2)))


def test_a_prompt_that_its_rank_could_not_see_is_no_answer_of_that_rank(fleet: Fleet) -> None:
    fleet.say(b"c1", submit())
    fleet.say(b"e0", output((1, 0), reason=FinishReason.UNREAD))
    assert fleet.loads == {0: 0, 1: 0}
    assert fleet.stats()["finished"] == {"unread": 1}
    assert fleet.stats()["generated_tokens"] == 0


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


def test_a_fleet_of_one_block_size_takes_hashes_at_its_points_only(fleet: Fleet) -> None:
    prompt = tokens(*range(200))  # 50 blocks: points 1..16, 32, 48, 50
    every_block = b"".join(block_hashes(prompt, 4))
    sent = fleet.say(b"c1", submit(prompt=prompt, block_hashes=every_block))
    assert lost(sent) == [(1, 0, LostReason.INVALID)]
    assert kinds(fleet.say(b"c1", submit(prompt=prompt))) == [(b"e0", "Submit")]
    assert fleet.coordinator.index.num_entries == 19


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
        {"lent_at": (7, 8, 9)},
        {"prompt": None, "lent_at": (7, 8, 9), "num_prompt_tokens": 0, "block_hashes": None},
        {
            "prompt": None,
            "lent_at": (7, 8, 9),
            "num_prompt_tokens": 2**63 - 1,
            "block_hashes": None,
        },
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


def test_what_can_never_be_served_is_told_so_though_there_is_no_rank(fleet: Fleet) -> None:
    """Not to come again later."""
    for engine in (b"e0", b"e1"):
        fleet.say(engine, Goodbye())
    wrong = submit(block_hashes=b"x" * 31)
    assert lost(fleet.say(b"c1", wrong)) == [(1, 0, LostReason.INVALID)]
    assert lost(fleet.say(b"c1", submit())) == [(1, 0, LostReason.NO_RANK)]


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
