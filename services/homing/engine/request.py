"""One request's tokens and phase.

    0             num_cached          num_computed          num_tokens            max_tokens
    |--- from the cache ---|--- computed here ---|--- to compute ---|--- to generate ---|
    |------- prompt -------|------------- generated so far ---------|
    0                  num_prompt

`[0, num_computed)` have their keys and values in the request's blocks. `num_prompt` is independent
of the other marks: a preempted request computes generated tokens again, and tokens that an earlier
attempt generated arrive as the end of the submitted prompt, yet count as generated in everything
that follows (stopping, penalties, limits, noise), so that the request goes on as if nothing had
happened.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from homing.engine.bad_words import BadWords
from homing.engine.kv_offload import SavedKV
from homing.engine.log_probs import PromptScores
from homing.engine.stop_words import StopWords
from homing.engine.structured.grammar import GrammarState
from homing.params import SamplingParams
from homing.prefix import BlockHash, extend_hashes, prefix_salt

RequestKey = Hashable
"""What names a request for whoever submitted it."""

MIN_TEMPERATURE = 1e-5
"""Below it a request is greedy: dividing by it would overflow, and no other token has a chance."""


class Phase(Enum):
    WAITING = "waiting"  # holds no blocks: it is new, or was preempted
    PREFILL = "prefill"  # holds blocks, and has chosen no token since
    DECODE = "decode"  # holds blocks; all but the token that it chose last is computed
    FINISHED = "finished"  # holds no blocks, and never will


class Change(Enum):
    ADMIT = "admit"
    SAMPLE = "sample"
    PREEMPT = "preempt"
    FINISH = "finish"


_PHASE_AFTER = {
    (Phase.WAITING, Change.ADMIT): Phase.PREFILL,
    (Phase.PREFILL, Change.SAMPLE): Phase.DECODE,
    (Phase.PREFILL, Change.PREEMPT): Phase.WAITING,
    (Phase.DECODE, Change.PREEMPT): Phase.WAITING,
    (Phase.WAITING, Change.FINISH): Phase.FINISHED,
    (Phase.PREFILL, Change.FINISH): Phase.FINISHED,
    (Phase.DECODE, Change.FINISH): Phase.FINISHED,
}


class Request:
    """Mutable, and owned by one engine: its scheduler moves the marks, itself appends tokens."""

    has_answered = False
    phase = Phase.WAITING
    num_cached = 0
    num_computed = 0
    num_blocks = 0
    num_shared_tokens = 0
    """`[0, num_shared_tokens)` lie in blocks found in the cache, which are never written."""
    num_registered = 0  # how many of its first blocks are in the prefix index
    num_cached_at_start: int | None = None  # None until first admitted
    saved_kv: SavedKV | None = None  # what it had computed when it was preempted
    grammar: GrammarState | None = None  # of its structured output, once that is compiled
    queued_at: float | None = None  # when it was added, until a step has a part of it

    # The scheduler's notes.
    arrival = 0  # lower is older
    owner_seen: tuple[int, int] | None = None  # whom it waited for, and how far that was
    num_passes = 0  # how often a younger one was admitted while this did not fit

    def __init__(
        self,
        key: RequestKey,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        block_size: int,
        max_new_tokens: int,
        num_resumed: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        epoch: int = 0,
        shares_prefix: bool = True,
        stop_token_ids: frozenset[int] = frozenset(),
        stop_words: StopWords | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        """
        prompt: all tokens known, those of an earlier attempt included.
        seed: decides the noise, together with a token's position.
        max_new_tokens: in this attempt; the caller has checked that they fit the context.
        num_resumed: how many of the last tokens of `prompt` an earlier attempt generated.
        priority: lower is sooner.
        cache_salt, epoch: keep the prefixes of other tenants and of other weights apart.
        shares_prefix: by the prefix cache, in which its blocks are found and entered.
        stop_token_ids: the model's own included, unless ignored.
        """
        self.key = key
        self.sampling = sampling
        self.seed = seed
        self.greedy = sampling.greedy or sampling.temperature < MIN_TEMPERATURE
        self.has_penalties = _has_penalties(sampling)
        self.num_tokens = len(prompt)
        self.num_submitted = len(prompt)
        self.num_prompt = len(prompt) - num_resumed
        self.max_tokens = len(prompt) + max_new_tokens
        self.generates = max_new_tokens > 0  # if not, it is there to score its prompt
        self.stop_token_ids = stop_token_ids
        self.stop_words = stop_words
        self.bad_words = bad_words
        self.prompt_scores = PromptScores(self.num_prompt, sampling.top_n_logprobs)
        self.priority = priority

        self._tokens = np.empty(self.max_tokens, np.int32)
        self._tokens[: self.num_tokens] = prompt
        self._block_size = block_size
        self._cache_salt = cache_salt
        self._salt = prefix_salt(epoch=epoch, cache_salt=cache_salt)
        self.block_table = np.zeros(-(-self.max_tokens // block_size), np.int32)
        self.shares_prefix = shares_prefix
        self.registers_blocks = shares_prefix
        self.hashes: list[BlockHash] = []
        self.extend_hashes()

    def change(self, change: Change) -> None:
        self.phase = _PHASE_AFTER[self.phase, change]

    # Tokens

    @property
    def tokens(self) -> NDArray[np.int32]:
        """A view of prompt and answer."""
        return self._tokens[: self.num_tokens]

    @property
    def generated(self) -> NDArray[np.int32]:
        """A view of the answer, earlier attempts included."""
        return self._tokens[self.num_prompt : self.num_tokens]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_generated_here(self) -> int:
        """In this attempt."""
        return self.num_tokens - self.num_submitted

    @property
    def num_owed(self) -> int:
        """Tokens known, yet to be computed."""
        return self.num_tokens - self.num_computed

    @property
    def is_ready(self) -> bool:
        """It can be scheduled: the grammar that its answer must fit, if any, is compiled."""
        return self.sampling.structured_output is None or self.grammar is not None

    @property
    def bars_stop_ids(self) -> bool:
        """Too little is generated to end at a token id."""
        return self.num_generated < self.sampling.min_tokens

    def append(self, token: int) -> None:
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    # Scoring of the prompt

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of prompt tokens are wanted, and some are yet to be computed."""
        return self.sampling.wants_prompt_log_probs and not self.prompt_scores.complete

    @property
    def max_cached(self) -> int:
        """How many tokens may be taken from the cache: their logits are not needed.

        The last token's always are, and those of all prompt tokens that are yet to be scored.
        """
        last = self.num_tokens - 1
        return min(last, self.prompt_scores.num_scored) if self.scores_prompt else last

    # Blocks

    @property
    def blocks(self) -> NDArray[np.int32]:
        """A view of the ids of the blocks held, in order of position."""
        return self.block_table[: self.num_blocks]

    def hold(self, block_ids: list[int]) -> None:
        """Take further blocks, for the positions that follow."""
        end = self.num_blocks + len(block_ids)
        self.block_table[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def drop_blocks(self) -> list[int]:
        """Forget all blocks and what was computed in them; returns the ids held until now."""
        blocks = self.blocks.tolist()
        self.num_blocks = self.num_cached = self.num_computed = 0
        self.num_shared_tokens = self.num_registered = 0
        return blocks

    def begin_epoch(self, epoch: int) -> None:
        """Blocks that are computed from now on have other names. Those that it holds, from before,
        keep none."""
        self._salt = prefix_salt(epoch=epoch, cache_salt=self._cache_salt)
        self.hashes = []
        if self.phase is Phase.WAITING:
            self.extend_hashes()

    def extend_hashes(self) -> None:
        """Hash the full blocks of tokens that have no hash yet."""
        if self.shares_prefix and self.num_tokens // self._block_size > len(self.hashes):
            known = self.tokens.view(np.uint8).data
            self.hashes += extend_hashes(self.hashes, known, self._block_size, self._salt)


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.logit_bias)
        or bool(sampling.bad_words)
        or sampling.allowed_token_ids is not None
    )
