"""mlx-lm's own caches, with keys and values rounded as in a quantized KV cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.kv_cache.spec import QuantizedKVSpec, StateSpec
from metal_engine.models.cache_tree import CacheTree, map_caches


class RoundedCache:
    """Wrapper of an mlx-lm cache that rounds keys and values. All other behaviour is the cache's own."""

    def __init__(self, cache: Any, spec: QuantizedKVSpec) -> None:
        self._cache = cache
        self._spec = spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Store and return K and V, [B, num_kv_heads, T, head_dim].

        With latent attention, K and V are parts of one row.
        """
        if self._spec.latent_dim is None:
            return self._cache.update_and_fetch(self._rounded(keys), self._rounded(values))
        rows = self._rounded(mx.concatenate([keys, values], axis=-1))
        return self._cache.update_and_fetch(*mx.split(rows, [self._spec.latent_dim], axis=-1))

    def _rounded(self, rows: mx.array) -> mx.array:
        group_size, bits = self._spec.group_size, self._spec.bits
        packed, *of_groups = mx.quantize(rows.astype(self._spec.dtype), group_size=group_size, bits=bits)
        scales, biases = (array.astype(mx.float32) for array in of_groups)
        return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits).astype(rows.dtype)


def own_caches(model: nn.Module, specs: list[StateSpec]) -> CacheTree:
    """Return the caches that mlx-lm makes for a model. A cache rounds if its layer's KV is quantized.

    Args:
        specs: state spec of each cache, in order.
    """
    if not any(isinstance(spec, QuantizedKVSpec) for spec in specs):
        return list(make_prompt_cache(model))
    in_order = iter(specs)

    def rounding(cache: Any) -> Any:
        spec = next(in_order)
        return RoundedCache(cache, spec) if isinstance(spec, QuantizedKVSpec) else cache

    return map_caches(rounding, make_prompt_cache(model))
