"""Mesa's compiler for Apple GPUs. Tests of the compiler itself are skipped if its packages cannot be fetched."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from tools.metal_sim import __main__ as command
from tools.metal_sim.agx import listing, measure, packages
from tools.metal_sim.agx.measure import Row, job_of, jobs_for, only_way, ways_of
from tools.metal_sim.agx.packages import Packages
from tools.metal_sim.errors import ToolchainError
from tools.metal_sim.variants import Recorder, Variant

# --- reading what the compiler prints --------------------------------------------------------------------------------

PRINTED = """\
CS shader: 9 instrs, 6 alu, 6 fscib, 0 ic, 84 code size, 41 gprs, 8 uniforms, 8 scratch, 448 threads, 2 loops, \
2:2 spills:fills, 1 preamble inst
shader: MESA_SHADER_COMPUTE
shared_size: 512
block0 {
   3 = device_load u2:u3, 6.abs, x, #0x0, slot 0
}
   0: b522000500c01200       stack_store r4, 0, i32, x, a
   8: 72011004               mov      r1, thread_in_grid_y
   c: 68000000               barrier
  10: b532000500c01200       stack_load r4, 0, i32, x, a
  18: b522000500c01200       stack_store r4, 4, i32, x, a
  20: 00c0f8ffffff           jmp_any  -8
  26: 20c034810000           jmp_none 330
  2c: 00c0e6ffffff           jmp_any  -32
  32: b532000500c01200       stack_load r4, 0, i32, x, a
  3a: 8800                   stop
   0: 0501000d00c03200       stack_load r0, 0, i32, x, a
   8: 8800                   stop
"""


def test_spills_are_counted_separately_for_loops() -> None:
    made = listing.read(PRINTED)
    assert (made.registers, made.threads, made.instructions, made.code_size) == (21, 448, 9, 84)
    assert (made.stores, made.fills, made.loop_stores, made.loop_fills) == (2, 2, 1, 1)
    assert made.threadgroup_memory == 512
    # The preamble's machine code follows. The parser leaves out the preamble.
    outer, inner = made.loops
    assert (outer.start, outer.size, outer.depth, outer.barriers, outer.instructions) == (0xC, 0x26, 0, 1, 6)
    assert (inner.start, inner.size, inner.depth, inner.stores, inner.fills) == (0x18, 0xE, 1, 1, 0)
    assert made.loop_size == 0x26


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("2:2 spills", "3:2 spills", "2:2 spills in the machine code, 3:2 in the statistics"),
        ("gprs", "registers", "cannot read"),
        ("jmp_any  -8", "jmp_any  -7", "middle of an instruction"),
    ],
)
def test_an_unexpected_listing_format_raises(old: str, new: str, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        listing.read(PRINTED.replace(old, new))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """An empty cache directory on Linux, and programs that all succeed without a word."""
    monkeypatch.setattr(packages, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(packages.platform, "system", lambda: "Linux")
    monkeypatch.setattr(packages.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(packages.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(packages, "KEYRING", tmp_path)
    packages.packages.cache_clear()
    yield monkeypatch
    packages.packages.cache_clear()


def answer(monkeypatch: pytest.MonkeyPatch, answers: dict[str, tuple[int, str]]) -> list[list[str]]:
    """Have programs answer by the first of ``answers`` that their command line holds. Returns the command lines."""
    seen: list[list[str]] = []

    def run(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        seen.append(arguments)
        code, text = next((a for word, a in answers.items() if word in arguments), (0, ""))
        return subprocess.CompletedProcess(arguments, code, text, text)

    monkeypatch.setattr(packages.subprocess, "run", run)
    return seen


MIRROR = {"indextargets": (0, "http://mirror.example/debian-security/\nhttp://mirror.example/debian/\n")}


def test_packages_come_from_this_machines_mirror_and_are_fetched_once(fresh: pytest.MonkeyPatch) -> None:
    sources: list[str] = []

    def extracted(arguments: list[str]) -> None:
        if "update" in arguments:
            folder = next(a for a in arguments if a.startswith("Dir::Etc::sourceparts=")).split("=")[1]
            sources.append((Path(folder) / "debian.sources").read_text())
        if "install" in arguments:
            archives = next(a for a in arguments if a.startswith("Dir::Cache::archives=")).split("=")[1]
            (Path(archives) / "mesa-opencl-icd_26.1.6-1_amd64.deb").touch()
        if arguments[0] == "dpkg-deb":
            Path(arguments[-1]).mkdir(exist_ok=True)

    seen = answer(fresh, MIRROR)
    run = packages.subprocess.run
    fresh.setattr(packages.subprocess, "run", lambda a, **options: (extracted(a), run(a, **options))[1])
    first = packages.packages()
    assert first.listing == "mesa-opencl-icd_26.1.6-1_amd64.deb\n"
    assert "URIs: http://mirror.example/debian\n" in sources[0]
    packages.packages.cache_clear()
    count = len(seen)
    assert packages.packages() == first and len(seen) == count


@pytest.mark.parametrize(
    "answers, message",
    [
        ({"indextargets": (0, "http://archive.example/ubuntu/\n")}, "no Debian mirror"),
        ({**MIRROR, "update": (100, "E: no such suite")}, "apt-get update failed: E: no such suite"),
        # apt-get update ends well without a server.
        ({**MIRROR, "update": (0, "W: Failed to fetch http://mirror.example")}, "apt-get update failed: W: Failed to"),
        ({**MIRROR, "download": (100, "E: not found")}, "apt-get download failed"),
    ],
)
def test_without_packages_the_error_says_why(
    answers: dict[str, tuple[int, str]], message: str, fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer(fresh, answers)
    with pytest.raises(ToolchainError, match=message):
        packages.packages()
    assert not list(tmp_path.iterdir())


def test_other_machines_have_no_packages(fresh: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fresh.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(ToolchainError, match="apt-get"):
        packages.packages()
    fresh.setattr(packages.platform, "system", lambda: "Darwin")
    options = {"pattern": [], "ways": False, "dtype": None, "generation": None, "processes": 1, "json": None}
    assert command.agx(argparse.Namespace(**options, write=False)) == 1
    assert "for Linux on x86_64" in capsys.readouterr().err
    assert command.agx(argparse.Namespace(**{**options, "pattern": ["x"]}, write=True)) == 2
    assert "--write takes every variant" in capsys.readouterr().err


def variant_of(source: str, name: str) -> Variant:
    """A kernel body as a variant, launched with 256 threads."""
    recorder = Recorder()
    kernel = recorder(name=name, input_names=["x"], output_names=["y"], source=source)
    kernel(
        inputs=[mx.zeros(1 << 16)], grid=(256, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(256,)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    (variant,) = recorder.variants.values()
    return variant


def accumulators(count: int) -> str:
    """A kernel body with so many values that live through a loop."""
    return f"""
    uint t = thread_position_in_threadgroup.x;
    float a[{count}];
    #pragma clang loop unroll(full)
    for (int i = 0; i < {count}; ++i) a[i] = x[i * 256 + t];
    for (uint k = 0; k < uint(x[t]); ++k) {{
      #pragma clang loop unroll(full)
      for (int i = 0; i < {count}; ++i) a[i] = a[i] * a[(i + 1) % {count}] + x[k];
    }}
    threadgroup float shared[256];
    float sum = 0;
    #pragma clang loop unroll(full)
    for (int i = 0; i < {count}; ++i) sum += a[i];
    shared[t] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = shared[255 - t];
    """


@pytest.fixture(scope="module")
def found() -> Packages:
    """The compiler's packages. Skip the test if the packages cannot be fetched."""
    try:
        return packages.packages()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def rows(found: Packages) -> dict[str, Row]:
    """Kernels with predictable figures, and MLX's kernels, by name."""
    bodies = {"few": accumulators(40), "many": accumulators(160), "refused": "y[0] = precise::acosh(x[0]);"}
    jobs = [*(job_of(variant_of(body, name)) for name, body in bodies.items()), *jobs_for([])]
    return {row.label if row.kernel == "MLX" else row.kernel: row for row in measure.measure(jobs)}


def test_kernels_that_exceed_the_registers_spill(rows: dict[str, Row]) -> None:
    for generation in (13, 14):
        few, many = rows["few"].made[generation], rows["many"].made[generation]
        assert 40 <= few.registers <= 90 and few.stores == few.fills == 0
        assert many.registers == 128 and many.threads == 384
        assert many.loop_stores >= 30 and many.loop_fills >= 30
        assert few.threadgroup_memory == many.threadgroup_memory == 1024
        assert len(few.loops) == 1 and 40 * 4 < few.loop_size < few.code_size < many.code_size


def test_a_kernel_refused_by_the_compiler_does_not_affect_other_kernels(rows: dict[str, Row]) -> None:
    assert "acosh" in (rows["refused"].error or "") and not rows["refused"].made
    assert [name for name, row in rows.items() if row.error] == ["refused"]


def test_kernels_of_mlx_fit(rows: dict[str, Row]) -> None:
    """MLX's kernels run well on Apple GPUs. A compiler that spills in these kernels' loops is too strict."""
    of_mlx = [row for row in rows.values() if row.kernel == "MLX"]
    assert len(of_mlx) >= 6
    for row in of_mlx:
        made = row.made[13]
        assert made.loop_stores == made.loop_fills == 0 and made.stores <= 16, row.label
        assert 20 <= made.registers <= 104, row.label
        assert made.threads >= row.threads


def test_attention_ways_are_compiled_separately(found: Packages) -> None:
    from tests.tools.metal_sim.some_variants import some_variants

    variant = next(v for v in some_variants() if v.kernel == "paged_attention" and v.template["STAGED_PARTS"] == "1")
    assert ways_of(variant) == ("direct", "staged")
    whole, *ways = measure.measure([job_of(variant, way) for way in (None, *ways_of(variant))], generations=[13])
    assert max(way.made[13].code_size for way in ways) < whole.made[13].code_size
    with pytest.raises(ToolchainError, match="change WAYS"):
        only_way(variant.text.replace("STAGED_PARTS > 0", "STAGED_PARTS != 0"), "direct")
