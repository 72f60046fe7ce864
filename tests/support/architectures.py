"""Tiny configurations of mlx-lm's architectures: the table behind the conformance test and docs/models.md.

Sizes are as small as each architecture allows, and different from each other where a mix-up could otherwise
go unnoticed. Sliding windows are 6 tokens, so that a short request crosses them.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

VOCAB_SIZE = 97

# What most architectures read, under the names that Hugging Face configurations share. Names that an
# architecture does not know are ignored.
BASE: Config = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
}

WINDOW: Config = {
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

# Experts, under the several names they have.
MOE: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

# Multi-head latent attention: keys and values of different sizes, or one latent for both.
LATENT: Config = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
}

# The last layers have no K and V of their own and attend to those of earlier ones.
SHARED_KV: Config = {
    **WINDOW,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

YARN: Config = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}

GRANITE: Config = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
}

GPT2: Config = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 512,
    "n_ctx": 512,
    "n_inner": 48,
    "layer_norm_epsilon": 1e-5,
}

LLAMA4_ROPE: Config = {
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
    "type": "default",
}


def text(**config: Any) -> Config:
    """A multimodal checkpoint, of which the language model runs."""
    return {"text_config": {**BASE, **config}, "vision_config": {}}


# model_type -> what it needs beside BASE.
SUPPORTED: dict[str, Config] = {
    "Klear": MOE,
    "afmoe": {**MOE, **WINDOW},
    "apertus": {"qk_norm": True, "post_norm": False},
    "bailing_moe": MOE,
    "cohere": {},
    "cohere2": WINDOW,
    "dbrx": {
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek": MOE,
    "deepseek_v2": {**MOE, **LATENT, "rope_scaling": YARN, "topk_method": "greedy"},
    "deepseek_v3": {**MOE, **LATENT, "rope_scaling": YARN},
    "dots1": MOE,
    "ernie4_5": {},
    "ernie4_5_moe": MOE,
    "exaone": {"num_layers": 3, "layer_norm_epsilon": 1e-5},
    "exaone4": {**WINDOW, "sliding_window_pattern": "LG"},
    "exaone_moe": {**MOE, **WINDOW, "is_moe_layer": [False, True, True, True]},
    "gear": WINDOW,
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 8.0, "tie_word_embeddings": True},
    "gemma3": text(model_type="gemma3_text", **WINDOW),
    "gemma3_text": WINDOW,
    "gemma3n": {
        "text_config": {
            **BASE,
            **SHARED_KV,
            "model_type": "gemma3n_text",
            "rope_local_base_freq": 5000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
        }
    },
    "gemma4": text(model_type="gemma4_text", **SHARED_KV, global_head_dim=16, rope_parameters=None),
    "gemma4_text": {
        **MOE,
        **SHARED_KV,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "rope_parameters": None,
    },
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**MOE, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "glm4_moe_lite": {**MOE, **LATENT},
    "gpt2": GPT2,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {**MOE, **WINDOW},
    "gptj": {**GPT2, "rotary_dim": 4},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, **MOE},
    "helium": {},
    "hunyuan": {
        **MOE,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        "use_qk_norm": True,
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm3": {},
    "kimi_k25": text(model_type="kimi_k2", **MOE, **LATENT),
    "kimi_vl": text(model_type="deepseek_v3", **MOE, **LATENT),
    "laguna": {**MOE, **WINDOW},
    "llama": {},
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
    "mellum": {
        **MOE,
        **WINDOW,
        "rope_parameters": {
            "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
        },
    },
    "mimo": {},
    "mimo_v2_flash": {
        **MOE,
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0, 1, 1, 1],
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 6,
        "partial_rotary_factor": 0.5,
        "v_head_dim": 6,
        "swa_rope_theta": 5000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 8,
        "swa_v_head_dim": 6,
    },
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2},
    "minimax": {**MOE, "rotary_dim": 4},
    "ministral3": {"rope_parameters": LLAMA4_ROPE},
    "mistral": {},
    "mistral3": text(model_type="llama", **WINDOW),
    "mistral4": {**MOE, **LATENT, "rope_parameters": LLAMA4_ROPE},
    "mixtral": MOE,
    "muse_glimmer": WINDOW,
    "nanbeige": {},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
            }
        ]
        * 4,
    },
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": MOE,
    "openelm": {
        "num_transformer_layers": 3,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 2],
        "num_kv_heads": [2, 1, 2],
        "ffn_multipliers": [1.0, 2.0, 2.0],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phimoe": MOE,
    "phixtral": {"num_vocab": VOCAB_SIZE, "model_dim": 32, "num_heads": 4, "num_layers": 3, "rotary_dim": 4},
    "pixtral": text(model_type="mistral"),
    "plamo3": {**WINDOW, "window_size": 6},
    "qwen": {"kv_channels": 8, "no_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": MOE,
    "qwen2_vl": text(model_type="qwen2"),
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen3_vl": text(model_type="qwen3"),
    "qwen3_vl_moe": text(model_type="qwen3_moe", **MOE),
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {**MOE, "partial_rotary_factor": 0.5},
    "spark2_5": {
        **WINDOW,
        "rope_parameters": {
            "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
        },
    },
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "starcoder2": {},
    "talkie": {},
    "telechat3": {},
    "youtu_llm": LATENT,
}

MAMBA: Config = {
    "state_size": 4,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_rank": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_d_ssm": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}

LINEAR_ATTENTION: Config = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}

RECURRENT = "it keeps recurrent state, which is not a KV cache (ArraysCache)"
SEVERAL = "its layers keep several caches each (CacheList)"
DIFFERENT = "its logits through the paged cache are off from mlx-lm's own"
OWN_ATTENTION = "computes attention in a way of its own"

# model_type -> what it needs beside BASE, and part of the reason with which it is refused.
UNSUPPORTED: dict[str, tuple[Config, str]] = {
    "afm7": (
        {"hidden_dim": 32, "num_layers": 4, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2},
        DIFFERENT,
    ),
    "deepseek_v32": ({**MOE, **LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8}, SEVERAL),
    "falcon_h1": (MAMBA, SEVERAL),
    "gpt_bigcode": (GPT2, "does not run over a paged cache"),
    "granitemoehybrid": (
        {**GRANITE, **MOE, **MAMBA, "layer_types": ["mamba", "attention"] * 2},
        RECURRENT,
    ),
    "iquestloopcoder": ({}, DIFFERENT),
    "jamba": (
        {
            **MOE,
            **MAMBA,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
        },
        RECURRENT,
    ),
    "lfm2": (
        {
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_ff_dim": 48,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        RECURRENT,
    ),
    "llama4": (
        text(
            model_type="llama4_text",
            attention_chunk_size=8,
            interleave_moe_layer_step=1,
            intermediate_size_mlp=48,
            use_qk_norm=True,
            **{**MOE, "num_experts_per_tok": 1},
        ),
        "it attends in chunks of the context (ChunkedKVCache)",
    ),
    "mamba": (MAMBA, RECURRENT),
    "phi3small": (
        {
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 48,
            "gegelu_limit": 20.0,
            "layer_norm_epsilon": 1e-5,
        },
        OWN_ATTENTION,
    ),
    "qwen3_5": (text(model_type="qwen3_5_text", **MOE, **LINEAR_ATTENTION), RECURRENT),
    "qwen3_next": ({**MOE, **LINEAR_ATTENTION}, RECURRENT),
}


def configuration(model_type: str) -> Config:
    """The complete configuration of an architecture of either table."""
    overrides = SUPPORTED.get(model_type) or UNSUPPORTED.get(model_type, ({}, ""))[0]
    return {**BASE, **overrides, "model_type": model_type}
