"""What a layer keeps of the requests it serves, by name, shape and type: known before any of it is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import mlx.core as mx


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


@dataclass(frozen=True)
class LatentSpec(StateSpec):
    """Multi-head latent attention, as mlx-lm runs it on one token: one KV head, whose key is a latent vector of
    ``latent_dim`` numbers followed by a position part of ``rope_dim``. The latent is the value, too."""

    latent_dim: int
    rope_dim: int
    dtype: mx.Dtype

    @property
    def token_arrays(self) -> Mapping[str, ArraySpec]:
        return {"keys": ArraySpec((1, self.latent_dim + self.rope_dim), self.dtype)}


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
