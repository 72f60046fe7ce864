"""Runs the kernels of a model's index on this device at load, and compares their results.

A step with a decode and a chunk selects among many equal scores. All numbers of the index are small integers, so that
sums are exact in any order. The kernels must select the same keys as MLX's operations. Attention to these keys is then
compared with the portable backend. Each row selects enough keys for the kernel to split its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.indexed import IndexQueries, KeySelection, SelectionSize, plan_selection
from metal_engine.attention.kernel_selftest import (
    KernelFailedError,
    attend_random,
    check_rows,
    random_state,
    shuffled_rows,
)
from metal_engine.attention.kernel_selftest import running as running_on_device
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable.indexed import select_keys
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import IndexSpec
from metal_engine.kv_cache.state import IndexState, StateSnapshot

# (tokens, context tokens) of each request. Some rows of the chunk see more than TOP_K keys, and some fewer.
SEGMENTS = [(1, 2499), (40, 590), (1, 29)]
TOP_K = 600  # keys


@dataclass(frozen=True)
class IndexKind:
    """Kind of a model's indexes.

    Attributes:
        num_heads: number of query heads of the index.
        spec: spec of the index keys.
        size: number of keys that a row selects.
        has_weights: True if the score of a key is the weighted sum of the products of all heads.
    """

    num_heads: int
    spec: IndexSpec
    size: SelectionSize
    has_weights: bool


def unsupported_index(metal: MetalBackend, index: IndexKind, kinds: Sequence[AttentionKind], block_size: int) -> str:
    """Return the property of a model's index or layers that the kernels do not support. Empty if they support all."""
    queries, _ = random_index(index, shuffled_rows([(1, 0)], block_size))
    assert metal.index_kernels is not None
    if why := metal.index_kernels.unsupported(queries, index.spec, block_size):
        return why
    return "" if selecting_kinds(metal, index, kinds, block_size) else "the layers of the index"


def selecting_kinds(
    metal: MetalBackend, index: IndexKind, kinds: Sequence[AttentionKind], block_size: int
) -> list[AttentionKind]:
    """Return the kinds of layers for which the kernel can compute attention to keys that this index selects."""

    def is_supported(kind: AttentionKind) -> bool:
        try:
            metal.kind_of((kind.dtype, kind.num_heads, kind.spec, block_size), False, False, None, is_selected=True)
        except UnsupportedAttentionError:
            return False
        is_plain = not (kind.has_window or kind.has_softcap or kind.sinks)
        return is_plain and kind.spec.num_kv_heads == (1 if index.has_weights else index.num_heads)

    return list(filter(is_supported, kinds))


def tried_size(size: SelectionSize) -> SelectionSize:
    """Return ``size`` with TOP_K keys, so that some rows of SEGMENTS see more keys than they select."""
    return replace(size, top_k=TOP_K // size.block_size)


def try_index(metal: MetalBackend, index: IndexKind, kinds: Sequence[AttentionKind], block_size: int) -> None:
    """Select keys and attend to them by kernels, and compare the results with MLX's operations.

    Attention is tried for each kind of layer that the index may belong to.

    Args:
        metal: backend of the kernels.
        index: an index that the kernels support.
        kinds: kinds of layers that the attention kernel computes.
        block_size: block size of the server.

    Raises:
        KernelFailedError: a kernel does not build or run here, or its results are wrong.
    """
    rows = shuffled_rows(SEGMENTS, block_size)
    queries, state = random_index(replace(index, size=tried_size(index.size)), rows)
    backend = metal.splitting()
    with running_on_device():
        selection = select_random(backend, rows, queries, state)
        selected = selection.by_row()
    expected = select_keys(selection.plan, queries, state).by_row()
    if not np.array_equal(np.sort(selected), np.sort(expected)):
        summary = "selects other keys than MLX's operations on this device"
        raise KernelFailedError(summary, f"queries and contexts of {SEGMENTS}: {summary}")
    for kind in selecting_kinds(metal, index, kinds, block_size):
        _compare(backend, kind, rows, selection)


def _compare(backend: MetalBackend, kind: AttentionKind, rows: StepRows, selection: KeySelection) -> None:
    state = random_state(kind, rows)
    with running_on_device():
        out = attend_random(backend, kind, rows, state, selection)
    expected = attend_random(PortableBackend(), kind, rows, state, selection)
    check_rows(out, expected, kind, f"selected keys of {SEGMENTS}")


def select_random(backend: MetalBackend, rows: StepRows, queries: IndexQueries, state: IndexState) -> KeySelection:
    """Return the keys that the kernels select in a step.

    At least one request of the step must have more keys than a row selects.
    """
    plan = plan_selection(rows, queries.size.num_keys, queries.dims)
    assert plan is not None
    return backend.for_step(rows).select_keys(plan, queries, state, lambda positions: positions)


def random_index(index: IndexKind, rows: StepRows) -> tuple[IndexQueries, IndexState]:
    """Return queries of an index for a step, and the state of its keys. All numbers are small integers."""
    rng, dtype = np.random.default_rng(0), index.spec.dtype
    state = IndexState(index.spec)
    state.allocate(int(rows.block_table.max()) + 1, rows.block_size)

    def integers(*shape: int) -> mx.array:
        return mx.array(rng.integers(-2, 3, shape).astype(np.float32)).astype(dtype)

    state.restore(StateSnapshot({"index_keys": integers(*state.arrays["index_keys"].shape)}))
    weights = integers(rows.num_tokens, index.num_heads) if index.has_weights else None
    queries = integers(rows.num_tokens, index.num_heads, index.spec.head_dim)
    return IndexQueries(queries, weights, index.size), state
