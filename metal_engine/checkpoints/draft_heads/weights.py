"""Reads the weights of a draft head (multi-token prediction). mlx-lm drops these weights when it loads a model.

The weights of a block are named like a layer of the model with the same structure, and converted by the model's
``sanitize`` method. The conversion stacks experts, splits latents and shifts norms as mlx-lm does for the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metal_engine.checkpoints.draft_heads.names import (
    EMBEDDING_TABLE,
    FP8_SCALES,
    LM_HEAD,
    HeadNames,
    find_head,
    head_files,
    no_head_error,
)
from metal_engine.checkpoints.draft_heads.quantization import stored_quantization, without_fp8
from metal_engine.checkpoints.file_checks import read_json
from metal_engine.checkpoints.metadata import StoredTensor, stored_tensors
from metal_engine.errors import ModelLoadError, UnsupportedModelError, one_line, short

_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(.+)")
_STACK = re.compile(r"(.*\.)switch_mlp\.(.+)")
# Weights whose shape distinguishes published checkpoints from converted ones: mlx-lm moves their last axis.
_CONVOLUTION = "conv1d.weight"
# Type of heads that mlx-vlm has written. Both when it reads and when it writes, mlx-vlm shifts norms if names begin
# with "mtp.".
_MLX_VLM = "qwen3_5_mtp"
# Rows of a repeated weight that are compared with the model's, and their largest relative difference. Quantization to
# 4 bits changes weights by 0.1, and unrelated weights differ by about 1.4.
_COMPARED_ROWS = 8
_MAX_DIFFERENCE = 0.5
# Values of "fc_input" in the configuration: order of the projection's inputs.
_ORDERS = (["embedding", "hidden"], ["hidden", "embedding"])


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a draft head.

    Attributes:
        arrays: arrays by the names of :class:`metal_engine.models.draft_head.DraftHead`.
        layers: for each block, the index of the layer of the model that has the same structure.
        hidden_first: True if ``fc`` reads the hidden state before the embedding.
    """

    arrays: dict[str, mx.array]
    layers: tuple[int, ...]
    hidden_first: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of rows of the head's own embedding table; 0 if the head uses the model's table."""
        table = self.arrays.get(f"{EMBEDDING_TABLE}.weight")
        return 0 if table is None else len(table)


def last_attention_layer(model: nn.Module) -> int:
    """Return the index of a model's last layer with attention. The blocks of a draft head have attention, too.

    Raises:
        UnsupportedModelError: there is no such layer.
    """
    indices = [i for i, layer in enumerate(model.layers) if has_attention(layer)]
    if not indices:
        raise UnsupportedModelError("no layer of the model has attention of the usual form")
    return indices[-1]


def has_attention(layer: nn.Module) -> bool:
    """Return True if a layer has attention, under one of the names that mlx-lm uses for models with draft heads."""
    return "self_attn" in layer or "o_proj" in layer.get("mixer", ())


def read_head(place: Path, model: nn.Module) -> HeadWeights:
    """Read a draft head.

    Args:
        place: a file or a folder (:func:`head_files`).
        model: mlx-lm model that the head belongs to.

    Raises:
        ModelLoadError: the files have no head, or the head cannot be used. The message gives the reason.
    """
    tensors = {path: list(stored_tensors([path])) for path in head_files(place)}
    names = find_head(one.name for each in tensors.values() for one in each)
    if names is None:
        raise no_head_error(place)
    config_file = (place if place.is_dir() else place.parent) / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    arrays = without_fp8(_arrays(tensors, {*names.published, *names.copies.values()}), config)
    norms = _norms_of(config, [one for each in tensors.values() for one in each])
    found = _present(names.parts, arrays) | _own_table(_present(names.copies, arrays), names, model)
    layers: list[int] = []
    is_shifted = False
    for i, block in enumerate(names.blocks):
        stored = _present(block, arrays)
        index = _similar_layer(stored, model)
        converted, block_is_shifted = _converted(stored, model, index, norms)
        found |= {f"layers.{i}.{name}": array for name, array in converted.items()}
        layers.append(index)
        is_shifted |= block_is_shifted
    if is_shifted:
        found |= {name: found[name] + 1.0 for name in _NORMS}
    if not names.has_last_norm:
        found |= _weights_of_last_norm(model)
    return HeadWeights(found, tuple(layers), _is_hidden_first(config, names))


def _arrays(tensors: dict[Path, list[StoredTensor]], wanted: set[str]) -> dict[str, mx.array]:
    """Return the arrays whose names are in ``wanted``, as lazy arrays by name.

    Args:
        tensors: tensors of each file, from its header.
    """
    found: dict[str, mx.array] = {}
    for path, each in tensors.items():
        if names := [one.name for one in each if one.name in wanted]:
            stored: Any = mx.load(str(path))
            found |= {name: stored[name] for name in names}
    return found


def _present(names: dict[str, str], arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return arrays by the engine's names. Leaves out names without an array: the names of removed FP8 scales."""
    return {name: arrays[published] for name, published in names.items() if published in arrays}


def _is_hidden_first(config: dict[str, Any], names: HeadNames) -> bool:
    """Return True if the projection reads the hidden state before the embedding. The configuration decides first.

    Raises:
        ModelLoadError: ``fc_input`` in the configuration is invalid.
    """
    order = config.get("fc_input")
    if order is None:
        return names.hidden_first
    if order not in _ORDERS:
        raise ModelLoadError(f"config.json: fc_input must be {_ORDERS[0]} or {_ORDERS[1]}, not {short(order)}")
    return bool(order == _ORDERS[1])


# --- weights that the head shares with the model ---


def _own_table(copies: dict[str, mx.array], names: HeadNames, model: nn.Module) -> dict[str, mx.array]:
    """Return the weights of the head's own embedding table; an empty dict if the head uses or copies the model's table.

    Args:
        copies: arrays by names that begin with ``embed_tokens`` or ``lm_head``.

    Raises:
        ModelLoadError: the head has an LM head that differs from the model's.
    """
    table = embedding_table(model)
    modules = dict(model.named_modules())
    own_head = next((modules[name] for name in modules if name.rpartition(".")[2] == LM_HEAD), table)
    if not _is_copy(LM_HEAD, copies, own_head):
        published = names.copies[f"{LM_HEAD}.weight"]
        raise ModelLoadError(f"its {published} is not a copy of the model's, and a draft head uses the model's")
    if _is_copy(EMBEDDING_TABLE, copies, table):
        return {}
    return {name: array for name, array in copies.items() if name.startswith(EMBEDDING_TABLE)}


def _is_copy(name: str, copies: dict[str, mx.array], module: nn.Module) -> bool:
    """Return True if ``copies`` has no weights of this name, or if their first rows are close to the module's rows.

    Args:
        name: ``embed_tokens`` or ``lm_head``.
        copies: stored arrays by name. Arrays whose names do not begin with ``name`` are ignored.
        module: module of the model.
    """
    if f"{name}.weight" not in copies:
        return True
    own = {kind: array for kind, array in module.items() if isinstance(array, mx.array)}
    form = {key: getattr(module, key) for key in ("group_size", "bits", "mode")} if "scales" in own else {}
    own_rows = _first_rows(own, form)
    stored = {one.rpartition(".")[2]: array for one, array in copies.items() if one.startswith(name)}
    form = stored_quantization(name, own_rows.shape[-1], copies) if "scales" in stored else {}
    rows = _first_rows(stored, form)
    if rows.shape != own_rows.shape:
        return False
    return bool((mx.linalg.norm(rows - own_rows) <= _MAX_DIFFERENCE * mx.linalg.norm(rows)).item())


def _first_rows(weights: dict[str, mx.array], form: dict[str, Any]) -> mx.array:
    """Return the first rows of a table in float32.

    Args:
        form: arguments of ``mx.dequantize``; empty if the weights are not quantized.
    """
    rows = {kind: array[:_COMPARED_ROWS] for kind, array in weights.items()}
    plain = mx.dequantize(rows["weight"], rows["scales"], rows.get("biases"), **form) if form else rows["weight"]
    return plain.astype(mx.float32)


def embedding_table(model: nn.Module) -> nn.Module:
    """Return a model's embedding table.

    Raises:
        UnsupportedModelError: there is not exactly one table.
    """
    names = (EMBEDDING_TABLE, "embeddings")
    tables = [module[name] for module in model.modules() for name in names if name in module]
    if len(tables) != 1:
        raise UnsupportedModelError(f"the model has {len(tables)} embedding tables; a draft head needs exactly one")
    return tables[0]


def _weights_of_last_norm(model: nn.Module) -> dict[str, mx.array]:
    """Return the weights ``norm.weight`` and ``hidden_scale`` of a head that uses the model's last norm.

    Such a head reads the hidden states before the model's last norm. Up to a factor per token, they equal the hidden
    states after the norm divided by the norm's weight. The head's own norm removes any factor per token.

    Raises:
        UnsupportedModelError: the model's last norm was not found.
    """
    norms = [module["norm"].weight for module in model.modules() if "layers" in module and "norm" in module]
    if len(norms) != 1:
        raise UnsupportedModelError("its draft head needs the model's last norm, which was not found")
    weight = norms[0].astype(mx.float32)
    return {"norm.weight": norms[0], "hidden_scale": mx.where(weight == 0, 0.0, 1.0 / weight)}


# --- blocks ---


def _similar_layer(block: dict[str, mx.array], model: nn.Module) -> int:
    """Return the index of the model's last layer whose weights have the same names as the block's weights.

    If there is no such layer, return the index of the last layer with attention.
    """
    tried: set[frozenset[str]] = set()
    for index in reversed(range(len(model.layers))):
        flat: Any = tree_flatten(model.layers[index].parameters())
        expected = frozenset(_modules_of(dict(flat)))
        if expected not in tried and frozenset(_modules_of(_sanitized(block, model, index)[0])) == expected:
            return index
        tried.add(expected)
    return last_attention_layer(model)


def _modules_of(weights: dict[str, mx.array]) -> Iterator[str]:
    """Yield the names of weights, without the scales and biases of quantized modules."""
    for name in weights:
        module, _, kind = name.rpartition(".")
        if kind not in ("scales", "biases", "global_scale") or f"{module}.weight" not in weights:
            yield name


def _norms_of(config: dict[str, Any], tensors: list[StoredTensor]) -> str | None:
    """Return "shifted" if norms multiply by 1 + weight, "unshifted" if they multiply by the weight; None if unknown.

    The result matters only for some architectures, whose published norms are shifted. The configuration decides first,
    then the names and shapes of the tensors. Raises ModelLoadError if ``norms`` in the configuration is invalid.
    """
    norms = config.get("norms")
    if norms not in (None, "shifted", "unshifted"):
        raise ModelLoadError(f"config.json: norms must be shifted or unshifted, not {short(norms)}")
    if norms is not None:
        return norms
    names = [one.name for one in tensors]
    is_raw = any(one.name.endswith(_CONVOLUTION) and one.shape[-1] != 1 for one in tensors)
    if is_raw or any(name.endswith(FP8_SCALES) for name in names):  # MLX's converters keep neither
        return "shifted"
    if config.get("model_type") == _MLX_VLM:
        return "shifted" if any(name.startswith("mtp.") for name in names) else "unshifted"
    return None


def _converted(
    block: dict[str, mx.array], model: nn.Module, index: int, norms: str | None
) -> tuple[dict[str, mx.array], bool]:
    """Return a block's weights in mlx-lm's form, and True if 1 was added to the weights of its norms.

    Args:
        index: index of the model's layer with the same structure.
        norms: result of :func:`_norms_of`.

    Raises:
        ModelLoadError: the files do not show whether the norms are shifted.
    """
    unshifted, is_shifted = _sanitized(block, model, index)
    published, may_be_shifted = _sanitized(block, model, index, as_published=True)
    if is_shifted and norms == "unshifted":  # `sanitize` decides by the names of the experts
        return unshifted | _norms(block), False
    if is_shifted or not may_be_shifted:  # `sanitize` decides by the block's own names, or never shifts
        return unshifted, is_shifted
    if norms is None:
        raise ModelLoadError(
            'its norms may multiply by the weight or by 1 + weight, and its files do not say which: set "norms" to '
            '"shifted" (1 + weight, as published) or "unshifted" (as converted) in the config.json beside them'
        )
    return (unshifted | _norms(published), True) if norms == "shifted" else (unshifted, False)


def _norms(block: dict[str, mx.array]) -> dict[str, mx.array]:
    return {name: array for name, array in block.items() if name.endswith("norm.weight")}


def _sanitized(
    block: dict[str, mx.array], model: nn.Module, index: int, *, as_published: bool = False
) -> tuple[dict[str, mx.array], bool]:
    """Convert a block's weights with the model's ``sanitize``, under the names of the layer ``index``.

    Args:
        as_published: True to add names that make ``sanitize`` treat the weights as published ones.

    Returns:
        The converted weights by their names in the layer, and True if ``sanitize`` has shifted the norms.

    Raises:
        ModelLoadError: ``sanitize`` fails for these weights.
    """
    layer = model.layers[index]
    prefix = next(name for name, module in model.named_modules() if module is layer) + "."
    named = {prefix + name: array for name, array in (_with_single_experts(block) if as_published else block).items()}
    if as_published:
        named[prefix + _CONVOLUTION] = mx.zeros((1, 1, 4))
    before = named.get(f"{prefix}input_layernorm.weight")
    if hasattr(model, "sanitize"):
        try:
            named = model.sanitize(named)
        except Exception as error:
            problem = f"{type(error).__name__}: {one_line(error)}"
            raise ModelLoadError(f"its weights do not fit the model ({problem})") from error
    is_shifted = named.get(f"{prefix}input_layernorm.weight") is not before
    own = {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}
    own.pop(_CONVOLUTION, None)
    return _with_stacked_experts(own), is_shifted


def _with_single_experts(block: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return a block's weights with stacked experts split into single experts, under their published names.

    Qwen3-Next's ``sanitize`` shifts norms only if there are such names.
    """
    found: dict[str, mx.array] = {}
    for name, array in block.items():
        if match := _STACK.fullmatch(name):
            found |= {f"{match[1]}experts.{i}.{match[2]}": one for i, one in enumerate(array)}
        else:
            found[name] = array
    return found


def _with_stacked_experts(block: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return a block's weights with single experts stacked. Experts that ``sanitize`` has stacked stay unchanged."""
    stacks: dict[str, dict[int, mx.array]] = {}
    others = {}
    for name, array in block.items():
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}switch_mlp.{match[3]}", {})[int(match[2])] = array
        else:
            others[name] = array
    return others | {name: mx.stack([each[i] for i in sorted(each)]) for name, each in stacks.items()}
