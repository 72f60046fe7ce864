"""Every kernel family against float64, on a Mac's GPU and in the simulator."""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal_engine.doctor.sections.common import tolerance
from tools.metal_sim import metal_kernel
from tools.metal_sim.cases import CASES, SMALL_CASES, Case

# Other cases run in the simulator in tests/attention and tests/recurrence.
SIMULATED = ("int8", "GatedDeltaStep, mlx.core.float32")


@pytest.mark.metal
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_on_a_mac(case: Case) -> None:
    assert case.error(mx.fast.metal_kernel) <= tolerance(case.allowed)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in SIMULATED else [pytest.mark.full]) for c in SMALL_CASES]
)
def test_kernel_cases_are_accurate_in_the_simulator(case: Case) -> None:
    assert case.error(metal_kernel) <= case.allowed
