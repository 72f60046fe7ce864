"""What an attention backend is: it turns a step's rows into that step's attention, which every layer then uses."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import KVState


class StepAttention(Protocol):
    """The attention of one step: planned once, used by every layer.

    Row r of a request, counted within its segment, sees key j if j <= context_len + r, and, with a window w, if
    j > context_len + r - w.
    """

    def attend(
        self,
        q: mx.array,  # [N, num_heads, head_dim]
        state: KVState,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [num_heads]
    ) -> mx.array:  # [N, num_heads, v_head_dim], dtype of q
        """Attention of every packed row over its request's K and V, this step's included (written already).

        ``window`` w: the query at position p sees keys p - w + 1 ... p. ``softcap`` c: scores become
        c * tanh(scores / c). ``sinks``: one logit per head that takes part in the softmax and adds no value. Over
        latents the output begins with their latent_dim columns; a backend may compute more, which nobody reads.
        """
        ...


class AttentionBackend(Protocol):
    """Makes each step's attention."""

    name: str

    def for_step(self, rows: StepRows) -> StepAttention:
        """Plan a step's attention, on the host."""
        ...
