"""Device facts: memory within the limits of control groups, and what MLX says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from metal_engine.device.blas.load import BlasInfo
from metal_engine.device.info import device_info, gpu_core_count, has_tensor_ops, macos_version
from metal_engine.device.memory import available_memory_bytes, limit_device_memory
from metal_engine.settings.config import MARGIN_BYTES
from tools.fixtures.fake_engine import fake_config

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
BLAS = BlasInfo(name="OpenBLAS", version="0.3 (Zen)", threads=1, optimized=True)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(cgroup: str | None) -> dict[str, str]:
    files = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {8 << 20} kB\n"}
    return files if cgroup is None else files | {"proc/self/cgroup": cgroup}


def v2(folder: str, limit: int | str, usage: int = 0, inactive_file: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{usage}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n",
    }


def v1(folder: str, limit: int, usage: int = 0, inactive_file: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": f"inactive_file 3\ntotal_inactive_file {inactive_file}\n",
    }


NO_V1_LIMIT = 9223372036854771712

CASES = {
    "no control groups": (machine(None), 8 * GIB),
    "no limit": (machine("0::/a/b\n") | v2("a/b", "max", 2 * GIB), 8 * GIB),
    "limit above what is left": (machine("0::/a\n") | v2("a", 20 * GIB, GIB), 8 * GIB),
    "limit": (machine("0::/a\n") | v2("a", 4 * GIB, GIB), 3 * GIB),
    "file pages count as free": (machine("0::/a\n") | v2("a", 4 * GIB, 3 * GIB, 2 * GIB), 3 * GIB),
    "limit of a parent": (machine("0::/a/b\n") | v2("a", 4 * GIB, 3 * GIB) | v2("a/b", "max", GIB), GIB),
    "container: the mount is its own group": (machine("0::/\n") | v2("", 2 * GIB), 2 * GIB),
    "container: path of outside": (machine("0::/docker/1f\n") | v2("", 2 * GIB), 2 * GIB),
    "used up": (machine("0::/a\n") | v2("a", 4 * GIB, 5 * GIB), 0),
    "v1": (machine("4:cpu:/x\n5:memory:/a\n0::/\n") | v1("a", 4 * GIB, 2 * GIB, GIB), 3 * GIB),
    "v1, no limit": (machine("5:hugetlb,memory:/a\n") | v1("a", NO_V1_LIMIT, GIB), 8 * GIB),
    "v1, limit of a parent": (machine("5:memory:/a/b\n") | v1("a", 2 * GIB) | v1("a/b", NO_V1_LIMIT), 2 * GIB),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    write(tmp_path, files)
    assert available_memory_bytes(tmp_path) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_available_memory_of_this_machine() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert 0 < available_memory_bytes() <= int(total.split()[1]) * 1024


def fake_mlx(monkeypatch: pytest.MonkeyPatch, metal: bool, default: str, facts: dict[str, object]) -> None:
    package, core = ModuleType("mlx"), ModuleType("mlx.core")
    core.__dict__.update(
        cpu="cpu",
        gpu="gpu",
        Device=lambda kind: ("device", kind),
        default_device=lambda: ("device", default),
        metal=SimpleNamespace(is_available=lambda: metal),
        device_info=lambda device: facts if device == default else {},
    )
    package.__dict__["core"] = core
    monkeypatch.setitem(sys.modules, "mlx", package)
    monkeypatch.setitem(sys.modules, "mlx.core", core)


def test_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, object] = {
        "device_name": "Apple M3 Max",
        "architecture": "applegpu_g15s",
        "memory_size": 64 * GIB,
        "max_recommended_working_set_size": 48 * GIB,
    }
    fake_mlx(monkeypatch, metal=True, default="gpu", facts=facts)
    info = device_info(BLAS)
    assert (info.kind, info.name, info.memory_bytes) == ("metal", "Apple M3 Max", 48 * GIB)
    assert info.compute == "Apple M3 Max (Metal)"


def test_the_cpu_chosen_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mlx(monkeypatch, metal=True, default="cpu", facts={"device_name": "Apple M3 Max"})
    info = device_info(BlasInfo(name="Accelerate", optimized=True))
    assert (info.kind, info.name, info.compute) == ("cpu", "Apple M3 Max", "Accelerate")


def test_this_device() -> None:
    """Runs in a separate process, so that the other tests of this folder do not load MLX."""
    code = """
import dataclasses, json
from metal_engine.device.blas.load import load_optimized_blas
blas = load_optimized_blas()
from metal_engine.device.info import device_info, gpu_core_count
import mlx.core as mx
print(json.dumps(dataclasses.asdict(device_info(blas)) | {"blas": blas.description, "mlx": mx.device_info()}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    info = json.loads(done.stdout)
    assert info["name"] == info["mlx"]["device_name"] and info["memory_bytes"] > 0
    if info["kind"] == "cpu":
        assert info["compute"] == info["blas"]
    else:
        assert info["memory_bytes"] == info["mlx"]["max_recommended_working_set_size"]


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("""echo '{"SPDisplaysDataType": [{"sppci_cores": "10", "sppci_model": "Apple M4"}]}'""", 10),
        ("""echo '{"SPDisplaysDataType": []}'""", None),
        ("echo '{'", None),
        ("exit 1", None),
        (None, None),
    ],
)
def test_gpu_core_count(
    script: str | None,
    count: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if script is not None:
        program = tmp_path / "system_profiler"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_core_count() == count
    assert ("GPU cores is unknown" in caplog.text) == (count is None)


@pytest.mark.parametrize(
    "architecture, macos, has",
    [
        ("applegpu_g17g", "26.2", True),
        ("applegpu_g17s", "26.10.1", True),
        ("applegpu_g18p", "27.0", True),
        ("applegpu_g17p", "26.2", False),  # GPU of a phone, without matrix units
        ("applegpu_g16s", "26.4", False),  # M4
        ("applegpu_g17g", "26.1", False),
        ("applegpu_g17g", "15.7.2", False),
        ("applegpu_g17g", "", False),
        ("applegpu_g17", "26.2", False),
        ("", "26.2", False),
        (None, "26.2", False),
    ],
)
def test_tensor_operations(architecture: str | None, macos: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    assert not has_tensor_ops() or mx.metal.is_available()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda _: {} if architecture is None else {"architecture": architecture})
    monkeypatch.setattr("platform.mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    assert has_tensor_ops() == has


@pytest.mark.parametrize(("reported", "version"), [("26.2", "26.2"), ("16.0", "26.3"), ("", "")])
def test_the_version_of_macos(reported: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS 26 tells a Python that was built for an older macOS that its version is 16."""
    monkeypatch.setattr("platform.mac_ver", lambda: (reported, ("", "", ""), "arm64"))
    sysctl = subprocess.CompletedProcess([], 0, stdout="26.3\n")
    monkeypatch.setattr("subprocess.run", lambda command, **_: sysctl)
    assert macos_version() == version


def test_no_more_is_wired_and_kept_than_the_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    limits: dict[str, int] = {}

    monkeypatch.setattr(mx, "set_wired_limit", lambda n: limits.__setitem__("wired", n))
    monkeypatch.setattr(mx, "set_cache_limit", lambda n: limits.__setitem__("cache", n))
    config = fake_config(num_blocks=1024, block_size=16)
    config = replace(
        config, step_bytes=GIB, model=replace(config.model, weight_bytes=4 * GIB, kv_bytes_per_token=1 << 17)
    )
    limit_device_memory(config)
    assert limits == {"cache": 64 << 20}, "a CPU has nothing to wire"
    limit_device_memory(replace(config, step_bytes=40 << 20))
    assert limits == {"cache": 40 << 20}
    limit_device_memory(replace(config, step_bytes=1))
    assert limits == {"cache": 32 << 20}
    limit_device_memory(replace(config, device=replace(config.device, kind="metal", memory_bytes=16 * GIB)))
    assert limits == {"wired": 7 * GIB + MARGIN_BYTES, "cache": GIB + MARGIN_BYTES}
    limit_device_memory(replace(config, device=replace(config.device, kind="metal", memory_bytes=6 * GIB)))
    assert limits["wired"] == 6 * GIB, "MLX refuses more than the recommended working set"
    limits.clear()
    limit_device_memory(
        replace(config, wire_memory=False, device=replace(config.device, kind="metal", memory_bytes=16 * GIB))
    )
    assert limits == {"cache": GIB + MARGIN_BYTES}, "--no-wire-memory leaves the wired limit of MLX unchanged"
