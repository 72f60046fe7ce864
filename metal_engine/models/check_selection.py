"""Compares two selections of keys during the check at load: by indexes in packed steps, and by mlx-lm's own indexes.

On both sides, each layer selects fewer keys than the check's requests have. If two keys have nearly equal scores,
rounding decides which of them is selected. If the sides select different keys, all later layers compute different
numbers, and a comparison of logits alone would refuse the model. Each layer is therefore judged on its own:

- mlx-lm's index selects keys from the input of its own layer. Keys that only one side selects must have nearly equal
  scores.
- mlx-lm's layer then attends to the keys that the packed step has selected. Logits differ only by rounding, as in other
  models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.indexed import KeySelection, SelectionSize
from metal_engine.kv_cache.rows import StepRows
from metal_engine.models.indexer import IndexCache, IndexOwner, PagedIndex, Projections, indexers
from metal_engine.models.paged_model import PagedModel

# Largest difference between scores of keys that only one side selects, relative to the size of the row's scores.
TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 0.25}


class SelectionCheck:
    """Keys that indexes select in packed steps, and their comparison with the keys that mlx-lm's own indexes select.

    Args:
        paged: model to check.

    Attributes:
        worst: largest difference in score between two keys of a row, relative to the size of the row's scores. Only one
            side selects the first key, and only the other side the second. Infinite if a row selects too few or too
            many keys, or keys after the row.
    """

    def __init__(self, paged: PagedModel) -> None:
        self._caches = [cache for cache in paged.layer_caches if isinstance(cache, IndexCache)]
        # For each index: (first block of a request, position of a row) -> positions of its selected keys.
        self._selected: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in self._caches]
        self._dtype = paged.dtype
        self.worst = 0.0

    @property
    def is_same(self) -> bool:
        """True if both sides select the same keys, except keys with nearly equal scores."""
        return self.worst <= TOLERANCE[self._dtype]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the selections of packed steps within a ``with`` block. Delete earlier records and reset ``worst``."""
        for cache, selected in zip(self._caches, self._selected, strict=True):
            selected.clear()
            cache.observe = partial(_record, selected)
        self.worst = 0.0
        try:
            yield
        finally:
            for cache in self._caches:
                cache.observe = None

    def own_cache(self, cache: IndexCache, own: Any, first_block: int) -> IndexOwner:
        """Return the cache for mlx-lm's own forward pass of one request through the index of a layer.

        The cache compares the keys that mlx-lm's index selects with the recorded selection, and updates :attr:`worst`.

        Args:
            cache: cache of the index in packed steps.
            own: new cache of mlx-lm.
            first_block: first block of the request in packed steps.
        """
        return _ComparingCache(self, self._selected[self._caches.index(cache)], own, first_block)


class _ComparingCache(IndexOwner):
    """mlx-lm's own cache of an index, with the selections of packed steps for the same request."""

    def __init__(
        self, check: SelectionCheck, selected: dict[tuple[int, int], np.ndarray], own: Any, first_block: int
    ) -> None:
        self._check, self._selected, self._own, self._first_block = check, selected, own, first_block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def select(self, index: PagedIndex, x: mx.array, qr: mx.array | None, mask: Any) -> mx.array | None:
        """Run mlx-lm's index over a whole prompt, and update the check's ``worst`` with the difference.

        Returns:
            The selection of the packed steps, in the format of :meth:`PagedIndex.result`. None if mlx-lm's index
            selects no keys. If a row of the packed steps selected a different number of keys, or a key after the row,
            the result is the selection of mlx-lm's index, and ``worst`` becomes infinite.
        """
        own = index.own_selection(x, qr, mask, self._own)
        if own is None:
            return None
        rows = np.arange(x.shape[1])
        is_visible = np.broadcast_to(rows <= rows[:, None], own.shape)
        ours = np.zeros_like(own)
        for row in rows.tolist():
            selected = self._selected.get((self._first_block, row))
            if selected is None:  # the rows of a request with few keys attend to all keys
                ours[:, row, : min(row + 1, index.size.num_keys)] = True
                continue
            for group, keys in enumerate(selected):
                ours[group, row, keys[keys >= 0]] = True
        own &= is_visible
        if (ours & ~is_visible).any() or (ours.sum(-1) != own.sum(-1)).any():
            self._check.worst = np.inf
            return index.result(own)
        scores, sizes = _scores(index.project(x, qr, 0), index.size)
        is_different = own != ours
        largest = np.where(is_different, scores, -np.inf).max(-1)
        smallest = np.where(is_different, scores, np.inf).min(-1)
        differs = is_different.any(-1)
        apart = np.where(differs, largest - smallest, 0) / np.where(is_visible, sizes, 1e-30).max(-1)
        self._check.worst = max(self._check.worst, float(apart.max()))
        return index.result(ours)


def _scores(projections: Projections, size: SelectionSize) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of all keys for each row, and the sizes of the scores.

    The rounding error of a score grows with its size.

    - With weights, a score is the weighted sum of the heads' products, with negative products replaced by 0. Its size
      is the norm of the weighted products, because the score is 0 if all products are negative.
    - Without weights, the score of a key is the largest visible product of its block. Its size is the magnitude of the
      key's own product.

    Returns:
        Two arrays, [G, L, L] float32. G is 1 with weights, or else the number of heads.
    """
    keys, queries, weights = projections
    products = queries[0].astype(mx.float32) @ keys[0].astype(mx.float32).T  # [H, L, L]
    if weights is None:
        return _of_blocks(np.array(products), size), np.abs(np.array(products))
    by_head = weights[0].astype(mx.float32).T[..., None] * mx.stack([mx.maximum(products, 0), products])
    return np.array(by_head[0].sum(0, keepdims=True)), np.array(mx.linalg.norm(by_head[1], axis=0, keepdims=True))


def _of_blocks(products: np.ndarray, size: SelectionSize) -> np.ndarray:
    """Return the score of each key's block for each row, [H, L, L].

    Local blocks, which are always selected, have the largest float as their score.
    """
    rows = np.arange(products.shape[1])
    blocks = rows // size.block_size
    scores = np.where(rows <= rows[:, None], products, np.finfo(np.float32).min)
    of_blocks = np.maximum.reduceat(scores, np.arange(0, len(rows), size.block_size), axis=-1)[..., blocks]
    is_local = (blocks <= blocks[:, None]) & (blocks > blocks[:, None] - size.num_local)
    return np.where(is_local, np.finfo(np.float32).max, of_blocks)


@contextmanager
def small_selection(paged: PagedModel) -> Iterator[None]:
    """Reduce the number of keys that a model's indexes select, within a ``with`` block.

    Changes the attributes in :attr:`PagedIndex.small`, which packed steps and mlx-lm's own forward pass both read.
    """
    own = [(index, name, getattr(index, name)) for index in indexers(paged.model) for name in index.small]
    for index, name, value in own:
        setattr(index, name, min(value, index.small[name]))
    try:
        yield
    finally:
        for index, name, value in own:
            setattr(index, name, value)


def _record(selected: dict[tuple[int, int], np.ndarray], rows: StepRows, selection: KeySelection | None) -> None:
    if selection is None:
        return
    first_blocks = rows.block_table[rows.request_of_row, 0].tolist()
    for first_block, position, keys in zip(first_blocks, rows.positions.tolist(), selection.by_row(), strict=True):
        if keys.max() >= 0:  # otherwise the row attends to all keys
            selected[first_block, position] = keys
