"""Kernels as PTX: compiled by clang, checked against an assembler's rules, and assembled if ptxas is available.

No GPU is needed: operations across lanes (tools/metal_sim/cuda) also run in the simulator.
"""

from __future__ import annotations

import ctypes
import platform
import re
import sys

import mlx.core as mx
import numpy as np
import pytest

from tests.tools.metal_sim import test_simd
from tests.tools.metal_sim.test_simd import X
from tools.metal_sim import ptx
from tools.metal_sim.cases import SMALL_CASES, Case
from tools.metal_sim.errors import CheckError
from tools.metal_sim.kernel import SimulatedKernel
from tools.metal_sim.nvidia import CudaKernel
from tools.metal_sim.ptx import assemble, ptx_of
from tools.metal_sim.shapes import Attention, Convolution, GatedDelta, Mamba2
from tools.metal_sim.source import translation_unit
from tools.metal_sim.trace import generated_source
from tools.metal_sim.variants import Recorder, Variant


class AsCuda(SimulatedKernel):
    """Kernel that the simulator runs with the headers for CUDA."""

    def _unit_of(self, request):
        unit, name, buffers = super()._unit_of(request)
        return f"#define METAL_SIM_CUDA 1\n{unit}", name, buffers


class AsCudaUnchecked(AsCuda):
    """Kernel that uses names of the CUDA headers, which the check pass rejects."""

    def _unit_of(self, request):
        text, name, arguments = generated_source(request)
        unit, signature = translation_unit(text, name, arguments)
        return f"#define METAL_SIM_CUDA 1\n{unit}", name, signature.buffers


def run(source: str, inputs: dict, outputs: dict, grid=(32, 1, 1), threadgroup=(32, 1, 1), factory=AsCuda):
    kernel = factory(name="kernel", input_names=list(inputs), output_names=list(outputs), source=source)
    return kernel(
        inputs=[mx.array(a) for a in inputs.values()],
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=grid,
        threadgroup=threadgroup,
    )


# --- what lanes do together, in the simulator ----------------------------------------------------------------------


def test_operations_across_lanes():
    """One kernel runs all operations with known results from the simulator's tests."""
    (of_floats,) = (mark.args[1] for mark in test_simd.test_float_operation.pytestmark)
    (of_integers,) = (mark.args[1] for mark in test_simd.test_integer_operation.pytestmark)
    bits = (np.arange(32, dtype=np.uint32) * 2654435761) | 8
    lines = [f"out[{32 * i} + lane] = {text};" for i, (text, _) in enumerate(of_floats)]
    lines += [f"{{ uint x = bits[lane]; ints[{32 * i} + lane] = {text}; }}" for i, (text, _) in enumerate(of_integers)]
    source = "uint lane = thread_index_in_simdgroup; float x = inp[lane];" + "\n".join(lines)
    outputs = {"out": ((len(of_floats), 32), mx.float32), "ints": ((len(of_integers), 32), mx.uint32)}
    out, ints = run(source, {"inp": X, "bits": bits}, outputs)
    for row, (text, expected) in zip(np.array(out), of_floats, strict=True):
        np.testing.assert_allclose(row, expected, rtol=5e-6, err_msg=text)
    for row, (text, expected) in zip(np.array(ints), of_integers, strict=True):
        np.testing.assert_array_equal(row, np.full(32, int(expected(bits)) & 0xFFFFFFFF, np.uint32), err_msg=text)


def test_product_of_matrices_has_the_simulators_bits():
    source = """
    // metal_sim: never small: A, B, C
    simdgroup_matrix<float, 8, 8> a, b, c;
    simdgroup_load(a, A);
    simdgroup_load(b, B);
    simdgroup_load(c, C);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, out);
    """
    a, b, c = (np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32) for i in range(3))
    outputs = {"out": ((8, 8), mx.float32)}
    got, simulated = (
        np.array(run(source, {"A": a, "B": b, "C": c}, outputs, factory=factory)[0])
        for factory in (AsCuda, SimulatedKernel)
    )
    np.testing.assert_array_equal(got, simulated)
    np.testing.assert_allclose(got, a @ b + c, rtol=1e-5, atol=1e-6)


def test_functions_that_gpus_lack():
    x = np.concatenate([np.linspace(-20, 20, 1001), [-1e-6, 0.0, 0.2499, 0.2501, -90, 88, np.nan]]).astype(np.float32)
    source = """
    uint i = thread_position_in_grid.x;
    e[i] = precise::exp(inp[i]);
    t[i] = precise::tanh(inp[i]);
    """
    outputs = {"e": (x.shape, mx.float32), "t": (x.shape, mx.float32)}
    e, t = run(source, {"inp": x}, outputs, grid=(len(x), 1, 1))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(np.array(e), np.exp(wide), rtol=4e-7, atol=1e-37)
    np.testing.assert_allclose(np.array(t), np.tanh(wide), rtol=6e-7)


def test_ids_of_threads_are_metals():
    """The grid ends within a threadgroup in every direction."""
    names = ["thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid"]
    names += ["threads_per_threadgroup", "threadgroups_per_grid", "threads_per_grid"]
    names += ["dispatch_threads_per_threadgroup"]
    scalars = ["thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup"]
    scalars += ["simdgroups_per_threadgroup", "thread_index_in_quadgroup", "quadgroup_index_in_threadgroup"]
    scalars += ["threads_per_simdgroup", "dispatch_simdgroups_per_threadgroup"]
    rows = dict(zip([*names, *scalars], [0, 1, 2, 3, 11, 12, 13, 4, 5, 6, 7, 8, 9, 14, 15], strict=True))
    checks = [f"ids[{3 * rows[n] + i}] == uint({n}[{i}])" for n in names for i in range(3)]
    checks += [f"ids[{3 * rows[n]}] == uint({n})" for n in scalars]
    source = f"""
    const uint3 grid = threads_per_grid;
    ms_place at;
    for (int i = 0; i < 3; ++i) {{
      at.thread_[i] = thread_position_in_threadgroup[i];
      at.block[i] = threadgroup_position_in_grid[i];
      at.size[i] = dispatch_threads_per_threadgroup[i];
    }}
    uint ids[54];
    bool right = ms_ids(ids, at, grid.x, grid.y, grid.z);
    right = right && {" && ".join(checks)};
    at.thread_[1] = threads_per_threadgroup[1];  // CUDA has such a thread where the grid ends within the threadgroup
    right = right && !ms_ids(ids, at, grid.x, grid.y, grid.z);
    out[(thread_position_in_grid.z * grid.y + thread_position_in_grid.y) * grid.x + thread_position_in_grid.x] = right;
    """
    kernel = AsCudaUnchecked(name="kernel", input_names=["unused"], output_names=["out"], source=source)
    (out,) = kernel(
        inputs=[mx.zeros(8)], output_shapes=[(7, 5, 70)], output_dtypes=[mx.int32], grid=(70, 5, 7),
        threadgroup=(16, 2, 3),
    )  # fmt: skip
    assert np.array(out).all()


# One of each kernel.
SOME = (
    "mixed step",
    "GatedDeltaStep, mlx.core.float16",
    "SSMStep, mlx.core.bfloat16",
    "ConvolutionStep, mlx.core.float32",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.name.startswith(SOME) else [pytest.mark.full]) for c in SMALL_CASES],
)
def test_kernels_give_right_results_with_the_cuda_headers(case: Case) -> None:
    assert case.error(AsCuda) <= case.allowed


# --- PTX -----------------------------------------------------------------------------------------------------------

LAYERS = {
    "paged_attention": Attention(8, 2, 64, 64, window=True, softcap=True, sinks=True),
    "merge_splits": Attention(8, 2, 64, 64, sinks=True),
    "gated_delta": GatedDelta(2, 4, 64, 64),
    "ssm_update": Mamba2(4, 2, 64, 64),
    "short_convolution": Convolution(4, bias=True),
}


def variant_of(kernel: str, dtype: mx.Dtype) -> Variant:
    recorder = Recorder()
    recorder.record(LAYERS[kernel], {"model"}, dtype)
    return next(v for v in recorder.variants.values() if v.kernel == kernel)


def verify(text: str, num_buffers: int) -> None:
    """Check an assembler's basic rules: one entry with its parameters, no external symbols, declared labels and
    registers.
    """
    assert re.search(r"^\.version 7\.\d\n\.target sm_80\n\.address_size 64$", text, re.M)
    assert ".extern" not in text
    assert ".const" not in text  # all buffers are in global memory, including buffers in Metal's constant memory
    ((name, parameters),) = re.findall(r"^\.visible \.entry (\w+)\((.*?)\)", text, re.M | re.S)
    assert name == ptx.ENTRY
    assert re.findall(r"\.param \.(\w+)", parameters) == ["u64"] * num_buffers + ["u32"] * 3
    bodies = re.findall(r"^\{$(.*?)^\}$", text, re.M | re.S)
    assert bodies and text.count("{") == text.count("}")
    for body in bodies:
        declared = {kind: int(count) for kind, count in re.findall(r"\.reg \.\w+\s+%(\w+)<(\d+)>;", body)}
        for kind, number in re.findall(r"%(p|rs|r|rd|f|fd|h|hh)(\d+)\b", body):
            assert int(number) < declared[kind], f"%{kind}{number} is not declared"
        labels = set(re.findall(r"^(\$?\w+):", body, re.M))
        assert set(re.findall(r"\bbra(?:\.uni)?\s+(\$?\w+);", body)) <= labels


@pytest.mark.parametrize("kernel", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.full),
                                   pytest.param("float32", marks=pytest.mark.full)])  # fmt: skip
def test_every_kernel_becomes_ptx_that_assembles(kernel: str, dtype: str) -> None:
    variant = variant_of(kernel, getattr(mx, dtype))
    made = ptx_of(variant.text, variant.function, list(variant.template.values()))
    verify(made.text, len(made.buffers))
    sizes = [int(n) for n in re.findall(r"\.shared .*\[(\d+)\];", made.text)]
    shared = sum(sizes)
    if kernel == "paged_attention":
        assert 0 < shared <= 32 << 10
        assert "bar.sync" in made.text and "ex2.approx" in made.text
    if kernel in ("paged_attention", "gated_delta", "ssm_update"):
        assert "shfl.sync.idx" in made.text
    if ptx.ptxas():
        assembled = assemble(made.text, variant.name)
        # The assembler aligns each variable, to 16 bytes at most.
        assert shared <= assembled.shared < shared + 16 * max(1, len(sizes)) and assembled.registers >= 8


@pytest.mark.parametrize("kv_cache_dtype", ["int4", pytest.param("int8", marks=pytest.mark.full)])
def test_the_kernel_over_quantized_keys_becomes_ptx(kv_cache_dtype: str) -> None:
    recorder = Recorder()
    recorder.record_quantized(Attention(8, 2, 96, 64, sinks=True), {"model"}, mx.bfloat16, kv_cache_dtype)
    (variant,) = (v for v in recorder.variants.values() if v.kernel == "paged_attention_quantized")
    made = ptx_of(variant.text, variant.function, list(variant.template.values()))
    verify(made.text, len(made.buffers))
    assert "shfl.sync.idx" in made.text
    if ptx.ptxas():
        assert assemble(made.text, variant.name).registers >= 8


@pytest.mark.full
@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="its package is for such only")
def test_an_assembler_is_at_hand() -> None:
    assert ptx.ptxas()


def test_broken_ptx_is_rejected() -> None:
    variant = variant_of("short_convolution", mx.float16)
    made = ptx_of(variant.text, variant.function, list(variant.template.values()))
    for old, new in [
        (r"%r1\b", "%r99999"),
        (r"bra(\.uni)? \t?\$", "bra $not_"),
        (r"\.param \.u32", ".param .u64"),
        (r"^\.visible", ".extern"),
    ]:
        broken = re.sub(old, new, made.text, count=1, flags=re.M)
        assert broken != made.text
        with pytest.raises((AssertionError, ValueError)):
            verify(broken, len(made.buffers))
        if ptx.ptxas() and "param" not in old:
            with pytest.raises(CheckError, match="ptxas refuses"):
                assemble(broken, "broken")


def test_a_function_that_no_gpu_has_is_named() -> None:
    recorder = Recorder()
    kernel = recorder(name="k", input_names=["x"], output_names=["y"], source="y[0] = precise::acosh(x[0]);")
    kernel(
        inputs=[mx.zeros(8)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32]
    )
    (variant,) = recorder.variants.values()
    with pytest.raises(CheckError, match="acosh"):
        ptx_of(variant.text, variant.function, [])


# --- a launch ------------------------------------------------------------------------------------------------------


class RecordingDevice:
    """Fake GPU that doubles its first buffer into its last, and records its calls."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.loaded: list[str] = []
        self.launches: list[tuple] = []

    def load(self, text: str) -> str:
        self.loaded.append(text)
        return f"kernel {len(self.loaded)}"

    def upload(self, array: np.ndarray) -> int:
        address = 4096 * (len(self.memory) + len(self.launches) * 100 + 1)
        self.memory[address] = array.copy()
        return address

    def download(self, address: int, array: np.ndarray) -> None:
        array[...] = self.memory[address]

    def free(self, address: int) -> None:
        del self.memory[address]

    def launch(self, kernel: str, blocks: list[int], threads: tuple[int, ...], arguments: list) -> None:
        addresses = [a.value for a in arguments if isinstance(a, ctypes.c_uint64)]
        sizes = [a.value for a in arguments if isinstance(a, ctypes.c_uint32)]
        assert arguments[len(addresses) :] and len(sizes) == 3
        self.launches.append((kernel, tuple(blocks), threads, sizes))
        first, last = self.memory[addresses[0]], self.memory[addresses[-1]]
        assert np.isnan(last).all()  # outputs start without valid contents
        last[:] = 2 * first


def test_a_launch_passes_buffers_in_order_and_the_grid() -> None:
    device = RecordingDevice()
    kernel = CudaKernel(device, name="k", input_names=["x"], output_names=["y"], source="y[0] = 2 * x[0];")
    x = mx.arange(40).astype(mx.float32)
    options = {"output_shapes": [(40,)], "output_dtypes": [mx.float32], "threadgroup": (32, 1, 1)}
    for _ in range(2):
        (y,) = kernel(inputs=[x], grid=(40, 3, 1), **options)
        assert mx.array_equal(y, 2 * x)
    assert device.launches == [("kernel 1", (2, 3, 1), (32, 1, 1), [40, 3, 1])] * 2
    assert len(device.loaded) == 1 and f".entry {ptx.ENTRY}(" in device.loaded[0]
    assert not device.memory
    with pytest.raises(CheckError, match="no SIMD groups"):
        kernel(inputs=[x], grid=(40, 4, 1), **{**options, "threadgroup": (32, 2, 1)})
