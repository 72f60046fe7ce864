"""Rows of an image that attend to each other: the portable backend and the simulated kernel, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.kernel_selftest import KernelFailedError, try_images
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.layer_kinds import shape_of
from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS, Limits
from metal_engine.kv_cache.rows import ImageSpans
from metal_engine.kv_cache.spec import KVSpec
from tests.support.simulated import backend
from tests.support.sweeps import diagonal
from tools.fixtures.packed_step import PackedStep, make_step
from tools.metal_sim import image_mutants, metal_kernel
from tools.metal_sim.mutants import Mutant, factory_of
from tools.metal_sim.tensor_mutants import factory_in

# (query_len, context_len) of each request, and the images' rows within the segment of each request.
STEPS: dict[str, list[tuple[int, int, list[tuple[int, int]]]]] = {
    "one image": [(20, 0, [(4, 16)])],
    "a whole chunk": [(16, 37, [(0, 16)])],
    "neighbours": [(40, 5, [(2, 14), (14, 26), (30, 39)])],
    "with text and decodes": [(1, 70, []), (30, 3, [(7, 29)]), (1, 5, []), (12, 0, []), (25, 60, [(0, 20)])],
}
MANY_ROWS = {"long": [(180, 40, [(3, 90), (91, 170)]), (1, 300, []), (70, 0, [(1, 69)])]}
TILED = replace(CPU_LIMITS, small_area=0, tile_rows=8, span=2048, scores=512, min_keys=4)
LIMITS = {"cpu": CPU_LIMITS, "gpu": GPU_LIMITS, "tiled": TILED}


def step_with_images(
    parts: list[tuple[int, int, list[tuple[int, int]]]], bidirectional_layers: Any = "every layer", **options: Any
) -> PackedStep:
    starts = np.cumsum([0, *(n for n, _, _ in parts)]).tolist()
    spans = [(first + a, first + b) for first, (_, _, own) in zip(starts, parts, strict=False) for a, b in own]
    step = make_step([(n, context) for n, context, _ in parts], spans=spans, **options)
    return replace(
        step, rows=replace(step.rows, image_spans=ImageSpans(np.array(spans, np.int32), bidirectional_layers))
    )


def error(step: PackedStep, limits: Limits, **options: Any) -> float:
    out, wanted = step.attend(limits, scale=0.25, **options), step.reference(scale=0.25, **options)
    assert np.isfinite(out).all()
    return float((np.linalg.norm(out - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())


@pytest.mark.parametrize("window", [None, 6, 15, 64])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", [*STEPS, *MANY_ROWS])
def test_rows_see_their_image(name: str, limits: str, window: int | None) -> None:
    """Slots before every row's window, and slots after the last row, contain NaN."""
    step = step_with_images((STEPS | MANY_ROWS)[name], window=window)
    step.rows.validate(10_000)
    assert error(step, LIMITS[limits], window=window) < 1e-5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("limits", LIMITS)
def test_quantized_keys_and_values(limits: str, bits: int) -> None:
    step = step_with_images(STEPS["with text and decodes"], window=15, head_dim=64, quantized=(bits, 64))
    assert error(step, LIMITS[limits], window=15) < 1e-5


def test_softcap() -> None:
    step = step_with_images(STEPS["with text and decodes"], window=6)
    assert error(step, CPU_LIMITS, window=6, softcap=2.0) < 1e-5


def test_images_that_attend_only_in_layers_with_windows() -> None:
    step = step_with_images(STEPS["neighbours"], "layers with windows")
    causal = replace(step, rows=replace(step.rows, image_spans=None))
    assert np.array_equal(step.attend(scale=0.25), causal.attend(scale=0.25))
    assert error(step, CPU_LIMITS, window=9) < 1e-5
    assert not np.allclose(step.attend(scale=0.25, window=9), causal.attend(scale=0.25, window=9))


@pytest.mark.parametrize("spans", [[(4, 4)], [(6, 9), (8, 11)], [(-1, 3)], [(5, 41)], [(18, 22)]])
def test_wrong_spans_are_refused(spans: list[tuple[int, int]]) -> None:
    step = make_step([(20, 0), (20, 4)])
    rows = replace(step.rows, image_spans=ImageSpans(np.array(spans, np.int32), "every layer"))
    with pytest.raises(ValueError, match="bad step"):
        rows.validate(10_000)


def test_chunks_of_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="within chunks"):
        step_with_images(STEPS["one image"]).attend(scale=0.25, chunk=8)


# (head_dim, V head_dim, query heads, KV heads): staged and direct, parts, heads that are never staged.
SHAPES = [(64, 64, 4, 2), (128, 128, 16, 2), (256, 256, 4, 2), (512, 512, 4, 2), (96, 64, 3, 1), (64, 64, 40, 1)]


def kernel_error(
    step: PackedStep, backend: MetalBackend, window: int | None, *, softcap: float | None = None, sinks: bool = False
) -> float:
    num_heads = step.q.shape[1]
    of_heads = np.linspace(-1, 4, num_heads, dtype=np.float32) if sinks else None
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    given = None if of_heads is None else mx.array(of_heads)
    out = backend.for_step(step.rows).attend(step.q, step.state, scale=0.25, sinks=given, **options)
    wanted = step.reference(scale=0.25, sinks=of_heads, **options)
    errors = np.linalg.norm(np.array(out.astype(mx.float32)) - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(errors.max())


@pytest.mark.parametrize("target", [1, 1000])
@pytest.mark.parametrize("window", [None, 15])
@pytest.mark.parametrize("name", [*STEPS, *MANY_ROWS])
def test_kernel(name: str, window: int | None, target: int) -> None:
    step = step_with_images((STEPS | MANY_ROWS)[name], window=window, head_dim=64)
    assert kernel_error(step, backend(target), window) < 1e-5


@pytest.mark.parametrize(("shape", "dtype"), diagonal(SHAPES, [mx.float32, mx.bfloat16]))
def test_kernel_in_each_shape(shape: tuple[int, int, int, int], dtype: mx.Dtype) -> None:
    head_dim, v_head_dim, num_heads, num_kv_heads = shape
    heads = {"head_dim": head_dim, "v_head_dim": v_head_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    parts = [(1, 600, []), (40, 700, [(0, 3), (5, 36)]), (7, 0, [(1, 6)])]
    step = step_with_images(parts, window=30, dtype=dtype, **heads)
    assert kernel_error(step, backend(1000), 30, softcap=3.0, sinks=True) < (2e-5 if dtype == mx.float32 else 2e-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_kernel(bits: int) -> None:
    step = step_with_images(
        STEPS["with text and decodes"], window=20, dtype=mx.float16, head_dim=64, quantized=(bits, 64)
    )
    assert kernel_error(step, backend(), 20) < 2e-3


@pytest.mark.parametrize("quantized", [None, (8, 64)], ids=str)
def test_kernel_with_tensor_operations(quantized: tuple[int, int] | None) -> None:
    parts = [*STEPS["with text and decodes"], *MANY_ROWS["long"]]
    step = step_with_images(parts, window=20, dtype=mx.float16, head_dim=64, quantized=quantized)
    tensor = MetalBackend(factory_in(1, metal_kernel), 1000, tensor_ops=True)
    assert tensor.uses_tensor_ops(shape_of(step.q, step.state))
    assert kernel_error(step, tensor, 20) < 4e-3


def test_text_rows_have_the_bits_of_a_kernel_without_images() -> None:
    """A decode's result does not depend on an image in its batch."""
    step = step_with_images(STEPS["with text and decodes"], head_dim=64)
    causal = replace(step, rows=replace(step.rows, image_spans=None))
    whole, alone = (
        np.array(backend().for_step(one.rows).attend(one.q, one.state, scale=0.25)) for one in (step, causal)
    )
    decodes = [0, 31]  # rows of requests 0 and 2
    assert np.array_equal(whole[decodes], alone[decodes])


SAMPLE = [i for i, mutant in enumerate(image_mutants.MUTANTS) if not mutant.equivalent][::3]


@pytest.mark.parametrize("i", SAMPLE, ids=lambda i: image_mutants.MUTANTS[i].name)
def test_mutants_of_the_kernel(i: int) -> None:
    assert image_mutants.caught(image_mutants.MUTANTS[i])


@pytest.mark.full
def test_all_mutants_of_the_kernel() -> None:
    assert image_mutants.caught(None) is None
    for mutant in image_mutants.MUTANTS:
        assert bool(image_mutants.caught(mutant)) != bool(mutant.equivalent), mutant.name


def test_the_trial_at_load() -> None:
    kind = AttentionKind(KVSpec(2, 64, 64, mx.float16), 4, mx.float16, has_window=True)
    try_images(backend(), kind, 16)
    causal = MetalBackend(factory_of(Mutant("attention_staged", "max(position + 1, image_end)", "position + 1")))
    with pytest.raises(KernelFailedError, match="wrong results"):
        try_images(causal, kind, 16)
