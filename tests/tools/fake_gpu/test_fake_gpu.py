"""The fake GPU itself: its timeline, its counts of copies and command buffers, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tools.fake_gpu.conftest import OnDevice
from tools.fake_gpu import FakeGpuError, build, device
from tools.fake_gpu import __main__ as command


def test_fake_gpu_runs_kernels_sequentially(on_device: OnDevice) -> None:
    counts = on_device("timeline")
    assert counts["kernels"] == 10 and counts["views"] == 0
    assert counts["busy_ns"] == 10_000_000
    assert counts["commits"] == 3  # buffers of 4, 4 and 2 kernels


def test_kernel_time_depends_on_bytes_read_and_written(on_device: OnDevice) -> None:
    """Writing or gathering a row of an array costs 4 KiB read and 4 KiB written, whatever the array's size."""
    whole, written, picked = on_device("per_byte")["us"]
    assert whole == 2 * 1024
    assert 8 <= written <= 9 and 8 <= picked <= 9  # includes the index


def test_writes_to_shared_arrays_make_copies(on_device: OnDevice) -> None:
    assert on_device("donation")["copies"] == [0, 1, 1]


def test_command_buffers_are_limited_by_kernels(on_device: OnDevice) -> None:
    fewer, more = (
        on_device("decode", **options)["commits_per_step"] for options in ({"ahead": False}, {"max_ops": 12})
    )
    assert 1.5 < more / fewer <= 2.3  # half of the usual 24


def test_a_large_pool_makes_many_command_buffers(on_device: OnDevice) -> None:
    """An array of keys has 4 M elements here. With MLX's limit of 40 M, five layers make a command buffer."""
    few, many = (on_device("decode", max_ops=4000, max_mb=mb)["commits_per_step"] for mb in (4096, 4))
    assert few <= 2 and many >= 40


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
def test_decoding_copies_no_array_of_the_pool(on_device: OnDevice, ahead: bool) -> None:
    counts = on_device("decode", ahead=ahead)
    assert counts["pool_copies"] == 0 and counts["peak_arrays"] < 1
    assert 14 <= counts["commits_per_step"] <= 20


def test_a_reference_to_the_old_pool_is_seen(on_device: OnDevice) -> None:
    counts = on_device("decode", hold=True)
    assert counts["pool_copies"] >= counts["num_arrays"] and counts["peak_arrays"] > 1


@pytest.mark.parametrize("hybrid", [False, pytest.param(True, marks=pytest.mark.full)], ids=["attention", "hybrid"])
def test_host_time_report_includes_mlx_lm(on_device: OnDevice, hybrid: bool) -> None:
    found = on_device("host", hybrid=hybrid)
    assert found["status"] == 0
    assert "100% of the replayed engine's steps were" in found["told"][0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found["told"] if line.startswith("| ")]
    times = {name: float(median.replace(",", "")) for name, median, *_ in rows[2:]}
    names = {"built", "replayed", "replayed, with a draft head", "mlx-lm's BatchGenerator"}
    assert times.keys() == names and min(times.values()) > 0
    ratios = {name: (float(over_built), float(over_theirs)) for name, *_, over_built, over_theirs in rows[2:]}
    assert ratios["built"][0] == ratios["mlx-lm's BatchGenerator"][1] == 1
    assert ratios["replayed"][0] == pytest.approx(times["replayed"] / times["built"], abs=0.01)


def test_an_untested_mlx_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("refused anyway")
    monkeypatch.setattr(device, "TRIED", ("0.1.0",))
    with pytest.raises(FakeGpuError, match=r"was tried with MLX 0\.1\.0, but mlx "):
        device._find_mlx()


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.platform, "machine", lambda: "aarch64")
    with pytest.raises(FakeGpuError, match="for Linux on x86-64"):
        device._find_mlx()


def test_installing_the_fake_gpu_after_importing_mlx_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    with pytest.raises(FakeGpuError, match=r"mlx\.core has been imported"):
        device.install()


def test_a_missing_compiler_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(FakeGpuError, match="apt-get install g"):
        build.compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(FakeGpuError, match="CXX names no-such-compiler"):
        build.compiler()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FakeGpuError, match=r"does not compile:\n(.|\n)*mlx/allocator\.h"):
        build.build(tmp_path, "0.32.4")
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(("arguments", "status"), [(["report", "--help"], 0), (["host"], 2)])
def test_help_needs_no_fake_gpu(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise FakeGpuError("the fake GPU is for Linux")

    monkeypatch.setattr(command, "install", refuse)
    monkeypatch.setattr(sys, "argv", ["fake_gpu", *arguments])
    with pytest.raises(SystemExit) as end:
        sys.exit(command.main())
    assert end.value.code == status
    shown = capsys.readouterr()
    assert ("--gpu-ms" in shown.out) == (status == 0) and ("for Linux" in shown.err) == (status == 2)
