"""Loads tensors of a GGUF file as MLX arrays, dequantized or in MLX's quantized form.

``mx.load`` is not used: it returns wrong weights for Q4_K without an error, and converts the whole file at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as T

from metal_engine.checkpoints.gguf.header import GgufHeader, GgufTensor
from metal_engine.errors import ModelLoadError, short

# Blocks have 32 elements with one scale each. MLX's quantization with this group size is equivalent.
GROUP_SIZE = 32
# GGUF type -> bits per element and MLX's mode.
KEPT = {
    T.Q4_0: (4, "affine"),
    T.Q4_1: (4, "affine"),
    T.Q8_0: (8, "affine"),
    T.Q4_K: (4, "affine"),
    T.MXFP4: (4, "mxfp4"),
}
_FLOATS = (T.F32, T.F16, T.BF16)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in MLX's quantization. Each group of ``GROUP_SIZE`` elements along a row has a scale.

    In mode "affine", an element is scale * q + bias. In mode "mxfp4", q is a 4-bit float and the scale a power of 2.

    Attributes:
        weight: uint32 [..., rows, columns * bits / 32], with the first element in the lowest bits.
        scales: [..., rows, columns / GROUP_SIZE]; in mode "mxfp4" uint8, the exponent plus 127.
        biases: same shape as ``scales``; None in mode "mxfp4".
        bits: bits per element.
        mode: MLX's name of the quantization mode.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    mode: str = "affine"

    @property
    def arrays(self) -> dict[str, mx.array]:
        """Parameters of a quantized module, by name."""
        both = {"weight": self.weight, "scales": self.scales}
        return both if self.biases is None else {**both, "biases": self.biases}

    @property
    def settings(self) -> dict[str, Any]:
        """Quantization settings in the form of mlx-lm's configuration."""
        settings: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": self.bits}
        return settings if self.mode == "affine" else {**settings, "mode": self.mode}

    def with_rows(self, change: Callable[[mx.array], mx.array]) -> QuantizedTensor:
        """Return the tensor with its rows reordered by ``change``."""
        biases = None if self.biases is None else change(self.biases)
        return replace(self, weight=change(self.weight), scales=change(self.scales), biases=biases)


def load_tensor(header: GgufHeader, name: str, dtype: mx.Dtype, dequantize: bool) -> mx.array | QuantizedTensor:
    """Load one tensor with elements or scales of type ``dtype``.

    Without ``dequantize``, matrices of the types in ``KEPT`` become :class:`QuantizedTensor`. All other tensors are
    dequantized. In float32, the result equals ``gguf.quants.dequantize`` exactly.

    Raises:
        ModelLoadError: the tensor has an unsupported storage type.
    """
    tensor = header.tensors[name]
    if tensor.type in _FLOATS:
        return _float_tensor(header, tensor).astype(dtype)
    if _is_kept(tensor, dequantize):
        return _REPACK[tensor.type](header, tensor, dtype)
    if _REPACK.get(tensor.type) is _repack:
        # In float32 the scales are exact, and so are the sums below: q * d has at most 19 significant bits.
        packed = _repack(header, tensor, mx.float32)
        full = mx.dequantize(packed.weight, packed.scales, packed.biases, GROUP_SIZE, packed.bits)
        return full.reshape(tensor.shape).astype(dtype)
    try:
        array = quants.dequantize(header.rows(name), tensor.type)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"{header.path.name}: tensor {short(name)} has the type {tensor.type.name}, which cannot be read"
        ) from error
    return mx.array(array.reshape(tensor.shape)).astype(dtype)


def loaded_bytes(tensor: GgufTensor, float_bytes: int, dequantize: bool) -> int:
    """Return the memory in bytes that a tensor takes after :func:`load_tensor`.

    Args:
        float_bytes: size in bytes of an element of ``load_tensor``'s ``dtype``.
        dequantize: as in ``load_tensor``.
    """
    size = math.prod(tensor.shape)
    if not _is_kept(tensor, dequantize):
        return size * float_bytes
    bits, mode = KEPT[tensor.type]
    group = GROUP_SIZE * bits // 8 + (1 if mode == "mxfp4" else 2 * float_bytes)
    return size // GROUP_SIZE * group


def _is_kept(tensor: GgufTensor, dequantize: bool) -> bool:
    return not dequantize and tensor.type in KEPT and len(tensor.shape) > 1


def _float_tensor(header: GgufHeader, tensor: GgufTensor) -> mx.array:
    rows = header.rows(tensor.name)
    if tensor.type == T.BF16:  # NumPy lacks this type
        return mx.array(rows.view(np.uint16)).view(mx.bfloat16).reshape(tensor.shape)
    return mx.array(rows.view(np.float32 if tensor.type == T.F32 else np.float16)).reshape(tensor.shape)


def _repack(header: GgufHeader, tensor: GgufTensor, dtype: mx.Dtype) -> QuantizedTensor:
    """Rearrange ggml's blocks of one tensor as MLX's arrays.

    ggml, in bytes:  Q4_0 = d[2] qs[16]    Q4_1 = d[2] m[2] qs[16]    Q8_0 = d[2] qs[32]
    Elements:        d * (q - 8)           d * q + m                  d * q, q signed
    """
    blocks = _blocks(header, tensor)
    scales = _half_column(blocks, 0)
    if tensor.type == T.Q8_0:
        # Adding 128 to a signed number flips its top bit and makes it unsigned. The bias subtracts 128 again.
        packed = blocks[..., 2:] ^ np.uint8(0x80)
        biases = -128.0 * scales
    else:
        packed = _in_order(blocks[..., -16:])
        biases = _half_column(blocks, 2) if tensor.type == T.Q4_1 else -8.0 * scales
    return _affine(tensor, packed, scales, biases, dtype)


def _repack_q4_k(header: GgufHeader, tensor: GgufTensor, dtype: mx.Dtype) -> QuantizedTensor:
    """Rearrange the blocks of a Q4_K tensor, as :func:`_repack`. A block has eight groups.

    Q4_K = d[2] dmin[2] scales[12] qs[128]. The scales are eight s and eight m of 6 bits. Elements are d * s * q -
    dmin * m. Bytes 32j ... of qs hold group 2j in their low halves and group 2j + 1 in their high halves.
    """
    blocks = _blocks(header, tensor, 8 * GROUP_SIZE)
    s, m = quants.Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
    groups = (*tensor.shape[:-1], tensor.shape[-1] // GROUP_SIZE)
    scales = (_half_column(blocks, 0)[..., None] * s.reshape(*blocks.shape[:-1], 8)).reshape(groups)
    biases = (-_half_column(blocks, 2)[..., None] * m.reshape(*blocks.shape[:-1], 8)).reshape(groups)
    nibbles = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 1, 32)
    halves = np.concatenate([nibbles & np.uint8(0x0F), nibbles >> np.uint8(4)], axis=-2)
    return _affine(tensor, _pairs(halves).reshape(*groups, 16), scales, biases, dtype)


def _repack_mxfp4(header: GgufHeader, tensor: GgufTensor, dtype: mx.Dtype) -> QuantizedTensor:
    """Rearrange an MXFP4 tensor, as :func:`_repack`.

    MXFP4 = e[1] qs[16]. Elements are 2^(e - 127) * q. MLX has the same exponents and codes.
    """
    blocks = _blocks(header, tensor)
    exponents = np.ascontiguousarray(blocks[..., 0])
    return QuantizedTensor(_words(_in_order(blocks[..., 1:])), mx.array(exponents), None, *KEPT[T.MXFP4])


_REPACK = {T.Q4_0: _repack, T.Q4_1: _repack, T.Q8_0: _repack, T.Q4_K: _repack_q4_k, T.MXFP4: _repack_mxfp4}


def _affine(
    tensor: GgufTensor, packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, dtype: mx.Dtype
) -> QuantizedTensor:
    halves = (mx.array(scales).astype(dtype), mx.array(biases).astype(dtype))
    return QuantizedTensor(_words(packed), *halves, *KEPT[tensor.type])


def _blocks(header: GgufHeader, tensor: GgufTensor, size: int = GROUP_SIZE) -> np.ndarray:
    """Return a tensor's blocks, uint8 [..., rows, columns / size, bytes of a block]."""
    return header.rows(tensor.name).reshape(*tensor.shape[:-1], tensor.shape[-1] // size, -1)


def _words(packed: np.ndarray) -> mx.array:
    """Convert groups of bytes [..., groups, bytes] to rows of uint32."""
    return mx.array(np.ascontiguousarray(packed).reshape(*packed.shape[:-2], -1).view(np.uint32))


def _half_column(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Return the float16 at ``offset`` of each block, as float32 [..., rows, groups]."""
    halves = np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
    return halves[..., 0].astype(np.float32)


def _in_order(nibbles: np.ndarray) -> np.ndarray:
    """Rearrange the sixteen bytes of a 4-bit block in MLX's order.

    ggml stores element i in the low half of byte i and element 16 + i in the high half. MLX stores elements 2i and
    2i + 1 in byte i.
    """
    low, high = nibbles & np.uint8(0x0F), nibbles >> np.uint8(4)
    return np.concatenate([_pairs(low), _pairs(high)], axis=-1)


def _pairs(nibbles: np.ndarray) -> np.ndarray:
    """Pack sixteen half bytes into eight bytes, with the first of each pair in the low half."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
