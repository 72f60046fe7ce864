"""The Metal kernel, run by the simulator, against float64 NumPy attention; and the memory it reads."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.metal.backend import (
    BLOCK_SIZES,
    HEAD_DIMS,
    STAGE_BYTES,
    MetalBackend,
    UnsupportedAttentionError,
    check_supported,
    stage_keys,
)
from metal_engine.attention.metal.planning import plan_work_items
from metal_engine.kv_cache.rows import step_rows
from tests.support.simulated import TOLERANCE, attend, backend, check, every_row_by_itself, relative_error
from tools.fixtures.packed_step import make_step
from tools.metal_sim import metal_kernel
from tools.metal_sim.build import build, language_flags
from tools.metal_sim.toolchain import run_clang

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
GROUPS = (1, 2, 3, 4, 7, 8, 16)

# (query_len, kv_len)
SMALL_MIX = [(1, 1), (1, 7), (5, 18), (33, 33), (1, 130)]
BIG_MIX = [(1, 4096), (129, 463), (512, 2048)]
SERVING_MIX = [(1, 20 + 13 * i) for i in range(16)] + [(17, 90), (8, 40), (30, 200)] + [(12, 12), (65, 65)]


def pairwise(*factors):
    """Rows such that every pair of values of two factors occurs in one: greedy, deterministic."""
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
    """Few rows with every pair of values but those of head_dim and group, of which there are most.

    The data type and the head_dim decide how rows are laid out and loaded, the data type and the group how rows
    are dealt to fragments.
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


def test_the_covering_covers():
    for (i, first), (j, second) in itertools.combinations(enumerate(FACTORS), 2):
        every_pair = set(itertools.product(first, second))
        assert {(r[i], r[j]) for r in COVERING} == every_pair
        if (i, j) != (1, 3):
            assert {(r[i], r[j]) for r in SOME} == every_pair


@pytest.mark.parametrize("dtype, head_dim, block_size, group", SHAPES)
def test_shapes(dtype, head_dim, block_size, group):
    kv_heads = 1 if group > 4 else 2
    check(
        SMALL_MIX,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=DTYPES[dtype],
    )


@pytest.mark.full
@pytest.mark.parametrize("dtype, head_dim, block_size, group", COVERING)
def test_shapes_with_long_contexts(dtype, head_dim, block_size, group):
    check(
        [*SMALL_MIX, (129, 463), (1, 4096)],
        num_heads=group,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        dtype=DTYPES[dtype],
        shared_blocks=1,
    )


@pytest.mark.parametrize("window", [None, 1, 5, 128, 10_000])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (20.0, False), (None, True), (20.0, True)])
def test_masks_and_options(window, softcap, sinks):
    values = mx.array([0.5, -1.0, 3.0, 8.0]) if sinks else None
    check([*SMALL_MIX, (40, 300)], window=window, softcap=softcap, sinks=values, scale=0.3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("window", [None, 5, 128])
def test_masks_and_options_in_half_precision(window, dtype):
    values = mx.array([0.5, -1.0, 3.0, 8.0]).astype(DTYPES[dtype])
    check([*SMALL_MIX, (40, 300)], window=window, softcap=20.0, sinks=values, scale=0.3, dtype=DTYPES[dtype])


def test_big_mix_of_a_single_head():
    check(BIG_MIX, num_heads=1, num_kv_heads=1, dtype=mx.float16, shared_blocks=1)


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
    """No splits at all, and as many as there can be, with a window that leaves whole splits empty for some rows."""
    launches = check([(1, 3000), (6, 2600)], num_heads=4, num_kv_heads=2, target_threadgroups=target)
    assert len(launches) == (1 if target == 1 else 2)
    check([(20, 1700)], num_heads=2, num_kv_heads=1, window=1650, target_threadgroups=target)


@pytest.mark.parametrize("others", [[(2048, 2048)], [(256, 256)], [(1, 500)] * 63], ids=str)
def test_a_long_context_is_split_in_company_too(others):
    """Or one threadgroup would still run when all others have long finished."""
    query_lens, seq_lens = np.array([(1, 131_072), *others], np.int32).T
    block_table = np.zeros((len(seq_lens), 8192), np.int32)
    rows = step_rows(block_table, seq_lens - query_lens, query_lens, 16)
    target = 96
    items = plan_work_items(rows, group=4, num_kv_heads=8, window=None, target_threadgroups=target, key_step=64)
    lengths = items.table[:, 4] - items.table[:, 3]
    # No item is longer than two fair shares of the step.
    assert lengths.max() <= 2 * (lengths.sum() * 8 / target + 64)


def test_a_split_decode_beside_much_other_work():
    # 17 tiles of each KV head, twice as many as the GPU asks for.
    launches = check([(1, 3000), *[(33, 33)] * 8], num_heads=4, num_kv_heads=2, target_threadgroups=16)
    assert len(launches) == 2


def test_every_row_by_itself():
    step = make_step([(1, 99), (20, 41), (1, 0), (64, 0)], num_heads=6, num_kv_heads=2, head_dim=64)
    out, _ = attend(step, scale=0.125)
    assert every_row_by_itself(out, step.reference(scale=0.125)).max() < 1e-5


def test_alone_equals_in_company():
    """A decode in a mixed batch gets exactly what it gets alone: the choices are per segment."""
    step = make_step([(1, 99), (20, 41), (1, 700), (64, 0)], num_heads=4, num_kv_heads=2, head_dim=64)
    packed, _ = attend(step, scale=0.125)
    starts = step.rows.cu_seqlens_q
    for i in range(4):
        alone, _ = attend(step.alone(i), scale=0.125)
        np.testing.assert_array_equal(packed[starts[i] : starts[i + 1]], alone)


def test_large_scores_and_equal_scores():
    """Softmax at its ends: one key that takes all the weight, and all keys alike."""
    step = make_step([(9, 70)], num_heads=2, num_kv_heads=1, head_dim=64)
    for scale in (50.0, 0.0):
        out, _ = attend(step, scale=scale)
        expected = step.reference(scale=scale)
        assert np.abs(out - expected).max() <= 1e-3 * np.abs(expected).max()


# --- memory -----------------------------------------------------------------------------------------------------


def kv_read(launches, *, both=True):
    c = launches[0].buffers
    return c["k_cache"].read + (c["v_cache"].read if both else 0)


def lower_bound(segments, num_kv_heads, head_dim, item, window=None):
    """K and V bytes that some row of each request sees."""
    keys = sum(kv if window is None else min(kv, n + window - 1) for n, kv in segments)
    return keys * 2 * num_kv_heads * head_dim * item


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_decode_reads_every_key_once_per_kv_head(group):
    decodes = [(1, kv) for kv in (300, 77, 1, 640)]
    launches = check(decodes, num_heads=2 * group, num_kv_heads=2, dtype=mx.float16)
    assert kv_read(launches) <= 1.05 * lower_bound(decodes, 2, 64, 2)
    # And the same for decodes beside chunks and fresh prompts.
    others = [(50, 130), (64, 64)]
    mixed = kv_read(check(decodes + others, num_heads=2 * group, num_kv_heads=2, dtype=mx.float16))
    alone = kv_read(check(others, num_heads=2 * group, num_kv_heads=2, dtype=mx.float16))
    assert mixed - alone <= 1.05 * lower_bound(decodes, 2, 64, 2)


def test_windowed_decode_reads_the_window():
    decode = [(1, 5000)]
    launches = check(decode, num_heads=4, num_kv_heads=1, window=256, dtype=mx.float16)
    assert kv_read(launches) <= 1.1 * lower_bound(decode, 1, 64, 2, window=256)


def test_prefill_reads_less_than_half_the_square():
    length, group = 384, 2
    launches = check([(length, length)], num_heads=group, num_kv_heads=1, dtype=mx.float16, target_threadgroups=1)
    tiles = -(-length * group // 64)
    bound = lower_bound([(length, length)], 1, 64, 2)
    # Tile i of n reads i / n of the keys: (n + 1) / 2 of them in all.
    assert kv_read(launches) <= 1.001 * (tiles + 1) / 2 * bound


# --- host side ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 72, "v_head_dim": 72}, "head_dim 72"),
        ({"v_head_dim": 128}, "V head_dim 128"),
        ({"block_size": 12}, "block size 12"),
        ({"dtype": mx.int8}, "int8"),
        ({"num_heads": 34, "num_kv_heads": 2}, "34 query heads"),
        ({"num_heads": 5, "num_kv_heads": 2}, "5 query heads"),
    ],
)
def test_unsupported_shapes_are_named(change, message):
    shape = {"dtype": mx.float16, "head_dim": 64, "v_head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    check_supported(**shape)
    with pytest.raises(UnsupportedAttentionError, match=message) as caught:
        check_supported(**{**shape, **change})
    assert "--attention-backend mlx" in str(caught.value)


def test_step_and_arrays_must_agree():
    step = make_step([(3, 4)], num_heads=2, num_kv_heads=1, head_dim=64)
    attention = backend().for_step(step.rows)
    with pytest.raises(ValueError, match="do not belong"):
        attention.attend(step.q[:2], step.state, scale=1.0)
    with pytest.raises(ValueError, match="float16"):
        attention.attend(step.q.astype(mx.float16), step.state, scale=1.0)
    with pytest.raises(ValueError, match="window"):
        attention.attend(step.q, step.state, scale=1.0, window=0)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_stage_fits(dtype, head_dim):
    keys = stage_keys(dtype, head_dim)
    assert keys % 8 == 0 and keys * (head_dim * dtype.size + 16) <= STAGE_BYTES


@pytest.mark.parametrize("segments", [[(1, 1)], [(1, 9), (2, 20)], [(1, 1100)], [(3, 40)] * 9])
def test_small_steps_run_the_same_kernel_as_large_ones(segments):
    """MLX puts inputs below 8 elements in constant memory: another signature, so one more compilation in serving."""
    attention = MetalBackend(metal_kernel, target_threadgroups=1000)
    sizes: dict[str, set[int]] = {}
    for name in ("attention", "merge"):
        kernel = getattr(attention, name)

        def recorded(kernel=kernel, **call):
            for n, array in zip(kernel.input_names, call["inputs"], strict=True):
                sizes.setdefault(n, set()).add(array.size)
            return kernel(**call)

        setattr(attention, name, recorded)
    step = make_step([(n, kv - n) for n, kv in segments], num_heads=1, num_kv_heads=1, head_dim=64)
    out = np.array(attention.for_step(step.rows).attend(step.q, step.state, scale=0.125))
    assert relative_error(out, step.reference(scale=0.125)) <= 1e-5
    always_small = {"numbers", "window_size", "sinks"}  # their sizes are the model's, not the step's
    assert all(min(s) >= 8 for n, s in sizes.items() if n not in always_small)


def test_arrays_of_matrices_stay_in_registers(monkeypatch, tmp_path):
    """A GPU's registers have no indices: optimised, the kernel must hold no array of matrices in memory."""
    units = []
    monkeypatch.setattr("tools.metal_sim.kernel.build", lambda unit, name: units.append(unit) or build(unit, name))
    step = make_step([(1, 7)], num_heads=4, num_kv_heads=2, head_dim=256, dtype=mx.float16)
    MetalBackend(metal_kernel).for_step(step.rows).attend(step.q, step.state, scale=1.0)

    def arrays(unit):
        source, ir = tmp_path / "kernel.cl", tmp_path / "kernel.ll"
        source.write_text(unit)
        flags = ["-w", "-target", "spir64", "-O2", "-emit-llvm", "-S", str(source), "-o", str(ir)]
        assert run_clang([*language_flags(), *flags]).returncode == 0
        return re.findall(r"alloca \[\d+ x .*simdgroup_matrix", ir.read_text())

    assert not arrays(units[0])
    # That is so because of the requests to unroll.
    assert len(arrays(units[0].replace("#pragma clang loop unroll(full)", ""))) >= 4


def test_tables_are_made_once_per_kind_of_layer():
    step = make_step([(3, 40), (1, 9)], num_heads=2, num_kv_heads=1, head_dim=64)
    attention = backend().for_step(step.rows)
    for window in (None, None, 16, 16):
        attention.attend(step.q, step.state, scale=1.0, window=window)
    assert len(attention._uploaded) == 2


def test_kernels_are_in_the_wheel(tmp_path):
    """Built as pip builds it, unpacked, and used from there."""
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [n for n in archive.namelist() if n.startswith(("kernels/", "tools/", "tests/"))]
        archive.extractall(tmp_path / "site")
    names = sorted(path.name for path in (ROOT / "kernels").glob("*.metal"))
    assert "paged_attention.metal" in names and "gated_delta.metal" in names
    use = (
        "from metal_engine.device import metal_kernels; print(metal_kernels.__file__); "
        f"[metal_kernels.kernel_text(name) for name in {names}]"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", use], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout


@pytest.mark.metal
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window, softcap", [(None, None), (100, 30.0)])
def test_on_a_mac(dtype, head_dim, window, softcap):
    """The real compiler and the real GPU; equal to the reference and to the simulator's bounds."""
    step = make_step(
        [(n, kv - n) for n, kv in SERVING_MIX + BIG_MIX], num_heads=8, num_kv_heads=2, head_dim=head_dim,
        dtype=DTYPES[dtype], window=window, shared_blocks=1,
    )  # fmt: skip
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    attention = MetalBackend().for_step(step.rows)
    out = np.array(attention.attend(step.q, step.state, **options).astype(mx.float32))
    expected = step.reference(**options)
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) <= TOLERANCE[DTYPES[dtype]]
