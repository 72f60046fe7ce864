"""Configurations that are read before MLX is loaded, and what is set for them."""

from __future__ import annotations

import json
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
    """No MLX loaded, nothing set; what is set goes away again."""
    monkeypatch.setattr(module.sys, "platform", "darwin")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    for name in (MAX_OPS, MAX_MB):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_folder_and_a_gguf_file(tmp_path: Path, demo_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", num_hidden_layers=7)
    assert known_config(EngineArgs(model=folder)) == {"model_type": "llama", "num_hidden_layers": 7}
    for model in (str(demo_path), "demo"):
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


@pytest.mark.parametrize("model", ["some/other", "./nowhere", "./nowhere.gguf"])
def test_what_is_not_here_is_not_known(model: str, tmp_path: Path) -> None:
    assert known_config(EngineArgs(model=model, download_dir=str(tmp_path))) is None


def test_a_broken_configuration_is_for_the_loader_to_tell(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert known_config(EngineArgs(model=str(tmp_path))) is None


@pytest.mark.usefixtures("on_a_mac")
def test_limits_are_set_for_the_smallest_model(tmp_path: Path) -> None:
    small, large = (checkpoint(tmp_path / str(n), num_hidden_layers=n) for n in (24, 80))
    limit_command_buffers([EngineArgs(model=large), EngineArgs(model=small), EngineArgs(model="./nowhere")])
    assert os.environ[MAX_OPS] == "23"  # 24 layers of 16 kernels in 16 command buffers
    assert int(os.environ[MAX_MB]) >= 50
    limit_command_buffers([EngineArgs(model=large)])
    assert os.environ[MAX_OPS] == "23"


@pytest.mark.usefixtures("on_a_mac")
def test_a_draft_model_counts(tmp_path: Path) -> None:
    small, large = (checkpoint(tmp_path / str(n), num_hidden_layers=n) for n in (24, 80))
    speculative = json.dumps({"method": "draft_model", "model": small, "num_speculative_tokens": 3})
    limit_command_buffers([EngineArgs(model=large, speculative_config=speculative)])
    assert os.environ[MAX_OPS] == "23"


@pytest.mark.usefixtures("on_a_mac")
def test_nothing_is_set_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "linux")
    limit_command_buffers([EngineArgs(model=checkpoint(tmp_path / "a", num_hidden_layers=7))])
    assert MAX_OPS not in os.environ and MAX_MB not in os.environ
