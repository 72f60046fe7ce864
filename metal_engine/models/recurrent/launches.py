"""mlx-lm's recurrences as launches of Metal kernels, for all segments at once, if a kernel supports the shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g
from mlx_lm.models.ssm import compute_dt

from metal_engine.models.recurrent.state_cache import StateCache

Launch = Callable[[StateCache, str, Mapping[str, Any]], mx.array | None]
"""Function of a cache, the name of its array and the arguments of mlx-lm's function. Returns the output [N, 1, ...].

Returns None if no kernel supports the shape. It has then taken nothing from the cache.
"""


def gated_delta(cache: StateCache, name: str, arguments: Mapping[str, Any]) -> mx.array | None:
    """Run :func:`mlx_lm.models.gated_delta.gated_delta_update` over packed rows."""
    if cache.metal is None or arguments["mask"] is not None:
        return None
    q, k, v = (arguments[arg].squeeze(1) for arg in ("q", "k", "v"))
    gate = arguments["A_log"], arguments["a"], arguments["dt_bias"]
    bound = arguments["lower_bound"]
    g = compute_g(*gate) if bound is None else compute_lower_bound_g(*gate, bound)
    g = g.squeeze(1).astype(mx.float32)
    if not cache.metal.supports_gated_delta(q, k, v, g, cache.dtype(name)):
        return None
    beta = mx.sigmoid(arguments["b"].squeeze(1)) * (2.0 if arguments["allow_neg_eigval"] else 1.0)
    y, states = cache.metal.gated_delta(q, k, v, g, beta, cache.take_all(name), *cache.segments.tables)
    cache.put_all(name, states)
    return mx.expand_dims(y, 1)


def ssm_update(cache: StateCache, name: str, arguments: Mapping[str, Any]) -> mx.array | None:
    """Run :func:`mlx_lm.models.ssm.ssm_update` over packed rows."""
    if cache.metal is None or arguments["mask"] is not None or arguments["lengths"] is not None:
        return None
    x, B, C, dt = (arguments[arg].squeeze(1) for arg in ("hidden_states", "B", "C", "dt"))
    if not cache.metal.supports_ssm_update(x, B, C, cache.dtype(name)):
        return None
    dt = compute_dt(dt, arguments["dt_bias"], arguments["time_step_limit"]).astype(mx.float32)
    A_log, D = arguments["A_log"], arguments["D"]
    y, states = cache.metal.ssm_update(x, A_log, B, C, D, dt, cache.take_all(name), *cache.segments.tables)
    cache.put_all(name, states)
    return mx.expand_dims(y, 1)
