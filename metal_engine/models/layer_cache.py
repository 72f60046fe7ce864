"""Caches through which mlx-lm's models use a layer's state.

mlx-lm passes a cache to a layer's attention, which uses three members of it: ``offset`` for RoPE, ``update_and_fetch``
to store K and V, and ``make_mask`` for the keys that the queries may see. ``mlx_lm_patch`` replaces mlx-lm's attention
function by one that calls the cache to compute attention. The state itself is a class of :mod:`metal_engine.kv_cache`.
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
from metal_engine.kv_cache.spec import IndexSpec, KVSpec, LatentSpec, StateSpec
from metal_engine.kv_cache.state import IndexState, KVState, LayerState
from metal_engine.models.cache_tree import CacheGroup, CacheTree
from metal_engine.models.current_step import CurrentStep
from metal_engine.models.indexer import IndexCache, IndexOwner, PagedIndex
from metal_engine.models.recurrent.state_cache import StateCache

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class AttentionMask:
    """Window and chunk of a layer, in tokens. mlx-lm passes it from ``make_mask`` to attention as ``mask``."""

    window: int | None
    chunk: int | None = None


@dataclass(slots=True)
class AttentionCall:
    """Arguments with which a layer calls mlx-lm's attention function.

    Attributes:
        queries: queries, [N, num_heads, 1, head_dim].
        keys: keys that ``update_and_fetch`` returned. The layer may have transformed them, e.g. repeated KV heads.
        values: values that ``update_and_fetch`` returned. The layer may have transformed them.
        scale: factor of the scores.
        mask: result of ``make_mask``. The layer may have replaced it.
        sinks: attention sinks, [num_heads], see :class:`metal_engine.attention.backend.StepAttention`.
        softcap: softcap of the scores, see :class:`metal_engine.attention.backend.StepAttention`.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: Any
    sinks: mx.array | None = None
    softcap: float | None = None


class AttentionOwner:
    """A cache that computes attention when its layer calls mlx-lm's attention function."""

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        """Compute attention, [N, num_heads, 1, v_head_dim]. ``original`` is the function that mlx-lm would call."""
        raise NotImplementedError


class AttendingCache(AttentionOwner):
    """A cache over which a layer with its own attention code can attend, too (:mod:`metal_engine.models.softcap`).

    Attributes:
        offset: positions of the rows, which RoPE takes.
    """

    offset: Any

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store K and V, [N, num_kv_heads, 1, head_dim]. Return placeholders for all stored K and V."""
        raise NotImplementedError


class OwnedKeys(mx.array):
    """Keys that reference their cache, so that a layer can attend over them without passing a cache.

    Layers that reuse the K and V of an earlier layer attend in this way.
    """

    def __init__(self, keys: mx.array, owner: AttentionOwner) -> None:
        super().__init__(keys)
        self.owner = owner


class TiledKeys(OwnedKeys):
    """Keys repeated for the query heads in tiles: query head h attends to KV head h % num_kv_heads."""


class _EarlierKeys(OwnedKeys):
    """Placeholder for all stored keys. A layer that reuses them computes its own positions from their shape."""

    owner: AttendingCache

    @property
    def shape(self) -> tuple[Any, ...]:
        """(N, num_kv_heads, S, head_dim), where S is an array [N]: the position of each row plus one."""
        num_rows, num_heads, _, head_dim = super().shape
        return num_rows, num_heads, self.owner.offset + 1, head_dim


class LayerCache(AttendingCache):
    """Cache with ordinary attention over a layer's state.

    Attributes:
        state: state that stores keys and values.
        index: cache of the layer's index, which selects keys; None if rows attend to all keys.
        num_writes: number of times that the layer stored K and V, for the check at load.
        num_reads: number of times that the layer attended, for the check at load.
    """

    def __init__(self, step: CurrentStep, state: KVState) -> None:
        self._step = step
        self.state = state
        self.index: IndexCache | None = None
        self.num_writes = 0
        self.num_reads = 0

    @property
    def keys(self) -> mx.array:
        """Empty placeholder, which mlx-lm reads and assigns on ranks of a pipeline.

        mlx-lm makes the last cache's keys depend on the data that the rank sends. Assignments are ignored: the
        dependency is not needed, because every rank evaluates logits, which depend on the data of all ranks.
        """
        return mx.zeros((0,))

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        del tied

    @property
    def offset(self) -> mx.array:
        """Absolute position of each packed row, [N], for RoPE."""
        assert self._step.positions is not None
        return self._step.positions

    def make_mask(
        self, N: int = 1, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> AttentionMask | None:
        return AttentionMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this step's K and V, [N, num_kv_heads, 1, head_dim], to their slots. Return only them."""
        # squeeze takes a third of the host time of keys[:, :, 0].
        self._write({"keys": keys.squeeze(2), "values": values.squeeze(2)})
        return OwnedKeys(keys, self), values

    def _write(self, rows: dict[str, mx.array]) -> None:
        assert self._step.rows is not None
        self.state.write(self._step.rows, rows)
        self.num_writes += 1

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return placeholders for K and V, for another layer that reuses them in its call of attention."""
        spec = self.state.spec
        keys = mx.zeros((self.offset.size, spec.num_kv_heads, 1, spec.head_dim), spec.dtype)
        return _EarlierKeys(keys, self), keys

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        assert self._step.attention is not None
        self.num_reads += 1
        if not isinstance(call.mask, AttentionMask):
            raise UnsupportedModelError(f"its attention gets a mask of its own ({type(call.mask).__name__})")
        selection = None if self.index is None else self.index.take()
        if selection is not None and any((call.mask.window, call.mask.chunk, call.softcap, call.sinks is not None)):
            raise UnsupportedModelError("it selects keys by an index in layers with a window, chunks, softcap or sinks")
        is_tiled, num_kv_heads = isinstance(call.keys, TiledKeys), self.state.spec.num_kv_heads
        queries = call.queries.squeeze(2)
        if is_tiled:
            queries = _transpose_heads(queries, queries.shape[1] // num_kv_heads)
        out = self._step.attention.attend(
            queries,
            self.state,
            scale=call.scale,
            window=call.mask.window,
            softcap=call.softcap,
            sinks=call.sinks,
            chunk=call.mask.chunk,
            selection=selection,
        )
        if is_tiled:
            out = _transpose_heads(out, num_kv_heads)
        return mx.expand_dims(out, 2)


def _transpose_heads(heads: mx.array, num_outer: int) -> mx.array:
    """Reorder heads, [N, num_outer * num_inner, D]: head (outer, inner) moves to index inner * num_outer + outer."""
    num_rows, num_heads, dim = heads.shape
    split = heads.reshape(num_rows, num_outer, num_heads // num_outer, dim)
    return split.swapaxes(1, 2).reshape(num_rows, num_heads, dim)


class ChunkedLayerCache(LayerCache):
    """Cache of a layer that attends within chunks of the context (Llama 4).

    The layer passes its own mask to attention. The cache ignores the mask, and uses ``chunk``. The check at load tests
    that the results are equal (:mod:`metal_engine.models.check_chunks`).

    Attributes:
        chunk: size of a chunk in tokens.
    """

    start_position = 0  # position of the first stored token

    def __init__(self, step: CurrentStep, state: KVState, chunk: int) -> None:
        super().__init__(step, state)
        self.chunk = chunk

    def maybe_trim_front(self) -> None:
        """Do nothing: the pool stores all tokens."""

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        return super().attend(replace(call, mask=AttentionMask(None, self.chunk)), original)


class _PositionKeys(mx.array):
    """Placeholder for the position part of all keys that a query sees.

    A latent-attention layer multiplies the position part of its queries with this array before it calls attention. It
    passes the product to attention as the mask, which is added to the scores. A paged cache cannot provide the product.
    The multiplication therefore returns a :class:`_PositionQueries`, which :meth:`LatentLayerCache.attend` receives as
    the mask.
    """

    def swapaxes(self, *_: int) -> _PositionKeys:  # type: ignore[override]
        return self

    def __rmatmul__(self, queries: mx.array) -> _PositionQueries:  # type: ignore[misc]
        return _PositionQueries(queries)


@dataclass(frozen=True)
class _PositionQueries:
    """Position part of the queries, multiplied by the layer's scale: [N, num_heads, 1, rope_dim]."""

    scaled: mx.array


class LatentLayerCache(LayerCache):
    """Cache of a layer with multi-head latent attention (MLA).

    mlx-lm's layer passes latents as keys and position parts as values. The state stores both as one array of keys.
    """

    def make_mask(
        self, N: int = 1, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> AttentionMask | None:
        if window_size is not None:
            raise UnsupportedModelError("its latent attention has a sliding window")
        return None  # the layer would apply a mask to the product, for which _PositionQueries is a placeholder

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


def link_indexes(caches: CacheTree) -> None:
    """Set :attr:`LayerCache.index` in the cache of each layer with an index.

    A layer with an index has a group of two caches: one for its keys and values, and one for its index.
    """
    for group in caches:
        if isinstance(group, CacheGroup):
            index = next((cache for cache in group.caches if isinstance(cache, IndexCache)), None)
            for cache in group.caches:
                if isinstance(cache, LayerCache):
                    cache.index = index


def layer_cache(step: CurrentStep, state: LayerState, chunk: int | None) -> LayerCache | IndexCache | StateCache:
    """Return the cache through which mlx-lm's layer uses a state.

    Args:
        step: running step of the model.
        state: state of the layer.
        chunk: size in tokens of the chunks within which the layer attends; None if it attends to all keys or a window.

    Raises:
        TypeError: unknown kind of state.
    """
    match state:
        case RecurrentState():
            return StateCache(step, state)
        case IndexState():
            return IndexCache(step, state)
        case KVState() if chunk is not None:
            return ChunkedLayerCache(step, state, chunk)
        case KVState():
            is_latent = state.spec.latent_dim is not None
            return (LatentLayerCache if is_latent else LayerCache)(step, state)
        case _:
            raise TypeError(f"there is no mlx-lm cache for a {type(state).__name__}")


class RecordingCache(ConcatenateKVCache, AttendingCache, IndexOwner):
    """mlx-lm's cache of all keys and values, or of index keys, which records how its layer uses it.

    Args:
        chunk: size in tokens of the chunks within which the layer attends; None if it attends to all keys or a window.

    Attributes:
        spec: spec of the state that the layer stores; None before the layer has stored keys.
        num_reads: number of times that the layer attended, or that its index selected keys.
        windows: sizes in tokens of the sliding windows that the layer requested.
    """

    start_position = 0  # position of the first stored token

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__()
        self.chunk = chunk
        self.spec: StateSpec | None = None
        self.num_reads = 0
        self.num_heads = 0  # heads of the queries in the last attention
        self.windows: set[int] = set()

    def maybe_trim_front(self) -> None:
        """Do nothing: a recorded run has few tokens."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None:
            self.windows.add(window_size)
        return create_attention_mask(mx.zeros((1, N, 1)), None, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.spec = KVSpec(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        keys, values = super().update_and_fetch(keys, values)
        return OwnedKeys(keys, self), values

    def select(self, index: PagedIndex, x: mx.array, qr: mx.array | None, mask: Any) -> None:
        """Store the keys of an index, and select nothing: a recorded run has few tokens."""
        keys = index.project(x, qr, self.offset).keys
        self.update_and_fetch(keys[:, None], keys[:, None])
        self.spec = IndexSpec(keys.shape[-1], keys.dtype)
        self.num_reads += 1

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = super().keys_and_values()
        return OwnedKeys(keys, self), values

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        self.num_reads += 1
        self.num_heads = call.queries.shape[1]
        spec = self.spec
        if call.keys is call.values and isinstance(call.mask, mx.array) and isinstance(spec, KVSpec):
            # The key is also the value, and the mask is not boolean: it holds position scores of latent attention.
            self.spec = LatentSpec(latent_dim=spec.head_dim, rope_dim=spec.v_head_dim, dtype=spec.dtype)
        return original(call.queries, call.keys, call.values, self, call.scale, call.mask, call.sinks)
