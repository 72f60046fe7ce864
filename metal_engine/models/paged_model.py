"""The seam into mlx-lm: run any of its models over a packed batch and a paged KV cache.

A packed batch is fed as *tokens as batch*: N tokens become a batch of N sequences of length 1, so every
activation is [N, 1, ...] and a layer that mixes no tokens needs no change. Three things do mix tokens:

- RoPE reads ``cache.offset``: here the [N] array of positions, one per row;
- ``cache.update_and_fetch`` stores K and V: here into the paged cache;
- attention itself: the model module's ``scaled_dot_product_attention`` is replaced by a function that calls the
  step's attention plan when it is given one of our caches, and the original otherwise.

The layer caches share one :class:`_StepState`, set for the length of a forward; there is no global.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache, make_prompt_cache

from metal_engine.attention.backend import AttentionMetadata, AttentionPlan
from metal_engine.models.errors import UnsupportedModelError

_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class LayerKVSpec:
    """Shape and type of one layer's K and V."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.size


@dataclass(frozen=True)
class AttentionMask:
    """What mlx-lm carries from ``make_mask`` to attention as ``mask``: the layer's window, in tokens."""

    window: int | None


class _StepState:
    """The step being run: set by :meth:`PagedModel.__call__`, read by the layer caches."""

    def __init__(self) -> None:
        self.plan: AttentionPlan | None = None
        self.metadata: AttentionMetadata | None = None
        self.positions: mx.array | None = None  # [N]
        self.logits_indices: mx.array | None = None  # [R]


class LayerCache:
    """One layer's paged K and V, in the form of an mlx-lm cache.

    ``keys`` is [num_blocks * block_size, num_kv_heads, head_dim], ``values`` likewise with ``v_head_dim``: the
    pool's blocks one after the other, so that a slot is a row.
    """

    def __init__(self, step: _StepState, spec: LayerKVSpec, num_blocks: int, block_size: int) -> None:
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
    ) -> AttentionMask:
        return AttentionMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this step's K and V, [N, num_kv_heads, 1, head_dim], to their slots.

        The scatter is in place when nothing else holds the old array, which MLX sees when the step runs.
        """
        assert self._step.metadata is not None
        slots = self._step.metadata.slot_mapping
        self.keys[slots] = keys[:, :, 0].astype(self.keys.dtype)
        self.values[slots] = values[:, :, 0].astype(self.values.dtype)
        self.num_writes += 1
        return keys, values

    def attend(self, queries: mx.array, *, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of [N, num_heads, 1, head_dim] queries; returns [N, num_heads, 1, v_head_dim]."""
        assert self._step.plan is not None
        self.num_reads += 1
        if not isinstance(mask, AttentionMask):
            raise UnsupportedModelError(f"its attention gets a mask of its own ({type(mask).__name__})")
        out = self._step.plan.attend(
            queries[:, :, 0],
            self.keys.reshape(-1, self._block_size, *self.keys.shape[1:]),
            self.values.reshape(-1, self._block_size, *self.values.shape[1:]),
            scale=scale,
            window=mask.window,
            sinks=sinks,
        )
        return out[:, :, None]


def _attention_seam(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, LayerCache):
            return cache.attend(queries, scale=scale, mask=mask, sinks=sinks)
        return original(queries, keys, values, cache, scale, mask, sinks)

    scaled_dot_product_attention.is_metal_engine_seam = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _install_attention_seam(model: nn.Module) -> None:
    """Replace ``scaled_dot_product_attention`` in every mlx-lm module that a layer of the model comes from."""
    for module_name in {type(m).__module__ for m in model.modules()}:
        module = sys.modules[module_name]
        attention = getattr(module, _ATTENTION, None)
        if attention is not None and not hasattr(attention, "is_metal_engine_seam"):
            if attention is not mlx_lm_base.scaled_dot_product_attention:
                raise UnsupportedModelError("it computes attention in a way of its own")
            setattr(module, _ATTENTION, _attention_seam(attention))


def _find_trunk(model: nn.Module) -> nn.Module:
    """The module whose output the LM head reads: ``model.model``, perhaps below a ``language_model``."""
    owner = getattr(model, "language_model", model)
    trunk = getattr(owner, "model", None)
    if not isinstance(trunk, nn.Module):
        raise UnsupportedModelError("it has no separate trunk and LM head")
    return trunk


def _select_rows_before_head(trunk: nn.Module, step: _StepState) -> None:
    """Make ``trunk`` return only the rows whose logits are needed, so that only they go through the head."""
    trunk_class = type(trunk)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        hidden = trunk_class.__call__(self, *args, **kwargs)  # [N, 1, hidden_size]
        return hidden if step.logits_indices is None else hidden[step.logits_indices]  # [R, 1, hidden_size]

    trunk.__class__ = type(trunk_class.__name__, (trunk_class,), {"__call__": call})


class _RecordingCache(ConcatenateKVCache):
    """An ordinary cache that remembers what it was given."""

    spec: LayerKVSpec | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.spec = LayerKVSpec(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return super().update_and_fetch(keys, values)


def _probe_kv_specs(model: nn.Module) -> list[LayerKVSpec]:
    """Each cache layer's K and V shape and dtype, read off a forward of one token."""
    caches = make_prompt_cache(model)
    for cache in caches:
        if type(cache) not in (KVCache, RotatingKVCache):
            raise UnsupportedModelError(f"its state is not a plain KV cache ({type(cache).__name__})")
    recorders = [_RecordingCache() for _ in caches]
    model(mx.zeros((1, 1), mx.int32), cache=recorders)
    specs = [recorder.spec for recorder in recorders]
    if any(spec is None for spec in specs):
        raise UnsupportedModelError("some of its layers never use their KV cache")
    return specs  # type: ignore[return-value]


class PagedModel:
    """An mlx-lm model that runs packed batches over a paged KV cache.

    Construction installs the attention seam; :meth:`allocate` makes the cache; a call runs one step.

    Args:
        model: a loaded mlx-lm model; it is changed in place (its trunk returns selected rows).

    Raises:
        UnsupportedModelError: the model keeps state other than plain K and V, or has no seam to use.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._step = _StepState()
        self.kv_specs = _probe_kv_specs(model)
        self.layer_caches: list[LayerCache] = []
        _install_attention_seam(model)
        _select_rows_before_head(_find_trunk(model), self._step)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.kv_specs)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV cache, dropping an earlier one."""
        self.layer_caches = []
        self.layer_caches = [LayerCache(self._step, spec, num_blocks, block_size) for spec in self.kv_specs]
        self.eval_caches()

    def release(self) -> None:
        """Drop the KV cache."""
        self.layer_caches = []

    def eval_caches(self) -> None:
        """Wait until every write to the KV cache has happened."""
        mx.eval([array for cache in self.layer_caches for array in (cache.keys, cache.values)])

    def __call__(
        self,
        input_ids: mx.array,
        positions: mx.array,
        metadata: AttentionMetadata,
        plan: AttentionPlan,
        logits_indices: mx.array,
    ) -> mx.array:
        """One forward over a packed batch.

        Args:
            input_ids: [N] int32.
            positions: [N] int32, absolute.
            metadata: of this step; its ``slot_mapping`` says where K and V go.
            plan: the attention backend's plan for ``metadata``.
            logits_indices: [R] int32, rows whose logits are wanted.

        Returns:
            Logits, [R, vocab_size].
        """
        step = self._step
        step.plan, step.metadata = plan, metadata
        step.positions, step.logits_indices = positions, logits_indices
        try:
            logits = self.model(input_ids[:, None], cache=self.layer_caches)  # [R, 1, vocab_size]
        finally:
            step.plan = step.metadata = step.positions = step.logits_indices = None
        return logits[:, 0]
