"""The table of tiny models: family -> (transformers' config class, its arguments).

Long because it is one table. Shapes are shared by most: tensor parallelism 2 and expert parallelism
2 or 4 divide everything, and two query heads share a kv head. Families ending in `_mtp` carry
multi-token-prediction weights too.
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
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE_ID, VSTART_ID, VEND_ID = 5, 6, 7


def shaped(**overrides: Any) -> dict[str, Any]:
    return {**BASE, **overrides}


# family -> (config class name, config kwargs)
FAMILIES: dict[str, tuple[str, dict]] = {
    # dense
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
    "gemma2": (
        "Gemma2Config",
        shaped(head_dim=16, query_pre_attn_scalar=24, sliding_window=16, num_hidden_layers=4),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        shaped(
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=16,
            num_hidden_layers=4,
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
        ),
    ),
    "phi3": ("Phi3Config", shaped()),
    "olmo2": ("Olmo2Config", shaped()),
    "olmo3": ("Olmo3Config", shaped(num_hidden_layers=4, sliding_window=16)),
    "glm4": ("Glm4Config", shaped(head_dim=16, partial_rotary_factor=0.5)),
    "granite": (
        "GraniteConfig",
        shaped(
            embedding_multiplier=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.2,
            logits_scaling=0.5,
        ),
    ),
    "cohere2": (
        "Cohere2Config",
        shaped(
            num_hidden_layers=4,
            sliding_window=16,
            logit_scale=1.0,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        ),
    ),
    # MoE
    "mixtral": (
        "MixtralConfig",
        shaped(intermediate_size=32, num_local_experts=8, num_experts_per_tok=2),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        shaped(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
    ),
    "qwen3_moe": ("Qwen3MoeConfig", shaped(head_dim=16, **MOE, norm_topk_prob=True)),
    "gpt_oss": (
        "GptOssConfig",
        shaped(
            head_dim=16,
            intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            num_hidden_layers=4,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        ),
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        shaped(
            head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            use_qk_norm=True,
            num_mtp_layers=0,
        ),
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        shaped(
            intermediate_size=32,
            num_local_experts=8,
            num_experts_per_tok=2,
            embedding_multiplier=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.2,
            logits_scaling=0.5,
        ),
    ),
    # MLA
    "deepseek_v2": (
        "DeepseekV2Config",
        shaped(
            num_key_value_heads=4,
            kv_lora_rank=32,
            q_lora_rank=48,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            topk_method="greedy",
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        shaped(
            num_key_value_heads=4,
            kv_lora_rank=32,
            q_lora_rank=48,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            num_mtp_layers=0,
        ),
    ),
    # recurrent and hybrid
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        shaped(
            num_hidden_layers=None,
            head_dim=16,
            layers_block_type=[
                "linear_attention",
                "mlp",
                "full_attention",
                "linear_attention",
                "moe",
                "full_attention",
            ],
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=16,
            expand=2,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48,
            n_group=1,
            topk_group=1,
        ),
    ),
    "bamba": (
        "BambaConfig",
        shaped(
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=16,
        ),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        shaped(
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_expand=2,
            mamba_chunk_size=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            intermediate_size=32,
            attention_multiplier=0.2,
            embedding_multiplier=2.0,
            residual_multiplier=0.5,
            logits_scaling=0.5,
        ),
    ),
    "falcon_h1": (
        "FalconH1Config",
        shaped(
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_d_ssm=128,
            mamba_expand=2,
            mamba_chunk_size=16,
            head_dim=16,
        ),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        shaped(
            head_dim=16,
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            layer_types=[
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
        ),
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        shaped(
            head_dim=16,
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            layer_types=[
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
        ),
    ),
    "lfm2": (
        "Lfm2Config",
        shaped(
            layer_types=["conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
        ),
    ),
    "jamba": (
        "JambaConfig",
        shaped(
            intermediate_size=48,
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        shaped(
            num_hidden_layers=4,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            num_key_value_heads=4,
            layer_types=[
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
        ),
    ),
    # multimodal
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": shaped(
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 3, 3],
                },
                num_hidden_layers=2,
            ),
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": IMAGE_ID,
            "video_token_id": VSTART_ID,
            "vision_start_token_id": VSTART_ID,
            "vision_end_token_id": VEND_ID,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": shaped(
                head_dim=16,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            ),
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            "image_token_id": IMAGE_ID,
            "video_token_id": VSTART_ID,
            "vision_start_token_id": VSTART_ID,
            "vision_end_token_id": VEND_ID,
        },
    ),
    "llava": (
        "LlavaConfig",
        {
            "text_config": dict(shaped(num_hidden_layers=2), model_type="llama"),
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "projection_dim": 32,
            },
            "image_token_id": IMAGE_ID,
            "image_seq_length": 4,
            "vision_feature_layer": -1,
        },
    ),
    # MTP heads
    "deepseek_v3_mtp": (
        "DeepseekV3Config",
        shaped(
            num_key_value_heads=4,
            num_hidden_layers=2,
            routed_scaling_factor=1.0,
            kv_lora_rank=32,
            q_lora_rank=48,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            num_mtp_layers=1,
        ),
    ),
    "glm4_moe_mtp": (
        "Glm4MoeConfig",
        shaped(
            head_dim=16,
            intermediate_size=64,
            num_hidden_layers=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            num_mtp_layers=2,
        ),
    ),
    "qwen3_next_mtp": (
        "Qwen3NextConfig",
        shaped(
            head_dim=16,
            num_hidden_layers=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            layer_types=["linear_attention", "full_attention"],
            mtp_num_hidden_layers=1,
        ),
    ),
}
