"""Weights of embedding models, which are often those of a model without its LM head, under shorter names.

Qwen3-Embedding's are: ``layers.0...`` where mlx-lm has ``model.layers.0...``; its 8B has an LM head of its own by its
configuration, and none in its files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from metal_engine.checkpoints.checkpoint import StoredTensor

_HEAD = "lm_head."
_TRUNK = "model."
_EMBEDDING = "embed_tokens."


@dataclass(frozen=True)
class EmbeddingWeights:
    """How the weights of an embedding model differ from those of the model it was made of.

    Attributes:
        lacks_trunk_name: their names lack the trunk's.
        lacks_head: there is no LM head, and the configuration says that the embedding is none.
    """

    lacks_trunk_name: bool = False
    lacks_head: bool = False

    @staticmethod
    def of(tensors: Iterable[StoredTensor], config: dict[str, Any]) -> EmbeddingWeights:
        names = [tensor.name for tensor in tensors]
        is_untied = config.get("tie_word_embeddings") is False
        has_head = any(name.startswith(_HEAD) for name in names)
        return EmbeddingWeights(any(name.startswith(_EMBEDDING) for name in names), is_untied and not has_head)

    @property
    def config(self) -> dict[str, Any] | None:
        """What the configuration must say for mlx-lm to load them: a head that is the embedding is not looked for."""
        return {"tie_word_embeddings": True} if self.lacks_head else None

    def model_classes(self, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        """mlx-lm's classes for the model; its weights are given their names when they are loaded."""
        model_class, args_class = _get_classes(config)
        return (_with_trunk_name(model_class) if self.lacks_trunk_name else model_class), args_class


def _with_trunk_name(model_class: type[nn.Module]) -> type[nn.Module]:
    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = {k if k.startswith((_TRUNK, _HEAD)) else _TRUNK + k: v for k, v in weights.items()}
        own = getattr(model_class, "sanitize", None)
        return named if own is None else own(self, named)

    return type(model_class.__name__, (model_class,), {"sanitize": sanitize})
