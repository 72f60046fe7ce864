"""Details of a model that are available without loading its weights, for models on this machine or on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from metal_engine.checkpoints import metadata
from metal_engine.checkpoints.cached_models import CachedModel
from metal_engine.checkpoints.draft_heads.names import HEAD_PATTERNS, has_only_head
from metal_engine.checkpoints.file_checks import visible_files
from metal_engine.checkpoints.find import check_architecture, hub_name
from metal_engine.checkpoints.gguf.config import gguf_config
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.hub.preflight import (
    check_has_model,
    choose_gguf,
    read_remote_config,
    remote_model_tensors,
    remote_tensors,
)
from metal_engine.checkpoints.hub.repository import MODEL_PATTERNS, find_repo, hub_problem
from metal_engine.checkpoints.model_names import gguf_models, is_gguf
from metal_engine.checkpoints.requirements import (
    CheckpointRequirements,
    check_memory,
    gguf_requirements,
    head_bytes,
    safetensors_requirements,
)
from metal_engine.errors import ConfigError, ModelLoadError, one_line
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo


@dataclass(frozen=True)
class CheckpointDetails:
    """Details of a model for the commands ``list`` and ``show``.

    Attributes:
        name: name for the `serve` command.
        size: bytes on disk, or bytes to download.
        path: local path of the model; None for a model on the hub.
        requirements: requirements of the checkpoint; None if its files cannot be read, or for a GGUF file on the hub.
        quantization: storage type of the weights in one word, e.g. ``4-bit``, ``Q4_K_M`` or ``bfloat16``; "" if
            unknown.
        problem: reason why the model cannot run here; None without a known reason. Always None for a GGUF file on the
            hub, whose header is not read.
        head_bytes: size of the draft head's weights in memory, in bytes; 0 without a draft head.
    """

    name: str
    size: int
    path: Path | None
    requirements: CheckpointRequirements | None
    quantization: str
    problem: str | None
    head_bytes: int = 0

    @property
    def architecture(self) -> str:
        return "" if self.requirements is None else str(self.requirements.config["model_type"])

    @property
    def context_length(self) -> int | None:
        """Context length in the configuration, in tokens; None if the configuration lacks it or is not known."""
        if self.requirements is None:
            return None
        return metadata.context_length(self.requirements.config.get("text_config") or self.requirements.config)


def cached_details(model: CachedModel, args: EngineArgs, device: DeviceInfo) -> CheckpointDetails:
    """Return the details of a model on this machine. An error in its files is not raised, and becomes ``problem``."""
    requirements, quantization, num_head_bytes = None, "", 0
    problem: str | None = None
    try:
        if not model.is_complete:
            raise ModelLoadError(f"half-downloaded: `metal-engine pull {quote(model.name)}` gets the rest")
        if is_gguf(model.path):
            quantization = gguf_models([model.path.name])[0].quantization
            header = read_gguf_header(model.path)
            requirements = gguf_requirements(header, gguf_config(header), args, device)
        elif has_only_head(model.path):
            raise ModelLoadError("a draft head without a model; name it as `model` in --speculative-config")
        else:
            config = metadata.read_config(model.path)
            tensors = list(metadata.stored_tensors(metadata.weight_files(model.path)))
            requirements = safetensors_requirements(config, tensors, args, device)
            quantization = _quantization(config, requirements)
            check_architecture(config, args)
            beside = [file for pattern in HEAD_PATTERNS for file in visible_files(model.path, pattern)]
            num_head_bytes = head_bytes(list(metadata.stored_tensors(beside)) or tensors, requirements, device)
        check_memory(requirements, args, device)
    except (ModelLoadError, ConfigError) as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  (files may have any content)
        problem = f"its files are not a valid model ({type(error).__name__}: {one_line(error)})"
    return CheckpointDetails(model.name, model.size, model.path, requirements, quantization, problem, num_head_bytes)


def remote_details(args: EngineArgs, device: DeviceInfo) -> CheckpointDetails:
    """Return the details of a model on the hub, without downloading it.

    A model that cannot run here has details with a ``problem``. Other errors are raised.

    Raises:
        ModelLoadError: the hub cannot be reached or has no such model, or the model's files are invalid.
        UnsupportedModelError: layers share the keys that an index selects.
        ConfigError: the name and ``--revision`` give different revisions.
    """
    name = hub_name(args)
    try:
        repo = find_repo(name.repo, name.revision)
        gguf = choose_gguf(name, list(repo.files), lambda file: repo.files[file].size)
        if gguf is not None:
            return CheckpointDetails(args.model, repo.files[gguf.name].size, None, None, gguf.quantization, None)
        check_has_model(repo)
        config = read_remote_config(repo)
        tensors = remote_model_tensors(repo)
        requirements = safetensors_requirements(config, tensors, args, device)
        beside = [tensor for file in repo.matching(HEAD_PATTERNS) for tensor in remote_tensors(repo, file)]
        num_head_bytes = head_bytes(beside or tensors, requirements, device)
    except ModelLoadError:
        raise
    except Exception as error:
        problem = hub_problem(error, None, name.repo, name.revision, args.download_dir)
        raise ModelLoadError(problem) from error
    cannot_run: str | None = None
    try:
        check_architecture(config, args)
        check_memory(requirements, args, device)
    except (ModelLoadError, ConfigError) as error:
        cannot_run = str(error)
    size = sum(repo.files[file].size for file in repo.matching([*MODEL_PATTERNS, *HEAD_PATTERNS]))
    return CheckpointDetails(
        args.model, size, None, requirements, _quantization(config, requirements), cannot_run, num_head_bytes
    )


def _quantization(config: dict[str, Any], requirements: CheckpointRequirements) -> str:
    """Return the storage type of the weights: ``4-bit``, the name of a quantization method, or a plain type."""
    own, other = config.get("quantization"), config.get("quantization_config")
    mode = (own or {}).get("mode", "affine")
    if own:
        return f"{own.get('bits', '?')}-bit" if mode == "affine" else str(mode)
    if other:
        return str(other.get("quant_method", "quantized"))
    return str(config.get("dtype") or config.get("torch_dtype") or requirements.dtype)
