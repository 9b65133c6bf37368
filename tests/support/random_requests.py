"""Requests of many kinds for the fake model, by a seeded source."""

from __future__ import annotations

import random

import numpy as np

from homing.params import SamplingParams


def random_params(source: random.Random) -> SamplingParams:
    scores = source.random() < 0.3
    return SamplingParams(
        temperature=source.choice([0.0, 0.8, 1.5]),
        top_p=source.choice([0.0, 0.9]),
        seed=source.randrange(1000),
        num_tokens_to_generate=source.randrange(0, 20),
        repetition_penalty=source.choice([1.0, 1.0, 1.2]),
        return_log_probs=scores,
        skip_prompt_log_probs=source.random() < 0.5,
        top_n_logprobs=2 if scores else 0,
    )


def random_prompt(source: random.Random) -> np.ndarray:
    """Often one of a few prefixes, then something of its own."""
    shared = np.random.default_rng(source.randrange(3)).integers(3, 32, 24)
    own = np.array([source.randrange(3, 32) for _ in range(source.randrange(1, 10))])
    return np.append(shared[: source.choice([0, 8, 12, 24])], own)
