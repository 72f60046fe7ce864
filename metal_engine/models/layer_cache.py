"""A layer's paged K and V, in the form in which mlx-lm's models use a cache.

mlx-lm gives a layer's attention a cache and, with it, asks three things: ``offset`` for RoPE,
``update_and_fetch`` to store K and V, ``make_mask`` for what the queries may see. Attention itself comes
here through the function that ``seam`` puts in the place of mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ConcatenateKVCache

from metal_engine.attention.backend import AttentionMetadata, AttentionPlan
from metal_engine.errors import UnsupportedModelError

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class LayerKVSpec:
    """Shape and type of one layer's K and V.

    ``latent_dim`` is 0 for ordinary attention. Otherwise this is multi-head latent attention as mlx-lm runs
    it on one token: a key is a latent vector of that size followed by a position part, and the latent is
    the value too.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    latent_dim: int = 0

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.size


@dataclass(frozen=True)
class AttentionMask:
    """What mlx-lm carries from ``make_mask`` to attention as ``mask``: the layer's window, in tokens."""

    window: int | None


class StepState:
    """The step being run: set by ``PagedModel.__call__``, read by the layer caches, which share one."""

    def __init__(self) -> None:
        self.plan: AttentionPlan | None = None
        self.metadata: AttentionMetadata | None = None
        self.positions: mx.array | None = None  # [N]
        self.logits_indices: mx.array | None = None  # [R]


class AttendingCache:
    """A cache that computes the attention of its layer."""

    offset: Any

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store K and V, [N, num_kv_heads, 1, head_dim]; what stands for all that is stored now."""
        raise NotImplementedError

    def attend(
        self,
        original: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of queries [N, num_heads, 1, head_dim]; returns [N, num_heads, 1, v_head_dim].

        Args:
            original: the function that mlx-lm would have called.
            keys: what ``update_and_fetch`` returned, perhaps transformed; ``values`` likewise.
            mask: what ``make_mask`` returned, perhaps transformed.
        """
        raise NotImplementedError


class OwnedKeys(mx.array):
    """Keys that remember the cache they are in: layers that reuse them may call attention without a cache."""

    def __init__(self, keys: mx.array, owner: AttendingCache) -> None:
        super().__init__(keys)
        self.owner = owner


class LayerCache(AttendingCache):
    """Ordinary attention.

    ``keys`` is [num_blocks * block_size, num_kv_heads, head_dim], ``values`` likewise with ``v_head_dim``:
    the pool's blocks one after the other, so that a slot is a row.
    """

    def __init__(self, step: StepState, spec: LayerKVSpec, num_blocks: int, block_size: int) -> None:
        self._step = step
        self._block_size = block_size
        num_slots = num_blocks * block_size
        self.keys = mx.zeros((num_slots, spec.num_kv_heads, spec.head_dim), spec.dtype)
        self.values = mx.zeros((num_slots, spec.num_kv_heads, spec.v_head_dim), spec.dtype)
        self.num_writes = 0
        self.num_reads = 0

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
        self._write("keys", keys.squeeze(2))  # a third of what keys[:, :, 0] costs the host
        self._write("values", values.squeeze(2))
        self.num_writes += 1
        return OwnedKeys(keys, self), values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For a layer that reuses this one's K and V: what stands for them in its call of attention."""
        shape = (self.offset.size, self.keys.shape[1], 1, self.keys.shape[2])
        keys = mx.zeros(shape, self.keys.dtype)
        return OwnedKeys(keys, self), keys

    def restore(self, keys: mx.array, values: mx.array) -> None:
        """Go back to earlier arrays, which nothing has been written to since."""
        self.keys, self.values = keys, values

    def _write(self, name: str, rows: mx.array) -> None:
        """Write [N, num_kv_heads, D] to the array of that name, many rows at once where they are told apart.

        A write is in place when nothing else holds the old array, which MLX sees when the step runs. So the
        attribute is cleared first: the old array has one owner at a time.
        """
        metadata = self._step.metadata
        assert metadata is not None
        by_block, by_run = metadata.block_writes, metadata.run_writes
        array = getattr(self, name)
        setattr(self, name, None)
        rows = rows.astype(array.dtype)
        if by_run is not None:
            for first, count, slot in by_run.runs:
                array[slot : slot + count] = rows[first : first + count]
            if by_run.other_rows.size:
                array[by_run.other_slots] = rows[by_run.other_rows]
        elif by_block is not None:
            array = self._blocks(array)
            array[by_block.block_ids] = self._blocks(rows[by_block.rows])
            array = array.reshape(-1, *rows.shape[1:])
            if by_block.other_rows.size:
                array[by_block.other_slots] = rows[by_block.other_rows]
        else:
            array[metadata.slot_mapping] = rows
        setattr(self, name, array)

    def block_arrays(self) -> dict[str, mx.array]:
        """The layer's arrays by name, each [num_blocks, block_size, num_kv_heads, D]."""
        return {"keys": self._blocks(self.keys), "values": self._blocks(self.values)}

    def attend(
        self,
        original: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        assert self._step.plan is not None
        self.num_reads += 1
        if not isinstance(mask, AttentionMask):
            raise UnsupportedModelError(f"its attention gets a mask of its own ({type(mask).__name__})")
        out = self._step.plan.attend(
            queries.squeeze(2),
            self._blocks(self.keys),
            self._blocks(self.values),
            scale=scale,
            window=mask.window,
            softcap=softcap,
            sinks=sinks,
        )
        return mx.expand_dims(out, 2)

    def _blocks(self, rows: mx.array) -> mx.array:
        """[num_slots, num_kv_heads, D] -> [num_blocks, block_size, num_kv_heads, D], not copied."""
        return rows.reshape(-1, self._block_size, *rows.shape[1:])


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
    """Multi-head latent attention: one KV head, whose key is (latent, position part) and whose value is
    latent.

    ``keys`` holds both; the value of a slot is the beginning of its key, so ``values`` is the same array.
    """

    def __init__(self, step: StepState, spec: LayerKVSpec, num_blocks: int, block_size: int) -> None:
        super().__init__(step, spec, num_blocks, block_size)
        self._latent_dim = spec.latent_dim
        self.values = self.keys

    def make_mask(
        self, N: int = 1, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> AttentionMask | None:
        if window_size is not None:
            raise UnsupportedModelError("its latent attention has a sliding window")
        return None  # the layer would apply a mask to the product that only _PositionQueries stands for

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write latents [N, 1, 1, latent_dim] and position parts [N, 1, 1, rope_dim] to their slots."""
        rows = mx.concatenate([keys[:, :, 0], values[:, :, 0]], axis=-1)  # [N, 1, latent_dim + rope_dim]
        del self.values  # the other owner
        self._write("keys", rows)
        self.values = self.keys
        self.num_writes += 1
        return keys, _PositionKeys(0)

    def block_arrays(self) -> dict[str, mx.array]:
        return {"keys": self._blocks(self.keys)}

    def attend(
        self,
        original: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        if not isinstance(mask, _PositionQueries):
            raise UnsupportedModelError("its latent attention is not the kind that mlx-lm's models share")
        joined = mx.concatenate([queries, mask.scaled / scale], axis=-1)  # [N, num_heads, 1, head_dim]
        out = super().attend(
            original,
            joined,
            keys,
            values,
            scale=scale,
            mask=AttentionMask(None),
            sinks=sinks,
            softcap=softcap,
        )
        return out[..., : self._latent_dim]


class RecordingCache(ConcatenateKVCache, AttendingCache):
    """An ordinary cache that remembers what its layer did with it."""

    def __init__(self) -> None:
        super().__init__()
        self.spec: LayerKVSpec | None = None
        self.num_reads = 0
        self.windows: set[int] = set()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None:
            self.windows.add(window_size)
        return create_attention_mask(mx.zeros((1, N, 1)), None, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.spec = LayerKVSpec(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        keys, values = super().update_and_fetch(keys, values)
        return OwnedKeys(keys, self), values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = super().keys_and_values()
        return OwnedKeys(keys, self), values

    def attend(
        self,
        original: Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        self.num_reads += 1
        spec = self.spec
        if keys is values and isinstance(mask, mx.array) and spec is not None:
            # The key is also the value, and a mask comes although there is nothing to mask: position scores.
            head_dim = spec.head_dim + spec.v_head_dim
            self.spec = LayerKVSpec(spec.num_kv_heads, head_dim, 0, spec.dtype, latent_dim=spec.head_dim)
        return original(queries, keys, values, self, scale, mask, sinks)
