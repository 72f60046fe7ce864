"""Attention that convolves each token's keys and values with the keys and values of the token before (Baichuan M1).

The state of such a layer is the key and the value of a request's last token, before the convolution.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.baichuan_m1 import Attention

from metal_engine.models.recurrent.recording import WatchedState
from metal_engine.models.recurrent.state_cache import OwnedState


class _PackedAttention(Attention):
    """mlx-lm's attention, whose convolutions get the row before each packed row from the cache."""

    def _custom_convolution(self, u: mx.array, weights: mx.array, state: mx.array | None = None) -> mx.array:
        """Convolve ``u``, [B, num_kv_heads, L, head_dim], which follows ``state``, [B, num_kv_heads, 1, head_dim]."""
        if isinstance(state, WatchedState):
            state.record_recurrence()
        if isinstance(state, OwnedState):
            state = state.owner.rows_before(state.name, u)
        return super()._custom_convolution(u, weights, state)


def patch_convolved_keys(model: nn.Module) -> None:
    """Change the classes of a model's attention layers, so that their convolutions use our caches."""
    for module in model.modules():
        if type(module) is Attention:
            module.__class__ = _PackedAttention
