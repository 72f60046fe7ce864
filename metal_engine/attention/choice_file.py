"""Measured choices for kinds of layers, and the file in the cache directory that stores them.

A file belongs to one GPU and one version of macOS, of MLX and of the kernels. The file name is a hash of these facts,
and the file contains them. A damaged file is ignored as a whole: the choices are measured again.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.metal.cuts import DEFAULT_CUT, Cut
from metal_engine.device.info import macos_version
from metal_engine.device.metal_kernels import kernel_text

logger = logging.getLogger(__name__)

# Errors while a damaged file is parsed.
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
_KERNELS = ("paged_attention", "attention_rows", "attention_products", "attention_quantized", "merge_splits")


@dataclass(frozen=True)
class TunedChoice:
    """A way to compute the attention of one kind of layer.

    Attributes:
        cut: the kernel's division of its work; None if MLX's operations compute the layers.
        speedup: time of the default divided by time of the choice.
    """

    cut: Cut | None = DEFAULT_CUT
    speedup: float = 1.0

    @property
    def is_default(self) -> bool:
        return self.cut == DEFAULT_CUT

    def __str__(self) -> str:
        what = "MLX's operations" if self.cut is None else str(self.cut)
        return f"{what} ({self.speedup:.2f} times as fast)"

    @property
    def fields(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return {"cut": None if self.cut is None else asdict(self.cut), "speedup": self.speedup}

    @classmethod
    def of(cls, fields: Any) -> TunedChoice:
        """Return the choice that :attr:`fields` describes. Raises ValueError for other fields."""
        if not isinstance(fields, dict) or fields.keys() != {"cut", "speedup"}:
            raise ValueError(f"a choice has a cut and a speedup, not {fields!r}")
        cut, speedup = fields["cut"], fields["speedup"]
        if not isinstance(speedup, float) or not (cut is None or isinstance(cut, dict)):
            raise ValueError(f"{fields!r} is not a choice")
        return cls(None if cut is None else Cut.of(cut), speedup)


def name_of(kind: AttentionKind, block_size: int) -> str:
    """Return a name for a kind of layer that is the same on all ranks and at every start."""
    return f"{kind!r}, blocks of {block_size}"


def describe_machine(num_cores: int | None) -> dict[str, str]:
    """Return the facts that measured times depend on: GPU, software versions, and a hash of the kernels."""
    gpu = mx.device_info(mx.gpu)
    return {
        "gpu": f"{gpu.get('device_name')}, {gpu.get('architecture')}, {num_cores} cores",
        "macos": macos_version(),
        "mlx": metadata.version("mlx"),
        "kernels": _kernels_version(),
    }


def _kernels_version() -> str:
    """Return a hash of the kernels' text and of the code that divides their work."""
    digest = sha256()
    for name in _KERNELS:
        digest.update(kernel_text(f"{name}.metal").encode())
    for path in sorted(Path(__file__).with_name("metal").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class TunedChoiceFile:
    """File with the choices for one machine.

    Args:
        folder: folder of such files, which is created if it does not exist.
        machine: facts about the machine on which the choices were measured.
    """

    def __init__(self, folder: Path, machine: Mapping[str, str]) -> None:
        self._machine = dict(machine)
        digest = sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:16]}.json"

    def read(self) -> dict[str, TunedChoice]:
        """Return name -> choice, with the names of :func:`name_of`. Empty if the file is missing or damaged.

        A damaged file is logged.
        """
        try:
            return self._load()
        except _UNUSABLE as error:
            logger.warning("choices of attention in %s are not used, and measured again: %s", self.path, error)
            return {}

    def add(self, choices: Mapping[str, TunedChoice]) -> dict[str, TunedChoice]:
        """Add choices to the file. Return the file's choices for the same kinds of layers.

        If the file already has a choice for a kind of layer, such as from another process, the file's choice is kept
        and returned. The file is replaced atomically. Write errors are logged.
        """
        kept: dict[str, TunedChoice] = {}
        with suppress(*_UNUSABLE):
            kept = self._load()
        everything = {**choices, **kept}
        self._write(everything)
        return {name: everything[name] for name in choices}

    def _load(self) -> dict[str, TunedChoice]:
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        if content["machine"] != self._machine:
            raise ValueError("it was measured on another machine")
        return {name: TunedChoice.of(fields) for name, fields in content["choices"].items()}

    def _write(self, choices: Mapping[str, TunedChoice]) -> None:
        content = {"machine": self._machine, "choices": {name: choice.fields for name, choice in choices.items()}}
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=self.path.parent)
            with open(descriptor, "w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("choices of attention are not stored, and will be measured at each start: %s", error)
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)
