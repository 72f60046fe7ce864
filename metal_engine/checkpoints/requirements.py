"""Computes the size, dtype and memory need of a checkpoint from its headers, and checks that the weights fit."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metal_engine.checkpoints.draft_heads.names import FP8_SCALES, head_tensors
from metal_engine.checkpoints.gguf.config import default_dtype
from metal_engine.checkpoints.gguf.header import GgufHeader
from metal_engine.checkpoints.gguf.weights import loaded_bytes
from metal_engine.checkpoints.image_encoders import image_refusal
from metal_engine.checkpoints.metadata import StoredTensor, check_num_layers, text_tensors, vision_tensors, weight_bytes
from metal_engine.checkpoints.shared_indexes import check_indexes
from metal_engine.errors import ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.settings.fields import format_size

_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits per weight in mlx-lm's quantizations. A 16-bit scale and bias per 64 weights add half a bit.
_QUANTIZED_BITS = (8, 6, 5, 4, 3)
_SCALE_BITS = 0.5
# Matches the 7 in "model.layers.3.mlp.experts.7.up_proj.weight".
_LAST_OF_SEVERAL_NUMBERS = re.compile(r"\.\d+\.(?:.*\.)?(\d+)\.")
# Largest fraction of the model's memory for weights that leaves enough for the KV cache and a step.
_MAX_WEIGHT_FRACTION = 0.85


@dataclass(frozen=True)
class CheckpointRequirements:
    """Requirements of a checkpoint, from its configuration and the headers of its weight files.

    Attributes:
        config: content of ``config.json``, or its equivalent for a GGUF file.
        weight_bytes: size of the weights in memory, in bytes.
        num_params: number of parameters, regardless of how they are stored.
        dtype: type in which the model will compute: float32, float16 or bfloat16.
        reading_bytes: additional memory in bytes while the weights are read, to convert them or to stack experts.
    """

    config: dict[str, Any]
    weight_bytes: int
    num_params: int
    dtype: str
    reading_bytes: int = 0


# Raises an error for a checkpoint that cannot be served, judging by its requirements.
Check = Callable[[CheckpointRequirements], None]


def safetensors_requirements(
    config: dict[str, Any], tensors: Sequence[StoredTensor], args: EngineArgs, device: DeviceInfo
) -> CheckpointRequirements:
    """Return the requirements of a checkpoint in safetensors files.

    Raises:
        ModelLoadError: the configuration and the tensors do not match.
        UnsupportedModelError: layers share the keys that an index selects.
    """
    check_num_layers(config, len(tensors))
    check_indexes(args.model, config, (tensor.name for tensor in tensors))
    tensors, encoder_tensors = text_tensors(tensors), vision_tensors(tensors)
    stored = Counter(_FLOAT_TYPES[tensor.dtype] for tensor in tensors if tensor.dtype in _FLOAT_TYPES)
    dtype = _dtype(args, device, stored.most_common(1)[0][0] if stored else "float16")
    float_bytes = _DTYPE_BYTES[dtype] if device.kind == "cpu" else None
    num_params = weight_bytes(tensors, config, 1)
    if image_refusal(config, args) is None:
        tensors = [*tensors, *encoder_tensors]
    num_bytes = weight_bytes(tensors, config, float_bytes)
    return CheckpointRequirements(config, num_bytes, num_params, dtype, _reading_bytes(tensors, num_bytes))


def head_bytes(tensors: Sequence[StoredTensor], requirements: CheckpointRequirements, device: DeviceInfo) -> int:
    """Return the memory for the weights of the draft head among some tensors, in bytes; 0 without a usable head.

    FP8 weights count with the size that they have after their conversion to the model's type.

    Args:
        tensors: tensors of the checkpoint or, if there are files with only the head, the tensors of these files.
        requirements: requirements of the model.
    """
    float_bytes = _DTYPE_BYTES[requirements.dtype] if device.kind == "cpu" else None
    own = head_tensors(list(tensors))
    fp8 = [tensor for tensor in own if tensor.dtype == "F8_E4M3"]
    others = [tensor for tensor in own if tensor.dtype != "F8_E4M3" and not tensor.name.endswith(FP8_SCALES)]
    num_fp8_bytes = sum(tensor.size for tensor in fp8) * _DTYPE_BYTES[requirements.dtype]
    return weight_bytes(others, requirements.config, float_bytes) + num_fp8_bytes


def _reading_bytes(tensors: Sequence[StoredTensor], num_bytes: int) -> int:
    """Return the additional memory for reading the weights, in bytes.

    If weights are converted, all stored tensors stay in memory until every tensor is converted. If the conversion
    dequantizes tensors, each of them also exists briefly in two forms.

    Weights that keep their stored form need no additional memory, except experts that are stored separately: the
    experts of one matrix stay in memory until they are stacked. Matrices are stacked one by one.
    """
    stored = sum(tensor.nbytes for tensor in tensors)
    if stored == num_bytes:
        return _largest_stack_bytes(tensors)
    is_quantized = any(tensor.name.endswith(".scales") for tensor in tensors)
    return stored + (num_bytes if is_quantized else 0)


def _largest_stack_bytes(tensors: Sequence[StoredTensor]) -> int:
    """Return the size of the largest group of tensors whose names differ only in the last number, such as experts."""
    stacks: Counter[tuple[str, str]] = Counter()
    for tensor in tensors:
        if number := _LAST_OF_SEVERAL_NUMBERS.search(tensor.name):
            stacks[tensor.name[: number.start(1)], tensor.name[number.end(1) :]] += tensor.nbytes
    return max(stacks.values(), default=0)


def requirements_by_size(
    config: dict[str, Any], stored: int, args: EngineArgs, device: DeviceInfo
) -> CheckpointRequirements:
    """Estimate the requirements of a checkpoint from its size and the storage type in its configuration.

    This is only a rough estimate. Use it to refuse a model only if ``weight_bytes`` far exceeds the memory.

    Args:
        config: content of ``config.json``.
        stored: size of the weight files in bytes.
    """
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    bits = quantization.get("bits")
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    plain = 8.0 * _DTYPE_BYTES.get(named, 2)
    per_weight = bits + _SCALE_BITS if isinstance(bits, int) and 1 <= bits <= 16 else plain
    dtype = _dtype(args, device, named if named in _DTYPE_BYTES else "float16")
    num_params = int(stored * 8 / per_weight)
    in_memory = num_params * _DTYPE_BYTES[dtype] if device.kind == "cpu" else stored
    return CheckpointRequirements(config, in_memory, num_params, dtype)


def gguf_requirements(
    header: GgufHeader, config: dict[str, Any], args: EngineArgs, device: DeviceInfo
) -> CheckpointRequirements:
    """Return the requirements of a GGUF file.

    On a CPU, all weights are dequantized. On a GPU, only weights of types for which MLX has no kernels are dequantized.

    Args:
        config: result of :func:`gguf_config` for ``header``.
    """
    dtype = _dtype(args, device, default_dtype(header))
    dequantize = device.kind == "cpu"
    sizes = [loaded_bytes(tensor, _DTYPE_BYTES[dtype], dequantize) for tensor in header.tensors.values()]
    num_params = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    # Tensors are converted one by one, so at most two copies of the largest tensor exist.
    return CheckpointRequirements(config, sum(sizes), num_params, dtype, 2 * max(sizes, default=0))


def _dtype(args: EngineArgs, device: DeviceInfo, stored: str) -> str:
    if args.dtype != "auto":
        return args.dtype
    return "float32" if device.kind == "cpu" else stored


def memory_for_model(args: EngineArgs, device: DeviceInfo) -> int:
    """Return the memory in bytes that a model may take on one rank, with its weights, KV cache and steps."""
    return int(device.memory_bytes * (1.0 if device.kind == "cpu" else args.gpu_memory_utilization))


def check_memory(requirements: CheckpointRequirements, args: EngineArgs, device: DeviceInfo) -> None:
    """Refuse weights that cannot fit, before they are downloaded or loaded.

    Raises:
        ModelLoadError: the weights alone exceed the available memory. The message suggests a size that fits.
    """
    available = memory_for_model(args, device)
    if requirements.weight_bytes // args.num_ranks <= available:
        return
    needs = f"not enough memory for {args.model}: its weights take {format_size(requirements.weight_bytes)}"
    if args.num_ranks > 1:
        raise ModelLoadError(
            f"{needs}, and each of {args.num_ranks} ranks has {format_size(available)} for its shard; use more "
            "machines or a smaller model"
        )
    if device.kind == "cpu":
        has = f"{format_size(device.memory_bytes)} free"
        advice = (
            f"about {_count(available * _MAX_WEIGHT_FRACTION / _DTYPE_BYTES[requirements.dtype])} parameters would fit "
            f"({requirements.dtype} on a CPU): use a smaller model"
        )
        if requirements.dtype == "float32":
            advice += ", or --dtype bfloat16 for half the size (slow on a CPU; not for models with experts)"
    else:
        has = f"{format_size(device.memory_bytes)}, {args.gpu_memory_utilization:.0%} of it for a model"
        advice = f"{_smaller_version(requirements, available)}, or raise --gpu-memory-utilization"
    raise ModelLoadError(f"{needs}, and this machine has {has}; {advice}")


def _smaller_version(requirements: CheckpointRequirements, available: int) -> str:
    """Return advice for an error message: the quantization with the most bits that leaves memory for a KV cache."""
    for bits in _QUANTIZED_BITS:
        size = int(requirements.num_params * (bits + _SCALE_BITS) / 8)
        if size < requirements.weight_bytes and size <= available * _MAX_WEIGHT_FRACTION:
            return f"a {bits}-bit version of about {format_size(size)} would fit"
    fits = available * _MAX_WEIGHT_FRACTION * 8 / (4 + _SCALE_BITS)
    return f"no quantized version of it would fit: use a model with at most {_count(fits)} parameters in 4 bits"


def _count(number: float) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"
