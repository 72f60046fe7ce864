"""Reference recurrences in float64 NumPy, token by token, as defined in their papers."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np


def gated_delta(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, gates: np.ndarray, beta: np.ndarray, state: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the gated delta rule. Shapes: ``chunked_gated_delta``."""
    q, k, v, gates, beta = (np.asarray(x, np.float64) for x in (q, k, v, gates, beta))
    (batch, length, v_heads, v_dim), k_dim = v.shape, k.shape[-1]
    q, k = (np.repeat(x, v_heads // k.shape[2], axis=2) for x in (q, k))
    gates = gates if gates.ndim == 4 else gates[..., None]
    state = np.zeros((batch, v_heads, v_dim, k_dim)) if state is None else np.asarray(state, np.float64)
    y = np.empty(v.shape)
    for t in range(length):
        state = state * gates[:, t, :, None, :]
        remembered = np.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * (v[:, t] - remembered), k[:, t])
        y[:, t] = np.einsum("bhvk,bhk->bhv", state, q[:, t])
    return y, state


def ssm(
    x: np.ndarray, gates: np.ndarray, B: np.ndarray, C: np.ndarray, state: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute Mamba2's recurrence. Shapes: ``chunked_ssm``."""
    x, gates, B, C = (np.asarray(array, np.float64) for array in (x, gates, B, C))
    batch, length, heads, dim = x.shape
    B, C = (np.repeat(array, heads // array.shape[2], axis=2) for array in (B, C))
    state = np.zeros((batch, heads, dim, B.shape[-1])) if state is None else np.asarray(state, np.float64)
    y = np.empty(x.shape)
    for t in range(length):
        state = state * gates[:, t, :, None, None] + np.einsum("bhd,bhn->bhdn", x[:, t], B[:, t])
        y[:, t] = np.einsum("bhdn,bhn->bhd", state, C[:, t])
    return y, state


def relative_error(ours: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest value."""
    ours = np.asarray(ours, np.float64)
    assert ours.shape == expected.shape and np.isfinite(ours).all()
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


Arrays = dict[str, np.ndarray | None]


def on_device(arrays: Arrays) -> dict[str, mx.array | None]:
    return {name: None if array is None else mx.array(array) for name, array in arrays.items()}


def check_two_calls(function: Callable[..., tuple[mx.array, mx.array]], arrays: Arrays, first: int) -> None:
    """Check that two calls, the first with ``first`` tokens, return the same as one call with all tokens."""
    whole = on_device(arrays)
    y, state = function(**whole)
    before, after = (
        {name: array if name == "state" or array is None else array[:, rows] for name, array in whole.items()}
        for rows in (slice(first), slice(first, None))
    )
    y_before, between = function(**before)
    y_after, after_both = function(**{**after, "state": between})
    assert relative_error(np.array(mx.concatenate([y_before, y_after], axis=1)), np.array(y)) < 3e-6
    assert relative_error(np.array(after_both), np.array(state)) < 3e-6
