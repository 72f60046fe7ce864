"""Layers with an index, which attend only to the keys that their index selects (DeepSeek V3.2, GLM-5).

mlx-lm's index multiplies its queries with all keys of one sequence, and its layer then gathers or masks latents. Over a
paged cache, the index stores its keys, and requests the selection from :mod:`metal_engine.attention.indexed`. The index
returns None to its layer, as if rows attended to all keys. The cache of the layer's latents takes the selection when
the layer attends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.deepseek_v32 import Indexer

from metal_engine.attention.indexed import IndexQueries, KeySelection, plan_selection, select_keys
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import IndexState
from metal_engine.models.current_step import CurrentStep


class IndexOwner:
    """A cache of an index's keys that selects keys in a way of its own."""

    def select(self, indexer: PagedIndexer, x: mx.array, qr: mx.array, mask: Any) -> mx.array | None:
        """Store the keys of rows, and select keys. Arguments and result are those of mlx-lm's index."""
        raise NotImplementedError


class PagedIndexer(Indexer):
    """mlx-lm's index, whose cache may select keys. Created by :func:`patch_indexers`.

    Attributes:
        ranks: group of the ranks that share the layer's heads; None if one rank has all heads.
    """

    ranks: mx.distributed.Group | None

    def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> mx.array | None:
        if isinstance(cache, IndexOwner):
            return cache.select(self, x, qr, mask)
        return super().__call__(x, qr, mask, cache)

    def keys_and_queries(self, x: mx.array, qr: mx.array, offset: Any) -> tuple[mx.array, mx.array, mx.array]:
        """Return the keys, queries and weights of tokens.

        Args:
            x: input of the layer, [B, L, hidden_size].
            qr: latent queries of the layer, [B, L, q_lora_rank].
            offset: position of the first token of each sequence.

        Returns:
            Keys [B, L, head_dim], queries [B, num_heads, L, head_dim] and weights [B, L, num_heads].
        """
        batch, length, _ = x.shape
        queries = self.wq_b(qr).reshape(batch, length, self.n_heads, self.head_dim).swapaxes(1, 2)
        keys = self.k_norm(self.wk(x))[:, None]
        weights = self.weights_proj(x) * (self.n_heads**-0.5 * self.softmax_scale)
        return self.rope(keys, offset=offset)[:, 0], self.rope(queries, offset=offset), weights

    def common(self, positions: mx.array) -> mx.array:
        """Return rank 0's selection on every rank: sums may round differently on each rank and change a selection."""
        if self.ranks is None:
            return positions
        zeros = mx.depends([mx.zeros_like(positions)], [positions])[0]  # all ranks communicate in the same order
        return mx.distributed.all_sum(positions if self.ranks.rank() == 0 else zeros, group=self.ranks)


def indexers(model: nn.Module) -> list[PagedIndexer]:
    """Return the patched indexes of a model."""
    return [module for module in model.modules() if isinstance(module, PagedIndexer)]


def patch_indexers(model: nn.Module) -> None:
    """Let the caches of a model's indexes select keys."""
    for module in model.modules():
        if type(module) is Indexer:
            module.__class__ = PagedIndexer
            module.ranks = None


class IndexCache(IndexOwner):
    """Cache of the index of one layer, over its state.

    Attributes:
        state: state that stores the index keys.
        num_writes: number of times that the index stored keys, for the check at load.
        num_reads: number of times that keys were selected, for the check at load.
        observe: function that is called with each step's rows and selection; None outside the check at load.
    """

    def __init__(self, step: CurrentStep, state: IndexState) -> None:
        self._step = step
        self.state = state
        self.num_writes = 0
        self.num_reads = 0
        self.observe: Callable[[StepRows, KeySelection | None], None] | None = None
        self._selections: list[KeySelection | None] = []  # one while the layer runs

    @property
    def keys(self) -> mx.array:
        """Keys on which mlx-lm makes the layer's latents depend. No dependency is needed: steps evaluate all states."""
        return mx.zeros((0,))

    values = keys

    def select(self, indexer: PagedIndexer, x: mx.array, qr: mx.array, mask: Any) -> None:
        """Write this step's keys to their slots, and select keys for each row. ``x`` is [N, 1, hidden_size].

        Raises:
            RuntimeError: the step is traced. A trace cannot contain a selection, whose sizes depend on the requests.
        """
        step = self._step
        rows = step.rows
        if not isinstance(rows, StepRows):
            raise RuntimeError("a step whose layers select keys by an index cannot be traced")
        keys, queries, weights = indexer.keys_and_queries(x, qr, step.positions)
        self.state.write(rows, {"index_keys": keys.squeeze(1)})
        self.num_writes += 1
        index = IndexQueries(queries.squeeze(2), weights.squeeze(1), indexer.index_topk)
        key = index.top_k, index.dims
        if key not in step.selection_plans:
            step.selection_plans[key] = plan_selection(rows, *key)
        plan = step.selection_plans[key]
        self._selections = [None if plan is None else select_keys(plan, index, self.state, indexer.common)]
        self.num_reads += 1
        if self.observe is not None:
            self.observe(rows, self._selections[0])

    def take(self) -> KeySelection | None:
        """Return the selection for the layer's attention, once; None if all rows attend to all keys.

        Raises:
            RuntimeError: the index has selected nothing since the last call.
        """
        if not self._selections:
            raise RuntimeError("a layer attends before its index has selected keys")
        return self._selections.pop()
