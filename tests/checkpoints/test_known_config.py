"""Configurations that are read before MLX is loaded, and the settings made for them."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from metal_engine.checkpoints import known_config as module
from metal_engine.checkpoints.known_config import known_config, limit_command_buffers
from metal_engine.device.command_buffers import MAX_MB, MAX_OPS
from metal_engine.settings.args import EngineArgs


def checkpoint(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return str(folder)


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a Mac without MLX loaded and without settings. Settings are reset afterwards."""
    monkeypatch.setattr(module.sys, "platform", "darwin")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    for name in (MAX_OPS, MAX_MB):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_folder_and_a_gguf_file(tmp_path: Path, demo_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", num_hidden_layers=7)
    assert known_config(EngineArgs(model=folder)) == {"model_type": "llama", "num_hidden_layers": 7}
    (tmp_path / "M.GGUF").symlink_to(demo_path)
    for model in (str(demo_path), str(tmp_path / "M.GGUF"), "demo"):
        config = known_config(EngineArgs(model=model))
        assert config is not None and config["num_hidden_layers"] == 30


def test_a_repository_in_the_cache(tmp_path: Path) -> None:
    repo = tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    (repo / "snapshots").mkdir()
    checkpoint(repo / "snapshots" / "c0ffee", num_hidden_layers=9)
    args = EngineArgs(model="some/model", download_dir=str(tmp_path))
    assert known_config(args) == {"model_type": "llama", "num_hidden_layers": 9}


def test_a_repository_of_gguf_files_in_the_cache(tmp_path: Path, demo_path: Path) -> None:
    """An image encoder is not the model."""
    repo = tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    files = repo / "snapshots" / "c0ffee"
    (files / "Q4_1").mkdir(parents=True)
    (files / "Q4_1" / "model-Q4_1.gguf").symlink_to(demo_path)
    (files / "mmproj-model-f16.gguf").write_bytes(b"GGUF")
    config = known_config(EngineArgs(model="some/model", download_dir=str(tmp_path)))
    assert config is not None and config["num_hidden_layers"] == 30


@pytest.mark.parametrize("model", ["some/other", "./nowhere", "./nowhere.gguf"])
def test_config_of_a_model_that_is_not_local_is_unknown(model: str, tmp_path: Path) -> None:
    assert known_config(EngineArgs(model=model, download_dir=str(tmp_path))) is None


def test_a_broken_configuration_is_for_the_loader_to_tell(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert known_config(EngineArgs(model=str(tmp_path))) is None


@pytest.mark.usefixtures("on_a_mac")
def test_limits_are_set_for_the_smallest_model(tmp_path: Path) -> None:
    small, large = (checkpoint(tmp_path / str(n), num_hidden_layers=n) for n in (24, 80))
    limit_command_buffers(EngineArgs(model=model) for model in (large, small, "./nowhere"))
    assert os.environ[MAX_OPS] == "23"  # 24 layers of 16 kernels in 16 command buffers
    assert int(os.environ[MAX_MB]) >= 50
    limit_command_buffers([EngineArgs(model=large, async_scheduling=True)])
    assert os.environ[MAX_OPS] == "23"


@pytest.mark.usefixtures("on_a_mac")
def test_a_draft_model_does_not_count(tmp_path: Path) -> None:
    """The host waits for each of its forward passes."""
    small, large = (checkpoint(tmp_path / str(n), num_hidden_layers=n) for n in (2, 80))
    speculative = json.dumps({"method": "draft_model", "model": small, "num_speculative_tokens": 3})
    limit_command_buffers([EngineArgs(model=large, async_scheduling=True, speculative_config=speculative)])
    assert os.environ[MAX_OPS] == "79"


@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize(("sizes", "max_ops"), [((24, 80), None), ((60, 80), "59")])
def test_one_by_one_the_limit_of_operations_is_only_raised(
    sizes: tuple[int, ...], max_ops: str | None, tmp_path: Path
) -> None:
    models = [checkpoint(tmp_path / str(n), num_hidden_layers=n) for n in sizes]
    limit_command_buffers(EngineArgs(model=model, async_scheduling=False) for model in models)
    assert os.environ.get(MAX_OPS) == max_ops
    assert int(os.environ[MAX_MB]) >= 50


@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize("is_set", [False, True])
def test_a_later_load_logs_the_command_buffer_limits_in_force(
    is_set: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With several models, each load logs the limits, but only the first load comes before MLX is loaded."""
    args = EngineArgs(model=checkpoint(tmp_path / "a", num_hidden_layers=24), async_scheduling=True)
    if is_set:
        limit_command_buffers([args])
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    caplog.set_level(logging.INFO)
    caplog.clear()
    limit_command_buffers([args])
    assert (("up to 23 operations" in caplog.text), ("MLX's own limits" in caplog.text)) == (is_set, not is_set)


@pytest.mark.usefixtures("on_a_mac")
def test_command_buffer_limits_are_not_set_outside_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "linux")
    limit_command_buffers([EngineArgs(model=checkpoint(tmp_path / "a", num_hidden_layers=7))])
    assert MAX_OPS not in os.environ and MAX_MB not in os.environ
