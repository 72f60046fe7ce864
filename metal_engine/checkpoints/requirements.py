"""What is known of a checkpoint before its weights are read, and whether they fit into memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metal_engine.checkpoints.checkpoint import StoredTensor, check_num_layers, weight_bytes
from metal_engine.checkpoints.gguf.config import default_dtype
from metal_engine.checkpoints.gguf.header import GgufHeader
from metal_engine.checkpoints.gguf.weights import loaded_bytes
from metal_engine.errors import ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.settings.fields import format_size

_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits of a weight in mlx-lm's quantizations; a scale and a bias of 16 bits for each 64 weights add half a bit.
_QUANTIZED_BITS = (8, 6, 5, 4, 3)
_SCALE_BITS = 0.5
# In "model.layers.3.mlp.experts.7.up_proj.weight", 7.
_LAST_OF_SEVERAL_NUMBERS = re.compile(r"\.\d+\.(?:.*\.)?(\d+)\.")
# Of the memory for a model: what its weights may take if something is to be left for the KV cache and a step.
_SHARE_OF_WEIGHTS = 0.85


@dataclass(frozen=True)
class CheckpointRequirements:
    """What configuration and headers say.

    Attributes:
        config: as of ``config.json``, also for a GGUF file.
        weight_bytes: memory that the weights will take.
        num_params: weights, however they are stored.
        dtype: the type in which the model will compute: float32, float16 or bfloat16.
        reading_bytes: memory that reading them takes beside them at most, where they are not kept as they are stored.
    """

    config: dict[str, Any]
    weight_bytes: int
    num_params: int
    dtype: str
    reading_bytes: int = 0


# Refuses a checkpoint for what is known of it.
Check = Callable[[CheckpointRequirements], None]


def safetensors_facts(
    config: dict[str, Any], tensors: Sequence[StoredTensor], args: EngineArgs, device: DeviceInfo
) -> CheckpointRequirements:
    """The facts of a checkpoint in safetensors files.

    Raises:
        ModelLoadError: the configuration and the tensors do not belong together.
    """
    check_num_layers(config, len(tensors))
    stored = Counter(_FLOAT_TYPES[tensor.dtype] for tensor in tensors if tensor.dtype in _FLOAT_TYPES)
    dtype = _dtype(args, device, stored.most_common(1)[0][0] if stored else "float16")
    float_bytes = _DTYPE_BYTES[dtype] if device.kind == "cpu" else None
    num_params = weight_bytes(tensors, config, 1)
    num_bytes = weight_bytes(tensors, config, float_bytes)
    return CheckpointRequirements(config, num_bytes, num_params, dtype, _reading_bytes(tensors, num_bytes))


def _reading_bytes(tensors: Sequence[StoredTensor], num_bytes: int) -> int:
    """All that is stored is there until all is converted; what was quantized, for a while twice.

    What is kept as it is stored takes nothing beside, but for experts that are stored one by one: those of a layer's
    matrix are there until they are stacked, which is done with one matrix after the other.
    """
    stored = sum(tensor.nbytes for tensor in tensors)
    if stored == num_bytes:
        return _largest_stack_bytes(tensors)
    is_quantized = any(tensor.name.endswith(".scales") for tensor in tensors)
    return stored + (num_bytes if is_quantized else 0)


def _largest_stack_bytes(tensors: Sequence[StoredTensor]) -> int:
    """Bytes of the most tensors whose names differ in the last of several numbers alone, as experts' of a layer do."""
    stacks: Counter[tuple[str, str]] = Counter()
    for tensor in tensors:
        if number := _LAST_OF_SEVERAL_NUMBERS.search(tensor.name):
            stacks[tensor.name[: number.start(1)], tensor.name[number.end(1) :]] += tensor.nbytes
    return max(stacks.values(), default=0)


def facts_by_size(config: dict[str, Any], stored: int, args: EngineArgs, device: DeviceInfo) -> CheckpointRequirements:
    """The facts of a checkpoint of so many bytes, as far as its configuration says how they are stored.

    It is no more than an estimate; only where ``weight_bytes`` is far more than there is does it say something.
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


def gguf_facts(
    header: GgufHeader, config: dict[str, Any], args: EngineArgs, device: DeviceInfo
) -> CheckpointRequirements:
    """The facts of a GGUF file: on a CPU all of it is dequantized, elsewhere what MLX has no kernels for."""
    dtype = _dtype(args, device, default_dtype(header))
    dequantize = device.kind == "cpu"
    sizes = [loaded_bytes(tensor, _DTYPE_BYTES[dtype], dequantize) for tensor in header.tensors.values()]
    num_params = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    # One tensor after the other is converted: there are two of the largest at most.
    return CheckpointRequirements(config, sum(sizes), num_params, dtype, 2 * max(sizes, default=0))


def _dtype(args: EngineArgs, device: DeviceInfo, stored: str) -> str:
    if args.dtype != "auto":
        return args.dtype
    return "float32" if device.kind == "cpu" else stored


def memory_for_model(args: EngineArgs, device: DeviceInfo) -> int:
    """Bytes that a model may take, weights and all."""
    return int(device.memory_bytes * (1.0 if device.kind == "cpu" else args.gpu_memory_utilization))


def check_memory(facts: CheckpointRequirements, args: EngineArgs, device: DeviceInfo) -> None:
    """Refuses weights that cannot fit, before they are fetched or loaded.

    Raises:
        ModelLoadError: the weights alone take more than the process may use; the message says what would fit.
    """
    available = memory_for_model(args, device)
    if facts.weight_bytes // args.num_ranks <= available:
        return
    if args.num_ranks > 1:
        raise ModelLoadError(
            f"not enough memory for {args.model}: its weights take {format_size(facts.weight_bytes)}, and each of "
            f"{args.num_ranks} ranks has {format_size(available)} for its share; take more machines, or a smaller model"
        )
    if device.kind == "cpu":
        has = f"{format_size(device.memory_bytes)} free"
        advice = (
            f"about {_count(available * _SHARE_OF_WEIGHTS / _DTYPE_BYTES[facts.dtype])} parameters would fit "
            f"({facts.dtype} on a CPU): take a smaller model"
        )
        if facts.dtype == "float32":
            advice += ", or --dtype bfloat16 for half the size (slow on a CPU; not for models with experts)"
    else:
        has = f"{format_size(device.memory_bytes)}, {args.gpu_memory_utilization:.0%} of it for a model"
        advice = f"{_smaller_version(facts, available)}, or raise --gpu-memory-utilization"
    raise ModelLoadError(
        f"not enough memory for {args.model}: its weights take {format_size(facts.weight_bytes)}, and this machine has "
        f"{has}; {advice}"
    )


def _smaller_version(facts: CheckpointRequirements, available: int) -> str:
    """Names the quantization with the most bits that fits with some room for a KV cache."""
    for bits in _QUANTIZED_BITS:
        size = int(facts.num_params * (bits + _SCALE_BITS) / 8)
        if size < facts.weight_bytes and size <= available * _SHARE_OF_WEIGHTS:
            return f"a {bits}-bit version of about {format_size(size)} would fit"
    fits = available * _SHARE_OF_WEIGHTS * 8 / (4 + _SCALE_BITS)
    return f"no quantized version of it would fit: take a model of at most {_count(fits)} parameters in 4 bits"


def _count(number: float) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"
