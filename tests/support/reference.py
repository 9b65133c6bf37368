"""What transformers says: greedy continuations in fp32, one prompt at a time."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=2)
def reference_model(directory: Path) -> Any:
    """The checkpoint as transformers loads it, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def greedy_tokens(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens after the prompt; an end-of-sequence id does not end them."""
    import torch

    model = reference_model(directory)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def greedy_choices(directory: Path, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of an answer, given those before it: equal to the answer if
    and only if that is the greedy one. One forward pass, where `generate` takes one a token."""
    import torch

    with torch.no_grad():
        logits = reference_model(directory)(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
