"""Recurrences of layers in float64 NumPy, row by row: the references for the kernels.

Written from the definitions, without code shared with the kernels. The functions have the arguments of the methods of
:class:`metal_engine.recurrence.metal.MetalRecurrence`, in the same shapes. A segment consists of the rows of one
request in a step. ``reads`` has the index of each segment's initial state in ``states``; -1 for a state of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

# Largest relative error of a row of a kernel's output.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}


def float64(array: mx.array) -> np.ndarray:
    """Return the array's numbers as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def relative_errors(got: mx.array, expected: np.ndarray) -> np.ndarray:
    """Return the norm of each row's error (axis 0), relative to the norm of the expected row: [rows].

    One bad row is thus not hidden among good rows. The divisor is at least a tenth of the mean norm of all rows.
    """
    axes = tuple(range(1, expected.ndim))
    difference = np.sqrt(((float64(got) - expected) ** 2).sum(axes))
    norms = np.sqrt((expected**2).sum(axes))
    return difference / np.maximum(norms, norms.mean() / 10 + 1e-30)


def segments_of(cu_seqlens: mx.array, reads: mx.array) -> Iterator[tuple[slice, int]]:
    """Yield the rows of every segment, and the index of its initial state in the states; -1 for zeros."""
    ends: Sequence[int] = np.array(cu_seqlens).tolist()
    for start, end, read in zip(ends, ends[1:], np.array(reads).tolist(), strict=False):
        yield slice(start, end), read


def gated_delta(
    q: mx.array,  # [N, Hk, Dk]
    k: mx.array,  # [N, Hk, Dk]
    v: mx.array,  # [N, Hv, Dv]
    g: mx.array,  # [N, Hv] or [N, Hv, Dk]
    beta: mx.array,  # [N, Hv]
    states: mx.array,  # [M, Hv, Dv, Dk]
    cu_seqlens: mx.array,  # [B+1] int32
    reads: mx.array,  # [B] int32
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the gated delta rule. Return y [N, Hv, Dv] and the segments' new states, [B, Hv, Dv, Dk]."""
    queries, keys, values, gates, betas, old = map(float64, (q, k, v, g, beta, states))
    group = values.shape[1] // keys.shape[1]
    queries, keys = (np.repeat(array, group, axis=1) for array in (queries, keys))  # [N, Hv, Dk]
    y, new_states = np.empty_like(values), []
    for rows, read in segments_of(cu_seqlens, reads):
        state = np.zeros(old.shape[1:]) if read < 0 else old[read]  # [Hv, Dv, Dk]
        for t in range(rows.start, rows.stop):
            state = state * gates[t].reshape(len(state), 1, -1)
            held = (state @ keys[t, :, :, None])[..., 0]  # [Hv, Dv]
            delta = (values[t] - held) * betas[t, :, None]
            state = state + delta[:, :, None] * keys[t, :, None]
            y[t] = (state @ queries[t, :, :, None])[..., 0]
        new_states.append(state)
    return y, np.stack(new_states)


def ssm_update(
    x: mx.array,  # [N, H, Dh]
    A_log: mx.array,  # [H]
    B: mx.array,  # [N, G, Ds]
    C: mx.array,  # [N, G, Ds]
    D: mx.array,  # [H]
    dt: mx.array,  # [N, H]
    states: mx.array,  # [M, H, Dh, Ds]
    cu_seqlens: mx.array,  # [B+1] int32
    reads: mx.array,  # [B] int32
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the recurrence of a Mamba2 layer. Return y [N, H, Dh] and the segments' new states, [B, H, Dh, Ds]."""
    rows_in, a_log, inputs, outputs, skip, steps, old = map(float64, (x, A_log, B, C, D, dt, states))
    group = rows_in.shape[1] // inputs.shape[1]
    inputs, outputs = (np.repeat(array, group, axis=1) for array in (inputs, outputs))  # [N, H, Ds]
    y, new_states = np.empty_like(rows_in), []
    for rows, read in segments_of(cu_seqlens, reads):
        state = np.zeros(old.shape[1:]) if read < 0 else old[read]  # [H, Dh, Ds]
        for t in range(rows.start, rows.stop):
            decay = np.exp(-np.exp(a_log) * steps[t])[:, None, None]
            state = state * decay + (rows_in[t] * steps[t, :, None])[:, :, None] * inputs[t, :, None]
            y[t] = (state @ outputs[t, :, :, None])[..., 0] + rows_in[t] * skip[:, None]
        new_states.append(state)
    return y, np.stack(new_states)


def convolve(
    x: mx.array,  # [N, C]
    weight: mx.array,  # [C, K]
    bias: mx.array | None,  # [C]
    states: mx.array,  # [M, K-1, C]
    cu_seqlens: mx.array,  # [B+1] int32
    reads: mx.array,  # [B] int32
    *,
    silu: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute a causal depthwise convolution. Return its output [N, C] and the segments' new states, [B, K-1, C].

    The state of a segment consists of its last K-1 inputs.
    """
    rows_in, weights, old = map(float64, (x, weight, states))
    before = weights.shape[1] - 1
    out, new_states = np.empty_like(rows_in), []
    for rows, read in segments_of(cu_seqlens, reads):
        inputs = np.concatenate([np.zeros(old.shape[1:]) if read < 0 else old[read], rows_in[rows]])
        for i, t in enumerate(range(rows.start, rows.stop)):
            out[t] = (inputs[i : i + before + 1] * weights.T).sum(0)
        new_states.append(inputs[len(inputs) - before :])
    out += 0.0 if bias is None else float64(bias)
    return out / (1 + np.exp(-out)) if silu else out, np.stack(new_states)
