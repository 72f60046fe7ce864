"""Compares the attention kernel with MLX's own attention and with the memory bandwidth.

On a Mac, times the kernel on the GPU, and ``mx.fast.scaled_dot_product_attention`` on contiguous K and V. Decode is
also compared with the time to read K and V at the bandwidth of a large copy in the same run. On other machines, prints
counts of the kernel's simulator for the same shapes.

    python -m tools.benchmarks.attention [--smoke]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: ``requests`` requests with ``query`` new tokens each.

    ``context`` is the number of keys of each request, the new tokens included.
    """

    requests: int
    query: int
    context: int
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        kind = "decode" if self.query == 1 else "prefill"
        return f"{kind} {self.requests} x {self.query} on {self.context}"

    @property
    def kv_bytes(self) -> int:
        """Size of K and V in float16, in bytes."""
        return self.requests * self.context * 2 * self.num_kv_heads * self.head_dim * 2


SHAPES = (
    StepShape(1, 1, 1024),
    StepShape(1, 1, 32_768),
    StepShape(16, 1, 1024),
    StepShape(64, 1, 2048),
    StepShape(1, 512, 512),
    StepShape(1, 2048, 2048),
    StepShape(1, 512, 8192),
)
SMOKE = (StepShape(2, 1, 64, 4, 2, 64), StepShape(1, 32, 48, 4, 2, 64))


def make_step(shape: StepShape, block_size: int = 16):  # type: ignore[no-untyped-def]
    """Return the rows of a step, random float16 queries and the KV state of one layer. Blocks are in random order."""
    import mlx.core as mx

    from metal_engine.kv_cache.rows import step_rows
    from tools.fixtures.packed_step import kv_state

    blocks = -(-shape.context // block_size)
    order = np.random.default_rng(0).permutation(shape.requests * blocks).astype(np.int32)
    tokens = shape.requests * shape.query
    context_lens = np.full(shape.requests, shape.context - shape.query, np.int32)
    block_table = order.reshape(shape.requests, blocks)
    rows = step_rows(block_table, context_lens, [shape.query] * shape.requests, block_size)
    mx.random.seed(0)
    cache = (shape.requests * blocks, block_size, shape.num_kv_heads, shape.head_dim)
    k, v = (mx.random.normal(cache).astype(mx.float16) for _ in range(2))
    q = mx.random.normal((tokens, shape.num_heads, shape.head_dim)).astype(mx.float16)
    mx.eval(q, k, v)
    return rows, q, kv_state(k, v)


def copy_bandwidth() -> float:
    """Return the bandwidth of a large elementwise operation: bytes read and written per second."""
    import mlx.core as mx

    from metal_engine.doctor.timing import in_turns

    a = mx.zeros((256 << 20,), mx.uint8)
    mx.eval(a)
    return 2 * a.nbytes / in_turns({"copy": lambda: a + 1}, 10)["copy"]


def on_metal(shapes: tuple[StepShape, ...]) -> None:
    """Print a table of the kernel's and MLX's times on the GPU, and of ratios of times measured in this run."""
    import mlx.core as mx

    from metal_engine.attention.backend import AttentionKind
    from metal_engine.attention.metal.backend import MetalBackend
    from metal_engine.doctor.sections.attention import layer_seconds
    from metal_engine.kv_cache.spec import KVSpec

    backend, dtype = MetalBackend(), mx.float16
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s\n")
    print("| shape | kernel, ms | MLX, ms | kernel / MLX | kernel / reading K and V |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for shape in shapes:
        kind = AttentionKind(KVSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim, dtype), shape.num_heads, dtype)
        ours, theirs = layer_seconds(backend, kind, (shape.requests, shape.query, shape.context), 20)
        reading = f"{ours * bandwidth / shape.kv_bytes:.2f}" if shape.query == 1 else ""
        print(f"| {shape.name} | {ours * 1e3:.3f} | {theirs * 1e3:.3f} | {ours / theirs:.2f} | {reading} |")


def simulated(shapes: tuple[StepShape, ...]) -> None:
    """Print a table of the simulator's counts (bytes read, products, threadgroups) for one KV head.

    All KV heads do the same work.
    """
    from metal_engine.attention.metal.backend import MetalBackend
    from tools.metal_sim import metal_kernel, record_launches

    print("No Metal here: the simulator's counts, per KV head. Times need a Mac.\n")
    print("| shape | K+V read | bound | ratio | 8x8 products | threadgroups | launches |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for shape in shapes:
        single = StepShape(
            shape.requests, shape.query, shape.context, shape.num_heads // shape.num_kv_heads, 1, shape.head_dim
        )
        rows, q, state = make_step(single)
        with record_launches() as launches:
            MetalBackend(metal_kernel).for_step(rows).attend(q, state, scale=shape.head_dim**-0.5)
        first = launches[0]
        read = first.buffers["k_cache"].read + first.buffers["v_cache"].read
        print(
            f"| {shape.name} | {read:,} | {single.kv_bytes:,} | {read / single.kv_bytes:.3f} | {first.products:,} "
            f"| {first.threadgroups} | {len(launches)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="use tiny shapes to check that the tool runs")
    shapes = SMOKE if parser.parse_args().smoke else SHAPES

    from metal_engine.device.blas.load import load_optimized_blas

    load_optimized_blas()
    import mlx.core as mx

    if mx.metal.is_available():
        on_metal(shapes)
    else:
        simulated(shapes)


if __name__ == "__main__":
    main()
