"""Recognizes the weights of a draft head by their published names, and maps them to the names of one structure.

Each family of models publishes its head under its own names. Each head has two input norms (of the embedding and of the
hidden state), a projection of both inputs, transformer blocks, and a final norm. This module maps published names to
Qwen's names, which are also the names in :class:`metal_engine.models.draft_head.DraftHead`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from metal_engine.checkpoints.file_checks import visible_files
from metal_engine.checkpoints.metadata import StoredTensor, stored_tensors
from metal_engine.errors import ModelLoadError

# Files beside a model's weights that have only its draft head.
HEAD_PATTERNS = ["mtp/*.safetensors", "mtp*.safetensors"]

EMBEDDING_NORM, HIDDEN_NORM = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
PROJECTION, LAST_NORM = "fc", "norm"
EMBEDDING_TABLE, LM_HEAD = "embed_tokens", "lm_head"
# Suffix of the names of the scales of FP8 weights. The name without this suffix is the name of the weights.
FP8_SCALES = "_scale_inv"


@dataclass(frozen=True)
class _Layout:
    """Regular expressions for one family's names of a head's weights. A prefix such as ``mtp.`` is removed first.

    Attributes:
        parts: name of each part in the engine -> pattern of the part's name.
        block: pattern of the names of a block's weights. Its first group is the index of the block, which may be empty.
            Its second group is the weight's name within the block.
        hidden_first: True if the projection reads the hidden state before the embedding.
        copies: pairs (name of a module in the engine, pattern of the module's name), for modules that repeat the
            model's embedding table or LM head.
        is_alone: True if all names below the prefix belong to the head.
    """

    parts: dict[str, str]
    block: str
    hidden_first: bool = False
    copies: tuple[tuple[str, str], ...] = ()
    is_alone: bool = True


_NUMBERED_BLOCK = r"layers\.(\d+)\.(.+)"
_ONLY_BLOCK = "()(.+)"
_LAYOUTS = (
    # Qwen3-Next, Qwen3.5 to 3.8: mtp.fc, mtp.layers.0.*
    _Layout(
        {name: name for name in (EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, LAST_NORM)},
        _NUMBERED_BLOCK,
        copies=((EMBEDDING_TABLE, EMBEDDING_TABLE), (LM_HEAD, LM_HEAD)),
    ),
    # Nemotron-3: mtp.layers.0.* with attention and the first parts, mtp.layers.1.* with experts and the last norm
    _Layout(
        {
            EMBEDDING_NORM: r"layers\.0\.enorm",
            HIDDEN_NORM: r"layers\.0\.hnorm",
            PROJECTION: r"layers\.0\.eh_proj",
            LAST_NORM: r"layers\.\d+\.final_layernorm",
        },
        _NUMBERED_BLOCK,
    ),
    # DeepSeek-V3, GLM-4.5 and later: model.layers.N.*, where N is the number of the model's layers
    _Layout(
        {EMBEDDING_NORM: "enorm", HIDDEN_NORM: "hnorm", PROJECTION: "eh_proj", LAST_NORM: r"shared_head\.norm"},
        _ONLY_BLOCK,
        copies=((EMBEDDING_TABLE, "embed_tokens"), (LM_HEAD, r"shared_head\.head")),
    ),
    # MiMo: model.mtp_layers.0.*
    _Layout(
        {
            EMBEDDING_NORM: "token_layernorm",
            HIDDEN_NORM: "hidden_layernorm",
            PROJECTION: "input_proj",
            LAST_NORM: "final_layernorm",
        },
        _ONLY_BLOCK,
        hidden_first=True,
    ),
    # Ernie 4.5: model.mtp_emb_norm.0, model.mtp_block.0.*; the last norm is the model's
    _Layout(
        {EMBEDDING_NORM: r"mtp_emb_norm\.0", HIDDEN_NORM: r"mtp_hidden_norm\.0", PROJECTION: r"mtp_linear_proj\.0"},
        r"mtp_block\.(\d+)\.(.+)",
        is_alone=False,
    ),
)


@dataclass(frozen=True)
class HeadNames:
    """Names of a head's weights in its files.

    Attributes:
        parts: name in the engine -> name in the files, for weights outside the blocks.
        blocks: for each block in order, name within the block -> name in the files.
        copies: name in the engine -> name in the files, for weights that repeat the model's embedding table or LM head.
            The names in the engine begin with ``embed_tokens`` or ``lm_head``.
        hidden_first: True if the projection reads the hidden state before the embedding.
    """

    parts: dict[str, str]
    blocks: tuple[dict[str, str], ...]
    copies: dict[str, str]
    hidden_first: bool

    @property
    def has_last_norm(self) -> bool:
        """True if the head has its own last norm.

        Otherwise, the head uses the model's last norm, and reads hidden states from before this norm.
        """
        return f"{LAST_NORM}.weight" in self.parts

    @property
    def published(self) -> list[str]:
        """Published names of the head's weights, without ``copies``."""
        return [name for group in (self.parts, *self.blocks) for name in group.values()]


def find_head(names: Iterable[str]) -> HeadNames | None:
    """Return the draft head's names, given the names of all tensors in its files; None if there is no draft head.

    Raises:
        ModelLoadError: there are several heads, which predict tokens at different distances.
    """
    names = list(names)
    for layout in _LAYOUTS:
        first = re.compile(rf"((?:.+\.)?){layout.parts[EMBEDDING_NORM]}\.weight")
        prefixes = [match[1] for name in names if (match := first.fullmatch(name))]
        found = [head for prefix in prefixes if (head := _head_below(prefix, layout, names)) is not None]
        if len(found) > 1:
            raise _several_heads()
        if found:
            return found[0]
    return None


def _head_below(prefix: str, layout: _Layout, names: list[str]) -> HeadNames | None:
    """Return the names of a head with this layout below a prefix; None if one of the head's parts is missing.

    Raises:
        ModelLoadError: there are several heads.
    """
    parts: dict[str, str] = {}
    copies: dict[str, str] = {}
    blocks: dict[int, dict[str, str]] = {}
    for name in names:
        if not name.startswith(prefix):
            continue
        own = name.removeprefix(prefix)
        if (renamed := _renamed(own, layout.parts.items())) is not None:
            if renamed in parts:
                raise _several_heads()
            parts[renamed] = name
        elif (renamed := _renamed(own, layout.copies)) is not None:
            copies[renamed] = name
        elif match := re.fullmatch(layout.block, own):
            blocks.setdefault(int(match[1] or 0), {})[match[2]] = name
        elif layout.is_alone:
            parts[own] = name
    if not all(f"{part}.weight" in parts for part in layout.parts):
        return None
    return HeadNames(parts, tuple(blocks[i] for i in sorted(blocks)), copies, layout.hidden_first)


def _renamed(name: str, patterns: Iterable[tuple[str, str]]) -> str | None:
    """Return a weight's name in the engine, such as ``fc.scales``; None if no pattern matches its module."""
    module, _, kind = name.rpartition(".")
    return next((f"{renamed}.{kind}" for renamed, pattern in patterns if re.fullmatch(pattern, module)), None)


def _several_heads() -> ModelLoadError:
    return ModelLoadError("the files have a chain of several draft heads, and only a single head is supported")


# --- files ---


def head_files(place: Path) -> list[Path]:
    """Return the files that may have the weights of a head.

    Args:
        place: a file, or a folder with ``mtp/*.safetensors``, ``mtp*.safetensors`` or other safetensors files, in this
            order of precedence.

    Returns:
        The safetensors files; an empty list if there are none.
    """
    if place.is_file():
        return [place] if place.suffix == ".safetensors" else []
    for pattern in (*HEAD_PATTERNS, "*.safetensors"):
        if found := visible_files(place, pattern):
            return found
    return []


def has_head(place: Path) -> bool:
    """Return True if a file or folder has the weights of a draft head.

    Raises:
        ModelLoadError: a file is not a safetensors file, or there are several heads.
    """
    return find_head(tensor.name for tensor in stored_tensors(head_files(place))) is not None


def no_head_error(place: Path) -> ModelLoadError:
    """Return the error for a file or folder without a draft head."""
    advice = "set `model` to a safetensors file, a folder or a repository that has them"
    return ModelLoadError(f"{place} has no weights of a draft head: {advice}")


def has_only_head(place: Path) -> bool:
    """Return True if all weights in a folder belong to a single draft head. With several heads, return False.

    Raises:
        ModelLoadError: a file is not a safetensors file.
    """
    tensors = {tensor.name for tensor in stored_tensors(visible_files(place, "*.safetensors") or head_files(place))}
    names = _usable_head(tensors)
    return names is not None and tensors == {*names.published, *names.copies.values()}


def head_tensors(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors of the draft head among some tensors; an empty list if there is no head or several heads.

    Copies of the model's embedding table and LM head are left out.
    """
    names = _usable_head(tensor.name for tensor in tensors)
    wanted = set() if names is None else set(names.published)
    return [tensor for tensor in tensors if tensor.name in wanted]


def _usable_head(names: Iterable[str]) -> HeadNames | None:
    try:
        return find_head(names)
    except ModelLoadError:
        return None
