"""Tensors of a GGUF file as MLX arrays, dequantized or in MLX's own quantized form.

``mx.load`` is not used: it silently gives wrong weights for Q4_K and converts the whole file at once.
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

# Blocks of 32 elements with one scale each: MLX's forms with this group size say the same.
GROUP_SIZE = 32
# Bits of an element and MLX's mode.
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
    """MLX's quantization in groups of ``GROUP_SIZE`` along a row.

    An element is scale * q + bias in mode "affine"; in mode "mxfp4" q is a float of 4 bits and the scale a power of 2.

    Attributes:
        weight: uint32 [..., rows, columns * bits / 32], the first element in the lowest bits.
        scales: [..., rows, columns / GROUP_SIZE]; in mode "mxfp4" uint8, the exponent plus 127.
        biases: as ``scales``; None in mode "mxfp4".
        bits: per element.
        mode: MLX's name of the form.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    mode: str = "affine"

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The parameters of a quantized module, by name."""
        both = {"weight": self.weight, "scales": self.scales}
        return both if self.biases is None else {**both, "biases": self.biases}

    @property
    def settings(self) -> dict[str, Any]:
        """How mlx-lm's configuration says it."""
        settings: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": self.bits}
        return settings if self.mode == "affine" else {**settings, "mode": self.mode}

    def with_rows(self, change: Callable[[mx.array], mx.array]) -> QuantizedTensor:
        """The same after a change of the rows' order."""
        biases = None if self.biases is None else change(self.biases)
        return replace(self, weight=change(self.weight), scales=change(self.scales), biases=biases)


def load_tensor(header: GgufHeader, name: str, dtype: mx.Dtype, dequantize: bool) -> mx.array | QuantizedTensor:
    """Loads one tensor, with elements or scales of type ``dtype``.

    Without ``dequantize`` matrices of the types in ``KEPT`` come as :class:`QuantizedTensor`; everything else is
    dequantized. In float32 the result equals ``gguf.quants.dequantize`` bit for bit.

    Raises:
        ModelLoadError: the tensor is stored in a type that cannot be read.
    """
    tensor = header.tensors[name]
    if tensor.type in _FLOATS:
        return _float_tensor(header, tensor).astype(dtype)
    if _is_kept(tensor, dequantize):
        return _REPACK[tensor.type](header, tensor, dtype)
    if _REPACK.get(tensor.type) is _repack:
        # In float32 the scales, and so the sums below, are exact: q * d has at most 19 significant bits.
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
    """How much memory a tensor takes after :func:`load_tensor` with a type of so many bytes."""
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
    if tensor.type == T.BF16:  # NumPy has no such type
        return mx.array(rows.view(np.uint16)).view(mx.bfloat16).reshape(tensor.shape)
    return mx.array(rows.view(np.float32 if tensor.type == T.F32 else np.float16)).reshape(tensor.shape)


def _repack(header: GgufHeader, tensor: GgufTensor, dtype: mx.Dtype) -> QuantizedTensor:
    """Rearranges ggml's blocks of one tensor as MLX's arrays.

    ggml, in bytes:  Q4_0 = d[2] qs[16]    Q4_1 = d[2] m[2] qs[16]    Q8_0 = d[2] qs[32]
    Elements:        d * (q - 8)           d * q + m                  d * q, q signed
    """
    blocks = _blocks(header, tensor)
    scales = _half_column(blocks, 0)
    if tensor.type == T.Q8_0:
        # Signed to unsigned is adding 128, that is flipping the top bit; the bias takes it back.
        packed = blocks[..., 2:] ^ np.uint8(0x80)
        biases = -128.0 * scales
    else:
        packed = _in_order(blocks[..., -16:])
        biases = _half_column(blocks, 2) if tensor.type == T.Q4_1 else -8.0 * scales
    return _affine(tensor, packed, scales, biases, dtype)


def _repack_q4_k(header: GgufHeader, tensor: GgufTensor, dtype: mx.Dtype) -> QuantizedTensor:
    """As :func:`_repack`, for blocks of eight groups.

    Q4_K = d[2] dmin[2] scales[12] qs[128]; the scales are eight s and eight m of 6 bits, elements d * s * q - dmin * m.
    Bytes 32j ... of qs hold group 2j in their low halves and group 2j + 1 in their high halves.
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
    """As :func:`_repack`: MXFP4 = e[1] qs[16], elements 2^(e - 127) * q; MLX has the same exponents and codes."""
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
    """uint8 [..., rows, columns / size, bytes of a block]."""
    return header.rows(tensor.name).reshape(*tensor.shape[:-1], tensor.shape[-1] // size, -1)


def _words(packed: np.ndarray) -> mx.array:
    """Groups of bytes [..., groups, bytes] as rows of uint32."""
    return mx.array(np.ascontiguousarray(packed).reshape(*packed.shape[:-2], -1).view(np.uint32))


def _half_column(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at ``offset`` of each block, as float32 [..., rows, groups]."""
    halves = np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
    return halves[..., 0].astype(np.float32)


def _in_order(nibbles: np.ndarray) -> np.ndarray:
    """Sixteen bytes of a 4-bit block as MLX has them.

    ggml keeps element i in the low half of byte i and element 16 + i in the high half; MLX keeps elements 2i and
    2i + 1 in byte i.
    """
    low, high = nibbles & np.uint8(0x0F), nibbles >> np.uint8(4)
    return np.concatenate([_pairs(low), _pairs(high)], axis=-1)


def _pairs(nibbles: np.ndarray) -> np.ndarray:
    """Sixteen half bytes as eight bytes, the first of each pair in the low half."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
