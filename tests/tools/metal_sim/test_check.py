"""The check pass: kernels that a Mac would not compile."""

import numpy as np
import pytest

from tests.support.sweeps import sweep
from tests.tools.metal_sim.helpers import run
from tools.metal_sim import CheckError

X = np.arange(64, dtype=np.float32)


def refused(source, inputs=None, header="", match=None):
    with pytest.raises(CheckError, match=match) as caught:
        run(source, inputs, header=header)
    return str(caught.value)


# Each takes a run of Clang.
REFUSED = [
    # pointers that cross address spaces
    ("METAL_FUNC void f(device float* p) { p[0] = 1; }", "threadgroup float t[4]; f(t);", "f"),
    ("METAL_FUNC void f(threadgroup float* p) { p[0] = 1; }", "float t[4]; f(t);", "f"),
    ("METAL_FUNC void f(thread float& p) { p = 1; }", "f(out[0]);", "f"),
    ("", "threadgroup float t[4]; device float* p = t;", "threadgroup|__local|__global"),
    ("", "threadgroup float t[4]; device float* p = (device float*)t;", "address space"),
    # pointers without an address space
    ("METAL_FUNC float f(float* p) { return p[0]; }", "float x = 1; out[0] = f(&x);", "'p' names no address space"),
    ("", "float x = 1; float* p = &x; out[0] = *p;", "'p' names no address space"),
    ("METAL_FUNC float f(float& p) { return p; }", "float x = 1; out[0] = f(x);", "'p' names no address space"),
    # C++ features that Metal lacks
    ("METAL_FUNC int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }", "out[0] = f(5);", "recursion"),
    (
        "int g(int n); inline int f(int n) { return n ? g(n - 1) : 0; } inline int g(int n) { return f(n); }",
        "out[0] = f(5);",
        "recursion",
    ),
    ("", "double x = out[0]; out[0] = x;", "double"),
    ("struct A { virtual float f() { return 1; } };", "A a; out[0] = a.f();", "virtual"),
    ("", "try { out[0] = 1; } catch (...) { }", "exceptions|try"),
    ("", "throw 1;", "exceptions|throw"),
    ("", "out[0] = *new float(1);", "new"),
    ("", "long long x = 1; out[0] = x;", "long long"),
    ("", "goto end; end: out[0] = 1;", "goto"),
    ("", 'asm(""); out[0] = 1;', "asm"),
    # OpenCL's keywords
    ("", "local float t[4]; t[0] = 1;", "local"),
    ("", "global float* p = (global float*)out; p[0] = 1;", "global"),
    ("", "float4 v = (float4)(1, 2, (3), 4); out[0] = v.x;", "float4"),
    ("#include <vector>", "out[0] = 1;", "vector"),
    ("#include <cmath>", "out[0] = 1;", "cmath"),
    ("", 'printf("%d", 1);', "printf"),
    ("float f(float x) { return x; }", "float (*p)(float) = f; out[0] = p(1);", "function"),
    ("", "std::min(1, 2);", "std"),
    ("", "static int counter = 0; out[0] = counter++;", "static|address space"),
    ("int counter = 0;", "out[0] = counter++;", "address space"),
    # conversions that are not implicit in Metal
    ("", "bfloat b = 1.0f; out[0] = b;", "bfloat"),
    ("", "half h = 1.0h; bfloat b = h; out[0] = b;", "bfloat"),
    ("", "float4 f = float4(1); int4 i = f; out[0] = i.x;", "int4|cannot"),
    # warnings are errors
    ("", "int x; out[0] = x;", "uninitialized"),
    ("", "out[0] == 1;", "unused"),
    ("", "if (thread_position_in_grid.x = 1) out[0] = 1;", "assign"),
    ("METAL_FUNC float f(float x) { if (x > 0) return 1; }", "out[0] = f(1);", "non-void"),
    # plain errors
    ("", "out[0] = undefined_name;", "undefined_name"),
    ("", "inp[0] = 1; out[0] = 1;", "read-only"),
    ("", "simdgroup_matrix<float, 8, 4> m; out[0] = 1;", "8x8"),
    ("", "out[0] = float4(1, 2, 3).x;", "too few or too many"),
]
QUICK = (
    "f", "address space", "recursion", "double", "new", "vector", "bfloat", "uninitialized", "undefined_name", "8x8",
)  # fmt: skip


@pytest.mark.parametrize("header, source, message", sweep(REFUSED, lambda header, source, message: message in QUICK))
def test_refused(header, source, message):
    assert "kernel:" in refused(source, {"inp": X}, header=header, match=message)


def test_small_inputs_are_checked_as_large_ones_and_the_reverse():
    """MLX passes arrays of fewer than 8 elements in constant memory, larger arrays in device memory."""
    header = "METAL_FUNC int at(const device int* p, uint i) { return p[i]; }"
    source = "out[thread_position_in_grid.x] = at(lengths, 0);"
    for size in (4, 64):
        refused(source, {"lengths": np.arange(size, dtype=np.int32)}, header=header, match="constant|__constant|at")
    header = "template <typename P> METAL_FUNC int at(P p, uint i) { return p[i]; }"
    for size in (4, 64):
        out = run(source, {"lengths": np.arange(3, 3 + size, dtype=np.int32)}, header=header)
        np.testing.assert_array_equal(out, np.full(32, 3))


def test_a_false_never_small_annotation_is_refused():
    source = """
    // metal_sim: never small: inp
    const device float2* p = (const device float2*)inp;
    out[thread_position_in_grid.x] = p[0].y;
    """
    np.testing.assert_array_equal(run(source, {"inp": X}), np.ones(32))
    refused(source, {"inp": X[:4]}, match="address space")


def test_errors_name_the_callers_lines():
    text = refused("int a = 1;\nout[0] = a;\nout[1] = nonsense;", {"inp": X})
    assert "kernel:source:3" in text
    text = refused("out[0] = f();", {"inp": X}, header="// one\nMETAL_FUNC float f() { return nonsense; }")
    assert "kernel:header:2" in text


def test_untraceable_kernels_fail_loudly():
    from tools.metal_sim import ToolchainError

    with pytest.raises(ToolchainError, match="while tracing"):
        run("out[0] = 1;", {"inp": X}, template=[("T", "not a type")])


def test_an_untried_mlx_is_refused(monkeypatch):
    import importlib.metadata

    from tools.metal_sim import ToolchainError
    from tools.metal_sim.source import mlx_version

    assert mlx_version() == importlib.metadata.version("mlx")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")
    with pytest.raises(ToolchainError, match=r"this is 99\.0"):
        mlx_version.__wrapped__()


def test_a_missing_clang_error_names_the_install_script(monkeypatch):
    from tools.metal_sim import ToolchainError, toolchain

    monkeypatch.setenv("METAL_SIM_CLANG", "/nowhere/clang++")
    with pytest.raises(ToolchainError, match=r"install_clang\.sh"):
        toolchain.clang.__wrapped__()
