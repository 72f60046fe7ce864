"""Check at load that attention over quantized K and V uses them as ``mx.quantize`` rounds them.

Checks the attention of each layer separately. The expected result is computed from the same queries, keys and values,
so only rounding can differ and the bound can be tight. A bound on logits would have to be loose. The last bit of a
float can decide to which quantized value a number is rounded, and later layers amplify the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, StepAttention
from metal_engine.attention.indexed import Common, IndexQueries, KeySelection, SelectionPlan
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.quantized import QuantizedKVState
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import QuantizedKVSpec
from metal_engine.kv_cache.state import IndexState, KVState
from metal_engine.kv_cache.writes import HasWrites

_NUM_ROWS = 32  # number of last rows of a segment that are checked
# Distance between two neighbouring numbers of a type, relative to their size. Rounding errors are up to half of it.
# Backends round queries, K, V, softmax weights and outputs to the model's type. In float32, the matrix units of some
# GPUs keep as many bits as float16 has. Measured errors, as fractions of the allowed error: up to 0.43 for the
# simulated kernel, up to 0.33 for MLX's operations.
_SPACING = {mx.float32: 2**-11, mx.float16: 2**-11, mx.bfloat16: 2**-8}
# A backend may wrongly read a step's own rows before quantization. The check detects this only if it changes the result
# by at least this fraction of the allowed error.
_TELLING = 0.125


class RecordingKVState(QuantizedKVState):
    """Quantized keys and values that also record the written rows before quantization.

    Attributes:
        recorded: first block of a request -> array name -> rows written for the request, [tokens, num_kv_heads, dim].
    """

    def __init__(self, spec: QuantizedKVSpec) -> None:
        super().__init__(spec)
        self.recorded: dict[int, dict[str, mx.array]] = {}

    def write(self, step: HasWrites, rows: Mapping[str, mx.array]) -> None:
        assert isinstance(step, StepRows)
        for request, first_block in enumerate(step.block_table[:, 0].tolist()):
            segment = slice(*step.cu_seqlens_q[request : request + 2].tolist())
            before = self.recorded.get(first_block, {})
            self.recorded[first_block] = {
                name: mx.concatenate([before[name], values[segment]]) if before else values[segment]
                for name, values in rows.items()
            }
        super().write(step, rows)

    def release(self) -> None:
        super().release()
        self.recorded = {}

    def rounded(self, rows: mx.array) -> mx.array:
        """Return rows after quantization and dequantization, float32."""
        group_size, bits = self.spec.group_size, self.spec.bits
        packed, *of_groups = mx.quantize(rows.astype(self.spec.dtype), group_size=group_size, bits=bits)
        scales, biases = (array.astype(mx.float32) for array in of_groups)
        return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)


def with_recording_states(pool: StatePool) -> StatePool:
    """Return a copy of a pool in which a :class:`RecordingKVState` replaces each quantized state."""
    return StatePool(
        RecordingKVState(state.spec) if isinstance(state, QuantizedKVState) else state for state in pool.states
    )


@dataclass
class ComparingBackend:
    """Backend that runs ``inner`` over :class:`RecordingKVState`, and checks the result in each layer's call.

    ``attend`` of its steps raises UnsupportedModelError if the result differs from attention over rounded K and V.
    """

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
        chunk: int | None = None,
        selection: KeySelection | None = None,
    ) -> mx.array:
        """Compute attention, and compare it for the last rows of each request.

        Raises UnsupportedModelError if the result is not attention over rounded K and V.
        """
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "chunk": chunk}
        out = self.inner.attend(q, state, scale=scale, selection=selection, **options)
        selected = None if selection is None else selection.by_row()
        assert isinstance(state, RecordingKVState)
        parts = zip(self.rows.block_table[:, 0].tolist(), self.rows.cu_seqlens_q[1:].tolist(), strict=True)
        for request, (first_block, end) in enumerate(parts):
            query_len, seq_len = int(self.rows.query_lens[request]), int(self.rows.seq_lens[request])
            rows = slice(end - min(query_len, _NUM_ROWS), end)
            keys = selected[rows] if selected is not None and (selected[end - 1] >= 0).any() else None
            attention = _Attention(q[rows], seq_len, scale, selected=keys, **options)
            _compare(out[rows], attention, state, state.recorded[first_block], query_len)
        return out

    def select_keys(self, plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common) -> KeySelection:
        """See :meth:`metal_engine.attention.backend.StepAttention.select_keys`."""
        return self.inner.select_keys(plan, index, state, common)


@dataclass(frozen=True)
class _Attention:
    """Queries of a request's last rows, and the options of their attention, as in :meth:`StepAttention.attend`."""

    q: mx.array  # [R, Hq, D]
    seq_len: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: mx.array | None  # [Hq]
    chunk: int | None
    selected: np.ndarray | None  # [R, G, K] positions of the keys that rows attend to, -1 for none; None for all keys

    def over(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Compute attention over the keys and values of all tokens, [S, Hkv, D or Dv] float32, and its expected error.

        Returns:
            Outputs, [Hkv, G, R, Dv], and the expected squared rounding error of each row, [Hkv, G, R]. The unit of the
            error is the squared relative error of one rounded number. G is the number of query heads per KV head.
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
        if self.chunk is not None:
            mask &= seen >= positions // self.chunk * self.chunk
        if self.selected is not None:
            mask = mask & (seen == self.selected[..., None]).any(axis=2).swapaxes(0, 1)[:, None]  # [G, 1, R, S]
        scores = mx.where(mx.array(mask), scores, -mx.inf)
        if self.sinks is not None:
            sinks = self.sinks.astype(mx.float32).reshape(num_kv_heads, num_heads // num_kv_heads, 1, 1)
            scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., : self.seq_len]
        out = weights @ values
        # The error of a score is the sum of the rounding errors of query and key elements. It moves the output towards
        # the value of that key, or away from it. Weights, values and the output have rounding errors of their own.
        of_scores = 1 + 2 * self.scale**2 * (q.square() @ keys.square().swapaxes(-1, -2))  # [Hkv, G, R, S]
        lengths, out_lengths = values.square().sum(-1)[:, :, None], out.square().sum(-1, keepdims=True)
        apart = mx.maximum(lengths + out_lengths - 2 * (out @ values.swapaxes(-1, -2)), 0)  # |v - out|^2
        noise = (weights.square() * (lengths + of_scores * apart)).sum(-1) + out_lengths[..., 0]
        return out, noise


def _compare(
    out: mx.array,  # [R, Hq, Dv]
    attention: _Attention,
    state: RecordingKVState,
    recorded: Mapping[str, mx.array],  # [S, Hkv, D or Dv] each
    query_len: int,
) -> None:
    spec = state.spec
    full = [recorded["keys"], recorded.get("values", recorded["keys"])]
    rounded = [state.rounded(array) for array in full]
    own_in_float = [
        mx.concatenate([kept[:-query_len], array[-query_len:].astype(mx.float32)])
        for kept, array in zip(rounded, full, strict=True)
    ]
    # A latent's value is only the first latent_dim columns of its key.
    expected, noise = attention.over(rounded[0], rounded[1][..., : spec.latent_dim])
    in_float, _ = attention.over(own_in_float[0], own_in_float[1][..., : spec.latent_dim])
    got = out[..., : spec.latent_dim].astype(mx.float32).swapaxes(0, 1).reshape(expected.shape)
    error, step = got - expected, in_float - expected
    sums = [error.square().sum(), expected.square().sum(), noise.sum(), step.square().sum(), (error * step).sum()]
    mx.eval(sums)  # raises errors of operations; the conversion to NumPy would not
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
