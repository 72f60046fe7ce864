"""Configurations of tiny vision models whose encoders take tiles of one size."""

from __future__ import annotations

from typing import Any

from tools.fixtures.tiny_models import TINY_LLAMA

_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16, "num_channels": 3,
}  # fmt: skip


def tiled_configs(image_token: int, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return configurations by architecture. Each tile has 4 features."""
    llama = TINY_LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": False, "vocab_size": vocab_size}
    qwen3 = llama | {"model_type": "qwen3", "head_dim": 16}
    smolvlm = {
        "model_type": "smolvlm", "text_config": llama, "vision_config": _VISION | {"model_type": "smolvlm_vision"},
        "scale_factor": 2, "image_token_id": image_token, "vocab_size": vocab_size,
    }  # fmt: skip
    internvl = {
        "model_type": "internvl",
        "text_config": qwen3,
        "vision_config": _VISION
        | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": False},
        "downsample_ratio": 0.5,
        "image_token_id": image_token,
    }
    internvl_chat = {
        "model_type": "internvl_chat",
        "text_config": llama | {"model_type": "qwen2"},
        "vision_config": _VISION | {"model_type": "intern_vit_6b", "drop_path_rate": 0.0},
        "downsample_ratio": 0.5,
        "image_token_index": image_token,
        "vocab_size": vocab_size,
    }
    idefics3 = smolvlm | {"model_type": "idefics3", "vision_config": _VISION | {"model_type": "idefics3_vision"}}
    return {"smolvlm": smolvlm, "idefics3": idefics3, "internvl": internvl, "internvl_chat": internvl_chat}
