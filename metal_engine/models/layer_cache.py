"""A layer's state in the form in which mlx-lm's models use a cache.

mlx-lm gives a layer's attention a cache and, with it, asks three things: ``offset`` for RoPE,
``update_and_fetch`` to store K and V, ``make_mask`` for what the queries may see. Attention itself comes
here through the function that ``seam`` puts in the place of mlx-lm's own. The state lives in ``kv_cache``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ConcatenateKVCache

from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.recurrent import RecurrentState
from metal_engine.kv_cache.spec import KVSpec, LatentSpec, StateSpec
from metal_engine.kv_cache.state import KVState, LayerState
from metal_engine.models.current_step import CurrentStep
from metal_engine.models.recurrent.state_cache import StateCache

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class AttentionMask:
    """What mlx-lm carries from ``make_mask`` to attention as ``mask``: the layer's window, in tokens."""

    window: int | None


@dataclass(slots=True)
class AttentionCall:
    """How a layer calls mlx-lm's attention function.

    Attributes:
        queries: [N, num_heads, 1, head_dim].
        keys: what ``update_and_fetch`` returned, perhaps transformed; ``values`` likewise.
        scale: of the scores.
        mask: what ``make_mask`` returned, perhaps transformed.
        sinks: [num_heads], see :class:`metal_engine.attention.backend.StepAttention`; ``softcap`` likewise.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: Any
    sinks: mx.array | None = None
    softcap: float | None = None


class AttentionOwner:
    """A cache that is asked when its layer calls mlx-lm's attention function."""

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        """Attention of a call, [N, num_heads, 1, v_head_dim]; ``original`` is what mlx-lm would have called."""
        raise NotImplementedError


class AttendingCache(AttentionOwner):
    """A cache that computes the attention of its layer, also where mlx-lm's layer would do that itself."""

    offset: Any

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store K and V, [N, num_kv_heads, 1, head_dim]; what stands for all that is stored now."""
        raise NotImplementedError


class OwnedKeys(mx.array):
    """Keys that remember the cache they are in: layers that reuse them may call attention without a cache."""

    def __init__(self, keys: mx.array, owner: AttentionOwner) -> None:
        super().__init__(keys)
        self.owner = owner


class LayerCache(AttendingCache):
    """Ordinary attention over a layer's state.

    Attributes:
        state: where keys and values are kept.
        num_writes: how often the layer has stored K and V, for the check at load; ``num_reads`` how often it attended.
    """

    def __init__(self, step: CurrentStep, state: KVState) -> None:
        self._step = step
        self.state = state
        self.num_writes = 0
        self.num_reads = 0

    @property
    def keys(self) -> mx.array:
        """For a rank of a pipeline: mlx-lm ties to the last layer's keys what it sends to the next rank.

        Every rank evaluates logits, which depend on what all ranks have sent, so here nothing need be tied.
        """
        return mx.zeros((0,))

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        del tied

    @property
    def offset(self) -> mx.array:
        """Absolute position of each packed row, [N]: mlx-lm gives it to RoPE."""
        assert self._step.positions is not None
        return self._step.positions

    def make_mask(
        self, N: int = 1, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> AttentionMask | None:
        return AttentionMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this step's K and V, [N, num_kv_heads, 1, head_dim], to their slots."""
        # Squeezing costs the host a third of what keys[:, :, 0] does.
        self._write({"keys": keys.squeeze(2), "values": values.squeeze(2)})
        return OwnedKeys(keys, self), values

    def _write(self, rows: dict[str, mx.array]) -> None:
        assert self._step.rows is not None
        self.state.write(self._step.rows, rows)
        self.num_writes += 1

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For a layer that reuses this one's K and V: what stands for them in its call of attention."""
        spec = self.state.spec
        keys = mx.zeros((self.offset.size, spec.num_kv_heads, 1, spec.head_dim), spec.dtype)
        return OwnedKeys(keys, self), keys

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        assert self._step.attention is not None
        self.num_reads += 1
        if not isinstance(call.mask, AttentionMask):
            raise UnsupportedModelError(f"its attention gets a mask of its own ({type(call.mask).__name__})")
        out = self._step.attention.attend(
            call.queries.squeeze(2),
            self.state,
            scale=call.scale,
            window=call.mask.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return mx.expand_dims(out, 2)


class _PositionKeys(mx.array):
    """Stands for the position part of all keys that a query sees.

    A latent-attention layer multiplies its queries with them before it calls attention, and adds the
    product to the scores as if it were a mask. That product cannot exist over a paged cache, so the
    multiplication only notes the queries: :meth:`LatentLayerCache.attend` gets them as its mask.
    """

    def swapaxes(self, *_: int) -> _PositionKeys:  # type: ignore[override]
        return self

    def __rmatmul__(self, queries: mx.array) -> _PositionQueries:  # type: ignore[misc]
        return _PositionQueries(queries)


@dataclass(frozen=True)
class _PositionQueries:
    """The position part of the queries, multiplied by the layer's scale: [N, num_heads, 1, rope_dim]."""

    scaled: mx.array


class LatentLayerCache(LayerCache):
    """Multi-head latent attention: mlx-lm stores latents as keys and position parts as values."""

    def make_mask(
        self, N: int = 1, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> AttentionMask | None:
        if window_size is not None:
            raise UnsupportedModelError("its latent attention has a sliding window")
        return None  # the layer would apply a mask to the product that only _PositionQueries stands for

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write latents [N, 1, 1, latent_dim] and position parts [N, 1, 1, rope_dim] to their slots."""
        self._write({"keys": mx.concatenate([keys, values], axis=-1).squeeze(2)})
        return keys, _PositionKeys(0)

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        if not isinstance(call.mask, _PositionQueries):
            raise UnsupportedModelError("its latent attention is not the kind that mlx-lm's models share")
        # [N, num_heads, 1, head_dim]
        joined = mx.concatenate([call.queries, call.mask.scaled / call.scale], axis=-1)
        out = super().attend(replace(call, queries=joined, mask=AttentionMask(None)), original)
        return out[..., : self.state.spec.latent_dim]


def layer_cache(step: CurrentStep, state: LayerState) -> LayerCache | StateCache:
    """The cache through which mlx-lm's layer uses a state."""
    match state:
        case RecurrentState():
            return StateCache(step, state)
        case KVState():
            is_latent = state.spec.latent_dim is not None
            return (LatentLayerCache if is_latent else LayerCache)(step, state)
        case _:
            raise TypeError(f"mlx-lm has no cache that a {type(state).__name__} could stand for")


class RecordingCache(ConcatenateKVCache, AttendingCache):
    """An ordinary cache that remembers what its layer did with it."""

    def __init__(self) -> None:
        super().__init__()
        self.spec: StateSpec | None = None
        self.num_reads = 0
        self.num_heads = 0  # of the queries that attended last
        self.windows: set[int] = set()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None:
            self.windows.add(window_size)
        return create_attention_mask(mx.zeros((1, N, 1)), None, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.spec = KVSpec(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        keys, values = super().update_and_fetch(keys, values)
        return OwnedKeys(keys, self), values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = super().keys_and_values()
        return OwnedKeys(keys, self), values

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        self.num_reads += 1
        self.num_heads = call.queries.shape[1]
        spec = self.spec
        if call.keys is call.values and isinstance(call.mask, mx.array) and isinstance(spec, KVSpec):
            # The key is also the value, and a mask comes although there is nothing to mask: position scores.
            self.spec = LatentSpec(latent_dim=spec.head_dim, rope_dim=spec.v_head_dim, dtype=spec.dtype)
        return original(call.queries, call.keys, call.values, self, call.scale, call.mask, call.sinks)
