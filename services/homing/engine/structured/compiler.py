"""Compiles definitions off the engine's loop, each once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from homing.engine.structured.grammar import CompiledGrammar
from homing.engine.structured.screening import LIMITS, Screening
from homing.engine.structured.vocabulary import model_vocabulary
from homing.errors import InvalidRequest
from homing.params import StructuredOutput
from homing.params.structured import invalid
from homing.tokenizer import Tokenizer

MAX_CACHED = 64
"""Definitions whose outcome is kept, errors among them. An ordinary one takes well under 1 MB; the
limit on its automaton makes 40 MB the most."""


class GrammarCompiler:
    """One worker thread, started by the first definition: who asks for none pays for none.

    `compile` and `close` are for one thread; the futures are done by another.
    """

    def __init__(self, tokenizer_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._cache: OrderedDict[StructuredOutput, Future[CompiledGrammar]] = OrderedDict()
        self._screening = Screening()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    def compile(self, definition: StructuredOutput) -> Future[CompiledGrammar]:
        """Least recently used outcomes are forgotten. The future's error is InvalidRequest for a
        definition that cannot be honoured."""
        future = self._cache.get(definition)
        if future is None or _is_stale(future):
            future = self._cache[definition] = self._worker.submit(self._compile, definition)
        self._cache.move_to_end(definition)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return future

    def close(self) -> None:
        """End the worker and its process; what is being compiled fails."""
        self._screening.kill()
        self._worker.shutdown(cancel_futures=True)
        self._screening.close()

    # On the worker's thread

    def _compile(self, definition: StructuredOutput) -> CompiledGrammar:
        if not self._eos_token_ids:
            raise invalid("the model has no end-of-sequence id, so no answer could end")
        text = self._screening.translate(definition)
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=LIMITS)
        grammar = CompiledGrammar(matcher, self._eos_token_ids)
        # The first mask builds much of the automaton, and fails for a language without a word.
        state = grammar.start()
        state.fill_mask(np.empty(-(-self._vocab_size // 32), np.uint32))
        if state.error:
            raise invalid(state.error)
        return grammar

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        # A tokenizer of its own: the engine's is for the engine's thread.
        tokenizer = Tokenizer.from_dir(self._tokenizer_dir)
        return model_vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)


def _is_stale(future: Future[CompiledGrammar]) -> bool:
    """Whether it is worth another try."""
    if not future.done():
        return False
    error = future.exception()
    return future.result().is_spent if error is None else not isinstance(error, InvalidRequest)
