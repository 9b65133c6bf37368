"""Runs a `Model` on whole requests, cut into steps in whatever way a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.block_pool import SCRATCH_BLOCK
from homing.engine.kv_cache import KVCache
from homing.engine.models import Model


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Driver:
    """Requests with blocks of their own, scattered over the cache; `step` computes some tokens."""

    model: Model
    num_requests: int = 1
    max_tokens: int = 512
    block_size: int = 16
    cache: KVCache = field(init=False)
    block_tables: Tensor = field(init=False)
    computed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        blocks_each = -(-self.max_tokens // self.block_size)
        num_blocks = self.num_requests * blocks_each
        self.cache = KVCache.allocate(self.model.shape, num_blocks + 1, self.block_size)
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        others = 1 + SCRATCH_BLOCK + shuffled
        self.block_tables = others.view(self.num_requests, blocks_each).int()
        self.computed = [0] * self.num_requests

    def step(
        self, tokens_of_request: Mapping[int, Sequence[int]], *, selected: Tensor | None = None
    ) -> Tensor:
        """Compute the next tokens of each request; logits of the selected rows, all by default."""
        token_ids, positions, slots, requests = [], [], [], []
        for request, tokens in tokens_of_request.items():
            for token in tokens:
                position = self.computed[request]
                block = int(self.block_tables[request, position // self.block_size])
                token_ids.append(token)
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
                requests.append(request)
                self.computed[request] += 1
        batch = Batch(
            token_ids=int32(token_ids),
            positions=int32(positions),
            slot_mapping=int32(slots),
            request_index=int32(requests),
            block_tables=self.block_tables,
            selected=torch.arange(len(token_ids)).int() if selected is None else selected,
        )
        return self.model.forward(batch, self.cache)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Continue `prompt` as request 0; the end-of-text token does not stop it."""
        logits = self.step({0: prompt})[-1]
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.step({0: tokens[-1:]})[-1].argmax()))
        return tokens
