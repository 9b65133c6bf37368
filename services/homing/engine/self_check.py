"""Does what a request gets depend on what is computed beside it?

It should not: the kernels and the torch reference compute a row alike whatever the other rows are.
But the compiler and the libraries below them are not ours, and change. It takes some ten steps, so
it is done for those who ask.
"""

from __future__ import annotations

import numpy as np

from homing.engine.engine import Engine
from homing.engine.kv_cache import KVCache
from homing.engine.limits import EngineLimits
from homing.engine.models import Model
from homing.errors import ConfigError
from homing.params import SamplingParams

BLOCK_SIZE = 8
PROMPT_LENGTHS = (4, 18)
"""Shorter and longer than a block, and than a panel of the kernels."""
CHUNK_TOKENS = 9
NUM_TOKENS = 2

Answer = list[tuple[int, bytes]]
"""Token ids, and the bits of their log-probabilities."""


def check_batch_invariance(model: Model) -> None:
    """Raise ConfigError if a request alone differs from one in a batch and in chunks."""
    prompts = _prompts(model)
    beside = _answers(model, prompts, max_step_tokens=CHUNK_TOKENS)
    for prompt, answer in zip(prompts, beside, strict=True):
        [alone] = _answers(model, [prompt], max_step_tokens=len(prompt))
        if alone != answer:
            raise ConfigError(
                f"--batch-invariant: the self-check failed: a request of {len(prompt)} tokens has "
                "other tokens or log-probabilities in a batch than alone"
            )


def _prompts(model: Model) -> list[np.ndarray]:
    shape = model.shape
    longest = max(1, shape.max_context_tokens - NUM_TOKENS)
    places = [np.arange(min(length, longest)) for length in PROMPT_LENGTHS]
    return [(13 + 31 * place * (place + n)) % shape.vocab_size for n, place in enumerate(places)]


def _answers(model: Model, prompts: list[np.ndarray], max_step_tokens: int) -> list[Answer]:
    longest = max(map(len, prompts)) + NUM_TOKENS
    num_blocks = 1 + len(prompts) * -(-longest // BLOCK_SIZE)
    limits = EngineLimits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_context_tokens=longest,
        max_batch_requests=len(prompts),
        max_step_tokens=max(max_step_tokens, len(prompts)),
        max_queued_requests=len(prompts),
    )
    engine = Engine(model, KVCache.allocate(model.shape, num_blocks, BLOCK_SIZE), None, limits)
    params = SamplingParams(
        seed=1, num_tokens_to_generate=NUM_TOKENS, ignore_eos=True, return_log_probs=True
    )
    answers: list[Answer] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add_request(number, prompt, params)
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.log_probs is not None
            [token] = output.token_ids
            answers[int(str(output.request.key))].append((token, output.log_probs.chosen.tobytes()))
    return answers
