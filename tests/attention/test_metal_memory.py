"""Memory reads and barriers of the simulated kernel."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from metal_engine.attention.metal.variants import GROUPS, AttentionShape, KernelVariant, stage_keys, variant_of
from tests.support.simulated import check


@dataclass(frozen=True)
class Heads:
    """Heads of a layer, in float16."""

    head_dim: int
    v_head_dim: int
    num_heads: int
    num_kv_heads: int
    is_latent: bool = False

    @property
    def bytes_of_a_key(self) -> int:
        """Bytes of a key and its value in all KV heads. A latent counts once."""
        return (self.head_dim + (0 if self.is_latent else self.v_head_dim)) * self.num_kv_heads * 2

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(mx.float16, **vars(self), block_size=16)

    @property
    def variant(self) -> KernelVariant:
        return variant_of(self.shape)

    def launches(self, segments, **options):
        return check(segments, dtype=mx.float16, **vars(self), **options)


def kv_read(launches):
    buffers = launches[0].buffers
    return buffers["k_cache"].read + buffers["v_cache"].read


def visible_keys(segments, window=None):
    """Return the number of keys that some row of each request sees."""
    return sum(kv if window is None else min(kv, n + window - 1) for n, kv in segments)


DECODES = [(1, kv) for kv in (300, 77, 1, 640)]
# Heads of real models for which a tile has room for the rows of one token.
DECODED = [
    *(Heads(64, 64, 2 * group, 2) for group in (1, 2, 4, 8, 9, 16, 24, 25, 64)),
    *(Heads(dim, dim, 4, 2) for dim in (32, 80, 96, 100, 112, 120, 128, 160, 192, 256, 512)),
    *(Heads(dim, dim, group, 1) for dim in (96, 128, 160, 256, 512) for group in (16, 24)),
    Heads(192, 128, 4, 4),
    *(Heads(576, 512, heads, 1, is_latent=True) for heads in (16, 20)),
    Heads(48, 32, 4, 1, is_latent=True),
]
# tests/tools/test_kernel_tools.py compares the bytes and barriers of more heads with a table.
A_FEW = [DECODED[2], Heads(100, 100, 4, 2), Heads(576, 512, 16, 1, is_latent=True)]


def those_in_full(heads):
    return [
        pytest.param(h, marks=[] if h in A_FEW else [pytest.mark.full], id=str(tuple(vars(h).values()))) for h in heads
    ]


@pytest.mark.parametrize("heads", those_in_full(DECODED))
def test_decode_reads_every_key_once_per_kv_head(heads):
    bound = visible_keys(DECODES) * heads.bytes_of_a_key
    assert kv_read(heads.launches(DECODES)) == bound
    # Decodes read the same bytes in a batch with chunks and fresh prompts.
    others = [(50, 130), (64, 64)]
    assert kv_read(heads.launches(DECODES + others)) - kv_read(heads.launches(others)) == bound


@pytest.mark.parametrize("tiles, heads", [(6, Heads(576, 512, 128, 1, True)), (2, Heads(64, 64, 128, 1))])
def test_more_heads_than_a_tile_has_rows_read_once_per_tile(tiles, heads):
    assert -(-heads.num_heads // heads.num_kv_heads // heads.variant.tile_rows) == tiles
    assert kv_read(heads.launches([(1, 300)])) == tiles * 300 * heads.bytes_of_a_key


@pytest.mark.parametrize("heads", [Heads(64, 64, 4, 1), Heads(256, 256, 4, 1)], ids=["64", "256"])
def test_windowed_decode_reads_the_window(heads):
    for kv in (5000, 5003):  # the window begins inside a fragment, or at its start
        assert kv_read(heads.launches([(1, kv)], window=256)) == 256 * heads.bytes_of_a_key


def test_prefill_reads_less_than_half_the_square():
    length, heads = 384, Heads(64, 64, 2, 1)
    launches = heads.launches([(length, length)], target_threadgroups=1)
    tiles = -(-length * 2 // 64)
    # Tile i of n reads i / n of the keys: (n + 1) / 2 of them in all.
    assert kv_read(launches) <= 1.001 * (tiles + 1) / 2 * length * heads.bytes_of_a_key


@pytest.mark.parametrize("heads", those_in_full(DECODED))
def test_decode_needs_at_most_one_barrier_per_stage(heads):
    """A decode needs no barrier if no SIMD group reads another group's scores."""
    variant = heads.variant
    if heads.num_heads // heads.num_kv_heads > 8 * variant.strips:
        pytest.skip("more rows than go the direct way")
    keys = variant.held * 8 * GROUPS // variant.parts

    def barriers(stages):
        (launch,) = heads.launches([(1, stages * keys)], target_threadgroups=1)
        return launch.barriers // launch.threadgroups

    assert barriers(4) - barriers(1) == (3 if variant.parts > 1 else 0)


@pytest.mark.parametrize("heads", [Heads(64, 64, 2, 1), Heads(256, 256, 2, 1)], ids=["64", "256"])
def test_prefill_needs_four_barriers_per_stage(heads):
    """Adding scores of SIMD parts needs no further barrier."""
    keys = stage_keys(heads.shape, heads.variant)

    def barriers(stages):
        (launch,) = heads.launches([(10, stages * keys)], target_threadgroups=1)
        return launch.barriers // launch.threadgroups

    assert barriers(4) - barriers(1) == 3 * 4
