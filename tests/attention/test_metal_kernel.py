"""The Metal kernel in the simulator, compared with float64 NumPy attention, and the memory that it reads."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.cuts import Cut
from metal_engine.attention.metal.variants import BLOCK_SIZES
from metal_engine.doctor.sections.common import tolerance
from tests.support.simulated import TOLERANCE, attend, backend, check, every_row_by_itself
from tests.support.sweeps import diagonal, sweep
from tools.fixtures.packed_step import make_step

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
HEAD_DIMS = (32, 64, 80, 96, 100, 112, 120, 128, 160, 192, 256, 512)
GROUPS = (1, 2, 3, 4, 7, 8, 16, 20, 24, 48, 128)

# (query_len, kv_len)
SMALL_MIX = [(1, 1), (1, 7), (5, 18), (33, 33), (1, 130)]
FEW = [(1, 130), (4, 29), (1, 9)]  # for many heads
BIG_MIX = [(1, 4096), (129, 463), (512, 2048)]
SERVING_MIX = [(1, 20 + 13 * i) for i in range(16)] + [(17, 90), (8, 40), (30, 200)] + [(12, 12), (65, 65)]


def pairwise(*factors):
    """Return rows in which every pair of values of two factors occurs. Greedy and deterministic."""
    pairs = {
        (i, a, j, b) for i, j in itertools.combinations(range(len(factors)), 2) for a in factors[i] for b in factors[j]
    }

    def covered(row):
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    rows = []
    while pairs:
        best = max(itertools.product(*factors), key=lambda row: len(covered(row) & pairs))
        rows.append(best)
        pairs -= covered(best)
    return rows


FACTORS = (tuple(DTYPES), HEAD_DIMS, BLOCK_SIZES, GROUPS)
COVERING = pairwise(*FACTORS)


def pairs_in(rows, *, of):
    return {(i, row[i], j, row[j]) for row in rows for i, j in of}


def some_of(rows):
    """Return a few rows with every pair of values, except pairs of head_dim and group, which are too many.

    The data type and head_dim determine how rows are laid out and loaded. The data type and the group determine how
    rows are assigned to fragments.
    """
    of = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]
    chosen, missing = [], pairs_in(rows, of=of)
    while missing:
        best = max(rows, key=lambda row: len(pairs_in([row], of=of) & missing))
        chosen.append(best)
        missing -= pairs_in([best], of=of)
    return chosen


SOME = some_of(COVERING)
SHAPES = [pytest.param(*row, marks=[] if row in SOME else [pytest.mark.full]) for row in COVERING]


@pytest.mark.parametrize("dtype, head_dim, block_size, group", SHAPES)
def test_shapes(dtype, head_dim, block_size, group):
    kv_heads = 1 if group > 4 else 2
    check(
        SMALL_MIX if group <= 16 else FEW,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=DTYPES[dtype],
    )


# (head_dim, V head_dim, query heads, KV heads). The V of a latent is part of K.
UNEVEN = [(192, 128, 4, 4), (128, 192, 8, 1), (64, 512, 2, 2), (100, 36, 20, 1), (40, 8, 4, 2)]
LATENTS = [(576, 512, 16, 1), (576, 512, 20, 1), (320, 256, 128, 1), (48, 32, 4, 1), (100, 36, 24, 1), (64, 64, 12, 1)]


OF_ANOTHER_SIZE = [
    # Every run tests each shape in one dtype.
    pytest.param(dtype, is_latent, shape, marks=[] if i % 3 == j else [pytest.mark.full])
    for i, (is_latent, shape) in enumerate([(False, s) for s in UNEVEN] + [(True, s) for s in LATENTS])
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize("dtype, is_latent, shape", OF_ANOTHER_SIZE)
def test_attention_is_correct_if_v_head_dim_differs_from_head_dim(dtype, is_latent, shape):
    head_dim, v_head_dim, num_heads, num_kv_heads = shape
    check(
        SMALL_MIX, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        is_latent=is_latent, block_size=8, dtype=DTYPES[dtype],
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("dtype, head_dim, block_size, group", COVERING)
def test_shapes_with_long_contexts(dtype, head_dim, block_size, group):
    check(
        [*SMALL_MIX, (129, 463), (1, 4096)], num_heads=group, num_kv_heads=1, head_dim=head_dim,
        block_size=block_size, dtype=DTYPES[dtype], shared_blocks=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "window, softcap, sinks",
    sweep(
        itertools.product([None, 1, 5, 128, 10_000], [None, 20.0], [False, True]),
        [
            *itertools.product([None, 128], [None, 20.0], [False, True]),
            *((1, 20.0, False), (5, None, True), (10_000, 20.0, True)),
        ],
    ),
)
def test_masks_and_options(window, softcap, sinks):
    values = mx.array([0.5, -1.0, 3.0, 8.0]) if sinks else None
    check([*SMALL_MIX, (40, 300)], window=window, softcap=softcap, sinks=values, scale=0.3)


OTHER_WAYS = {
    "parts": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256},
    "strips": {"num_heads": 12, "num_kv_heads": 1, "head_dim": 80},
    "latent": {"num_heads": 12, "num_kv_heads": 1, "head_dim": 48, "v_head_dim": 32, "is_latent": True},
    "many heads": {"num_heads": 24, "num_kv_heads": 1, "head_dim": 64},
}


@pytest.mark.parametrize("heads, window", diagonal(OTHER_WAYS, [None, 5, 128]))
def test_masks_and_options_of_other_heads(heads, window):
    sinks = mx.array(np.linspace(-1, 8, OTHER_WAYS[heads]["num_heads"]).astype(np.float32))
    options = {"window": window, "softcap": 20.0, "sinks": sinks, "scale": 0.3}
    check([*SMALL_MIX, (40, 300)], **OTHER_WAYS[heads], **options)
    check([(1, 1300), (9, 1100)], **OTHER_WAYS[heads], **options, target_threadgroups=1000)


@pytest.mark.parametrize("tokens", [2, 5, 7, 20])
@pytest.mark.parametrize("context", [107, 110, 111])
def test_few_tokens_at_the_edge_of_a_window(tokens, context):
    """The first token's window begins at the start of a fragment of keys (107 - 100 + 1 = 8), or inside a fragment.

    Keys that only some tokens of the tile see must not be treated as visible to all tokens.
    """
    for num_heads in (1, 2):
        step = make_step([(tokens, context)], num_heads=num_heads, num_kv_heads=1, head_dim=64, window=100)
        out, _ = attend(step, scale=0.125, window=100)
        assert every_row_by_itself(out, step.reference(scale=0.125, window=100)).max() < 1e-5


@pytest.mark.parametrize("dtype, window", diagonal(["float16", "bfloat16"], [None, 5, 128]))
def test_masks_and_options_in_half_precision(window, dtype):
    values = mx.array([0.5, -1.0, 3.0, 8.0]).astype(DTYPES[dtype])
    check([*SMALL_MIX, (40, 300)], window=window, softcap=20.0, sinks=values, scale=0.3, dtype=DTYPES[dtype])


@pytest.mark.parametrize("window", [None, 100])
def test_serving_mix(window):
    """16 decodes, 3 chunks and 2 fresh prompts in one step, blocks shared between requests."""
    check(SERVING_MIX, num_heads=8, num_kv_heads=2, shared_blocks=1, window=window, dtype=mx.float16)


@pytest.mark.parametrize("segments", [[(129, 463)], [(1, 4096)], [(1, 4096), (5, 18)], [(3, 1500), (1, 1)]])
@pytest.mark.parametrize("sinks", [False, True])
def test_long_contexts(segments, sinks):
    values = mx.array([1.0, -2.0, 0.0, 5.0]) if sinks else None
    launches = check(segments, num_heads=4, num_kv_heads=1, sinks=values)
    split = max(kv for _, kv in segments) >= 1024
    assert [c.kernel for c in launches] == ["paged_attention"] + ["merge_splits"] * split


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 128])
def test_big_mix(dtype, window):
    check(BIG_MIX + SERVING_MIX, num_heads=4, num_kv_heads=2, dtype=DTYPES[dtype], window=window, shared_blocks=1)


@pytest.mark.full
def test_context_of_131072():
    check([(1, 131_072)], num_heads=2, num_kv_heads=1, head_dim=64, dtype=mx.float16)


@pytest.mark.parametrize("target", [1, 1000])
def test_splits_do_not_change_the_result(target):
    """Tests no splits, and the maximum number of splits with a window that leaves whole splits empty for some rows."""
    launches = check([(1, 3000), (6, 2600)], num_heads=4, num_kv_heads=2, target_threadgroups=target)
    assert len(launches) == (1 if target == 1 else 2)
    check([(20, 1700)], num_heads=2, num_kv_heads=1, window=1650, target_threadgroups=target)


@pytest.mark.parametrize("mix, chunk, num_launches", [
    ([(1, 64), (1, 65), (70, 100), (5, 26)], 24, 1),
    ([(1, 1270), (9, 1285), (1, 641), (3, 3)], 640, 2),  # the first two requests' chunks are split
])  # fmt: skip
def test_chunks_of_the_context(mix, chunk, num_launches):
    assert len(check(mix, chunk=chunk)) == num_launches


def test_a_split_decode_beside_much_other_work():
    # 17 tiles of each KV head, twice as many as the GPU needs.
    launches = check([(1, 3000), *[(33, 33)] * 8], num_heads=4, num_kv_heads=2, target_threadgroups=16)
    assert len(launches) == 2


def test_every_row_by_itself():
    step = make_step([(1, 99), (20, 41), (1, 0), (64, 0)], num_heads=6, num_kv_heads=2, head_dim=64)
    out, _ = attend(step, scale=0.125)
    assert every_row_by_itself(out, step.reference(scale=0.125)).max() < 1e-5


@pytest.mark.parametrize(
    "heads",
    [
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
        {"num_heads": 20, "num_kv_heads": 1, "head_dim": 48, "v_head_dim": 32, "is_latent": True},
    ],
    ids=str,
)
def test_output_bits_do_not_depend_on_the_batch(heads):
    """A decode in a mixed batch gets the same bits as alone, because choices are made per segment."""
    step = make_step([(1, 99), (20, 41), (1, 700), (64, 0)], **heads)
    packed, _ = attend(step, scale=0.125)
    starts = step.rows.cu_seqlens_q
    for i in range(4):
        alone, _ = attend(step.alone(i), scale=0.125)
        np.testing.assert_array_equal(packed[starts[i] : starts[i + 1]], alone)


@pytest.mark.parametrize(
    "cut, heads",
    [
        (Cut(threadgroups_per_core=4), {"num_heads": 4, "num_kv_heads": 2}),
        (Cut(threadgroups_per_core=16), {"num_heads": 4, "num_kv_heads": 2}),
        (Cut(most_held=1), {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}),
        (Cut(staged_parts=2), {"num_heads": 4, "num_kv_heads": 2}),
        (Cut(staged_parts=0), {"num_heads": 4, "num_kv_heads": 2}),
        (Cut(most_strips=1, most_held=2), {"num_heads": 16, "num_kv_heads": 1}),
        (Cut(most_strips=2), {"num_heads": 24, "num_kv_heads": 1, "head_dim": 48, "v_head_dim": 32, "is_latent": True}),
    ],
    ids=str,
)
def test_output_bits_do_not_depend_on_the_batch_for_any_cut(cut, heads):
    """Each cut (way to divide the work over threadgroups) gives right outputs, with its own rounding.

    Layers of one kind use the same cut in all steps.
    """
    step = make_step([(1, 699), (20, 41), (1, 5), (64, 0), (1, 2600)], **{"head_dim": 64} | heads)
    kind = AttentionKind.of(step.q, step.state, None, None, None)
    default = backend(16)
    cut_otherwise = default.with_cuts({kind: cut})

    def outputs(part, chosen=cut_otherwise):
        return np.array(chosen.for_step(part.rows).attend(part.q, part.state, scale=0.125))

    packed = outputs(step)
    assert not np.array_equal(packed, outputs(step, default))
    expected = step.reference(scale=0.125)
    assert every_row_by_itself(packed[..., : expected.shape[-1]], expected).max() < 1e-5
    starts = step.rows.cu_seqlens_q
    for i in range(5):
        np.testing.assert_array_equal(packed[starts[i] : starts[i + 1]], outputs(step.alone(i)))


@pytest.mark.metal
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window, softcap", [(None, None), (100, 30.0)])
def test_on_a_mac(dtype, head_dim, window, softcap):
    """The real compiler and GPU stay within the simulator's error bounds against the reference."""
    step = make_step(
        [(n, kv - n) for n, kv in SERVING_MIX + BIG_MIX], num_heads=8, num_kv_heads=2, head_dim=head_dim,
        dtype=DTYPES[dtype], window=window, shared_blocks=1,
    )  # fmt: skip
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    attention = MetalBackend().for_step(step.rows)
    out = np.array(attention.attend(step.q, step.state, **options).astype(mx.float32))
    expected = step.reference(**options)
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) <= tolerance(TOLERANCE[DTYPES[dtype]])
