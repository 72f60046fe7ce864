"""Compares single operations of a step on the CPU: MLX's versions and metal-engine's.

    OPENBLAS_NUM_THREADS=2 python -m tools.benchmarks.cpu_ops

Uses shapes of the demo model. Prints medians of one operation evaluated alone, measured in rotation. *Chained*
operations are evaluated many at a time, as in a step's graph, which spreads the cost of starting an evaluation.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from metal_engine.device.blas.load import load_optimized_blas

load_optimized_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402

from metal_engine.attention.portable.backend import PortableBackend  # noqa: E402
from metal_engine.attention.portable.exp2 import FLOOR, weights_of_scores  # noqa: E402
from metal_engine.attention.portable.groups import CPU_LIMITS  # noqa: E402
from metal_engine.kv_cache.rows import step_rows  # noqa: E402
from metal_engine.models import cpu_ops  # noqa: E402
from tools.fixtures.packed_step import kv_state  # noqa: E402

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 576, 1536, 9, 3, 64, 30

Way = Callable[[], mx.array]


def in_turns(ways: dict[str, Way], repeats: int = 40, chain: int = 1) -> dict[str, float]:
    """Return the median microseconds of the evaluation of one call of each function, measured in rotation.

    ``chain`` calls are evaluated at a time. The time is divided by ``chain``.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            built = [way() for _ in range(chain)]
            start = time.perf_counter()
            mx.eval(built)
            times[name].append((time.perf_counter() - start) / chain)
    return {name: statistics.median(values[3:]) * 1e6 for name, values in times.items()}


def report(what: str, ways: dict[str, Way], **kwargs: int) -> None:
    us = in_turns(ways, **kwargs)
    print(f"{what:<44}" + "".join(f"{name:>12} {value:7.0f} us" for name, value in us.items()), flush=True)


def normal(*shape: int) -> mx.array:
    array = mx.random.normal(shape)
    mx.eval(array)
    return array


def elementwise() -> None:
    norm, plain_norm = cpu_ops.ProductRMSNorm(HIDDEN, 1e-5), nn.RMSNorm(HIDDEN, 1e-5)
    rope, plain_rope = cpu_ops.TableRoPE(HEAD_DIM, False, 1e5), nn.RoPE(HEAD_DIM, False, 1e5)
    for rows in (1, 16, 512):
        chain = 60 if rows < 512 else 1
        gate, up, hidden = (normal(rows, 1, INTERMEDIATE), normal(rows, 1, INTERMEDIATE), normal(rows, 1, HIDDEN))
        report(
            f"SwiGLU, {rows} rows",
            {"MLX": lambda: nn.silu(gate) * up, "ours": lambda: cpu_ops.swiglu(gate, up)},  # noqa: B023
            chain=chain,
        )
        report(
            f"RMSNorm, {rows} rows",
            {"MLX": lambda: plain_norm(hidden), "ours": lambda: norm(hidden)},  # noqa: B023
            chain=chain,
        )
        queries, positions = normal(rows, HEADS, 1, HEAD_DIM), cpu_ops.StepPositions(mx.arange(rows))
        mx.eval(rope(queries, positions))  # creates the step's tables
        report(
            f"RoPE of queries, {rows} rows",
            {"MLX": lambda: plain_rope(queries, mx.arange(rows)), "ours": lambda: rope(queries, positions)},  # noqa: B023
            chain=chain,
        )


def attention() -> None:
    for requests, rows, keys in ((16, 1, 165), (4, 150, 150)):
        scores = normal(requests, KV_HEADS, rows * HEADS // KV_HEADS, keys)
        peak = mx.max(scores, axis=-1, keepdims=True)
        mx.eval(peak)
        report(
            f"weights, {requests} x {rows} rows x {keys} keys",
            {
                "MLX": lambda: mx.power(2.0, mx.maximum(scores - peak, FLOOR)),  # noqa: B023
                "ours": lambda: weights_of_scores(scores, peak),  # noqa: B023
            },
            chain=20 if rows == 1 else 1,
        )
    gather()


def gather(requests: int = 16, keys: int = 165, block_size: int = 16, num_blocks: int = 2912) -> None:
    """Print times to gather one layer's K for some decodes: by single rows (256 B) and by whole blocks (4 KB).

    A *cold* gather follows a read of as many bytes as a layer's weights, as in a step. A *warm* gather follows the same
    gather.
    """
    layers = [mx.zeros((num_blocks * block_size * KV_HEADS, HEAD_DIM)) + i for i in range(LAYERS)]
    weights = normal(14 << 18)
    blocks_each = -(-keys // block_size)
    table = np.arange(requests * blocks_each).reshape(requests, blocks_each)
    slots = table[:, np.arange(keys) // block_size] * block_size + np.arange(keys) % block_size
    by_row = mx.array((slots[:, None] * KV_HEADS + np.arange(KV_HEADS)[:, None]).astype(np.int32))
    by_block = mx.array((table[:, None] * KV_HEADS + np.arange(KV_HEADS)[:, None]).astype(np.int32))
    mx.eval(layers, by_row, by_block)
    ways: dict[str, Callable[[mx.array], mx.array]] = {
        "256 B": lambda k: k[by_row],
        "4 KB": lambda k: k.reshape(-1, block_size * HEAD_DIM)[by_block],
    }
    for state in ("cold", "warm"):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(4):
            for name, way in ways.items():
                for k in layers:
                    mx.eval(weights + 1 if state == "cold" else way(k))
                    built = way(k)
                    start = time.perf_counter()
                    mx.eval(built)
                    times[name].append(time.perf_counter() - start)
        shown = "".join(f"{n:>12} {statistics.median(t) * 1e6:7.0f} us" for n, t in times.items())
        print(f"{f'K gathered, {requests} x {keys} keys, {state}':<44}{shown}", flush=True)


def decodes() -> None:
    """Print times of one layer's attention for decodes with consecutive blocks: with gathered keys, and without."""
    gathered = dataclasses.replace(CPU_LIMITS, run_keys=None)
    in_place = dataclasses.replace(CPU_LIMITS, run_keys=1)
    shapes = [(HEADS, KV_HEADS, HEAD_DIM), (16, 8, 128)]  # shapes of the demo model and of Qwen3-0.6B
    for num_heads, num_kv_heads, head_dim in shapes:
        for requests, keys in ((16, 165), (16, 320), (4, 520), (8, 700), (1, 1040), (8, 1040)):
            blocks = -(-keys // 16)
            block_table = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks)
            rows = step_rows(block_table, np.full(requests, keys - 1, np.int32), [1] * requests, 16)
            shape = (requests * blocks, 16, num_kv_heads, head_dim)
            layers = [kv_state(normal(*shape), normal(*shape)) for _ in range(6)]
            queries, weights = normal(requests, num_heads, head_dim), normal(14 << 18)
            times: dict[str, list[float]] = {"gathered": [], "in place": []}
            for _ in range(5):
                for name, limits in zip(times, (gathered, in_place), strict=True):
                    attention = PortableBackend(limits).for_step(rows)
                    for layer in layers:
                        mx.eval(weights + 1)  # read the weights that a step reads between two layers' attention
                        built = attention.attend(queries, layer, scale=0.1)
                        start = time.perf_counter()
                        mx.eval(built)
                        times[name].append(time.perf_counter() - start)
            shown = "".join(f"{n:>12} {statistics.median(t) * 1e6:7.0f} us" for n, t in times.items())
            what = f"{requests} x {keys} keys, {num_heads}/{num_kv_heads} heads of {head_dim}"
            print(f"{what:<44}{shown}", flush=True)


def gemm() -> None:
    """Print the time of all matrix products of a step's layers. The weights exceed the caches and come from memory."""
    kv = (KV_HEADS * HEAD_DIM, HIDDEN)
    shapes = [*[(HIDDEN, HIDDEN)] * 2, *[kv] * 2, *[(INTERMEDIATE, HIDDEN)] * 2, (HIDDEN, INTERMEDIATE)]
    layers = [[normal(*shape) for shape in shapes] for _ in range(LAYERS)]
    for rows in (1, 8, 16, 512):
        narrow, wide = normal(rows, HIDDEN), normal(rows, INTERMEDIATE)
        times = []
        for _ in range(12):
            start = time.perf_counter()
            for weights in layers:
                mx.eval([(wide if w.shape[1] == INTERMEDIATE else narrow) @ w.T for w in weights])
            times.append(time.perf_counter() - start)
        ms = statistics.median(times[2:]) * 1e3
        flop = 2 * rows * sum(w.size for weights in layers for w in weights)
        print(f"{f'GEMM of all layers, {rows} rows':<44}{ms:10.1f} ms {flop / ms / 1e6:10.0f} GFLOP/s", flush=True)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    elementwise()
    attention()
    decodes()
    gemm()
