"""Refuses models whose layers share the keys that an index selects, such as GLM-5.2. mlx-lm does not support them.

An index is the part of a layer that selects the keys to which the layer attends (:mod:`metal_engine.models.indexer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from metal_engine.errors import UnsupportedModelError

# Architectures of mlx-lm with an index in each layer.
_WITH_INDEXES = ("deepseek_v32", "glm_moe_dsa")
_INDEX = re.compile(r"\blayers\.(\d+)\.self_attn\.indexer\.")


def check_indexes(name: str, config: dict[str, Any], tensor_names: Iterable[str] = ()) -> None:
    """Refuse a model whose layers do not all have an index: a layer without one uses the selection of an earlier layer.

    mlx-lm creates an index in every layer. The selections of an index without weights would be random.

    Args:
        name: name of the model, for the message.
        config: content of ``config.json``.
        tensor_names: names of the model's tensors, if they are known.

    Raises:
        UnsupportedModelError: layers share selections, according to the configuration or to the tensors.
    """
    text_config = next((one for one in (config, config.get("text_config")) if _has_indexes(one)), None)
    if text_config is not None and (_shares_selections(text_config) or _lacks_indexes(text_config, tensor_names)):
        raise UnsupportedModelError(
            f"{name}: some layers attend to the keys that another layer's index picks (indexer_types), while "
            f"mlx-lm's {text_config['model_type']} needs an index in each layer (mlx-lm issues 1418 and 1453)"
        )


def _has_indexes(config: Any) -> bool:
    return isinstance(config, dict) and config.get("model_type") in _WITH_INDEXES


def _shares_selections(config: dict[str, Any]) -> bool:
    types, every, pattern = (config.get(key) for key in ("indexer_types", "index_topk_freq", "index_topk_pattern"))
    has_shared = isinstance(types, list) and any(kind != "full" for kind in types)
    has_shared |= isinstance(pattern, str | list) and any(kind != "F" for kind in pattern)
    return has_shared or (isinstance(every, int | float) and every > 1)


def _lacks_indexes(config: dict[str, Any], tensor_names: Iterable[str]) -> bool:
    """Return True if some layers have the tensors of an index and other layers do not."""
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return False
    found = {int(match[1]) for name in tensor_names if (match := _INDEX.search(name))}
    return 0 < sum(layer < num_layers for layer in found) < num_layers
