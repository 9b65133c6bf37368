"""Runs a step's plan: forward pass, prompt scores, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from homing.engine.batch import Placement, build_batch, token_ids
from homing.engine.foresight import Foreseen
from homing.engine.kv_cache import KVCache
from homing.engine.models import Model
from homing.engine.plan import Chunk, StepPlan
from homing.engine.sampling import Sampled, Sampler, score


class Runner:
    def __init__(self, model: Model, cache: KVCache, block_size: int, sampler: Sampler) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.num_foreseen_steps = 0
        """Those that ran as they were prepared."""
        self._block_size = block_size
        self._foreseen: Foreseen | None = None

    @property
    def overlaps(self) -> bool:
        """`launch` comes back while the device computes; on a CPU when it has computed."""
        return self.model.shape.device.type != "cpu"

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Tensor:
        """Begin to compute the plan's chunks. Returns the logits, for `collect`."""
        return self.forward(plan)

    @torch.inference_mode()
    def prepare(self, chunks: Sequence[Chunk], placement: Placement) -> None:
        """Between `launch` and `collect`: get ready for these decodes, in case that they are what
        is launched next, and there."""
        self._foreseen = Foreseen.of(chunks, placement, self.model, self.cache)

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
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen.is_of(plan.chunks, self.model):
            self.num_foreseen_steps += 1
            return foreseen.compute(token_ids(plan.chunks))
        return self.model.forward(build_batch(plan.chunks, self._block_size), self.cache)
