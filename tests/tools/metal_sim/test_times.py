"""The time model's arithmetic, checked by hand. Tests of compiled kernels need the compiler's packages."""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal_engine.attention.metal.variants import AttentionShape, variant_of
from tools.metal_sim.agx import packages
from tools.metal_sim.agx.listing import Instruction
from tools.metal_sim.errors import ToolchainError
from tools.metal_sim.times import kernels as compiled
from tools.metal_sim.times.attention import WORKLOADS, Workload, _blocks, mlx, ours
from tools.metal_sim.times.facts import CHIPS, LLAMA_8B, PUBLISHED, Chip
from tools.metal_sim.times.kernels import Kernel, cycles_of
from tools.metal_sim.times.model import Launch, Threadgroup, limit, limits, seconds
from tools.metal_sim.times.page import predicted

CHIP = Chip("toy", cores=2, bandwidth=1e9, clock=1e9)
# Figures like those of the compiled kernels.
KERNELS = {
    "direct": Kernel(8, 2, 8, 849, 1235),
    "staged": Kernel(8, 2, 32, 3578, 1129),
    "sdpa_vector": Kernel(32, 1, 1, 60, 218),
    "steel": Kernel(4, 4, 16, 1821, 685),
}


def test_each_resource_of_a_launch() -> None:
    launch = Launch([Threadgroup(8000, 3)] * 4, 8, 2, memory=870, last_level=1740, cache=640, threadgroup_memory=640)
    found = limits(launch, CHIP)
    assert found["memory"] == pytest.approx(2e-6)
    assert found["issue"] == pytest.approx(
        16000 / (4e9 * (1 / 1.60 + 1 / 1.02) / 2)
    )  # two groups on each core, both resident
    assert found["cache"] == pytest.approx(10e-9) and found["core"] == pytest.approx(10e-9)
    assert found["latency"] == pytest.approx(3 * 400e-9 + 1e-6)
    assert seconds(launch, CHIP) == max(found.values()) and limit([launch], CHIP) == "issue"
    # With registers for one group, a core runs its two groups sequentially.
    alone = limits(Launch([Threadgroup(8000, 3)] * 4, 8, 1), CHIP)
    assert alone["latency"] == pytest.approx(2 * found["latency"]) and alone["issue"] > found["issue"]


def test_idle_cores_read_nothing_and_the_slowest_group_sets_latency() -> None:
    found = limits(Launch([Threadgroup(8000, 9)], 8, 2, cache=640, threadgroup_memory=640), CHIP)
    assert found["cache"] == found["core"] == pytest.approx(20e-9)
    uneven = limits(Launch([Threadgroup(8000, 9), Threadgroup(800, 1)], 8, 2), CHIP)
    assert uneven["latency"] == found["latency"] == pytest.approx(9 * 400e-9 + 1e-6)


def instructions(**counts: int) -> list[Instruction]:
    return [Instruction(0, 8, name, "") for name, count in counts.items() for _ in range(count)]


def test_cycles_of_instructions() -> None:
    assert cycles_of(instructions(fadd=3, imadd=2, exp2=1, shuffle=2)) == 3 + 8 + 4 + 4
    # The stand-in for simd_sum counts as the instruction, whose other work stays.
    assert cycles_of(instructions(shuffle=21, iadd=70, ffma=9)) == pytest.approx(14.5 + 9)
    # Products of a loop over keys are not counted as simd_sum.
    assert cycles_of(instructions(shuffle=32, ffma=64)) == 64 + 64


@pytest.mark.parametrize(
    "kind, group, keys, blocks",
    [("g", 4, 4096, 64), ("g", 1, 4096, 32), ("s", 4, 16384, 64), ("s", 8, 16384, 256), ("d", 4, 16384, 128),
     ("d", 8, 16384, 512), ("d", 1, 16384, 256), ("s", 8, 100_000, 1024)],
)  # fmt: skip
def test_splits_of_mlx(kind: str, group: int, keys: int, blocks: int) -> None:
    assert _blocks(kind, group, keys) == blocks


def test_launches_read_k_and_v_from_memory_once() -> None:
    chip = CHIPS[0]
    for work in WORKLOADS:
        kv = work.requests * work.keys * 8 * 128 * 4
        for launches in (ours(work, LLAMA_8B, chip, KERNELS), mlx(work, LLAMA_8B, chip, KERNELS)):
            assert kv < launches[0].memory < kv * 1.1 + work.query * work.requests * 32 * 128 * 4
        if work.query == 1:
            assert ours(work, LLAMA_8B, chip, KERNELS)[0].cache == kv
            assert mlx(work, LLAMA_8B, chip, KERNELS)[0].cache == 4 * kv  # once for each query head


def test_prefill_attention_counts_only_causal_products() -> None:
    work = Workload("", 1, 2048, 2048)
    (launch,) = ours(work, LLAMA_8B, CHIPS[0], KERNELS)
    assert len(launch.groups) == 2048 // 16 * 8
    (other,) = mlx(work, LLAMA_8B, CHIPS[0], KERNELS)
    assert len(other.groups) == 2048 // 32 * 32
    # Each of a tile's fragments of 8 rows reads the staged keys, and the tile writes them once.
    assert launch.threadgroup_memory == launch.cache * 9 and other.threadgroup_memory == other.cache * 5
    assert sum(g.loops for g in launch.groups) / len(launch.groups) == pytest.approx(1024 / 32, rel=0.03)
    assert sum(g.loops for g in other.groups) / len(other.groups) == pytest.approx(1024 / 16, rel=0.03)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: f"{p.chip.name}-{p.model.name}-{p.tokens}")
def test_published_speeds_are_near(published: object) -> None:
    speed, share = predicted(published, KERNELS)  # type: ignore[arg-type]
    assert 0.8 < speed / published.speed < 1.25  # type: ignore[attr-defined]
    assert 0 < share < 0.25


@pytest.mark.full
def test_compiled_kernels() -> None:
    try:
        packages.packages()
    except ToolchainError as error:
        pytest.skip(str(error))
    found = compiled.compile_kernels()
    assert found.keys() == KERNELS.keys()
    assert (found["steel"].keys, found["sdpa_vector"].keys) == (16, 1)
    variant = variant_of(AttentionShape(mx.float16, 128, 128, 32, 8, 16))
    assert found["direct"].keys == 8 * variant.held
    assert found["staged"].keys % 8 == variant.bk % found["staged"].keys == 0
    for kernel in found.values():
        # A product takes 18 cycles, and a key has 4 products for each of its 8 rows.
        products = 4 if kernel.keys > 1 else 0
        assert products * 18 * kernel.keys < kernel.cycles < (products * 18 + 140) * kernel.keys
        assert kernel.resident >= 1 and kernel.outside > 0
