"""Proof, at load, that attention over quantized K and V is attention over them as ``mx.quantize`` rounds them.

Looks at each layer's attention by itself: its queries, keys and values are at hand, so only rounding is left to differ,
and a bound can be tight. Between logits it could not: where a number lies between two that can be kept, the last bit of
a float decides between them, and the next layers amplify that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, StepAttention
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.quantized import QuantizedKVState
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import QuantizedKVSpec
from metal_engine.kv_cache.state import KVState
from metal_engine.kv_cache.writes import HasWrites

_NUM_ROWS = 32  # of a segment that are looked at, the last ones
# Distance of two neighbours of a type, relative to a number: rounding takes half of it at most. Backends round queries,
# K, V, weights of the softmax and outputs to the model's type; in float32, some GPUs' matrix units keep as many bits as
# float16 has. Of what is allowed so, errors of the simulated kernel were up to 0.43, those of MLX's operations to 0.33.
_SPACING = {mx.float32: 2**-11, mx.float16: 2**-11, mx.bfloat16: 2**-8}
# Attention over a step's own rows in float can be told from rounding if it differs by so much of what that may take.
_TELLING = 0.125


class NotedKVState(QuantizedKVState):
    """Quantized keys and values that remember, in float, what was written to them.

    Attributes:
        noted: rows by array, [tokens, num_kv_heads, dim], of each request; a request is known by its first block.
    """

    def __init__(self, spec: QuantizedKVSpec) -> None:
        super().__init__(spec)
        self.noted: dict[int, dict[str, mx.array]] = {}

    def write(self, step: HasWrites, rows: Mapping[str, mx.array]) -> None:
        assert isinstance(step, StepRows)
        for request, first_block in enumerate(step.block_table[:, 0].tolist()):
            segment = slice(*step.cu_seqlens_q[request : request + 2].tolist())
            before = self.noted.get(first_block, {})
            self.noted[first_block] = {
                name: mx.concatenate([before[name], values[segment]]) if before else values[segment]
                for name, values in rows.items()
            }
        super().write(step, rows)

    def release(self) -> None:
        super().release()
        self.noted = {}

    def rounded(self, rows: mx.array) -> mx.array:
        """Rows as they are to be read, float32."""
        group_size, bits = self.spec.group_size, self.spec.bits
        packed, *of_groups = mx.quantize(rows.astype(self.spec.dtype), group_size=group_size, bits=bits)
        scales, biases = (array.astype(mx.float32) for array in of_groups)
        return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)


def noting(pool: StatePool) -> StatePool:
    """A pool for the same layers whose quantized states are noted; all others are the same objects."""
    return StatePool(
        NotedKVState(state.spec) if isinstance(state, QuantizedKVState) else state for state in pool.states
    )


@dataclass
class ComparingBackend:
    """A backend whose attention over :class:`NotedKVState` is compared with what it should be, layer by layer."""

    inner: AttentionBackend
    name: str = "comparing"

    def for_step(self, rows: StepRows) -> StepAttention:
        return _ComparingStep(self.inner.for_step(rows), rows)


@dataclass(frozen=True)
class _ComparingStep:
    inner: StepAttention
    rows: StepRows

    def attend(
        self,
        q: mx.array,  # [N, Hq, D]
        state: KVState,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [Hq]
    ) -> mx.array:
        """Raises UnsupportedModelError where attention is not that over rounded K and V."""
        out = self.inner.attend(q, state, scale=scale, window=window, softcap=softcap, sinks=sinks)
        assert isinstance(state, NotedKVState)
        parts = zip(self.rows.block_table[:, 0].tolist(), self.rows.cu_seqlens_q[1:].tolist(), strict=True)
        for request, (first_block, end) in enumerate(parts):
            query_len, seq_len = int(self.rows.query_lens[request]), int(self.rows.seq_lens[request])
            rows = slice(end - min(query_len, _NUM_ROWS), end)
            attention = _Attention(q[rows], seq_len, scale, window, softcap, sinks)
            _compare(out[rows], attention, state, state.noted[first_block], query_len)
        return out


@dataclass(frozen=True)
class _Attention:
    """The last rows of a request, to be attended as :class:`StepAttention` says, in float32."""

    q: mx.array  # [R, Hq, D]
    seq_len: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: mx.array | None  # [Hq]

    def over(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Attention over keys and values of all tokens, [S, Hkv, D or Dv] float32, and what rounding takes from it.

        Returns:
            Outputs, [Hkv, G, R, Dv], and the square of each row's error per square of a number's: [Hkv, G, R].
        """
        num_rows, num_heads, head_dim = self.q.shape
        num_kv_heads = keys.shape[1]
        q = self.q.astype(mx.float32).swapaxes(0, 1).reshape(num_kv_heads, -1, num_rows, head_dim)
        keys, values = (array.swapaxes(0, 1)[:, None] for array in (keys, values))  # [Hkv, 1, S, D or Dv]
        scores = q @ keys.swapaxes(-1, -2) * self.scale  # [Hkv, G, R, S]
        if self.softcap:
            scores = mx.tanh(scores / self.softcap) * self.softcap
        positions, seen = np.arange(self.seq_len - num_rows, self.seq_len)[:, None], np.arange(self.seq_len)
        mask = seen <= positions
        if self.window is not None:
            mask &= seen > positions - self.window
        scores = mx.where(mx.array(mask), scores, -mx.inf)
        if self.sinks is not None:
            sinks = self.sinks.astype(mx.float32).reshape(num_kv_heads, num_heads // num_kv_heads, 1, 1)
            scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., : self.seq_len]
        out = weights @ values
        # A score is off by what its queries' and keys' rounding adds up to, and moves the output towards its value or
        # away; weights, values and the output are rounded themselves.
        of_scores = 1 + 2 * self.scale**2 * (q.square() @ keys.square().swapaxes(-1, -2))  # [Hkv, G, R, S]
        lengths, out_lengths = values.square().sum(-1)[:, :, None], out.square().sum(-1, keepdims=True)
        apart = mx.maximum(lengths + out_lengths - 2 * (out @ values.swapaxes(-1, -2)), 0)  # |v - out|^2
        noise = (weights.square() * (lengths + of_scores * apart)).sum(-1) + out_lengths[..., 0]
        return out, noise


def _compare(
    out: mx.array,  # [R, Hq, Dv]
    attention: _Attention,
    state: NotedKVState,
    noted: Mapping[str, mx.array],  # [S, Hkv, D or Dv] each
    query_len: int,
) -> None:
    spec = state.spec
    full = [noted["keys"], noted.get("values", noted["keys"])]
    rounded = [state.rounded(array) for array in full]
    own_in_float = [
        mx.concatenate([kept[:-query_len], array[-query_len:].astype(mx.float32)])
        for kept, array in zip(rounded, full, strict=True)
    ]
    # Of latents, what their reader takes.
    expected, noise = attention.over(rounded[0], rounded[1][..., : spec.latent_dim])
    in_float, _ = attention.over(own_in_float[0], own_in_float[1][..., : spec.latent_dim])
    got = out[..., : spec.latent_dim].astype(mx.float32).swapaxes(0, 1).reshape(expected.shape)
    error, step = got - expected, in_float - expected
    sums = [error.square().sum(), expected.square().sum(), noise.sum(), step.square().sum(), (error * step).sum()]
    *squares, together = np.array(mx.stack(sums))
    off, size, noisy, moved = np.sqrt(squares)
    allowed = _SPACING[spec.dtype] * noisy
    if not off <= allowed:  # NaN too
        raise UnsupportedModelError(
            f"its attention over keys and values in int{spec.bits} is off by {off / (size or 1):.1g} of its size"
        )
    if moved >= _TELLING * allowed and together > moved**2 / 2:
        raise UnsupportedModelError(
            f"its attention reads a step's own keys and values as computed, not as they are kept in int{spec.bits}"
        )
