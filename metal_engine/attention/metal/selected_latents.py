"""Attention of decodes with many query heads to selected latents: each latent is read once for all heads.

``paged_attention_selected`` holds the queries and outputs of at most 24 heads in registers, so each group of 24 heads
reads the latents again. ``selected_latents`` holds 64 latents in registers, and computes the heads one after another.
It splits the list of a row's selected latents into ranges of 64, and writes the output of each range. It computes only
the rows of decodes and drafts. The outputs of the ranges of a long chunk would take too much memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.attention_kernel import KernelFactory
from metal_engine.attention.metal.layer_kinds import LayerKind
from metal_engine.attention.metal.variants import columns_of_loads
from metal_engine.device.metal_kernels import DEVICE_ELEMENTS, kernel_text, on_device

PARTS, SLOTS = 8, 2  # as in selected_latents.metal
THREADS = PARTS * SLOTS * 32
RANGE_KEYS = SLOTS * 4 * 8  # latents that a threadgroup holds in registers


def reads_latents_once(kind: LayerKind) -> bool:
    """Return True if the kernel ``selected_latents`` computes a kind of layer.

    ``paged_attention_selected`` computes all other kinds:

    - layers whose heads fit one tile, because it then also reads each latent once
    - quantized latents
    - float32, because the queries would not fit into this kernel's threadgroup memory
    """
    shape = kind.shape
    return shape.is_latent and not shape.bits and shape.dtype.size == 2 and shape.num_heads > kind.variant.tile_rows


@dataclass(frozen=True)
class Ranges:
    """Ranges of the lists of a tile, on the device. A list has the positions of the latents that one row has selected.

    Attributes:
        num_items: number of ranges.
        items: (list, first key, end of the keys, first partial row) of each range, [num_items, 4].
        merge_rows: (first partial row, ranges, partial rows between ranges) of each list and head, [lists * H, 3].
    """

    num_items: int
    items: mx.array
    merge_rows: mx.array


def plan_ranges(lengths: np.ndarray, num_heads: int) -> Ranges:
    """Divide lists into ranges of RANGE_KEYS keys.

    Args:
        lengths: number of keys of each list, [lists].
        num_heads: number of query heads, H.
    """
    counts = -(-lengths // RANGE_KEYS)
    ends = counts.cumsum()
    lists = np.arange(len(lengths)).repeat(counts)
    ranges = np.arange(len(lists))
    begins = (ranges - (ends - counts).repeat(counts)) * RANGE_KEYS
    key_ends = np.minimum(begins + RANGE_KEYS, lengths.repeat(counts))
    items = np.stack([lists, begins, key_ends, ranges * num_heads], axis=1).astype(np.int32)
    first = ((ends - counts)[:, None] * num_heads + np.arange(num_heads)).ravel()
    merge_rows = np.stack([first, counts.repeat(num_heads), np.full_like(first, num_heads)], axis=1).astype(np.int32)
    return Ranges(len(items), on_device(items), on_device(merge_rows))


class SelectedLatents:
    """Launches the kernel ``selected_latents``. MLX compiles each variant at its first use."""

    def __init__(self, kernel_factory: KernelFactory) -> None:
        self._kernel = kernel_factory(
            name="selected_latents",
            header=kernel_text("attention_rows.metal"),
            input_names=["q", "k_cache", "block_table", "items", "numbers", "selected", "list_rows"],
            output_names=["partial_out", "partial_lse"],
            source=kernel_text("selected_latents.metal"),
        )

    def __call__(self, inputs: list[Any], kind: LayerKind, ranges: Ranges, num_cores: int) -> tuple[mx.array, mx.array]:
        """Return the outputs of all ranges, [partial rows, Dv] in the layer's type, and their log-sum-exps, float32.

        The log-sum-exps are in base 2, [partial rows]. A threadgroup takes all registers of a core. If there are more
        cores than ranges, several threadgroups divide the heads of a range, and each of them reads the latents. The
        results of a head have the same bits in any division.

        Args:
            inputs: arrays of the kernel's inputs, in their order.
            kind: kind of layer that the kernel supports (:func:`reads_latents_once`).
            ranges: ranges of the rows' lists.
            num_cores: approximate number of cores of the GPU.
        """
        shape = kind.shape
        k_columns, rest_columns, _ = columns_of_loads(shape, PARTS)
        strips = -(-shape.num_heads // 8)
        strips_of_group = -(-strips // max(1, num_cores // ranges.num_items))
        partial_rows = max(DEVICE_ELEMENTS, ranges.num_items * shape.num_heads)
        partial_out, partial_lse = self._kernel(
            inputs=inputs,
            template=[
                ("T", shape.dtype),
                ("H", shape.num_heads),
                ("DK", shape.head_dim),
                ("DV", shape.v_head_dim),
                ("BLOCK_SIZE", shape.block_size),
                ("K_COLUMNS", k_columns),
                ("REST_COLUMNS", rest_columns),
            ],
            grid=(ranges.num_items * THREADS, -(-strips // strips_of_group), 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(partial_rows, shape.v_head_dim), (partial_rows,)],
            output_dtypes=[shape.dtype, mx.float32],
        )
        return partial_out, partial_lse
