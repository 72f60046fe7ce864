"""Short texts by which machines tell whether they have the same files of a model, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from metal_engine.checkpoints.checkpoint import weight_files

# Of a file of weights: its beginning, which has the header, and pieces spread evenly over the rest, its end among them.
_HEAD_BYTES = 1 << 20
_NUM_PIECES, _PIECE_BYTES = 512, 1 << 10


def file_prints(path: Path) -> dict[str, str]:
    """Digests of what is computed: of config.json, and of each file of weights its size and a sample, by name.

    Args:
        path: a model's directory, or a GGUF file, which may have another name elsewhere.

    Raises:
        ModelLoadError: the directory has no weights; OSError: a file cannot be read.
    """
    if path.is_file():
        return {"the GGUF file": _sample(path)}
    config = path / "config.json"
    prints = {config.name: hashlib.sha256(config.read_bytes()).hexdigest()} if config.is_file() else {}
    return prints | {file.name: _sample(file) for file in weight_files(path)}


def _sample(path: Path) -> str:
    """A digest of a file's size, of its first MiB, and of up to 512 KiB of the rest."""
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
