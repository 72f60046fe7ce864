"""Inspects a repository on the hub before a download: its files, its configuration, and the headers of its weights.

This transfers a few hundred kilobytes, regardless of the size of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metal_engine.checkpoints import metadata
from metal_engine.checkpoints.file_checks import MAX_HEADER_BYTES, MAX_SETTINGS_BYTES
from metal_engine.checkpoints.hub.repository import HubRepo, read_range
from metal_engine.checkpoints.metadata import INDEX, StoredTensor
from metal_engine.checkpoints.model_names import DEFAULT_QUANTIZATION, GgufFile, HubName, gguf_models, matching_ggufs
from metal_engine.checkpoints.requirements import CheckpointRequirements, requirements_by_size
from metal_engine.errors import ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.settings.fields import format_size

_WEIGHTS = "model*.safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack", ".ckpt", ".safetensors", ".npz")
# Size of the first request. It includes a header of usual size.
_FIRST_BYTES = 1 << 14
_NUM_CONNECTIONS = 8
_MAX_LISTED = 12


def choose_gguf(name: HubName, files: list[str], sizes: Callable[[str], int]) -> GgufFile | None:
    """Return the GGUF file that a name on the hub selects; None if the name selects the repository's safetensors files.

    A name without a quantization selects a GGUF file only if the repository has GGUF files and no safetensors files.

    Args:
        name: repository, revision and quantization.
        files: names of the repository's files.
        sizes: returns the size of a file in bytes.

    Raises:
        ModelLoadError: no file or several files have the quantization, or the file is split into parts.
    """
    models = gguf_models(files)
    has_safetensors = any(Path(file).match(_WEIGHTS) and "/" not in file for file in files)
    if name.quantization is None and (has_safetensors or not models):
        return None
    found = matching_ggufs(models, name.quantization)
    wanted = name.quantization or DEFAULT_QUANTIZATION
    there = _listed(
        [f"{model.quantization or model.name} ({format_size(sum(map(sizes, model.files)))})" for model in models]
    )
    if not models:
        raise ModelLoadError(f"{name.repo} has no GGUF files, and so no {wanted}: omit :{wanted}")
    if not found:
        default = "" if name.quantization else ", the default for a name without a quantization"
        raise ModelLoadError(f"{name.repo} has no {wanted} GGUF file{default}; there are {there}")
    if len(found) > 1:
        several = _listed([model.name for model in found])
        raise ModelLoadError(
            f"{name.repo} has {len(found)} GGUF files of {wanted}: {several}; download the one you want"
        )
    if found[0].num_parts > 1:
        raise ModelLoadError(
            f"{found[0].name} of {name.repo} is one of {found[0].num_parts} parts, and split GGUF files are not "
            f"supported: choose another; there are {there}"
        )
    return found[0]


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def check_has_model(repo: HubRepo) -> None:
    """Refuse a repository without weights of a supported kind, judging by the names of its files.

    Raises:
        ModelLoadError: the repository has no supported weights or no config.json.
    """
    if not _weight_names(repo):
        others = sorted(name for name in repo.files if name.endswith(_OTHER_WEIGHTS))
        hint = f" (there is {others[0]}, which cannot be read)" if others else ""
        raise ModelLoadError(f"{repo.name} has no weights: no {_WEIGHTS} and no GGUF file{hint}")
    if "config.json" not in repo.files:
        raise ModelLoadError(f"{repo.name} has no config.json: not a model that can be loaded")


def read_remote_config(repo: HubRepo) -> dict[str, Any]:
    """Read and check the ``config.json`` of a repository.

    If there is an index of the weight files, check that the repository has all files in the index.

    Raises:
        ModelLoadError: a file is invalid, or files that the index lists are missing.
        Exception: any error of the hub's client.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            for name, limit in (("config.json", MAX_SETTINGS_BYTES), (INDEX, MAX_HEADER_BYTES)):
                if name in repo.files:
                    (folder / name).write_bytes(read_range(repo, name, 0, min(repo.files[name].size or limit, limit)))
            config = metadata.read_config(folder)
            listed = metadata.listed_files(folder / INDEX) if INDEX in repo.files else []
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace(temporary, repo.name)) from error
    missing = [name for name in listed if name not in repo.files]
    if missing:
        raise ModelLoadError(
            f"{repo.name} is incomplete on the hub: {len(missing)} of {len(listed)} weight files are missing, "
            f"{missing[0]} first"
        )
    return config


def estimated_requirements(
    repo: HubRepo, config: dict[str, Any], args: EngineArgs, device: DeviceInfo
) -> CheckpointRequirements:
    """Estimate the requirements of a checkpoint from the sizes of its weight files, without a request to the hub."""
    stored = sum(repo.files[name].size for name in _weight_names(repo))
    return requirements_by_size(config, stored, args, device)


def remote_model_tensors(repo: HubRepo) -> list[StoredTensor]:
    """Return the tensors in a repository's weight files (``model*.safetensors``). Transfers only the files' headers.

    Raises:
        ModelLoadError: a header is invalid.
        Exception: any error of the hub's client.
    """
    with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
        headers = list(pool.map(lambda name: remote_tensors(repo, name), _weight_names(repo)))
    return [tensor for tensors in headers for tensor in tensors]


def _weight_names(repo: HubRepo) -> list[str]:
    return [name for name in repo.matching([_WEIGHTS]) if "/" not in name]


def remote_tensors(repo: HubRepo, name: str) -> list[StoredTensor]:
    """Return the tensors in a safetensors file of a repository. Transfers only the header of the file.

    Raises:
        ModelLoadError: the header is invalid.
        Exception: any error of the hub's client.
    """
    path = f"{repo.name}/{name}"
    beginning = read_range(repo, name, 0, _FIRST_BYTES)
    length = int.from_bytes(beginning[:8], "little")
    if length > MAX_HEADER_BYTES or (repo.files[name].size and length > repo.files[name].size):
        raise ModelLoadError(f"{path} is not a safetensors file: its header would have {length} bytes")
    header = beginning[8 : 8 + length]
    if len(header) < length:
        header += read_range(repo, name, 8 + len(header), 8 + length)
    return metadata.parse_safetensors_header(header, path)
