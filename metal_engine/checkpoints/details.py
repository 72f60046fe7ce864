"""What can be told of a model without its weights in memory: of one on this machine, or of one on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from metal_engine.checkpoints import checkpoint
from metal_engine.checkpoints.cache import CachedModel
from metal_engine.checkpoints.find import check_architecture, hub_name
from metal_engine.checkpoints.gguf.config import gguf_config
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.hub import MODEL_PATTERNS, find_repo, hub_problem
from metal_engine.checkpoints.hub_preflight import check_has_model, choose_gguf, read_remote_config, remote_facts
from metal_engine.checkpoints.names import gguf_models
from metal_engine.checkpoints.requirements import CheckpointRequirements, check_memory, gguf_facts, safetensors_facts
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo


@dataclass(frozen=True)
class CheckpointDetails:
    """A model as ``list`` and ``show`` tell of it.

    Attributes:
        name: as `serve` takes it.
        size: bytes on disk, or to be downloaded.
        path: where it is; None for one that is not on this machine.
        facts: None where its files cannot be read.
        quantization: how its weights are stored, in a word; "" if nothing is known.
        problem: why it cannot run here; None if it can, as far as configuration and headers say.
    """

    name: str
    size: int
    path: Path | None
    facts: CheckpointRequirements | None
    quantization: str
    problem: str | None

    @property
    def architecture(self) -> str:
        return "" if self.facts is None else str(self.facts.config["model_type"])

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was trained for, if its configuration says."""
        if self.facts is None:
            return None
        return checkpoint.context_length(self.facts.config.get("text_config") or self.facts.config)


def cached_details(model: CachedModel, args: EngineArgs, device: DeviceInfo) -> CheckpointDetails:
    """The details of a model on this machine; what is wrong with its files is its ``problem``."""
    facts, quantization = None, ""
    problem: str | None = None
    try:
        if not model.is_complete:
            raise ModelLoadError(f"half-downloaded: `metal-engine pull {quote(model.name)}` gets the rest")
        if model.path.suffix == ".gguf":
            quantization = gguf_models([model.path.name])[0].quantization
            header = read_gguf_header(model.path)
            facts = gguf_facts(header, gguf_config(header), args, device)
        else:
            config = checkpoint.read_config(model.path)
            tensors = list(checkpoint.stored_tensors(checkpoint.weight_files(model.path)))
            facts = safetensors_facts(config, tensors, args, device)
            quantization = _quantization(config, facts)
            check_architecture(config, args)
        check_memory(facts, args, device)
    except (ModelLoadError, ConfigError) as error:
        problem = str(error)
    return CheckpointDetails(model.name, model.size, model.path, facts, quantization, problem)


def remote_details(args: EngineArgs, device: DeviceInfo) -> CheckpointDetails:
    """The details of a model on the hub, of which nothing is downloaded.

    Raises:
        ModelLoadError: the hub has no such model, or cannot be asked.
    """
    name = hub_name(args)
    try:
        repo = find_repo(name.repo, name.revision)
        gguf = choose_gguf(name, list(repo.files), lambda file: repo.files[file].size)
        if gguf is not None:
            return CheckpointDetails(args.model, repo.files[gguf.name].size, None, None, gguf.quantization, None)
        check_has_model(repo)
        config = read_remote_config(repo)
        facts = remote_facts(repo, config, args, device)
    except ModelLoadError:
        raise
    except Exception as error:
        problem = hub_problem(error, None, name.repo, name.revision, args.download_dir)
        raise ModelLoadError(problem) from error
    cannot_run: str | None = None
    try:
        check_architecture(config, args)
        check_memory(facts, args, device)
    except (ModelLoadError, ConfigError) as error:
        cannot_run = str(error)
    size = sum(repo.files[file].size for file in repo.matching(MODEL_PATTERNS))
    return CheckpointDetails(args.model, size, None, facts, _quantization(config, facts), cannot_run)


def _quantization(config: dict[str, Any], facts: CheckpointRequirements) -> str:
    """How weights are stored: ``4-bit``, a method's name, or the type of plain ones."""
    own, other = config.get("quantization"), config.get("quantization_config")
    mode = (own or {}).get("mode", "affine")
    if own:
        return f"{own.get('bits', '?')}-bit" if mode == "affine" else str(mode)
    if other:
        return str(other.get("quant_method", "quantized"))
    return str(config.get("dtype") or config.get("torch_dtype") or facts.dtype)
