"""Functions that damage a checkpoint's folder, and the error of loading it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metal_engine.checkpoints.loader import load
from metal_engine.errors import ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.support.checkpoint_files import CONFIG

Damage = Callable[[Path], object]
CPU = DeviceInfo(kind="cpu", name="test", compute="test", memory_bytes=1 << 30)


def write(name: str, content: str | bytes) -> Damage:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def configure(**entries: Any) -> Damage:
    return write("config.json", json.dumps({**CONFIG, **entries}))


def refused(model: Path | str, device: DeviceInfo = CPU, **args: Any) -> str:
    """Return the error of loading a model, which has one short line."""
    with pytest.raises(ModelLoadError) as caught:
        load(EngineArgs(model=str(model), **args), device)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message
