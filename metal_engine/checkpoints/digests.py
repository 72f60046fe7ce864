"""Digests of a model's files, so that ranks can compare their files without reading them completely."""

from __future__ import annotations

import hashlib
from pathlib import Path

from metal_engine.checkpoints.metadata import weight_files

# Sampled bytes of a weight file: the first MiB, where the header begins, and pieces spread evenly over the rest.
_HEAD_BYTES = 1 << 20
_NUM_PIECES, _PIECE_BYTES = 512, 1 << 10


def file_digests(path: Path) -> dict[str, str]:
    """Return SHA-256 digests of ``config.json`` and of each weight file, in hex digits by file name.

    The key for a GGUF file is always ``the GGUF file``. The digest of ``config.json`` covers the whole file. The digest
    of a weight file covers its size and a sample of its bytes.

    Args:
        path: directory of a model, or a GGUF file. The file may have another name on other machines.

    Raises:
        ModelLoadError: the directory has no weights.
        OSError: a file cannot be read.
    """
    if path.is_file():
        return {"the GGUF file": _sample(path)}
    config = path / "config.json"
    digests = {config.name: hashlib.sha256(config.read_bytes()).hexdigest()} if config.is_file() else {}
    return digests | {file.name: _sample(file) for file in weight_files(path)}


def _sample(path: Path) -> str:
    """Return a digest of a file's size, its first MiB, and up to 512 KiB of the rest."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(size - _PIECE_BYTES, 0)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        if size > _HEAD_BYTES:
            for piece in range(_NUM_PIECES):
                file.seek(_HEAD_BYTES + max(last - _HEAD_BYTES, 0) * piece // (_NUM_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
