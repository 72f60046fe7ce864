"""Variable-length paged attention in plain MLX ops: the oracle of the Metal kernel and the CPU's own path.

`mlx_plan` cuts a step into units whose pieces gather only keys that some row of them may see. Here they are
computed. The softmax is online: (maximum, sum, output) per row goes from piece to piece, in float32, base 2;
memory is bounded by a few pieces of scores on each stream, however long the context is. ``attend`` only builds the
graph.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import mlx.core as mx

from metal_engine.attention.backend import AttentionMetadata
from metal_engine.attention.portable.exp2 import LOG2E
from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS, Dims, Limits
from metal_engine.attention.portable.planning import Queries, Unit, Work, plan_work
from metal_engine.attention.portable.runs import attend_runs
from metal_engine.attention.portable.softmax import State, after, update
from metal_engine.device.streams import second_stream


@dataclass
class MlxOpsPlan:
    """One step's work. Holds index arrays and masks, never a cache: the next write to it must be in place."""

    metadata: AttentionMetadata
    limits: Limits
    on_gpu: bool
    _work: dict[tuple[int | None, Dims], Work] = field(default_factory=dict)

    def work(self, window: int | None, dims: Dims) -> Work:
        key = (window, dims)
        if key not in self._work:
            self._work[key] = plan_work(self.metadata, window, dims, self.limits)
        return self._work[key]

    def attend(
        self,
        q: mx.array,  # [N, Hq, D]
        k_cache: mx.array,  # [num_blocks, block_size, Hkv, D]
        v_cache: mx.array,  # [num_blocks, block_size, Hkv, Dv]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [Hq]
    ) -> mx.array:  # [N, Hq, Dv], dtype of q
        """See :meth:`AttentionPlan.attend`. Builds the graph and evaluates nothing.

        Raises ValueError where shapes disagree with each other or with the step.
        """
        self._validate(q, k_cache, v_cache, window)
        num_heads, head_dim = q.shape[1:]
        num_kv_heads, v_head_dim = k_cache.shape[2], v_cache.shape[3]
        work = self.work(window, Dims(num_heads, num_kv_heads, max(head_dim, v_head_dim)))

        # Base 2: e^s = 2^(s * log2(e)), with the factor folded into q, or into the softcap.
        rows = q.astype(mx.float32) * (scale / softcap if softcap else scale * LOG2E)
        k_rows, v_rows = k_cache.reshape(-1, head_dim), v_cache.reshape(-1, v_head_dim)
        outputs: list[mx.array] = []
        # What ends each lane so far. Chains the pieces: evaluated side by side, each would hold its scores.
        lasts: list[list[mx.array]] = [[], []]
        for unit in work.units:
            with mx.stream(second_stream()) if unit.lane else nullcontext():
                done, lasts[unit.lane] = self._attend_unit(
                    unit, rows, k_rows, v_rows, num_kv_heads, softcap, sinks, lasts[unit.lane]
                )
            outputs += done
        last = lasts[0] + lasts[1]
        for decodes in work.run_decodes:
            out = attend_runs(decodes, rows, k_cache, v_cache, softcap, sinks, last)
            outputs.append(out)
            last = [out]
        packed = (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).astype(q.dtype)
        return packed if work.order is None else packed[work.order]

    def _attend_unit(
        self,
        unit: Unit,
        rows: mx.array,  # [N, Hq, D] float32, scaled
        k_rows: mx.array,  # [num_slots * Hkv, D]
        v_rows: mx.array,  # [num_slots * Hkv, Dv]
        num_kv_heads: int,
        softcap: float | None,
        sinks: mx.array | None,
        last: list[mx.array],
    ) -> tuple[list[mx.array], list[mx.array]]:
        """-> [T * R, Hq, Dv] of each of the unit's queries, and what is computed last."""
        tiles = [queries.of(rows, num_kv_heads) for queries in unit.queries]
        states = [_initial_state(sinks, queries, num_kv_heads) for queries in unit.queries]
        for span in unit.spans:
            slots = after(span.slots, last)
            keys = k_rows[slots].astype(mx.float32)  # [T, Hkv, S, D]
            values = v_rows[slots].astype(mx.float32)  # [T, Hkv, S, Dv]
            for piece in span.pieces:
                tile = after(tiles[piece.query], last)  # [T, Hkv, R * G, D]
                scores = tile @ keys[:, :, piece.lo : piece.hi].swapaxes(-1, -2)  # [T, Hkv, R * G, L]
                if softcap:
                    scores = mx.tanh(scores) * (softcap * LOG2E)
                if piece.biases:
                    by_row = (*scores.shape[:2], unit.queries[piece.query].num_rows, -1, scores.shape[3])
                    bias = sum(piece.biases[1:], piece.biases[0])  # broadcasts to [T, Hkv, R, G, L]
                    scores = (scores.reshape(by_row) + bias).reshape(scores.shape)
                seen = values[:, :, piece.lo : piece.hi]  # [T, Hkv, L, Dv]
                state = update(states[piece.query], scores, seen, self.on_gpu)
                # The sum too: left for later, it would keep the piece's weights alive until the end.
                states[piece.query], last = state, [state.out, state.total]
        num_heads = rows.shape[1]
        return [_finish(s, t, num_heads) for s, t in zip(states, unit.queries, strict=True)], last

    def _validate(self, q: mx.array, k_cache: mx.array, v_cache: mx.array, window: int | None) -> None:
        if q.shape[0] != self.metadata.num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows, but the step has {self.metadata.num_tokens} tokens")
        if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != q.shape[2]:
            raise ValueError(
                f"q {q.shape}, K cache {k_cache.shape} and V cache {v_cache.shape} do not fit together"
            )
        if k_cache.shape[1] != self.metadata.block_size:
            raise ValueError(f"cache blocks hold {k_cache.shape[1]} tokens, not {self.metadata.block_size}")
        if q.shape[1] % k_cache.shape[2]:
            raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads")
        if k_cache.shape[0] * k_cache.shape[1] * k_cache.shape[2] >= 2**31:
            raise ValueError(f"K cache {k_cache.shape}: (slot, head) indices do not fit 32 bits")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")


def _initial_state(sinks: mx.array | None, queries: Queries, num_kv_heads: int) -> State | None:
    """A sink is a key seen before all others, with a value of zero."""
    if sinks is None:
        return None
    t, r, group = queries.num_requests, queries.num_rows, sinks.size // num_kv_heads
    peak = (sinks.astype(mx.float32) * LOG2E).reshape(num_kv_heads, 1, group)
    peak = mx.broadcast_to(peak, (t, num_kv_heads, r, group)).reshape(t, num_kv_heads, r * group, 1)
    return State(peak, mx.ones_like(peak), mx.zeros((1, 1, 1, 1)))


def _finish(state: State | None, queries: Queries, num_heads: int) -> mx.array:
    """-> [T * R, Hq, Dv]"""
    assert state is not None  # every row sees at least its own key
    out = state.out / state.total  # [T, Hkv, R * G, Dv]
    t, num_kv_heads, _, v_head_dim = out.shape
    split = out.reshape(t, num_kv_heads, queries.num_rows, -1, v_head_dim)
    return split.swapaxes(1, 2).reshape(-1, num_heads, v_head_dim)


class MlxOpsBackend:
    """The portable backend, see the module's docstring. Runs wherever MLX does."""

    name = "mlx"

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits

    def plan(self, metadata: AttentionMetadata) -> MlxOpsPlan:
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        return MlxOpsPlan(metadata, self._limits or (GPU_LIMITS if on_gpu else CPU_LIMITS), on_gpu)
