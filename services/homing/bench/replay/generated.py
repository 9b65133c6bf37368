"""Workloads made to a pattern, for any number of ranks: so many sessions for each.

    shared-prefix   one long system prompt carries most of the traffic; single turns, open loop
    multi-turn      chats under a few system prompts; closed loop
    rollout         groups of samples of one prompt, with tool turns, all sent at once; closed loop
    documents       short chats beside long documents that are asked about repeatedly; closed loop

Lengths are log-normal, pauses exponential. A seed gives the same workload everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import count

from homing.bench.replay.traces import KV_TOKENS
from homing.bench.replay.workload import Session, Turn, Workload, with_answers

BLOCK_TOKENS = 64


class Writer:
    """Makes prompts: token counts, and block ids that no other prompt has."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = count(1)

    def length(self, mean: float, spread: float = 0.6) -> int:
        """Log-normal with this mean; `spread` is the deviation of its logarithm."""
        return max(1, round(self.random.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    def blocks(self, num_tokens: int, prefix: list[int]) -> list[int]:
        """The block ids of a prompt of `num_tokens` that begins with the blocks of `prefix`."""
        num_blocks = num_tokens // BLOCK_TOKENS
        return [*prefix, *(next(self._ids) for _ in range(num_blocks - len(prefix)))]

    def system_prompts(self, lengths: list[int]) -> list[list[int]]:
        return [self.blocks(length, []) for length in lengths]

    def turn(
        self, prefix: list[int], num_prompt_tokens: int, mean_output: float, think_s: float = 0.0
    ) -> Turn:
        num_prompt_tokens = max(num_prompt_tokens, len(prefix) * BLOCK_TOKENS + 1)
        blocks = self.blocks(num_prompt_tokens, prefix)
        return Turn(num_prompt_tokens, self.length(mean_output), blocks, think_s=think_s)

    def conversation(
        self,
        prefix: list[int],
        num_turns: int,
        *,
        mean_input: float,
        mean_output: float,
        mean_think_s: float,
        first_tokens: int | None = None,
    ) -> list[Turn]:
        """Turns of which each repeats all before it, and adds an input."""
        turns: list[Turn] = []
        num_tokens = len(prefix) * BLOCK_TOKENS
        for number in range(num_turns):
            fixed = first_tokens if number == 0 else None
            num_tokens += fixed or self.length(mean_input)
            think_s = self.random.expovariate(1.0 / mean_think_s)
            turn = self.turn(prefix, num_tokens, mean_output, think_s)
            turns.append(turn)
            num_tokens = turn.num_prompt_tokens + turn.num_output_tokens
            prefix = list(turn.block_ids)
        return with_answers(turns, BLOCK_TOKENS)


def _workload(name: str, sessions: list[Session]) -> Workload:
    return Workload(name, BLOCK_TOKENS, KV_TOKENS, sorted(sessions, key=lambda s: s.start_s))


def shared_prefix(num_ranks: int, seed: int) -> Workload:
    """Four of five requests under one system prompt of 8,192 tokens, the rest under 32 others."""
    writer = Writer(seed)
    hot, *others = writer.system_prompts([8192] + [2048] * 32)
    now, sessions = 0.0, list[Session]()
    for _ in range(200 * num_ranks):
        now += writer.random.expovariate(5.5 * num_ranks)
        prefix = hot if writer.random.random() < 0.8 else writer.random.choice(others)
        num_tokens = len(prefix) * BLOCK_TOKENS + writer.length(256)
        sessions.append(Session(now, [writer.turn(prefix, num_tokens, 192)]))
    return _workload("shared-prefix", sessions)


def multi_turn(num_ranks: int, seed: int) -> Workload:
    """60 chats a rank under 16 system prompts, the n-th of which is 1/n as popular."""
    writer = Writer(seed)
    prompts = writer.system_prompts([writer.length(1500) for _ in range(16)])
    popularity = [1.0 / (1 + n) for n in range(16)]
    sessions: list[Session] = []
    for _ in range(60 * num_ranks):
        prefix = writer.random.choices(prompts, popularity)[0]
        num_turns = 1 + min(15, int(writer.random.expovariate(1 / 4)))
        turns = writer.conversation(
            prefix, num_turns, mean_input=400, mean_output=230, mean_think_s=4.0
        )
        sessions.append(Session(writer.random.uniform(0, 60), turns))
    return _workload("multi-turn", sessions)


def rollout(num_ranks: int, seed: int) -> Workload:
    """6 groups of 8 samples a rank: one system prompt, one task a group, up to 16 tool turns."""
    writer = Writer(seed)
    (system,) = writer.system_prompts([1536])
    sessions: list[Session] = []
    for _ in range(6 * num_ranks):
        task = writer.blocks(len(system) * BLOCK_TOKENS + writer.length(1024), system)
        for _ in range(8):
            num_turns = 1 + min(15, int(writer.random.expovariate(1 / 4)))
            turns = writer.conversation(
                task, num_turns, mean_input=300, mean_output=450, mean_think_s=2.0, first_tokens=1
            )
            sessions.append(Session(0.0, turns))
    return _workload("rollout", sessions)


def documents(num_ranks: int, seed: int) -> Workload:
    """40 short chats a rank beside 4 documents of 8,192 to 32,768 tokens, each asked 6 times."""
    writer = Writer(seed)
    (system,) = writer.system_prompts([512])
    sessions: list[Session] = []
    for _ in range(40 * num_ranks):
        turns = writer.conversation(system, 3, mean_input=200, mean_output=200, mean_think_s=5.0)
        sessions.append(Session(writer.random.uniform(0, 60), turns))
    for _ in range(4 * num_ranks):
        document = writer.blocks(writer.random.randrange(8192, 32769), [])
        start_s = writer.random.uniform(0, 50)
        for _ in range(6):
            num_tokens = len(document) * BLOCK_TOKENS + writer.length(64)
            turn = writer.turn(document, num_tokens, 150)
            sessions.append(Session(start_s, [turn]))
            start_s += writer.random.expovariate(1 / 5)
    return _workload("documents", sessions)


GENERATED: dict[str, Callable[[int, int], Workload]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "rollout": rollout,
    "documents": documents,
}
"""name -> (number of ranks, seed) -> workload"""
