"""The demo model, as converted from its GGUF file, against transformers on the same weights."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from homing.engine.models import Model
from homing.tokenizer import Tokenizer
from tests.support.backends import Oracle, demo_files, load_backend
from tests.support.batches import Driver

PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "The three most important things to know about the sea are",
)


@cache
def model(dtype: str) -> Model:
    return load_backend(demo_files().directory, "c", dtype=dtype, num_threads=2)


@cache
def oracle() -> Oracle:
    return Oracle(demo_files().directory)


def encode(text: str) -> list[int]:
    return Tokenizer.from_dir(demo_files().directory).encode(text)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_fp32_greedy_tokens_are_those_of_transformers(prompt: str) -> None:
    """One forward pass of transformers over our answer: each token must be its first choice."""
    tokens = encode(prompt)
    answer = Driver(model("fp32")).greedy(tokens, 32)
    choices = oracle().logits(tokens + answer).argmax(-1)
    assert answer == choices[len(tokens) - 1 : -1].tolist()


def test_fp32_log_probs_agree_with_transformers() -> None:
    tokens = [token for prompt in PROMPTS for token in encode(prompt)] * 5
    ours = Driver(model("fp32")).step({0: tokens}).log_softmax(-1)
    truth = oracle().logits(tokens).log_softmax(-1)
    following = torch.tensor(tokens[1:])[:, None]
    difference = (ours[:-1].gather(1, following) - truth[:-1].gather(1, following)).abs()
    assert difference.max() < 1e-4


def test_bf16_log_probs_stay_near_fp32() -> None:
    tokens = encode(PROMPTS[2])
    tokens += Driver(model("fp32")).greedy(tokens, 32)
    ours = Driver(model("bf16")).step({0: tokens}).log_softmax(-1)
    truth = oracle().logits(tokens).log_softmax(-1)
    distance = (truth.exp() * (truth - ours)).sum(-1)  # KL divergence of each row
    assert distance.mean() < 5e-3
    assert (ours.argmax(-1) == truth.argmax(-1)).float().mean() > 0.9
