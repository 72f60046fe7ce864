"""Stand-in for mpp::tensor_ops: products, layouts that kernels must query, and refused uses."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.tools.metal_sim.helpers import run
from tools.metal_sim.errors import CheckError, MetalSimError

A = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float16)
B = np.random.default_rng(2).standard_normal((16, 32)).astype(np.float16)
OUT = {"out": ((16, 32), mx.float32)}
INCLUDE = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
DESCRIPTOR = "16, 32, 16, false, TRANSPOSED, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate"
SOURCE = """
// metal_sim: never small: A, B
constexpr auto shape = mpp::tensor_ops::matmul2d_descriptor(DESCRIPTOR);
mpp::tensor_ops::matmul2d<shape, metal::execution_simdgroup> product;
auto a = product.template get_left_input_cooperative_tensor<half, half, float>();
auto b = product.template get_right_input_cooperative_tensor<half, half, float>();
auto c = product.template get_destination_cooperative_tensor<
    metal::remove_addrspace_t<decltype(a)>, metal::remove_addrspace_t<decltype(b)>, float>();
for (ushort i = 0; i < a.get_capacity(); ++i) {
  const auto at = a.get_multidimensional_index(i);
  a[i] = A[at[1] * 16 + at[0]];
}
for (ushort i = 0; i < b.get_capacity(); ++i) {
  const auto at = b.get_multidimensional_index(i);
  b[i] = B[at[1] * (TRANSPOSED ? 16 : 32) + at[0]];
}
for (ushort i = 0; i < c.get_capacity(); ++i) {
  c[i] = 1.0f;
}
product.run(a, b, c);
for (ushort i = 0; i < c.get_capacity(); ++i) {
  const auto at = c.get_multidimensional_index(i);
  out[at[1] * 32 + at[0]] = c[i];
}
"""


def product(
    source: str = SOURCE,
    descriptor: str = DESCRIPTOR,
    layout: int = 0,
    transposed: bool = False,
    header: str = "",
    **options,
):
    return run(
        source.replace("DESCRIPTOR", descriptor).replace("TRANSPOSED", str(transposed).lower()),
        {"A": A, "B": B.T.copy() if transposed else B},
        OUT,
        header=f"#define METAL_SIM_TENSOR_LAYOUT {layout}\n{INCLUDE}{header}",
        **options,
    )


@pytest.mark.parametrize(
    "layout, transposed",
    [*[(0, True), (1, False)], *(pytest.param(layout, bool(layout), marks=pytest.mark.full) for layout in (0, 1))],
)
def test_products(layout: int, transposed: bool) -> None:
    """All elements are read and written. Otherwise the numbers would differ."""
    expected = A.astype(np.float64) @ B + 1
    np.testing.assert_allclose(product(layout=layout, transposed=transposed), expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_assumes_the_m5_layout_fails_with_another_layout() -> None:
    """MLX's kernels assume the layout of M5 (steel/attn/nax.h)."""
    known = """
      const int lane = thread_index_in_simdgroup;
      const int2 at = int2(((lane >> 2 & 2) + lane % 2) * 4 + i % 4, (lane >> 2 & 4) + lane / 2 % 4 + i / 4 * 8);
    """
    source = SOURCE.replace("const auto at = a.get_multidimensional_index(i);", known)
    assert source != SOURCE
    np.testing.assert_allclose(product(source), A.astype(np.float64) @ B + 1, rtol=1e-5, atol=1e-5)
    assert np.abs(product(source, layout=1) - (A.astype(np.float64) @ B + 1)).max() > 1


def test_unset_tensor_elements_are_nan() -> None:
    assert np.isnan(product(SOURCE.replace("a[i] = A[at[1] * 16 + at[0]];", ""))).all()


def test_without_accumulation_sums_start_at_zero() -> None:
    out = product(descriptor="16, 32, 16")
    np.testing.assert_allclose(out, A.astype(np.float64) @ B, rtol=1e-5, atol=1e-5)


def test_all_lanes_take_part() -> None:
    halves = SOURCE.replace("product.run(a, b, c);", "if (thread_index_in_simdgroup < 16) product.run(a, b, c);")
    with pytest.raises(MetalSimError, match="matmul2d"):
        product(halves)
    with pytest.raises(MetalSimError, match="SIMD group of 8 threads"):
        product(grid=(8, 1, 1), threadgroup=(8, 1, 1))


@pytest.mark.parametrize(
    "old, new",
    [
        (DESCRIPTOR, "8, 32, 16"),
        (DESCRIPTOR, "16, 32"),
        (DESCRIPTOR, "16, 32, 16, true"),
        ("execution_simdgroup>", "execution_simdgroups<4>>"),
        (
            "get_left_input_cooperative_tensor<half, half, float>",
            "get_left_input_cooperative_tensor<float, half, float>",
        ),
        ("decltype(a)", "decltype(b)"),
        ("product.run(a, b, c)", "product.run(b, a, c)"),
    ],
)
def test_unsupported_tensor_operations_do_not_compile(old: str, new: str) -> None:
    source = SOURCE.replace("DESCRIPTOR", DESCRIPTOR)
    assert old in source
    with pytest.raises(CheckError):
        product(source.replace(old, new))


def test_lines_keep_their_numbers_after_an_include() -> None:
    with pytest.raises(CheckError, match="kernel:header:4"):
        product(header="\nint f() { return missing; }\n")
