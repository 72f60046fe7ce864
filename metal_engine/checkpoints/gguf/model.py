"""Loads GGUF checkpoints as mlx-lm models.

The metadata becomes the configuration of an equivalent Hugging Face checkpoint (``config.py``). The tensors become
mlx-lm's parameters, as described in ``architectures.py``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metal_engine.checkpoints.gguf.architectures import Architecture, find_architecture
from metal_engine.checkpoints.gguf.config import LONGROPE_FACTORS, ROPE_FREQS, gguf_config
from metal_engine.checkpoints.gguf.header import GgufHeader, header_of
from metal_engine.checkpoints.gguf.weights import QuantizedTensor, load_tensor
from metal_engine.errors import ModelLoadError, UnsupportedModelError, short

_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
# Tensor whose rows the converter interleaves -> setting with its number of heads.
_ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def load_gguf_model(
    file: str | Path | GgufHeader, dtype: mx.Dtype, dequantize: bool, divide: Callable[[nn.Module], None] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a GGUF file as a model of mlx-lm.

    Args:
        file: path of a GGUF file, or its header.
        dtype: float32, float16 or bfloat16: type of plain weights, and of the scales of weights that stay quantized.
        dequantize: True to dequantize also the types that MLX has (``weights.KEPT``). Other types are always
            dequantized.
        divide: reduces the model to one rank's shard and evaluates the shard's weights. Called while all weights are
            lazy. With None, each tensor is evaluated before the next tensor is loaded.

    Returns:
        The mlx-lm model with evaluated parameters, and its configuration.

    Raises:
        UnsupportedModelError: the architecture or this variant of the architecture is not supported.
        ModelLoadError: the file cannot be read, or its tensors do not match the architecture.
    """
    header = header_of(file)
    architecture = find_architecture(header)
    config = gguf_config(header)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"] and config["model_type"] == "gemma3_text":
        model.sanitize({})  # gemma3 removes its LM head here
    weights: dict[str, mx.array] = {}
    kept: dict[str, dict[str, Any]] = {}  # module path -> quantization settings
    for name, parameter, shape in _parameters(header, architecture, model):
        is_matrix = parameter.endswith(".weight") and len(shape) > 1
        loaded = _load(header, architecture, config, name, dtype, dequantize or not is_matrix)
        if isinstance(loaded, QuantizedTensor):
            kept[parameter.removesuffix(".weight")] = loaded.settings
            weights |= {parameter.removesuffix("weight") + part: array for part, array in loaded.arrays.items()}
        else:
            weights[parameter] = loaded.reshape(shape)
        if divide is None:
            # Evaluated now, to free the memory of the source arrays before the next tensor.
            mx.eval(loaded.arrays if isinstance(loaded, QuantizedTensor) else weights[parameter])
    if kept:
        config["quantization"] = kept
        nn.quantize(model, class_predicate=lambda path, _: kept.get(path, False))
    model.eval()
    model.load_weights(list(weights.items()))
    if ROPE_FREQS in header.tensors:
        _set_rope_factors(header, config, model)
    if divide is not None:
        weights.clear()
        divide(model)
    mx.eval(model.parameters())
    return model, config


def _parameters(
    header: GgufHeader, architecture: Architecture, model: nn.Module
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Return an iterator over each tensor's name, its parameter's name and the parameter's shape.

    Checks all tensors before it returns. RoPE tensors, which are no parameters, are left out.

    Raises:
        UnsupportedModelError: the model has no parameter for a tensor.
        ModelLoadError: a tensor is missing, or its shape differs from the model's.
    """
    parameters = dict(tree_flatten(model.parameters()))
    expected = {path: array.shape for path, array in parameters.items()}
    found: dict[str, str] = {}
    for name, tensor in header.tensors.items():
        if name in _rope_tensors(architecture):
            continue
        parameter = _parameter_name(header, architecture, name)
        if parameter not in expected:
            raise UnsupportedModelError(
                f"{header.path.name}: {header.architecture} has no place for tensor {short(name)}"
            )
        shape = expected[parameter]
        # Earlier versions of the converter dropped dimensions of 1.
        if [n for n in tensor.shape if n > 1] != [n for n in shape if n > 1]:
            raise ModelLoadError(
                f"{header.path.name}: tensor {short(name)} is {list(tensor.shape)}, "
                f"but its metadata imply {list(shape)}"
            )
        found[parameter] = name
    missing = [_tensor_name(architecture, parameter) for parameter in expected if parameter not in found]
    if missing:
        others = f" and {len(missing) - 1} other tensors" if len(missing) > 1 else ""
        raise ModelLoadError(f"{header.path.name} is not a complete {header.architecture}: no {missing[0]}{others}")
    return iter([(name, parameter, expected[parameter]) for parameter, name in found.items()])


def _rope_tensors(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the tensors with RoPE factors. These tensors are not parameters of the model."""
    if "longrope" in architecture.rope_scaling:
        return tuple(LONGROPE_FACTORS.values())
    return (ROPE_FREQS,) if architecture.model_type == "llama" else ()


def _parameter_name(header: GgufHeader, architecture: Architecture, name: str) -> str | None:
    """Map ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; None for an unknown tensor."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    whole = architecture.modules.get(f"{match['module']}.{match['kind']}")
    if whole is not None:
        return layer + whole
    module = architecture.modules.get(match["module"])
    return None if module is None else f"{layer}{module}.{match['kind']}"


def _tensor_name(architecture: Architecture, parameter: str) -> str:
    """Map the name of a parameter to the name of its tensor."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", parameter)
    prefix, rest = (f"blk.{match[1]}.", match[2]) if match else ("", parameter)
    for tensor, module in architecture.modules.items():
        if rest == module:
            return prefix + tensor
        if rest.removesuffix(".weight").removesuffix(".bias") == module:
            return f"{prefix}{tensor}{rest.removeprefix(module)}"
    return parameter


def _load(
    header: GgufHeader, architecture: Architecture, config: dict[str, Any], name: str, dtype: mx.Dtype, dequantize: bool
) -> mx.array | QuantizedTensor:
    """Load a tensor in the form that mlx-lm's module needs.

    Subtracts :attr:`Architecture.norm_offset` from norms, and reorders interleaved rows that mlx-lm cannot rotate.
    """
    module = name.split(".")[-2]
    if architecture.norm_offset and module.endswith("norm"):
        # Subtracted in float32: the difference is the published weight in full precision.
        weight = load_tensor(header, name, mx.float32, dequantize=True)
        assert isinstance(weight, mx.array)
        return (weight - architecture.norm_offset).astype(dtype)
    loaded = load_tensor(header, name, dtype, dequantize)
    if architecture.interleaved and not architecture.rope_traditional and module in _ROTATED:
        num_heads = config[_ROTATED[module]]
        if isinstance(loaded, QuantizedTensor):
            return loaded.with_rows(lambda rows: _halves(rows, num_heads))
        return _halves(loaded, num_heads)
    return loaded


def _halves(rows: mx.array, num_heads: int) -> mx.array:
    """Convert interleaved rows to Hugging Face's order: in each head, first the even rows, then the odd rows.

    Args:
        rows: rows of all heads, [num_heads * head_dim, ...].
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _set_rope_factors(header: GgufHeader, config: dict[str, Any], model: nn.Module) -> None:
    factors = load_tensor(header, ROPE_FREQS, mx.float32, dequantize=True)
    assert isinstance(factors, mx.array)
    for layer in model.layers:
        layer.self_attn.rope = _FactorRoPE(config, factors)


class _FactorRoPE(nn.Module):
    """RoPE that divides each frequency by its own factor, as in Llama 3's GGUF files.

    Args:
        config: configuration with the base, the head size and the pairing of dimensions.
        factors: factors of the frequencies, float32 [head_dim / 2].
    """

    def __init__(self, config: dict[str, Any], factors: mx.array) -> None:
        super().__init__()
        self.dims: int = config["head_dim"]
        self.traditional: bool = config["rope_traditional"]
        # mx.fast.rope takes reciprocal frequencies. The underscore excludes them from the parameters.
        self._freqs = factors * config["rope_theta"] ** (mx.arange(0, self.dims, 2) / self.dims)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )
