"""simdgroup_matrix: loads, stores, products, and the layout of elements over lanes."""

import mlx.core as mx
import numpy as np
import pytest

from tests.tools.metal_sim.helpers import run
from tools.metal_sim import record_launches

A = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
B = np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32)
C = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)
OUT = {"out": ((8, 8), mx.float32)}


def test_multiply_accumulate():
    source = """
    // metal_sim: never small: A, B, C
    simdgroup_matrix<float, 8, 8> a, b, c;
    simdgroup_load(a, A);
    simdgroup_load(b, B, 8);
    simdgroup_load(c, C, 8, ulong2(0, 0), false);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, out, 8);
    """
    np.testing.assert_allclose(run(source, {"A": A, "B": B, "C": C}, OUT), A @ B + C, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("left, right", [(False, False), (True, False), (False, True), (True, True)])
def test_transposed_loads(left, right):
    source = """
    // metal_sim: never small: A, B, C
    simdgroup_float8x8 a, b, d;
    simdgroup_load(a, A, 8, ulong2(0, 0), L);
    simdgroup_load(b, B, 8, ulong2(0, 0), R);
    simdgroup_multiply(d, a, b);
    simdgroup_store(d, out, 8);
    """
    out = run(source, {"A": A, "B": B}, OUT, template=[("L", left), ("R", right)])
    np.testing.assert_allclose(out, (A.T if left else A) @ (B.T if right else B), rtol=1e-5, atol=1e-6)


def test_origin_stride_and_transposed_store():
    wide = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    source = """
    // metal_sim: never small: A, B, C
    simdgroup_float8x8 a;
    simdgroup_load(a, A, 24, ulong2(5, 3));
    simdgroup_store(a, out, 8, ulong2(0, 0), true);
    """
    np.testing.assert_array_equal(run(source, {"A": wide}, OUT), wide[3:11, 5:13].T)


def test_lane_layout_is_apples():
    """Lane and element -> row and column, as MLX's own kernels compute them (steel/attn/mma.h)."""
    source = """
    // metal_sim: never small: A
    uint lane = thread_index_in_simdgroup;
    short qid = lane / 4;
    short row = (qid & 4) + ((lane / 2) % 4);
    short column = (qid & 2) * 2 + (lane % 2) * 2;
    simdgroup_float8x8 a;
    simdgroup_load(a, A);
    out[row * 8 + column] = a.thread_elements()[0];
    out[row * 8 + column + 1] = a.thread_elements()[1];
    """
    np.testing.assert_array_equal(run(source, {"A": A}, OUT), A)


def test_threadgroup_memory_and_constructors():
    source = """
    threadgroup float tile[64];
    simdgroup_float8x8 eye(2.0f);
    simdgroup_float8x8 ones = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_multiply_accumulate(ones, eye, eye, ones);
    simdgroup_store(ones, tile, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[thread_index_in_simdgroup] = tile[thread_index_in_simdgroup];
    out[32 + thread_index_in_simdgroup] = tile[32 + thread_index_in_simdgroup];
    """
    np.testing.assert_array_equal(run(source, outputs=OUT), np.eye(8) * 4 + 1)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_operands_accumulate_in_float(dtype):
    source = """
    // metal_sim: never small: A, B, C
    simdgroup_matrix<T, 8, 8> a, b;
    simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_load(a, A, 8);
    simdgroup_load(b, B, 8);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, out, 8);
    """
    a, b = mx.array(A).astype(dtype), mx.array(B).astype(dtype)
    expected = np.array(a.astype(mx.float32)).astype(np.float64) @ np.array(b.astype(mx.float32))
    out = run(source, {"A": a, "B": b}, OUT, template=[("T", dtype)])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_load_reads_the_whole_matrix(dtype):
    """This includes elements that no lane uses, because the GPU reads them too."""
    source = """
    // metal_sim: never small: A
    simdgroup_matrix<T, 8, 8> a;
    simdgroup_load(a, A);
    out[thread_index_in_simdgroup] = float(a.thread_elements()[0]);
    """
    with record_launches() as launches:
        out = run(source, {"A": mx.array(A).astype(dtype)}, template=[("T", dtype)])
    assert np.isfinite(out).all()
    assert launches[0].buffers["A"].read == 64 * dtype.size
