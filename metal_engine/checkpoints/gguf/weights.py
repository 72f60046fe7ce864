"""Tensors of a GGUF file as MLX arrays, dequantized or in MLX's own quantized form.

``mx.load`` is not used: it silently gives wrong weights for Q4_K and converts the whole file at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as T

from metal_engine.checkpoints.gguf.header import GgufHeader, GgufTensor
from metal_engine.errors import ModelLoadError, short

# Blocks of 32 elements with one scale each: MLX's affine form with this group size says the same.
GROUP_SIZE = 32
KEPT_BITS = {T.Q4_0: 4, T.Q4_1: 4, T.Q8_0: 8}
_FLOATS = (T.F32, T.F16, T.BF16)


@dataclass(frozen=True)
class QuantizedTensor:
    """MLX's affine quantization: element = scale * q + bias, in groups of ``GROUP_SIZE`` along a row.

    Attributes:
        weight: uint32 [rows, columns * bits / 32], the first element in the lowest bits.
        scales: [rows, columns / GROUP_SIZE].
        biases: as ``scales``.
        bits: per element.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def load_tensor(header: GgufHeader, name: str, dtype: mx.Dtype, dequantize: bool) -> mx.array | QuantizedTensor:
    """Loads one tensor, with elements or scales of type ``dtype``.

    Without ``dequantize`` Q4_0, Q4_1 and Q8_0 matrices come as :class:`QuantizedTensor`; everything else is
    dequantized. In float32 the result equals ``gguf.quants.dequantize`` bit for bit.

    Raises:
        ModelLoadError: the tensor is stored in a type that cannot be read.
    """
    tensor = header.tensors[name]
    if tensor.type in _FLOATS:
        return _float_tensor(header, tensor).astype(dtype)
    if tensor.type in KEPT_BITS:
        # In float32 the scales, and so the sums below, are exact: q * d has at most 19 significant bits.
        packed = _repack(header, tensor, mx.float32 if dequantize else dtype)
        if not dequantize:
            return packed
        full = mx.dequantize(packed.weight, packed.scales, packed.biases, GROUP_SIZE, packed.bits)
        return full.reshape(tensor.shape).astype(dtype)
    try:
        array = quants.dequantize(header.rows(name), tensor.type)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"{header.path.name}: tensor {short(name)} has the type {tensor.type.name}, which cannot be read"
        ) from error
    return mx.array(array.reshape(tensor.shape)).astype(dtype)


def _float_tensor(header: GgufHeader, tensor: GgufTensor) -> mx.array:
    rows = header.rows(tensor.name)
    if tensor.type == T.BF16:  # NumPy has no such type
        return mx.array(rows.view(np.uint16)).view(mx.bfloat16).reshape(tensor.shape)
    return mx.array(rows.view(np.float32 if tensor.type == T.F32 else np.float16)).reshape(tensor.shape)


def _repack(header: GgufHeader, tensor: GgufTensor, dtype: mx.Dtype) -> QuantizedTensor:
    """Rearranges ggml's blocks of one matrix as MLX's arrays.

    ggml, in bytes:  Q4_0 = d[2] qs[16]    Q4_1 = d[2] m[2] qs[16]    Q8_0 = d[2] qs[32]
    Elements:        d * (q - 8)           d * q + m                  d * q, q signed
    A 4-bit block keeps element i in the low half of byte i and element 16 + i in the high half; MLX keeps
    elements 2i and 2i + 1 in byte i.
    """
    bits = KEPT_BITS[tensor.type]
    rows = header.rows(tensor.name)
    blocks = rows.reshape(rows.shape[0], tensor.shape[-1] // GROUP_SIZE, -1)  # [rows, groups, block_bytes]
    scales = _half_column(blocks, 0)
    if tensor.type == T.Q8_0:
        # Signed to unsigned is adding 128, that is flipping the top bit; the bias takes it back.
        packed = blocks[..., 2:] ^ np.uint8(0x80)
        biases = -128.0 * scales
    else:
        nibbles = blocks[..., -16:]
        low, high = nibbles & np.uint8(0x0F), nibbles >> np.uint8(4)
        packed = np.concatenate([_pairs(low), _pairs(high)], axis=-1)
        biases = _half_column(blocks, 2) if tensor.type == T.Q4_1 else -8.0 * scales
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(rows.shape[0], -1)
    return QuantizedTensor(mx.array(words), mx.array(scales).astype(dtype), mx.array(biases).astype(dtype), bits)


def _half_column(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at ``offset`` of each block, as float32 [rows, groups]."""
    halves = np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
    return halves[..., 0].astype(np.float32)


def _pairs(nibbles: np.ndarray) -> np.ndarray:
    """Sixteen half bytes as eight bytes, the first of each pair in the low half."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
