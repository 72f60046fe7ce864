"""Changes the prefill on tensor operations in one place at a time, as kernel_mutants.py changes the kernels.

``python -m tools.metal_sim.tensor_mutants`` runs all mutants; a number runs that one. Every case runs in both of the
simulator's layouts of elements over lanes. A kernel that assumes a fixed layout fails in the other layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from metal_engine.attention.metal.backend import MetalBackend

from .kernel_mutants import ITEM, MutantCase, run_case
from .mutants import Mutant, factory_of, run_mutants

TENSOR, PRODUCTS = "attention_tensor", "attention_products"
LAYOUTS = (1, 0)

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_IN_SIMD_GROUP = "simdgroup_barrier(mem_flags::mem_threadgroup);"
# Layout of M5 that MLX's kernels assume.
_KNOWN_LEFT = "int2(((lane >> 2 & 2) + lane % 2) * 4 + i % 4, lane_row + i / 4 * 8)"
_KNOWN_SUM = "int2(((lane >> 2 & 2) + lane % 2) * 4 + i % 4 + i / 8 * 16, lane_row + i / 4 % 2 * 8)"
MUTANTS = (
    Mutant(ITEM, "STRIPS > 2 ? STRIPS : 2", "STRIPS"),
    # Products.
    Mutant(PRODUCTS, "place[1] * stride + place[0]", "place[0] * stride + place[1]"),
    Mutant(PRODUCTS, "int2(place[0], place[1])", "int2(place[1], place[0])", which=0),
    Mutant(PRODUCTS, "int2(place[0], place[1])", "int2(place[1], place[0])", which=1),
    Mutant(PRODUCTS, "false, TRANSPOSED, false", "false, false, false", which=0),
    Mutant(PRODUCTS, "false, TRANSPOSED, false", "false, true, false", which=1),
    Mutant(PRODUCTS, "false, TRANSPOSED, false", "false, true, false", which=2),
    Mutant(PRODUCTS, "mode::multiply_accumulate", "mode::multiply", which=2),
    Mutant(PRODUCTS, "left[i] = lefts[i];", ""),
    Mutant(PRODUCTS, "sum[i] = sums[i];", ""),
    Mutant(PRODUCTS, "sums[i] = sum[i];", ""),
    Mutant(PRODUCTS, "SUM_ELEMENTS = 16", "SUM_ELEMENTS = 8"),
    # Assumed layouts instead of queried layouts.
    Mutant(TENSOR, "place_in_left<T, true>(i)", _KNOWN_LEFT),
    Mutant(TENSOR, "place_in_left<T, false>(i)", _KNOWN_LEFT),
    Mutant(TENSOR, "place_in_left<T, false>(i)", "place_in_left<T, true>(i)"),
    Mutant(TENSOR, "place_in_sum<T, true>(i)", _KNOWN_SUM),
    Mutant(TENSOR, "place_in_sum<T, true>(i)", "place_in_sum<T, false>(i)"),
    Mutant(TENSOR, "place_in_sum<T, false>(i).y", "place_in_sum<T, true>(i).y"),
    Mutant(TENSOR, "int2 place = place_in_sum<T, false>(i)", "int2 place = place_in_sum<T, true>(i)"),
    # Distribution of rows and keys.
    Mutant(TENSOR, "num_rows <= 16 ? 1", "num_rows <= 17 ? 1"),
    Mutant(TENSOR, "num_rows <= 32 ? 2", "num_rows <= 33 ? 2"),
    Mutant(TENSOR, "has_keys = slot * PRODUCT_COLUMNS < BK", "has_keys = true"),
    Mutant(TENSOR, "has_keys = slot * PRODUCT_COLUMNS < BK", "has_keys = slot == 0"),
    Mutant(TENSOR, "position - window + 1)", "position - window)"),
    Mutant(TENSOR, "position - window + 1)", "position - window + 2)"),
    Mutant(TENSOR, ": position + 1)", ": position + 2)"),
    Mutant(TENSOR, ": position + 1)", ": position)"),
    Mutant(TENSOR, "row / G - first_token", "row_of_tile / G"),
    Mutant(TENSOR, "row_of_tile < num_rows && partial_row < 0", "row_of_tile < num_rows"),
    Mutant(TENSOR, "sinks[kv_head * G + row % G]", "sinks[kv_head * G]"),
    Mutant(TENSOR, "first_of_group + place.y", "place.y"),
    Mutant(TENSOR, "kv_head * G + row % G) * DK", "row % G) * DK"),
    Mutant(TENSOR, "if (row_of_tile < num_rows) {", "if (true) {"),
    Mutant(TENSOR, "q[at + d * PRODUCT_INNER]", "q[at]"),
    Mutant(TENSOR, "key_begin + tid);", "tid);"),
    Mutant(TENSOR, "tile + BK + tid);", "tile + tid);"),
    Mutant(TENSOR, "key_end - tile, num", "key_end - tile - 1, num", which=0),
    Mutant(TENSOR, "key_end - tile, num", "key_end - tile - 1, num", which=1),
    Mutant(TENSOR, "slot * PRODUCT_COLUMNS * STRIDE + d", "d"),
    Mutant(TENSOR, "d * PRODUCT_INNER, STRIDE", "0, STRIDE"),
    Mutant(TENSOR, "slot * PRODUCT_COLUMNS + column", "column"),
    Mutant(TENSOR, "slot * PRODUCT_COLUMNS + k", "k"),
    Mutant(TENSOR, "+ k * PRODUCT_INNER + place.x", "+ place.x"),
    Mutant(TENSOR, "+ d * PRODUCT_COLUMNS,", ","),
    # Barriers.
    *(Mutant(TENSOR, _BARRIER, "", which=i) for i in range(7)),
    *(Mutant(TENSOR, _BARRIER, _IN_SIMD_GROUP, which=i) for i in (2, 3, 4, 5)),
    *(Mutant(TENSOR, _IN_SIMD_GROUP, "", which=i) for i in range(5)),
    # The softmax.
    Mutant(TENSOR, "tile >= all_see &&", ""),
    Mutant(TENSOR, "tile + BK <= all_see_end", "tile + BK - 1 <= all_see_end"),
    Mutant(TENSOR, "key >= sees[strip] &&", ""),
    Mutant(TENSOR, "peak[strip] = LOWEST;", "peak[strip] = 0.0f;"),
    Mutant(TENSOR, "float tile_peak = LOWEST;", "float tile_peak = 0.0f;"),
    Mutant(TENSOR, "ushort(1)", "ushort(4)"),
    Mutant(TENSOR, "ushort(8)", "ushort(16)"),
    Mutant(TENSOR, "peak[strip] = new_peak;", ""),
    Mutant(TENSOR, "total[strip] *= shrink;", ""),
    Mutant(TENSOR, "output[d * SUM_ELEMENTS + i] *= shrink;", ""),
    Mutant(TENSOR, "shrinks[strip * 8 + lane_row]", "shrinks[lane_row]"),
    Mutant(TENSOR, "- peak[strip] + WEIGHT_SHIFT", "- peak[strip]"),
    Mutant(TENSOR, "* scale;", ";"),
    # Output.
    Mutant(TENSOR, "d * KEY_STRIPS + fragment]", "fragment]"),
    Mutant(TENSOR, "fragment * 8 + lane_column + i % 2];", "fragment * 8 + lane_column];"),
)  # fmt: skip

CASES = (
    # The window begins at the start of a fragment; tiles of 16, 17, 32, 33 and 64 rows.
    MutantCase([(9, 18), (5, 76), (33, 150), (17, 130), (16, 90), (32, 32), (64, 64)], 1, 1, mx.float16, window=64,
         softcap=15.0, sinks=True, head_dim=32, tolerance=2e-3),
    # Several KV heads and heads per group, tiles that end inside a token, a row that sees all keys of a stage except
    # one; K and V of different sizes.
    MutantCase([(1, 7), (30, 200), (10, 72)], 6, 2, mx.bfloat16, sinks=True, head_dim=48, v_head_dim=64,
         tolerance=8e-3),
    # Splits in a batch with a decode. A row sees no key of some splits.
    MutantCase([(12, 1100), (1, 600)], 2, 1, mx.float16, 1000, window=1090, sinks=True, head_dim=32, tolerance=2e-3),
    # Weights too small for float16, and scores far below zero.
    MutantCase([(20, 2000)], 1, 1, mx.float16, scores=(17.0, 0.0), head_dim=32, tolerance=2e-3),
    MutantCase([(20, 90)], 1, 1, mx.float16, scores=(-9_984.0, -9_992.0), head_dim=32, tolerance=5e-3),
)  # fmt: skip


def factory_in(layout: int, factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory that calls ``factory``, for kernels whose tensors have one of the layouts in ``LAYOUTS``."""

    def defining(**arguments: Any) -> Any:
        header = arguments.pop("header", "")
        return factory(header=f"#define METAL_SIM_TENSOR_LAYOUT {layout}\n{header}", **arguments)

    return defining


def caught(mutant: Mutant | None) -> str | None:
    """Return the check's message if the mutant was caught, or None."""
    for layout in LAYOUTS:
        backend = MetalBackend(factory_in(layout, factory_of(mutant)), tensor_ops=True)
        for case in CASES:
            if found := run_case(backend, case):
                return f"layout {layout}: {found}"
    return None


if __name__ == "__main__":
    sys.exit(run_mutants(MUTANTS, caught))
