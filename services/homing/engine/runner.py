"""Runs a step's plan: forward pass, prompt scores, sampling."""

from __future__ import annotations

import torch

from homing.engine.batch import build_batch
from homing.engine.kv_cache import KVCache
from homing.engine.models import Model
from homing.engine.plan import StepPlan
from homing.engine.sampling import Sampled, sample, score


class Runner:
    def __init__(self, model: Model, cache: KVCache, block_size: int) -> None:
        self._model = model
        self._cache = cache
        self._block_size = block_size

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """Compute the plan's chunks. Prompt scores are added to their requests; returned is one
        token for each chunk that samples, in order."""
        logits = self._model.forward(build_batch(plan.chunks, self._block_size), self._cache)
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
        return sample(logits, [chunk.request for chunk in plan.chunks if chunk.samples])
