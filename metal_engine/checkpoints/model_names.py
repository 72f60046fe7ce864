"""Parses the names that users give to models, and suggests known names for misspelt ones."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from metal_engine.local_paths import local_path

DEMO_MODEL = "demo"

_HUB_NAME = re.compile(r"(?P<repo>[^@:]+)(?:@(?P<revision>[^@:]+))?(?::(?P<quantization>[\w.-]+))?")
# llama.cpp's names of quantizations in file names: Q4_K_M, IQ2_XXS, BF16, UD-Q4_K_XL.
_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:I?Q[1-8]_[a-z0-9_]+|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32)(?![a-z0-9_])", re.IGNORECASE
)
_SPLIT_PART = re.compile(r"-(\d{5})(-of-(\d{5}))(?=\.gguf$)", re.IGNORECASE)
# Starts of the names of hidden files, image encoders and importance matrices. `M-Q4_K_M-imatrix.gguf` is a model.
_NO_MODEL = re.compile(r"\.|imatrix|(?:.*[^a-z0-9])?mmproj|(?!.*Q\d).*imatrix\.gguf$", re.IGNORECASE)
# Default for a name without a quantization, if the repository has only GGUF files.
DEFAULT_QUANTIZATION = "Q4_K_M"


@dataclass(frozen=True)
class HubName:
    """The parts of ``repo[@revision][:quantization]``; None for a missing part."""

    repo: str
    revision: str | None = None
    quantization: str | None = None


def parse_hub_name(name: str) -> HubName:
    """Parse ``repo[@revision][:quantization]``. Raises no errors.

    A text of another form is returned as the repository's name, which the hub will refuse.
    """
    match = _HUB_NAME.fullmatch(name)
    return HubName(name) if match is None else HubName(match["repo"], match["revision"], match["quantization"])


def is_gguf(path: str | Path) -> bool:
    """Return True if a path, existing or not, has the name of a GGUF file."""
    return str(path).lower().endswith(".gguf")


def is_local(name: str) -> bool:
    """Return True if a name is a path and not a repository on the hub.

    The path need not exist if it begins with ``.``, ``/`` or ``~``, or ends with ``.gguf``.
    """
    return name.startswith((".", "/", "~")) or is_gguf(name) or os.path.exists(local_path(name))


def is_ollama_name(name: str) -> bool:
    """Return True for a name such as ``qwen3:8b``: no owner, and a tag that is not a quantization."""
    parsed = parse_hub_name(name)
    tag = parsed.quantization
    return "/" not in parsed.repo and tag is not None and _QUANTIZATION.fullmatch(tag) is None


def did_you_mean(name: str, known: list[str]) -> str:
    """Return ``; did you mean X?`` for the known name most similar to ``name``; "" if no name is similar.

    If ``name`` has no owner, it is compared with the known names without their owners, too.
    """
    repo = parse_hub_name(name).repo.lower()
    by_lower = {other.lower(): other for other in reversed([DEMO_MODEL, *known])}
    by_lower |= {lower.rpartition("/")[2]: other for lower, other in by_lower.items() if "/" not in repo}
    close = difflib.get_close_matches(repo, by_lower, n=1, cutoff=0.75)
    return f"; did you mean {by_lower[close[0]]}?" if close and by_lower[close[0]] != name else ""


def missing_here(name: str, cached: list[str]) -> str:
    """Return ``X is not on this machine`` if a model is neither a local path nor in the cache; otherwise "".

    The text also suggests a known name if ``name`` is misspelt.

    Args:
        name: name of the model.
        cached: names of the repositories in the hub's cache.
    """
    if name == DEMO_MODEL or os.path.exists(local_path(name)) or parse_hub_name(name).repo in cached:
        return ""
    return f"{name} is not on this machine{'' if is_local(name) else did_you_mean(name, cached)}"


# --- GGUF files of a repository ---


@dataclass(frozen=True)
class GgufFile:
    """A GGUF model among the files of a repository.

    Attributes:
        name: name of the file in the repository, or of the first file if the model is split.
        quantization: quantization in the file's name, in upper case; "" if the name has none.
        num_parts: number of files of the whole model.
        files: names of its files in the repository. Some files of a split model may be missing.
    """

    name: str
    quantization: str
    num_parts: int
    files: tuple[str, ...]


def gguf_models(names: list[str]) -> list[GgufFile]:
    """Return the GGUF models among the files of a repository, sorted by name. A split model is one model.

    Image encoders (``mmproj``), importance matrices (``imatrix``), hidden files, and split models without their first
    file are left out.
    """
    of_model: dict[str, list[str]] = {}
    for name in sorted(names):
        if is_gguf(name) and not _NO_MODEL.match(name.rpartition("/")[2]):
            of_model.setdefault(_SPLIT_PART.sub(r"-00001\2", name), []).append(name)
    found = []
    for name, files in of_model.items():
        if name in files:
            labels = _QUANTIZATION.findall(_SPLIT_PART.sub("", name.rpartition("/")[2])[: -len(".gguf")])
            part = _SPLIT_PART.search(name)
            num_parts = int(part[3]) if part else 1
            found.append(GgufFile(name, labels[-1].upper() if labels else "", num_parts, tuple(files)))
    return found


def matching_ggufs(models: list[GgufFile], quantization: str | None) -> list[GgufFile]:
    """Return the models with a quantization, or the models with its ``UD-`` variant if no model has the quantization.

    Args:
        models: models of a repository.
        quantization: quantization in upper or lower case. None selects the only model, or the models with
            ``DEFAULT_QUANTIZATION`` if there are several.
    """
    if quantization is None and len(models) == 1:
        return models
    wanted = (quantization or DEFAULT_QUANTIZATION).upper()
    exact = [model for model in models if model.quantization == wanted]
    return exact or [model for model in models if model.quantization == f"UD-{wanted}"]
