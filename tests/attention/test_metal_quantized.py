"""The Metal kernel on quantized K and V: compared with float64 on the dequantized cache, and the bytes it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.choice import BackendChoice
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import (
    HELD_FRAGMENTS,
    AttentionShape,
    UnsupportedAttentionError,
    check_supported,
    variant_of,
)
from metal_engine.kv_cache.spec import KVSpec, QuantizedKVSpec
from tests.attention.test_metal_host import arrays_in_memory
from tests.support.simulated import attend, check
from tools.fixtures.packed_step import make_step
from tools.metal_sim import LaunchCounts, metal_kernel
from tools.metal_sim.build import build
from tools.metal_sim.group_reads import group_reads
from tools.metal_sim.quantized_mutants import MUTANTS, caught
from tools.metal_sim.shapes import Attention, layers_by_model

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# (query_len, kv_len)
MIX = [(1, 1), (1, 7), (5, 18), (33, 33), (1, 130)]
Quantized = tuple[int, int]  # bits, group size

# (head_dim, V head_dim, query heads, KV heads), group size. The V of a latent is part of K. Each run tests all bits.
HEADS: list[tuple[tuple[int, int, int, int], int]] = [
    ((64, 64, 4, 2), 64),
    ((128, 128, 8, 2), 64),
    ((96, 96, 4, 2), 32),
    ((192, 128, 4, 4), 64),
    ((256, 256, 4, 2), 64),
    ((160, 160, 20, 1), 32),
    ((32, 480, 2, 1), 32),
    ((352, 64, 3, 1), 32),
    ((512, 512, 4, 2), 64),
    ((128, 128, 24, 1), 64),
    ((64, 64, 40, 1), 64),
    ((192, 128, 32, 2), 64),
    ((64, 64, 20, 1), 64),
]
LATENTS = [
    ((576, 512, 20, 1), 64),
    ((576, 512, 128, 1), 64),
    ((320, 256, 12, 1), 64),
    ((64, 48, 24, 1), 32),
    ((320, 256, 32, 1), 64),
]
A_FEW = {
    (0, 8, "float16"), (1, 4, "bfloat16"), (2, 4, "float16"), (3, 8, "bfloat16"), (4, 8, "float16"), (2, 8, "float32"),
    (13, 8, "float16"), (16, 4, "bfloat16"), (9, 4, "float16"), (11, 8, "float16"), (17, 8, "bfloat16"),
}  # fmt: skip
SHAPES = [
    pytest.param(
        heads, group_size, bits, dtype, i >= len(HEADS), marks=[] if (i, bits, dtype) in A_FEW else [pytest.mark.full]
    )
    for i, (heads, group_size) in enumerate(HEADS + LATENTS)
    for bits in (8, 4)
    for dtype in DTYPES
]


@pytest.mark.parametrize("heads, group_size, bits, dtype, is_latent", SHAPES)
def test_shapes(heads: tuple[int, int, int, int], group_size: int, bits: int, dtype: str, is_latent: bool) -> None:
    """Tests decodes, chunks and a fresh prompt. Slots that must not be read contain NaN."""
    head_dim, v_head_dim, num_heads, num_kv_heads = heads
    check(
        MIX if num_heads <= 40 else [(1, 130), (2, 20)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        is_latent=is_latent,
        dtype=DTYPES[dtype],
        quantized=(bits, group_size),
    )


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.full)])
def test_windows_softcaps_sinks_and_splits(bits: int, dtype: str) -> None:
    sinks = mx.array([0.5, -1.0, 3.0, 8.0]).astype(DTYPES[dtype])
    options: dict[str, Any] = {"softcap": 20.0, "sinks": sinks, "dtype": DTYPES[dtype], "quantized": (bits, 64)}
    check([*MIX, (40, 300)], window=128, **options)
    launches = check([(1, 1300), (9, 1100)], window=1090, target_threadgroups=1000, **options)
    assert [launch.kernel for launch in launches] == ["paged_attention_quantized", "merge_splits"]


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 128, 10_000])
@pytest.mark.parametrize("softcap, has_sinks", [(None, False), (20.0, False), (None, True), (20.0, True)])
def test_masks_and_options(bits: int, dtype: str, window: int | None, softcap: float | None, has_sinks: bool) -> None:
    for heads in ((64, 64, 4, 2), (96, 64, 12, 1)):
        head_dim, v_head_dim, num_heads, num_kv_heads = heads
        sinks = mx.array(np.linspace(-1, 8, num_heads).astype(np.float32)).astype(DTYPES[dtype])
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks if has_sinks else None}
        options |= {"quantized": (bits, 32), "dtype": DTYPES[dtype], "head_dim": head_dim, "v_head_dim": v_head_dim}
        for is_latent in (False, True)[: 1 + (num_kv_heads == 1)]:
            check([*MIX, (40, 300)], num_heads=num_heads, num_kv_heads=num_kv_heads, is_latent=is_latent, **options)


@pytest.mark.parametrize("quantized", [(8, 64), (4, 64)], ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, pytest.param(mx.bfloat16, marks=pytest.mark.full)], ids=str)
def test_quantized_attention_equals_attention_over_kv_dequantized_by_mlx(quantized: Quantized, dtype: mx.Dtype) -> None:
    """The kernel gives the same bits as on a cache of mx.dequantize's numbers, rounded to the layer's type.

    With heads of this size, both kernels distribute the work in the same way.
    """
    step = make_step([(1, 99), (20, 41), (1, 700), (64, 0)], head_dim=64, dtype=dtype, quantized=quantized)
    keys, values = (array.astype(dtype) for array in step._kept)
    plain = replace(step, k_cache=keys, v_cache=values, quantized=None)
    shape = AttentionShape(dtype, 64, 64, 4, 2, 16)
    assert variant_of(shape) == variant_of(replace(shape, bits=quantized[0], group_size=quantized[1]))
    for target in (1, 1000):
        np.testing.assert_array_equal(attend(step, target, scale=0.2)[0], attend(plain, target, scale=0.2)[0])


def test_output_bits_do_not_depend_on_the_batch() -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    step = make_step([(1, 99), (20, 41), (1, 700), (64, 0)], dtype=mx.float16, quantized=(8, 32), **heads)
    packed, _ = attend(step, scale=0.125)
    starts = step.rows.cu_seqlens_q
    for i in range(4):
        alone, _ = attend(step.alone(i), scale=0.125)
        np.testing.assert_array_equal(packed[starts[i] : starts[i + 1]], alone)


# --- bytes ---

# Allowed bytes relative to a float16 cache, by bits and group size.
ALLOWED = {(8, 64): 0.55, (4, 64): 0.30, (8, 32): 0.5625, (4, 32): 0.3125}
DECODES = [(1, kv) for kv in (300, 77, 1, 640)]
CACHES = ("k_cache", "k_scales", "k_biases", "v_cache", "v_scales", "v_biases")


def kv_read(launches: list[LaunchCounts]) -> int:
    return sum(launches[0].buffers[name].read for name in CACHES if name in launches[0].buffers)


@pytest.mark.parametrize(
    "heads, quantized",
    [
        pytest.param(
            heads,
            (bits, group_size),
            marks=[] if heads[:3] == ((96, 96, 4) if bits == 4 else (128, 128, 4)) else [pytest.mark.full],
        )
        for heads, group_size in (
            ((128, 128, 4, 2), 64),
            ((96, 96, 4, 2), 32),
            ((576, 512, 16, 1), 64),
            ((128, 128, 24, 1), 64),
            ((192, 128, 16, 1), 64),
            ((320, 256, 32, 1), 64),
        )
        for bits in (8, 4)
    ],
    ids=str,
)
def test_bytes_that_are_read(heads: tuple[int, int, int, int], quantized: Quantized) -> None:
    """Decodes alone, decodes in a batch, and chunks read at most the allowed share of the bytes of float KV."""
    head_dim, v_head_dim, num_heads, num_kv_heads = heads
    is_latent = head_dim in (576, 320)
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "is_latent": is_latent}
    options |= {"head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": mx.float16}
    others = [(50, 130)] if not is_latent else [(1, 130)]
    of_others, of_all = (
        [kv_read(check(mix, **options, quantized=kept)) for kept in (None, quantized)]
        for mix in (others, [*DECODES, *others])
    )
    assert of_others[1] <= ALLOWED[quantized] * of_others[0]
    in_float = of_all[0] - of_others[0]
    assert of_all[1] - of_others[1] <= ALLOWED[quantized] * in_float
    # Each key is read once, except for latents with more query heads than fit into a threadgroup's registers.
    of_a_key = (head_dim + (0 if is_latent else v_head_dim)) * num_kv_heads * 2
    assert in_float <= sum(kv for _, kv in DECODES) * of_a_key * -(-num_heads // 24)


def published_shapes() -> set[AttentionShape]:
    """Return the attention shapes of published checkpoints, with their quantization groups."""
    layers = {layer for found in layers_by_model().values() for layer in found if isinstance(layer, Attention)}
    return {
        AttentionShape(mx.float16, dim, a.v_head_dim, a.num_heads, a.num_kv_heads, 16, a.is_latent, bits, group_size)
        for a in layers
        for dim in (a.head_dim + a.rope_dim,)
        for group_size in (next((n for n in (64, 32) if dim % n == 0 and (a.is_latent or a.v_head_dim % n == 0)), 0),)
        for bits in (8, 4)
        if group_size
    }


def test_bytes_of_published_shapes() -> None:
    """All shapes are within the bounds, even if SIMD groups divide the columns of a head."""
    shapes = published_shapes()
    assert {(s.head_dim, s.v_head_dim, s.group) for s in shapes} > {(128, 128, 24), (192, 128, 16), (320, 256, 32)}
    over = {}
    for shape in shapes:
        check_supported(shape)
        dims = shape.head_dim + (0 if shape.is_latent else shape.v_head_dim)
        for is_direct in (True, False)[: 2 if variant_of(shape).staged_parts else 1]:
            ratio = (shape.bits * dims + 32 * sum(group_reads(shape, is_direct=is_direct))) / (16 * dims)
            if ratio > ALLOWED[shape.bits, shape.group_size]:
                over[shape.head_dim, shape.v_head_dim, shape.group, shape.bits] = ratio
    assert over == {}


# --- host ---

SHAPE = AttentionShape(mx.float16, 128, 128, num_heads=4, num_kv_heads=2, block_size=16, bits=8, group_size=64)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 6}, "int6 in groups of 64"),
        ({"group_size": 128}, "int8 in groups of 128"),
        ({"head_dim": 96}, "head_dim 96.* whole groups"),
        ({"v_head_dim": 32}, "V head_dim 32.* whole groups"),
        ({"v_head_dim": 72, "is_latent": True, "num_kv_heads": 1}, "latent.* multiple of 16"),
    ],
)
def test_unsupported_shapes_are_named(change: dict[str, Any], message: str) -> None:
    check_supported(SHAPE)
    with pytest.raises(UnsupportedAttentionError, match=message) as error:
        check_supported(replace(SHAPE, **change))
    assert "--attention-backend mlx" in str(error.value)


def all_shapes() -> list[AttentionShape]:
    groups = (1, 8, 9, 16, 17, 24, 25, 128)
    return [
        AttentionShape(dtype, dim, v_dim, group, 1, 16, is_latent, bits, group_size)
        for dtype in DTYPES.values()
        for group in groups
        for bits in (8, 4)
        for group_size in (64, 32)
        for dims in (
            [(d, v) for d in range(32, 513, 32) for v in (d, 64)],
            [(576, 512), (320, 256), (64, 48), (96, 64)],
        )
        for dim, v_dim in dims
        for is_latent in (dim in (576, 320) or (dim, v_dim) in ((64, 48), (96, 64)),)
        if dim % group_size == 0 and (is_latent or v_dim % group_size == 0)
    ]


def test_the_work_of_every_shape_fits() -> None:
    for shape in all_shapes():
        check_supported(shape)
        variant, plain = variant_of(shape), variant_of(replace(shape, bits=0, group_size=0))
        for name in ("staged_parts", "bk"):
            assert getattr(variant, name) == getattr(plain, name)
        assert variant.strips == (min(plain.strips, 2) if shape.is_latent else plain.strips)
        if variant.strips == plain.strips and variant.parts != plain.parts:  # SIMD parts would otherwise share a group
            assert variant.parts < plain.parts and shape.dtype.size == 2
            assert shape.v_head_dim % (plain.parts * shape.group_size)
        assert variant.held * variant.strips <= HELD_FRAGMENTS
        for columns in (variant.k_columns, variant.rest_columns, variant.v_columns):
            assert columns * shape.bits in (16, 32, 64)
        # A chunk must be in one quantization group.
        assert shape.group_size % (4 * variant.k_columns) == 0
        assert not shape.is_latent or shape.v_head_dim % (4 * variant.rest_columns) == 0
        # Pieces of a group must be loaded by one SIMD group on their way to the stage.
        if variant.staged_parts:
            piece = 16 // shape.dtype.size
            assert variant.bk * shape.head_dim // piece % 32 == variant.bk * shape.v_head_dim // piece % 32 == 0
        # Each of four lanes holds a quarter of a fragment's row, with a scale and a bias.
        loaded = variant.held * (shape.head_dim // variant.parts * shape.bits // (4 * 32) + 2)
        assert variant.held == 1 or loaded <= 32


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 128},
        pytest.param({"head_dim": 256}, marks=pytest.mark.full),
        pytest.param({"head_dim": 96, "num_heads": 16, "num_kv_heads": 1}, marks=pytest.mark.full),
        pytest.param({"head_dim": 128, "num_heads": 24, "num_kv_heads": 1}, marks=pytest.mark.full),
        pytest.param({"head_dim": 288, "num_heads": 1, "num_kv_heads": 1}, marks=pytest.mark.full),
        pytest.param(
            {"head_dim": 576, "v_head_dim": 512, "is_latent": True, "num_heads": 16, "num_kv_heads": 1},
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_arrays_stay_in_registers(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loaded integers stay in registers too, until they are unpacked."""
    units: list[str] = []
    monkeypatch.setattr("tools.metal_sim.kernel.build", lambda unit, name: units.append(unit) or build(unit, name))
    group_size = 64 if shape["head_dim"] % 64 == 0 else 32
    step = make_step([(1, 7)], dtype=mx.float16, quantized=(4, group_size), **shape)
    MetalBackend(metal_kernel).for_step(step.rows).attend(step.q, step.state, scale=1.0)
    assert not arrays_in_memory(units[0], tmp_path)


@pytest.mark.parametrize(
    "wrong", [pytest.param("fma(float(integer), scale, scale)", marks=pytest.mark.full), "float(integer) * scale"]
)
def test_a_wrong_kernel_is_found_at_load(wrong: str) -> None:
    def factory(**constructor: Any) -> Any:
        header = constructor.get("header", "").replace("fma(float(integer), scale, bias)", wrong)
        return metal_kernel(**constructor | {"header": header})

    kind = AttentionKind(QuantizedKVSpec(KVSpec(2, 64, 64, mx.float16), 8, 64), 4, mx.float16)
    chosen = BackendChoice(MetalBackend(factory)).for_layers([kind], 16)
    assert chosen.layers.portable == 1 and "gives wrong results" in chosen.layers.not_covered[0]


# --- mutants ---

# Missing bias, a number of the wrong group or tensor, and an error at a head's edge, in the direct and staged method.
SAMPLE = [
    next(i for i, m in enumerate(MUTANTS) if m.new == new)
    for new in ("float(integer) * scale", "rows.scales[0]", "v_rows = {v_cache, k_scales", "chunk", "numbers[0]")
]


def test_the_kernel_itself_passes() -> None:
    assert caught(None) is None


def test_there_are_enough_mutants() -> None:
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60


@pytest.mark.parametrize("i", SAMPLE, ids=lambda i: MUTANTS[i].name)
def test_sample_of_mutants(i: int) -> None:
    assert caught(MUTANTS[i])


@pytest.mark.mutants
@pytest.mark.parametrize("i", range(len(MUTANTS)), ids=lambda i: MUTANTS[i].name)
def test_every_mutant(i: int) -> None:
    assert bool(caught(MUTANTS[i])) != bool(MUTANTS[i].equivalent)
