"""Adapts mlx-lm to weights of embedding models, which often have no LM head and no prefix ``model.`` in their names.

Qwen3-Embedding, for example, has ``layers.0...`` instead of mlx-lm's ``model.layers.0...``. The
configuration of the 8B model declares an LM head that its files lack.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_engine.checkpoints.metadata import StoredTensor
from metal_engine.checkpoints.model_classes import model_classes

_HEAD = "lm_head."
_TRUNK = "model."
_EMBEDDING = "embed_tokens."


@dataclass(frozen=True)
class EmbeddingWeights:
    """Differences between the weights of an embedding model and its base model's weights.

    Attributes:
        lacks_trunk_name: True if the names lack the prefix of the trunk.
        lacks_head: True if the configuration declares a separate LM head that the files lack.
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
        """Fields to change in the configuration so that mlx-lm can load the weights; None without changes.

        A model without a head is declared to have tied embeddings, so that mlx-lm expects no weights of an LM head.
        """
        return {"tie_word_embeddings": True} if self.lacks_head else None

    def model_classes(self, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        """Return mlx-lm's classes of the model and of its arguments.

        If the names lack the prefix, the result is a subclass of the model that adds the prefix when it loads weights.
        """
        model_class, args_class = model_classes(config)
        return (_with_trunk_name(model_class) if self.lacks_trunk_name else model_class), args_class


def _with_trunk_name(model_class: type[nn.Module]) -> type[nn.Module]:
    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = {k if k.startswith((_TRUNK, _HEAD)) else _TRUNK + k: v for k, v in weights.items()}
        own = getattr(model_class, "sanitize", None)
        return named if own is None else own(self, named)

    return type(model_class.__name__, (model_class,), {"sanitize": sanitize})
