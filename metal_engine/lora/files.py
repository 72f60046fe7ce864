"""Reads LoRA adapters in PEFT's format (``adapter_model.safetensors``) and mlx-lm's (``adapters.safetensors``).

Both formats have an ``adapter_config.json``. Does not import MLX: adapters are read in threads while the engine serves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metal_engine.checkpoints.file_checks import read_json
from metal_engine.checkpoints.metadata import StoredTensor, is_vision_tensor, stored_tensors
from metal_engine.errors import AdapterError, ModelLoadError, one_line, short
from metal_engine.lora_adapter import LARGEST_FLOAT32, AdapterTargets

CONFIG = "adapter_config.json"
PEFT_WEIGHTS, MLX_LM_WEIGHTS = "adapter_model.safetensors", "adapters.safetensors"
_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_MLX_LM_NAME = re.compile(r"(.+)\.lora_([ab])")
_LAYER = re.compile(r"[^.]+\.[0-9]+\.")
# PEFT options that can change what an adapter computes -> values without an effect. Other values are refused.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "modules_to_save": ([],),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),  # the adapter would start in the middle of a prompt
    # Other initializations subtract the initial product from the model's weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
_MAX_RANK = 4096
# Maximum size in bytes of a configuration, and of the header of a file with weights. Both are parsed while the engine
# serves requests. Adapters of large models have a tenth of this size.
_MAX_JSON_BYTES = 2 << 20


@dataclass(frozen=True)
class _Product:
    """The two tensors of a LoRA product for one layer, and the offsets of their bytes in the file."""

    first: StoredTensor
    first_offset: int
    second: StoredTensor
    second_offset: int


@dataclass(frozen=True)
class AdapterFile:
    """A LoRA adapter that fits a model. Weights are read on demand.

    Attributes:
        path: file with the weights.
        rank: LoRA rank.
        scale: factor by which the adapter's products ``x @ a @ b`` are multiplied.
    """

    path: Path
    rank: int
    scale: float
    _products: dict[str, _Product]
    _is_transposed: bool
    _interleaved: Mapping[str, int]
    _largest: float

    @property
    def modules(self) -> list[str]:
        """Names of the model's linear layers that the adapter adds to, in alphabetical order."""
        return sorted(self._products)

    def weights(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        """Read a layer's weights, a [inputs, rank] and b [rank, outputs], as new float32 arrays.

        The adapter adds ``x @ a @ b`` to the layer's output for the input x. The scale is included in b.

        Args:
            module: one of :attr:`modules`.

        Raises:
            AdapterError: the file cannot be read or was truncated since it was opened, or a weight is NaN or exceeds
                the range of the model's type.
        """
        product = self._products[module]
        try:
            with self.path.open("rb") as file:
                a = _read(file, product.first, product.first_offset)
                b = _read(file, product.second, product.second_offset)
        except OSError as error:
            raise AdapterError(f"cannot read {self.path}: {error.strerror}") from error
        if self._is_transposed:
            a, b = a.T, b.T
        if (num_heads := self._interleaved.get(module)) is not None:
            b = b.reshape(self.rank, num_heads, 2, -1).swapaxes(2, 3).reshape(b.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # weights out of range are refused below
            b = b * np.float32(self.scale)
        self._check_range(product.first, a, "")
        self._check_range(product.second, b, f", with the scale {self.scale:g},")
        return np.ascontiguousarray(a), np.ascontiguousarray(b)

    def _check_range(self, tensor: StoredTensor, array: np.ndarray, scaled: str) -> None:
        """Raise AdapterError if a weight is infinite or NaN, or would be infinite in the model's type.

        Args:
            tensor: source of ``array``, named in the error message.
            scaled: description of how ``array`` was scaled, for the error message; empty without scaling.
        """
        if not max(array.max(), -array.min()) <= self._largest:
            problem = f"has weights that{scaled} are not numbers or exceed the model's type ({self._largest:g})"
            raise AdapterError(f"{self.path}: {tensor.name} {problem}")


def _read(file: Any, tensor: StoredTensor, offset: int) -> np.ndarray:
    file.seek(offset)
    data = file.read(tensor.nbytes)
    if len(data) != tensor.nbytes:
        raise AdapterError(f"{file.name} was truncated while it was read")
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(tensor.shape)
    return np.frombuffer(data, "<f2" if tensor.dtype == "F16" else "<f4").astype(np.float32).reshape(tensor.shape)


def check_adapter_folder(folder: Path, within: Path | None = None) -> None:
    """Check that an adapter's folder and its ``adapter_config.json`` exist.

    Args:
        folder: folder of the adapter.
        within: directory that must contain the files after links are followed. None allows any directory.

    Raises:
        AdapterError: the folder or the configuration is missing, or is outside ``within``.
        OSError, RuntimeError, ValueError: the path is inaccessible or invalid, or has a loop of links.
    """
    if not _inside(folder, within).is_dir():
        raise AdapterError(f"{folder} is not a directory; an adapter must be a directory with {CONFIG}")
    if not _inside(folder / CONFIG, within).is_file():
        raise AdapterError(f"{folder} has no {CONFIG}: not an adapter")


def open_adapter(folder: Path, targets: AdapterTargets, within: Path | None = None) -> AdapterFile:
    """Open an adapter and check it against a model, by its configuration and the header of its weights.

    Args:
        folder: folder of the adapter.
        targets: linear layers of the model that adapters may add to.
        within: directory that must contain the files after links are followed. None allows any directory.

    Raises:
        AdapterError: the adapter cannot be read, is of an unsupported kind, or does not fit the model.
    """
    try:
        return _open(folder, targets, within)
    except ModelLoadError as error:  # errors of the checkpoint readers
        raise AdapterError(str(error)) from error
    except (OSError, ValueError, RuntimeError) as error:  # an invalid or inaccessible path, or a loop of links
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"cannot read {short(str(folder), 200)}: {one_line(error)}") from error


def _open(folder: Path, targets: AdapterTargets, within: Path | None) -> AdapterFile:
    check_adapter_folder(folder, within)
    config = read_json(folder / CONFIG, _MAX_JSON_BYTES)
    is_peft = "peft_type" in config
    if not is_peft and not isinstance(config.get("lora_parameters"), dict):
        raise AdapterError(f"{folder / CONFIG} has neither PEFT's peft_type nor mlx-lm's lora_parameters")
    path = _inside(folder / (PEFT_WEIGHTS if is_peft else MLX_LM_WEIGHTS), within)
    if not path.is_file():
        raise AdapterError(f"{folder} has no {path.name}; weights in other formats are not supported")
    rank, scale = _peft_scale(config, folder) if is_peft else _mlx_lm_scale(config, folder)
    offsets = _offsets(path)
    tensors = [(tensor, offsets[tensor.name]) for tensor in stored_tensors([path])]
    products = _products(tensors, _PEFT_NAME if is_peft else _MLX_LM_NAME, targets, path)
    for module, product in products.items():
        _check_product(module, product, rank, targets.shapes[module], path, is_transposed=is_peft)
    return AdapterFile(path, rank, scale, products, is_peft, targets.interleaved, targets.largest)


def _inside(path: Path, within: Path | None) -> Path:
    if within is not None and not path.resolve().is_relative_to(within.resolve()):
        raise AdapterError(f"{path} is outside {within}")
    return path


# --- configurations ---


def _rank(given: Any, name: str, folder: Path) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= _MAX_RANK:
        raise AdapterError(f"{folder / CONFIG}: {name} is {short(given)}, which is not a rank")
    return given


def _number(given: Any, name: str, folder: Path) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool) or given != given or math.inf in (given, -given):
        raise AdapterError(f"{folder / CONFIG}: {name} is {short(given)}, which is not a number")
    if abs(given) > LARGEST_FLOAT32:  # integers in JSON have no limit
        raise AdapterError(f"{folder / CONFIG}: {name} is {short(given)}, which is larger than any weight")
    return float(given)


def _flag(given: Any, name: str, folder: Path) -> bool:
    if given is not None and not isinstance(given, bool):
        raise AdapterError(f"{folder / CONFIG}: {name} is {short(given)}, which is neither true nor false")
    return bool(given)


def _peft_scale(config: dict[str, Any], folder: Path) -> tuple[int, float]:
    """Return rank and scale of a PEFT adapter. Raises AdapterError for unsupported options and invalid values."""
    if config["peft_type"] != "LORA":
        raise AdapterError(f"{folder / CONFIG}: peft_type is {short(config['peft_type'])}; only LORA is supported")
    for name, harmless in _NOT_SUPPORTED.items():
        if (value := config.get(name)) is not None and value not in harmless:
            raise AdapterError(f"{folder / CONFIG}: {name} {short(value)} is not supported")
    rank = _rank(config.get("r"), "r", folder)
    alpha = _number(config.get("lora_alpha"), "lora_alpha", folder)
    is_by_root = _flag(config.get("use_rslora"), "use_rslora", folder)
    return rank, alpha / (math.sqrt(rank) if is_by_root else rank)


def _mlx_lm_scale(config: dict[str, Any], folder: Path) -> tuple[int, float]:
    """Return rank and scale of an mlx-lm adapter. Raises AdapterError for unsupported options and invalid values."""
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise AdapterError(f"{folder / CONFIG}: fine_tune_type {short(kind)} is not supported; only lora is")
    parameters = config["lora_parameters"]
    rank = _rank(parameters.get("rank"), "lora_parameters.rank", folder)
    return rank, _number(parameters.get("scale"), "lora_parameters.scale", folder)


# --- weights ---


def _offsets(path: Path) -> dict[str, int]:
    """Return the offset in bytes of each tensor in a safetensors file, unchecked: :func:`stored_tensors` checks them.

    Raises AdapterError if the file cannot be read, or its header is invalid or too large.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_JSON_BYTES:
                raise AdapterError(f"{path} is not an adapter's safetensors file: its header would have {size} bytes")
            header = json.loads(file.read(size))
        return {n: 8 + size + int(e["data_offsets"][0]) for n, e in header.items() if n != "__metadata__"}
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise AdapterError(f"{path} is truncated or is not a safetensors file") from error


def _products(
    tensors: Iterable[tuple[StoredTensor, int]], pattern: re.Pattern[str], targets: AdapterTargets, path: Path
) -> dict[str, _Product]:
    """Return the pair of tensors of each layer, by the layer's name in the model.

    Raises AdapterError for unsupported tensors and layers, for a layer without exactly two tensors, and if there are no
    tensors.
    """
    by_tail = _by_tail(targets)
    found: dict[str, dict[str, tuple[StoredTensor, int]]] = {}
    for tensor, offset in tensors:
        match = pattern.fullmatch(tensor.name)
        if match is None:
            raise AdapterError(f"{path}: {short(tensor.name)} is not a LoRA product's tensor, and not supported")
        module = _target(match[1], targets, by_tail, path)
        if found.setdefault(module, {}).setdefault(match[2].lower(), (tensor, offset))[0] is not tensor:
            raise AdapterError(f"{path} has {module} twice")
    if not found:
        raise AdapterError(f"{path} has no weights")
    for module, parts in found.items():
        if len(parts) != 2:
            raise AdapterError(f"{path} has only one of the two tensors of {module}")
    return {module: _Product(*parts["a"], *parts["b"]) for module, parts in found.items()}


def _tail(module: str) -> str:
    """Return a module's name without the prefix before its layer.

    Example: ``model.layers.3.mlp.up_proj`` -> ``layers.3.mlp.up_proj``.

    The prefix differs between libraries.
    """
    found = _LAYER.search(module)
    return module if found is None else module[found.start() :]


def _by_tail(targets: AdapterTargets) -> dict[str, str]:
    names = [*targets.shapes, *targets.refused]
    tails = [_tail(name) for name in names]
    return dict(zip(tails, names, strict=True)) if len(set(tails)) == len(tails) else {}


def _target(name: str, targets: AdapterTargets, by_tail: dict[str, str], path: Path) -> str:
    """Return the name in the model of the layer that an adapter calls ``name``.

    Raises AdapterError if the model has no such layer, or if adapters cannot change the layer.
    """
    if is_vision_tensor(name):  # its layers may have the names of the text model's layers
        raise AdapterError(f"{path} adds to {short(name, 100)}: adapters of image encoders are not supported")
    module = name if name in targets.shapes or name in targets.refused else by_tail.get(_tail(name), name)
    if module in targets.shapes:
        return module
    why = targets.refused.get(module, "the model has no such linear layer")
    raise AdapterError(f"{path} adds to {short(name, 100)}: {why}")


def _check_product(
    module: str, product: _Product, rank: int, shape: tuple[int, int], path: Path, *, is_transposed: bool
) -> None:
    wanted = ((shape[0], rank), (rank, shape[1]))
    for tensor, want in zip((product.first, product.second), wanted, strict=True):
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise AdapterError(f"{path}: {tensor.name} is of type {tensor.dtype}; F32, F16 and BF16 are supported")
        expected = want[::-1] if is_transposed else want
        if tensor.shape != expected:
            raise AdapterError(
                f"{path}: {tensor.name} has shape {list(tensor.shape)}, but {module} of the model needs "
                f"{list(expected)} at rank {rank}"
            )
