"""What the files of a checkpoint may be before anything reads them: anyone may have written them.

Work and memory follow the bytes of a file, and those are bounded: regular files only, of limited size, and JSON that is
nested no deeper than what walks it can follow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from metal_engine.errors import ModelLoadError, one_line

# Of a header, an index or a vocabulary; the `safetensors` library's own limit. Published ones take 35 MB at most.
MAX_HEADER_BYTES = 100_000_000
# Of a file of settings, which becomes some 60 times as much in memory where it is made of empty lists.
MAX_SETTINGS_BYTES = 16_000_000
# Published ones are nested 6 deep. `copy.deepcopy` and the like take several Python frames for a level.
MAX_JSON_DEPTH = 64

# What `transformers` and mlx-lm open by themselves.
_READ_BY_LIBRARIES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "tekken.json", "chat_template.jinja", "chat_template.json",
    "config.json", "generation_config.json", "hf_quant_config.json", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip


def check_readable(path: Path, limit: int | None = None) -> None:
    """Refuses what would block or never end when it is read, and what is larger than ``limit`` bytes.

    Links are followed: the hub's cache is made of them.

    Raises:
        ModelLoadError: it is no regular file, cannot be opened, or is too large.
    """
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path} is no regular file: fetch it anew")
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    if limit is not None and size > limit:
        raise ModelLoadError(f"{path} has {size} bytes, more than such a file may have ({limit})")


def check_small_files(folder: Path) -> None:
    """Checks the files of a checkpoint that libraries read whole.

    Raises:
        ModelLoadError: one is no regular file, cannot be opened, or is too large.
    """
    for path in (*(folder / name for name in _READ_BY_LIBRARIES), *folder.glob("*.tiktoken")):
        if path.exists():
            check_readable(path, MAX_HEADER_BYTES)


def read_json(path: Path, limit: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        ModelLoadError: it cannot be read, is larger than ``limit`` bytes, too deeply nested, or something else.
    """
    check_readable(path, limit)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        too_deep = _deeper_than(value, MAX_JSON_DEPTH)
    except RecursionError:
        too_deep = True
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({one_line(error)}): fetch it anew") from error
    if too_deep:
        raise ModelLoadError(f"{path} is nested more than {MAX_JSON_DEPTH} deep: no configuration of a model")
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object: fetch it anew")
    return value


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        inner = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in inner if isinstance(child, dict | list)]
    return bool(level)
