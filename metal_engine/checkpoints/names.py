"""Reads the names that users give to models, and finds the known one that a misspelt name may have meant."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

DEMO_MODEL = "demo"

_HUB_NAME = re.compile(r"(?P<repo>[^@:]+)(?:@(?P<revision>[^@:]+))?(?::(?P<quantization>[\w.-]+))?")
# What llama.cpp calls its quantizations, in the name of a file: Q4_K_M, IQ2_XXS, BF16, UD-Q4_K_XL.
_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:I?Q[1-8]_[a-z0-9_]+|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32)(?![a-z0-9_])", re.IGNORECASE
)
_SPLIT_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
# Of a repository that has GGUF files only and a name that asks for none of them.
DEFAULT_QUANTIZATION = "Q4_K_M"


@dataclass(frozen=True)
class HubName:
    """``repo[@revision][:quantization]``, taken apart; None for what the name does not say."""

    repo: str
    revision: str | None = None
    quantization: str | None = None


def parse_hub_name(name: str) -> HubName:
    """Takes a name apart; a text of another form is a repository's name as it is, for the hub to refuse."""
    match = _HUB_NAME.fullmatch(name)
    return HubName(name) if match is None else HubName(match["repo"], match["revision"], match["quantization"])


def is_local(name: str) -> bool:
    """Whether a name is a path, of something that exists or not, and no name on the hub."""
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or Path(name).expanduser().exists()


def is_ollama_name(name: str) -> bool:
    """True for a name such as ``qwen3:8b``: no owner, and a tag that is not a quantization."""
    parsed = parse_hub_name(name)
    tag = parsed.quantization
    return "/" not in parsed.repo and tag is not None and _QUANTIZATION.fullmatch(tag) is None


def did_you_mean(name: str, known: list[str]) -> str:
    """``; did you mean X?`` for the known name that is most like ``name``, or is it without the owner; else nothing."""
    repo = parse_hub_name(name).repo.lower()
    by_lower = {other.lower(): other for other in reversed([DEMO_MODEL, *known])}
    by_lower |= {lower.rpartition("/")[2]: other for lower, other in by_lower.items() if "/" not in repo}
    close = difflib.get_close_matches(repo, by_lower, n=1, cutoff=0.75)
    return f"; did you mean {by_lower[close[0]]}?" if close and by_lower[close[0]] != name else ""


def missing_here(name: str, cached: list[str]) -> str:
    """``X is not on this machine`` for a model that is neither here nor in the cache, and which was meant; else "".

    Args:
        cached: the names of the repositories in the hub's cache.
    """
    if name == DEMO_MODEL or Path(name).expanduser().exists() or parse_hub_name(name).repo in cached:
        return ""
    return f"{name} is not on this machine{'' if is_local(name) else did_you_mean(name, cached)}"


# --- GGUF files of a repository ---


@dataclass(frozen=True)
class GgufFile:
    """A model among the files of a repository.

    Attributes:
        name: of the file in the repository; of the first one if the model is split.
        quantization: as in the file's name, in capitals; "" if it names none.
        num_parts: number of files.
    """

    name: str
    quantization: str
    num_parts: int


def gguf_models(names: list[str]) -> list[GgufFile]:
    """The models among the files of a repository, sorted by name; what belongs to images (``mmproj``) is left out."""
    found = []
    for name in sorted(names):
        base = name.rpartition("/")[2]
        part = _SPLIT_PART.search(base)
        if not base.lower().endswith(".gguf") or base.lower().startswith(("mmproj", "imatrix")):
            continue
        if part is None or int(part[1]) == 1:
            labels = _QUANTIZATION.findall(_SPLIT_PART.sub("", base)[: -len(".gguf")])
            found.append(GgufFile(name, labels[-1].upper() if labels else "", int(part[2]) if part else 1))
    return found


def matching_ggufs(models: list[GgufFile], quantization: str | None) -> list[GgufFile]:
    """Those of the models that a quantization names, in whatever case.

    Args:
        quantization: None for the only model there is, or else those of ``DEFAULT_QUANTIZATION``.
    """
    if quantization is None and len(models) == 1:
        return models
    wanted = (quantization or DEFAULT_QUANTIZATION).upper()
    exact = [model for model in models if model.quantization == wanted]
    return exact or [model for model in models if model.quantization == f"UD-{wanted}"]
