"""Types, math functions and thread positions in kernels."""

import math

import mlx.core as mx
import numpy as np
import pytest

from tests.tools.metal_sim.helpers import run
from tools.metal_sim import FlushingKernel, metal_kernel


def _all_halves():
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def test_half_arithmetic_rounds_after_every_operation():
    rng = np.random.default_rng(0)
    a = rng.standard_normal(4096).astype(np.float16)
    b = rng.standard_normal(4096).astype(np.float16)
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = a[i] * b[i] + a[i];
    quotient[i] = a[i] / b[i];
    """
    out, quotient = run(
        source, {"a": a, "b": b}, {"out": ((4096,), mx.float16), "quotient": ((4096,), mx.float16)}, grid=(4096, 1, 1)
    )
    np.testing.assert_array_equal(out, a * b + a)
    np.testing.assert_array_equal(quotient, a / b)


def test_float_to_half_and_back_is_numpys_for_every_half():
    halves = _all_halves()
    up = run(
        "out[thread_position_in_grid.x] = float(inp[thread_position_in_grid.x]);",
        {"inp": halves},
        {"out": ((1 << 16,), mx.float32)},
        grid=(1 << 16, 1, 1),
        threadgroup=(1024, 1, 1),
    )
    np.testing.assert_array_equal(up, halves.astype(np.float32))
    # Between two halves, ties included.
    x = halves.astype(np.float32)[:0x7BFF]
    between = np.concatenate([(x[1:] + x[:-1]) / 2, np.nextafter((x[1:] + x[:-1]) / 2, np.float32(np.inf))])
    n = len(between)
    down = run(
        "out[thread_position_in_grid.x] = half(inp[thread_position_in_grid.x]);",
        {"inp": between},
        {"out": ((n,), mx.float16)},
        grid=(n, 1, 1),
        threadgroup=(1024, 1, 1),
    )
    np.testing.assert_array_equal(down, between.astype(np.float16))


def test_bfloat_rounds_to_nearest_even():
    bits = np.random.default_rng(1).integers(0, 1 << 32, 4096, dtype=np.uint32)
    bits[:64] = (bits[:64] & 0xFFFF0000) | 0x8000  # ties
    x = bits.view(np.float32)
    x = np.where(np.isnan(x), np.float32(1), x)
    out = run(
        "out[thread_position_in_grid.x] = bfloat(inp[thread_position_in_grid.x]);",
        {"inp": x},
        {"out": ((4096,), mx.bfloat16)},
        grid=(4096, 1, 1),
    )
    np.testing.assert_array_equal(out, np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)))


def test_bfloat_arithmetic():
    a = mx.random.normal((512,)).astype(mx.bfloat16)
    b = mx.random.normal((512,)).astype(mx.bfloat16)
    source = """
    uint i = thread_position_in_grid.x;
    T x = a[i];
    x += b[i];
    x *= a[i];
    out[i] = x;
    """
    out = run(source, {"a": a, "b": b}, {"out": ((512,), mx.bfloat16)}, grid=(512, 1, 1), template=[("T", mx.bfloat16)])
    np.testing.assert_array_equal(out, np.array(((a + b) * a).astype(mx.float32)))


@pytest.mark.parametrize(
    "expression, function",
    [
        ("exp(x)", math.exp),
        ("exp2(x)", lambda x: 2.0**x),
        ("fast::exp(x)", math.exp),
        ("precise::log(fabs(x))", lambda x: math.log(abs(x))),
        ("log2(abs(x))", lambda x: math.log2(abs(x))),
        ("tanh(x)", math.tanh),
        ("precise::tanh(x)", math.tanh),
        ("rsqrt(fabs(x))", lambda x: 1 / math.sqrt(abs(x))),
        ("sqrt(fabs(x))", lambda x: math.sqrt(abs(x))),
        ("sin(x) + cos(x)", lambda x: math.sin(x) + math.cos(x)),
        ("fma(x, x, 1.0f)", lambda x: x * x + 1),
        ("pow(fabs(x), 1.5f)", lambda x: abs(x) ** 1.5),
        ("floor(x) + ceil(x) * 100", lambda x: math.floor(x) + math.ceil(x) * 100),
        ("clamp(x, -1.0f, 1.0f)", lambda x: min(max(x, -1), 1)),
        ("max(x, 0.5f) + min(x, 0.25f)", lambda x: max(x, 0.5) + min(x, 0.25)),
        ("select(x, 7.0f, x > 0)", lambda x: 7 if x > 0 else x),
        ("1.0 / x", lambda x: 1 / x),  # Metal has no double: the literal is a float
    ],
)
def test_math(expression, function):
    x = np.linspace(-4.03, 3.97, 32).astype(np.float32)
    out = run(f"float x = inp[thread_index_in_simdgroup]; out[thread_index_in_simdgroup] = {expression};", {"inp": x})
    np.testing.assert_allclose(out, [function(float(v)) for v in x], rtol=2e-6, atol=1e-6)


def test_infinity_and_nan():
    source = """
    out[0] = max(NAN, 1.0f);
    out[1] = -INFINITY;
    out[2] = isnan(inp[0] - inp[0]) ? 1 : 0;
    out[3] = exp2(-INFINITY);
    out[4] = Limits<float>::finite_max;
    out[5] = float(numeric_limits<half>::max());
    """
    out = run(source, {"inp": np.float32([np.inf])}, {"out": ((6,), mx.float32)}, grid=(1, 1, 1))
    np.testing.assert_array_equal(out, [1, -np.inf, 1, 0, np.finfo(np.float32).max, 65504])


def test_vectors_swizzles_and_conversions():
    source = """
    // metal_sim: never small: inp
    float4 v = float4(1, 2, float2(3, 4));
    v.xy = v.wz;
    half4 h = half4(v);
    int4 n = int4(float4(1.9f, -1.9f, 2.5f, 0));
    float4 f = static_cast<float4>(n);
    vec<float, 2> w = vec<float, 2>(v.x, f.y);
    uint2 bits = as_type<uint2>(float2(1.0f, 2.0f));
    const device float4* in4 = (const device float4*)inp;
    out[0] = v.x; out[1] = v.y; out[2] = float(h.z); out[3] = f.x; out[4] = f.y; out[5] = f.z;
    out[6] = w.x + w.y; out[7] = as_type<float>(bits.y); out[8] = dot(in4[0], float4(1));
    out[9] = float4(2).z; out[10] = float3(v.xyz).z; out[11] = as_type<float>(0x40400000u);
    out[12] = length(float2(3, 4)); out[13] = float(popcount(255u) + clz(1u));
    """
    out = run(source, {"inp": np.arange(8, dtype=np.float32)}, {"out": ((14,), mx.float32)}, grid=(1, 1, 1))
    np.testing.assert_array_equal(out, [4, 3, 3, 1, -1, 2, 3, 2, 6, 2, 3, 3, 5, 39])


def test_positions_with_ragged_edges():
    """dispatchThreads: the grid counts threads, and the last threadgroup of a row is smaller."""
    source = """
    uint3 p = thread_position_in_grid;
    uint at = (p.y * 10 + p.x) * 6;
    out[at] = threadgroup_position_in_grid.x * 100 + threadgroup_position_in_grid.y;
    out[at + 1] = thread_position_in_threadgroup.x * 100 + thread_position_in_threadgroup.y;
    out[at + 2] = threads_per_threadgroup.x * 100 + threads_per_threadgroup.y;
    out[at + 3] = thread_index_in_threadgroup;
    out[at + 4] = threadgroups_per_grid.x * 100 + threadgroups_per_grid.y;
    out[at + 5] = threads_per_grid.x * 100 + threads_per_grid.y;
    """
    out = run(source, outputs={"out": ((5, 10, 6), mx.uint32)}, grid=(10, 5, 1), threadgroup=(4, 2, 1))
    for y in range(5):
        for x in range(10):
            width, height = min(4, 10 - x // 4 * 4), min(2, 5 - y // 2 * 2)
            expected = [
                x // 4 * 100 + y // 2,
                x % 4 * 100 + y % 2,
                width * 100 + height,
                x % 4 + y % 2 * width,
                303,
                1005,
            ]
            np.testing.assert_array_equal(out[y, x], expected)


def test_atomics():
    source = """
    atomic_fetch_add_explicit(&out[0], 1u, memory_order_relaxed);
    atomic_fetch_max_explicit(&out[1], thread_position_in_grid.x, memory_order_relaxed);
    """
    out = run(
        source, outputs={"out": ((2,), mx.uint32)}, grid=(300, 1, 1), threadgroup=(64, 1, 1), atomic_outputs=True,
        init_value=0,
    )  # fmt: skip
    np.testing.assert_array_equal(out, [300, 299])


def test_shapes_strides_and_scalars():
    source = """
    out[0] = inp_shape[0] * 100 + inp_shape[1];
    out[1] = inp_strides[0] * 100 + inp_strides[1];
    out[2] = inp_ndim;
    out[3] = scale * 2;
    """
    out = run(
        source,
        {"inp": np.zeros((3, 5), np.float32), "scale": mx.array(1.5)},
        {"out": ((4,), mx.float32)},
        grid=(1, 1, 1),
    )
    np.testing.assert_array_equal(out, [305, 501, 2, 3])


def test_init_value_and_template_of_every_kind():
    source = "if (B && thread_position_in_grid.x < N) out[thread_position_in_grid.x] = T(2);"
    template = [("T", mx.int32), ("N", 3), ("B", True)]
    out = run(source, outputs={"out": ((5,), mx.int32)}, grid=(5, 1, 1), template=template, init_value=7)
    np.testing.assert_array_equal(out, [2, 2, 2, 7, 7])


def test_header_functions_and_structs():
    header = """
    struct Pair { float a; int b; };
    template <typename T>
    METAL_FUNC T twice(const device T* p, uint i) { return p[i] * T(2); }
    METAL_FUNC void set(thread Pair& p, float a) { p.a = a; p.b += 1; }
    constant float table[3] = {0.5f, 1.5f, 2.5f};
    """
    source = """
    // metal_sim: never small: inp
    Pair p = {0.0f, 1};
    set(p, twice(inp, 1));
    out[0] = p.a + p.b + table[2];
    """
    out = run(
        source, {"inp": np.arange(8, dtype=np.float32)}, {"out": ((1,), mx.float32)}, grid=(1, 1, 1), header=header
    )
    np.testing.assert_array_equal(out, [2 + 2 + 2.5])


@pytest.mark.parametrize("factory, smallest", [(metal_kernel, 2.0**-24), (FlushingKernel, 2.0**-14)])
def test_half_with_and_without_subnormal_numbers(factory, smallest):
    numbers = np.array([1.0, 2.0**-14, 2.0**-15, 2.0**-24, 0.0, -(2.0**-14), -(2.0**-24), 60_000.0], np.float32)
    kernel = factory(
        name="halved", input_names=["inp"], output_names=["out"],
        source="out[thread_position_in_grid.x] = half(inp[thread_position_in_grid.x]);",
    )  # fmt: skip
    (out,) = kernel(
        inputs=[mx.array(numbers)], output_shapes=[(8,)], output_dtypes=[mx.float16],
        grid=(8, 1, 1), threadgroup=(8, 1, 1),
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.where(np.abs(numbers) < smallest, 0.0, numbers).astype(np.float16))
