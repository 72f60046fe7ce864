"""Prefill on Metal's tensor operations: the kernel with the simulator's stand-in, and the steps that use it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.layer_kinds import shape_of
from metal_engine.attention.metal.variants import AttentionShape, fits_tensor_ops
from tests.attention.test_metal_host import arrays_in_memory
from tools.fixtures.packed_step import PackedStep, make_step
from tools.metal_sim import LaunchCounts, metal_kernel, record_launches
from tools.metal_sim.build import build
from tools.metal_sim.tensor_mutants import LAYOUTS, MUTANTS, caught, factory_in

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
TOLERANCE = {mx.float16: 1e-3, mx.bfloat16: 8e-3}  # relative error of a single row
HEADS = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}
OPTIONS: dict[str, Any] = {"scale": 0.125, "window": 100, "softcap": 20.0}


@cache
def backend(layout: int, target_threadgroups: int = 96) -> MetalBackend:
    return MetalBackend(factory_in(layout, metal_kernel), target_threadgroups, tensor_ops=True)


def attend(step: PackedStep, layout: int, target: int = 96, **options: Any) -> tuple[np.ndarray, list[LaunchCounts]]:
    assert backend(layout).uses_tensor_ops(shape_of(step.q, step.state))
    with record_launches() as launches:
        out = backend(layout, target).for_step(step.rows).attend(step.q, step.state, **options)
    assert launches[0].kernel == "paged_attention_tensor" + ("_quantized" if step.quantized else "")
    return np.array(out.astype(mx.float32)), launches


def check(step: PackedStep, layout: int, target: int = 96, sinks: mx.array | None = None, **options: Any) -> np.ndarray:
    """Compare each row with float64. Slots that must not be read contain NaN."""
    out, _ = attend(step, layout, target, sinks=sinks, **options)
    expected = step.reference(sinks=None if sinks is None else np.array(sinks.astype(mx.float32)), **options)
    # float16 stores rows near zero with few bits, so the error of a small row is relative to 1e-3.
    sizes = np.maximum(np.linalg.norm(expected, axis=-1), 1e-3)
    assert (np.linalg.norm(out - expected, axis=-1) / sizes).max() <= TOLERANCE[step.q.dtype]
    return out


def sinks_of(dtype: mx.Dtype, num_heads: int = 4) -> mx.array:
    return mx.array(np.linspace(-1, 8, num_heads, dtype=np.float32)).astype(dtype)


MIX = [(1, 99), (5, 13), (33, 0), (1, 0), (30, 120), (4, 95)]


def test_a_mixed_step() -> None:
    """Decodes, chunks and a fresh prompt."""
    check(make_step(MIX, window=100, dtype=mx.float16, **HEADS), 1, sinks=sinks_of(mx.float16), **OPTIONS)


@pytest.mark.full
def test_tensor_element_layout_does_not_change_output_bits() -> None:
    step = make_step(MIX, window=100, dtype=mx.float16, **HEADS)
    first, second = (check(step, layout, sinks=sinks_of(mx.float16), **OPTIONS) for layout in LAYOUTS)
    np.testing.assert_array_equal(first, second)


def test_output_bits_do_not_depend_on_the_batch() -> None:
    """A decode also uses this kernel in both steps. Keys are divided at the edges of a window."""
    step = make_step([(1, 99), (20, 41), (9, 107), (64, 0)], window=100, dtype=mx.float16, **HEADS)
    sinks = sinks_of(mx.float16)
    packed = check(step, 1, sinks=sinks, **OPTIONS)
    starts = step.rows.cu_seqlens_q
    for i in range(4):
        alone, _ = attend(step.alone(i), 1, sinks=sinks, **OPTIONS)
        np.testing.assert_array_equal(packed[starts[i] : starts[i + 1]], alone)


def test_bfloat16_and_splits() -> None:
    step = make_step([(1, 700), (12, 1000)], window=990, dtype=mx.bfloat16, **HEADS)
    check(step, 0, target=1000, sinks=sinks_of(mx.bfloat16), **OPTIONS | {"window": 990})


@pytest.mark.parametrize(
    "quantized, head_dim", [((8, 64), 64), pytest.param((4, 32), 96, marks=pytest.mark.full)], ids=str
)
def test_quantized_keys_and_values(quantized: tuple[int, int], head_dim: int) -> None:
    step = make_step(MIX, window=100, dtype=mx.float16, quantized=quantized, **HEADS | {"head_dim": head_dim})
    for layout in LAYOUTS:
        check(step, layout, sinks=sinks_of(mx.float16), **OPTIONS)


def test_products_and_barriers_are_counted() -> None:
    """The step is one tile of 64 rows, with the 115 keys of the window and 16 tokens."""
    step = make_step([(16, 176)], window=100, dtype=mx.float16, **HEADS)
    _, launches = attend(step, 1, sinks=sinks_of(mx.float16), **OPTIONS)
    stages, rows, head_dim = 2, 64, 64
    assert launches[0].products == stages * 64 * rows * (head_dim + head_dim) // 8**3
    in_a_stage, before, after = 5, 1, 1
    of_results = 1 + 2 * (head_dim // 32) - 1  # 32 columns are written at a time
    assert launches[0].barriers == before + in_a_stage * stages + after + of_results


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128])
def test_arrays_stay_in_registers(head_dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for the ordinary kernel. The simulator passes a product's sums as [16 x float]."""
    units: list[str] = []
    monkeypatch.setattr("tools.metal_sim.kernel.build", lambda unit, name: units.append(unit) or build(unit, name))
    step = make_step([(1, 7)], dtype=mx.float16, head_dim=head_dim)
    MetalBackend(metal_kernel, tensor_ops=True).for_step(step.rows).attend(step.q, step.state, scale=1.0)
    assert all(array.startswith("alloca [16 x float]") for array in arrays_in_memory(units[0], tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (144, 128), (48, 96), (80, 32), (128, 64)])
@pytest.mark.parametrize("group, block_size", [(1, 8), (4, 16), (20, 32), (12, 16)])
def test_shapes(dtype: str, layout: int, dims: tuple[int, int], group: int, block_size: int) -> None:
    kv_heads = 1 if group > 4 else 2
    heads = {"num_heads": group * kv_heads, "num_kv_heads": kv_heads, "block_size": block_size}
    segments = [(1, 0), (1, 6), (5, 13), (33, 0), (1, 129), (40, 160)]
    step = make_step(segments, head_dim=dims[0], v_head_dim=dims[1], dtype=DTYPES[dtype], **heads)
    check(step, layout, scale=dims[0] ** -0.5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 64, 128, 10_000])
@pytest.mark.parametrize("softcap, has_sinks", [(None, False), (20.0, False), (None, True), (20.0, True)])
def test_masks_and_options(dtype: str, window: int | None, softcap: float | None, has_sinks: bool) -> None:
    sinks = sinks_of(DTYPES[dtype]) if has_sinks else None
    for segments, target in (([(5, 13), (33, 0), (1, 129), (40, 260)], 1), ([(1, 1300), (9, 1100)], 1000)):
        step = make_step(segments, window=window, dtype=DTYPES[dtype], **HEADS)
        check(step, 1, target, sinks=sinks, scale=0.3, window=window, softcap=softcap)


@pytest.mark.full
def test_the_kernel_itself_passes() -> None:
    assert caught(None) is None


def test_there_are_enough_mutants() -> None:
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60


@pytest.mark.mutants
@pytest.mark.parametrize("i", range(len(MUTANTS)), ids=lambda i: MUTANTS[i].name)
def test_every_mutant(i: int) -> None:
    assert bool(caught(MUTANTS[i])) != bool(MUTANTS[i].equivalent)


def shape(dtype: mx.Dtype, head_dim: int, v_head_dim: int | None = None, **more: Any) -> AttentionShape:
    heads = {"num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    return AttentionShape(dtype, head_dim, v_head_dim or head_dim, **heads, **more)


def test_shapes_that_fit() -> None:
    fitting = {
        (head_dim, v_head_dim)
        for head_dim in range(8, 513, 4)
        for v_head_dim in (head_dim, 64)
        if fits_tensor_ops(shape(mx.float16, head_dim, v_head_dim))
    }
    dims = range(16, 145, 16)  # wider heads are divided between SIMD groups
    assert fitting == {(dim, 64) for dim in dims} | {(dim, dim) for dim in dims if dim % 32 == 0}
    assert fits_tensor_ops(shape(mx.bfloat16, 128)) and not fits_tensor_ops(shape(mx.float32, 128))
    assert not fits_tensor_ops(shape(mx.float16, 128, 64, is_latent=True))


class Calls:
    """Factory of kernels that record their names and compute nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.texts: dict[str, str] = {}

    def __call__(self, *, name: str, header: str = "", source: str, **_: Any) -> Any:
        self.texts[name] = header + source

        def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            self.names.append(name)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call


def test_each_shape_has_one_kernel() -> None:
    """The ordinary kernel's source stays free of anything that needs Metal 4."""
    ordinary, calls = Calls(), Calls()
    without, having = MetalBackend(ordinary), MetalBackend(calls, tensor_ops=True)
    assert not without.has_tensor_ops and having.has_tensor_ops
    attention = {"paged_attention", "paged_attention_quantized", "merge_splits"}
    selected = {"paged_attention_selected", "paged_attention_selected_quantized", "selected_latents"}
    assert set(ordinary.texts) == attention | selected | {"index_scores", "index_select"}
    assert {name: calls.texts[name] for name in ordinary.texts} == ordinary.texts
    assert "mpp::" not in ordinary.texts["paged_attention"]
    for name in ("paged_attention_tensor", "paged_attention_tensor_quantized"):
        assert "#include <MetalPerformancePrimitives/" in calls.texts[name]
    for name, text in calls.texts.items():
        assert ("dequantized" in text) == name.endswith("_quantized")
    steps = [
        make_step(segments, head_dim=head_dim, dtype=dtype, quantized=quantized)
        for segments in ([(1, 5)], [(40, 9), (1, 5)])
        for quantized in (None, (8, 32))
        for head_dim, dtype in ((64, mx.float16), (64, mx.float32), (80 if quantized is None else 192, mx.float16))
    ]
    for metal in (without, having, having.splitting(), having.without_tensor_ops()):
        for step in steps:
            metal.for_step(step.rows).attend(step.q, step.state, scale=1.0)
    each = ["paged_attention"] * 3 + ["paged_attention_quantized"] * 3
    assert ordinary.names == each * 2
    with_tensor_ops = ["paged_attention_tensor", *each[1:3], "paged_attention_tensor_quantized", *each[4:]]
    assert calls.names == [*with_tensor_ops * 4, *each * 2]
