"""Attention layers with a softcap on their scores (Gemma 2), which compute attention themselves.

mlx-lm's shared attention function has no softcap. A layer with a softcap therefore multiplies queries and keys in its
own code, which cannot use a paged cache. If the layer's cache is one of ours, :func:`_attend_with_softcap` replaces
that code and uses the layer's projections. The check at load compares the results.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from metal_engine.models.layer_cache import AttendingCache, AttentionCall

_PARTS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "rope"),
    *("n_heads", "n_kv_heads", "scale", "attn_logit_softcapping"),
)


def patch_softcapped_layers(model: nn.Module) -> bool:
    """Make every layer with a softcap attend through our caches. Return True if the model has such layers.

    A layer has a softcap if it has all attributes in ``_PARTS``.
    """
    layers = [m for m in model.modules() if all(hasattr(m, part) for part in _PARTS)]
    for layer in layers:
        cls = type(layer)
        layer.__class__ = type(cls.__name__, (cls,), {"__call__": _attend_with_softcap})
    return bool(layers)


def _attend_with_softcap(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """Map rows x [N, 1, hidden_size] to the layer's outputs [N, 1, hidden_size]."""
    if not isinstance(cache, AttendingCache):
        return super(type(self), self).__call__(x, mask, cache)
    num_rows, length, _ = x.shape

    def heads(projection: nn.Module, num_heads: int) -> mx.array:  # [N, num_heads, 1, head_dim]
        return projection(x).reshape(num_rows, length, num_heads, -1).swapaxes(1, 2)

    queries = self.rope(heads(self.q_proj, self.n_heads), offset=cache.offset)
    keys = self.rope(heads(self.k_proj, self.n_kv_heads), offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, heads(self.v_proj, self.n_kv_heads))
    softcap = self.attn_logit_softcapping
    call = AttentionCall(queries, keys, values, self.scale, mask, softcap=softcap)
    out = cache.attend(call, scaled_dot_product_attention)
    return self.o_proj(out.swapaxes(1, 2).reshape(num_rows, length, -1))
