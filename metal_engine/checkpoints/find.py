"""Finds the files of a model by its name: on this machine, in the hub's cache, or on the hub.

A repository on the hub is inspected before the download, and refused if it could not be served.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metal_engine.checkpoints.demo import fetch_demo_model
from metal_engine.checkpoints.draft_heads.names import HEAD_PATTERNS
from metal_engine.checkpoints.hub.download import download
from metal_engine.checkpoints.hub.preflight import (
    check_has_model,
    choose_gguf,
    estimated_requirements,
    read_remote_config,
    remote_model_tensors,
)
from metal_engine.checkpoints.hub.repository import (
    MODEL_PATTERNS,
    HubRepo,
    cached_folder,
    cached_path,
    find_repo,
    hub_problem,
    is_offline,
)
from metal_engine.checkpoints.model_classes import model_classes
from metal_engine.checkpoints.model_names import DEMO_MODEL, HubName, is_gguf, parse_hub_name
from metal_engine.checkpoints.path_settings import check_model_name
from metal_engine.checkpoints.pooling_config import check_causal
from metal_engine.checkpoints.requirements import Check, check_memory, safetensors_requirements
from metal_engine.checkpoints.shared_indexes import check_indexes
from metal_engine.errors import ConfigError, ModelLoadError, UnsupportedModelError, one_line
from metal_engine.local_paths import local_path
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundModel:
    """A model's files on this machine: a directory, or a GGUF file. ``name`` is the model's display name."""

    path: Path
    name: str


def find_model(args: EngineArgs, device: DeviceInfo, check: Check) -> FoundModel:
    """Return the files that ``args.model`` names. Download the files of a hub repository that the cache lacks.

    Args:
        args: settings of the engine.
        device: device on which the model will run.
        check: raises an error if a checkpoint's configuration and headers show that it cannot run. Called before a
            download.

    Raises:
        ModelLoadError: the files do not exist or cannot be served. The message gives the reason.
        ConfigError: a setting does not suit the model.
    """
    if args.model == DEMO_MODEL:
        return FoundModel(fetch_demo_model(), DEMO_MODEL)
    check_model_name(args.model)
    path = local_path(args.model)
    if is_gguf(path):
        return FoundModel(path, path.stem)
    if os.path.isdir(path):
        return FoundModel(path, args.model)
    name = hub_name(args)

    def check_repo(repo: HubRepo) -> None:
        check_remote_model(repo, args, device, check)

    return FoundModel(fetch_model(name, args.download_dir, check_repo), args.model)


def hub_name(args: EngineArgs) -> HubName:
    """Return the repository, revision and quantization in the settings.

    Raises:
        ConfigError: the name and ``--revision`` give different revisions.
    """
    name = parse_hub_name(args.model)
    if args.revision is not None and name.revision not in (None, args.revision):
        raise ConfigError("--revision", f"is {args.revision}, but {args.model} names {name.revision}: omit one of them")
    return HubName(name.repo, name.revision or args.revision, name.quantization)


def fetch_model(name: HubName, download_dir: str | None, check_repo: Callable[[HubRepo], None]) -> Path:
    """Return the folder or the GGUF file of a model on the hub. Download it if the cache lacks it.

    Args:
        name: repository, revision and quantization.
        download_dir: folder of the cache; None for the hub's default.
        check_repo: raises an error for an unsuitable repository of safetensors. Called before the download.

    Raises:
        ModelLoadError: the model is not available. The message gives the reason and a remedy.
    """
    return fetch_repo(
        name,
        download_dir,
        lambda repo: _from_hub(repo, name, download_dir, check_repo),
        lambda: _from_cache(name, download_dir),
    )


def fetch_repo(
    name: HubName, download_dir: str | None, from_hub: Callable[[HubRepo], Path], from_cache: Callable[[], Path]
) -> Path:
    """Return the result of ``from_hub`` if the hub has the repository. Otherwise, return the result of ``from_cache``.

    Args:
        name: repository and revision.
        download_dir: folder of the cache; None for the hub's default.
        from_hub: downloads missing files of the repository, and returns the path of the files in the cache.
        from_cache: returns the path of the files in the cache.

    Raises:
        ModelLoadError: the files are not available. The message gives the reason and a remedy.
    """
    try:
        if is_offline():
            return _cached(name, download_dir, from_cache, None)
        logger.info("looking for %s on the hub", name.repo)
        try:
            repo = find_repo(name.repo, name.revision)
        except Exception as error:  # noqa: BLE001  (reported if the cache has nothing)
            return _cached(name, download_dir, from_cache, error)
        return from_hub(repo)
    except (ModelLoadError, ConfigError):
        raise
    except Exception as error:  # includes errors of the file system or the network from the hub's client
        raise ModelLoadError(hub_problem(error, None, name.repo, name.revision, download_dir)) from error


def _from_hub(repo: HubRepo, name: HubName, download_dir: str | None, check_repo: Callable[[HubRepo], None]) -> Path:
    gguf = choose_gguf(name, list(repo.files), lambda file: repo.files[file].size)
    wanted = [gguf.name] if gguf else repo.matching([*MODEL_PATTERNS, *HEAD_PATTERNS])
    paths = [cached_path(repo, file, download_dir) for file in wanted]
    if None in paths or not paths:
        if gguf is None:
            check_has_model(repo)
            check_repo(repo)
        download(repo, wanted, download_dir)
    representative = gguf.name if gguf else "config.json"
    path = cached_path(repo, representative, download_dir)
    if path is None:
        raise ModelLoadError(f"{repo.name} has changed on the hub during the download: start again")
    return path if gguf else path.parent


def _cached(name: HubName, download_dir: str | None, from_cache: Callable[[], Path], trouble: Exception | None) -> Path:
    """Return the result of ``from_cache``, because the hub cannot be used or lacks the repository.

    Args:
        trouble: error of the request to the hub; None if requests are forbidden (:func:`is_offline`).

    Raises:
        ModelLoadError: the cache lacks the files, or the hub has no revision of this name.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    if isinstance(trouble, RevisionNotFoundError):  # a definite response of the hub
        raise ModelLoadError(hub_problem(trouble, None, name.repo, name.revision, download_dir)) from trouble
    try:
        return from_cache()
    except ModelLoadError:
        raise
    except Exception as error:
        problem = hub_problem(trouble or error, error, name.repo, name.revision, download_dir)
        raise ModelLoadError(problem) from error


def _from_cache(name: HubName, download_dir: str | None) -> Path:
    folder = cached_folder(name.repo, name.revision, download_dir, [])
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    gguf = choose_gguf(name, files, lambda file: (folder / file).stat().st_size)
    if gguf is not None:
        return folder / gguf.name
    return cached_folder(name.repo, name.revision, download_dir, MODEL_PATTERNS)


def check_remote_model(repo: HubRepo, args: EngineArgs, device: DeviceInfo, check: Check) -> None:
    """Refuse a repository of safetensors that could not be served. The cheapest checks come first.

    Raises:
        ModelLoadError: the model could not be served.
        ConfigError: a setting does not suit the model.
    """
    config = read_remote_config(repo)
    check_causal(config, args.model)
    check_architecture(config, args)
    estimate = estimated_requirements(repo, config, args, device)
    if estimate.weight_bytes > 2 * device.memory_bytes:
        check_memory(estimate, args, device)
    requirements = safetensors_requirements(config, remote_model_tensors(repo), args, device)
    check_memory(requirements, args, device)
    check(requirements)


def check_architecture(config: dict[str, Any], args: EngineArgs) -> None:
    """Refuse a model whose architecture mlx-lm does not support.

    Raises:
        UnsupportedModelError: mlx-lm lacks the architecture or this variant, or needs a package that is not installed,
            or layers share the keys that an index selects (:func:`check_indexes`).
        ModelLoadError: the checkpoint has its own code, and ``--trust-remote-code`` is not set.
    """
    model_file = config.get("model_file")
    if model_file is not None:
        if not args.trust_remote_code:
            raise ModelLoadError(
                f"{args.model} has its own code ({model_file}): --trust-remote-code runs it, if you trust it"
            )
        return
    try:
        _, args_class = model_classes(config)
    except (ValueError, SystemExit) as error:  # mlx-lm's olmo exits the process if its package is missing
        raise UnsupportedModelError(
            f"{args.model}: mlx-lm has no architecture {config['model_type']!r}, or a package that it needs is missing"
        ) from error
    try:
        args_class.from_dict(deepcopy(config))
    except ValueError as error:  # a variant that mlx-lm knows and does not support
        raise UnsupportedModelError(f"{args.model}: mlx-lm does not support it: {one_line(error)}") from error
    except Exception as error:
        logger.debug("mlx-lm cannot read the configuration of %s", args.model, exc_info=error)
    check_indexes(args.model, config)
