"""Tiny vision models with random weights: mlx-vlm's own, and the same weights behind the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from metal_engine.checkpoints.model_classes import model_classes
from metal_engine.models.multimodal.check import share_text_weights
from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder
from metal_engine.models.multimodal.published_masks import published_masks
from metal_engine.models.paged_model import PagedModel
from metal_engine.prompt_images import AxesPositions, PromptImage, PromptImages
from metal_engine.request import PreparedRequest, RequestOutput
from metal_engine.sampling_params import SamplingParams
from tests.support.demo import engine_for
from tests.support.tiled_vision import tiled_configs
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import TINY_LLAMA, spread_weights

VOCAB_SIZE = 256
IMAGE_TOKEN = 251
LLAMA = TINY_LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": False}
_QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 253,
    "vision_start_token_id": 250,
    "vision_end_token_id": 252,
    "vocab_size": VOCAB_SIZE,
}
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
}  # fmt: skip
_QWEN_TEXT = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": VOCAB_SIZE, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": _QWEN_TEXT
    | {
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "vision_config": _QWEN_VISION | {"model_type": "qwen3_vl", "depth": 3, "deepstack_visual_indexes": [0, 1]},
    **_QWEN_IDS,
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": _QWEN_TEXT
    | {
        "model_type": "qwen3_5_text",
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [2, 1, 1],
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
        },
    },
    "vision_config": _QWEN_VISION | {"model_type": "qwen3_5", "deepstack_visual_indexes": []},
    **_QWEN_IDS,
}


@dataclass(frozen=True)
class TinyVision:
    """A tiny model as mlx-vlm runs it, and behind the paged cache. Both have the same arrays.

    Attributes:
        reference: mlx-vlm's model.
    """

    config: dict[str, Any]
    reference: Any
    paged: PagedModel
    encoder: MlxVlmEncoder


@cache
def tiny_vision(name: str) -> TinyVision:
    """Return the tiny model of an architecture, with random weights. Tests share it."""
    return make_tiny_vision(CONFIGS[name])


def make_tiny_vision(config: dict[str, Any], kv_cache_dtype: str = "auto") -> TinyVision:
    """Return a tiny model with random weights."""
    text = tiny_text_model(config)
    encoder = MlxVlmEncoder(config, 64, mx.float32)
    reference = encoder.model
    language_model: nn.Module = reference.language_model
    spread_weights(reference)
    share_text_weights(language_model, text)
    paged = PagedModel(text, kv_cache_dtype=kv_cache_dtype)
    paged.add_image_encoder(encoder)
    clone = MlxVlmEncoder(config, 64, mx.float32)
    clone.model.update(reference.parameters())
    encoder.take_language_model()
    return TinyVision(config, clone.model, paged, encoder)


def tiny_text_model(config: dict[str, Any]) -> Any:
    """Return mlx-lm's text model of a configuration, with random weights."""
    mx.random.seed(1)
    own = deepcopy(config)  # mlx-lm changes the configuration
    model_class, args_class = model_classes(own)
    text = model_class(args_class.from_dict(own))
    spread_weights(text)
    if config["model_type"] == "gemma4":
        _untie(text)
    return text


def _untie(text: Any) -> None:
    """Change the weights of a model with tied embeddings, which would otherwise repeat the last token."""
    changed = []
    for name, array in tree_flatten(text.parameters()):
        if name.endswith("embed_tokens.weight"):
            changed.append((name, mx.random.normal(array.shape) * 0.05))
        elif array.ndim > 1:
            changed.append((name, array * 2))
        elif "norm" in name:
            changed.append((name, 1 + mx.random.normal(array.shape)))
    text.load_weights(changed, strict=False)


@dataclass(frozen=True)
class VisionPrompt:
    """A prompt with images, and the inputs of mlx-vlm for it."""

    token_ids: list[int]
    images: PromptImages | None
    inputs: dict[str, np.ndarray] = field(default_factory=dict)


def content_hash(inputs: dict[str, np.ndarray]) -> bytes:
    content = sha256()
    for name, array in sorted(inputs.items()):
        content.update(f"{name} {array.shape} {array.dtype}".encode() + array.tobytes())
    return content.digest()


def vision_prompt(tiny: TinyVision, parts: Sequence[int | tuple[int, int, int]], seed: int = 0) -> VisionPrompt:
    """Return a prompt of several parts: a number of random text tokens, or an image (rows, columns, seed)."""
    rng = np.random.default_rng(seed)
    token_ids: list[int] = []
    images, grids, inputs = [], [], []
    is_qwen = tiny.encoder.axes is not None
    for part in parts:
        if isinstance(part, int):
            token_ids += rng.integers(0, 240, part).tolist()
            continue
        rows, columns, image_seed = part
        sample = tiny.encoder.sample(rows, columns)
        pixels = np.random.default_rng(image_seed).standard_normal(sample.inputs["pixel_values"].shape, np.float32)
        own = sample.inputs | {"pixel_values": pixels}
        token_ids += [250] * is_qwen
        start = len(token_ids)
        token_ids += [IMAGE_TOKEN] * sample.num_features
        positions = np.arange(start, len(token_ids), dtype=np.int32)
        images.append(PromptImage(positions, content_hash(own), own, tiny.encoder.bidirectional_layers))
        grids.append((start, rows, columns))
        inputs.append(own)
        token_ids += [252] * is_qwen
    if not images:
        return VisionPrompt(token_ids, None)
    axes = axes_positions(len(token_ids), grids) if is_qwen else None
    joined = {name: _joined([one[name] for one in inputs], -1 if "position_ids" in name else 0) for name in inputs[0]}
    return VisionPrompt(token_ids, PromptImages(tuple(images), axes), joined)


def _joined(arrays: list[np.ndarray], padding: int) -> np.ndarray:
    """Return the inputs of several images as one array. Smaller images are padded."""
    largest = np.max([array.shape for array in arrays], axis=0)
    padded = []
    for array in arrays:
        widths = [(0, 0), *((0, most - size) for most, size in zip(largest[1:], array.shape[1:], strict=True))]
        padded.append(np.pad(array, widths, constant_values=padding))
    return np.concatenate(padded)


def axes_positions(num_tokens: int, grids: list[tuple[int, int, int]]) -> AxesPositions:
    """Return M-RoPE positions of a prompt with images, each (first token, rows, columns)."""
    positions, at, following = np.zeros((3, num_tokens), np.int32), 0, 0
    for start, rows, columns in grids:
        positions[:, at:start] = following + np.arange(start - at)
        following += start - at
        stop = start + rows * columns
        positions[0, start:stop] = following
        positions[1, start:stop] = following + np.repeat(np.arange(rows), columns)
        positions[2, start:stop] = following + np.tile(np.arange(columns), rows)
        following += max(rows, columns)
        at = stop
    positions[:, at:] = following + np.arange(num_tokens - at)
    return AxesPositions(positions, following - at)


@dataclass(frozen=True)
class Golden:
    """Greedy output of mlx-vlm: tokens, and the logarithms of their probabilities over the vocabulary."""

    token_ids: list[int]
    logprobs: np.ndarray  # [T, vocab_size]


def golden(tiny: TinyVision, prompt: VisionPrompt, num_tokens: int, *, is_published: bool = True) -> Golden:
    """Return the greedy output of mlx-vlm's own generation.

    Args:
        is_published: True for the published attention masks, False for mlx-vlm's masks. Used only if the tokens of
            images attend to each other.
    """
    from mlx_vlm.generate import generate_step

    inputs = {name: mx.array(array) for name, array in prompt.inputs.items()}
    pixels = inputs.pop("pixel_values", None)
    for name in ("_position_ids", "_rope_deltas"):  # left over from an earlier prompt
        if hasattr(tiny.reference.language_model, name):
            setattr(tiny.reference.language_model, name, None)
    input_ids = mx.array([prompt.token_ids])
    images = () if prompt.images is None else prompt.images.images
    bidirectional_layers = bool(tiny.encoder.bidirectional_layers)
    mask = mx.ones_like(input_ids) if bidirectional_layers else None
    masks: Any = nullcontext()
    if bidirectional_layers and is_published:
        masks = published_masks(tiny.reference.language_model, images)
    elif bidirectional_layers:
        inputs["mm_token_type_ids"] = (input_ids == IMAGE_TOKEN).astype(mx.int32)
    tokens, logprobs = [], []
    with masks:
        steps = generate_step(input_ids, tiny.reference, pixels, mask, max_tokens=num_tokens, temperature=0.0, **inputs)
        for token, of_token in steps:
            tokens.append(int(token))
            logprobs.append(np.array(of_token.astype(mx.float32)).reshape(-1))
            if len(tokens) == num_tokens:
                break
    found = np.stack(logprobs)
    return Golden(tokens, found - np.log(np.exp(found).sum(-1, keepdims=True)))


def make_engine(tiny: TinyVision, **options: object) -> SteppedEngine:
    """Return an engine on a tiny model. Takes the options of :func:`tests.support.demo.engine_for`."""
    sizes = {"budget": 64, "block_size": 8, "num_blocks": 128, "max_num_seqs": 8, "vocab_size": 256}
    return engine_for(tiny.paged, tiny_tokenizer(), **(sizes | options))  # type: ignore[arg-type]


def prepared(engine: SteppedEngine, prompt: VisionPrompt, num_tokens: int) -> PreparedRequest:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=3)
    return engine.preparer.prepare(prompt.token_ids, params, images=prompt.images)


def run(
    engine: SteppedEngine, prompts: Sequence[VisionPrompt], num_tokens: int, *, stagger: int = 0
) -> list[RequestOutput]:
    """Run prompts, each ``stagger`` steps after the previous one. Return the whole output of each."""
    outputs: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(prompts))}
    step, arrived = 0, 0
    while arrived < len(prompts) or engine.has_requests:
        while arrived < len(prompts) and step >= stagger * arrived:
            engine.add_request(str(arrived), prepared(engine, prompts[arrived], num_tokens))
            arrived += 1
        for output in engine.step():
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
        engine.scheduler.images.check_integrity(engine.scheduler.running)
        step += 1
        assert step < 5000
    return [merged(parts) for parts in outputs.values()]


def merged(parts: list[RequestOutput]) -> RequestOutput:
    whole = RequestOutput(parts[0].request_id, num_cached_tokens=parts[0].num_cached_tokens, logprobs=[])
    for part in parts:
        whole.token_ids += part.token_ids
        whole.logprobs += part.logprobs or []
    return whole


def gap(output: RequestOutput, expected: Golden) -> float:
    """Return the largest absolute difference between log probabilities of ``output`` and of ``expected``.

    Sampled and alternative tokens are compared. The result is infinite if the outputs have different tokens.
    """
    assert output.logprobs is not None and len(output.token_ids) == len(output.logprobs)
    if output.token_ids != expected.token_ids:
        return float("inf")
    return max(
        abs(logprob - float(expected.logprobs[i, token_id]))
        for i, one in enumerate(output.logprobs)
        for token_id, logprob in ((one.token_id, one.logprob), *one.top)
    )


QWEN2_5_VL: dict[str, Any] = {
    **_QWEN_TEXT,
    **_QWEN_IDS,
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
    "vision_config": _QWEN_VISION | {"model_type": "qwen2_5_vl", "window_size": 16, "fullatt_block_indexes": [1]},
}
QWEN2_VL: dict[str, Any] = QWEN2_5_VL | {
    "model_type": "qwen2_vl",
    "vision_config": {
        "model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4,
        "mlp_ratio": 2.0, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    },
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "patch_size": 4,
    "num_hidden_layers": 2, "intermediate_size": 64, "image_size": 64, "rope_theta": 10000.0, "num_channels": 3,
}  # fmt: skip
MISTRAL3: dict[str, Any] = {
    "model_type": "mistral3", "text_config": LLAMA | {"model_type": "mistral", "head_dim": 16},
    "vision_config": _PIXTRAL, "image_token_index": IMAGE_TOKEN, "spatial_merge_size": 2, "vocab_size": VOCAB_SIZE,
}  # fmt: skip
PIXTRAL: dict[str, Any] = {key: value for key, value in MISTRAL3.items() if key != "spatial_merge_size"}
PIXTRAL["model_type"] = "pixtral"
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "text_config": LLAMA,
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 2, "patch_size": 4,
        "num_hidden_layers": 3, "intermediate_size": 64, "image_size": 16, "projection_dim": 32, "num_channels": 3,
    },
    "image_token_index": IMAGE_TOKEN,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip
LFM2_VL: dict[str, Any] = {
    "model_type": "lfm2-vl",
    "text_config": {
        "model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "norm_eps": 1e-5,
        "rope_theta": 10000.0, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "block_dim": 64,
        "block_ff_dim": 128, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "layer_types": ["conv", "conv", "full_attention", "conv"],
        "full_attn_idxs": [2], "tie_word_embeddings": True, "intermediate_size": 128,
    },
    "vision_config": {
        "model_type": "lfm2_vl", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 4, "num_patches": 64,
    },
    "downsample_factor": 2,
    "image_token_id": IMAGE_TOKEN,
    "projector_hidden_size": 48,
}  # fmt: skip
KIMI_VL: dict[str, Any] = {
    "model_type": "kimi_vl",
    "text_config": {
        "model_type": "deepseek_v3", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_shared_experts": 1, "n_routed_experts": 4, "routed_scaling_factor": 1.0, "kv_lora_rank": 16,
        "q_lora_rank": None, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_layer_freq": 1, "first_k_dense_replace": 1, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
    },
    "vision_config": {
        "model_type": "moonvit", "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "image_size": 32,
        "patch_size": 4, "num_channels": 3, "intermediate_size": 64, "init_pos_emb_height": 8,
        "init_pos_emb_width": 8, "spatial_merge_size": 2,
    },
    "media_placeholder_token_id": IMAGE_TOKEN,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip


def _with_experts(config: dict[str, Any]) -> dict[str, Any]:
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True,
    }  # fmt: skip
    name = f"{config['model_type']}_moe"
    text = config["text_config"] | experts | {"model_type": f"{name}_text"}
    return config | {
        "model_type": name,
        "text_config": text,
        "vision_config": config["vision_config"] | {"model_type": name},
    }


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "sliding_window": 12,  # less than an image
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "mm_tokens_per_image": 16,
        "max_position_embeddings": 512,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 32,
    },
    "image_token_index": IMAGE_TOKEN,
    "boi_token_index": 250,
    "pad_token_id": 255,  # mlx-vlm replaces the embedding of this token by zeros
    "mm_tokens_per_image": 16,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 12,  # less than an image
        "max_position_embeddings": 512,
        "use_double_wide_mlp": False,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 1e4, "rope_type": "default"},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "patch_size": 4,
        "pooling_kernel_size": 2, "default_output_length": 16, "position_embedding_size": 64,
    },
    "image_token_id": IMAGE_TOKEN,
    "audio_token_id": 254,
    "video_token_id": 253,
    "boi_token_id": 250,
    "eoi_token_id": 252,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip
# As the small models: causal, with an embedding for each layer, and layers that share K and V.
GEMMA4_SMALL: dict[str, Any] = GEMMA4 | {
    "text_config": GEMMA4["text_config"]
    | {
        "use_bidirectional_attention": None,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "use_double_wide_mlp": True,
    },
    "audio_config": {"hidden_size": 32},
}
CONFIGS = {
    "gemma3": GEMMA3, "gemma4": GEMMA4, "gemma4 small": GEMMA4_SMALL, "qwen3_vl": QWEN3_VL, "qwen3_5": QWEN3_5,
    "qwen3_vl_moe": _with_experts(QWEN3_VL), "qwen3_5_moe": _with_experts(QWEN3_5), "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_vl": QWEN2_VL, "mistral3": MISTRAL3, "pixtral": PIXTRAL, "llava": LLAVA, "lfm2-vl": LFM2_VL,
    "kimi_vl": KIMI_VL, **tiled_configs(IMAGE_TOKEN, VOCAB_SIZE),
}  # fmt: skip
