"""Checks a checkpoint directory before it is loaded: is it complete, is it whole, how much memory will it take.

Loading reads gigabytes and fails late, with messages about tensors. These checks read the small JSON files and
the headers of the weight files.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from metal_engine.errors import ModelLoadError, one_line
from metal_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_ELEMENT_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16}
_ELEMENT_BITS |= {"I16": 16, "U16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_INTEGERS = ("I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "BOOL")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file: its name, safetensors type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _ELEMENT_BITS.get(self.dtype, 8) // 8


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        ModelLoadError: it cannot be read, or is something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}): fetch it anew") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object: fetch it anew")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises:
        ModelLoadError: the folder is no checkpoint, or the file is broken.
    """
    path = folder / "config.json"
    if not path.is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; name the file itself: {ggufs[0]}" if ggufs else ""
        raise ModelLoadError(f"{folder} has no config.json: not a model directory{hint}")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path} names no model_type: not the configuration of a model")
    return config


def weight_files(folder: Path) -> list[Path]:
    """Returns the files with the weights, after checking that none is missing.

    Raises:
        ModelLoadError: there are none, or some that the index lists are missing.
    """
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{index} has no weight_map: fetch it anew")
        listed = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder} is half-downloaded: {len(missing)} of {len(listed)} weight files are missing, "
                f"{missing[0]} first; fetch the rest"
            )
    if not files:
        others = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern)]
        hint = f" (there is {others[0]}, which cannot be read from a directory)" if others else ""
        raise ModelLoadError(f"{folder} has no weights: no model*.safetensors{hint}")
    return files


def stored_tensors(files: list[Path]) -> Iterator[StoredTensor]:
    """Lists every tensor in some safetensors files, from their headers.

    Raises:
        ModelLoadError: a file is cut short or is something else.
    """
    for path in files:
        with path.open("rb") as start:
            if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelLoadError(f"{path} is only a Git LFS pointer: run `git lfs pull` in {path.parent}")
        try:
            with safe_open(path, "np") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
                tensors = [StoredTensor(n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()]
        except SafetensorError as error:
            raise ModelLoadError(
                f"{path} is cut short or no safetensors file ({one_line(error)}): if it was only half-downloaded, "
                "fetch it anew"
            ) from error
        yield from tensors


def weight_bytes(tensors: Iterator[StoredTensor], config: dict[str, Any], float_bytes: int | None) -> int:
    """Returns how many bytes of memory a checkpoint's weights will take.

    Args:
        tensors: as stored.
        config: the checkpoint's configuration, for the bits of quantized weights.
        float_bytes: bytes of an element after everything is dequantized and converted; None if nothing is.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    if float_bytes is None:
        return sum(tensor.nbytes for tensor in stored.values())
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    total = 0
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and f"{module}.scales" in stored:
            own = quantization.get(module)
            bits = (own if isinstance(own, dict) else quantization).get("bits", 4)
            total += tensor.size * 32 // bits * float_bytes
        elif kind in ("scales", "biases") and f"{module}.scales" in stored:
            continue  # gone once dequantized
        else:
            total += tensor.nbytes if tensor.dtype in _INTEGERS else tensor.size * float_bytes
    return total


# --- generation_config.json ---

# Sampling parameters that a checkpoint may recommend, for requests that give none; the same as in vLLM.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def eos_token_ids(*configs: dict[str, Any]) -> frozenset[int]:
    """Returns all token ids that end generation, from all places where a checkpoint may list them."""
    found: set[int] = set()
    for config in configs:
        for place in (config, config.get("text_config")):
            eos = place.get("eos_token_id") if isinstance(place, dict) else None
            found.update(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
    return frozenset(found)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """``generation_config.json`` of a folder; empty if there is none.

    Raises:
        ModelLoadError: it is broken.
    """
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def default_sampling(generation_config: dict[str, Any]) -> dict[str, float]:
    """The sampling parameters that a checkpoint recommends, under the names of a request."""
    found: dict[str, float] = {}
    for name in _SAMPLING:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except (TypeError, ValueError) as error:
            logger.warning("generation_config.json: %s is ignored: %s", name, error)
        else:
            found[name] = value
    return found
