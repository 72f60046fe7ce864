"""Checks the settings that may name a path: model, tokenizer and generation config.

Imports neither MLX nor transformers, so a wrong path is reported before these slow imports. A path that the system
refuses to look up, e.g. because it is too long, counts as missing (``os.path``, unlike ``Path``).
"""

from __future__ import annotations

import os
from pathlib import Path

from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.metadata import read_config
from metal_engine.checkpoints.model_names import DEMO_MODEL, is_gguf, is_local, is_ollama_name
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.local_paths import local_path


def check_model_name(model: str) -> None:
    """Check a model's name, and the header or configuration of a model that is a path.

    Raises:
        ModelLoadError: the path does not exist or is not a valid model, or the name is from Ollama's registry.
    """
    if model == DEMO_MODEL:
        return
    path = local_path(model)
    if is_gguf(path):
        if not os.path.isfile(path):
            raise ModelLoadError(f"no such file: {path}")
        read_gguf_header(path)
    elif is_local(model):
        if not os.path.isdir(path):
            raise ModelLoadError(f"{model} is neither a directory nor a .gguf file")
        read_config(path)
    elif is_ollama_name(model) and not os.path.isdir(path):
        raise ModelLoadError(
            f"{model} is a name from Ollama's registry, which metal-engine does not read. Give a Hugging Face "
            "repository with the same weights instead, as OWNER/NAME (for example mlx-community/Qwen3-8B-4bit) or, "
            "for a GGUF file, OWNER/NAME:Q4_K_M"
        )


def local_tokenizer(name: str | None) -> Path | None:
    """Return the directory that ``--tokenizer`` names; None if it names a repository or is not given.

    Raises:
        ModelLoadError: the name is a path that is not a directory.
    """
    if name is None or os.path.isdir(folder := local_path(name)):
        return None if name is None else folder
    if os.path.exists(folder) or name.startswith((".", "/", "~")):
        raise ModelLoadError(f"{name} is not a directory (--tokenizer)")
    return None


def generation_config_folder(given: str) -> Path | None:
    """Return the folder that ``--generation-config`` names; None for ``auto`` and ``vllm``, which name no folder.

    Raises:
        ModelLoadError: the folder has no ``generation_config.json``.
    """
    if given in ("auto", "vllm"):
        return None
    folder = local_path(given)
    if not os.path.isfile(folder / "generation_config.json"):
        raise ModelLoadError(f"{folder} has no generation_config.json (--generation-config)")
    return folder


def existing_folder(flag: str, given: str) -> Path:
    """Return the folder that a flag names. Raises ConfigError if there is no such folder."""
    folder = local_path(given)
    if not os.path.isdir(folder):
        raise ConfigError(flag, f"{given} is not a directory")
    return folder
