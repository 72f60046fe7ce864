"""Mamba2's recurrence over many tokens on a CPU: mlx-lm's, in chunks as small as a CPU likes.

The rule, for one head, with state S [dim, N], gate g_t and input x_t (times its time step):

    S_t = S_(t-1) g_t + x_t B_t^T        y_t = S_t C_t

and for a chunk of c tokens, with D(i, j) the product of the gates after j up to i, and P_i from the chunk's start to i:

    Y = (C B^T D) X + P (C S_0^T)        S_c = S_0 P_c + (X D(c, .))^T B

This is the chunkwise form ("SSD") of Dao and Gu, "Transformers are SSMs" (2024). mlx-lm takes 256 tokens at once, which
makes 256 decays for each token and head, each an exponential; and it reads S_0 in a product for each token.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import ssm as mlx_lm_ssm

from metal_engine.device.info import computes_on_cpu
from metal_engine.recurrence.decays import decay_between, decay_from_start, decay_to_end

CHUNK = 64  # tokens
MIN_TOKENS = 8  # for fewer, mlx-lm's own is as fast

# Named before the seam puts ours in its place.
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
    """mlx-lm's function of the same name: same arguments, same results but for rounding.

    In small chunks on a CPU, for prompts without mask and lengths; else mlx-lm's own.

    Args:
        hidden_states: x, [B, T, H, dim].
        A_log: [H]; D and dt_bias likewise.
        B: [B, T, groups, N]; C likewise. H is a multiple of the groups.
        dt: [B, T, H].
        state: [B, H, dim, N]; None begins a sequence.
        time_step_limit: smallest and largest time step.
        mask: [B, T], the tokens that are there; None: all.
        lengths: [B], tokens that are left of each sequence; None: all.

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
    """The recurrence over T tokens, T >= 1, computed in float32.

    Args:
        x: [B, T, H, dim], already times the time steps.
        gates: in [0, 1], [B, T, H].
        B: [B, T, groups, N]; C likewise. H is a multiple of the groups.
        state: [B, H, dim, N]; None: zeros.

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
    """A chunk of c tokens, all float32; heads are those of a group, which share B and C.

    Args:
        x: [B, groups, c, heads, dim].
        gates: [B, groups, c, heads, 1].
        B: [B, groups, c, N]; C likewise.
        state: [B, groups, heads, dim, N].

    Returns:
        y, [B, groups, c, heads, dim], and the next state.
    """
    by_head = gates.swapaxes(2, 3)  # [B, groups, heads, c, 1]
    from_start, to_end = (d.swapaxes(2, 3) for d in (decay_from_start(by_head), decay_to_end(by_head)))
    weights = (C @ B.swapaxes(-1, -2))[:, :, None] * decay_between(by_head)  # [B, groups, heads, c, c]
    within = (weights @ x.swapaxes(2, 3)).swapaxes(2, 3)
    # What all heads of a group do with the same B and C is one product.
    read = (C @ state.flatten(2, 3).swapaxes(-1, -2)).reshape(x.shape)
    written = (x * to_end).flatten(3, 4).swapaxes(-1, -2) @ B  # [B, groups, heads * dim, N]
    state = state * from_start[:, :, -1, :, :, None] + written.reshape(state.shape)
    return within + read * from_start, state
