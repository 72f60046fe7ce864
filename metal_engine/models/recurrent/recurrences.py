"""Replacements for mlx-lm's recurrences, such as gated delta and Mamba 2, which accept packed rows.

A replacement runs one kernel for all segments, or else the recurrence for each group of segments
(:mod:`metal_engine.kv_cache.segments`). With an ordinary state of mlx-lm, it calls the original function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import bailing_hybrid, bailing_moe_linear, gated_delta, ssm
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g
from mlx_lm.models.ssm import compute_dt

from metal_engine.models.recurrent.recording import WatchedState
from metal_engine.models.recurrent.state_cache import OwnedState, StateCache
from metal_engine.recurrence.gated_delta import gated_delta_update as chunked_gated_delta_update
from metal_engine.recurrence.mamba2 import ssm_update as chunked_ssm_update

Recurrence = Callable[..., tuple[mx.array, mx.array]]
Launch = Callable[[StateCache, str, Mapping[str, Any]], mx.array | None]
"""Function of a cache, the name of its array and the arguments of mlx-lm's function. Returns the output [N, 1, ...].

Returns None if no kernel supports the arguments. The function has then read and changed nothing in the cache.
"""


@dataclass(frozen=True)
class _Signature:
    """Arguments of a recurrence that have rows or states, and our implementations of it.

    Attributes:
        time_axes: argument name -> time axis, for each argument with one row per token.
        state: name of the argument for the state.
        output_axis: time axis of the output.
        launch: implementation as a launch of a Metal kernel; None if there is no kernel.
        in_chunks: implementation in matrix products, with the arguments of mlx-lm's function, which on a CPU computes
            almost token by token. None to use mlx-lm's function.
    """

    time_axes: Mapping[str, int]
    state: str
    output_axis: int
    launch: Launch | None = None
    in_chunks: Recurrence | None = None


def _launch_gated_delta(cache: StateCache, name: str, arguments: Mapping[str, Any]) -> mx.array | None:
    """Run :func:`mlx_lm.models.gated_delta.gated_delta_update` over packed rows. See :data:`Launch`."""
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


def _launch_ssm_update(cache: StateCache, name: str, arguments: Mapping[str, Any]) -> mx.array | None:
    """Run :func:`mlx_lm.models.ssm.ssm_update` over packed rows. See :data:`Launch`."""
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


_GLA = _Signature({"q": 2, "k": 2, "v": 2}, "h", 2)
_DELTA_ROWS = dict.fromkeys(("q", "k", "v", "a", "b"), 1)
_SSM_ROWS = dict.fromkeys(("hidden_states", "B", "C", "dt"), 1)
_SIGNATURES: dict[Recurrence, _Signature] = {
    gated_delta.gated_delta_update: _Signature(
        _DELTA_ROWS, "state", 1, _launch_gated_delta, chunked_gated_delta_update
    ),
    ssm.ssm_update: _Signature(_SSM_ROWS, "state", 1, _launch_ssm_update, chunked_ssm_update),
    bailing_hybrid.recurrent_gla: _GLA,
    bailing_moe_linear.recurrent_gla: _GLA,
}


def _by_segments(original: Recurrence, signature: _Signature) -> Recurrence:
    parameters = inspect.signature(original).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    compute = signature.in_chunks or original

    def recurrence(*args: Any, **kwargs: Any) -> tuple[mx.array, mx.array]:
        if len(args) > len(positional) or not kwargs.keys() <= parameters.keys():
            return original(*args, **kwargs)  # raises an error that describes the problem
        # Bound by hand: inspect would take a tenth of the host time of a decode step.
        arguments = defaults | dict(zip(positional, args, strict=False)) | kwargs
        placeholder = arguments.get(signature.state)
        if isinstance(placeholder, WatchedState):
            placeholder.record_recurrence()
        if not isinstance(placeholder, OwnedState):
            return original(*args, **kwargs)
        cache, name = placeholder.owner, placeholder.name
        if signature.launch is not None:
            launched = signature.launch(cache, name, arguments)
            if launched is not None:
                return launched, placeholder
        segments = cache.segments
        outputs = []
        for group, before in zip(segments.groups, cache.take(name), strict=True):
            rows = {arg: group.take(arguments[arg], axis) for arg, axis in signature.time_axes.items()}
            output, after = compute(**arguments | rows | {signature.state: before})
            cache.put(name, group, after)
            outputs.append(output)
        return segments.join(outputs, signature.output_axis), placeholder

    return recurrence


REPLACEMENTS: list[tuple[Recurrence, Recurrence]] = [(f, _by_segments(f, s)) for f, s in _SIGNATURES.items()]
