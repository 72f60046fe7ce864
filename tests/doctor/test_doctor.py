"""Tests `metal-engine doctor`: facts for a bug report, and a result."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from metal_engine.device.blas.load import BlasInfo
from metal_engine.device.private_folder import NotPrivateError
from metal_engine.doctor import examine as doctor
from metal_engine.doctor import tiny
from metal_engine.doctor.examine import FAILED, OK, Finding, examine
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.loading.build import build_engine
from metal_engine.settings.args import EngineArgs
from tests.support.checkpoint_files import write_checkpoint


def findings(model: str | None = None) -> tuple[bool, dict[str, Finding]]:
    found: list[Finding] = []
    healthy = examine(found.append, None if model is None else [model])
    return healthy, {finding.label: finding for finding in found}


@pytest.fixture(autouse=True)
def no_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path))


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_ENGINE_API_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    healthy, found = findings()
    assert healthy
    assert found["tiny model"].status == OK and "equal mlx-lm's own" in found["tiny model"].text
    # 32 numbers take 128 bytes in float32. In int4, they take 24 bytes: 4 bits each, and 8 bytes of scale and bias.
    assert found["quantized KV"].status == OK and "int4 at 19% of" in found["quantized KV"].text
    assert {"system", "python", "metal-engine", "mlx", "mlx-lm", "device", "metal", "memory", "cache"} <= found.keys()
    assert "not downloaded" in found["demo model"].text
    assert not any("hidden" in finding.text for finding in found.values())


def test_a_broken_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    healthy, found = findings()
    assert not healthy and found["cache"].status == FAILED


def test_no_finding_names_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NotPrivateError(f"{tmp_path}/kernels is writable for others")

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("metal_engine.device.kernel_folder.use_private_kernel_folder", fail)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    blas = BlasInfo(name="x", optimized=False, problem=f"{tmp_path}/lib is missing")
    monkeypatch.setattr("metal_engine.device.blas.load.load_optimized_blas", lambda: blas)
    _, found = findings()
    assert found["compiled kernels"].text == "none: ~/kernels is writable for others"
    assert found["blas problem"].text == "~/lib is missing"
    assert not any(str(tmp_path) in finding.text for finding in found.values())


def test_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_greedy", lambda *_: [0])
    healthy, found = findings()
    assert not healthy
    assert found["tiny model"].status == FAILED and "but mlx-lm generates [[0]" in found["tiny model"].text


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("mlx", "no-such-package"))
    healthy, found = findings()
    assert not healthy and str(found["no-such-package"]).endswith("FAIL: not installed")


def test_a_model_that_cannot_be_loaded() -> None:
    healthy, found = findings("./no/such/model")
    assert not healthy and "neither a directory nor a .gguf file" in found["model"].text


def test_doctor_reports_attention_tuning_except_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The report has a line for attention tuning, except on a CPU."""
    folder = write_checkpoint(tmp_path / "model")
    assert "attention tuning" not in findings(str(folder))[1]

    def with_tuning(args: EngineArgs) -> BuiltEngine:
        engine = build_engine(args)
        core = engine.core
        layers = replace(core.config.attention_layers, tuning="16 threadgroups a core for head_dim 64")
        core.config = replace(core.config, attention_layers=layers)
        return engine

    monkeypatch.setattr("metal_engine.loading.build.build_engine", with_tuning)
    monkeypatch.setattr(doctor, "_tiny_model", lambda: iter(()))
    monkeypatch.setattr(doctor, "_quantized_kv", lambda: iter(()))
    healthy, found = findings(str(folder))
    assert healthy and found["attention tuning"].text == "16 threadgroups a core for head_dim 64"
