"""The portable attention backend compared with float64 NumPy attention, and its reads, computation and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable.exp2 import exp2
from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS, Dims, Limits
from tests.support.memory import settled_memory
from tools.fixtures.packed_step import PackedStep, kv_state, make_step

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}

# Makes small inputs use several tiles, spans, pieces and batches.
TINY = Limits(scores=1, span=1, tile_rows=5, small_area=24, group_slack=8, group_waste=0.5, min_keys=7)
# The same, except that segments with several rows are not batched.
TILED = Limits(scores=1, span=1, tile_rows=3, small_area=0, group_slack=0, group_waste=0.0, min_keys=16)
# Decodes on two streams.
LANES = replace(TINY, lane_elements=0)

# (query_len, context_len) of each request.
FRESH = [(7, 0), (1, 0), (33, 0)]
CHUNKS = [(16, 16), (5, 43), (40, 9)]
DECODES = [(1, 0), (1, 70), (1, 31), (1, 32), (1, 5), (1, 69)]
MIXED = [(1, 37), (19, 0), (1, 64), (12, 50), (3, 20), (1, 15), (41, 3), (2, 2)]


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest norm-relative error of any row and head. NaN counts as infinite.

    The values of a row can cancel to almost nothing. The error of such a row is relative to the average norm of all
    rows.
    """
    difference = np.linalg.norm(actual - expected, axis=-1)
    norm = np.linalg.norm(expected, axis=-1)
    return float(np.nan_to_num(difference / np.maximum(norm, norm.mean()), nan=np.inf).max())


def check(step: PackedStep, limits: Limits | None, **options: object) -> None:
    options = {"scale": step.q.shape[-1] ** -0.5} | options
    assert error(step.attend(limits, **options), step.reference(**options)) < TOLERANCE[step.q.dtype]


@pytest.mark.parametrize("limits", [None, GPU_LIMITS, TINY, TILED, LANES], ids=["cpu", "gpu", "tiny", "tiled", "lanes"])
@pytest.mark.parametrize("window", [None, 1, 6, 33, 1000])
@pytest.mark.parametrize("segments", [FRESH, CHUNKS, DECODES, MIXED], ids=["fresh", "chunk", "decode", "mix"])
def test_segments_and_windows(segments: list[tuple[int, int]], window: int | None, limits: Limits | None) -> None:
    check(make_step(segments, window=window), limits, window=window)


@pytest.mark.parametrize("limits", [None, TINY, TILED], ids=["cpu", "tiny", "tiled"])
@pytest.mark.parametrize("chunk", [1, 8, 33])
def test_chunks_of_the_context(chunk: int, limits: Limits | None) -> None:
    """Segments begin and end on both sides of a chunk's edge, and contain several edges."""
    check(make_step([*CHUNKS, *DECODES]), limits, chunk=chunk)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 150])
def test_larger_pieces(window: int | None, dtype: mx.Dtype) -> None:
    """Pieces have enough scores for the CPU's vectorized 2^x."""
    step = make_step([(1, 700), (150, 300), (12, 999), (100, 0), (1, 650)], dtype=dtype, window=window)
    check(step, None, window=window)


@pytest.mark.parametrize("limits", [None, TINY, TILED, LANES], ids=["cpu", "tiny", "tiled", "lanes"])
def test_softcap_and_sinks(limits: Limits | None) -> None:
    step = make_step(MIXED)
    sinks = np.array([-3.0, 0.5, 2.0, 40.0], np.float32)
    check(step, limits, softcap=2.0)
    check(step, limits, softcap=0.5, window=7)
    for dtype in (mx.float32, mx.float16):
        sink_array = mx.array(sinks).astype(dtype)
        options = {"scale": 0.25, "window": 9, "softcap": 5.0}
        actual = step.attend(limits, sinks=sink_array, **options)
        # The third sink outweighs all keys. Compare with the scale of the other heads, not with this head's tiny
        # output.
        assert error(actual[:, :3], step.reference(sinks=sinks, **options)[:, :3]) < 1e-5
        assert np.abs(actual[:, 3]).max() < 1e-10


RUNS = Limits(scores=300, span=500, tile_rows=5, run_keys=16)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 30, 60])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_decodes_over_runs(seed: int, window: int | None, dtype: mx.Dtype) -> None:
    segments = [*MIXED, (1, 70), (1, 63), (1, 64), (1, 200), (1, 16)]
    step = make_step(segments, in_order=True, window=window, dtype=dtype, v_head_dim=8, seed=seed)
    work = PortableBackend(RUNS).for_step(step.rows).work(window, Dims(4, 2, 16))
    assert bool(work.run_decodes) == (window is None or window >= 16)
    options = {"scale": 0.4, "window": window, "softcap": 3.0}
    check(step, RUNS, **options)
    sinks = np.array([-3.0, 0.5, 2.0, 1.0], np.float32)
    actual = step.attend(RUNS, sinks=mx.array(sinks), **options)
    assert error(actual, step.reference(sinks=sinks, **options)) < TOLERANCE[dtype]


def test_keys_in_consecutive_blocks_are_read_in_place_and_not_gathered() -> None:
    lengths = [900, 1500, 3000, 639]
    step = make_step([(1, n - 1) for n in lengths], num_heads=9, num_kv_heads=3, head_dim=8, poison=False)
    table = step.rows.block_table
    table[0, :57] = np.arange(57)  # fully consecutive
    table[1, :94] = [*range(100, 150), *range(250, 206, -1)]  # consecutive in the first half
    table[2, :188] = np.arange(600, 600 - 2 * 188, -2)  # not consecutive
    table[3, :40] = np.arange(60, 100)  # consecutive, but short
    work = PortableBackend(CPU_LIMITS).for_step(step.rows).work(None, DIMS)
    (runs,) = [group.runs for group in work.run_decodes if len(group.runs) == 1 and group.rest is None]
    assert runs == [[(0, 900)]]
    (group,) = [group for group in work.run_decodes if group.rest is not None]
    assert group.runs == [[(1600, 800)]] and group.rest.shape == (1, 700)
    assert work.keys_gathered == 700 + 3000 + 639


def test_long_runs_are_read_in_parts() -> None:
    """A cache of another type is converted part by part; keys outside the run never exceed a span."""
    limits = Limits(scores=300, span=32 * 40, tile_rows=5, run_keys=16, min_keys=7)
    step = make_step([(1, 199), (1, 299), (1, 5)], poison=False, dtype=mx.float16)
    table = step.rows.block_table
    table[0, :13] = np.arange(13)
    table[1, :19] = [*range(5, 15), *range(25, 16, -1)]  # the remaining slots are too many to gather
    (decodes,) = PortableBackend(limits).for_step(step.rows).work(None, Dims(4, 2, 16)).run_decodes
    assert decodes.runs == [[(slot, min(40, 200 - slot)) for slot in range(0, 200, 40)]]
    check(step, limits)
    check(step, limits, softcap=2.0)


def test_large_scores() -> None:
    """Weights far below the largest weight vanish without overflow or NaN. float32 is coarse for scores of 1,000s."""
    step = make_step(MIXED)
    for limits in (None, TINY):
        assert error(step.attend(limits, scale=200.0), step.reference(scale=200.0)) < 2e-4


def test_layers_with_different_windows_share_a_step() -> None:
    step = make_step(MIXED)
    attention = PortableBackend(TINY).for_step(step.rows)
    outs = {}
    for window in (None, 8, None, 8, 30):
        out = np.array(attention.attend(step.q, step.state, scale=0.25, window=window))
        assert error(out, step.reference(scale=0.25, window=window)) < 1e-5
        assert (out == outs.setdefault(window, out)).all()


@st.composite
def steps(draw: st.DrawFn) -> tuple[PackedStep, Limits, dict[str, object]]:
    segment = st.tuples(st.integers(1, 12) | st.just(1), st.integers(0, 40))
    segments = draw(st.lists(segment, min_size=1, max_size=7))
    group, num_kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    window = draw(st.none() | st.integers(1, 50))
    step = make_step(
        segments,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.integers(2, 12)),
        block_size=draw(st.sampled_from([1, 4, 8, 16])),
        shared_blocks=draw(st.integers(0, 3)),
        window=window,
        in_order=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    limits = Limits(
        scores=draw(st.sampled_from([1, 300, 100_000])),
        span=draw(st.sampled_from([1, 500, 100_000])),
        tile_rows=draw(st.integers(1, 9)),
        small_area=draw(st.sampled_from([0, 60, 100_000])),
        group_slack=draw(st.sampled_from([0, 40, 100_000])),
        run_keys=draw(st.none() | st.integers(1, 20)),
        lane_elements=draw(st.sampled_from([None, 0, 2_000])),
        min_keys=draw(st.integers(1, 20)),
    )
    return step, limits, {"window": window, "softcap": draw(st.none() | st.just(3.0)), "scale": 0.4}


@settings(deadline=None, max_examples=100)
@given(steps())
def test_any_mix(case: tuple[PackedStep, Limits, dict[str, object]]) -> None:
    step, limits, options = case
    check(step, limits, **options)


# --------------------------------------------------------------------------- what is read, computed and held

HEADS = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
DIMS = Dims(9, 3, 64)


def work_of(segments: list[tuple[int, int]], window: int | None = None) -> tuple[int, int, int]:
    """Return (units, keys gathered, scores computed) with the CPU's limits on any machine."""
    work = PortableBackend(CPU_LIMITS).for_step(make_step(segments, head_dim=1).rows).work(window, DIMS)
    return len(work.units), work.keys_gathered, work.scores_computed


def test_a_short_decode_does_not_pay_for_a_long_one() -> None:
    units, gathered, scored = work_of([(1, 99)] * 7 + [(1, 7999)] + [(1, 99)] * 8)
    assert gathered == scored == 8000 + 15 * 100
    assert units == 2


def test_two_streams_only_for_many_keys_on_a_cpu() -> None:
    for limits, count, lanes in ((CPU_LIMITS, 16, [0, 1]), (CPU_LIMITS, 1, [0]), (GPU_LIMITS, 64, [0])):
        step = make_step([(1, 154)] * count, head_dim=1, poison=False)
        work = PortableBackend(limits).for_step(step.rows).work(None, DIMS)
        assert [unit.lane for unit in work.units] == lanes


@pytest.mark.parametrize("low", [1, 100, 1000])
def test_padding_of_gathered_decode_keys_is_limited(low: int) -> None:
    """Padding costs at most an eighth of the real keys, or group_slack for each batch."""
    lengths = np.random.default_rng(low).integers(low, 3 * low + 50, 64)
    units, gathered, scored = work_of([(1, int(n) - 1) for n in lengths])
    per_batch = CPU_LIMITS.group_slack // 4  # a decode's key costs 4 units
    assert gathered == scored <= lengths.sum() + max(units * per_batch, lengths.sum() // 8)
    # The units are batches, not requests. Nearly all are at least half full.
    assert units <= 4 + gathered * 192 // (CPU_LIMITS.span // 2)


def test_prefill_computes_the_causal_half() -> None:
    """A query tile sees its causal range and at most one tile's width more."""
    n = 2048
    _, gathered, scored = work_of([(n, 0)])
    assert gathered == n
    assert scored <= n * (n + 1) // 2 + n * CPU_LIMITS.tile_rows // 2


def test_a_window_limits_the_keys_that_are_gathered_and_scored() -> None:
    window = 128
    _, gathered, scored = work_of([(1, 5000)] * 4, window)
    assert gathered == scored == 4 * window
    _, gathered, scored = work_of([(512, 6000)], window)
    assert gathered == 512 + window - 1
    assert scored <= 512 * (window + CPU_LIMITS.tile_rows)


@pytest.mark.parametrize("segments", [[(8192, 0)], [(1024, 0)] * 8], ids=["1x8192", "8x1024"])
def test_peak_memory(segments: list[tuple[int, int]]) -> None:
    """No [N, N] array exists: for 8,192 tokens, scores of 3 heads in float32 would take 805 MB.

    For eight prompts of 1,024 tokens they would take 101 MB.

    In memory at the same time:

    - four arrays of 8,192 rows of 3 * 64 float32, 6.3 MB each (scaled q, the tiles' rows, their outputs, packed copy)
    - the gathered K and V of two spans, at most 4 MB each
    - tiles of scores, 1.5 MB each

    MLX runs ahead of its CPU worker by up to 100 ops, which is three tiles of 6 temporaries each.
    """
    step = make_step(segments, num_heads=3, num_kv_heads=1, head_dim=64, poison=False)
    attention = PortableBackend(CPU_LIMITS).for_step(step.rows)
    mx.eval(step.q, step.k_cache, step.v_cache)
    before = settled_memory()
    mx.eval(attention.attend(step.q, step.state, scale=0.125))
    peak = mx.get_peak_memory() - before
    rows, span, tile = 8192 * 3 * 64 * 4, CPU_LIMITS.span * 4, CPU_LIMITS.scores * 4
    assert peak < 4 * rows + 4 * span + 18 * tile  # 70 MB


def test_attend_evaluates_nothing_and_keeps_no_reference_to_the_cache() -> None:
    """The next write to the cache is in place while the plan still exists: only the owner references the cache."""
    step = make_step([(64, 900), (1, 500)], **HEADS)
    attention = PortableBackend().for_step(step.rows)
    cache = mx.zeros((4096, 16, 3, 64))  # 50 MB
    mx.eval(step.q, cache)
    step.rows.block_table[:] = np.clip(step.rows.block_table, 0, 4095)
    before = settled_memory()
    out = attention.attend(step.q, kv_state(cache, cache), scale=0.125)
    assert mx.get_peak_memory() - before < 1e6
    mx.eval(out)
    before = settled_memory()
    cache[mx.array([1, 2, 3])] = mx.ones((3, 16, 3, 64))
    mx.eval(cache)
    assert mx.get_peak_memory() - before < 10e6
    assert mx.isfinite(out).all()


# ---------------------------------------------------------------------------------------------- small things


@pytest.fixture
def one_request() -> Iterator[PackedStep]:
    yield make_step([(3, 10)])


def test_exp2() -> None:
    x = -np.concatenate([np.linspace(0, 100, 100_001), np.arange(201) / 2]).astype(np.float32)
    expected = np.exp2(x.astype(np.float64))
    assert np.abs(np.array(exp2(mx.array(x))) / expected - 1).max() < 4e-7
    assert np.isnan(np.array(exp2(mx.array([np.nan])))).all()


def test_mismatched_shapes_are_refused(one_request: PackedStep) -> None:
    attention = PortableBackend().for_step(one_request.rows)
    q, k, v = one_request.q, one_request.k_cache, one_request.v_cache
    with pytest.raises(ValueError, match="2 rows"):
        attention.attend(q[:2], kv_state(k, v), scale=1.0)
    with pytest.raises(ValueError, match="do not match"):
        attention.attend(q, kv_state(k[..., :8], v), scale=1.0)
    with pytest.raises(ValueError, match="do not match"):
        attention.attend(q, kv_state(k[1:], v), scale=1.0)
    with pytest.raises(ValueError, match="blocks hold"):
        attention.attend(q, kv_state(k[:, :8], v[:, :8]), scale=1.0)
    with pytest.raises(ValueError, match="share"):
        attention.attend(q[:, :3], kv_state(k, v), scale=1.0)
    with pytest.raises(ValueError, match="window"):
        attention.attend(q, kv_state(k, v), scale=1.0, window=0)
