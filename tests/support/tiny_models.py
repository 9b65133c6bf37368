"""Makes tiny random checkpoints, one model family each, in a Hugging Face directory.

Weights follow from the seed and the family's name alone. They are not transformers' initial ones,
whose near-uniform logits would let rounding decide every greedy test: here the logits' spread is
about 3, and the smallest margins between the best two tokens are far above fp32 noise.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tests.support.tiny_families import FAMILIES, MAX_POSITIONS, VOCAB_SIZE

SPECIAL_TOKENS = [
    *("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"),
    *("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
]
CORPUS = (
    "The capital of France is Paris. Once upon a time there was a small engine that read tokens "
    "and wrote tokens. the and of to in is that it for on with as at by an be this are from or "
) * 4
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    max_shard_size: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, weights and tokenizer; about 0.1 s and 1 MB. `overrides` are of the config."""
    transformers_logging.disable_progress_bar()
    model = _build(family, seed, overrides or {})
    model.generation_config.do_sample = False
    shards = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **shards)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 tokens: each of the 256 bytes, a few words, a ChatML-like template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """None of them is special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (count,), generator=generator).tolist()


def _build(family: str, seed: int, overrides: Mapping[str, Any]) -> Any:
    class_name, arguments = FAMILIES[family]
    config = getattr(transformers, class_name)(**deepcopy({**arguments, **overrides}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    filled: set[int] = set()  # tied tensors have two names: the first, the embedding's, counts
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in filled:
            filled.add(tensor.data_ptr())
            _fill(tensor, name, family, seed)
    _spread_tied_logits(model)
    return model


def _fill(tensor: Tensor, name: str, family: str, seed: int) -> None:
    """Fan-in scaled matrices, gently varied norms."""
    generator = torch.Generator()
    generator.manual_seed(seed * 1_000_003 + zlib.crc32(f"{family}/{name}".encode()))
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() == 1:
        values = 0.1 * noise + (1 if "norm" in name else 0)
    elif "embed" in name:
        values = noise
    else:
        values = noise / math.sqrt(tensor.shape[-1]) * (3 if "lm_head" in name else 1)
    tensor.copy_(values)


@torch.no_grad()
def _spread_tied_logits(model: Any) -> None:
    """A tied head mostly repeats its input token: make the embedding a small part of the residual
    stream, and let the last norm bring the logits back to the spread of the untied models."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is not embedding.weight:
        return
    share = 0.08
    embedding.weight.mul_(share)
    model.model.norm.weight.mul_(3.0 / (share * math.sqrt(embedding.weight.shape[-1])))
