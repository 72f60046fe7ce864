"""Attention to the keys that DeepSeek's index selects, by kernels: scores, selection, and attention to selected keys.

Each kernel runs once per tile of a :class:`~metal_engine.attention.indexed.SelectionPlan`::

    index_scores               scores of all keys that a tile's rows see, [T * R, S] float32
    index_select               positions of the keys with the largest scores, [T * R, top_k] int32, rising
    paged_attention_selected   attention over latents, each row with its own list of positions
    merge_splits               if the lists are split

Lists are planned as contexts: each row is a decode whose context is its list. A list of a tile of several requests is
split as if the row were alone, so that a decode has the same bits in every batch. The lists of a long chunk share the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.indexed import AttendTile, IndexQueries, Tile
from metal_engine.attention.metal.attention_kernel import KernelFactory, attention_kernel
from metal_engine.attention.metal.kinds import Kind
from metal_engine.attention.metal.planning import WorkItems, plan_work_items
from metal_engine.attention.metal.variants import BLOCK_SIZES, GROUPS, THREADS
from metal_engine.device.metal_kernels import DEVICE_ELEMENTS, DTYPES, kernel_text, on_device
from metal_engine.kv_cache.quantized import numbers_of_groups
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.spec import IndexSpec
from metal_engine.kv_cache.state import IndexState, KVState

if TYPE_CHECKING:
    from metal_engine.attention.metal.backend import MetalStep

MAX_INDEX_DIM = 256
ROW_TILE = 32  # rows of a request that share the loads of an index key
SELECT_GROUPS = 16  # SIMD groups that select the keys of a row
_STAGED_BYTES = 16 << 10  # threadgroup memory for the queries of some index heads


@dataclass
class TileTables:
    """Tables of one tile on the device. All layers of a step use them.

    Attributes:
        tile: the tile.
        rows: (packed row, position, request) of each row, [T * R, 3].
        lists: (packed row, request) of each row, [T * R, 2].
    """

    tile: Tile
    rows: mx.array = field(init=False)
    lists: mx.array = field(init=False)

    def __post_init__(self) -> None:
        tile = self.tile
        requests = tile.requests.repeat(tile.own_positions.shape[1])
        rows = np.stack([tile.packed, tile.own_positions.ravel(), requests], axis=1).astype(np.int32)
        self.rows, self.lists = on_device(rows), on_device(np.ascontiguousarray(rows[:, [0, 2]]))

    @property
    def num_rows(self) -> int:
        """T * R."""
        return len(self.tile.packed)


class IndexKernels:
    """Launches the kernels of an index. MLX compiles each variant at its first use.

    Args:
        kernel_factory: ``mx.fast.metal_kernel`` or the simulator's function.

    Attributes:
        attention: kernel of attention to selected keys.
        quantized_attention: the same for quantized latents.
    """

    def __init__(self, kernel_factory: KernelFactory) -> None:
        self._scores = kernel_factory(
            name="index_scores",
            header=kernel_text("attention_rows.metal"),
            input_names=["queries", "weights", "index_keys", "block_table", "rows", "sizes"],
            output_names=["scores"],
            source=kernel_text("index_scores.metal"),
        )
        self._select = kernel_factory(
            name="index_select",
            header=kernel_text("index_order.metal"),
            input_names=["scores", "rows", "sizes"],
            output_names=["positions"],
            source=kernel_text("index_select.metal"),
        )
        self.attention = attention_kernel(kernel_factory, selected=True)
        self.quantized_attention = attention_kernel(kernel_factory, selected=True, quantized=True)

    def unsupported(self, index: IndexQueries, spec: IndexSpec, block_size: int) -> str:
        """Return the property of an index that the kernels do not support, or an empty string."""
        size, dtype = index.size, index.queries.dtype
        if index.weights is None or size.block_size > 1 or size.num_local:
            return "an index of blocks"
        if dtype not in DTYPES or dtype != spec.dtype:
            return f"{dtype} queries of an index over {spec.dtype} keys".replace("mlx.core.", "")
        if spec.head_dim % 8 or spec.head_dim > MAX_INDEX_DIM:
            return f"an index with head_dim {spec.head_dim}"
        if size.top_k < DEVICE_ELEMENTS:
            return f"a selection of {size.top_k} keys"
        return "" if block_size in BLOCK_SIZES else f"an index with block size {block_size}"

    def select(
        self, tables: TileTables, index: IndexQueries, state: IndexState, block_table: mx.array, target: int
    ) -> mx.array:  # [T, R, 1, top_k] int32; rising, with -1 at the end if a row sees fewer keys
        """Return the positions of the keys that the rows of a tile select.

        Args:
            target: approximate number of threadgroups that compute scores.
        """
        assert index.weights is not None
        tile, top_k = tables.tile, index.size.top_k
        num_requests, num_rows = tile.own_positions.shape
        _, num_heads, head_dim = index.queries.shape
        dtype = index.queries.dtype
        columns = 64 // dtype.size  # columns of a chunk of four loads
        heads_that_fit = _STAGED_BYTES // (-(-head_dim // columns) * columns * dtype.size) // 8 * 8
        held = 2 if dtype.size == 2 and head_dim <= 128 else 1
        row_tiles = -(-num_rows // ROW_TILE)
        step = GROUPS * 8 * held
        keys_of_group = -(-tile.num_keys * row_tiles * num_requests // (target * step)) * step
        (scores,) = self._scores(
            inputs=[
                *(index.queries, index.weights, state.arrays["index_keys"], block_table, tables.rows),
                mx.array([num_rows, keys_of_group, tile.num_keys], mx.int32),
            ],
            template=[
                ("T", dtype),
                ("H", num_heads),
                ("D", head_dim),
                ("HEADS", min(heads_that_fit, -(-num_heads // 8) * 8)),
                ("HELD", held),
                ("ROW_TILE", ROW_TILE),
                ("BLOCK_SIZE", state.block_size),
            ],
            grid=(-(-tile.num_keys // keys_of_group) * THREADS, row_tiles, num_requests),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(tables.num_rows, tile.num_keys)],
            output_dtypes=[mx.float32],
        )
        (positions,) = self._select(
            inputs=[scores, tables.rows, mx.array([tile.num_keys, top_k], mx.int32)],
            template=[("SIMD_GROUPS", SELECT_GROUPS)],
            grid=(tables.num_rows * SELECT_GROUPS * 32, 1, 1),
            threadgroup=(SELECT_GROUPS * 32, 1, 1),
            output_shapes=[(tables.num_rows, top_k)],
            output_dtypes=[mx.int32],
        )
        return positions.reshape(num_requests, num_rows, 1, top_k)


@dataclass(frozen=True)
class _ListItems:
    """Work items of a tile's lists, on the device."""

    items: WorkItems
    table: mx.array
    merge_rows: mx.array | None  # None if no list is split


@dataclass
class SelectedRows:
    """Tables of the tiles of one step, created once for all layers."""

    _tables: dict[int, TileTables] = field(default_factory=dict)
    _items: dict[tuple[int, ...], _ListItems] = field(default_factory=dict)

    def tables(self, tile: Tile) -> TileTables:
        """Return the tables of a tile."""
        if id(tile) not in self._tables:
            self._tables[id(tile)] = TileTables(tile)
        return self._tables[id(tile)]

    def attention(self, step: MetalStep, kind: Kind, q: mx.array, state: KVState, scale: float) -> AttendTile:
        """Return the function that computes a layer's attention of a tile to selected latents."""

        def attend(tile: Tile, positions: mx.array) -> list[mx.array]:
            return [self._attend(step, kind, q, state, scale, tile, positions)]

        return attend

    def _attend(
        self,
        step: MetalStep,
        kind: Kind,
        q: mx.array,  # [N, Hq, D]
        state: KVState,
        scale: float,
        tile: Tile,
        positions: mx.array,  # [T, R, 1, top_k]
    ) -> mx.array:  # [T * R, Hq, Dv]
        backend, shape, kernels = step.backend, kind.shape, step.backend.index_kernels
        assert kernels is not None
        tables, top_k = self.tables(tile), positions.shape[-1]
        target = backend.threadgroups_of(kind.cut.threadgroups_per_core)
        lists = self._list_items(kind, tile, top_k, target if tile.is_group else max(1, target // tables.num_rows))
        partial_shape = (max(DEVICE_ELEMENTS, lists.items.num_partial_rows), 1, shape.v_head_dim)
        out_shape = (tables.num_rows, shape.num_heads, shape.v_head_dim)
        kernel: Callable[..., Any] = kernels.quantized_attention if shape.bits else kernels.attention
        out, partial_out, partial_lse = kernel(
            inputs=[
                *(q, state.keys, state.values, *numbers_of_groups(state), step.block_table, lists.table),
                *(backend.constant([scale, 0.0], mx.float32), backend.constant([0], mx.int32), backend.no_sinks),
                *(positions.reshape(-1, top_k), tables.lists),
            ],
            template=kind.template,
            grid=(len(lists.items.table) * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[out_shape, partial_shape, partial_shape[:2]],
            output_dtypes=[q.dtype, mx.float32, mx.float32],
        )
        if lists.merge_rows is None:
            return out
        (merged,) = backend.merge(
            inputs=[out, partial_out, partial_lse, lists.merge_rows, backend.no_sinks],
            template=kind.merge_template,
            grid=(shape.v_head_dim, shape.num_heads, tables.num_rows),
            threadgroup=(min(shape.v_head_dim, THREADS), 1, 1),
            output_shapes=[out_shape],
            output_dtypes=[q.dtype],
        )
        return merged

    def _list_items(self, kind: Kind, tile: Tile, top_k: int, target: int) -> _ListItems:
        """Return the work items of a tile's lists: each list is the context of one decode."""
        variant, group = kind.variant, kind.shape.group
        key = (id(tile), top_k, group, variant.bk, variant.tile_rows, target)
        if key not in self._items:
            lengths = np.minimum(tile.own_positions.ravel() + 1, top_k).astype(np.int32)
            no_blocks = np.zeros((len(lengths), -(-top_k // kind.shape.block_size)), np.int32)
            rows = step_rows(no_blocks, lengths - 1, np.ones_like(lengths), kind.shape.block_size)
            items = plan_work_items(
                rows,
                group=group,
                num_kv_heads=1,
                window=None,
                chunk=None,
                target_threadgroups=target,
                key_step=variant.bk,
                tile_rows=variant.tile_rows,
            )
            merge_rows = on_device(items.rows) if items.is_split else None
            self._items[key] = _ListItems(items, on_device(items.table), merge_rows)
        return self._items[key]
