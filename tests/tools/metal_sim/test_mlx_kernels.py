"""Unchanged kernels from MLX's own headers, compared with MLX on the CPU."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tools.metal_sim import MetalSimError, RawKernel

KERNELS = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
RNG = np.random.default_rng(0)


def text_of(*names):
    return (
        "".join(f'#include "mlx/backend/metal/kernels/{n}"\n' for n in names[:-1]) + (KERNELS / names[-1]).read_text()
    )


@pytest.mark.parametrize("size", [1, 100, 512, 1000])
def test_softmax_single_row(size):
    kernel = RawKernel(text_of("softmax.h"), "softmax_single_row", ["float", "float", "SOFTMAX_N_READS"])
    x = RNG.standard_normal((3, size)).astype(np.float32) * 4
    out = np.empty_like(x)
    threads = (size + 127) // 128 * 32
    kernel(x, out, np.int32(size), grid=(3 * threads, 1, 1), threadgroup=(threads, 1, 1))
    np.testing.assert_allclose(out, np.array(mx.softmax(mx.array(x), axis=-1)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["half", "bfloat16_t"])
def test_softmax_looped_in_half_precision(dtype):
    kernel = RawKernel(text_of("softmax.h"), "softmax_looped", [dtype, "float", "SOFTMAX_N_READS"])
    mx_dtype = mx.float16 if dtype == "half" else mx.bfloat16
    x = mx.array(RNG.standard_normal((2, 5000)).astype(np.float32)).astype(mx_dtype)
    bits = np.array(x.view(mx.uint16))
    out = np.empty_like(bits)
    kernel(bits, out, np.int32(5000), grid=(2 * 1024, 1, 1), threadgroup=(1024, 1, 1))
    got = np.array(mx.array(out).view(mx_dtype).astype(mx.float32))
    np.testing.assert_allclose(got, np.array(mx.softmax(x.astype(mx.float32), axis=-1)), rtol=1e-2)


def test_softmax_looped_with_256_threads_reads_uninitialised_memory():
    """MLX always launches this kernel with 1,024 threads and depends on that number. With 256 threads it is wrong."""
    kernel = RawKernel(text_of("softmax.h"), "softmax_looped", ["float", "float", "SOFTMAX_N_READS"])
    x = np.zeros((1, 5000), np.float32)
    with pytest.raises(MetalSimError, match="local_max") as caught:
        kernel(x, np.empty_like(x), np.int32(5000), grid=(256, 1, 1), threadgroup=(256, 1, 1))
    assert caught.value.kind == "uninitialised read"


def test_logsumexp():
    kernel = RawKernel(text_of("logsumexp.h"), "logsumexp", ["float", "float", "4"])
    x = RNG.standard_normal((4, 300)).astype(np.float32) * 5
    out = np.empty(4, np.float32)
    kernel(x, out, np.int32(300), grid=(4 * 96, 1, 1), threadgroup=(96, 1, 1))
    np.testing.assert_allclose(out, np.array(mx.logsumexp(mx.array(x), axis=-1)), rtol=1e-6)


@pytest.mark.parametrize("causal, sinks", [(False, False), (True, False), (True, True)])
def test_sdpa_vector(causal, sinks):
    """MLX's decode attention: threadgroup memory, SIMD sums, GQA, function constants."""
    heads, kv_heads, queries, keys, dim = 4, 2, 3, 70, 64
    kernel = RawKernel(
        text_of("sdpa_vector.h"),
        "sdpa_vector",
        ["float", str(dim), str(dim)],
        {"do_causal": causal, "has_sinks": sinks, "has_mask": False, "query_transposed": False},
    )
    q = RNG.standard_normal((1, heads, queries, dim)).astype(np.float32)
    k = RNG.standard_normal((1, kv_heads, keys, dim)).astype(np.float32)
    v = RNG.standard_normal((1, kv_heads, keys, dim)).astype(np.float32)
    s = RNG.standard_normal(heads).astype(np.float32)
    out = np.empty_like(q)
    scale = np.float32(dim**-0.5)
    kernel(
        q, k, v, out, np.int32(heads // kv_heads), np.int32(keys), np.uint64(keys * dim), np.uint64(dim),
        np.uint64(keys * dim), np.uint64(dim), scale, None, None, np.int32(0), np.int32(0), np.int32(0), s,
        np.int32(heads), grid=(heads * 1024, queries, 1), threadgroup=(1024, 1, 1),
    )  # fmt: skip
    expected = mx.fast.scaled_dot_product_attention(
        mx.array(q), mx.array(k), mx.array(v), scale=float(scale), mask="causal" if causal else None,
        sinks=mx.array(s) if sinks else None,
    )  # fmt: skip
    np.testing.assert_allclose(out, np.array(expected), rtol=1e-4, atol=1e-5)
