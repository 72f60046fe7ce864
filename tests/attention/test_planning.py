"""Work items of the attention kernel: coverage of keys, splits, and the cost of a split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.simulated import TOLERANCE, attend, backend, relative_error
from tools.fixtures.attention_plan import Options, check_plan, rows_of, splits_of_tiles
from tools.fixtures.packed_step import make_step
from tools.metal_sim.mutants import Mutant
from tools.metal_sim.planning_mutants import CASES, MUTANTS, caught

FORTY_CORES = 8 * 40


def splits_of_decode(keys: int, **options: int | None) -> list[int]:
    """Return the lengths of a decode's splits in the order of the keys."""
    (splits,) = splits_of_tiles(Options(**options).plan(rows_of([(1, keys)]))).values()
    return [end - begin for begin, end in splits]


segments = st.one_of(
    st.tuples(st.just(1), st.integers(1, 20_000)),
    st.tuples(st.integers(1, 300), st.integers(0, 3000)).map(lambda s: (s[0], s[0] + s[1])),
)
options = st.builds(
    Options,
    group=st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16, 24, 64)),
    num_kv_heads=st.sampled_from((1, 2, 8, 32)),
    window=st.one_of(st.none(), st.integers(1, 5000)),
    chunk=st.one_of(st.none(), st.integers(1, 5000)),
    target_threadgroups=st.sampled_from((1, 16, 96, 320, 5000)),
    key_step=st.sampled_from((8, 16, 32, 64, 128)),
    tile_rows=st.sampled_from((8, 16, 32, 64)),
)


@settings(max_examples=150)
@given(segments=st.lists(segments, min_size=1, max_size=8), options=options)
@example(segments=[(1, 513)], options=Options())
@example(segments=[(1, 1000), (300, 1300), (1, 1), (1, 1030)], options=Options(target_threadgroups=FORTY_CORES))
def test_plans(segments: list[tuple[int, int]], options: Options) -> None:
    """Items cover every key of every tile once, are split evenly in whole stages, and are sorted by length.

    The batch does not matter.
    """
    check_plan(rows_of(segments), options)


@pytest.mark.full
@settings(max_examples=3000)
@given(segments=st.lists(segments, min_size=1, max_size=80), options=options)
def test_many_plans(segments: list[tuple[int, int]], options: Options) -> None:
    check_plan(rows_of(segments), options)


@settings(max_examples=100)
@given(segments=st.lists(segments, min_size=1, max_size=6), options=options, data=st.data())
def test_plans_with_images(segments: list[tuple[int, int]], options: Options, data: st.DataObject) -> None:
    spans, start = [], 0
    for num_rows, _ in segments:
        edges = sorted(data.draw(st.sets(st.integers(0, num_rows), max_size=6)))
        spans += [(start + a, start + b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        start += num_rows
    check_plan(rows_of(segments, spans), replace(options, chunk=None))


@pytest.mark.parametrize("case", CASES)
def test_the_cases_of_the_mutants(case: tuple[Any, ...]) -> None:
    segments, options, *spans = case
    check_plan(rows_of(segments, *spans), options)


@pytest.mark.parametrize("mutant", MUTANTS[::6], ids=lambda m: m.name)
def test_sample_of_mutants(mutant: Mutant) -> None:
    assert caught(mutant)


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutants(mutant: Mutant) -> None:
    assert caught(mutant)


def test_a_long_decode_has_as_many_threadgroups_as_the_device_asks_for() -> None:
    assert len(splits_of_decode(131_072, target_threadgroups=FORTY_CORES)) == FORTY_CORES // 8


@pytest.mark.parametrize("others", [[(2048, 2048)], [(256, 256)], [(1, 500)] * 63], ids=str)
def test_a_long_context_is_split_in_mixed_batches(others: list[tuple[int, int]]) -> None:
    """An unsplit context would keep one threadgroup busy long after the end of all other threadgroups."""
    items = Options().plan(rows_of([(1, 131_072), *others]))
    lengths = items.table[:, 4] - items.table[:, 3]
    # No item is longer than two fair shares of the step.
    assert lengths.max() <= 2 * (lengths.sum() * 8 / 96 + 64)


@pytest.mark.parametrize("group, most", [(1, 1 / 32), (4, 1 / 14), (8, 1 / 14), (16, 1 / 7)])
@pytest.mark.parametrize("keys", [512, 577, 1000, 4096, 20_000])
def test_merge_traffic_of_64_decodes_is_a_small_fraction_of_kv_traffic(group: int, most: float, keys: int) -> None:
    """Bytes of the splits' outputs and log-sum-exps are compared with K and V of head_dim 64 in half precision."""
    items = Options(group=group, target_threadgroups=FORTY_CORES).plan(rows_of([(1, keys + i) for i in range(64)]))
    assert items.is_split
    partial_bytes = 2 * items.num_partial_rows * 8 * (64 + 1) * 4
    kv_bytes = sum(keys + i for i in range(64)) * 8 * 2 * 64 * 2
    assert partial_bytes <= most * kv_bytes


def test_a_prefill_that_fills_the_device_is_not_split() -> None:
    assert not Options(target_threadgroups=FORTY_CORES).plan(rows_of([(2048, 131_072)])).is_split


OTHERS = [(1, 30 + 17 * i) for i in range(37)] + [(20, 61), (33, 33), (5, 600)]


@pytest.mark.parametrize(
    "keys, window, dtype", [(700, None, mx.float32), (1500, None, mx.float16), (1500, 900, mx.bfloat16)]
)
def test_decode_bits_do_not_depend_on_40_other_requests_in_the_batch(
    keys: int, window: int | None, dtype: mx.Dtype
) -> None:
    segments = [*OTHERS[:20], (1, keys), *OTHERS[20:]]
    step = make_step(
        [(n, kv - n) for n, kv in segments], num_heads=8, num_kv_heads=2, head_dim=64, dtype=dtype, window=window
    )
    row = int(step.rows.cu_seqlens_q[20])
    sinks = mx.array(np.linspace(-1, 3, 8).astype(np.float32)).astype(dtype)
    options = {"scale": 0.125, "window": window, "sinks": sinks}
    packed, launches = attend(step, **options)
    alone, launches_alone = attend(step.alone(20), **options)
    assert len(launches) == len(launches_alone) == 2  # split in both
    np.testing.assert_array_equal(packed[row], alone[0])


def test_layers_of_one_step_have_plans_of_their_own() -> None:
    """Layers differ in groups and stages.

    A plan of short stages for a layer with long ones would read zeros as keys.
    """
    segments = [(1, 599), (3, 1000), (20, 41)]
    stages = ((4, 256, mx.float32), (4, 64, mx.float32), (1, 64, mx.float16), (8, 64, mx.float16))
    attention = None
    for group, head_dim, dtype in stages:
        step = make_step(segments, num_heads=group, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
        attention = attention or backend(1000).for_step(step.rows)
        assert (attention.rows.block_table == step.rows.block_table).all()
        out = np.array(attention.attend(step.q, step.state, scale=head_dim**-0.5).astype(mx.float32))
        assert relative_error(out, step.reference(scale=head_dim**-0.5)) <= TOLERANCE[dtype]
