"""Writes tiny GGUF files: a tiny model's weights and tokenizer, as llama.cpp's converter would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import make_tiny_model, tiny_tokenizer

# Hugging Face name of a layer's tensor -> GGUF
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def make_tiny_gguf(
    family: str, gguf_file: Path, *, architecture: str | None = None, **metadata: str
) -> Path:
    """`metadata` overrides string fields, `tokenizer_ggml_pre` for `tokenizer.ggml.pre`."""
    directory = make_tiny_model(family, gguf_file.parent / f"{family}-of-{gguf_file.stem}")
    model = AutoModelForCausalLM.from_pretrained(directory)
    writer = GGUFWriter(gguf_file, architecture or family)
    _write_shape(writer, model.config)
    _write_tokenizer(writer)
    for name, value in metadata.items():
        writer.add_string(name.replace("_", "."), value)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _pairs_from_halves(values, model.config.head_dim)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_file


def _write_shape(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _write_tokenizer(writer: GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in _merges(tokenizer)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(str(tokenizer.chat_template))


def _merges(tokenizer: Any) -> list[list[str]]:
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]


def _pairs_from_halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    rows, columns = weight.shape
    halves = weight.reshape(rows // head_dim, 2, head_dim // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"
