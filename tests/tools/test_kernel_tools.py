"""The mutants of the kernel, and the committed table of bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_engine.attention.portable.backend import PortableBackend
from tests.support.sweeps import sweep
from tools.benchmarks import attention
from tools.metal_sim.__main__ import TABLE, main
from tools.metal_sim.errors import CheckError
from tools.metal_sim.index_report import INDEX_SHAPES, IndexLine
from tools.metal_sim.kernel_mutants import MUTANTS, caught
from tools.metal_sim.report import SHAPES, Line, table

ROOT = Path(__file__).resolve().parents[2]
# One of each kind: barrier, causal edge, window, address, softmax, shuffle, merge.
SAMPLE = [
    next(i for i, m in enumerate(MUTANTS) if m.new == new)
    for new in (
        "simdgroup_barrier(mem_flags::mem_threadgroup);", ": position)", "position - window)", "k_rows, key_slots",
        "ushort(16)", "sum",
    )
]  # fmt: skip
PREFILL = [s for s in SHAPES if s.name.startswith("prefill")]


def is_small(shape: Any) -> bool:
    """Return True for shapes whose simulation takes less than a second."""
    return not any(part in shape.name for part in ("64 requests", "beside a chunk", "head_dim 512", "of 192", "latent"))


def test_there_are_enough_mutants():
    assert len(set(MUTANTS)) == len(MUTANTS)
    assert sum(not m.equivalent for m in MUTANTS) >= 150


def test_the_kernel_itself_passes():
    assert caught(None) is None


@pytest.mark.parametrize("i", SAMPLE, ids=lambda i: MUTANTS[i].name)
def test_sample_of_mutants(i: int) -> None:
    assert caught(MUTANTS[i])


@pytest.mark.mutants
@pytest.mark.parametrize("i", range(len(MUTANTS)), ids=lambda i: MUTANTS[i].name)
def test_every_mutant(i: int) -> None:
    assert bool(caught(MUTANTS[i])) != bool(MUTANTS[i].equivalent)


@pytest.mark.parametrize("shape", sweep([s for s in SHAPES if s not in PREFILL], is_small), ids=lambda s: s.name)
def test_decode_bytes_are_within_bounds_and_as_committed(shape) -> None:
    line = Line.of(shape)
    assert line.ratio <= shape.allowed
    assert "| " + " | ".join(line.cells()) + " |" in TABLE.read_text()


@pytest.mark.parametrize("shape", [s for s in INDEX_SHAPES if s.num_keys <= 4096], ids=lambda s: s.name)
def test_bytes_of_selected_keys_are_within_bounds_and_as_committed(shape) -> None:
    line = IndexLine.of(shape)
    assert line.ratio <= shape.allowed
    assert "| " + " | ".join(line.cells()) + " |" in TABLE.read_text()


@pytest.mark.full
def test_the_committed_table_equals_the_report_output() -> None:
    text, lines = table()
    assert all(line.ratio <= line.shape.allowed for line in lines)
    assert text == TABLE.read_text()


def test_benchmark_of_times_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The part for Macs, with MLX's operations instead of the kernel."""
    monkeypatch.setattr("metal_engine.attention.metal.backend.MetalBackend", PortableBackend)
    monkeypatch.setattr(attention, "copy_bandwidth", lambda: 1e11)
    attention.on_metal(tuple(replace(shape, requests=1) for shape in attention.SMOKE))
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if "x" in line]
    assert [len(cells) for cells in table] == [7, 7]
    assert all(float(cell) > 0 for cell in table[0][2:6]) and not table[1][5].strip()


def test_benchmark_prints_a_table() -> None:
    command = [sys.executable, "-m", "tools.benchmarks.attention", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "decode" in done.stdout and "prefill" in done.stdout


@pytest.mark.parametrize(
    ("command", "function"),
    [("undef", "variants.record_variants"), ("cuda", "nvidia.driver"), ("time", "times.kernels.compile_kernels")],
)
def test_a_kernel_that_breaks_a_rule_is_a_message(
    command: str, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise CheckError("a rule is broken")

    monkeypatch.setattr(f"tools.metal_sim.{function}", refuse)
    monkeypatch.setattr("sys.argv", ["metal_sim", command])
    assert main() == 1 and capsys.readouterr().err == "a rule is broken\n"
