"""Attention masks of Gemma's language models as published by Hugging Face, for mlx-vlm's models, whose masks differ.

In mlx-vlm, ``Model.__call__`` of Gemma 3 lets every token attend to every token, and generation is causal. By the
published definition, attention is causal, but a token of an image also attends to the later tokens of the image. In
layers with a window, no token attends to keys before its window. In Gemma 4, layers without a window are causal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_engine.prompt_images import PromptImage


@contextmanager
def published_masks(language_model: nn.Module, images: Sequence[PromptImage]) -> Iterator[None]:
    """Make a language model of mlx-vlm use the published masks for a whole prompt, within a ``with`` block.

    Replaces a function in the module of the model's class. Within the block, no other thread may run a model of this
    class.

    Args:
        language_model: language model of mlx-vlm.
        images: images of the prompt. The tokens of each image attend to each other.
    """
    module: Any = sys.modules[type(language_model).__module__]
    own = module.create_attention_mask

    def create(h: mx.array, cache: Any = None, window_size: int | None = None, **options: Any) -> Any:
        if h.shape[1] == 1:  # a decode
            return own(h, cache, window_size=window_size, **options)
        return _mask(h.shape[1], images, window_size)

    module.create_attention_mask = create
    try:
        yield
    finally:
        module.create_attention_mask = own


def _mask(num_tokens: int, images: Sequence[PromptImage], window: int | None) -> mx.array:
    """Return a prompt's attention mask, [T, T] bool: True if the row's token attends to the column's token."""
    query, key = np.arange(num_tokens)[:, None], np.arange(num_tokens)
    seen = key <= query
    for image in images:
        if image.bidirectional_layers == "every layer" or window is not None:
            seen[image.start : image.stop, image.start : image.stop] = True
    return mx.array(seen if window is None else seen & (key > query - window))
