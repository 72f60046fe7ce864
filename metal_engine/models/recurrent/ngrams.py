"""Embeddings of n-grams (LongCat-Flash with n-grams), whose state is the last n - 1 token ids of a request.

mlx-lm stores fewer ids at the start of a request, and treats missing ids as 0. A state in our pool has a fixed size, so
our caches start with n - 1 zeros, which have the same effect.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.longcat_flash_ngram import NgramEmbedding

from metal_engine.models.recurrent.recording import RecordingState


class _NgramEmbedding(NgramEmbedding):
    """mlx-lm's embedding of n-grams, with a state of fixed size. mlx-lm's own caches are used unchanged."""

    def __call__(self, input_ids: mx.array, cache: Any = None) -> mx.array:
        if isinstance(cache, RecordingState):
            cache.may_hold_tokens = True
        if isinstance(cache, ArraysCache) and type(cache) is not ArraysCache and cache[0] is None:
            cache[0] = mx.zeros((input_ids.shape[0], self.n - 1), mx.int64)
        return super().__call__(input_ids, cache)


def patch_ngrams(model: nn.Module) -> None:
    """Give a model's embeddings of n-grams a state of fixed size over our caches."""
    for module in model.modules():
        if type(module) is NgramEmbedding:
            module.__class__ = _NgramEmbedding
