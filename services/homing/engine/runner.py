"""Runs a step's plan: forward pass, prompt scores, sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from homing.engine.batch import build_batch
from homing.engine.kv_cache import KVCache
from homing.engine.models import Model
from homing.engine.plan import StepPlan
from homing.engine.sampling import Sampled, Sampler, score


class Runner:
    def __init__(self, model: Model, cache: KVCache, block_size: int, sampler: Sampler) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self._block_size = block_size

    @property
    def overlaps(self) -> bool:
        """`launch` comes back while the device computes; on a CPU when it has computed."""
        return self.model.shape.device.type != "cpu"

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Tensor:
        """Begin to compute the plan's chunks. Returns the logits, for `collect`."""
        return self.forward(plan)

    @torch.inference_mode()
    def collect(self, plan: StepPlan, logits: Tensor) -> Sampled:
        """Wait for what was launched. Prompt scores are added to their requests; returned is one
        token for each chunk that samples, in order."""
        sampling_rows: list[int] = []
        row = 0
        for chunk in plan.chunks:
            if chunk.scored:
                num_rows = len(chunk.scored)
                scored_tokens = chunk.request.tokens[chunk.scored.start + 1 : chunk.scored.stop + 1]
                chunk.request.prompt_scores.add(
                    score(
                        logits[row : row + num_rows],
                        scored_tokens,
                        chunk.request.sampling.top_n_logprobs,
                    )
                )
                row += num_rows
            if chunk.samples:
                sampling_rows.append(row)
                row += 1
        if len(sampling_rows) < len(logits):
            logits = logits[sampling_rows]
        return self.sampler.sample(
            logits, [chunk.request for chunk in plan.chunks if chunk.samples]
        )

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute the plan's tokens. Returns the logits (fp32) of the positions that score or
        sample, in order of the chunks: [rows, vocab]."""
        return self.model.forward(build_batch(plan.chunks, self._block_size), self.cache)
