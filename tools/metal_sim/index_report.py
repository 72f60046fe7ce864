"""The part of ``python -m tools.metal_sim report`` about the kernels of DeepSeek's index."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.index_selftest import IndexKind, random_index, select_random
from metal_engine.attention.indexed import SelectionSize
from metal_engine.attention.kernel_selftest import attend_random, random_state, shuffled_rows
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.kv_cache.spec import IndexSpec, LatentSpec

from .kernel import metal_kernel
from .launch import LaunchCounts, record_launches

_HEADER = """
## Selected keys

A decode of one layer in float16, at DeepSeek's sizes: an index of head_dim 128 that selects 2,048 keys, and latents of
512 + 64.

- *Bound*: each index key of the context once (256 bytes), and each selected latent once (1,152 bytes).
- *Index keys*, *latents*: bytes of all loads of them. *Ratio*: their sum over *bound*. *Allowed*: largest ratio that
  the tests accept.
- *Dense*: bytes of latents that the same decode loads without an index, computed and not counted.
- *Scores*: bytes of scores, written once and read five times.
- *Other*: all other traffic to and from device memory: queries, positions, outputs, tables and partial results.

"""
_COLUMNS = (
    "decode", "index keys", "latents", "bound", "ratio", "allowed", "dense", "scores", "other", "launches",
)  # fmt: skip
_BLOCK_SIZE, _TOP_K, _INDEX_DIM = 16, 2048, 128
_LATENT_DIM, _ROPE_DIM = 512, 64
_INDEX_KEY_BYTES, _LATENT_BYTES = 2 * _INDEX_DIM, 2 * (_LATENT_DIM + _ROPE_DIM)


@dataclass(frozen=True)
class IndexShape:
    """Decode of one request in a layer with an index.

    Attributes:
        num_keys: number of keys of the request's context.
        num_heads: number of query heads of the attention to latents.
        index_heads: number of query heads of the index.
        tiles: number of tiles of query heads. Without an index, each tile would read all latents.
        allowed: largest ratio of bytes read to the bound that the tests accept.
    """

    num_keys: int
    num_heads: int
    index_heads: int
    tiles: int
    allowed: float

    @property
    def name(self) -> str:
        return f"at {self.num_keys:,}, {self.num_heads} heads, index of {self.index_heads} heads"


INDEX_SHAPES = (
    IndexShape(4096, 16, 64, 1, 1.0),
    IndexShape(8192, 24, 64, 1, 1.0),
    IndexShape(8192, 64, 32, 3, 1.0),
    IndexShape(4096, 128, 64, 6, 1.0),
)


@dataclass(frozen=True)
class IndexLine:
    """Row of the table: a decode and the counts of its launches."""

    shape: IndexShape
    launches: list[LaunchCounts]

    @classmethod
    def of(cls, shape: IndexShape) -> IndexLine:
        """Run the decode in the simulated backend."""
        rows = shuffled_rows([(1, shape.num_keys - 1)], _BLOCK_SIZE)
        index = IndexKind(shape.index_heads, IndexSpec(_INDEX_DIM, mx.float16), SelectionSize(_TOP_K), has_weights=True)
        kind = AttentionKind(LatentSpec(_LATENT_DIM, _ROPE_DIM, mx.float16), shape.num_heads, mx.float16)
        queries, keys = random_index(index, rows)
        backend = MetalBackend(metal_kernel)
        with record_launches() as launches:
            selection = select_random(backend, rows, queries, keys)
            attend_random(backend, kind, rows, random_state(kind, rows), selection)
        return cls(shape, launches)

    def _read(self, buffer: str) -> int:
        return sum(c.buffers[buffer].read for c in self.launches if buffer in c.buffers)

    @property
    def index_keys(self) -> int:
        """Bytes of index keys read."""
        return self._read("index_keys")

    @property
    def latents(self) -> int:
        """Bytes of latents read."""
        return self._read("k_cache") + self._read("v_cache")

    @property
    def bound(self) -> int:
        return self.shape.num_keys * _INDEX_KEY_BYTES + _TOP_K * _LATENT_BYTES

    @property
    def ratio(self) -> float:
        return (self.index_keys + self.latents) / self.bound

    @property
    def scores(self) -> int:
        """Bytes of scores, written and read."""
        return sum(
            c.buffers["scores"].read + c.buffers["scores"].written for c in self.launches if "scores" in c.buffers
        )

    def cells(self) -> list[str]:
        moved = sum(b.read + b.written for c in self.launches for b in c.buffers.values())
        dense = self.shape.tiles * self.shape.num_keys * _LATENT_BYTES
        return [
            self.shape.name,
            f"{self.index_keys:,}",
            f"{self.latents:,}",
            f"{self.bound:,}",
            f"{self.ratio:.3f}",
            f"{self.shape.allowed:.2f}",
            f"{dense:,}",
            f"{self.scores:,}",
            f"{moved - self.index_keys - self.latents - self.scores:,}",
            f"{len(self.launches)}",
        ]


def index_table(lines: list[IndexLine]) -> str:
    """Return the section about selected keys of docs/dev/kernel_bytes.md."""
    rows = [list(_COLUMNS), ["---", *["---:"] * (len(_COLUMNS) - 1)], *(line.cells() for line in lines)]
    return _HEADER + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
