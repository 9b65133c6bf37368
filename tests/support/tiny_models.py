"""Makes tiny random checkpoints, one model family each, in a Hugging Face directory.

Weights follow from the seed and the family's name alone. They are not transformers' initial ones,
whose near-uniform logits would let rounding decide every greedy test: here the logits' spread is
about 3, and the smallest margins between the best two tokens are far above fp32 noise.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
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
    "{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Families whose RMSNorm multiplies by (1 + w); the delta net's gated norm multiplies by w.
ONE_CENTRED = {"gemma2", "gemma3", "qwen3_next", "qwen3_5", "qwen3_next_mtp"}
# What blocks of `_mtp` models add is shrunk, so that drafts are partly right: accepting and
# rejecting them both happen.
MTP_DAMPING = 0.15


def make_tiny_model(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, weights and tokenizer; about 0.1 s and 1 MB. `overrides` are of the config."""
    transformers_logging.disable_progress_bar()
    model = _build(family, seed, overrides or {}).to(dtype)
    model.generation_config.do_sample = False
    shards = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **shards)
    if family.endswith("_mtp"):
        _add_mtp_tensors(family, model, seed, directory)
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


def _build(family: str, seed: int, overrides: Mapping[str, Any]) -> Any:
    class_name, arguments = FAMILIES[family]
    arguments = {
        name: value for name, value in {**arguments, **overrides}.items() if value is not None
    }
    config = getattr(transformers, class_name)(**json.loads(json.dumps(arguments)))
    has_vision = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if has_vision else None
    model = (auto or transformers.AutoModelForCausalLM).from_config(config).eval()
    filled: set[int] = set()  # tied tensors have two names: the first, the embedding's, counts
    for name, tensor in model.state_dict().items():
        derived = "inv_freq" in name or "rotary" in name or "embed_scale" in name
        if tensor.is_floating_point() and not derived and tensor.data_ptr() not in filled:
            filled.add(tensor.data_ptr())
            _fill(tensor, name, family, seed)
            _damp(tensor, name, family)
    _spread_tied_logits(model, family)
    return model


def _fill(tensor: Tensor, name: str, family: str, seed: int) -> None:
    """Fan-in scaled matrices, gently varied norms, stable recurrences."""
    generator = torch.Generator()
    generator.manual_seed(seed * 1_000_003 + zlib.crc32(f"{family}/{name}".encode()))
    noise = torch.randn(tensor.shape, generator=generator)
    uniform = torch.rand(tensor.shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":  # decay rates between 1 and 8
        values = torch.log(1 + 7 * uniform)
    elif leaf == "dt_bias" or name.endswith("dt_proj.bias"):  # softplus^-1 of 0.01 .. 0.3
        step = torch.exp(uniform * (math.log(0.3) - math.log(0.01)) + math.log(0.01))
        values = step + torch.log(-torch.expm1(-step))
    elif leaf == "D":
        values = 1 + 0.1 * noise
    elif leaf in ("sinks", "e_score_correction_bias"):
        values = 0.5 * noise
    elif "norm" in name and tensor.dim() == 1 and leaf == "weight":
        values = 0.1 * noise + (0 if _is_one_centred(family, name) else 1)
    elif tensor.dim() <= 1:
        values = 0.1 * noise
    elif "embed" in name and "patch" not in name:
        values = noise
    else:
        values = noise / math.sqrt(_fan_in(name, tensor))
        values *= 3 if "lm_head" in name else 1
    tensor.copy_(values.to(tensor.dtype))


def _fan_in(name: str, tensor: Tensor) -> int:
    if "conv1d" in name or ".conv.conv." in name or "lm_head" in name:
        return tensor.shape[-1]
    if "experts" in name and tensor.dim() == 3:  # [experts, out, in] or [experts, in, out]
        return min(tensor.shape[1:])
    return tensor[0].numel()


def _is_one_centred(family: str, name: str) -> bool:
    return family in ONE_CENTRED and "linear_attn.norm." not in name


def _damp(tensor: Tensor, name: str, family: str) -> None:
    if family.endswith("_mtp") and re.search(r"(o_proj|down_proj|out_proj)(\.weight)?$", name):
        tensor.mul_(MTP_DAMPING)


@torch.no_grad()
def _spread_tied_logits(model: Any, family: str) -> None:
    """A tied head mostly repeats its input token: make the embedding a small part of the residual
    stream, and let the last norm bring the logits back to the spread of the untied models."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    width = embedding.weight.shape[-1]
    share = 0.08 / (math.sqrt(width) if "gemma" in family else 1.0)
    final_norms = r"model\.(norm|embedding_norm|final_layernorm|norm_f)"
    norm = [m for name, m in model.named_modules() if re.fullmatch(final_norms, name)][-1]
    embedding.weight.mul_(share)
    centre = 1.0 if _is_one_centred(family, "norm") else 0.0
    gain = 3.0 / (share * math.sqrt(width))
    norm.weight.copy_((norm.weight + centre) * gain - centre)


# ---- multi-token-prediction weights, under the names of released checkpoints


def _add_mtp_tensors(family: str, model: Any, seed: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | {
        name: tensor.contiguous() for name, tensor in _mtp_tensors(family, model, seed).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def _mtp_tensors(family: str, model: Any, seed: int) -> dict[str, Tensor]:
    config = model.config
    width, depth = config.hidden_size, config.num_hidden_layers
    dtype = next(model.parameters()).dtype
    tensors: dict[str, Tensor] = {}

    def add(name: str, shape: tuple[int, ...]) -> None:
        tensor = torch.empty(shape)
        _fill(tensor, name, family, seed)
        _damp(tensor, name, family)
        if re.search(r"(eh_proj|mtp\.fc)\.weight$", name):  # mostly pass the embedding on
            tensor.mul_(MTP_DAMPING)[:, :width] += torch.eye(width)
        tensors[name] = tensor.to(dtype)

    def add_layer(prefix: str, layer: Any) -> None:
        for name, tensor in _unstack_experts(layer.state_dict()).items():
            add(prefix + name, tuple(tensor.shape))

    if family == "qwen3_next_mtp":
        add("mtp.fc.weight", (width, 2 * width))
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            add(f"mtp.{norm}.weight", (width,))
        layers = zip(model.model.layers, config.layer_types, strict=True)
        full = next(layer for layer, kind in layers if kind == "full_attention")
        add_layer("mtp.layers.0.", full)
        return tensors
    for index in range(depth, depth + config.num_mtp_layers):
        prefix = f"model.layers.{index}."
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            add(f"{prefix}{norm}.weight", (width,))
        add(f"{prefix}eh_proj.weight", (width, 2 * width))
        add_layer(prefix, model.model.layers[-1])
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tensors[f"{prefix}embed_tokens.weight"] = embedding.weight.detach().clone()
        tensors[f"{prefix}shared_head.head.weight"] = head.weight.detach().clone()
    return tensors


def _unstack_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Released checkpoints hold one matrix an expert; transformers' modules hold stacked ones."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stacked = re.match(r"(.*experts)\.(gate_up_proj|down_proj)$", name)
        if not stacked:
            result[name] = tensor
            continue
        prefix, kind = stacked.groups()
        for index, expert in enumerate(tensor):
            if kind == "down_proj":
                result[f"{prefix}.{index}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                result[f"{prefix}.{index}.gate_proj.weight"] = gate
                result[f"{prefix}.{index}.up_proj.weight"] = up
    return result
