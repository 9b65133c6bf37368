"""Reads request traces: JSON lines, gzipped or not, in one of four formats told by their fields.

    Mooncake   timestamp (ms), input_length, output_length, hash_ids of 512 tokens
               open loop: each request is sent at its time
    Bailian    chat_id, parent_chat_id, timestamp (s), input_length, output_length, hash_ids of
               16 tokens; open loop
    sessions   session, turn, start_ms, think_ms, input_length, output_length, hash_ids, block
               closed loop: a turn is sent `think_ms` after the answer to the one before
    recordings what a coordinator did that ran with --record: its requests, open loop

Only ids of full blocks are used; the last one of a Mooncake or Bailian prompt may be partial.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import as_file, files
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from homing.bench.replay.workload import (
    PrefixTree,
    Session,
    Turn,
    Workload,
    with_answer,
    with_answers,
)
from homing.coordinator import recording
from homing.coordinator.prefix_index import split_digests
from homing.errors import ConfigError
from homing.prefix import routing_points

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

KV_TOKENS = 500_000
"""A rank's KV cache in accelerator memory."""
TIERED_KV_TOKENS = 1_500_000
"""The same with host memory behind it, which the long contexts of the Mooncake traces need."""

Row = dict[str, Any]

BUNDLED = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "chat-sessions": "sim_chat_sessions.jsonl.gz",
    "rl-groups": "sim_rl_groups.jsonl.gz",
}
"""Traces that lie in the package, by name."""


@cache
def load_bundled(name: str) -> Workload:
    with as_file(files("homing.bench.replay") / "data" / BUNDLED[name]) as path:
        return load_trace(path, name)


def load_trace(path: Path, name: str) -> Workload:
    """Raises `ConfigError` when the file cannot be read as a trace."""
    try:
        rows = [json.loads(line) for line in lines_of(path) if line.strip()]
        return _read(rows, name)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"trace {path}: {type(error).__name__}: {error}") from error


def is_recording(path: Path) -> bool:
    """Whether a trace is what a coordinator wrote with --record."""
    return recording.MARK in next(iter(lines_of(path)), "")


def lines_of(path: Path) -> Iterator[str]:
    """Raises `ConfigError` when the file cannot be read."""
    try:
        with path.open("rb") as file:
            is_gzipped = file.read(2) == b"\x1f\x8b"
        opener = gzip.open if is_gzipped else open
        with opener(path, "rt", encoding="utf-8") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from error


def _read(rows: Sequence[Row], name: str) -> Workload:
    first = rows[0]
    if recording.MARK in first:
        return _read_recording(first, rows[1:], name)
    if "session" in first:
        return _read_sessions(rows, name)
    if "chat_id" in first:
        return _read_bailian(rows, name)
    if "hash_ids" in first:
        return _read_mooncake(rows, name)
    raise ValueError(f"fields {', '.join(first)} are of no known format")


def _read_mooncake(rows: Sequence[Row], name: str) -> Workload:
    tree = PrefixTree()
    sessions = [
        Session(row["timestamp"] / 1e3, [_turn(row, MOONCAKE_BLOCK_TOKENS, tree)]) for row in rows
    ]
    return Workload(name, MOONCAKE_BLOCK_TOKENS, TIERED_KV_TOKENS, sessions)


def _read_bailian(rows: Sequence[Row], name: str) -> Workload:
    """A chat's next request repeats the answer to the one before, which names its parent."""
    tree, block_tokens = PrefixTree(), BAILIAN_BLOCK_TOKENS
    turn_of_chat = {row["chat_id"]: _turn(row, block_tokens, tree) for row in rows}
    for row in rows:
        parent = row["parent_chat_id"]
        if parent in turn_of_chat:
            after = turn_of_chat[row["chat_id"]]
            turn_of_chat[parent] = with_answer(turn_of_chat[parent], after, block_tokens)
    sessions = [Session(float(row["timestamp"]), [turn_of_chat[row["chat_id"]]]) for row in rows]
    start_s = min(session.start_s for session in sessions)
    sessions = [Session(session.start_s - start_s, session.turns) for session in sessions]
    return Workload(name, block_tokens, KV_TOKENS, sorted(sessions, key=lambda s: s.start_s))


def _read_sessions(rows: Sequence[Row], name: str) -> Workload:
    tree, block_tokens = PrefixTree(), int(rows[0]["block"])
    sessions: list[Session] = []
    ordered = sorted(rows, key=lambda row: (row["session"], row["turn"]))
    for _, group in groupby(ordered, key=lambda row: row["session"]):
        turns_of_session = list(group)
        turns = [_turn(row, block_tokens, tree) for row in turns_of_session]
        start_s = turns_of_session[0]["start_ms"] / 1e3
        sessions.append(Session(start_s, with_answers(turns, block_tokens)))
    sessions.sort(key=lambda session: session.start_s)
    return Workload(name, block_tokens, KV_TOKENS, sessions)


def _read_recording(setup: Row, entries: Sequence[Any], name: str) -> Workload:
    """Between two routing points nothing is known of a prompt but that it leads to the second:
    prompts that part there have no block in common after the first."""
    tree, block_tokens = PrefixTree(), BAILIAN_BLOCK_TOKENS
    generated: dict[int, int | None] = {e[1]: e[2] for e in entries if e[0] == "end"}
    sessions: list[Session] = []
    for kind, *entry in entries:
        if kind != "route":
            continue
        hashes, num_tokens, block_tokens, now, (number, *_) = entry
        digests = split_digests(bytes.fromhex(hashes or ""))
        depths = (0, *routing_points(num_tokens // block_tokens))
        blocks = [
            digest
            for digest, (before, depth) in zip(digests, pairwise(depths), strict=False)
            for _ in range(depth - before)
        ]
        turn = Turn(num_tokens, generated.get(number) or 1, list(tree.path(blocks)))
        sessions.append(Session(now - setup["now"], [turn]))
    return Workload(name, block_tokens, KV_TOKENS, sessions)


def _turn(row: Row, block_tokens: int, tree: PrefixTree) -> Turn:
    num_tokens = int(row["input_length"])
    ids = row["hash_ids"][: num_tokens // block_tokens]
    think_s = row.get("think_ms", 0) / 1e3
    return Turn(num_tokens, int(row["output_length"]), list(tree.path(ids)), think_s=think_s)
