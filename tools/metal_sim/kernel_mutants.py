"""Changes the attention kernels in one place at a time and sees whether the checks notice.

``python -m tools.metal_sim.kernel_mutants`` runs all mutants; a number runs that one. A mutant counts as caught
when a step through the simulator raises, differs from the float64 reference, or reads more of K and V than the bound.
Mutants that cannot matter are listed with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.backend import MetalBackend, stage_keys
from metal_engine.device.metal_kernels import kernel_text
from tools.fixtures.packed_step import make_step
from tools.metal_sim import MetalSimError, metal_kernel, record_launches
from tools.metal_sim.errors import CheckError

ATTENTION, MERGE = "paged_attention", "merge_splits"


@dataclass(frozen=True)
class Mutant:
    kernel: str
    old: str
    new: str
    which: int = 0  # which occurrence of ``old``
    equivalent: str = ""  # why it cannot be caught

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.old!r} -> {self.new!r} (occurrence {self.which})"

    def apply(self, text: str) -> str:
        parts = text.split(self.old)
        assert len(parts) > self.which + 1, f"{self.name}: not in the kernel any more"
        head, tail = self.old.join(parts[: self.which + 1]), self.old.join(parts[self.which + 1 :])
        return head + self.new + tail


_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MUTANTS = (
    # barriers: stage reuse, K staged, K read, V staged, row state, carried written twice
    *(Mutant(ATTENTION, _BARRIER, "", which=i) for i in range(7)),
    Mutant(ATTENTION, _BARRIER, "threadgroup_barrier(mem_flags::mem_none);", which=1),
    Mutant(ATTENTION, _BARRIER, "threadgroup_barrier(mem_flags::mem_device);", which=3),
    Mutant(ATTENTION, _BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", which=1),
    Mutant(ATTENTION, _BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", which=4),
    Mutant(ATTENTION, _BARRIER, f"if (slots > 1) {_BARRIER}", which=2),
    # causal edge, window, key range
    Mutant(ATTENTION, "key <= position", "key < position"),
    Mutant(ATTENTION, "key <= position", "key <= position + 1"),
    Mutant(ATTENTION, "key > position - window", "key >= position - window"),
    Mutant(ATTENTION, "key > position - window", "key > position - window + 1"),
    Mutant(ATTENTION, "tile > last_position - window", "tile > first_position - window"),
    Mutant(ATTENTION, "tile + BK - 1 <= first_position", "tile + BK - 1 <= last_position"),
    Mutant(ATTENTION, "if (tile + key < key_end)", "if (true)", which=0),
    Mutant(ATTENTION, "if (tile + key < key_end)", "if (true)", which=1),
    Mutant(ATTENTION, "if (tile + key < key_end)", "if (tile + key < key_end - 1)", which=0),
    Mutant(ATTENTION, "if (tile + key < key_end)", "if (tile + key < key_end - 1)", which=1),
    Mutant(ATTENTION, "key_begin + tid < key_end", "true"),
    Mutant(ATTENTION, "tile + BK + tid < key_end", "true"),
    Mutant(ATTENTION, "tile < key_end; tile += BK", "tile + BK <= key_end; tile += BK"),
    Mutant(ATTENTION, "int tile = key_begin", "int tile = 0"),
    # addresses
    Mutant(ATTENTION, "(v_cache + key", "(k_cache + key"),
    Mutant(ATTENTION, "(k_cache + key", "(v_cache + key"),
    Mutant(ATTENTION, "key % BLOCK_SIZE;", "key % BLOCK_SIZE + 1;", which=0),
    Mutant(ATTENTION, "key / BLOCK_SIZE", "key / (BLOCK_SIZE * 2)", which=1),
    Mutant(ATTENTION, "kv_head * D))", "0))", which=0),
    Mutant(ATTENTION, "STRIDE = D + VECTOR", "STRIDE = D"),
    Mutant(ATTENTION, "f * 8 * STRIDE", "f * STRIDE", which=1),
    Mutant(ATTENTION, "STRIDE, ulong2(0, 0), true", "STRIDE, ulong2(0, 0), false"),
    Mutant(ATTENTION, "kv_head * G + row % G", "kv_head * G"),
    Mutant(ATTENTION, "first_position + row / G", "first_position + row"),
    Mutant(ATTENTION, "i += THREADS", "i += THREADS / 2", which=2),
    Mutant(ATTENTION, "if (row_exists) {", "{"),
    # softmax
    Mutant(ATTENTION, "total *= shrink;", ""),
    Mutant(ATTENTION, "output[d].thread_elements()[1] *= shrink;", ""),
    Mutant(ATTENTION, "peak = new_peak;", ""),
    Mutant(ATTENTION, "numbers[0] * LOG2E;", "numbers[0];"),
    Mutant(ATTENTION, "numbers[1] * LOG2E;", "numbers[1];"),
    Mutant(ATTENTION, "ushort(8)", "ushort(16)", which=0),
    Mutant(ATTENTION, "ushort(8)", "ushort(2)", which=1),
    Mutant(ATTENTION, "ushort(1)", "ushort(4)", which=0),
    Mutant(ATTENTION, "ushort(1)", "ushort(3)", which=1),
    Mutant(ATTENTION, "(lane >> 1) & 3", "(lane >> 2) & 3"),
    Mutant(ATTENTION, "((lane >> 2) & 2) * 2", "((lane >> 2) & 2)"),
    Mutant(ATTENTION, "if (f % slots == slot)", "if (f % slots == 0)", which=0),
    Mutant(
        ATTENTION,
        "const T w = T(fast::exp2(scores[f].thread_elements()[e] - peak));\n"
        "        weights[f].thread_elements()[e] = w;",
        "const float w = fast::exp2(scores[f].thread_elements()[e] - peak);\n"
        "        weights[f].thread_elements()[e] = T(w);",
        equivalent="moves a result by half a unit in its last place at most: no more than rounding the output does",
    ),
    Mutant(ATTENTION, "f < KEY_FRAGMENTS", "f <= KEY_FRAGMENTS", which=0),
    Mutant(ATTENTION, "f < KEY_FRAGMENTS", "f <= KEY_FRAGMENTS", which=1),
    Mutant(ATTENTION, "f < KEY_FRAGMENTS", "f <= KEY_FRAGMENTS", which=2),
    # merging slots and splits
    Mutant(ATTENTION, "if (first > 0) {", "if (false) {"),
    Mutant(
        ATTENTION, "(ulong(partial_row + r) * num_kv_heads + kv_head) * D", "(ulong(partial_row + r) + kv_head) * D"
    ),
    Mutant(ATTENTION, "(partial_row + row) * num_kv_heads + kv_head]", "(partial_row + row) + kv_head]"),
    Mutant(ATTENTION, "* CARRIED_STRIDE + column", "* COLUMNS + column"),
    Mutant(ATTENTION, "/ (GROUPS * 8);", "/ (GROUPS * 8) + 1;"),
    Mutant(ATTENTION, "int s = 0; s < slots", "int s = 1; s < slots", which=0),
    Mutant(ATTENTION, "int s = 0; s < slots", "int s = 1; s < slots", which=1),
    Mutant(ATTENTION, "int s = 0; s < slots", "int s = 1; s < slots", which=2),
    Mutant(ATTENTION, "&& partial_row < 0) {", ") {"),
    Mutant(
        ATTENTION,
        "row_peak = max(row_peak, sink);",
        "",
        equivalent="the peak only keeps 2^x from overflowing, and where the sink's does, the true output is 0 too",
    ),
    Mutant(ATTENTION, "row_peak + precise::log2(row_total)", "row_peak"),
    Mutant(ATTENTION, "lane_column == 0) {", "lane_column == 2) {", equivalent="all lanes of a row hold the same"),
    Mutant(ATTENTION, "num_rows <= 8 ? 1", "num_rows <= 9 ? 1"),
    Mutant(ATTENTION, "num_rows <= 16 ? 2", "num_rows <= 17 ? 2"),
    Mutant(ATTENTION, "num_rows <= 32 ? 4", "num_rows <= 33 ? 4"),
    Mutant(MERGE, "int s = 0; s < splits", "int s = 1; s < splits", which=0),
    Mutant(MERGE, "int s = 0; s < splits", "int s = 1; s < splits", which=1),
    Mutant(MERGE, _BARRIER, ""),
    Mutant(MERGE, _BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);"),
    Mutant(MERGE, "int(thread_position_in_threadgroup.x);", "0;"),
    Mutant(MERGE, "s += int(threads_per_threadgroup.x)", "s += MAX_SPLITS"),
    Mutant(MERGE, "logs[s] - peak", "logs[0] - peak"),
    Mutant(MERGE, "sum / total", "sum"),
    Mutant(MERGE, "+ head % G", ""),
    Mutant(MERGE, "HAS_SINKS ? fast::exp2(sink - peak) : 0.0f", "0.0f"),
    Mutant(MERGE, "s * stride", "s", which=0),
    Mutant(MERGE, "s * stride", "s", which=1),
)


def factory_of(mutant: Mutant | None) -> Callable[..., Any]:
    """A kernel factory whose kernels carry the mutation."""

    def factory(**arguments: Any) -> Any:
        if mutant and arguments["name"] == mutant.kernel:
            arguments["source"] = mutant.apply(kernel_text(f"{mutant.kernel}.metal"))
        return metal_kernel(**arguments)

    return factory


@dataclass(frozen=True)
class Case:
    """A step, and how to attend over it."""

    segments: list[tuple[int, int]]  # (query_len, kv_len)
    num_heads: int
    num_kv_heads: int
    dtype: mx.Dtype = mx.float32
    target_threadgroups: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    head_dim: int = 64
    scale: float = 0.2
    tolerance: float = 2e-5


CASES = (
    Case([(1, 1), (1, 7), (5, 18), (33, 33), (1, 130), (40, 200)], 8, 2),
    Case([(1, 300), (9, 18), (33, 150), (17, 100)], 1, 1, window=40, softcap=15.0, sinks=True),
    Case([(1, 1500), (6, 1300), (3, 20)], 2, 1, target_threadgroups=1000, sinks=True),
    Case([(11, 1700)], 3, 1, target_threadgroups=1000, window=1690),
    # More splits than the merge has threads.
    Case([(1, 8448)], 1, 1, target_threadgroups=1000),
    # Outputs that leave in several pieces; scores far apart, so that a wrong peak overflows.
    Case([(1, 520)] * 8 + [(40, 90)], 2, 1, target_threadgroups=1000, head_dim=256, scale=100.0, tolerance=1e-2),
    # Half precision: other widths of loads and rows, rounded weights. Split, and with a tail of whole rows.
    Case([(1, 1300), (3, 1100), (20, 90)], 4, 2, mx.float16, target_threadgroups=1000, window=1250, tolerance=2e-3),
    Case(
        [(1, 1200), (2, 1030), (1, 9)],
        3,
        1,
        mx.bfloat16,
        target_threadgroups=1000,
        head_dim=128,
        sinks=True,
        tolerance=1.5e-2,
    ),
)


def run_case(backend: MetalBackend, case: Case) -> str | None:
    """None, or what is wrong."""
    step = make_step(
        [(n, kv - n) for n, kv in case.segments],
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        window=case.window,
    )
    sinks = mx.array(np.linspace(-1, 9, case.num_heads).astype(np.float32)) if case.sinks else None
    options: dict[str, Any] = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    backend.target_threadgroups = case.target_threadgroups
    try:
        with record_launches() as launches:
            out = backend.for_step(step.rows).attend(step.q, step.state, sinks=sinks, **options)
    except (MetalSimError, CheckError) as error:
        return str(error)
    expected = step.reference(sinks=None if sinks is None else np.array(sinks), **options)
    got = np.array(out.astype(mx.float32))
    errors = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    if not errors.max() <= case.tolerance:
        return f"relative error {errors.max():.2g} in {int((~(errors <= case.tolerance)).sum())} of {errors.size} rows"
    # A tile reads no key twice and none outside its range; the planner's table says how many that are.
    attention = backend.for_step(step.rows)
    keys = stage_keys(case.dtype, case.head_dim)
    table = attention._items(case.num_heads // case.num_kv_heads, case.num_kv_heads, case.window, keys).items.table
    item_keys = int((table[:, 4] - table[:, 3]).sum()) * case.num_kv_heads
    bound = item_keys * 2 * case.head_dim * case.dtype.size
    buffers = launches[0].buffers
    if buffers["k_cache"].read + buffers["v_cache"].read != bound:
        return "reads more or less of K and V than its items name"
    if buffers["block_table"].read != item_keys * 4:
        return "looks up more or fewer keys than its items name"
    return None


def caught(mutant: Mutant | None) -> str | None:
    """What noticed the mutant, or None."""
    backend = MetalBackend(factory_of(mutant))
    for case in CASES:
        if found := run_case(backend, case):
            return found
    return None


def run_mutants(mutants: tuple[Mutant, ...], caught: Callable[[Mutant | None], str | None]) -> int:
    """Print what notices each mutant, or those whose numbers the command names. 1 where one is missed."""
    assert caught(None) is None, "the kernel itself fails"
    chosen = [int(a) for a in sys.argv[1:]] or range(len(mutants))
    missed = []
    for i in chosen:
        found = caught(mutants[i])
        if found is None and not mutants[i].equivalent:
            missed.append(i)
        verdict = f"equivalent: {mutants[i].equivalent}" if found is None and mutants[i].equivalent else found
        print(f"{i:3} {mutants[i].name}\n      {verdict or 'NOT CAUGHT'}", flush=True)
    print(f"{len(list(chosen))} mutants, {len(missed)} not caught {missed or ''}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(run_mutants(MUTANTS, caught))
