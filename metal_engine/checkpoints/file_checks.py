"""Checks the files of a checkpoint before anything reads them, since they may come from an untrusted source.

Reading a file takes time and memory in proportion to its size. Therefore only regular files of limited size are
accepted, and only JSON whose nesting is not too deep for the code that walks it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from metal_engine.errors import ModelLoadError, one_line

# Size limit of a header, an index or a vocabulary, as in the `safetensors` library. Published files have up to 35 MB.
MAX_HEADER_BYTES = 100_000_000
# Size limit of a settings file. A file of empty lists takes 60 times its size in memory.
MAX_SETTINGS_BYTES = 16_000_000
# Published files are nested 6 levels deep. `copy.deepcopy` and similar functions take several Python frames per level.
MAX_JSON_DEPTH = 64

# Files that `transformers` and mlx-lm open by themselves.
_READ_BY_LIBRARIES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "tekken.json", "chat_template.jinja", "chat_template.json",
    "config.json", "generation_config.json", "hf_quant_config.json", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip


def check_readable(path: Path, limit: int | None = None) -> None:
    """Refuse a path whose reading could block or never end, and a file larger than ``limit`` bytes.

    Links are followed, because the hub's cache consists of links.

    Raises:
        ModelLoadError: the path is not a regular file, cannot be opened, or is too large.
    """
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path} is not a regular file: download it again")
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    if limit is not None and size > limit:
        raise ModelLoadError(f"{path} has {size} bytes, more than the limit of {limit} for such a file")


def visible_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder that match a pattern, sorted by path. Hidden files are left out.

    On file systems without extended attributes, macOS stores them in files such as ``._model.safetensors``.
    """
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def check_small_files(folder: Path) -> None:
    """Check the files of a checkpoint that libraries read completely.

    Raises:
        ModelLoadError: a file is not a regular file, cannot be opened, or is too large.
    """
    for path in (*(folder / name for name in _READ_BY_LIBRARIES), *folder.glob("*.tiktoken")):
        if path.exists():
            check_readable(path, MAX_HEADER_BYTES)


def read_json(path: Path, limit: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        ModelLoadError: the file cannot be read, exceeds ``limit`` bytes, is nested too deeply, or is not an object.
    """
    check_readable(path, limit)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        too_deep = _deeper_than(value, MAX_JSON_DEPTH)
    except RecursionError:
        too_deep = True
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({one_line(error)}): download it again") from error
    if too_deep:
        raise ModelLoadError(f"{path} is nested more than {MAX_JSON_DEPTH} deep: not a model's configuration")
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object: download it again")
    return value


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        inner = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in inner if isinstance(child, dict | list)]
    return bool(level)
