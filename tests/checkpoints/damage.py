"""Functions that damage a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.checkpoint_files import CONFIG

Damage = Callable[[Path], object]


def write(name: str, content: str | bytes) -> Damage:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def configure(**entries: Any) -> Damage:
    return write("config.json", json.dumps({**CONFIG, **entries}))
