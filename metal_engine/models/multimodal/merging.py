"""Merges image features into a packed forward pass.

Features replace the embeddings of image tokens. With deepstack, features are also added to the outputs of the first
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_engine.errors import UnsupportedModelError
from metal_engine.models.current_step import CurrentStep
from metal_engine.models.multimodal.axes_rope import use_axes
from metal_engine.models.multimodal.encoder import ImageEncoder


@dataclass(frozen=True)
class StepImages:
    """Image features for the rows of one step.

    Attributes:
        rows: indices of the packed rows with features, [V] int32.
        embeddings: features that replace the rows' embeddings, [V, hidden_size].
        by_layer: features that are added to the outputs of the first layers, [V, hidden_size] for each of these layers.
    """

    rows: mx.array
    embeddings: mx.array
    by_layer: tuple[mx.array, ...] = ()


class ImageInput:
    """Image input of a text model. The constructor changes the model in place. Steps without images compute as before.

    Args:
        model: mlx-lm model.
        step: running step of the model.
        encoder: image encoder, whose features the model takes.

    Raises:
        UnsupportedModelError: the model does not have exactly one embedding of tokens, or its rotary embeddings do not
            fit the encoder's axes.

    Attributes:
        encoder: image encoder.
    """

    def __init__(self, model: nn.Module, step: CurrentStep, encoder: ImageEncoder) -> None:
        kinds = nn.Embedding | nn.QuantizedEmbedding
        found: dict[str, nn.Module] = {
            name: module for name, module in model.named_modules() if isinstance(module, kinds)
        }
        by_layer = [found.pop(name) for name in list(found) if name.endswith("embed_tokens_per_layer")]
        embeddings = list(found.values())
        if len(embeddings) != 1:
            raise UnsupportedModelError(f"features of images need a model with one embedding, not {len(embeddings)}")
        if encoder.axes is not None:
            use_axes(model, encoder.axes)
        embeddings[0].__class__ = _merging(type(embeddings[0]), step)
        for embedding in by_layer:
            embedding.__class__ = _padding(type(embedding), step)
        for index, layer in enumerate(model.layers[: encoder.num_deep_layers]):
            layer.__class__ = _adding(type(layer), step, index)
        self.encoder = encoder


def _merging(cls: type[nn.Module], step: CurrentStep) -> type[nn.Module]:
    """Return a class of embeddings that takes the features of the running step."""
    call: Callable[..., mx.array] = cls.__call__

    def embed(self: nn.Module, ids: mx.array) -> mx.array:
        embedded = call(self, ids)  # [N, 1, hidden_size]
        if step.images is not None:
            embedded[step.images.rows, 0] = step.images.embeddings.astype(embedded.dtype)
        return embedded

    return type(cls.__name__, (cls,), {"__call__": embed})


def _padding(cls: type[nn.Module], step: CurrentStep) -> type[nn.Module]:
    """Return a class of per-layer embeddings (Gemma 4) that looks up the padding token, 0, for rows with features."""
    call: Callable[..., mx.array] = cls.__call__

    def embed(self: nn.Module, ids: mx.array) -> mx.array:
        if step.images is not None:
            is_text = mx.ones_like(ids)  # [N, 1]
            is_text[step.images.rows, 0] = 0
            ids = ids * is_text
        return call(self, ids)

    return type(cls.__name__, (cls,), {"__call__": embed})


def _adding(cls: type[nn.Module], step: CurrentStep, index: int) -> type[nn.Module]:
    """Return a class of layers that adds the running step's features for layer ``index`` to its output."""
    call: Callable[..., Any] = cls.__call__

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = call(self, *args, **kwargs)  # [N, 1, hidden_size]
        if step.images is None:
            return hidden
        return hidden.at[step.images.rows, 0].add(step.images.by_layer[index].astype(hidden.dtype))

    return type(cls.__name__, (cls,), {"__call__": run})
