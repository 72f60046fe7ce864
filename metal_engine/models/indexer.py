"""Layers with an index, which attend only to the keys that their index selects (DeepSeek V3.2, GLM-5, MiniMax M3).

mlx-lm's index multiplies its queries with all keys of one sequence, and its layer then gathers or masks keys. Over a
paged cache, this takes three steps:

- The index stores its keys in an :class:`IndexCache`, which requests the selection from the attention backend
  (:mod:`metal_engine.attention.indexed`).
- The index returns no selection to its layer, which continues as if rows attended to all keys.
- When the layer attends, its :class:`metal_engine.models.layer_cache.LayerCache` takes the selection from the
  :class:`IndexCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import deepseek_v32, minimax_m3_vl

from metal_engine.attention.index_selftest import IndexKind
from metal_engine.attention.indexed import IndexQueries, KeySelection, SelectionSize, plan_selection
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import IndexState
from metal_engine.models.current_step import CurrentStep


class Projections(NamedTuple):
    """Projections of an index for tokens.

    Attributes:
        keys: [B, L, head_dim].
        queries: [B, num_heads, L, head_dim].
        weights: [B, L, num_heads]; None if each head selects keys for one KV head.
    """

    keys: mx.array
    queries: mx.array
    weights: mx.array | None


class PagedIndex(nn.Module):
    """A module of mlx-lm with an index. If its cache is an :class:`IndexOwner`, the cache selects the keys.

    :func:`patch_indexers` changes a module to this class.

    Attributes:
        small: name of an attribute of the module -> its largest value in the check at load.
        ranks: group of the ranks that all use rank 0's selections; None if each rank uses its own selections.
        can_share: True if one selection serves all heads, so that ranks that divide the heads use rank 0's selection.
        has_weights: True if the score of a key is the weighted sum of the products of all index heads.
    """

    small: ClassVar[dict[str, int]]
    ranks: mx.distributed.Group | None
    can_share: ClassVar[bool] = False
    has_weights: ClassVar[bool] = False

    @property
    def num_heads(self) -> int:
        """Number of query heads of the index."""
        raise NotImplementedError

    @property
    def size(self) -> SelectionSize:
        raise NotImplementedError

    def project(self, x: mx.array, qr: mx.array | None, offset: Any) -> Projections:
        """Return the projections of tokens.

        Args:
            x: input of the layer, [B, L, hidden_size].
            qr: latent queries of the layer, [B, L, q_lora_rank]; None for a layer without latents.
            offset: position of the first token of each sequence.
        """
        raise NotImplementedError

    def own_selection(self, x: mx.array, qr: mx.array | None, mask: Any, cache: Any) -> np.ndarray | None:
        """Run mlx-lm's index over a prompt and an empty cache of mlx-lm, with the arguments of the index.

        Returns:
            [G, L, L] bool, True if the row selects the key. A selected key may be after the row, so that the row cannot
            see it. G is 1, or the number of heads of the index. None if rows attend to all keys.
        """
        raise NotImplementedError

    def result(self, is_selected: np.ndarray) -> mx.array:
        """Convert a selection of visible keys, [G, L, L] bool, to the format in which mlx-lm's index returns it."""
        raise NotImplementedError

    def common(self, positions: mx.array) -> mx.array:
        """Return rank 0's selection on every rank. Return ``positions`` if :attr:`ranks` is None.

        Ranks could otherwise select different keys, because their sums may round differently. All ranks must call this
        method in the same order.

        Args:
            positions: this rank's selection, integers. The shape must be the same on all ranks.
        """
        if self.ranks is None:
            return positions
        zeros = mx.depends([mx.zeros_like(positions)], [positions])[0]  # all ranks communicate in the same order
        return mx.distributed.all_sum(positions if self.ranks.rank() == 0 else zeros, group=self.ranks)


class IndexOwner:
    """Interface of a cache that stores the keys of an index, and that selects keys in place of mlx-lm's index."""

    def select(self, index: PagedIndex, x: mx.array, qr: mx.array | None, mask: Any) -> mx.array | None:
        """Store the keys of rows, and select keys.

        Args:
            index: index of the layer.
            x: input of the layer, [B, L, hidden_size].
            qr: latent queries of the layer, [B, L, q_lora_rank]; None for a layer without latents.
            mask: mask that mlx-lm passes to the index.

        Returns:
            The selection in the format of :meth:`PagedIndex.result`. None if rows attend to all keys, or if the layer's
            cache takes the selection with :meth:`IndexCache.take`.
        """
        raise NotImplementedError


class PagedIndexer(PagedIndex, deepseek_v32.Indexer):
    """Sparse-attention index of DeepSeek V3.2 and GLM-5: selects ``index_topk`` keys for each row, for all heads."""

    small: ClassVar = {"index_topk": 8}
    can_share: ClassVar = True
    has_weights: ClassVar = True

    def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> mx.array | None:
        if isinstance(cache, IndexOwner):
            return cache.select(self, x, qr, mask)
        return deepseek_v32.Indexer.__call__(self, x, qr, mask, cache)

    @property
    def num_heads(self) -> int:
        return int(self.n_heads)

    @property
    def size(self) -> SelectionSize:
        return SelectionSize(self.index_topk)

    def project(self, x: mx.array, qr: mx.array | None, offset: Any) -> Projections:
        batch, length, _ = x.shape
        queries = self.wq_b(qr).reshape(batch, length, self.n_heads, self.head_dim).swapaxes(1, 2)
        keys = self.k_norm(self.wk(x))[:, None]
        weights = self.weights_proj(x) * (self.n_heads**-0.5 * self.softmax_scale)
        return Projections(self.rope(keys, offset=offset)[:, 0], self.rope(queries, offset=offset), weights)

    def own_selection(self, x: mx.array, qr: mx.array | None, mask: Any, cache: Any) -> np.ndarray | None:
        selected = deepseek_v32.Indexer.__call__(self, x, qr, mask, cache)  # [1, 1, L, top_k]
        if selected is None:
            return None
        is_selected = np.zeros((1, x.shape[1], x.shape[1]), bool)
        np.put_along_axis(is_selected, np.array(selected[0]).astype(np.int64), values=True, axis=-1)
        return is_selected

    def result(self, is_selected: np.ndarray) -> mx.array:
        rows = np.arange(is_selected.shape[1])
        # Positions of selected keys come first. Padding repeats the row's own position, which the row sees.
        order = np.argsort(~is_selected[0], axis=-1, kind="stable")[:, : self.index_topk]
        padded = np.where(np.take_along_axis(is_selected[0], order, axis=-1), order, rows[:, None])
        return mx.array(padded[None, None].astype(np.uint32))


class PagedBlockAttention(PagedIndex, minimax_m3_vl.Attention):
    """Attention of MiniMax M3, with an index of blocks. Each index head selects keys for one KV head."""

    small: ClassVar = {"index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1}

    def _block_mask(self, x: mx.array, mask: Any, offset: Any, cache: Any) -> Any:
        if isinstance(cache, IndexOwner):
            selected = cache.select(self, x, None, mask)
            return mask if selected is None else selected
        return minimax_m3_vl.Attention._block_mask(self, x, mask, offset, cache)

    @property
    def num_heads(self) -> int:
        return int(self.index_n_heads)

    @property
    def size(self) -> SelectionSize:
        return SelectionSize(self.index_topk_blocks, self.index_block_size, self.index_local_blocks)

    def project(self, x: mx.array, qr: mx.array | None, offset: Any) -> Projections:
        batch, length, _ = x.shape
        keys = self.index_k_norm(self.index_k_proj(x))[:, None]
        queries = self.index_q_proj(x).reshape(batch, length, self.index_n_heads, self.index_head_dim)
        queries = self.index_q_norm(queries).swapaxes(1, 2)
        return Projections(self.index_rope(keys, offset=offset)[:, 0], self.index_rope(queries, offset=offset), None)

    def own_selection(self, x: mx.array, qr: mx.array | None, mask: Any, cache: Any) -> np.ndarray | None:
        is_kept = minimax_m3_vl.Attention._block_mask(self, x, mask, 0, cache)  # [1, num_heads, L, L]
        if is_kept is mask:
            return None
        return np.array(is_kept[0, :: self.num_attention_heads // self.index_n_heads])

    def result(self, is_selected: np.ndarray) -> mx.array:
        return mx.array(np.repeat(is_selected, self.num_attention_heads // self.index_n_heads, axis=0)[None])


_CLASSES: tuple[tuple[type[nn.Module], type[PagedIndex]], ...] = (
    (deepseek_v32.Indexer, PagedIndexer),
    (minimax_m3_vl.Attention, PagedBlockAttention),
)


def indexers(model: nn.Module) -> list[PagedIndex]:
    """Return the patched indexes of a model."""
    return [module for module in model.modules() if isinstance(module, PagedIndex)]


def index_kind(model: nn.Module, states: Iterable[object]) -> IndexKind | None:
    """Return the kind of a model's first index, to use for all indexes. None if no layer has an index.

    Args:
        model: patched mlx-lm model.
        states: states of the model's layers.
    """
    spec = next((state.spec for state in states if isinstance(state, IndexState)), None)
    if spec is None:
        return None
    index = indexers(model)[0]
    return IndexKind(index.num_heads, spec, index.size, index.has_weights)


def patch_indexers(model: nn.Module) -> None:
    """Change the classes of a model's indexes to subclasses of :class:`PagedIndex`, so that caches can select keys."""
    for module in model.modules():
        for original, paged in _CLASSES:
            if type(module) is original and getattr(module, "is_sparse_attn", True):
                module.__class__ = paged
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
        self._selections: list[KeySelection | None] = []  # select() stores one selection, and take() removes it

    @property
    def keys(self) -> mx.array:
        """Empty placeholder. mlx-lm makes the layer's keys depend on it, so that index keys are evaluated.

        A paged step does not need this dependency, because it evaluates all states.
        """
        return mx.zeros((0,))

    values = keys

    def select(self, index: PagedIndex, x: mx.array, qr: mx.array | None, mask: Any) -> None:
        """Write this step's keys to their slots, select keys, and store the selection for :meth:`take`.

        ``x`` is [N, 1, hidden_size]. ``mask`` is ignored. Always returns None.

        Raises:
            RuntimeError: the step is traced. A trace cannot contain a selection, whose sizes depend on the requests.
        """
        step = self._step
        rows = step.rows
        if not isinstance(rows, StepRows):
            raise RuntimeError("a step whose layers select keys by an index cannot be traced")
        keys, queries, weights = index.project(x, qr, step.positions)
        self.state.write(rows, {"index_keys": keys.squeeze(1)})
        self.num_writes += 1
        asked = IndexQueries(queries.squeeze(2), None if weights is None else weights.squeeze(1), index.size)
        key = asked.size.num_keys, asked.dims
        if key not in step.selection_plans:
            step.selection_plans[key] = plan_selection(rows, *key)
        plan = step.selection_plans[key]
        self._selections = [None]
        if plan is not None:
            assert step.attention is not None
            self._selections = [step.attention.select_keys(plan, asked, self.state, index.common)]
        self.num_reads += 1
        if self.observe is not None:
            self.observe(rows, self._selections[0])

    def take(self) -> KeySelection | None:
        """Return and remove the selection for the layer's attention; None if all rows attend to all keys.

        Raises:
            RuntimeError: :meth:`select` was not called since the last call.
        """
        if not self._selections:
            raise RuntimeError("a layer attends before its index has selected keys")
        return self._selections.pop()
