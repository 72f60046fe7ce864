"""Attention to the keys that an index selects, by kernels: scores, selection, and attention to selected keys.

Each kernel runs once per tile of a :class:`~metal_engine.attention.indexed.SelectionPlan`::

    index_scores               scores of all keys that a tile's rows see, [T * R, S] float32
    index_select               positions of the keys with the largest scores, [T * R, top_k] int32, rising
    paged_attention_selected   attention of each row, or of each KV head of a row, to the keys in its own list
    selected_latents           replaces paged_attention_selected for decodes with many heads over latents
    merge_splits               merges the parts of lists that are split

A list has the positions of the keys that one row has selected. The planner treats each row as a decode, and the row's
list as its context. In a tile of requests with few rows, a list is split as if its row were the only row of the step. A
decode therefore has the same bits in every batch. In a tile of a long chunk, the lists share the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.indexed import AttendTile, IndexQueries, SelectionSize, Tile
from metal_engine.attention.metal.attention_kernel import KernelFactory, attention_kernel
from metal_engine.attention.metal.layer_kinds import LayerKind
from metal_engine.attention.metal.planning import MAX_SPLITS, WorkItems, plan_work_items
from metal_engine.attention.metal.selected_latents import (
    RANGE_KEYS,
    Ranges,
    SelectedLatents,
    plan_ranges,
    reads_latents_once,
)
from metal_engine.attention.metal.variants import BLOCK_SIZES, GROUPS, THREADS
from metal_engine.attention.portable.indexed import keys_of_blocks, largest_of_blocks, with_local_blocks
from metal_engine.device.metal_kernels import DEVICE_ELEMENTS, DTYPES, kernel_text, on_device
from metal_engine.kv_cache.quantized import numbers_of_groups
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.spec import IndexSpec
from metal_engine.kv_cache.state import IndexState, KVState

if TYPE_CHECKING:
    from metal_engine.attention.metal.backend import MetalStep

MAX_INDEX_DIM = 256
KEYS_OF_SCORE = 8  # keys with one score of each head, if heads have scores of their own
ROW_TILE = 32  # rows of a request that share the loads of an index key
SELECT_GROUPS = 16  # SIMD groups that select the keys of a row
_STAGED_BYTES = 16 << 10  # threadgroup memory for the queries of some index heads


@dataclass
class TileTables:
    """Tables of one tile on the device. All layers of a step use them.

    Attributes:
        tile: the tile.
        rows: (packed row, position, request) of each row, [T * R, 3] int32.
        lists: (packed row, request) of each row, [T * R, 2] int32.
    """

    tile: Tile
    rows: mx.array = field(init=False)
    lists: mx.array = field(init=False)
    _blocks: dict[tuple[int, int], mx.array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = self._rows()
        self.rows, self.lists = on_device(rows), on_device(np.ascontiguousarray(rows[:, [0, 2]]))

    def _rows(self) -> np.ndarray:
        requests = self.tile.requests.repeat(self.tile.own_positions.shape[1])
        return np.stack([self.tile.packed, self.tile.own_positions.ravel(), requests], axis=1).astype(np.int32)

    def blocks(self, block_size: int, num_heads: int) -> mx.array:
        """Return (packed row, block of the row's position, request) of each row and head, [T * R * G, 3] int32.

        Args:
            block_size: tokens of a block of the index.
            num_heads: number of heads of the index, G.
        """
        if (block_size, num_heads) not in self._blocks:
            rows = self._rows().repeat(num_heads, axis=0)
            rows[:, 1] //= block_size
            self._blocks[block_size, num_heads] = on_device(rows)
        return self._blocks[block_size, num_heads]

    @property
    def num_rows(self) -> int:
        """Number of rows of the tile, T * R."""
        return len(self.tile.packed)


class IndexKernels:
    """Launches the kernels of an index. MLX compiles each variant at its first use.

    Args:
        kernel_factory: ``mx.fast.metal_kernel`` or the simulator's function.

    Attributes:
        attention: kernel of attention to selected keys.
        quantized_attention: kernel of attention to selected keys in a quantized cache.
        selected_latents: kernel of attention to selected latents, for decodes with many query heads.
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
        self.selected_latents = SelectedLatents(kernel_factory)

    def unsupported(self, index: IndexQueries, spec: IndexSpec, block_size: int) -> str:
        """Return a description of the unsupported property of an index; empty if the kernels support the index."""
        size, dtype = index.size, index.queries.dtype
        if index.weights is None and (size.block_size % KEYS_OF_SCORE or not size.num_local):
            return f"an index of blocks of {size.block_size} keys, of which {size.num_local} are local"
        if index.weights is not None and (size.block_size > 1 or size.num_local):
            return "an index of blocks with weights"
        if dtype not in DTYPES or dtype != spec.dtype:
            return f"{dtype} queries of an index over {spec.dtype} keys".replace("mlx.core.", "")
        if spec.head_dim % 8 or spec.head_dim > MAX_INDEX_DIM:
            return f"an index with head_dim {spec.head_dim}"
        if size.num_keys < DEVICE_ELEMENTS:
            return f"a selection of {size.num_keys} keys"
        return "" if block_size in BLOCK_SIZES else f"an index with block size {block_size}"

    def select(
        self, tables: TileTables, index: IndexQueries, state: IndexState, block_table: mx.array, target: int
    ) -> mx.array:  # [T, R, G, num_keys] int32; rising, with -1 at the end if a row sees fewer keys
        """Return the positions of the keys that the rows of a tile select, [T, R, G, number of keys] int32.

        T requests have R rows each. G is the number of heads for an index of blocks, and otherwise 1. The positions
        rise, with -1 at the end if a row sees fewer keys.

        Args:
            tables: tables of the tile.
            index: queries of the index.
            state: keys of the index.
            block_table: block table of the step, on the device.
            target: approximate number of threadgroups that compute scores.
        """
        tile, size = tables.tile, index.size
        scores = self._score(tables, index, state, block_table, target)
        shape = tile.own_positions.shape
        if index.weights is not None:
            return self._largest(scores, tables.rows, size.top_k).reshape(*shape, 1, size.top_k)
        num_heads = index.dims.num_heads
        of_blocks = largest_of_blocks(scores.reshape(*shape, num_heads, -1), size.block_size // KEYS_OF_SCORE)
        of_blocks = with_local_blocks(of_blocks, tile, size)
        rows = tables.blocks(size.block_size, num_heads)
        blocks = self._largest(of_blocks.flatten(0, 2), rows, size.top_k).reshape(*shape, num_heads, size.top_k)
        return keys_of_blocks(blocks, tile.positions[..., None], size.block_size)

    def _largest(self, scores: mx.array, rows: mx.array, top_k: int) -> mx.array:
        """Return the positions of the largest scores, [rows, S] float32 -> [rows, top_k] int32, rising.

        The second column of ``rows`` is the last position that each row sees. A row that sees fewer positions has -1 at
        the end.
        """
        num_rows, num_scores = scores.shape
        (positions,) = self._select(
            inputs=[scores, rows, mx.array([num_scores, top_k], mx.int32)],
            template=[("SIMD_GROUPS", SELECT_GROUPS)],
            grid=(num_rows * SELECT_GROUPS * 32, 1, 1),
            threadgroup=(SELECT_GROUPS * 32, 1, 1),
            output_shapes=[(num_rows, top_k)],
            output_dtypes=[mx.int32],
        )
        return positions

    def _score(
        self, tables: TileTables, index: IndexQueries, state: IndexState, block_table: mx.array, target: int
    ) -> mx.array:
        """Return the scores of a tile's keys, [T * R, S] float32.

        Without weights, returns the largest score of each group of 8 keys for each head, [T * R * G, S / 8].
        """
        tile, by_head = tables.tile, index.weights is None
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
                *(index.queries, index.queries if by_head else index.weights, state.arrays["index_keys"]),
                *(block_table, tables.rows),
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
                ("BY_HEAD", by_head),
            ],
            grid=(-(-tile.num_keys // keys_of_group) * THREADS, row_tiles, num_requests),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[
                (tables.num_rows * num_heads, -(-tile.num_keys // KEYS_OF_SCORE))
                if by_head
                else (tables.num_rows, tile.num_keys)
            ],
            output_dtypes=[mx.float32],
        )
        return scores


@dataclass(frozen=True)
class _ListItems:
    """Work items of one tile, on the device. A list holds the keys that one row has selected."""

    items: WorkItems
    table: mx.array
    merge_rows: mx.array | None  # None if no list is split


@dataclass
class SelectedRows:
    """Tables and work items of the tiles of one step, created once for all layers."""

    _tables: dict[int, TileTables] = field(default_factory=dict)
    _items: dict[tuple[Hashable, ...], _ListItems] = field(default_factory=dict)
    _ranges: dict[tuple[Hashable, ...], Ranges] = field(default_factory=dict)

    def tables(self, tile: Tile) -> TileTables:
        """Return the tables of a tile."""
        if id(tile) not in self._tables:
            self._tables[id(tile)] = TileTables(tile)
        return self._tables[id(tile)]

    def attention(
        self, step: MetalStep, kind: LayerKind, q: mx.array, state: KVState, scale: float, size: SelectionSize
    ) -> AttendTile:
        """Return the function that computes a layer's attention of a tile to selected keys.

        Args:
            step: attention of the step.
            kind: kind of the layer.
            q: queries of the step, [N, Hq, D].
            state: keys and values of the layer.
            scale: factor of the scores.
            size: number of keys that a row selects.
        """

        def attend(tile: Tile, positions: mx.array) -> list[mx.array]:
            return [self._attend(step, kind, q, state, scale, size, tile, positions)]

        return attend

    def _attend(
        self,
        step: MetalStep,
        kind: LayerKind,
        q: mx.array,  # [N, Hq, D]
        state: KVState,
        scale: float,
        size: SelectionSize,
        tile: Tile,
        positions: mx.array,  # [T, R, G, K]
    ) -> mx.array:  # [T * R, Hq, Dv]
        backend, shape, kernels = step.backend, kind.shape, step.backend.index_kernels
        assert kernels is not None
        tables, positions = self.tables(tile), positions.flatten(0, 1)
        out_shape = (tables.num_rows, shape.num_heads, shape.v_head_dim)
        merge_options = {
            "template": kind.merge_template,
            "grid": (shape.v_head_dim, shape.num_heads, tables.num_rows),
            "threadgroup": (min(shape.v_head_dim, THREADS), 1, 1),
            "output_shapes": [out_shape],
            "output_dtypes": [q.dtype],
        }
        numbers = backend.constant([scale, 0.0], mx.float32)
        if tile.is_group and reads_latents_once(kind) and size.num_keys <= MAX_SPLITS * RANGE_KEYS:
            ranges = self._ranges_of(tile, size, shape.num_heads)
            inputs = [q, state.keys, step.block_table, ranges.items, numbers, positions[:, 0], tables.lists]
            partials = kernels.selected_latents(inputs, kind, ranges, backend.num_cores)
            # The merge reads its first input only for rows without ranges.
            (merged,) = backend.merge(inputs=[q, *partials, ranges.merge_rows, backend.no_sinks], **merge_options)
            return merged
        target = backend.threadgroups_of(kind.cut.threadgroups_per_core)
        lists = self._list_items(kind, tile, size, target if tile.is_group else max(1, target // tables.num_rows))
        partial_shape = (max(DEVICE_ELEMENTS, lists.items.num_partial_rows), shape.num_kv_heads, shape.v_head_dim)
        kernel: Callable[..., Any] = kernels.quantized_attention if shape.bits else kernels.attention
        out, partial_out, partial_lse = kernel(
            inputs=[
                *(q, state.keys, state.values, *numbers_of_groups(state), step.block_table, lists.table),
                *(numbers, backend.constant([0], mx.int32), backend.no_sinks),
                *(positions, tables.lists),
            ],
            template=kind.template,
            grid=(len(lists.items.table) * THREADS, shape.num_kv_heads, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[out_shape, partial_shape, partial_shape[:2]],
            output_dtypes=[q.dtype, mx.float32, mx.float32],
        )
        if lists.merge_rows is None:
            return out
        (merged,) = backend.merge(
            inputs=[out, partial_out, partial_lse, lists.merge_rows, backend.no_sinks], **merge_options
        )
        return merged

    def _ranges_of(self, tile: Tile, size: SelectionSize, num_heads: int) -> Ranges:
        """Return the ranges of a tile's lists."""
        key = (id(tile), size, num_heads)
        if key not in self._ranges:
            self._ranges[key] = plan_ranges(size.num_seen(tile.own_positions.ravel()), num_heads)
        return self._ranges[key]

    def _list_items(self, kind: LayerKind, tile: Tile, size: SelectionSize, target: int) -> _ListItems:
        """Return the work items of a tile's lists. Each list is planned as the context of one decode.

        ``target`` is the approximate number of threadgroups into which a list is split.
        """
        variant, group, num_kv_heads = kind.variant, kind.shape.group, kind.shape.num_kv_heads
        key = (id(tile), size, group, num_kv_heads, variant.bk, variant.tile_rows, target)
        if key not in self._items:
            lengths = size.num_seen(tile.own_positions.ravel()).astype(np.int32)
            no_blocks = np.zeros((len(lengths), -(-size.num_keys // kind.shape.block_size)), np.int32)
            rows = step_rows(no_blocks, lengths - 1, np.ones_like(lengths), kind.shape.block_size)
            items = plan_work_items(
                rows,
                group=group,
                num_kv_heads=num_kv_heads,
                window=None,
                chunk=None,
                target_threadgroups=target,
                key_step=variant.bk,
                tile_rows=variant.tile_rows,
            )
            merge_rows = on_device(items.rows) if items.is_split else None
            self._items[key] = _ListItems(items, on_device(items.table), merge_rows)
        return self._items[key]
