"""A model that answers from what the KV cache really holds.

Its cache stores (token, position) for each slot. A row's logits are a pure function of all tokens
that it finds in its blocks up to its position, so a wrong slot, a stale block, a write that is
missing or a shared block that is written changes the output. `expected_greedy` computes the same
without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.engine import Engine
from homing.engine.kv_cache import KVCache
from homing.engine.limits import EngineLimits
from homing.engine.models import ModelShape
from homing.engine.parts import EngineParts
from homing.engine.structured.compiler import GrammarCompiler
from homing.tokenizer import Tokenizer

EOS = 2


class FakeCache:
    """Stands for KVCache: `tokens[slot]` and `positions[slot]`."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tokens = np.full(num_blocks * block_size, 9999, np.int64)
        self.positions = np.full(num_blocks * block_size, 9999, np.int64)
        self.block_size = block_size


def logits_of(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """[vocab_size], fp32: what the model thinks comes after these tokens."""
    state = 0x5DEECE66D
    for token in tokens:
        state = (state * 6364136223846793005 + int(token) + 1442695040888963407) & (2**64 - 1)
    logits = np.random.Generator(np.random.PCG64(state)).standard_normal(vocab_size) * 2.0
    return logits.astype(np.float32)


SHIFT = "shift"
"""FakeModel's one parameter [1]. It goes into what the model writes to the cache, so that logits
tell under which weights each position was computed."""


class FakeModel:
    parameter_shapes: Mapping[str, tuple[int, ...]] = {SHIFT: (1,)}
    memory: tuple[Tensor, ...] = ()

    def __init__(
        self, vocab_size: int = 32, max_context_tokens: int = 256, eos: tuple[int, ...] = (EOS,)
    ) -> None:
        self.shape = ModelShape(
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            hidden_size=8,
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            eos_token_ids=eos,
            dtype=torch.float32,
        )
        self.num_rows_of_steps: list[int] = []
        self.failure: Exception | None = None
        self.shift = 0

    def updated(self, parameters: Mapping[str, Tensor]) -> FakeModel:
        shape = self.shape
        model = FakeModel(shape.vocab_size, shape.max_context_tokens, shape.eos_token_ids)
        model.shift = int(parameters[SHIFT]) if SHIFT in parameters else self.shift
        return model

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if self.failure:
            raise self.failure
        fake = cast(FakeCache, cache)
        self.num_rows_of_steps.append(len(batch.token_ids))
        self._check(batch)
        slots = batch.slot_mapping.numpy()
        fake.tokens[slots] = shifted(batch.token_ids.numpy(), self.shift)
        fake.positions[slots] = batch.positions.numpy()
        rows = [self._row(batch, fake, int(row)) for row in batch.selected]
        shape = (len(rows), self.shape.vocab_size)
        return torch.from_numpy(np.array(rows, np.float32).reshape(shape))

    def _check(self, batch: Batch) -> None:
        for tensor in (getattr(batch, name) for name in Batch.__slots__):
            assert tensor.dtype is torch.int32
            assert tensor.is_contiguous()
        selected = batch.selected.tolist()
        assert selected == sorted(set(selected))
        rows = list(zip(batch.request_index.tolist(), batch.positions.tolist(), strict=True))
        assert len(set(rows)) == len(rows), "a token is computed twice in one step"

    def _row(self, batch: Batch, cache: FakeCache, row: int) -> np.ndarray:
        positions = np.arange(int(batch.positions[row]) + 1)
        table = batch.block_tables[int(batch.request_index[row])].numpy()
        slots = (
            table[positions // cache.block_size] * cache.block_size + positions % cache.block_size
        )
        found = np.where(cache.positions[slots] == positions, cache.tokens[slots], 7777)
        return logits_of(found, self.shape.vocab_size)


def shifted(tokens: np.ndarray, shift: int) -> np.ndarray:
    """What the cache holds of tokens that were computed under `shift`."""
    return tokens + 100_000 * shift


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_context_tokens: int = 128,
    max_batch_requests: int = 8,
    max_step_tokens: int = 32,
    max_queued_requests: int = 100,
    vocab_size: int = 32,
    eos: tuple[int, ...] = (EOS,),
    tokenizer: Tokenizer | None = None,
    grammars: GrammarCompiler | None = None,
    parts: EngineParts | None = None,
) -> tuple[Engine, FakeModel]:
    model = FakeModel(vocab_size, max_context_tokens, eos)
    cache = cast(KVCache, FakeCache(num_blocks, block_size))
    limits = EngineLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_context_tokens=max_context_tokens,
        max_batch_requests=max_batch_requests,
        max_step_tokens=max_step_tokens,
        max_queued_requests=max_queued_requests,
    )
    return Engine(model, cache, tokenizer, limits, grammars, parts), model


def expected_greedy(
    prompt: Sequence[int], num_tokens: int, vocab_size: int = 32, shift: int = 0
) -> list[int]:
    """What greedy decoding gives, end of sequence at EOS included."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(int(logits_of(shifted(np.array(tokens), shift), vocab_size).argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
