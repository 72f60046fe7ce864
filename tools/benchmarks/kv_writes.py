"""Compares ways to write a layer's K or V to the paged cache: by slot, by whole block, or by run of consecutive slots.

    python -m tools.benchmarks.kv_writes

Writes by slot and by block are one scatter in place and differ in the number of indices. Rows outside whole blocks
(decodes, ragged ends) must be separated first: *mixed* has 16 such rows. Writes by run copy rows with consecutive slots
as a slice. Here all slots are consecutive, as for a prompt with consecutive blocks. Prints medians, measured in
rotation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from metal_engine.device.blas.load import load_optimized_blas

load_optimized_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

BLOCK_SIZE = 16
NUM_BLOCKS = 2048


class Pool:
    """K of one layer, written in place."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self.shape = (num_heads, head_dim)
        self.slots = mx.zeros((NUM_BLOCKS * BLOCK_SIZE, num_heads, head_dim))
        mx.eval(self.slots)

    def by_slot(self, rows: mx.array, slots: mx.array) -> None:
        self.slots[slots] = rows

    def by_block(self, rows: mx.array, block_ids: mx.array) -> None:
        blocks = self.slots.reshape(NUM_BLOCKS, BLOCK_SIZE, *self.shape)
        self.slots = None  # the view is now the only owner, so the scatter is in place
        blocks[block_ids] = rows.reshape(-1, BLOCK_SIZE, *self.shape)
        self.slots = blocks.reshape(-1, *self.shape)

    def by_run(self, rows: mx.array) -> None:
        self.slots[BLOCK_SIZE : BLOCK_SIZE + len(rows)] = rows


def time_in_turns(ways: dict[str, Callable[[], None]], pool: Pool, repeats: int = 60) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, write in ways.items():
            start = time.perf_counter()
            write()
            mx.eval(pool.slots)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[5:]) * 1e6 for name, values in times.items()}


def main() -> None:
    rng = np.random.default_rng(0)
    print("rows  heads x dim   by slot us   by block us   mixed by block us   by run us   slot / block   slot / run")
    for num_rows in (128, 512, 2048):
        for num_heads, head_dim in ((3, 64), (8, 128)):
            pool = Pool(num_heads, head_dim)
            ids = rng.permutation(NUM_BLOCKS)[: num_rows // BLOCK_SIZE].astype(np.int32)
            slots = mx.array((ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).ravel())
            rows = mx.array(rng.standard_normal((num_rows, num_heads, head_dim)), mx.float32)
            block_ids = mx.array(ids)
            whole, rest = mx.arange(16, num_rows), mx.arange(16)  # the first block's rows represent decodes
            mx.eval(slots, rows, block_ids, whole, rest)

            def mixed(pool=pool, rows=rows, slots=slots, block_ids=block_ids, whole=whole, rest=rest) -> None:  # type: ignore[no-untyped-def]
                pool.by_slot(rows[rest], slots[rest])
                pool.by_block(rows[whole], block_ids[1:])

            us = time_in_turns(
                {
                    "slot": lambda pool=pool, rows=rows, slots=slots: pool.by_slot(rows, slots),
                    "block": lambda pool=pool, rows=rows, ids=block_ids: pool.by_block(rows, ids),
                    "mixed": mixed,
                    "run": lambda pool=pool, rows=rows: pool.by_run(rows),
                },
                pool,
            )
            print(
                f"{num_rows:4d}  {num_heads:5d} x {head_dim:<4d}  {us['slot']:10.0f}  {us['block']:12.0f}  "
                f"{us['mixed']:18.0f}  {us['run']:10.0f}  {us['slot'] / us['block']:13.2f}  "
                f"{us['slot'] / us['run']:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
