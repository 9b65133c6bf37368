"""What is replayed: sessions of turns, each turn a prompt as a chain of KV blocks.

A prompt's blocks have ids that name the whole prefix up to them: equal ids, equal prompt so far.
The block is the trace's own (512 tokens in one format, 16 in another), whatever the router's is.
What fills no block of the trace is nobody else's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from struct import Struct

from homing.prefix import routing_points

_DIGEST = Struct("<QQ")  # as many bytes as the digest of a real block
_ID_BITS = 40
"""Ids of a trace fit in these; above them is the number of the copy, and 1 for nobody else's."""
_OWN = 1 << 63


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Sequence[int]
    """Of the prompt's full blocks."""
    answer_ids: Sequence[int] = ()
    """Of the blocks that its answer fills, as far as the next turn repeats and so tells them."""
    think_s: float = 0.0
    """Pause after its answer before the next turn."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, each sent when the one before has been answered."""

    start_s: float
    turns: Sequence[Turn]


@dataclass(frozen=True)
class Workload:
    name: str
    block_tokens: int
    """Tokens of a block of the trace; a multiple of what the router's blocks hold."""
    kv_tokens: int
    """Tokens that a rank's KV cache holds."""
    sessions: Sequence[Session]
    time_scale: float = 1.0
    """Seconds of the trace that pass in a second of the replay."""

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def compressed(self, factor: float) -> Workload:
        """Sessions start `factor` times as fast. Think times stay as they are."""
        sessions = [replace(s, start_s=s.start_s / factor) for s in self.sessions]
        return replace(self, sessions=sessions, time_scale=self.time_scale * factor)

    def copied(self, copies: int, shift_s: float) -> Workload:
        """As many such services side by side that share no prefix, each `shift_s` after another."""
        if copies == 1:
            return self
        sessions = (
            _copy(session, copy, copy * shift_s)
            for copy in range(copies)
            for session in self.sessions
        )
        return replace(self, sessions=sorted(sessions, key=lambda session: session.start_s))

    def first(self, num_sessions: int | None) -> Workload:
        return replace(self, sessions=self.sessions[:num_sessions])


def _copy(session: Session, copy: int, shift_s: float) -> Session:
    offset = copy << _ID_BITS
    turns = [
        replace(
            turn,
            block_ids=[block + offset for block in turn.block_ids],
            answer_ids=[block + offset for block in turn.answer_ids],
        )
        for turn in session.turns
    ]
    return Session(session.start_s + shift_s, turns)


def with_answers(turns: Sequence[Turn], block_tokens: int) -> list[Turn]:
    """Turns of one session, each with the blocks of its answer as the next turn's prompt has it."""
    followed = [with_answer(turn, after, block_tokens) for turn, after in pairwise(turns)]
    return [*followed, turns[-1]]


def with_answer(turn: Turn, after: Turn, block_tokens: int) -> Turn:
    """The blocks that the answer fills, if `after` goes on where `turn` ended."""
    num_blocks = len(turn.block_ids)
    if list(after.block_ids[:num_blocks]) != list(turn.block_ids):
        return turn
    num_filled = (turn.num_prompt_tokens + turn.num_output_tokens) // block_tokens
    return replace(turn, answer_ids=after.block_ids[num_blocks:num_filled])


def reusable_share(workload: Workload) -> float:
    """Of all prompt tokens, those that an endless cache would have held, by trace order."""
    seen: set[int] = set()
    reused = total = 0
    for turn in chain.from_iterable(session.turns for session in workload.sessions):
        total += turn.num_prompt_tokens
        for block in turn.block_ids:
            if block not in seen:
                break
            reused += workload.block_tokens
        seen.update(turn.block_ids)
    return reused / total if total else 0.0


def routing_digests(turn: Turn, block_tokens: int, router_block_tokens: int, own_id: int) -> bytes:
    """Stand-ins for the joined digests a client would send: equal where the hashes would be.

    A trace block is parted into the router's blocks. Of the prompt's rest, after its last full
    trace block, the digests are the request's own.
    """
    num_blocks = turn.num_prompt_tokens // router_block_tokens
    places, rest = _places(num_blocks, len(turn.block_ids), block_tokens // router_block_tokens)
    ids, pack = turn.block_ids, _DIGEST.pack
    digests = [pack(ids[block], depth) for block, depth in places]
    return b"".join(digests + [pack(own_id | _OWN, depth) for depth in rest])


@lru_cache(maxsize=4096)
def _places(
    num_blocks: int, num_trace_blocks: int, parts: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """For each routing point: the trace block it ends in and its depth; and the depths beyond."""
    points = routing_points(num_blocks)
    inside = tuple(
        ((depth - 1) // parts, depth) for depth in points if depth <= num_trace_blocks * parts
    )
    return inside, points[len(inside) :]


class PrefixTree:
    """Names prefixes: chains the names of a trace, whether of a block or of a whole prefix."""

    def __init__(self) -> None:
        self._node_of_edge: dict[tuple[int, Hashable], int] = {}

    def path(self, block_ids: Iterable[Hashable]) -> Iterator[int]:
        node = 0
        for block in block_ids:
            node = self._node_of_edge.setdefault((node, block), len(self._node_of_edge) + 1)
            yield node
