"""Changes the attention kernels in one place at a time and tests whether the checks detect it.

``python -m tools.metal_sim.kernel_mutants`` runs all mutants; a number runs that one. A mutant counts as caught
when a step through the simulator raises, differs from the float64 reference, or reads other amounts of K and V
than its work items name. Mutants that no check can detect are listed with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.cuts import THREADGROUPS_PER_CORE
from metal_engine.attention.metal.layer_kinds import shape_of
from metal_engine.attention.metal.variants import variant_of
from tools.fixtures.packed_step import PackedStep, make_step
from tools.metal_sim import LaunchCounts, MetalSimError, record_launches
from tools.metal_sim.errors import CheckError
from tools.metal_sim.group_reads import group_reads
from tools.metal_sim.mutants import Mutant, factory_of, run_mutants

ROWS, ITEM, DIRECT, STAGED = "attention_rows", "paged_attention", "attention_direct", "attention_staged"
MERGE = "merge_splits"

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_IN_SIMD_GROUP = "simdgroup_barrier(mem_flags::mem_threadgroup);"
MUTANTS = (
    # The item.
    Mutant(ITEM, "item + 1]", "item + 1] - 1"),
    Mutant(ITEM, "item + 4]", "item + 4] - 1"),
    Mutant(ITEM, "item + 3]", "item + 3] + 1"),
    Mutant(ITEM, "(first_row + num_rows - 1) / G", "(first_row + num_rows) / G",
           equivalent="asks the mask about keys that all rows see, and it says so"),
    Mutant(ITEM, "(first_row + num_rows - 1) / G - first_token", "(num_rows - 1) / G"),
    Mutant(ITEM, "last_position - window + 1) : key_begin", "first_position - window + 1) : key_begin"),
    Mutant(ITEM, "last_position - window + 1)", "last_position - window)"),
    Mutant(ITEM, ": first_position + 1)", ": last_position + 1)"),
    Mutant(ITEM, ": first_position + 1)", ": first_position + 2)"),
    Mutant(ITEM, "min(key_end, HAS_IMAGES ?", "max(0, HAS_IMAGES ?",
           equivalent="a split has whole stages, or it ends with the keys of the last row"),
    Mutant(ITEM, "numbers[0] * LOG2E;", "numbers[0];"),
    Mutant(ITEM, "numbers[1] * LOG2E;", "numbers[1];"),
    Mutant(ITEM, "(lane >> 1) & 3", "(lane >> 2) & 3"),
    Mutant(ITEM, "((lane >> 2) & 2) * 2", "((lane >> 2) & 2)"),
    Mutant(ITEM, "num_rows <= STRIPS * 8", "num_rows <= STRIPS * 8 + 1"),
    Mutant(ITEM, "? 14.0f : 0.0f", "? 0.0f : 0.0f"),
    Mutant(ITEM, "? 14.0f : 0.0f", "? 17.0f : 0.0f"),
    Mutant(ITEM, "* 8 + 16 / sizeof(T);", "* 8;", equivalent="rows share banks, which only takes time"),
    *(Mutant(ITEM, "K_FRAGMENTS > V_FRAGMENTS ? K_FRAGMENTS : V_FRAGMENTS", n) for n in ("K_FRAGMENTS", "V_FRAGMENTS")),
    Mutant(ITEM, "EXCHANGE_BYTES = 2 *", "EXCHANGE_BYTES =",
           equivalent="results take more memory than the exchange of two fragments"),
    Mutant(ITEM, "STAGED_BYTES > DIRECT_BYTES ? STAGED_BYTES", "STAGED_BYTES > DIRECT_BYTES ? DIRECT_BYTES"),
    # Loads by lanes.
    Mutant(ROWS, "int(key % BLOCK_SIZE)", "int(key % BLOCK_SIZE + 1)"),
    Mutant(ROWS, "key / BLOCK_SIZE", "key / (BLOCK_SIZE * 2)"),
    Mutant(ROWS, "WHOLE || first_column + chunk * COLUMNS * 4 < END - BEGIN", "true"),
    Mutant(ROWS, "chunk * COLUMNS * 4 < END - BEGIN", "chunk * COLUMNS * 4 < END"),
    Mutant(ROWS, "COLUMNS * 4 * CHUNKS * PARTS ==", "COLUMNS * 4 * CHUNKS >="),
    Mutant(ROWS, "if (exists) {", "{"),
    Mutant(ROWS, "row * (WIDTH / COLUMNS) +", "row +"),
    Mutant(ROWS, "pieces[chunk] = Piece(0);", "pieces[chunk] = Piece(0x7fc07fc0);"),
    Mutant(ROWS, "lane_column / 2) * COLUMNS;", "lane_column) * COLUMNS;"),
    Mutant(ROWS, "(first * 4 + lane_column / 2)", "(lane_column / 2)"),
    Mutant(ROWS, "lane_row / 2) * COLUMNS + f", "lane_row) * COLUMNS + f"),
    Mutant(ROWS, "(first + f / (COLUMNS / 2)) * 4", "(f / (COLUMNS / 2)) * 4"),
    Mutant(ROWS, "f % (COLUMNS / 2) * 2 + lane_row % 2", "f % (COLUMNS / 2) * 2 + lane_row / 4"),
    Mutant(ROWS, "exists0 && column < END", "exists0"),
    Mutant(ROWS, "exists1 && column < END", "exists1"),
    Mutant(ROWS, "exists0 && column < END", "column < END"),
    Mutant(ROWS, "exists1 && column < END", "column < END"),
    Mutant(ROWS, "both >> 16", "both"),
    Mutant(ROWS, "2 * i + 1));", "2 * i));"),
    # Loads to the stage.
    Mutant(ROWS, "min(place.end, num_keys)", "place.end"),
    Mutant(ROWS, "place.column < WIDTH ? min", "true ? min"),
    Mutant(ROWS, "staged[i] = Piece(0);", ""),
    Mutant(ROWS, "uint(num_kv_heads) + uint(kv_head)", "uint(num_kv_heads)"),
    Mutant(ROWS, "% ROW_PIECES) * COLUMNS;", "% ROW_PIECES);"),
    Mutant(ROWS, "THREADS % ROW_PIECES == 0 || key < AT_ONCE", "true"),
    Mutant(ROWS, "BK % AT_ONCE == 0 && THREADS % ROW_PIECES == 0", "true"),
    *(Mutant(ROWS, "i * place.AT_ONCE", "i * (place.AT_ONCE - 1)", which=i) for i in range(4)),
    # Merging slots, writing rows.
    Mutant(ROWS, _BARRIER, "", which=0),
    Mutant(ROWS, _BARRIER, "", which=1),
    Mutant(ROWS, _BARRIER, "", which=2),
    Mutant(ROWS, _BARRIER, _IN_SIMD_GROUP, which=2),
    Mutant(ROWS, "if (first > 0) {", "if (false) {"),
    Mutant(ROWS, "ushort(1)", "ushort(3)"),
    Mutant(ROWS, "ushort(8)", "ushort(2)"),
    Mutant(ROWS, "lane_column == 0) {", "lane_column == 2) {", equivalent="all lanes of a row hold the same"),
    Mutant(ROWS, "int s = 0; s < share.slots", "int s = 1; s < share.slots", which=0),
    Mutant(ROWS, "int s = 0; s < share.slots", "int s = 1; s < share.slots", which=1),
    Mutant(ROWS, "int s = 0; s < share.slots", "int s = 1; s < share.slots", which=2),
    Mutant(ROWS, "share.parts * STRIPS * 16;", "STRIPS * 16;"),
    Mutant(ROWS, "HAS_SINKS ? sink[strip] : LOWEST", "LOWEST",
           equivalent="the peak only keeps 2^x from overflowing, and where the sink's does, the true output is 0 too"),
    Mutant(ROWS, "HAS_SINKS ? sink[strip] : LOWEST", "HAS_SINKS ? sink[strip] : 0.0f"),
    Mutant(ROWS, "LOWEST = -1e30f", "LOWEST = -1e4f"),
    Mutant(ROWS, "- row_peak + weight_shift) : 0.0f", "- row_peak) : 0.0f"),
    Mutant(ROWS, "precise::log2(row_total) - weight_shift", "precise::log2(row_total)"),
    Mutant(ROWS, "row_peak + precise::log2(row_total)", "row_peak"),
    Mutant(ROWS, "[1] *= factor", "[1] *= 1.0f"),
    Mutant(ROWS, "&& row < num_rows) {", ") {"),
    Mutant(ROWS, "(partial_row + row) * tile.num_kv_heads", "(partial_row + row)"),
    Mutant(ROWS, "d < first + CARRIED; ++d", "d < first + CARRIED - 1; ++d"),
    Mutant(ROWS, "/ (COLUMNS / 2) * COLUMNS * 4", "/ (COLUMNS / 2) * COLUMNS * 2"),
    Mutant(ROWS, "lane_column / 2 * COLUMNS + d", "lane_column * COLUMNS + d"),
    Mutant(ROWS, "(WIDTH - first < CARRIED ? WIDTH - first : CARRIED) * 8", "CARRIED * 8"),
    Mutant(ROWS, "i += THREADS", "i += THREADS / 2"),
    Mutant(ROWS, "if (column < DV) {", "if (true) {"),
    Mutant(ROWS, "row / 8 % STRIPS", "0"),
    Mutant(ROWS, "row / 8 / STRIPS) * share.parts", "row / 8) * share.parts"),
    Mutant(ROWS, "/ G * uint(tile.num_kv_heads) +", "/ G +"),
    Mutant(ROWS, "* G + flat % G;", "* G + uint(row) % G;"),
    # Direct: distribution of the keys, and the rows that see them.
    Mutant(DIRECT, "position - window + 1)", "position - window)"),
    Mutant(DIRECT, "position - window + 1)", "position - window + 2)"),
    Mutant(DIRECT, ": position + 1)", ": position + 2)"),
    Mutant(DIRECT, ": position + 1)", ": position)"),
    Mutant(DIRECT, "min(key_end, HAS_IMAGES ?", "max(0, HAS_IMAGES ?"),
    Mutant(DIRECT, "row / G - first_token;", "(row - first_row) / G;"),
    Mutant(DIRECT, "&& partial_row < 0) {", ") {"),
    Mutant(DIRECT, "kv_head * G + row % G", "kv_head * G"),
    Mutant(DIRECT, "left > 0, left > 1, part * K_CHUNKS", "true, true, part * K_CHUNKS"),
    Mutant(DIRECT, "key_begin / 8 * 8", "key_begin"),
    Mutant(DIRECT, "int tile = first_key", "int tile = 0"),
    Mutant(DIRECT, "next < key_end ?", "true ?"),
    Mutant(DIRECT, "(HELD + h) * STEP", "h * STEP"),
    Mutant(DIRECT, "tile < key_end; tile", "tile + 8 <= key_end; tile"),
    Mutant(DIRECT, "tile += HELD * STEP", "tile += STEP"),
    Mutant(DIRECT, "begin < key_end ?", "true ?"),
    Mutant(DIRECT, "begin + lane_row >= key_begin &&", "", which=0),
    Mutant(DIRECT, "&& begin + lane_row < key_end", ""),
    Mutant(DIRECT, "uint(num_kv_heads) + uint(kv_head);", "uint(num_kv_heads);", which=1),
    Mutant(ROWS, "BEGIN + first_column)", "first_column)"),
    Mutant(DIRECT, "v_rows, at[h]", "k_rows, at[h]"),
    Mutant(DIRECT, "part * V_CHUNKS, lane_column, exists[h]", "part * V_CHUNKS, lane_column, true"),
    Mutant(DIRECT, "keys[h][d], queries[strip][d]", "keys[h][d], queries[0][d]"),
    Mutant(DIRECT, "weights[h][strip], LATENT", "weights[h][0], LATENT"),
    Mutant(DIRECT, "SLOTS == 1 ? 0 :", "true ? 0 :"),
    Mutant(DIRECT, "SLOTS == 1 ? group :", "false ? group :", equivalent="the remainder is the same"),
    # Direct: the exchange.
    Mutant(DIRECT, _BARRIER, "", which=1),
    Mutant(DIRECT, _BARRIER, _IN_SIMD_GROUP, which=1),
    Mutant(DIRECT, _IN_SIMD_GROUP, ""),
    Mutant(DIRECT, "if (PARTS > 1) {", "if (false) {"),
    Mutant(DIRECT, "parity = SLOTS * PARTS * EXCHANGED - parity;", ""),
    Mutant(DIRECT, "lane_column * 8 + lane_row;", "lane_row * 8 + lane_column;"),
    Mutant(DIRECT, "* 64 + 8] =", "* 64 + 1] ="),
    Mutant(DIRECT, "int p = 0; p < PARTS", "int p = 1; p < PARTS"),
    Mutant(DIRECT, "(h * STRIPS + strip) * 64", "h * 64", which=2),
    # Direct: the softmax.
    Mutant(DIRECT, "&& key < sees_end[strip]", ""),
    Mutant(DIRECT, "key < sees_end[strip]", "key <= sees_end[strip]"),
    Mutant(DIRECT, "key >= sees[strip] &&", ""),
    Mutant(DIRECT, "peak[strip] = LOWEST;", "peak[strip] = 0.0f;"),
    Mutant(DIRECT, "float tile_peak = LOWEST;", "float tile_peak = 0.0f;"),
    Mutant(DIRECT, "max(peak[strip], tile_peak)", "tile_peak"),
    Mutant(DIRECT, "ushort(1)", "ushort(4)"),
    Mutant(DIRECT, "ushort(8)", "ushort(16)"),
    Mutant(DIRECT, "peak[strip] = new_peak;", ""),
    Mutant(DIRECT, "total[strip] *= shrink;", ""),
    Mutant(DIRECT, "thread_elements()[1] *= shrink;", "thread_elements()[1] *= 1.0f;"),
    Mutant(DIRECT, "LATENT ? keys[h][d]", "LATENT ? keys[h][d + REST_CHUNKS]"),
    # Staged.
    *(Mutant(STAGED, _BARRIER, "", which=i) for i in range(6)),
    Mutant(STAGED, _BARRIER, "threadgroup_barrier(mem_flags::mem_none);", which=2),
    Mutant(STAGED, _BARRIER, "threadgroup_barrier(mem_flags::mem_device);", which=5),
    Mutant(STAGED, _BARRIER, _IN_SIMD_GROUP, which=2),
    Mutant(STAGED, _BARRIER, _IN_SIMD_GROUP, which=3),
    Mutant(STAGED, _BARRIER, f"if (slots > 1) {_BARRIER}", which=4),
    Mutant(ROWS, "num_rows <= 16 ? 2", "num_rows <= 17 ? 2"),
    Mutant(ROWS, "num_rows <= 32 ? 4", "num_rows <= 33 ? 4"),
    Mutant(STAGED, "position - window + 1)", "position - window)"),
    Mutant(STAGED, "position - window + 1)", "position - window + 2)"),
    Mutant(STAGED, ": position + 1)", ": position + 2)"),
    Mutant(STAGED, ": position + 1)", ": position)"),
    Mutant(STAGED, "row / G - first_token", "row_of_tile / G"),
    Mutant(STAGED, "kv_head * G + row % G", "kv_head * G"),
    Mutant(STAGED, "if (row_exists && column < DK) {", "if (column < DK) {"),
    Mutant(STAGED, "if (row_exists && column < DK) {", "if (row_exists) {"),
    Mutant(ITEM, "divided_up(STAGE_KEYS, THREADS / K_ROW)", "STAGE_KEYS / (THREADS / K_ROW)"),
    Mutant(ITEM, "divided_up(STAGE_KEYS, THREADS / V_ROW)", "STAGE_KEYS / (THREADS / V_ROW)"),
    Mutant(STAGED, "key_begin + tid < key_end", "true"),
    Mutant(STAGED, "tile + STAGE_KEYS + tid < key_end", "true"),
    Mutant(STAGED, "tile + STAGE_KEYS + tid);", "tile + tid);"),
    Mutant(STAGED, "key_begin + tid);", "tid);"),
    Mutant(STAGED, "tile < key_end; tile += STAGE", "tile + STAGE_KEYS <= key_end; tile += STAGE"),
    Mutant(STAGED, "int tile = key_begin", "int tile = 0"),
    *(Mutant(STAGED, "key_end - tile, n", f"{n}, n", which=i) for i in range(3)
      for n in ("STAGE_KEYS", "key_end - tile - 1")),
    Mutant(STAGED, "k_rows, key_slots", "v_rows, key_slots"),
    *(Mutant(STAGED, "v_rows, key_slots", "k_rows, key_slots", which=i) for i in (0, 1)),
    Mutant(STAGED, "f % slots == slot", "f % slots == 0"),
    Mutant(STAGED, "f < KEY_FRAGMENTS", "f <= KEY_FRAGMENTS", which=0),
    Mutant(STAGED, "f < KEY_FRAGMENTS", "f <= KEY_FRAGMENTS", which=3),
    Mutant(STAGED, "STRIDE, ulong2(0, 0), true", "STRIDE, ulong2(0, 0), false"),
    Mutant(STAGED, "f * 8 * STRIDE", "f * STRIDE", which=1),
    Mutant(STAGED, "own_sums - part * (KEY_FRAGMENTS * 64)", "own_sums"),
    Mutant(STAGED, "int p = 0; p < PARTS_OF_STAGED", "int p = 1; p < PARTS_OF_STAGED"),
    Mutant(STAGED, "tile >= all_see &&", ""),
    Mutant(STAGED, "tile + STAGE_KEYS <= all_see_end", "tile + STAGE_KEYS - 1 <= all_see_end"),
    Mutant(STAGED, "key >= sees &&", ""),
    Mutant(STAGED, "float peak = LOWEST;", "float peak = 0.0f;"),
    Mutant(STAGED, "float tile_peak = LOWEST;", "float tile_peak = 0.0f;"),
    Mutant(STAGED, "ushort(8)", "ushort(16)"),
    Mutant(STAGED, "ushort(1)", "ushort(4)"),
    Mutant(STAGED, "peak = new_peak;", ""),
    Mutant(STAGED, "total *= shrink;", ""),
    Mutant(STAGED, "output[d].thread_elements()[1] *= shrink;", ""),
    Mutant(STAGED, "row_exists && partial_row < 0", "row_exists"),
    Mutant(STAGED, "const T w = T(fast::exp2(scores[f].thread_elements()[e] - peak + WEIGHT_SHIFT));",
           "const T w = T(fast::exp2(scores[f].thread_elements()[e] - peak));"),
    # The merge of splits.
    Mutant(MERGE, "int s = 0; s < splits", "int s = 1; s < splits", which=0),
    Mutant(MERGE, "int s = 0; s < splits", "int s = 1; s < splits", which=1),
    Mutant(MERGE, _BARRIER, ""),
    Mutant(MERGE, _BARRIER, _IN_SIMD_GROUP),
    Mutant(MERGE, "int(thread_position_in_threadgroup.x);", "0;"),
    Mutant(MERGE, "s += int(threads_per_threadgroup.x)", "s += MAX_SPLITS"),
    Mutant(MERGE, "logs[s] - peak", "logs[0] - peak"),
    Mutant(MERGE, "sum / total", "sum"),
    Mutant(MERGE, "* G + head % G)", "* G)"),
    Mutant(MERGE, "HAS_SINKS ? fast::exp2(sink - peak) : 0.0f", "0.0f"),
    Mutant(MERGE, "s * stride", "s", which=0),
    Mutant(MERGE, "s * stride", "s", which=1),
    Mutant(MERGE, "LOWEST = -1e30f", "LOWEST = -1e4f"),
    Mutant(MERGE, "float peak = sink;", "float peak = 0.0f;"),
    # Fields that the end of a threadgroup reads again.
    Mutant(ITEM, "tile_fields[0] = first_row", "tile_fields[0] = 0"),
    Mutant(ITEM, "tile_fields[1] = num_rows", "tile_fields[1] = 8"),
    Mutant(ITEM, "tile_fields[2] = partial_row", "tile_fields[2] = -1"),
    Mutant(STAGED, "row_fragments_of(tile_fields[1]", "row_fragments_of(64"),
    Mutant(STAGED, "group_of_part % row_groups", "0"),
    Mutant(STAGED, "group_of_part / row_groups};", "0};"),
)  # fmt: skip


@dataclass(frozen=True)
class MutantCase:
    """A step and the options of its attention, in which mutants of the kernels are searched for errors."""

    segments: list[tuple[int, int]]  # (query_len, kv_len)
    num_heads: int
    num_kv_heads: int
    dtype: mx.Dtype = mx.float32
    target_threadgroups: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    head_dim: int = 64
    v_head_dim: int | None = None
    is_latent: bool = False
    quantized: tuple[int, int] | None = None  # bits and group size
    scale: float = 0.2
    scores: tuple[float, float] | None = None  # scores of each request's first key and of all other keys, at scale 1
    tolerance: float = 1e-5
    spans: tuple[tuple[int, int], ...] = ()  # first rows and ends of images whose rows attend to each other


CASES = (
    # In the chunk of 10, the first row sees all keys of a stage except the last key.
    MutantCase([(1, 1), (1, 7), (5, 18), (33, 33), (1, 130), (40, 200), (10, 72)], 8, 2),
    # The window begins at the start of a fragment.
    MutantCase([(1, 300), (9, 18), (5, 76), (2, 73), (33, 150), (17, 130)], 1, 1, window=64, softcap=15.0, sinks=True),
    MutantCase([(1, 1500), (6, 1300), (3, 20)], 2, 1, target_threadgroups=1000, sinks=True),
    MutantCase([(11, 1700)], 3, 1, target_threadgroups=1000, window=1690),
    # More splits than the merge has threads.
    MutantCase([(1, 8448)], 1, 1, target_threadgroups=1000),
    # Parts whose scores are added. The scores are far apart, so that a wrong peak overflows.
    MutantCase([(1, 520)] * 8 + [(40, 90)], 2, 1, target_threadgroups=1000, head_dim=256, scale=100.0, tolerance=1e-4),
    # All scores far below zero.
    MutantCase([(1, 1100), (20, 90)], 2, 1, target_threadgroups=1000, scores=(-9_997.0, -10_000.0), tolerance=5e-4),
    MutantCase(
        [(1, 1100), (20, 90)], 2, 1, target_threadgroups=1000, scores=(-9_997.0, -10_000.0), sinks=True, tolerance=5e-4
    ),
    # Half precision: other widths of loads and rows, rounded weights. Splits, and a tail of whole rows.
    MutantCase([(1, 1300), (3, 1100), (20, 90)], 4, 2, mx.float16, 1000, window=1250, tolerance=7e-4),
    MutantCase([(1, 1200), (2, 1030), (30, 90)], 3, 1, mx.bfloat16, 1000, head_dim=128, sinks=True, tolerance=4e-3),
    # Sinks large enough to change the output, with shifted weights.
    MutantCase([(1, 1100), (1, 300), (20, 90)], 2, 1, mx.float16, 1000, sinks=True, tolerance=7e-4),
    # Weights outside the range of float16.
    MutantCase([(1, 3000), (20, 2000)], 2, 1, mx.float16, 1000, sinks=True, scores=(17.0, 0.0), tolerance=7e-4),
    MutantCase([(1, 3000), (20, 2000)], 2, 1, mx.float16, scores=(17.0, 0.0), tolerance=7e-4),
    # Cache rows whose size is not a multiple of 16 bytes. Tiles that end inside a token.
    MutantCase([(1, 77), (7, 30), (1, 9)], 40, 2, mx.float16, head_dim=100, tolerance=7e-4),
    MutantCase([(1, 77), (3, 30)], 4, 2, mx.float16, head_dim=100, tolerance=7e-4),
    MutantCase([(1, 77), (7, 30)], 4, 2, mx.float16, head_dim=100, tolerance=7e-4),
    # An odd number of rows at the end of the output. Two parts write columns in pieces of unequal width.
    MutantCase([(1, 77), (1, 30)], 3, 1, mx.float16, head_dim=100, tolerance=7e-4),
    MutantCase([(1, 77), (20, 40)], 2, 1, head_dim=208),
    # A stage that fills its memory. Its last loads cover fewer keys than the other loads.
    MutantCase([(1, 30), (20, 40)], 2, 1, head_dim=96),
    # Three row fragments in a SIMD group, and a fourth that is staged.
    MutantCase([(1, 77), (2, 600), (1, 9)], 24, 1, mx.float16, head_dim=128, window=550, tolerance=7e-4),
    # Two row fragments in a SIMD group. K and V of different sizes.
    MutantCase([(1, 300), (2, 33), (7, 1100)], 16, 1, target_threadgroups=1000, head_dim=192, v_head_dim=128),
    MutantCase([(1, 70), (15, 33)], 2, 1, head_dim=64, v_head_dim=128),
    # Latents.
    MutantCase(
        [(1, 300), (3, 33), (1, 1100)], 12, 1, target_threadgroups=1000, head_dim=48, v_head_dim=32, is_latent=True
    ),
    # A position part that does not fill its chunk.
    MutantCase([(1, 77), (3, 33)], 12, 1, head_dim=44, v_head_dim=32, is_latent=True),
    # Tiles that begin inside one token and end inside another, at the edge of the window: staged, then direct.
    MutantCase([(3, 74)], 72, 1, window=64),
    MutantCase([(3, 74), (1, 9)], 20, 1, window=64, head_dim=48, v_head_dim=32, is_latent=True),
    MutantCase([(3, 74), (1, 9)], 28, 1, window=64, head_dim=48, v_head_dim=32, is_latent=True),
    MutantCase([(1, 300), (2, 33)], 20, 1, mx.float16, head_dim=576, v_head_dim=512, is_latent=True, tolerance=7e-4),
)


def run_case(backend: MetalBackend, case: MutantCase) -> str | None:
    """Run a case on ``backend``. Return a description of the first error; None if the results are right.

    Sets ``backend.target_threadgroups`` to ``case.target_threadgroups``.
    """
    step = make_step(
        [(n, kv - n) for n, kv in case.segments],
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        is_latent=case.is_latent,
        dtype=case.dtype,
        window=case.window,
        poison=case.scores is None,
        quantized=case.quantized,
        spans=case.spans,
    )
    options: dict[str, Any] = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    if case.scores is not None:
        # Values of one sign, so that they add up. The first key, which has another score, has the value 0.
        values = np.abs(np.array(step.v_cache.astype(mx.float32))) * 100
        values[step.rows.block_table[:, 0], 0] = 0.0
        step = replace(step, v_cache=mx.array(values).astype(case.dtype)).with_scores(*case.scores)
        options["scale"] = 1.0
    sinks = mx.array(np.linspace(-1, 9, case.num_heads).astype(np.float32)) if case.sinks else None
    backend.target_threadgroups = case.target_threadgroups
    try:
        with record_launches() as launches:
            out = backend.for_step(step.rows).attend(step.q, step.state, sinks=sinks, **options)
    except (MetalSimError, CheckError) as error:
        return str(error)
    expected = step.reference(sinks=None if sinks is None else np.array(sinks), **options)
    got = np.array(out.astype(mx.float32))
    # A large sink can make the output almost zero.
    sizes = np.maximum(np.linalg.norm(expected, axis=-1), 1e-6)
    errors = np.linalg.norm(got - expected, axis=-1) / sizes
    if not errors.max() <= case.tolerance:
        return f"relative error {errors.max():.2g} in {int((~(errors <= case.tolerance)).sum())} of {errors.size} rows"
    return _wrong_reads(backend, step, case, launches[0])


def _wrong_reads(backend: MetalBackend, step: PackedStep, case: MutantCase, launch: LaunchCounts) -> str | None:
    """Return a description of wrong reads, or None. Each work item must read each key of its range exactly once."""
    shape = shape_of(step.q, step.state)
    variant = variant_of(shape)
    items = backend.for_step(step.rows)._items(shape, variant, case.window, None, THREADGROUPS_PER_CORE)
    table = np.array(items.table)[: items.num_items]
    begins, ends = table[:, 3], table[:, 4]
    buffers = launch.buffers
    # Number of keys of the staged items, and of the direct items.
    is_direct = table[:, 1] <= variant.strips * 8
    keys = [int((ends - begins)[is_direct == way].sum()) * shape.num_kv_heads for way in (False, True)]
    bits = shape.bits or case.dtype.size * 8
    for i, (name, dim) in enumerate({"k": shape.head_dim, "v": 0 if shape.is_latent else shape.v_head_dim}.items()):
        if buffers[f"{name}_cache"].read * 8 != sum(keys) * dim * bits:
            return "reads more or less of K and V than its items name"
        if shape.bits:
            numbers = sum(n * group_reads(shape, is_direct=bool(way))[i] for way, n in enumerate(keys))
            if any(buffers[f"{name}_{what}"].read != numbers * case.dtype.size for what in ("scales", "biases")):
                return "reads more or fewer scales and biases than its items have"
    # A staged item looks up each key once. In a direct item, every lane of each part looks up each fragment.
    fragments = -(-ends // 8) - begins // 8
    lookups = np.where(is_direct, fragments * variant.parts * 32, ends - begins).sum() * shape.num_kv_heads
    if buffers["block_table"].read != lookups * 4:
        return "looks up more or fewer keys than its items name"
    return None


def check_with(cases: Sequence[MutantCase]) -> Callable[[Mutant | None], str | None]:
    """Return a function that runs the cases with a mutant (None: the unchanged kernels).

    The function returns the error of the first case that catches the mutant, or None.
    """

    def caught(mutant: Mutant | None) -> str | None:
        backend = MetalBackend(factory_of(mutant))
        return next((found for case in cases if (found := run_case(backend, case))), None)

    return caught


caught = check_with(CASES)


if __name__ == "__main__":
    sys.exit(run_mutants(MUTANTS, caught))
