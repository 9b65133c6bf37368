"""The table of tiny models: family -> (transformers' config class, its arguments).

The shapes are alike: two ranks of tensor parallelism divide everything, and two query heads share a
kv head.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320
MAX_POSITIONS = 512
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def shaped(**overrides: Any) -> dict[str, Any]:
    return {**BASE, **overrides}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", shaped()),
    "llama_tied_yarn": (
        "LlamaConfig",
        shaped(
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
    ),
    "llama3_rope": (
        "LlamaConfig",
        shaped(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
    ),
    "mistral": ("MistralConfig", shaped(sliding_window=16)),
    "qwen2": ("Qwen2Config", shaped(tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", shaped(head_dim=32)),
    # What the engine does not run, and says so.
    "gemma2": ("Gemma2Config", shaped()),
}
