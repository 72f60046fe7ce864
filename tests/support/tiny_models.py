"""Small models with random weights, made here: other shapes and layer counts than the demo model's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes


def tiny_model(seed: int = 0, dtype: mx.Dtype = mx.float32, **config: Any) -> nn.Module:
    """An mlx-lm model of a few kilobytes; a llama unless ``config`` says otherwise."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **config,
    }
    return random_model(config, seed, dtype)


def random_model(config: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The mlx-lm model that ``config`` describes, with random weights."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda a: _spread(a, dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def _spread(parameter: mx.array, dtype: mx.Dtype) -> mx.array:
    """The default initialisation gives nearly flat logits, and zeros where a mistake would not be seen."""
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    if (parameter.max() == parameter.min()).item():
        parameter = parameter + 0.3 * mx.random.normal(parameter.shape)
    elif parameter.ndim > 1:
        parameter = parameter * 3
    return parameter.astype(dtype)
