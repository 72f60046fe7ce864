"""Operations across the lanes of a SIMD group, compared with the Metal specification."""

import mlx.core as mx
import numpy as np
import pytest

from tests.tools.metal_sim.helpers import run

LANES = np.arange(32)
X = np.linspace(-3, 5, 32).astype(np.float32) ** 3


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("simd_sum(x)", np.full(32, X.sum(dtype=np.float64))),
        ("simd_max(x)", np.full(32, X.max())),
        ("simd_min(x)", np.full(32, X.min())),
        ("simd_product(1 + x / 1000)", np.full(32, np.prod(1 + X.astype(np.float64) / 1000))),
        ("simd_prefix_inclusive_sum(x)", np.cumsum(X, dtype=np.float64)),
        ("simd_prefix_exclusive_sum(x)", np.cumsum(X, dtype=np.float64) - X),
        ("simd_prefix_inclusive_product(1 + x / 1000)", np.cumprod(1 + X.astype(np.float64) / 1000)),
        ("simd_shuffle(x, 31 - lane)", X[::-1]),
        ("simd_shuffle(x, (lane * 7) % 32)", X[LANES * 7 % 32]),
        ("simd_shuffle_xor(x, 5)", X[LANES ^ 5]),
        ("simd_shuffle_down(x, 3)", np.where(LANES + 3 < 32, X[(LANES + 3) % 32], X)),
        ("simd_shuffle_up(x, 3)", np.where(LANES >= 3, X[LANES - 3], X)),
        ("simd_shuffle_rotate_down(x, 3)", X[(LANES + 3) % 32]),
        ("simd_shuffle_rotate_up(x, 3)", X[(LANES - 3) % 32]),
        ("simd_shuffle_and_fill_down(x, -x, 3)", np.where(LANES + 3 < 32, X[(LANES + 3) % 32], -X[(LANES + 3) % 32])),
        ("simd_shuffle_and_fill_up(x, -x, 3)", np.where(LANES >= 3, X[LANES - 3], -X[LANES - 3])),
        ("simd_broadcast(x, 9)", np.full(32, X[9])),
        ("simd_broadcast_first(x)", np.full(32, X[0])),
        ("quad_sum(x)", np.repeat(X.reshape(8, 4).sum(1), 4)),
        ("quad_max(x)", np.repeat(X.reshape(8, 4).max(1), 4)),
        ("quad_shuffle_xor(x, 2)", X[LANES ^ 2]),
        ("quad_broadcast(x, 1)", X[LANES // 4 * 4 + 1]),
        ("simd_any(x > 100) ? 1 : 0", np.full(32, float((X > 100).any()))),
        ("simd_all(x > -28) ? 1 : 0", np.full(32, float((X > -28).all()))),
        ("simd_all(x > 0) ? 1 : 0", np.full(32, 0.0)),
        ("simd_is_first() ? 1 : 0", (LANES == 0).astype(float)),
    ],
)
def test_float_operation(expression, expected):
    source = f"uint lane = thread_index_in_simdgroup; float x = inp[lane]; out[lane] = {expression};"
    np.testing.assert_allclose(run(source, {"inp": X}), expected, rtol=5e-6)


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("simd_and(x)", np.bitwise_and.reduce),
        ("simd_or(x)", np.bitwise_or.reduce),
        ("simd_xor(x)", np.bitwise_xor.reduce),
        ("simd_sum(x)", np.add.reduce),
        ("uint((simd_vote::vote_t)simd_ballot(x & 1))", lambda v: sum((int(e) & 1) << i for i, e in enumerate(v))),
    ],
)
def test_integer_operation(expression, expected):
    x = (np.arange(32, dtype=np.uint32) * 2654435761) | 8
    source = f"uint lane = thread_index_in_simdgroup; uint x = inp[lane]; out[lane] = {expression};"
    out = run(source, {"inp": x}, {"out": ((32,), mx.uint32)})
    np.testing.assert_array_equal(out, np.full(32, expected(x), np.uint32))


def test_groups_do_not_mix():
    source = "out[thread_position_in_grid.x] = simd_sum(inp[thread_position_in_grid.x]);"
    x = np.arange(96, dtype=np.float32)
    out = run(source, {"inp": x}, {"out": ((96,), mx.float32)}, grid=(96, 1, 1), threadgroup=(96, 1, 1))
    np.testing.assert_array_equal(out, np.repeat(x.reshape(3, 32).sum(1), 32))


def test_last_group_of_a_ragged_threadgroup_counts_its_own_lanes():
    source = "out[thread_position_in_grid.x] = simd_sum(1.0f);"
    out = run(source, outputs={"out": ((40,), mx.float32)}, grid=(40, 1, 1), threadgroup=(40, 1, 1))
    np.testing.assert_array_equal(out, [32] * 32 + [8] * 8)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types(dtype):
    """bfloat's SIMD functions come from MLX's own header, over the compiler's builtins."""
    source = """
    uint lane = thread_index_in_simdgroup;
    T x = inp[lane];
    out[lane] = simd_max(x);
    out[32 + lane] = simd_shuffle_xor(x, ushort(1));
    out[64 + lane] = simd_sum(T(1.0f));
    """
    x = mx.arange(32).astype(dtype)
    out = run(source, {"inp": x}, {"out": ((96,), dtype)}, template=[("T", dtype)])
    np.testing.assert_array_equal(out[:32].astype(np.float32), 31)
    np.testing.assert_array_equal(out[32:64].astype(np.float32), np.arange(32) ^ 1)
    np.testing.assert_array_equal(out[64:].astype(np.float32), 32)


def test_vector_values():
    source = """
    uint lane = thread_index_in_simdgroup;
    float4 v = simd_sum(float4(lane, 1, 2, 3));
    out[lane] = v.x + v.y * 1000 + dot(v, float4(0, 0, 1, 1));
    """
    np.testing.assert_array_equal(run(source), np.full(32, 496 + 32000 + 64 + 96))
