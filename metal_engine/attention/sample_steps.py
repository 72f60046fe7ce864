"""Random inputs and attention calls for one kind of layer, to test and time kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from metal_engine.attention.backend import AttentionKind, StepAttention
from metal_engine.attention.indexed import KeySelection
from metal_engine.device.streams import synchronize
from metal_engine.kv_cache.state import KVState

_WINDOW = 1060
_SOFTCAP = 20.0


def random_array(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def random_queries(kind: AttentionKind, num_rows: int) -> mx.array:
    """Return queries of a kind of layer, [num_rows, num_heads, head_dim]."""
    return random_array((num_rows, kind.num_heads, kind.spec.head_dim), kind.dtype, 2)


def random_sinks(kind: AttentionKind) -> mx.array | None:
    """Return sinks of a kind of layer, [num_heads], or None."""
    return None if kind.sinks is None else random_array((kind.num_heads,), kind.sinks, 3)


def attend_kind(
    attention: StepAttention,
    kind: AttentionKind,
    q: mx.array,
    state: KVState,
    sinks: mx.array | None,
    selection: KeySelection | None = None,
) -> mx.array:
    """Call a step's attention as a layer of a kind does, with its window and softcap."""
    return attention.attend(q, state, sinks=sinks, selection=selection, **attend_options(kind))


def attend_options(kind: AttentionKind) -> dict[str, Any]:
    """Return scale, window and softcap of a kind of layer, as arguments of :meth:`StepAttention.attend`."""
    return {
        "scale": kind.spec.head_dim**-0.5,
        "window": _WINDOW if kind.has_window else None,
        "softcap": _SOFTCAP if kind.has_softcap else None,
    }


def forget_errors() -> None:
    """Wait for the streams and discard their stored errors."""
    try:
        synchronize()
    except (RuntimeError, ValueError):
        synchronize()
