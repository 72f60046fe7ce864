"""Finds mlx-lm's classes for a checkpoint. A multimodal model that mlx-lm lacks is loaded as its text model.

``text_config`` names the architecture of the text model, for example ``llama`` in SmolVLM and ``qwen3`` in InternVL.
"""

from __future__ import annotations

import logging
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.utils import _get_classes
from transformers import AutoConfig

from metal_engine.checkpoints.rope_parameters import fill_rope_fields

logger = logging.getLogger(__name__)

# Prefixes of the names of a text model's tensors in multimodal checkpoints.
_TEXT = re.compile(r"(?:model\.)?(?:language_model|text_model)\.")
# First parts of the names in mlx-lm's text models.
_ROOTS = ("model.", "lm_head.")
# Methods of mlx-lm's models that exist in some architectures only.
_OPTIONAL_METHODS = ("make_cache", "shard", "cast_predicate")


def model_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """Return the classes of the model and of its arguments for a configuration.

    The classes are mlx-lm's, or :class:`TextOfMultimodal` if mlx-lm has only the architecture of the text model.

    Published configurations omit fields with the default values of transformers. If mlx-lm requires such a field, it is
    added to ``text_config`` in place. :func:`fill_rope_fields` adds fields to both, ``config`` and ``text_config``.

    Raises:
        ValueError: mlx-lm has neither the architecture nor the architecture of the text model.
        SystemExit: a package that the architecture needs is missing (mlx-lm's olmo).
    """
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        fill_rope_fields(section)
    has_text = isinstance(text, dict) and isinstance(text.get("model_type"), str) and _complete(text)
    try:
        return _get_classes(config)
    except ValueError:
        if not has_text:
            raise
        return TextOfMultimodal, TextOfMultimodalArgs


def _complete(text: dict[str, Any]) -> bool:
    """Add required fields that a text model's configuration lacks, in place, with the defaults of transformers.

    Fields without a default stay missing. Returns False if mlx-lm lacks the architecture.
    """
    try:
        _, args_class = _get_classes(text)
    except ValueError:
        return False
    required = [f.name for f in fields(args_class) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in text]
    if missing:
        # transformers would make lists with an element per layer, or per label.
        names = {f.name for f in fields(args_class)} - {"num_hidden_layers"}
        try:
            defaults = AutoConfig.for_model(**{name: text[name] for name in names & text.keys()}).to_dict()
        except Exception as error:  # mlx-lm names the missing fields
            logger.debug("no defaults for the text model", exc_info=error)
            return True
        text.update({name: defaults[name] for name in missing if isinstance(defaults.get(name), int | float)})
    return True


@dataclass
class TextOfMultimodalArgs(BaseModelArgs):
    """Arguments of :class:`TextOfMultimodal`."""

    model_type: str
    text_config: dict[str, Any]


class TextOfMultimodal(nn.Module):
    """Text model of a checkpoint whose multimodal architecture mlx-lm lacks.

    The attribute ``language_model`` is mlx-lm's text model, as in mlx-lm's own multimodal classes.
    """

    def __init__(self, args: TextOfMultimodalArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        model_class, args_class = _get_classes(args.text_config)
        self.language_model = model_class(args_class.from_dict(args.text_config))
        for name in _OPTIONAL_METHODS:
            if hasattr(self.language_model, name):
                setattr(self, name, getattr(self.language_model, name))

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.language_model(inputs, cache=cache)
        return logits

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.language_model.layers
        return layers

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of the text model by mlx-lm's names. All other weights are left out."""
        text = {}
        for name, array in weights.items():
            within = _TEXT.sub("", name, count=1)
            if within != name or name.startswith("lm_head."):
                text[within if within.startswith(_ROOTS) else f"model.{within}"] = array
        sanitize = getattr(self.language_model, "sanitize", None)
        return {f"language_model.{k}": v for k, v in (text if sanitize is None else sanitize(text)).items()}
