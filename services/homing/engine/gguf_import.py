"""Converts a GGUF file to a Hugging Face directory: config, weights, tokenizer, chat template.

Weights are dequantised to fp32, which loses nothing of the quantised values (bf16 would round
them), so that fp32 results equal those of any other reader of the same file. The config names
bf16, the dtype to run in.

The tokenizer is built here and not by transformers, whose import drops the `Digits` step of this
family: the table below says how each known kind of file splits text before BPE.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from homing.errors import ConfigError

# GGUF architecture -> transformers class
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# GGUF tensor of a layer -> Hugging Face name
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# How text is cut before BPE, by `tokenizer.ggml.pre`; the patterns of the models' releases.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # of `tokenizer.ggml.token_type`


def convert(gguf_file: Path, directory: Path, on_progress: Callable[[str], None]) -> None:
    """Fill `directory`, which is empty. Raises ConfigError for a file that we cannot run."""
    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{gguf_file} is not a GGUF file: {error}") from None
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensor_names = {tensor.name for tensor in reader.tensors}
    try:
        config = _config(gguf_file, metadata, tensor_names)
        _write_json(directory / "config.json", config)
        _write_tokenizer(gguf_file, metadata, directory)
    except KeyError as error:
        raise ConfigError(f"{gguf_file} has no metadata {error}") from None
    _write_weights(reader, config, directory, on_progress)


def _config(gguf_file: Path, metadata: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    kind = metadata["general.architecture"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{gguf_file}: GGUF architecture {kind!r} is not supported (known: {known})"
        )
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors or scaling != "none":
        raise ConfigError(
            f"{gguf_file}: scaled rotary positions are not read from GGUF; "
            "use the model's Hugging Face directory"
        )

    def value(name: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{name}", default)

    num_heads = value("attention.head_count")
    hidden_size = value("embedding_length")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": "bfloat16",
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": value("attention.key_length", hidden_size // num_heads),
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest_fp32(value("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base", 1e4)},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest_fp32(value: float) -> float:
    """GGUF stores 1e-5 as fp32, 9.999999747e-06: give back the number that was meant."""
    return float(str(np.float32(value)))


def _write_weights(
    reader: GGUFReader,
    config: Mapping[str, Any],
    directory: Path,
    on_progress: Callable[[str], None],
) -> None:
    tensors: dict[str, np.ndarray] = {}
    for index, tensor in enumerate(reader.tensors):
        name = _hugging_face_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves_from_pairs(values, config["head_dim"])
        tensors[name] = np.ascontiguousarray(values)
        if index % 64 == 0:
            on_progress(f"dequantised {index} of {len(reader.tensors)} tensors")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _hugging_face_name(name: str) -> str:
    if name in OTHER_TENSORS:
        return OTHER_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if prefix != "blk" or leaf not in LAYER_TENSORS:
        raise ConfigError(f"tensor {name!r} of the GGUF file is not part of a known decoder")
    return f"model.layers.{layer}.{LAYER_TENSORS[leaf]}"


def _halves_from_pairs(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo llama.cpp's row order: it rotates rows (2i, 2i+1), transformers (i, i + head_dim/2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(gguf_file: Path, metadata: Mapping[str, Any], directory: Path) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{gguf_file}: tokenizer {kind!r} is not read from GGUF; "
            "use the model's Hugging Face directory"
        )
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(gguf_file, metadata.get("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind == CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED_TOKEN:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_tokenizer_config(metadata, tokens, directory)


def _pre_tokenizer(gguf_file: Path, name: str | None) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match name:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, byte_level])
        case "qwen2" | "llama-bpe":
            pattern = QWEN2_PATTERN if name == "qwen2" else LLAMA3_PATTERN
            split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, bytes_only])
        case "gpt-2" | "default" | None:
            return byte_level
        case _:
            raise ConfigError(f"{gguf_file}: pre-tokenizer {name!r} is not supported")


def _write_tokenizer_config(
    metadata: Mapping[str, Any], tokens: list[str], directory: Path
) -> None:
    ids = {
        kind: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for kind, name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    special_tokens = {
        f"{kind}_token": tokens[token_id] for kind, token_id in ids.items() if token_id is not None
    }
    tokenizer_config = {
        **special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    generation_config = {
        f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad") if ids[kind] is not None
    }
    _write_json(directory / "generation_config.json", generation_config)
    if template := metadata.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, "utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
