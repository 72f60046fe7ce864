"""Converts the metadata of a GGUF file to the configuration of an equivalent Hugging Face checkpoint."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from metal_engine.checkpoints.gguf.architectures import Architecture, find_architecture
from metal_engine.checkpoints.gguf.header import GgufHeader
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids
from metal_engine.errors import ModelLoadError, UnsupportedModelError, short

ROPE_FREQS = "rope_freqs.weight"
LONGROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Return the content of an equivalent ``config.json``, as mlx-lm reads it.

    Files of llama and similar architectures interleave the rows of q and k within each head: row 2i + j is Hugging
    Face's row j * head_dim / 2 + i. The reason is that llama.cpp rotates neighbours (2i, 2i + 1), while Hugging Face
    rotates halves (i, head_dim / 2 + i). With ``rope_traditional``, mlx-lm rotates neighbours too. The rows can then
    keep their order, because q . k is a sum over a head's dimensions in any order.

    Raises:
        UnsupportedModelError: the architecture or this variant of the architecture is not supported.
        ModelLoadError: a value or a tensor is missing, or the file has fewer tensors than layers.
    """
    architecture = find_architecture(header)
    if header.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(f"{header.path.name} is one part of a split GGUF: merge the parts first")
    num_heads, num_kv_heads, ffn_size = _check_sizes(header, architecture)
    return {
        "model_type": architecture.model_type,
        "hidden_size": header.require_value("embedding_length"),
        "num_hidden_layers": header.num_layers,
        "intermediate_size": ffn_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": header.head_dim,
        "rms_norm_eps": header.require_value("attention.layer_norm_rms_epsilon"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": header.require_value("context_length"),
        "rope_theta": header.rope_theta,
        "rope_scaling": _rope_scaling(header, architecture),
        "rope_traditional": architecture.rope_traditional,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": gguf_eos_token_ids(header),
        **architecture.settings(header),
    }


def interleaved_modules(config: dict[str, Any]) -> dict[str, int]:
    """Return the modules of each block whose rows stay interleaved, with their numbers of heads.

    E.g. ``{"q_proj": 32, "k_proj": 8}``; empty if no rows are interleaved.

    Args:
        config: result of :func:`gguf_config`.
    """
    if not config["rope_traditional"]:
        return {}
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


def default_dtype(header: GgufHeader) -> str:
    """Return the type of unquantized weights on a GPU if ``--dtype`` is not given: ``bfloat16`` or ``float16``.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """
    return "bfloat16" if find_architecture(header).needs_bfloat16 else "float16"


def _check_sizes(header: GgufHeader, architecture: Architecture) -> tuple[int, int, int]:
    """Check the sizes of modules. Return the numbers of heads and KV heads, and the MLP's inner size.

    Raises:
        UnsupportedModelError: mlx-lm's module does not support the sizes.
        ModelLoadError: the file is not a complete model.
    """
    arch = header.architecture
    num_heads = header.require_value("attention.head_count")
    num_kv_heads = header.value("attention.head_count_kv", num_heads)
    ffn_size = header.require_value("feed_forward_length")
    if any(isinstance(value, list) for value in (num_heads, num_kv_heads, ffn_size)):
        raise UnsupportedModelError(f"{header.path.name}: {arch} with layers of unequal sizes is not supported")
    if num_heads == 0:
        raise ModelLoadError(f"{header.path.name}: {arch}.attention.head_count is 0: not a valid model")
    head_dim = header.head_dim
    others = {header.value("attention.value_length", head_dim), header.value("rope.dimension_count_swa", head_dim)}
    rotated = header.value("rope.dimension_count", head_dim)
    if architecture.model_type != "phi3" or not 0 < rotated < head_dim:  # only phi3 has partial RoPE
        others.add(rotated)
    if not architecture.own_head_dim:
        others.add(header.require_value("embedding_length") // num_heads)
    if others != {head_dim}:
        raise UnsupportedModelError(
            f"{header.path.name}: {arch} with head size {head_dim} and value, RoPE or standard size "
            f"{sorted(others - {head_dim})[0]} is not supported"
        )
    if header.value("expert_weights_scale", 0.0) not in (0.0, 1.0):
        raise UnsupportedModelError(f"{header.path.name}: {arch} with scaled weights of experts is not supported")
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(f"{header.path.name} has no token_embd.weight: not a complete model")
    if header.num_layers > len(header.tensors):  # mlx-lm would create a module for each layer before reading weights
        raise ModelLoadError(
            f"{header.path.name} names {short(header.num_layers)} layers but has {len(header.tensors)} tensors"
        )
    return num_heads, num_kv_heads, ffn_size


def _rope_scaling(header: GgufHeader, architecture: Architecture) -> dict[str, Any] | None:
    """Return ``rope_scaling`` for mlx-lm; None without scaling.

    Factors per frequency (Llama 3) are in a tensor, which ``model.py`` reads.

    Raises:
        UnsupportedModelError: mlx-lm's module does not support the scaling.
        ModelLoadError: a value or a tensor is missing.
    """
    prefix = f"{header.architecture}.rope.scaling."
    values = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    kind = values.get("type", "none")
    if kind in ("none", "longrope") and "longrope" in architecture.rope_scaling:
        return _longrope(header, values)
    if kind == "none":
        return None
    if kind == "linear" and kind in architecture.rope_scaling:
        return {"type": "linear", "factor": header.require_value("rope.scaling.factor")}
    # Factors that multiply or replace the usual attention factor.
    attention = {values.get(key, 1.0) for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")}
    if (
        kind == "yarn"
        and kind in architecture.rope_scaling
        and attention == {1.0}
        and not values.get("yarn_log_multiplier", 0.0)
    ):
        return {
            "type": "yarn",
            "factor": header.require_value("rope.scaling.factor"),
            "original_max_position_embeddings": header.require_value("rope.scaling.original_context_length"),
            "beta_fast": values.get("yarn_beta_fast", 32.0),
            "beta_slow": values.get("yarn_beta_slow", 1.0),
        }
    raise UnsupportedModelError(
        f"{header.path.name}: {header.architecture} with RoPE scaling {short(kind)} is not supported as GGUF"
    )


def _longrope(header: GgufHeader, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return Phi-3's scaling, with factors per frequency from tensors; None if the file has no such tensors.

    mlx-lm uses the long factors at every length.
    """
    names = [name for name in LONGROPE_FACTORS.values() if name in header.tensors]
    if not names:
        return None
    count = header.value("rope.dimension_count", header.head_dim) // 2
    scaling: dict[str, Any] = {"type": "longrope"}
    for key, name in LONGROPE_FACTORS.items():
        if name not in header.tensors:
            raise ModelLoadError(f"{header.path.name} has {names[0]} but no {name}: not a complete model")
        tensor = header.tensors[name]
        if tensor.type != GGMLQuantizationType.F32 or tensor.shape != (count,):
            raise ModelLoadError(
                f"{header.path.name}: {name} is {tensor.type.name} {list(tensor.shape)}, not {count} F32 factors"
            )
        scaling[key] = header.rows(name)[0].view(np.float32).tolist()
    _check_longrope_attention(header, values)
    return scaling


def _check_longrope_attention(header: GgufHeader, values: dict[str, Any]) -> None:
    """Refuse a file whose attention factor differs from mlx-lm's.

    mlx-lm computes the factor from the context length and the original context length.

    Raises:
        UnsupportedModelError: the factors differ.
        ModelLoadError: the file has no original context length.
    """
    context, original = header.require_value("context_length"), values.get("original_context_length", 0)
    if original < 2:
        raise ModelLoadError(
            f"{header.path.name} has no {header.architecture}.rope.scaling.original_context_length, "
            "which its RoPE factors need"
        )
    expected = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
    if not math.isclose(values.get("attn_factor", expected), expected, rel_tol=1e-4):
        raise UnsupportedModelError(
            f"{header.path.name}: {header.architecture} with the attention factor {values['attn_factor']:.4g} "
            f"is not supported (its context lengths give {expected:.4g})"
        )
