"""Recurrences and convolutions of layers: errors relative to float64, and times relative to mlx-lm's recurrences."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta, ssm

from metal_engine.doctor.figures import Figure, at_most
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.references import recurrence as references
from metal_engine.doctor.references.recurrence import TOLERANCE, relative_errors
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import (
    KERNEL_ERRORS,
    MLX_FLAG,
    NO_KERNEL,
    failed_kernel,
    has_metal,
    kernel_factory,
    tolerance,
)
from metal_engine.doctor.timing import Call, in_turns
from metal_engine.recurrence.gated_delta import gated_delta_update
from metal_engine.recurrence.mamba2 import ssm_update
from metal_engine.recurrence.metal import MetalRecurrence

# Sizes of Qwen3.5-0.8B (heads, head size) and of a Granite 4 hybrid (heads, head size, state size).
_DELTA_HEADS, _DELTA_DIM = 16, 128
_MAMBA_HEADS, _MAMBA_DIM, _MAMBA_STATE = 48, 64, 128
# Rows of the segments that are compared with float64. The second segment starts from the first state.
_SEGMENTS, _READS = (1, 6), (-1, 0)


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the errors of the kernels and the times of the recurrences. ``model`` is not used."""
    factory = kernel_factory(plan)
    if factory is None:
        yield NO_KERNEL
    else:
        yield from _errors(MetalRecurrence(factory))
    dtype = mx.bfloat16 if has_metal() else mx.float32
    for requests, tokens in plan.recurrent_steps:
        yield _times("gated delta", requests, tokens, _gated_delta_calls((requests, tokens), dtype), plan.repeats)
        yield _times("Mamba2", requests, tokens, _mamba2_calls((requests, tokens), dtype), plan.repeats)


def _errors(kernels: MetalRecurrence) -> Iterator[Figure]:
    for dtype in (mx.float32, mx.float16, mx.bfloat16) if has_metal() else (mx.float32,):
        for name, arguments, options in _small_calls(dtype):
            got = getattr(kernels, name)(*arguments, **options)
            expected = getattr(references, name)(*arguments, **options)
            yield kernel_error(f"error of `{name}`, {str(dtype).removeprefix('mlx.core.')}", got, expected, dtype)


def kernel_error(name: str, got: Any, expected: Any, dtype: mx.Dtype) -> Figure:
    """Return the largest relative error among the rows of a kernel's outputs; NaN if the kernel fails when it runs.

    Args:
        got: outputs of the kernel.
        expected: outputs of the reference.
        dtype: type of the kernel's inputs.
    """
    try:
        # Unlike Python's max, NumPy's returns NaN if one of the errors is NaN.
        error, note = float(np.max([relative_errors(a, b).max() for a, b in zip(got, expected, strict=True)])), ""
    except KERNEL_ERRORS as failed:
        error, note = failed_kernel(failed)
    promise = at_most(tolerance(TOLERANCE[dtype]), required=True, flag=MLX_FLAG)
    return Figure(name, error, promise=promise, note=note, is_simulated=not has_metal())


def _small_calls(dtype: mx.Dtype) -> Iterator[tuple[str, tuple[mx.array, ...], dict[str, Any]]]:
    """Yield the name of each kernel's method in ``MetalRecurrence``, with small arguments and options for a call."""
    mx.random.seed(0)
    rows = sum(_SEGMENTS)
    tables = mx.array(np.cumsum([0, *_SEGMENTS]).astype(np.int32)), mx.array(_READS, mx.int32)

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    keys = [normal(rows, 2, 64) for _ in range(2)]
    q, k = (key / mx.linalg.norm(key.astype(mx.float32), axis=-1, keepdims=True).astype(dtype) for key in keys)
    g, beta = mx.random.uniform(0.5, 1, (rows, 4)), mx.random.uniform(0.1, 1, (rows, 4)).astype(dtype)
    states = mx.random.normal((1, 4, 16, 64))
    yield "gated_delta", (q, k, normal(rows, 4, 16), g, beta, states, *tables), {}
    a_log, dt = mx.random.uniform(-1, 1, (4,)), mx.random.uniform(0.01, 1, (rows, 4))
    b, c = normal(rows, 2, 64), normal(rows, 2, 64)
    states = mx.random.normal((1, 4, 16, 64))
    yield "ssm_update", (normal(rows, 4, 16), a_log, b, c, normal(4), dt, states, *tables), {}
    yield "convolve", (normal(rows, 40), normal(40, 4), normal(40), normal(1, 3, 40), *tables), {"silu": True}


def _times(name: str, requests: int, tokens: int, calls: dict[str, Call], repeats: int) -> Figure:
    times = in_turns(calls, repeats)
    ours, theirs = times["ours"], times["theirs"]
    note = f"{1e3 * ours:.3g} ms beside mlx-lm's {1e3 * theirs:.3g} ms"
    title = f"{name}, {requests} x {tokens} tokens: time relative to mlx-lm's"
    promise = at_most(1.0, slack=0.1, flag=MLX_FLAG if has_metal() else "")
    return Figure(title, ours / theirs, promise=promise, note=note)


def _gated_delta_calls(rows: tuple[int, int], dtype: mx.Dtype) -> dict[str, Call]:
    arguments = gated_delta_layer(rows, _DELTA_HEADS, _DELTA_HEADS, _DELTA_DIM, each_key=False, dtype=dtype)
    packed = packed_gated_delta(MetalRecurrence(), rows, arguments)
    return {
        "ours": packed if has_metal() else partial(gated_delta_update, *arguments),
        "theirs": partial(gated_delta.gated_delta_update, *arguments),
    }


def _mamba2_calls(rows: tuple[int, int], dtype: mx.Dtype) -> dict[str, Call]:
    arguments: Any = mamba2_layer(rows, dtype=dtype)
    packed = packed_ssm_update(MetalRecurrence(), rows, arguments)
    return {
        "ours": packed if has_metal() else partial(ssm_update, *arguments),
        "theirs": partial(ssm.ssm_update, *arguments),
    }


def packed_gated_delta(kernels: MetalRecurrence, rows: tuple[int, int], arguments: tuple[mx.array, ...]) -> Call:
    """Return a function that runs the kernel on packed rows, and computes the same as mlx-lm's ``gated_delta_update``.

    Args:
        rows: (number of requests, number of tokens of each).
        arguments: arguments of mlx-lm's function, from :func:`gated_delta_layer`.
    """
    *inputs, a_log, dt_bias, state = arguments
    cu_seqlens, reads = _equal_segments(rows)
    q, k, v, a, b = map(_packed, inputs)

    def call() -> Any:
        g = gated_delta.compute_g(a_log, a, dt_bias).astype(mx.float32)
        return kernels.gated_delta(q, k, v, g, mx.sigmoid(b), state, cu_seqlens, reads)

    return call


def packed_ssm_update(kernels: MetalRecurrence, rows: tuple[int, int], arguments: tuple[mx.array, ...]) -> Call:
    """Return a function that runs the kernel on packed rows, and computes the same as mlx-lm's ``ssm_update``.

    Args:
        rows: (number of requests, number of tokens of each).
        arguments: arguments of mlx-lm's function, from :func:`mamba2_layer`.
    """
    x, a_log, b, c, d, dt, dt_bias, state = arguments
    cu_seqlens, reads = _equal_segments(rows)
    x, b, c, dt = map(_packed, (x, b, c, dt))

    def call() -> Any:
        steps = ssm.compute_dt(dt, dt_bias, (0.001, 100.0)).astype(mx.float32)
        return kernels.ssm_update(x, a_log, b, c, d, steps, state, cu_seqlens, reads)

    return call


def _packed(array: mx.array) -> mx.array:
    """Return rows [N, ...] of an array [requests, tokens, ...]."""
    return array.reshape(-1, *array.shape[2:])


def _equal_segments(rows: tuple[int, int]) -> tuple[mx.array, mx.array]:
    requests, tokens = rows
    return mx.arange(0, requests * tokens + 1, tokens, dtype=mx.int32), mx.arange(requests, dtype=mx.int32)


def _normal(dtype: mx.Dtype, *shape: int) -> mx.array:
    array = mx.random.normal(shape).astype(dtype)
    mx.eval(array)
    return array


def gated_delta_layer(
    rows: tuple[int, int], k_heads: int, v_heads: int, dim: int, *, each_key: bool, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, ...]:
    """Return random arguments of one layer for mlx-lm's ``gated_delta_update``.

    Args:
        rows: (number of requests, number of tokens of each).
        each_key: True for one gate for each of a head's ``dim`` key channels, False for one gate for each head.
    """
    normal = partial(_normal, dtype, *rows)
    q, k = gated_delta.normalize_qk(normal(k_heads, dim), normal(k_heads, dim), inv_scale=dim**-0.5, eps=1e-6)
    own, amplitudes = ((v_heads, dim), (v_heads, 1)) if each_key else ((v_heads,), (v_heads,))
    a_log = mx.log(mx.random.uniform(0.01, 16, amplitudes))
    # Softplus of these biases is a time step between 0.001 and 0.1, the usual initialisation of such layers.
    dt_bias = mx.log(mx.expm1(mx.exp(mx.random.uniform(-6.9, -2.3, own))))
    arrays = (q, k, normal(v_heads, dim), normal(*own), normal(v_heads))
    state = _normal(mx.float32, rows[0], v_heads, dim, dim)
    mx.eval(arrays, a_log, dt_bias)
    return (*arrays, a_log, dt_bias, state)


def mamba2_layer(rows: tuple[int, int], dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    """Return random arguments of one layer for mlx-lm's ``ssm_update``, with the sizes of a Granite 4 hybrid.

    Args:
        rows: (number of requests, number of tokens of each).
    """
    a_log, d = mx.log(mx.arange(1, _MAMBA_HEADS + 1)), mx.ones(_MAMBA_HEADS)
    dt_bias = mx.log(mx.expm1(mx.exp(mx.random.uniform(-6.9, -2.3, (_MAMBA_HEADS,)))))
    normal = partial(_normal, dtype, *rows)
    x, dt = normal(_MAMBA_HEADS, _MAMBA_DIM), normal(_MAMBA_HEADS)
    b, c = normal(1, _MAMBA_STATE), normal(1, _MAMBA_STATE)
    state = _normal(mx.float32, rows[0], _MAMBA_HEADS, _MAMBA_DIM, _MAMBA_STATE)
    mx.eval(a_log, d, dt_bias)
    return x, a_log, b, c, d, dt, dt_bias, state
