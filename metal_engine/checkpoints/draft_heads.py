"""Reads the weights of a draft head (multi-token prediction). mlx-lm drops them when it loads a model.

Published names, which sidecars may have without ``mtp.``::

    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.layers.0.*, mtp.norm

The layer's weights pass through the ``sanitize`` method of the head's model, under the name of a layer of the model.
This stacks experts, splits latents and shifts norms in mlx-lm's way for that architecture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_engine.checkpoints.checkpoint import StoredTensor, stored_tensors
from metal_engine.checkpoints.files import read_json
from metal_engine.errors import ModelLoadError, UnsupportedModelError, short

# Names of a head, below "mtp.", in the order in which a head computes them.
_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
_PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?mtp\.")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(.+)")
# Weights of recurrent layers tell published checkpoints from converted ones: mlx-lm moves their last axis.
_CONVOLUTION = "conv1d.weight"


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a draft head.

    Attributes:
        arrays: arrays by the names of :class:`metal_engine.models.draft_head.DraftHead`.
        hidden_first: True if ``fc`` reads the hidden state before the embedding.
    """

    arrays: dict[str, mx.array]
    hidden_first: bool = False


def last_attention_layer(model: nn.Module) -> int:
    """Return the index of a model's last layer with attention, which a draft head has, too.

    Raises:
        UnsupportedModelError: there is no such layer.
    """
    indices = [i for i, layer in enumerate(model.layers) if "self_attn" in layer]
    if not indices:
        raise UnsupportedModelError("it has no layer with attention of the usual form")
    return indices[-1]


def read_head(place: Path, model: nn.Module) -> HeadWeights:
    """Read a draft head.

    Args:
        place: a file, or a folder with ``mtp/*.safetensors``, ``mtp*.safetensors`` or other safetensors files, in this
            order of precedence.
        model: mlx-lm model of the head.

    Raises:
        ModelLoadError: the files have no head, or the head cannot be used. The message gives the reason.
    """
    files = _head_files(place)
    tensors = {path: list(stored_tensors([path])) for path in files}
    is_bare = not any(_PREFIX.match(one.name) for each in tensors.values() for one in each)
    named: dict[str, mx.array] = {}
    for path, each in tensors.items():
        wanted = [one.name for one in each if is_bare or _PREFIX.match(one.name)]
        arrays: Any = mx.load(str(path)) if wanted else {}
        named |= {_PREFIX.sub("", name): arrays[name] for name in wanted}
    if not {"fc.weight", *_NORMS} <= named.keys():
        raise ModelLoadError(
            f"{place} has no weights of a draft head (mtp.*): set `model` to a file or a folder that has them"
        )
    config_file = (place if place.is_dir() else place.parent) / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    parts, layer = _split(named, place)
    norms = _norms_of(config, [one for each in tensors.values() for one in each])
    layer, is_shifted = _converted(layer, model, norms)
    if is_shifted:
        parts |= {name: parts[name] + 1.0 for name in _NORMS}
    arrays = parts | {f"layers.0.{name}": array for name, array in layer.items()}
    return HeadWeights(arrays, hidden_first=config.get("fc_input") == ["hidden", "embedding"])


def _head_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    for pattern in ("mtp/*.safetensors", "mtp*.safetensors", "*.safetensors"):
        if found := sorted(place.glob(pattern)):
            return found
    return []


def _split(named: dict[str, mx.array], place: Path) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Separate the weights of a head's layer, by their names within the layer, from the head's other weights."""
    parts: dict[str, mx.array] = {}
    layer: dict[str, mx.array] = {}
    for name, array in named.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            parts[name] = array
        elif match[1] != "0":
            raise ModelLoadError(f"{place} has a draft head of several layers, which is not supported")
        else:
            layer[match[2]] = array
    return parts, layer


def _norms_of(config: dict[str, Any], tensors: list[StoredTensor]) -> str | None:
    """Return "shifted" if norms multiply by 1 + weight, "unshifted" if they multiply by the weight; None if unknown.

    The distinction exists only for some architectures, whose published norms are shifted.
    """
    norms = config.get("norms")
    if norms not in (None, "shifted", "unshifted"):
        raise ModelLoadError(f"config.json: norms must be shifted or unshifted, not {short(norms)}")
    convolutions = [one for one in tensors if one.name.endswith(_CONVOLUTION)]
    if norms is None and any(one.shape[-1] != 1 for one in convolutions):
        return "shifted"
    return norms


def _converted(layer: dict[str, mx.array], model: nn.Module, norms: str | None) -> tuple[dict[str, mx.array], bool]:
    """Return a layer's weights in mlx-lm's form, and whether the model's ``sanitize`` has shifted its norms.

    Raises:
        ModelLoadError: the files do not show whether the norms are shifted.
    """
    unshifted, is_shifted = _sanitized(layer, model, as_published=False)
    published, may_be_shifted = _sanitized(layer, model, as_published=True)
    if is_shifted or not may_be_shifted:  # `sanitize` decides by the layer's own names, or never shifts
        return unshifted, is_shifted
    if norms is None:
        raise ModelLoadError(
            'its norms may multiply by the weight or by 1 + weight, and its files do not say which: set "norms" to '
            '"shifted" (1 + weight, as published) or "unshifted" (as converted) in the config.json beside them'
        )
    return (published, True) if norms == "shifted" else (unshifted, False)


def _sanitized(layer: dict[str, mx.array], model: nn.Module, *, as_published: bool) -> tuple[dict[str, mx.array], bool]:
    of_model = model.layers[last_attention_layer(model)]
    prefix = next(name for name, module in model.named_modules() if module is of_model) + "."
    named = {prefix + name: array for name, array in layer.items()}
    if as_published:
        named[prefix + _CONVOLUTION] = mx.zeros((1, 1, 4))
    before = named.get(f"{prefix}input_layernorm.weight")
    if hasattr(model, "sanitize"):
        named = model.sanitize(named)
    is_shifted = named.get(f"{prefix}input_layernorm.weight") is not before
    own = {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}
    own.pop(_CONVOLUTION, None)
    return _with_stacked_experts(own), is_shifted


def _with_stacked_experts(layer: dict[str, mx.array]) -> dict[str, mx.array]:
    """Stack weights of single experts that the model's ``sanitize`` has left, as heads store them."""
    stacks: dict[str, dict[int, mx.array]] = {}
    others = {}
    for name, array in layer.items():
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}switch_mlp.{match[3]}", {})[int(match[2])] = array
        else:
            others[name] = array
    return others | {name: mx.stack([each[i] for i in sorted(each)]) for name, each in stacks.items()}
