"""Finds models in a folder for ``serve``, and checks the settings for several models."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from metal_engine.checkpoints.model_names import gguf_models, is_gguf
from metal_engine.cli.early_checks import check_engine_args
from metal_engine.errors import ConfigError
from metal_engine.local_paths import local_path
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.multi_model import RegistryArgs, refuse_for_one_model
from metal_engine.settings.served_names import check_name, problem_of_name
from metal_engine.settings.server_args import ServerArgs

logger = logging.getLogger(__name__)


def find_several(
    models: tuple[str, ...], args: EngineArgs, server_args: ServerArgs, registry_args: RegistryArgs
) -> dict[str, Path]:
    """Check the settings for several models before MLX is imported. Return the models of ``--models-dir`` by name.

    Raises:
        ConfigError: settings are invalid or conflict.
        ModelLoadError: a named model, the tokenizer or the generation config does not exist.
    """
    if server_args.served_model_name:
        raise ConfigError("--served-model-name", "is for one model: several models are served under their own names")
    if not server_args.engine_process:
        raise ConfigError("--no-engine-process", "works with one model: several models run in separate processes")
    if server_args.lora_dir is not None:
        raise ConfigError("--lora-dir", "is for one model that stays loaded, not for models loaded on demand")
    if len(set(models)) < len(models):
        raise ConfigError(None, "a MODEL is given twice")
    for name in models:
        check_name("MODEL", name)
    refuse_for_one_model(args)
    found = {} if registry_args.models_dir is None else models_in(Path(registry_args.models_dir))
    if not (models or found):
        raise ConfigError("--models-dir", f"{registry_args.models_dir} contains no model, and no MODEL is given")
    for model in models or ("",):
        check_engine_args(replace(args, model=model))
    return found


def models_in(folder: Path, *, warns: bool = True) -> dict[str, Path]:
    """Return the paths of the models in a folder by name.

    A model is a folder with a ``config.json``, or a GGUF model (:func:`gguf_models`), in the folder itself or one level
    below. Names are ``model`` and ``folder/model``, without ``.gguf``.

    Skips hidden entries, unreadable entries, and entries whose name is not UTF-8 or is not a valid name of a model. If
    a folder and a GGUF file would have the same name, skips the GGUF file.

    Args:
        warns: True to log the skipped entries, except hidden ones and GGUF files that are not models.

    Raises:
        ConfigError: the path is not a readable folder.
    """
    try:
        paths = sorted(local_path(folder).iterdir())
    except OSError as error:
        raise ConfigError("--models-dir", f"cannot read --models-dir {folder}: {error.strerror}") from error
    found: dict[str, Path] = {}
    passed_over: list[str] = []
    for path in paths:
        for inner in (path, *_below(path, passed_over)):
            for name, model in _model_at(inner, str(inner.relative_to(path.parent)), passed_over).items():
                if found.setdefault(name, model) is not model:
                    passed_over.append(f"{str(model)!a}: {found[name]} has the same name")
    if passed_over and warns:
        logger.warning("skipping entries of --models-dir: %s", "; ".join(dict.fromkeys(passed_over)))
    return found


def _below(path: Path, passed_over: list[str]) -> list[Path]:
    """Return the sorted entries of a folder. Return an empty list if the path is hidden, a model or not a folder.

    If the path is unreadable, append its description to ``passed_over`` and return an empty list.
    """
    try:
        if path.name.startswith(".") or not path.is_dir() or (path / "config.json").exists():
            return []
        return sorted(path.iterdir())
    except OSError as error:
        passed_over.append(_reason(path, error))
        return []


def _model_at(path: Path, name: str, passed_over: list[str]) -> dict[str, Path]:
    if path.name.startswith("."):
        return {}
    try:
        if is_gguf(path) and path.is_file():
            if not gguf_models([path.name]):
                return {}
            name = name[: -len(".gguf")]
        elif not (path / "config.json").is_file():
            return {}
        str(path).encode()
    except (OSError, UnicodeEncodeError) as error:
        passed_over.append(_reason(path, error))
        return {}
    if problem := problem_of_name(name):
        passed_over.append(problem)
        return {}
    return {name: path}


def _reason(path: Path, error: OSError | UnicodeEncodeError) -> str:
    why = "its name is not UTF-8" if isinstance(error, UnicodeEncodeError) else f"cannot be read ({error.strerror})"
    return f"{str(path)!a}: {why}"
