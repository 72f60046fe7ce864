"""``python -m tools.metal_sim report``: compares the bytes that the attention kernel moves with the minimum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.variants import THREADS, AttentionShape, stage_keys, variant_of
from metal_engine.kv_cache.state import KVState

from .index_report import INDEX_SHAPES, IndexLine, index_table
from .kernel import metal_kernel
from .launch import LaunchCounts, record_launches

HEADER = """\
# Bytes that the attention kernel reads

Use this page to see whether a change to the attention kernel reads more memory. `python -m tools.metal_sim
report --write` writes this page. The simulator counts the bytes, so the figures are the same on every
machine.

- *K+V read*: bytes of all loads from the KV cache.
- *Bound*: each visible byte of K and V once per KV head, in float16, for a quantized cache too. A prefill's
  bound is one pass over K and V. A latent's bound counts K alone, because V is part of K.
- *Ratio*: *K+V read* over *bound*. *Allowed*: largest ratio that the tests accept. Reads of a quantized cache
  include its scales and biases.
- *Other*: all other traffic to and from device memory: queries, outputs, tables and partial results of
  splits.
- *Merging*: the part of *other* that splits cost. Partial results are written once and read again. A request
  is split as if it were alone in the batch. The rows of 64 decodes show this cost in a batch that needs no
  splits.
- *Threadgroups*: threadgroups of the attention launch. The host plans 96 for a GPU of unknown size.
- *Loads in flight*: loads of K that a thread starts before it waits for the first load, and the bytes of each
  load. V has the same number. Quantized K and V also load a scale and a bias.
- Rows with *less these*: *K+V read* of the mixed step, minus *K+V read* of a step with the chunk and the
  prompt alone. The difference is the decodes' share. Columns from *other* on count the whole mixed step.
"""
BEFORE = """
## Before

An earlier kernel staged every item, copied in a loop of unknown length, and split a context at the step's fair share.
The simulator counted both kernels when that changed, for 40 cores (320 threadgroups planned) in float16. Each cell is
before / after.

| shape | threadgroups | longest item, keys | barriers of a threadgroup | threadgroup memory | loads in flight |
| --- | ---: | ---: | ---: | ---: | ---: |
| decode at 1,000, 8 KV heads, group 4, head_dim 128 | 8 / 64 | 1,000 / 128 | 68 / 8 | 10.0 / 5.3 MB | 1 / 8 |
| decode at 1,030, the same | 24 / 48 | 512 / 192 | 27 / 8 | 11.8 / 4.1 MB | 1 / 8 |
| decode at 4,096, the same | 64 / 256 | 512 / 128 | 36 / 8 | 42.6 / 21.1 MB | 1 / 8 |
| decode at 4,096, 4 KV heads, group 4, head_dim 256 | 32 / 128 | 512 / 128 | 72 / 10 | 41.8 / 11.1 MB | 1 / 8 |
| decode at 4,096, 2 KV heads, group 16, head_dim 128 | 16 / 32 | 512 / 256 | 36 / 8 | 14.9 / 6.1 MB | 1 / 4 |
| 64 decodes at 1,000, 2 KV heads, group 4, head_dim 64 | 286 / 868 | 1,023 / 192 | 34 / 4 | 92.8 / 51.6 MB | 1 / 8 |
| prefill 512 on 512, 2 KV heads, group 4, head_dim 128 | 64 / 64 | 512 / 512 | 22 / 27 | 91.6 / 91.6 MB | 1 / 4 |
| the same, head_dim 256: two SIMD groups share a row | 64 / 128 | 512 / 512 | 42 / 43 | 173 / 222 MB | 1 / 4 |
"""
BLOCK_SIZE = 16
# Buffers from which K and V are read.
CACHES = ("k_cache", "k_scales", "k_biases", "v_cache", "v_scales", "v_biases")


@dataclass(frozen=True)
class SimShape:
    """Step of attention. ``segments`` has (query_len, kv_len) of each request.

    ``group`` is the number of query heads per KV head. ``allowed`` is the largest ratio of bytes read to the bound that
    the tests accept.
    """

    name: str
    segments: tuple[tuple[int, int], ...]
    group: int
    allowed: float
    num_kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None  # default: head_dim
    is_latent: bool = False
    window: int | None = None
    quantized: tuple[int, int] | None = None  # bits and group size; None: float16
    # Other requests in the step. Their cost in a separate step is subtracted.
    others: tuple[tuple[int, int], ...] = ()

    @property
    def bytes_of_a_key(self) -> int:
        """Bytes of a key and its value in all KV heads, in float16. A latent counts once."""
        v_head_dim = 0 if self.is_latent else self.v_head_dim or self.head_dim
        return (self.head_dim + v_head_dim) * self.num_kv_heads * 2

    @property
    def attention(self) -> AttentionShape:
        """Sizes of the attention as the engine's host code describes them, in float16."""
        v_head_dim, heads = self.v_head_dim or self.head_dim, self.num_kv_heads * self.group
        kept = self.quantized or (0, 0)
        return AttentionShape(
            mx.float16, self.head_dim, v_head_dim, heads, self.num_kv_heads, BLOCK_SIZE, self.is_latent, *kept
        )

    @property
    def visible_keys(self) -> int:
        return sum(kv if self.window is None else min(kv, n + self.window - 1) for n, kv in self.segments)


DECODES = ((1, 4096), (1, 777), (1, 1500), (1, 64))
SHAPES = (
    *(SimShape(f"decode, 4 requests, group {g}", DECODES, g, 1.05, num_kv_heads=2) for g in (1, 2, 4, 8)),
    *(
        SimShape(f"the same beside a chunk and a fresh prompt, less these, group {g}", DECODES, g, 1.05,
              num_kv_heads=2, others=((96, 352), (64, 64)))
        for g in (1, 4)
    ),
    *(
        SimShape(f"prefill 2,048 on 2,048, group {g}", ((2048, 2048),), g, 0.55 * -(-2048 * g // 64))
        for g in (1, 2, 4)
    ),
    *(
        SimShape(f"decode, 64 requests of about 1,000, group {g}", tuple((1, 1000 + i) for i in range(64)), g, 1.05)
        for g in (4, 16)
    ),
    SimShape("decode at 32,768, window 1,024, group 4", ((1, 32_768),), 4, 1.1, window=1024),
    SimShape("decode at 32,768, group 4", ((1, 32_768),), 4, 1.05),
    *(SimShape(f"decode at 4,096, group 4, head_dim {d}", ((1, 4096),), 4, 1.05, head_dim=d) for d in (128, 256, 512)),
    *(SimShape(f"decode at 4,096, group {g}, head_dim 128", ((1, 4096),), g, 1.05, head_dim=128) for g in (16, 24, 32)),
    SimShape("decode at 4,096, K of 192 and V of 128", ((1, 4096),), 1, 1.05, num_kv_heads=16, head_dim=192,
          v_head_dim=128),
    *(
        SimShape(f"decode at 4,096, latent of 512 + 64, {heads} heads", ((1, 4096),), heads, 1.05, head_dim=576,
              v_head_dim=512, is_latent=True)
        for heads in (16, 20)
    ),
    # Tiles of 24 rows. Each tile reads the latent.
    SimShape("decode at 4,096, latent of 512 + 64, 128 heads", ((1, 4096),), 128, 6.05, head_dim=576, v_head_dim=512,
          is_latent=True),
    SimShape("prefill 512 on 512, group 4, head_dim 256", ((512, 512),), 4, 0.55 * 64, head_dim=256),
    *(
        shape
        for bits, allowed, in_groups_of_32 in ((8, 0.55, 0.5625), (4, 0.30, 0.3125))
        for shape in (
            SimShape(f"decode, 4 requests, group 4, int{bits}", DECODES, 4, allowed, num_kv_heads=2,
                  quantized=(bits, 64)),
            SimShape(f"decode at 4,096, group 4, head_dim 128, int{bits}", ((1, 4096),), 4, allowed, head_dim=128,
                  quantized=(bits, 64)),
            SimShape(f"decode at 4,096, group 4, head_dim 96, int{bits} in groups of 32", ((1, 4096),), 4,
                  in_groups_of_32, head_dim=96, quantized=(bits, 32)),
            SimShape(f"decode at 4,096, latent of 512 + 64, 16 heads, int{bits}", ((1, 4096),), 16, allowed,
                  head_dim=576, v_head_dim=512, is_latent=True, quantized=(bits, 64)),
            # Items of 16 rows, so two items read the latent: of 24 rows, registers would spill in the loop.
            SimShape(f"decode at 4,096, latent of 512 + 64, 20 heads, int{bits}", ((1, 4096),), 20, 2 * allowed,
                  head_dim=576, v_head_dim=512, is_latent=True, quantized=(bits, 64)),
            SimShape(f"prefill 512 on 512, group 4, head_dim 256, int{bits}", ((512, 512),), 4, allowed * 0.55 * 64,
                  head_dim=256, quantized=(bits, 64)),
        )
    ),
)  # fmt: skip


def run(shape: SimShape) -> list[LaunchCounts]:
    """Run one layer's attention for the requests of ``shape.segments`` and ``shape.others`` in the simulated backend.

    Queries are float16. K and V are float16, or quantized if ``shape.quantized`` is set.
    """
    from metal_engine.attention.metal.backend import MetalBackend
    from metal_engine.kv_cache.rows import step_rows
    from tools.fixtures.packed_step import kv_state, latent_state, quantized_state

    query_lens, seq_lens = np.array((*shape.segments, *shape.others), np.int32).T
    blocks = -(-seq_lens // BLOCK_SIZE)
    table = np.zeros((len(blocks), int(blocks.max())), np.int32)
    order = iter(np.random.default_rng(0).permutation(int(blocks.sum())))
    for row, n in zip(table, blocks, strict=True):
        row[:n] = [next(order) for _ in range(n)]
    rows = step_rows(table, seq_lens - query_lens, query_lens, BLOCK_SIZE)
    mx.random.seed(0)
    v_head_dim = shape.v_head_dim or shape.head_dim
    k, v = (
        mx.random.normal((int(blocks.sum()), BLOCK_SIZE, shape.num_kv_heads, dim)).astype(mx.float16)
        for dim in (shape.head_dim, v_head_dim)
    )
    state: KVState = latent_state(k, v_head_dim) if shape.is_latent else kv_state(k, v)
    if shape.quantized:
        state = quantized_state(state, *shape.quantized)
    heads = shape.num_kv_heads * shape.group
    q = mx.random.normal((rows.num_tokens, heads, shape.head_dim)).astype(mx.float16)
    with record_launches() as launches:
        attention = MetalBackend(metal_kernel).for_step(rows)
        attention.attend(q, state, scale=shape.head_dim**-0.5, window=shape.window)
    return launches


def _kv_read(launches: list[LaunchCounts]) -> int:
    buffers = launches[0].buffers if launches else {}
    return sum(buffers[name].read for name in CACHES if name in buffers)


@dataclass(frozen=True)
class Line:
    """Row of the table: a shape and the counts of its launches."""

    shape: SimShape
    launches: list[LaunchCounts]
    of_others: list[LaunchCounts]  # the other requests in a separate step; empty if there are none

    @classmethod
    def of(cls, shape: SimShape) -> Line:
        """Run the whole step of a shape, and then its other requests in a step of their own."""
        alone = replace(shape, segments=shape.others, others=())
        return cls(shape, run(shape), run(alone) if shape.others else [])

    @property
    def kv_read(self) -> int:
        """Bytes of K and V read for the requests in ``shape.segments``, without ``shape.others``."""
        return _kv_read(self.launches) - _kv_read(self.of_others)

    @property
    def bound(self) -> int:
        return self.shape.visible_keys * self.shape.bytes_of_a_key

    @property
    def ratio(self) -> float:
        return self.kv_read / self.bound

    @property
    def other(self) -> int:
        moved = sum(b.read + b.written for c in self.launches for b in c.buffers.values())
        return moved - _kv_read(self.launches)

    @property
    def merging(self) -> int:
        """Bytes of partial results, written by the splits and read by the merge."""
        partial = [c.buffers[name] for c in self.launches for name in c.buffers if name.startswith("partial_")]
        return sum(b.read + b.written for b in partial)

    @property
    def loads_in_flight(self) -> str:
        """Loads of K that a thread starts before it waits, for the request with the fewest rows, as "COUNT x BYTES"."""
        shape, size = self.shape, 2
        latent = shape.v_head_dim if shape.is_latent and shape.v_head_dim else 0
        v = variant_of(shape.attention)
        bits = shape.attention.bits or 8 * size
        rows = min(min(n for n, _ in shape.segments) * shape.group, v.tile_rows)
        if rows <= 8 * v.strips:
            columns = latent or shape.head_dim
            return f"{v.held * -(-columns // (4 * v.k_columns * v.parts))} x {v.k_columns * bits // 8}"
        piece = 16 if shape.head_dim * size % 16 == 0 else 8
        stage_bytes = stage_keys(shape.attention, v) * shape.head_dim * size
        return f"{-(-stage_bytes // (piece * THREADS))} x {piece * bits // (8 * size)}"

    def cells(self) -> list[str]:
        c = self.launches[0]
        return [
            self.shape.name,
            f"{self.kv_read:,}",
            f"{self.bound:,}",
            f"{self.ratio:.3f}",
            f"{self.shape.allowed:.2f}",
            f"{self.other:,}",
            f"{self.merging:,} ({self.merging / _kv_read(self.launches):.1%})",
            f"{c.threadgroups:,}",
            self.loads_in_flight,
            f"{c.threadgroup_read + c.threadgroup_written:,}",
            f"{c.products:,}",
            f"{c.barriers:,}",
            f"{sum(x.simd_operations for x in self.launches):,}",
            str(len(self.launches)),
        ]


COLUMNS = (
    "shape", "K+V read", "bound", "ratio", "allowed", "other", "merging (of K+V)", "threadgroups", "loads in flight",
    "threadgroup memory", "8x8 products", "barriers", "SIMD operations", "launches",
)  # fmt: skip


def table() -> tuple[str, list[Line | IndexLine]]:
    """Return the text of docs/dev/kernel_bytes.md, and all rows."""
    lines, index_lines = [Line.of(s) for s in SHAPES], [IndexLine.of(s) for s in INDEX_SHAPES]
    rows = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)], *(line.cells() for line in lines)]
    of_attention = "\n".join("| " + " | ".join(r) + " |" for r in rows)
    return f"{HEADER}\n{of_attention}\n{index_table(index_lines)}{BEFORE}", [*lines, *index_lines]
