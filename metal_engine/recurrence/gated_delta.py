"""The gated delta rule over many tokens in matrix products: on a CPU, mlx-lm computes it token by token.

The rule for one head, with state S [Dv, Dk], gate g_t (a number, or one per key element: Dk numbers) and step size b_t:

    S_t = S_(t-1) diag(g_t) + u_t k_t^T        u_t = b_t (v_t - S_(t-1) diag(g_t) k_t)        y_t = S_t q_t

For a chunk of c tokens, D(i, j) is the product of the gates after j up to i. P_i is the product from the chunk's start
up to i. The u of all tokens solve a triangular system. The rest is matrix products:

    (I + L) U = diag(b) (V - (K P) S_0^T)      L[i, j] = b_i <k_i D(i, j), k_j> for j < i
    Y = (Q P) S_0^T + M U                      M[i, j] = <q_i D(i, j), k_j> for j <= i
    S_c = S_0 diag(P_c) + U^T (K D(c, .))

This is the chunkwise form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(2024), with the gates of Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024),
and the gates per key element of "Kimi Linear: An Expressive, Efficient Attention Architecture" (Kimi Team, 2025).
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from metal_engine.device.info import computes_on_cpu
from metal_engine.recurrence.decays import decay_between, decay_from_start, decay_to_end

CHUNK = 32  # tokens; a power of two
MIN_TOKENS = 2  # one token alone is faster without chunks

# Saved before ``models/mlx_lm_patch.py`` replaces mlx-lm's function.
_mlx_lm_update = mlx_lm_gated_delta.gated_delta_update


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Replace mlx-lm's function of the same name: same arguments, and results that differ only in float32 rounding.

    Computes prompts without a mask in chunks on a CPU. Otherwise calls mlx-lm's function.

    Args:
        q: queries, [B, T, Hk, Dk], normalized by mlx-lm's ``normalize_qk``.
        k: keys, [B, T, Hk, Dk], normalized in the same way.
        v: values, [B, T, Hv, Dv]. Hv is a multiple of Hk.
        a: inputs of the gates, [B, T, Hv], or [B, T, Hv, Dk] for gates per key element.
        b: inputs of the step sizes, [B, T, Hv].
        A_log: parameter of the gates.
        dt_bias: parameter of the gates.
        state: initial state, [B, Hv, Dv, Dk]; None starts a sequence.
        mask: [B, T], True for valid tokens; None if all are valid.
        use_kernel: True if mlx-lm may use its kernel on a GPU.
        lower_bound: lower bound of the gates' logarithms; None if the model has no such bound.
        allow_neg_eigval: True if step sizes reach 2 instead of 1.

    Returns:
        y, [B, T, Hv, Dv] in q's dtype, and the state after the last token, float32.
    """
    if not computes_on_cpu() or mask is not None or q.shape[1] < MIN_TOKENS:
        options = {"use_kernel": use_kernel, "lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
        return _mlx_lm_update(q, k, v, a, b, A_log, dt_bias, state, mask, **options)
    beta = mx.sigmoid(b)
    if allow_neg_eigval:
        beta = beta * 2.0
    if lower_bound is None:
        gates = mlx_lm_gated_delta.compute_g(A_log, a, dt_bias)
    else:
        gates = mlx_lm_gated_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    return chunked_gated_delta(q, k, v, gates, beta, state)


def chunked_gated_delta(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Compute the recurrence over T >= 1 tokens in float32.

    Args:
        q: queries, [B, T, Hk, Dk].
        k: keys, [B, T, Hk, Dk].
        v: values, [B, T, Hv, Dv]. Hv is a multiple of Hk.
        gates: gates in [0, 1], [B, T, Hv] or [B, T, Hv, Dk].
        beta: step sizes in [0, 2], [B, T, Hv].
        state: initial state, [B, Hv, Dv, Dk]; None means zeros.

    Returns:
        y, [B, T, Hv, Dv] in q's dtype, and the state after the last token, [B, Hv, Dv, Dk] float32.
    """
    batch, length, k_heads, k_dim = k.shape
    v_heads, v_dim = v.shape[2:]
    group = v_heads // k_heads  # value heads that share a key head

    def by_head(x: mx.array) -> mx.array:
        """Convert [B, T, Hk * n, D] to [B, Hk, n, T, D]."""
        return x.reshape(batch, length, k_heads, x.shape[2] // k_heads, -1).transpose(0, 2, 3, 1, 4)

    inputs = [by_head(x) for x in (q, k, v, gates, beta)]
    if state is None:
        state = mx.zeros((batch, v_heads, v_dim, k_dim))
    state = state.astype(mx.float32).reshape(batch, k_heads, group, v_dim, k_dim)
    state = mx.contiguous(state.swapaxes(-1, -2))  # [B, Hk, group, Dk, Dv], the layout of _chunk
    outputs = []
    for start in range(0, length, CHUNK):
        rows = slice(start, start + CHUNK)
        y, state = _chunk(*(x[..., rows, :].astype(mx.float32) for x in inputs), state=state)
        outputs.append(y)
    y = mx.concatenate(outputs, axis=-2).reshape(batch, v_heads, length, v_dim).swapaxes(1, 2)
    return y.astype(q.dtype), mx.contiguous(state.swapaxes(-1, -2)).reshape(batch, v_heads, v_dim, k_dim)


def _chunk(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, *, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute a chunk of c tokens in float32.

    Args:
        q: queries, [B, Hk, 1, c, Dk].
        k: keys, [B, Hk, 1, c, Dk].
        v: values, [B, Hk, group, c, Dv].
        gates: gates, [B, Hk, group, c, 1 or Dk].
        beta: step sizes, [B, Hk, group, c, 1].
        state: initial state, [B, Hk, group, Dk, Dv].

    Returns:
        y, [B, Hk, group, c, Dv], and the next state.
    """
    kq = mx.stack([k, q], axis=-3)  # [B, Hk, 1, 2, c, Dk]
    # No factor of a product is a transposed view. OpenBLAS computes small products of plain matrices directly. For
    # transposed matrices it uses two threads that wait for each other.
    keys = mx.contiguous(kq[..., :1, :, :].swapaxes(-1, -2))  # [B, Hk, 1, 1, Dk, c]
    products = _products(kq, keys, gates) if gates.shape[-1] == 1 else _products_by_halves(kq, gates)
    from_start, to_end = decay_from_start(gates), decay_to_end(gates)
    read = (kq * from_start[..., None, :, :]) @ state[..., None, :, :]  # [B, Hk, group, 2, c, Dv]
    size = v.shape[-2]
    system = products[..., 0, :, :] * beta * mx.tri(size, k=-1) + mx.eye(size)
    u = mx.linalg.tri_inv(system) @ ((v - read[..., 0, :, :]) * beta)
    y = read[..., 1, :, :] + products[..., 1, :, :] @ u
    written = (keys[..., 0, :, :] * to_end.swapaxes(-1, -2)) @ u  # [B, Hk, group, Dk, Dv]
    return y, state * from_start[..., -1, :, None] + written


def _products(kq: mx.array, keys: mx.array, gates: mx.array) -> mx.array:
    """Return <x_i D(i, j), k_j> for x in (k, q), [B, Hk, group, 2, c, c]; 0 for j > i.

    The last two axes are i and j. D(i, j) is the decay from token j to token i.
    """
    return (kq @ keys) * decay_between(gates)[..., None, :, :]


def _products_by_halves(kq: mx.array, gates: mx.array) -> mx.array:
    """Return the result of :func:`_products` for gates per key element.

    D(i, j) is a vector here. In general it has no factorization f(i) g(j) with both factors in [0, 1]: a quotient of
    cumulative products overflows. But D(i, j) = D(i, m) D(m, j) for every token m between j and i. The second half of a
    block is therefore multiplied with the first half, with m in the middle, for blocks of 2, 4, 8, ... tokens.
    """
    size = kq.shape[-2]
    whole = 1 << (size - 1).bit_length()
    if whole > size:  # pad at the end: no valid token reads later tokens
        kq, gates = (mx.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, whole - size), (0, 0)]) for x in (kq, gates))
    *lead, k_dim = gates.shape
    lead = lead[:-1]  # B, Hk, group
    own = (kq * kq[..., :1, :, :]).sum(axis=-1)[..., None, None]  # elements with j = i
    # Results in blocks of `half` tokens: [..., 2, blocks, half, half]
    done = mx.broadcast_to(own, (*lead, 2, whole, 1, 1))
    half = 1
    while half < whole:
        blocks = whole // (2 * half)
        x = kq.reshape(*kq.shape[:-2], blocks, 2, half, k_dim)
        g = gates.reshape(*lead, 1, blocks, 2, half, k_dim)
        late = x[..., 1, :, :] * decay_from_start(g[..., 1, :, :])
        early = x[..., :1, :, 0, :, :] * decay_to_end(g[..., 0, :, :])
        across = late @ early.swapaxes(-1, -2)  # [..., 2, blocks, half, half]
        pairs = done.reshape(*lead, 2, blocks, 2, half, half)
        upper = mx.concatenate([pairs[..., 0, :, :], mx.zeros_like(across)], axis=-1)
        done = mx.concatenate([upper, mx.concatenate([across, pairs[..., 1, :, :]], axis=-1)], axis=-2)
        half *= 2
    return done[..., 0, :size, :size]
