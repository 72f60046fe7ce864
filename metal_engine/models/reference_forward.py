"""mlx-lm's own forward pass over its own caches, with attention in float32: the reference for packed forward passes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from metal_engine.models.cache_tree import map_caches
from metal_engine.models.layer_cache import Attention, AttentionCall, AttentionOwner, OwnedKeys


class _ExactCache(AttentionOwner):
    """A cache of mlx-lm over which attention is computed in float32. Everything else is delegated to the cache.

    In half precision, a CPU also rounds the scores. Key biases can make a few key elements large. The scores are then
    large too, and rounding them changes logits as much as a bug would.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store K and V, [B, num_kv_heads, T, head_dim]. Return all stored K and V."""
        keys, values = self._cache.update_and_fetch(keys, values)
        return OwnedKeys(keys, self), values

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        """Compute attention, [B, num_heads, T, v_head_dim], in the queries' dtype."""
        queries, keys, values = (_in_float32(array) for array in (call.queries, call.keys, call.values))
        out = original(queries, keys, values, None, call.scale, _in_float32(call.mask), _in_float32(call.sinks))
        return out.astype(call.queries.dtype)


def _in_float32(part: Any) -> Any:
    """Convert numbers to float32. Boolean masks, strings and None are returned unchanged."""
    return part.astype(mx.float32) if isinstance(part, mx.array) and part.dtype != mx.bool_ else part


def own_logits(model: nn.Module, tokens: mx.array) -> mx.array:
    """Return the logits of a prompt, [T] int32, from a patched model's own forward pass: [T, vocab_size]."""

    def exact(cache: Any) -> Any:
        return _ExactCache(cache) if type(cache) in (KVCache, RotatingKVCache) else cache

    return model(tokens[None], cache=map_caches(exact, make_prompt_cache(model)))[0]
