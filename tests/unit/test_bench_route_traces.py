"""Traces are read as they are meant, and generated ones have the shape they promise."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from homing.bench.replay.generated import GENERATED
from homing.bench.replay.traces import BUNDLED, load_bundled, load_trace
from homing.bench.replay.workload import Turn, Workload, reusable_share, routing_digests
from homing.coordinator.prefix_index import split_digests
from homing.errors import ConfigError
from homing.prefix import routing_points


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns_of(workload: Workload) -> list[Turn]:
    return [turn for session in workload.sessions for turn in session.turns]


@pytest.mark.parametrize(("name", "share"), [("conversation", 0.373), ("synthetic", 0.650)])
def test_the_mooncake_traces_can_reuse_what_is_known_of_them(name: str, share: float) -> None:
    assert reusable_share(load_bundled(name)) == pytest.approx(share, abs=0.001)


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_request_fits_a_rank(name: str) -> None:
    workload = load_bundled(name)
    assert all(
        turn.num_prompt_tokens + turn.num_output_tokens <= workload.kv_tokens
        for turn in turns_of(workload)
    )


def test_mooncake_rows_are_sent_at_their_time_and_keep_full_blocks_only(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [7, 3]},
    ]
    workload = load_trace(write(tmp_path / "t.jsonl", rows), "t")
    assert workload.block_tokens == 512
    assert [session.start_s for session in workload.sessions] == [0.0, 1.5]
    first, second = turns_of(workload)
    assert (len(first.block_ids), len(second.block_ids)) == (2, 2)
    assert first.block_ids[0] == second.block_ids[0]
    assert first.block_ids[1] != second.block_ids[1]


def test_equal_block_ids_after_different_prefixes_are_different_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 5]},
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [2, 5]},
    ]
    first, second = turns_of(load_trace(write(tmp_path / "t.jsonl", rows), "t"))
    assert not set(first.block_ids) & set(second.block_ids)


def test_bailian_rows_know_the_answer_that_the_next_request_repeats(tmp_path: Path) -> None:
    common = {"type": "text", "turn": 1}
    rows = [
        {"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 32}
        | {"output_length": 20, "hash_ids": [1, 2]}
        | common,
        {"chat_id": 6, "parent_chat_id": 5, "timestamp": 61.5, "input_length": 70}
        | {"output_length": 9, "hash_ids": [1, 2, 3, 4, 5]}
        | common,
    ]
    workload = load_trace(write(tmp_path / "t.jsonl", rows), "t")
    assert workload.block_tokens == 16
    assert [session.start_s for session in workload.sessions] == [0.0, 0.5]
    first, second = turns_of(workload)
    assert len(second.block_ids) == 4
    # 32 + 20 tokens fill three blocks.
    assert list(first.answer_ids) == list(second.block_ids[2:3])


def test_session_rows_are_closed_loop_turns_with_pauses(tmp_path: Path) -> None:
    rows = [
        {"session": 4, "turn": 1, "start_ms": None, "think_ms": 0, "input_length": 200}
        | {"output_length": 3, "hash_ids": [1, 2, 3], "block": 64},
        {"session": 4, "turn": 0, "start_ms": 2500, "think_ms": 750, "input_length": 100}
        | {"output_length": 40, "hash_ids": [1], "block": 64},
    ]
    [session] = load_trace(write(tmp_path / "t.jsonl", rows), "t").sessions
    first, second = session.turns
    assert session.start_s == 2.5
    assert (first.num_prompt_tokens, first.think_s) == (100, 0.75)
    assert list(first.answer_ids) == list(second.block_ids[1:2])


def test_a_gzipped_trace_is_read_alike(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    plain = write(tmp_path / "t.jsonl", [row])
    assert load_trace(path, "t") == load_trace(plain, "t")


@pytest.mark.parametrize(
    "content", ["", "not json\n", '{"a": 1}\n', "[1]\n", '{"hash_ids": [1]}\n', "\x00\n"]
)
def test_what_is_no_trace_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"trace .*odd\.jsonl"):
        load_trace(path, "odd")


# Digests for the router


def test_digests_agree_as_far_as_the_prompts_do_and_no_farther() -> None:
    """Of 512-token blocks of which the first is common: 32 of the router's blocks."""
    one, other = Turn(1200, 1, [1, 2]), Turn(1100, 1, [1, 3])
    a = split_digests(routing_digests(one, 512, 16, own_id=7))
    b = split_digests(routing_digests(other, 512, 16, own_id=8))
    points = routing_points(1200 // 16)
    assert len(a) == len(points)
    agreed = [x == y for x, y in zip(a, b, strict=False)]
    assert agreed == [depth <= 32 for depth in points[: len(agreed)]]


def test_the_rest_of_a_prompt_after_its_last_full_block_is_its_own() -> None:
    one = split_digests(routing_digests(Turn(600, 1, [1]), 512, 16, own_id=7))
    other = split_digests(routing_digests(Turn(600, 1, [1]), 512, 16, own_id=8))
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1], "the last point lies in the rest"
    assert len(set(one)) == len(one)


# Generated


@pytest.mark.parametrize("name", GENERATED)
def test_generated_workloads_repeat_by_seed_and_grow_with_the_fleet(name: str) -> None:
    small = GENERATED[name](2, 5)
    assert small == GENERATED[name](2, 5)
    assert small != GENERATED[name](2, 6)
    assert len(GENERATED[name](4, 5).sessions) == 2 * len(small.sessions)
    starts = [session.start_s for session in small.sessions]
    assert starts == sorted(starts)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_turns_go_on_where_the_last_one_ended(name: str) -> None:
    workload = GENERATED[name](1, 3)
    for session in workload.sessions:
        for turn in session.turns:
            assert len(turn.block_ids) * workload.block_tokens <= turn.num_prompt_tokens
        for turn, after in zip(session.turns, session.turns[1:], strict=False):
            known = [*turn.block_ids, *turn.answer_ids]
            assert list(after.block_ids[: len(known)]) == known
            assert after.num_prompt_tokens > turn.num_prompt_tokens + turn.num_output_tokens


def test_rollouts_come_in_groups_of_eight_that_share_a_prompt_and_start_together() -> None:
    workload = GENERATED["rollout"](2, 3)
    assert {session.start_s for session in workload.sessions} == {0.0}
    prompts = [tuple(session.turns[0].block_ids) for session in workload.sessions]
    assert {prompts.count(prompt) for prompt in prompts} == {8}
