"""A compiled grammar; where one answer is in it, and which tokens may follow."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

MAX_MASK_S = 0.05
"""CPU time for one mask: the engine's loop waits for it, and every request with it. Ordinary
schemas take 0.05 ms on average and 0.6 ms at the 99th percentile (vocabulary of 49,152)."""


class CompiledGrammar:
    """What all answers to one definition share: the library's automaton, which grows with use."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        """Owns `matcher`, which is at its beginning."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self.is_spent = False
        """An answer hit a limit. If it is that of the automaton's size, all others will too: the
        definition is better compiled anew."""

    def start(self, generated: Sequence[int] = ()) -> GrammarState:
        """The state of an answer that begins with these tokens."""
        state = GrammarState(self, self._matcher.deep_copy(), self._eos_token_ids)
        for token in generated:
            state.accept(token)
        return state


class GrammarState:
    """Depends on the accepted tokens alone: replaying them gives an equal state."""

    def __init__(
        self, grammar: CompiledGrammar, matcher: LLMatcher, eos_token_ids: Sequence[int]
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self.finished = False
        """The answer is complete, its end-of-sequence id included."""
        self.error: str | None = None
        """Why the answer cannot go on."""

    def fill_mask(self, mask: NDArray[np.uint32]) -> None:
        """Set bit `token % 32` of word `token // 32` of `mask` [ceil(vocab / 32)] for each token
        that may follow, and clear the others. After an error: for the end-of-sequence ids."""
        start = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif time.thread_time() - start > MAX_MASK_S:
            self._fail(f"it takes more than {MAX_MASK_S * 1000:g} ms for one token")

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        if not self._matcher.consume_token(token):
            self._fail(self._matcher.get_error())
        self.finished = token in self._eos_token_ids

    def _fail(self, reason: str) -> None:
        self.error = self.error or _readable(reason)
        self._grammar.is_spent = True


def _readable(reason: str) -> str:
    """The library's message, without the state that it prints below it."""
    text = reason.partition("\n<")[0]
    return "no text fits it" if text == "NoExtensionBias" else text
