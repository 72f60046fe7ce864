"""What a layer keeps of the requests it serves, by name, shape and type: known before any of it is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from metal_engine.errors import ConfigError


@dataclass(frozen=True)
class ArraySpec:
    """One row of an array: what is kept of one token, or of one request."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.size


class StateSpec:
    """What one layer keeps. A kind of state overrides what it has.

    Attributes:
        dtype: type in which the layer computes.
    """

    dtype: mx.Dtype

    @property
    def token_arrays(self) -> Mapping[str, ArraySpec]:
        """By name, what has a row for each token: in blocks, found through block tables."""
        return {}

    @property
    def request_arrays(self) -> Mapping[str, ArraySpec]:
        """By name, what has a row for each request: as recurrent layers keep it."""
        return {}

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the layer keeps of each token."""
        return sum(array.nbytes for array in self.token_arrays.values())

    @property
    def bytes_per_request(self) -> int:
        """Bytes that the layer keeps of each request, however long it is."""
        return sum(array.nbytes for array in self.request_arrays.values())


@dataclass(frozen=True)
class KVSpec(StateSpec):
    """Ordinary attention: a key and a value for each KV head of each token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: mx.Dtype

    @property
    def token_arrays(self) -> Mapping[str, ArraySpec]:
        return {
            "keys": ArraySpec((self.num_kv_heads, self.head_dim), self.dtype),
            "values": ArraySpec((self.num_kv_heads, self.v_head_dim), self.dtype),
        }

    @property
    def latent_dim(self) -> None:
        """Keys are no latents."""

    def __str__(self) -> str:
        if self.head_dim != self.v_head_dim:
            return f"head_dim {self.head_dim} of K, {self.v_head_dim} of V"
        return f"head_dim {self.head_dim}"


@dataclass(frozen=True)
class LatentSpec(StateSpec):
    """Multi-head latent attention, as mlx-lm runs it on one token: one KV head, whose key is a latent vector of
    ``latent_dim`` numbers followed by a position part of ``rope_dim``. The latent is the value, too."""

    latent_dim: int
    rope_dim: int
    dtype: mx.Dtype

    @property
    def token_arrays(self) -> Mapping[str, ArraySpec]:
        return {"keys": ArraySpec((1, self.head_dim), self.dtype)}

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.latent_dim + self.rope_dim

    @property
    def v_head_dim(self) -> int:
        """Numbers of a value as it is read: all of the key."""
        return self.head_dim

    def __str__(self) -> str:
        return f"latent {self.latent_dim} + {self.rope_dim}"


# Bits of a number, by the value of --kv-cache-dtype.
_BITS = {"int8": 8, "int4": 4}
# Numbers that share a scale and a bias, best first: of those that mx.quantize can.
_GROUP_SIZES = (64, 32)


@dataclass(frozen=True)
class QuantizedKVSpec(StateSpec):
    """Keys and values, or latents, kept as integers of a few bits: for each group of them a scale and a bias.

    What :func:`mlx.core.quantize` makes of a row: ``keys`` uint32 [num_kv_heads, head_dim * bits / 32], and
    ``key_scales`` and ``key_biases`` [num_kv_heads, head_dim / group_size]; so of ``values``, if there are any.

    Attributes:
        full: what would be kept unquantized.
        bits: of a number.
        group_size: numbers of a head that share a scale and a bias.
    """

    full: KVSpec | LatentSpec
    bits: int
    group_size: int

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        """Type in which the layer computes; also of scales and biases."""
        return self.full.dtype

    @property
    def num_kv_heads(self) -> int:
        return self.full.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.full.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.full.v_head_dim

    @property
    def latent_dim(self) -> int | None:
        return self.full.latent_dim

    @property
    def token_arrays(self) -> Mapping[str, ArraySpec]:
        arrays = {}
        for name, array in self.full.token_arrays.items():
            heads, dim = array.shape
            packed, scales, biases = quantized_names(name)
            arrays[packed] = ArraySpec((heads, dim * self.bits // 32), mx.uint32)
            arrays[scales] = arrays[biases] = ArraySpec((heads, dim // self.group_size), self.dtype)
        return arrays

    def __str__(self) -> str:
        return f"int{self.bits} in groups of {self.group_size}, {self.full}"


AttentionSpec = KVSpec | LatentSpec | QuantizedKVSpec
"""What attention reads: it has ``num_kv_heads``, ``head_dim``, ``v_head_dim``; ``latent_dim``, or None."""


def quantized_names(name: str) -> tuple[str, str, str]:
    """Names of the arrays that stand for ``keys`` or ``values``: of the integers, the scales and the biases."""
    one = name.removesuffix("s")
    return name, f"{one}_scales", f"{one}_biases"


def unquantized(spec: StateSpec) -> StateSpec:
    """What a layer would keep if its keys and values were not quantized."""
    return spec.full if isinstance(spec, QuantizedKVSpec) else spec


def kv_cache_spec(spec: StateSpec, kv_cache_dtype: str) -> StateSpec:
    """What a layer keeps with ``--kv-cache-dtype``: quantized, but for states that are not KV.

    Raises:
        ConfigError: no group of numbers divides its heads.
    """
    bits = _BITS.get(kv_cache_dtype)
    if bits is None or not isinstance(spec, KVSpec | LatentSpec):
        return spec
    for group_size in _GROUP_SIZES:
        if spec.head_dim % group_size == spec.v_head_dim % group_size == 0:
            return QuantizedKVSpec(spec, bits, group_size)
    raise ConfigError(
        "--kv-cache-dtype",
        f"{kv_cache_dtype} quantizes groups of {' or '.join(map(str, _GROUP_SIZES))} numbers, which do not divide "
        f"heads of this model ({spec}); choose auto",
    )


@dataclass(frozen=True)
class RecurrentSpec(StateSpec):
    """A layer that carries a state from token to token: some arrays, of fixed size, for each request.

    Attributes:
        entries: what mlx-lm's cache of the layer keeps, in its order, without the batch axis.
    """

    entries: tuple[ArraySpec, ...]

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.entries[0].dtype

    @property
    def request_arrays(self) -> Mapping[str, ArraySpec]:
        return {str(index): entry for index, entry in enumerate(self.entries)}
