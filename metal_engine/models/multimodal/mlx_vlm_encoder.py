"""Image encoders of mlx-vlm, without its language models."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_engine.checkpoints.image_encoders import ENCODERS, bidirectional_layers
from metal_engine.models.multimodal.encoder import Axes, ImageFeatures, SampleImage
from metal_engine.models.multimodal.families import FAMILIES, EncoderFamily
from metal_engine.prompt_images import PIXEL_OFFSET, PIXEL_SCALE, PIXELS


class MlxVlmEncoder:
    """Encoder of a model of mlx-vlm (:class:`metal_engine.models.multimodal.encoder.ImageEncoder`).

    Each model of mlx-vlm has a method that merges features into the embeddings of a prompt. The encoder calls it with a
    prompt that consists of one image, so this code does not depend on the architecture. For deepstack models, and for
    families with their own function (:attr:`EncoderFamily.features`), the encoder does not call the method.

    Args:
        config: content of ``config.json``.
        hidden_size: size of the text model's embeddings.
        dtype: type of the text model's embeddings.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: mlx-vlm cannot create the model of this configuration, or the
            configuration has no image token.

    Attributes:
        model: model of mlx-vlm, with its language model until :meth:`take_language_model`. Its weights are random until
            they are loaded.
        image_token_id: token that stands for a feature in mlx-vlm's prompts.

    The interface describes the attributes ``axes``, ``num_deep_layers`` and ``bidirectional_layers``.
    """

    def __init__(self, config: Mapping[str, Any], hidden_size: int, dtype: mx.Dtype) -> None:
        module = ENCODERS[config["model_type"]]
        self._family: EncoderFamily = FAMILIES[module]
        self.model = _create(module, config)
        self.axes: Axes | None = self._family.axes(config)
        self.num_deep_layers = len(getattr(self.model.config.vision_config, "deepstack_visual_indexes", None) or ())
        self.bidirectional_layers = bidirectional_layers(config)
        # mlx-lm's Gemma multiplies features by this number, too, and rounds it as follows.
        rounded = mx.array(hidden_size**0.5, mx.bfloat16 if module == "gemma3" else dtype)
        self._scale = float(np.array(rounded.astype(mx.float32)))
        if module == "gemma3":
            # mlx-vlm divides features by the square root of this field, which checkpoints lack.
            self.model.config.hidden_size = self._scale**2
        self.image_token_id = _image_token_id(self.model.config)
        self._hidden_size, self._dtype = hidden_size, dtype

    def take_language_model(self) -> nn.Module:
        """Return mlx-vlm's language model, and replace it in :attr:`model` by embeddings that are all zero."""
        language_model: nn.Module = self.model.language_model
        self.model.language_model = _Placeholders(self._hidden_size, self._dtype)
        return language_model

    @contextmanager
    def language_model(self, language_model: nn.Module) -> Iterator[None]:
        """Put back a language model that :meth:`take_language_model` has returned, within a ``with`` block."""
        self.model.language_model = language_model
        try:
            yield
        finally:
            self.take_language_model()

    def encode(self, inputs: Mapping[str, np.ndarray], num_features: int) -> ImageFeatures:
        """See :class:`metal_engine.models.multimodal.encoder.ImageEncoder`."""
        given = {name: mx.array(array) for name, array in inputs.items()}
        pixels = given.pop(PIXELS)
        if PIXEL_SCALE in given:
            pixels = pixels * given.pop(PIXEL_SCALE) + given.pop(PIXEL_OFFSET)
        if self.num_deep_layers:  # mlx-vlm's method evaluates features, which would wait for the running step
            embeddings, by_layer = self.model.vision_tower(
                pixels.astype(self.model.vision_tower.patch_embed.proj.weight.dtype), given["image_grid_thw"]
            )
            return ImageFeatures(embeddings.astype(self._dtype), tuple(array.astype(self._dtype) for array in by_layer))
        if self._family.features is not None:
            return ImageFeatures(
                (self._family.features(self.model, pixels, given)[0] / self._scale).astype(self._dtype)
            )
        input_ids = mx.full((1, num_features), self.image_token_id, mx.int32)
        merged = self.model.get_input_embeddings(input_ids, pixels, **given).inputs_embeds[0]
        return ImageFeatures(merged.astype(self._dtype))

    def parameters(self) -> dict[str, Any]:
        """See :class:`metal_engine.models.multimodal.encoder.ImageEncoder`."""
        parameters: dict[str, Any] = self.model.parameters()
        return parameters

    def sample(self, rows: int, columns: int) -> SampleImage:
        """See :class:`metal_engine.models.multimodal.encoder.ImageEncoder`."""
        return self._family.sample(self.model.config, rows, columns)


class _Placeholders:
    """Replacement for a language model that embeds every token as zeros: an encoder's prompt has only image tokens."""

    def __init__(self, hidden_size: int, dtype: mx.Dtype) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype

    @property
    def model(self) -> _Placeholders:
        return self

    def embed_tokens(self, input_ids: mx.array) -> mx.array:
        return mx.zeros((*input_ids.shape, self._hidden_size), self._dtype)

    def get_rope_index(self, *args: Any, **kwargs: Any) -> tuple[None, None]:
        """Return no positions, which :class:`metal_engine.prompt_images.AxesPositions` provides for a prompt."""
        return None, None


def _create(module: str, config: Mapping[str, Any]) -> Any:
    """Return mlx-vlm's model of a configuration, with random weights that are not computed."""
    architecture = importlib.import_module(f"mlx_vlm.models.{module}")
    own = {name: value for name, value in config.items() if name != "audio_config"}
    model_config = architecture.ModelConfig.from_dict(own)
    for name, section in (("text_config", "TextConfig"), ("vision_config", "VisionConfig")):
        if isinstance(value := getattr(model_config, name), dict):
            setattr(model_config, name, getattr(architecture, section).from_dict(value))
    return architecture.Model(model_config)


def _image_token_id(config: Any) -> int:
    """Return the token that stands for a feature. Raises ValueError if the configuration has none."""
    names = ("image_token_index", "image_token_id", "media_placeholder_token_id")
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return int(value)
    raise ValueError(f"config.json has none of {', '.join(names)}")
