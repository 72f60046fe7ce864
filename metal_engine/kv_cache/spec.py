"""Specs of layer states: names, shapes and types of their arrays, known before allocation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from metal_engine.errors import ConfigError


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of one row of an array. A row holds the data of one token, or of one request."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.size


class StateSpec:
    """Arrays that one layer stores. Each kind of state overrides the properties that apply to it.

    Attributes:
        dtype: type in which the layer computes.
    """

    dtype: mx.Dtype

    @property
    def token_arrays(self) -> Mapping[str, ArraySpec]:
        """Return, by name, the arrays with a row for each token. Their rows are in blocks, found via block tables."""
        return {}

    @property
    def request_arrays(self) -> Mapping[str, ArraySpec]:
        """Return, by name, the arrays with a row for each request, as recurrent layers have them."""
        return {}

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes that the layer stores for each token."""
        return sum(array.nbytes for array in self.token_arrays.values())

    @property
    def bytes_per_request(self) -> int:
        """Return the bytes that the layer stores for each request, whatever the request's length."""
        return sum(array.nbytes for array in self.request_arrays.values())


@dataclass(frozen=True)
class KVSpec(StateSpec):
    """Ordinary attention: one key and one value per token and KV head."""

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
        """None: the keys are not latents."""

    def __str__(self) -> str:
        if self.head_dim != self.v_head_dim:
            return f"head_dim {self.head_dim} of K, {self.v_head_dim} of V"
        return f"head_dim {self.head_dim}"


@dataclass(frozen=True)
class LatentSpec(StateSpec):
    """Multi-head latent attention (MLA) as attention with one KV head, the form that mlx-lm uses for a single token.

    The key is a latent vector of ``latent_dim`` numbers, followed by a position part of ``rope_dim`` numbers. The
    latent is also the value, so values are not stored.
    """

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
        """Return the length of a key."""
        return self.latent_dim + self.rope_dim

    @property
    def v_head_dim(self) -> int:
        """Return the length of a value as backends read it. They read the whole key (``LatentState``)."""
        return self.head_dim

    def __str__(self) -> str:
        return f"latent {self.latent_dim} + {self.rope_dim}"


@dataclass(frozen=True)
class IndexSpec(StateSpec):
    """Keys of an index: one vector per token. The index selects the tokens to which its layer attends.

    Index keys are never quantized.
    """

    head_dim: int
    dtype: mx.Dtype

    @property
    def token_arrays(self) -> Mapping[str, ArraySpec]:
        return {"index_keys": ArraySpec((self.head_dim,), self.dtype)}


# --kv-cache-dtype -> bits per number.
_BITS = {"int8": 8, "int4": 4}
# Possible group sizes, best first. mx.quantize supports both.
_GROUP_SIZES = (64, 32)


@dataclass(frozen=True)
class QuantizedKVSpec(StateSpec):
    """Keys and values, or latents, stored as integers of a few bits, with a scale and a bias per group of numbers.

    :func:`mlx.core.quantize` turns a row of keys into ``keys``, uint32 [num_kv_heads, head_dim * bits / 32], and
    ``key_scales`` and ``key_biases``, each [num_kv_heads, head_dim / group_size]. Values, if the spec has them, are
    stored in the same form.

    Attributes:
        full: spec of the unquantized state.
        bits: bits per number.
        group_size: numbers of a head that share a scale and a bias.
    """

    full: KVSpec | LatentSpec
    bits: int
    group_size: int

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        """Type in which the layer computes, and type of the scales and biases."""
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
"""Spec that attention reads, with ``num_kv_heads``, ``head_dim``, ``v_head_dim`` and ``latent_dim`` (or None)."""


def quantized_names(name: str) -> tuple[str, str, str]:
    """Return the names of the arrays that replace ``keys`` or ``values``: integers, scales and biases."""
    one = name.removesuffix("s")
    return name, f"{one}_scales", f"{one}_biases"


def unquantized(spec: StateSpec) -> StateSpec:
    """Return the spec of a layer's state without quantization of keys and values."""
    return spec.full if isinstance(spec, QuantizedKVSpec) else spec


def kv_cache_spec(spec: StateSpec, kv_cache_dtype: str) -> StateSpec:
    """Return the spec of a layer's state under ``--kv-cache-dtype``. Only KV and latents are quantized.

    Raises:
        ConfigError: no supported group size divides the head sizes of keys and values.
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
        f"the heads of this model ({spec}); choose auto",
    )


@dataclass(frozen=True)
class OwnCachesSpec(StateSpec):
    """mlx-lm's own caches of all layers, held for each request. The pool allocates no arrays for these caches.

    Attributes:
        token_bytes: bytes by which a request's caches grow with each token. The growth of the largest layer counts
            twice, because a step that extends a cache by copying holds the old and the new cache for a moment.
        request_bytes: bytes of a request's caches that do not depend on its length.
    """

    dtype: mx.Dtype
    token_bytes: int
    request_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return self.token_bytes

    @property
    def bytes_per_request(self) -> int:
        return self.request_bytes


@dataclass(frozen=True)
class RecurrentSpec(StateSpec):
    """State of a layer that carries a state from token to token: a few arrays of fixed size for each request.

    Attributes:
        entries: shape (without the batch axis) and type of each entry of the layer's mlx-lm cache, in order.
    """

    entries: tuple[ArraySpec, ...]

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.entries[0].dtype

    @property
    def request_arrays(self) -> Mapping[str, ArraySpec]:
        return {str(index): entry for index, entry in enumerate(self.entries)}
