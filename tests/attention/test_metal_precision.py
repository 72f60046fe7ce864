"""Accuracy of the simulated kernel for extreme numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.metal.backend import MetalBackend
from tests.support.simulated import attend, backend, every_row_by_itself, relative_error
from tests.support.sweeps import sweep
from tools.fixtures.packed_step import make_step
from tools.metal_sim import FlushingKernel

NO_SPLIT, SPLITS = 1, 1000  # requested number of threadgroups


def test_large_scores_and_equal_scores():
    """The extremes of softmax: one key with all the weight, and equal weights of all keys."""
    step = make_step([(9, 70)], num_heads=2, num_kv_heads=1, head_dim=64)
    for scale in (50.0, 0.0):
        out, _ = attend(step, scale=scale)
        expected = step.reference(scale=scale)
        assert np.abs(out - expected).max() <= 1e-3 * np.abs(expected).max()


HEADS = {
    "direct": {"head_dim": 64, "num_heads": 2},
    "parts": {"head_dim": 256, "num_heads": 2},
    "latent": {"head_dim": 48, "v_head_dim": 32, "is_latent": True, "num_heads": 12},
}


DECODE, CHUNK = [(1, 1500)], [(40, 1400)]


@pytest.mark.parametrize(
    "heads, target, segments",
    sweep(
        product(HEADS, [NO_SPLIT, SPLITS], [DECODE, CHUNK]),
        [
            *product(HEADS, [NO_SPLIT, SPLITS], [DECODE]),
            *(("direct", NO_SPLIT, CHUNK), ("parts", SPLITS, CHUNK), ("latent", SPLITS, CHUNK)),
        ],
    ),
)
def test_large_negative_scores(heads, target, segments):
    """All scores are near -1e4. The kernel and the merge must not treat these keys as masked."""
    step = make_step(segments, num_kv_heads=1, poison=False, **HEADS[heads])
    step = step.with_scores(-9_997.0, -10_000.0)
    out, launches = attend(step, target, scale=1.0)
    assert len(launches) == (1 if target == NO_SPLIT else 2)
    # A float32 of this size is exact to 1e-3.
    assert every_row_by_itself(out, step.reference(scale=1.0)).max() <= 5e-3


HEADS_AND_LENGTHS = [("direct", 1), ("direct", 20), ("latent", 1)]


@cache
def flushing_backend(target_threadgroups: int) -> MetalBackend:
    """Return a backend on a device that flushes subnormal float16 numbers to zero."""
    return MetalBackend(FlushingKernel, target_threadgroups)


@pytest.mark.parametrize(
    "heads, length, flushes, distance",
    sweep(
        [(*one, *rest) for one in HEADS_AND_LENGTHS for rest in product([False, True], [17.0, 11.0])],
        [
            *((*one, *rest) for one in HEADS_AND_LENGTHS[::2] for rest in product([False, True], [17.0, 11.0])),
            ("direct", 20, True, 17.0),
        ],
    ),
)
def test_many_keys_of_small_weight(heads, length, flushes, distance):
    """One key with value zero has nearly all of the weight. 3,000 other keys have e^-distance of its weight each.

    In float16, such weights would be subnormal or zero.
    """
    step = make_step([(length, 3001)], num_kv_heads=1, dtype=mx.float16, poison=False, **HEADS[heads])
    values = np.array(step.v_cache.astype(mx.float32)) * 100 + 100
    values[step.rows.block_table[:, 0], 0] = 0.0
    step = replace(step, v_cache=mx.array(values).astype(mx.float16)).with_scores(distance, 0.0)
    for target in (NO_SPLIT, SPLITS):
        attention = flushing_backend(target) if flushes else backend(target)
        out = np.array(attention.for_step(step.rows).attend(step.q, step.state, scale=1.0).astype(mx.float32))
        expected = step.reference(scale=1.0)
        ideal = relative_error(expected.astype(np.float16), expected)
        assert relative_error(out, expected) <= 2 * ideal


def test_sinks_take_part_in_the_small_weights():
    """The sum of weights has a factor that keeps small weights from vanishing.

    The sink's weight needs the same factor.
    """
    sinks = np.array([17.0, -3.0], np.float32)
    for target in (NO_SPLIT, SPLITS):
        step = make_step([(1, 3000), (20, 1500)], num_kv_heads=1, dtype=mx.float16, poison=False, **HEADS["direct"])
        step = replace(step, v_cache=step.v_cache * 100 + 100).with_scores(0.0, 0.0)
        out, _ = attend(step, target, scale=1.0, sinks=mx.array(sinks))
        assert every_row_by_itself(out, step.reference(scale=1.0, sinks=sinks)).max() <= 1e-3
