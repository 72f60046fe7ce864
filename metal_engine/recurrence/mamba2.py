"""Mamba2's recurrence over many tokens on a CPU: mlx-lm's computation in smaller chunks.

The rule, for one head, with state S [dim, N], gate g_t and input x_t (times its time step):

    S_t = S_(t-1) g_t + x_t B_t^T        y_t = S_t C_t

For a chunk of c tokens, D(i, j) is the product of the gates after j up to i. P_i is the product from the chunk's start
up to i:

    Y = (C B^T D) X + P (C S_0^T)        S_c = S_0 P_c + (X D(c, .))^T B

This is the chunkwise form ("SSD") of Dao and Gu, "Transformers are SSMs" (2024). mlx-lm takes 256 tokens per chunk. It
then computes 256 decays for each token and head, each an exponential, and reads S_0 in one product per token.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import ssm as mlx_lm_ssm

from metal_engine.device.info import computes_on_cpu
from metal_engine.recurrence.decays import decay_between, decay_from_start, decay_to_end

CHUNK = 64  # tokens
MIN_TOKENS = 8  # mlx-lm's function is as fast for fewer tokens

# Saved before ``models/mlx_lm_patch.py`` replaces mlx-lm's function.
_mlx_lm_update = mlx_lm_ssm.ssm_update


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Replace mlx-lm's function of the same name: same arguments, and results that differ only in rounding.

    Computes prompts without mask and lengths in small chunks on a CPU. Otherwise calls mlx-lm's function.

    Args:
        hidden_states: inputs x, [B, T, H, dim].
        A_log: logarithms of the decay rates, [H].
        B: input projections, [B, T, groups, N]. H is a multiple of groups.
        C: output projections, [B, T, groups, N].
        D: skip weights, [H].
        dt: time steps before bias and softplus, [B, T, H].
        dt_bias: biases of the time steps, [H].
        state: initial state, [B, H, dim, N]; None starts a sequence.
        time_step_limit: smallest and largest time step.
        mask: [B, T], True for valid tokens; None if all are valid.
        lengths: [B], remaining tokens of each sequence; None if all tokens are valid.

    Returns:
        y, [B, T, H, dim], and the state after the last token, float32.
    """
    if not computes_on_cpu() or mask is not None or lengths is not None or hidden_states.shape[1] < MIN_TOKENS:
        return _mlx_lm_update(
            hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask=mask, lengths=lengths
        )
    dt = mlx_lm_ssm.compute_dt(dt, dt_bias, time_step_limit)
    gates = mx.exp(dt * -mx.exp(A_log).astype(dt.dtype))
    y, state = chunked_ssm(dt[..., None] * hidden_states, gates, B, C, state)
    y = y.astype(hidden_states.dtype)
    return y + hidden_states * D.reshape(1, 1, -1, 1), state


def chunked_ssm(
    x: mx.array, gates: mx.array, B: mx.array, C: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Compute the recurrence over T >= 1 tokens in float32.

    Args:
        x: inputs multiplied by their time steps, [B, T, H, dim].
        gates: gates in [0, 1], [B, T, H].
        B: input projections, [B, T, groups, N]. H is a multiple of groups.
        C: output projections, [B, T, groups, N].
        state: initial state, [B, H, dim, N]; None means zeros.

    Returns:
        y, [B, T, H, dim] float32, and the state after the last token, [B, H, dim, N] float32.
    """
    batch, length, heads, dim = x.shape
    groups, state_dim = B.shape[2:]
    shape = (batch, length, groups, heads // groups)
    x = x.astype(mx.float32).reshape(*shape, dim).swapaxes(1, 2)  # [B, groups, T, heads, dim]
    gates = gates.astype(mx.float32).reshape(*shape, 1).swapaxes(1, 2)
    B, C = (array.astype(mx.float32).swapaxes(1, 2) for array in (B, C))  # [B, groups, T, N]
    if state is None:
        state = mx.zeros((batch, heads, dim, state_dim))
    state = state.astype(mx.float32).reshape(batch, groups, heads // groups, dim, state_dim)
    outputs = []
    for start in range(0, length, CHUNK):
        rows = slice(start, start + CHUNK)
        y, state = _chunk(x[:, :, rows], gates[:, :, rows], B[:, :, rows], C[:, :, rows], state)
        outputs.append(y)
    y = mx.concatenate(outputs, axis=2).swapaxes(1, 2)
    return y.reshape(batch, length, heads, dim), state.reshape(batch, heads, dim, state_dim)


def _chunk(x: mx.array, gates: mx.array, B: mx.array, C: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Compute a chunk of c tokens in float32.

    The ``heads`` heads of a group share B and C.

    Args:
        x: inputs, [B, groups, c, heads, dim].
        gates: gates, [B, groups, c, heads, 1].
        B: input projections, [B, groups, c, N].
        C: output projections, [B, groups, c, N].
        state: initial state, [B, groups, heads, dim, N].

    Returns:
        y, [B, groups, c, heads, dim], and the next state.
    """
    by_head = gates.swapaxes(2, 3)  # [B, groups, heads, c, 1]
    from_start, to_end = (d.swapaxes(2, 3) for d in (decay_from_start(by_head), decay_to_end(by_head)))
    weights = (C @ B.swapaxes(-1, -2))[:, :, None] * decay_between(by_head)  # [B, groups, heads, c, c]
    within = (weights @ x.swapaxes(2, 3)).swapaxes(2, 3)
    # All heads of a group multiply by the same B and C, so one product computes all of them.
    read = (C @ state.flatten(2, 3).swapaxes(-1, -2)).reshape(x.shape)
    written = (x * to_end).flatten(3, 4).swapaxes(-1, -2) @ B  # [B, groups, heads * dim, N]
    state = state * from_start[:, :, -1, :, :, None] + written.reshape(state.shape)
    return within + read * from_start, state
