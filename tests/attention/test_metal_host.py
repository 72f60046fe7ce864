"""Host side of the metal backend: shapes, variants, tables and compiled kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.cuts import TRIED, Cut
from metal_engine.attention.metal.variants import (
    GROUPS,
    HELD_FRAGMENTS,
    MANY_FRAGMENTS,
    MANY_FRAGMENTS_OF_16_BITS,
    STAGE_BYTES,
    AttentionShape,
    UnsupportedAttentionError,
    check_supported,
    variant_of,
)
from tests.support.simulated import backend, relative_error
from tools.fixtures.packed_step import make_step
from tools.metal_sim import metal_kernel
from tools.metal_sim.build import build, language_flags
from tools.metal_sim.toolchain import run_clang

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SHAPE = AttentionShape(mx.float16, head_dim=64, v_head_dim=64, num_heads=4, num_kv_heads=2, block_size=16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 66, "v_head_dim": 66}, "head_dim 66"),
        ({"v_head_dim": 4}, "V head_dim 4"),
        ({"head_dim": 576, "v_head_dim": 576}, "head_dim 576"),
        ({"block_size": 12}, "block size 12"),
        ({"dtype": mx.int8}, "int8"),
        ({"num_heads": 5, "num_kv_heads": 2}, "5 query heads"),
        ({"head_dim": 576, "v_head_dim": 576, "is_latent": True}, "V head_dim 576, latent"),
        ({"head_dim": 64, "v_head_dim": 80, "is_latent": True}, "V head_dim 80, latent"),
    ],
)
def test_unsupported_shapes_are_named(change, message):
    check_supported(SHAPE)
    with pytest.raises(UnsupportedAttentionError, match=message) as caught:
        check_supported(replace(SHAPE, **change))
    assert "--attention-backend mlx" in str(caught.value)


def all_shapes():
    """Yield every supported head_dim, and wide, narrow and latent heads, with few and many heads, in every dtype."""
    for dtype in DTYPES:
        for group in (1, 8, 9, 16, 17, 24, 25, 128):
            for dim in range(8, 513, 4):
                yield AttentionShape(dtype, dim, dim, group, 1, 16)
            for dims in ((192, 128), (128, 192), (64, 512), (512, 64)):
                yield AttentionShape(dtype, *dims, group, 1, 16)
            for dims in ((576, 512), (512, 512), (320, 256), (48, 32), (12, 8), (640, 512), (100, 36)):
                yield AttentionShape(dtype, *dims, group, 1, 16, is_latent=True)


def group_fits(shape):
    """Return True if a decode with this many query heads must be one work item with the direct method."""
    widest = max(shape.head_dim, shape.v_head_dim)
    return shape.group <= (24 if widest <= 256 or (widest <= 576 and shape.dtype.size == 2) else 16)


# Each value that tuning tries, and combinations with few registers.
CUTS = [
    Cut(),
    *(Cut(**{name: value}) for name, values in TRIED.items() for value in values[1:]),
    Cut(most_held=1, most_strips=1, staged_parts=2),
    Cut(most_held=1, most_strips=2, staged_parts=0),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_work_of_every_shape_fits(cut):
    for shape in all_shapes():
        check_supported(shape)
        variant = variant_of(shape, cut)
        assert variant.held <= cut.most_held
        size = shape.dtype.size
        # Rows of the cache begin at multiples of a lane's load, and so does a latent's position part.
        rows = (shape.head_dim, shape.v_head_dim) if shape.is_latent else (shape.head_dim,)
        for columns, dims in ((variant.k_columns, rows), (variant.v_columns, (shape.v_head_dim,))):
            assert columns * size in (4, 8, 16) and not any(dim % columns for dim in dims)
        assert GROUPS % variant.parts == 0 and variant.held * variant.strips <= HELD_FRAGMENTS
        widest = max(shape.head_dim, shape.v_head_dim)
        fragments = variant.strips * -(-widest // (8 * variant.parts))
        assert fragments <= (MANY_FRAGMENTS if variant.strips < 3 or size > 2 else MANY_FRAGMENTS_OF_16_BITS)
        if group_fits(shape) and cut.most_strips == 3 and cut.staged_parts:
            assert shape.group <= 8 * variant.strips  # a decode reads each key once, and stages none
        if shape.is_latent:
            assert variant.k_columns == variant.v_columns  # K and V are in the same registers
            if shape.head_dim > shape.v_head_dim:
                assert not any(d % variant.rest_columns for d in (*rows, shape.head_dim - shape.v_head_dim))
        assert variant.parts > 1 or widest < 192
        if variant.staged_parts:
            assert -(-widest // (8 * variant.staged_parts)) <= MANY_FRAGMENTS
            row_bytes = -(-widest // 8) * 8 * size + 16 + (GROUPS * 32 if variant.staged_parts > 1 else 0)
            assert variant.bk % 8 == 0 and variant.bk * row_bytes <= STAGE_BYTES
            assert variant.tile_rows == 64 // variant.staged_parts
        else:
            assert variant.tile_rows == variant.strips * 8


def test_step_and_arrays_must_agree():
    step = make_step([(3, 4)], num_heads=2, num_kv_heads=1, head_dim=64)
    attention = backend().for_step(step.rows)
    with pytest.raises(ValueError, match="do not belong"):
        attention.attend(step.q[:2], step.state, scale=1.0)
    with pytest.raises(ValueError, match="float16"):
        attention.attend(step.q.astype(mx.float16), step.state, scale=1.0)
    with pytest.raises(ValueError, match="does not match keys"):
        attention.attend(step.q[..., :32], step.state, scale=1.0)
    with pytest.raises(ValueError, match="window"):
        attention.attend(step.q, step.state, scale=1.0, window=0)


@pytest.mark.parametrize("segments", [[(1, 1)], [(1, 9), (2, 20)], [(1, 1100)], [(3, 40)] * 9])
def test_small_steps_run_the_same_kernel_as_large_ones(segments):
    """MLX puts inputs of fewer than 8 elements in constant memory.

    This changes the signature and would need a compilation.
    """
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


def arrays_in_memory(unit, tmp_path):
    """Return arrays in thread memory that remain after clang has optimised a translation unit."""
    source, ir = tmp_path / "kernel.cl", tmp_path / "kernel.ll"
    source.write_text(unit)
    flags = ["-w", "-target", "spir64", "-O2", "-emit-llvm", "-S", str(source), "-o", str(ir)]
    assert run_clang([*language_flags(), *flags]).returncode == 0
    # The simulator returns a product's result as [2 x float].
    return re.findall(r"alloca \[(?!2 x float\]).*", ir.read_text())


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 256},
        {"head_dim": 128},
        {"head_dim": 64, "num_heads": 16, "num_kv_heads": 1},
        {"head_dim": 576, "v_head_dim": 512, "is_latent": True, "num_heads": 16, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_arrays_stay_in_registers(shape, monkeypatch, tmp_path):
    """Registers of a GPU cannot be indexed, so the optimised kernel must not have arrays in memory.

    This holds for matrices, and for pieces loaded for the stage: loads into registers can be in flight together.
    """
    units = []
    monkeypatch.setattr("tools.metal_sim.kernel.build", lambda unit, name: units.append(unit) or build(unit, name))
    step = make_step([(1, 7)], dtype=mx.float16, **shape)
    MetalBackend(metal_kernel).for_step(step.rows).attend(step.q, step.state, scale=1.0)
    assert not arrays_in_memory(units[0], tmp_path)
    # The unroll requests are necessary for this.
    rolled = arrays_in_memory(units[0].replace("#pragma clang loop unroll(full)", ""), tmp_path)
    assert sum("simdgroup_matrix" in array for array in rolled) >= 3


def test_tables_are_made_once_per_kind_of_layer():
    step = make_step([(3, 40), (1, 9)], num_heads=2, num_kv_heads=1, head_dim=64)
    attention = backend().for_step(step.rows)
    for window in (None, None, 16, 16):
        attention.attend(step.q, step.state, scale=1.0, window=window)
    assert len(attention._uploaded) == 2


def test_kernels_are_in_the_wheel(tmp_path):
    """The wheel is built as by pip, unpacked, and used from there."""
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
