"""The engine's kernels fit into the registers of M1 and M2, and carry no undefined value through a loop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.tools.metal_sim.register_bounds import MARGIN, bound_of
from tests.tools.metal_sim.some_variants import some_variants
from tools.metal_sim.agx.listing import Compiled
from tools.metal_sim.agx.measure import Row, job_of, measure, uses_tensor_ops
from tools.metal_sim.agx.packages import packages
from tools.metal_sim.errors import ToolchainError
from tools.metal_sim.shapes import layers_by_model
from tools.metal_sim.undef import undef_in
from tools.metal_sim.variants import DTYPES, Variant, record_variants

KERNELS = (
    "paged_attention", "paged_attention_quantized", "paged_attention_tensor", "paged_attention_tensor_quantized",
    "paged_attention_selected", "paged_attention_selected_quantized", "index_scores", "index_select",
    "selected_latents", "merge_splits", "gated_delta", "ssm_update", "short_convolution",
)  # fmt: skip
PROCESSES = 2


@pytest.fixture(scope="module")
def some() -> list[Variant]:
    return some_variants()


@pytest.fixture(scope="module")
def published() -> list[Variant]:
    """Every variant that published checkpoints need."""
    return list(record_variants(layers_by_model(), DTYPES).variants.values())


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skip the test if Mesa's compiler cannot be fetched."""
    try:
        packages()
    except ToolchainError as error:
        pytest.skip(str(error))


def beyond_bounds(row: Row) -> list[str]:
    """Return a line for each figure of the row that exceeds its bound."""
    if row.error:
        return [f"{row.description}: {row.error}"]
    found = []
    bound = bound_of(row.description)
    for generation, made in row.made.items():
        figures = {
            "spills in loops": (made.loop_stores + made.loop_fills, bound.loop_spills, MARGIN),
            "stores outside loops": (made.stores - made.loop_stores, bound.outside, MARGIN),
            "bytes of the largest loop": (made.loop_size, bound.loop_size, 0),
        }
        for what, (figure, allowed, margin) in figures.items():
            if allowed is not None and figure > allowed + margin:
                found.append(f"{row.description}, G{generation}: {figure} {what}, allowed {allowed}")
        if (threadgroups := made.threads // row.threads) < bound.threadgroups:
            found.append(f"{row.description}, G{generation}: {threadgroups} threadgroups, wanted {bound.threadgroups}")
    return found


def check_bounds(rows: Sequence[Row]) -> None:
    assert rows
    beyond = [line for row in rows for line in beyond_bounds(row)]
    assert not beyond, "\n".join(beyond)


def check_undef(variants: Sequence[Variant]) -> None:
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = dict(zip((v.name for v in variants), pool.map(undef_in, variants), strict=True))
    carried = [f"{name} carries {variables}" for name, variables in found.items() if variables]
    assert not carried, "\n".join(carried)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_loop_carries_an_undefined_value(kernel: str, some: list[Variant]) -> None:
    variants = [v for v in some if v.kernel == kernel]
    assert variants
    check_undef(variants)


@pytest.fixture(scope="module")
def rows(some: list[Variant], compiler: None) -> list[Row]:
    """Figures for M1. `make test-full` also tests M2, which has had the same figures so far."""
    return measure([job_of(v) for v in some if not uses_tensor_ops(v)], PROCESSES, [13])


@pytest.mark.parametrize("kernel", [name for name in KERNELS if "tensor" not in name])
def test_kernels_fit_into_registers(kernel: str, rows: list[Row]) -> None:
    check_bounds([row for row in rows if row.kernel == kernel])


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_loop_of_any_kernel_carries_an_undefined_value(kernel: str, published: list[Variant]) -> None:
    check_undef([v for v in published if v.kernel == kernel])


@pytest.mark.full
@pytest.mark.parametrize(
    "kernel, dtype",
    [
        (kernel, dtype)
        for kernel in KERNELS
        for dtype in ("float16_t", "bfloat16_t", "float")
        if "tensor" not in kernel
        and (dtype != "float" or ("quantized" not in kernel and kernel != "selected_latents"))  # not in float32
    ],
)
def test_every_kernel_fits_into_registers(kernel: str, dtype: str, published: list[Variant], compiler: None) -> None:
    variants = [v for v in published if v.kernel == kernel and v.template.get("T", dtype) == dtype]
    check_bounds(measure([job_of(v) for v in variants], PROCESSES, [13, 14]))


def test_kernels_beyond_a_bound_are_reported() -> None:
    row = Row("paged_attention", "float16", "128, group 4", {}, (256, 1, 1))
    fits = Compiled(104, 512, 2000, 14_000, 16, 16, 0, 0, 18_000, ())
    row.made = {13: fits}
    assert not beyond_bounds(row)
    changes = {"loop_stores": 3, "loop_fills": 2, "stores": 16 + MARGIN + 4}, {"threads": 128}
    for change, told in zip(changes, (["5 spills in loops", "stores outside"], ["0 threadgroups"]), strict=True):
        row.made = {13: fits, 14: replace(fits, **change)}
        found = beyond_bounds(row)
        assert len(found) == len(told)
        assert all("G14" in line and what in line for line, what in zip(found, told, strict=True))
    row.error = "Mesa refuses it"
    assert beyond_bounds(row) == ["paged_attention float16 128, group 4: Mesa refuses it"]
    # float32 may spill.
    row = Row("paged_attention", "float32", "128, group 4", {}, (256, 1, 1), made={13: replace(fits, loop_fills=900)})
    assert not beyond_bounds(row)
