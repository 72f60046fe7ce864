"""Faster forms of model operations, compared with float64 NumPy and with mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations

from metal_engine.attention.portable import exp2
from metal_engine.models import cpu_ops, mlx_lm_patch


@pytest.mark.parametrize("shape", [(1,), (3, 1, 7), (5, 1, 1536), (171, 1, 1536)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    gate, x = rng.normal(0, 4, shape).astype(np.float32), rng.normal(0, 3, shape).astype(np.float32)
    gate.flat[0] = -200.0  # exp(-gate) overflows float32
    out = np.array(cpu_ops.swiglu(mx.array(gate), mx.array(x)))
    g, y = gate.astype(np.float64), x.astype(np.float64)
    np.testing.assert_allclose(out, g / (1 + np.exp(-g)) * y, rtol=2e-6, atol=1e-30)
    assert out.shape == shape


def test_swiglu_is_finite_and_accurate_for_extreme_gates() -> None:
    gate = mx.array([88.0, 1e4, 3e38, -88.0, -1e4, -3e38, 0.0])
    out = np.array(cpu_ops.swiglu(gate, mx.ones_like(gate)))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[:3], np.array(gate)[:3], rtol=1e-6)
    np.testing.assert_allclose(out[3:], 0.0, atol=4.0)  # 3e38 times the smallest float32
    assert np.abs(out[3:5]).max() < 1e-33


def test_swiglu_does_not_hide_a_nan() -> None:
    out = np.array(cpu_ops.swiglu(mx.array([float("nan"), 1.0]), mx.array([1.0, float("nan")])))
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_dtypes_are_mlx_lms_own(dtype: mx.Dtype) -> None:
    gate, x = (mx.random.normal((4, 64)).astype(dtype) for _ in range(2))
    ours, theirs = cpu_ops.swiglu(gate, x), activations.swiglu(gate, x)
    assert ours.dtype == dtype and mx.array_equal(ours, theirs)


def test_a_second_installation_of_cpu_ops_keeps_the_original_swiglu() -> None:
    model = nn.Sequential(nn.RoPE(64))
    cpu_ops.use_faster_layers(model)  # replaces the classes of its layers
    mlx_lm_patch._replace_functions(model, cpu_ops.REPLACEMENTS)
    gate = mx.ones((2, 8), mx.float16)
    assert mx.array_equal(cpu_ops.swiglu(gate, gate), activations.swiglu(gate, gate))


@pytest.mark.parametrize("shape", [(1, 1), (3, 2047), (2, 3, 5000)])
def test_weights_of_scores(shape: tuple[int, ...]) -> None:
    scores = 7 - np.random.default_rng(1).exponential(20, shape).astype(np.float32)
    scores[..., -1] = -1e30  # the value that masks add
    peak = np.full((*shape[:-1], 1), 7, np.float32)
    out = np.array(exp2.weights_of_scores(mx.array(scores), mx.array(peak)))
    below = (scores - peak).astype(np.float64)
    np.testing.assert_allclose(out, 2.0 ** np.maximum(below, exp2.FLOOR), rtol=5e-7)


@pytest.mark.parametrize("num_rows", [5, 16, 129])
@pytest.mark.parametrize("dims", [8, 576])
def test_rms_norm(num_rows: int, dims: int) -> None:
    """Compare with the formula in float64. For few rows, MLX's function is used."""
    layer, original = nn.RMSNorm(dims, eps=1e-3), nn.RMSNorm(dims, eps=1e-3)
    layer.weight = original.weight = mx.random.normal((dims,))
    cpu_ops.use_faster_layers(layer)
    assert type(layer) is cpu_ops.ProductRMSNorm
    x = np.random.default_rng(0).normal(0, 3, (num_rows, 1, dims)).astype(np.float32)
    x[0] = 0
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * np.array(original.weight)
    out = layer(mx.array(x))
    np.testing.assert_allclose(np.array(out), expected, rtol=2e-6, atol=1e-6)
    assert num_rows >= cpu_ops.MIN_NORM_ROWS or mx.array_equal(out, original(mx.array(x)))
    half = mx.array(x).astype(mx.float16)
    assert mx.array_equal(layer(half), original(half))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("dims", "head_dim"), [(64, 64), (32, 80)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rope_from_tables(traditional: bool, dims: int, head_dim: int, scale: float) -> None:
    """Compare with the formula in float64, and with MLX's function."""
    original = nn.RoPE(dims, traditional=traditional, base=1e5, scale=scale)
    ours = nn.RoPE(dims, traditional=traditional, base=1e5, scale=scale)
    cpu_ops.use_faster_layers(ours)
    assert type(ours) is cpu_ops.TableRoPE
    positions = np.array([0, 1, 2, 77, 4095, *range(64)])
    x = np.random.default_rng(0).normal(size=(len(positions), 3, 1, head_dim)).astype(np.float32)
    step = cpu_ops.StepPositions(mx.array(positions))
    out = np.array(ours(mx.array(x), step))

    angles = positions[:, None] * scale * 1e5 ** (-np.arange(0, dims, 2) / dims)  # [N, dims / 2]
    turn = np.exp(1j * angles)[:, None, None]
    first, second = (np.arange(0, dims, 2), np.arange(1, dims, 2)) if traditional else np.split(np.arange(dims), 2)
    turned = (x[..., first] + 1j * x[..., second].astype(np.float64)) * turn
    expected = x.astype(np.float64)
    expected[..., first], expected[..., second] = turned.real, turned.imag
    np.testing.assert_allclose(out, expected, atol=2e-3)  # float32 angles up to 4,095
    np.testing.assert_allclose(out, np.array(original(mx.array(x), mx.array(positions))), atol=1e-6)

    assert len(step.tables) == 1
    ours(mx.array(x), step)
    assert len(step.tables) == 1
    plain = mx.array(x).swapaxes(0, 2)  # [1, 3, N, head_dim], an offset other than a step's
    assert mx.array_equal(ours(plain, 7), original(plain, 7))
    half = mx.array(x).astype(mx.float16)
    other = cpu_ops.StepPositions(mx.array(positions))
    assert mx.array_equal(ours(half, other), original(half, mx.array(positions))) and not other.tables


def test_rope_tables_tell_layers_apart() -> None:
    positions = mx.full((64,), 5)
    step = cpu_ops.StepPositions(positions)
    x = mx.random.normal((positions.size, 2, 1, 64))
    for base in (1e4, 1e6):
        layer = nn.RoPE(64, base=base)
        cpu_ops.use_faster_layers(layer)
        assert mx.allclose(layer(x, step), nn.RoPE(64, base=base)(x, positions), atol=1e-6)
    assert len(step.tables) == 2
