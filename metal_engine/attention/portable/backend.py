"""Variable-length paged attention in plain MLX operations: the Metal kernel's reference, and the backend on a CPU.

``planning`` divides a step into units that gather only keys that one of their rows may see. This module computes the
units. The softmax is online: each row's maximum, sum and output are updated tile by tile, in float32 and base 2. Memory
is limited to a few tiles of scores per stream, for contexts of any length. ``attend`` only builds the graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import StepTables, size_class
from metal_engine.attention.indexed import Common, IndexQueries, KeySelection, SelectionPlan, attend_selected
from metal_engine.attention.portable.exp2 import LOG2E
from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS, Dims, Limits
from metal_engine.attention.portable.indexed import select_keys, tile_attention
from metal_engine.attention.portable.planning import MASKED, Queries, ScoreTile, Span, Unit, Work, plan_work
from metal_engine.attention.portable.runs import attend_runs
from metal_engine.attention.portable.softmax import SoftmaxState, Weights, after, cpu_weights, plain_weights, update
from metal_engine.device.info import computes_on_cpu
from metal_engine.device.streams import second_stream
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import IndexState, KVState

_WorkKey = tuple[int | None, Dims, int | None]  # window, dimensions, and chunk size


@dataclass
class PortableStep:
    """Attention of one step, with its index arrays and masks.

    Holds no layer's K or V, so that writes to K and V stay in place.
    """

    rows: StepRows
    limits: Limits
    weights: Weights
    _work: dict[_WorkKey, Work] = field(default_factory=dict)
    is_planned: bool = False  # True if the work is given, so that planning from the rows is an error

    @property
    def work_keys(self) -> tuple[_WorkKey, ...]:
        """Parameters for which layers have requested work."""
        return tuple(self._work)

    def work(self, window: int | None, dims: Dims, chunk: int | None = None) -> Work:
        key = (window, dims, chunk)
        if key not in self._work:
            if self.is_planned:
                raise RuntimeError(f"a layer requests work {key}, which no layer has requested before")
            self._work[key] = plan_work(self.rows, window, dims, self.limits, chunk)
        return self._work[key]

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
    ) -> mx.array:  # [N, Hq, Dv], dtype of q; with a selection and latents, the latent_dim columns
        """See :meth:`metal_engine.attention.backend.StepAttention.attend`. Builds the graph and evaluates nothing.

        Raises ValueError if shapes do not match each other or the step.
        """
        self._validate(q, state, window)
        if selection is not None:
            attend_tile = tile_attention(q, state, scale, selection.plan.limits)
            return attend_selected(selection, self, self._of_other_rows, q, state, scale, attend_tile)
        spec = state.spec
        num_heads, head_dim = q.shape[1:]
        work = self.work(window, Dims(num_heads, spec.num_kv_heads, max(head_dim, spec.v_head_dim)), chunk)

        # Base 2: e^s = 2^(s * log2(e)), with the factor folded into q, or into the softcap.
        queries = q.astype(mx.float32) * (scale / softcap if softcap else scale * LOG2E)
        outputs: list[mx.array] = []
        # Arrays that each lane computes last. The next tile is computed after them, because concurrent tiles would each
        # hold their scores in memory.
        lasts: list[list[mx.array]] = [[], []]
        for unit in work.units:
            with mx.stream(second_stream()) if unit.lane else nullcontext():
                done, lasts[unit.lane] = self._attend_unit(unit, queries, state, softcap, sinks, lasts[unit.lane])
            outputs += done
        last = lasts[0] + lasts[1]
        for decodes in work.run_decodes:
            out = attend_runs(decodes, queries, state, softcap, sinks, last, self.weights)
            outputs.append(out)
            last = [out]
        packed = (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).astype(q.dtype)
        return packed if work.order is None else packed[work.order]

    def select_keys(self, plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common) -> KeySelection:
        """See :meth:`metal_engine.attention.backend.StepAttention.select_keys`."""
        return select_keys(plan, index, state, common)

    def _of_other_rows(self, rows: StepRows) -> PortableStep:
        return PortableStep(rows, self.limits, self.weights)

    def _attend_unit(
        self,
        unit: Unit,
        queries: mx.array,  # [N, Hq, D] float32, scaled
        state: KVState,
        softcap: float | None,
        sinks: mx.array | None,
        last: list[mx.array],
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Return the outputs of the unit's queries, [T * R, Hq, Dv] each, and the arrays that are computed last."""
        num_kv_heads = state.spec.num_kv_heads
        query_tiles = [part.of(queries, num_kv_heads) for part in unit.queries]
        states = [_initial_state(sinks, part, num_kv_heads) for part in unit.queries]
        for span in unit.spans:
            keys, values = state.read_heads(after(span.head_rows, last))  # [T, Hkv, S, D], [T, Hkv, S, Dv]
            for tile in span.tiles:
                tile_queries = after(query_tiles[tile.query], last)  # [T, Hkv, R * G, D]
                scores = tile_queries @ keys[:, :, tile.lo : tile.hi].swapaxes(-1, -2)  # [T, Hkv, R * G, L]
                if softcap:
                    scores = mx.tanh(scores) * (softcap * LOG2E)
                if tile.biases:
                    by_row = (*scores.shape[:2], unit.queries[tile.query].num_rows, -1, scores.shape[3])
                    bias = sum(tile.biases[1:], tile.biases[0])  # broadcasts to [T, Hkv, R, G, L]
                    scores = (scores.reshape(by_row) + bias).reshape(scores.shape)
                seen = values[:, :, tile.lo : tile.hi]  # [T, Hkv, L, Dv]
                running = update(states[tile.query], scores, seen, self.weights)
                # The next tile must also wait for the total, which would otherwise keep this tile's weights in memory.
                states[tile.query], last = running, [running.out, running.total]
        num_heads = queries.shape[1]
        return [_finish(s, t, num_heads) for s, t in zip(states, unit.queries, strict=True)], last

    def _validate(self, q: mx.array, state: KVState, window: int | None) -> None:
        spec, num_slots = state.spec, len(state.keys)
        if q.shape[0] != self.rows.num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows, but the step has {self.rows.num_tokens} tokens")
        if spec.head_dim != q.shape[2] or len(state.values) != num_slots:
            raise ValueError(f"q {q.shape}, {num_slots} keys and {len(state.values)} values of {spec} do not match")
        if state.block_size != self.rows.block_size:
            raise ValueError(f"the state's blocks hold {state.block_size} tokens, not {self.rows.block_size}")
        if q.shape[1] % spec.num_kv_heads:
            raise ValueError(f"{q.shape[1]} query heads cannot share {spec.num_kv_heads} KV heads")
        if num_slots * spec.num_kv_heads >= 2**31:
            raise ValueError(f"{num_slots} slots of {spec.num_kv_heads} heads: (slot, head) indices do not fit 32 bits")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")


def _initial_state(sinks: mx.array | None, queries: Queries, num_kv_heads: int) -> SoftmaxState | None:
    """Return the state after the sink, which acts as a first key with a value of zero. None without sinks."""
    if sinks is None:
        return None
    t, r, group = queries.num_requests, queries.num_rows, sinks.size // num_kv_heads
    peak = (sinks.astype(mx.float32) * LOG2E).reshape(num_kv_heads, 1, group)
    peak = mx.broadcast_to(peak, (t, num_kv_heads, r, group)).reshape(t, num_kv_heads, r * group, 1)
    return SoftmaxState(peak, mx.ones_like(peak), mx.zeros((1, 1, 1, 1)))


def _finish(state: SoftmaxState | None, queries: Queries, num_heads: int) -> mx.array:
    """Return the output, [T * R, Hq, Dv]."""
    assert state is not None  # every row sees at least its own key
    out = state.out / state.total  # [T, Hkv, R * G, Dv]
    t, num_kv_heads, _, v_head_dim = out.shape
    split = out.reshape(t, num_kv_heads, queries.num_rows, -1, v_head_dim)
    return split.swapaxes(1, 2).reshape(-1, num_heads, v_head_dim)


class PortableBackend:
    """The portable backend, see the module's docstring. Runs wherever MLX runs.

    On a CPU, it uses a vectorized exponential, and ``CPU_LIMITS`` by default: decodes may then read runs of slots
    directly, and groups may use two streams. These settings are selected when the backend is created.
    """

    name = "mlx"

    def __init__(self, limits: Limits | None = None) -> None:
        on_cpu = computes_on_cpu()
        self._limits = limits or (CPU_LIMITS if on_cpu else GPU_LIMITS)
        self._weights = cpu_weights if on_cpu else plain_weights

    def for_step(self, rows: StepRows) -> PortableStep:
        """Plan a step. Index arrays for a kind of layer are created when its first layer attends."""
        return PortableStep(rows, self._limits, self._weights)

    def tables(self, rows: StepRows, work_keys: Hashable) -> StepTables | None:
        """See :meth:`metal_engine.attention.backend.ReplayableBackend.tables`.

        Returns None if the rows together have too many keys for one gather.
        """
        assert isinstance(work_keys, tuple)
        arrays: list[mx.array] = []
        for window, dims, chunk in work_keys:
            planned = _decodes_as_arrays(rows, window, dims, self._limits, chunk)
            if planned is None:
                return None
            arrays += planned

        def attention(tables: list[mx.array]) -> PortableStep:
            work = {key: _decode_work(*tables[2 * i : 2 * i + 2]) for i, key in enumerate(work_keys)}
            return PortableStep(rows, self._limits, self._weights, work, is_planned=True)

        return StepTables((rows.num_tokens, *(array.shape for array in arrays)), arrays, attention)


def _decodes_as_arrays(
    rows: StepRows, window: int | None, dims: Dims, limits: Limits, chunk: int | None
) -> list[mx.array] | None:
    """Return the keys that each row reads, and a mask of the keys that the row sees. Steps share the arrays' sizes.

    Every packed row is treated as a request with one row, even if several rows belong to one request. All rows are
    padded to the same number of keys, as in the drawing of a group in ``planning``.

    Returns:
        Indices for ``KVState.read_heads``, [N, Hkv, S] int32, and the mask, 0 or ``MASKED``, [N, 1, 1, 1, S] float32.
        None if the rows have more keys than one gather of a group may have (:class:`Limits`).
    """
    last = rows.positions[:, None]  # [N, 1]
    first = np.zeros_like(last) if window is None else np.maximum(0, last - (window - 1))
    if chunk is not None:
        first = np.maximum(first, last - last % chunk)
    num_keys = size_class(max(limits.min_keys, int((last - first).max()) + 1))
    per_key = rows.num_tokens * max(dims.num_kv_heads * dims.head_dim / limits.span, dims.num_heads / limits.scores)
    if num_keys > limits.min_keys and num_keys * per_key > 1:
        return None
    keys = first + np.arange(num_keys)  # [N, S]
    # Padding repeats the row's own key, so that a row reads only its own request's slots.
    slots = rows.slots(rows.request_of_row[:, None], np.minimum(keys, last))
    head_rows = slots[:, None] * dims.num_kv_heads + np.arange(dims.num_kv_heads)[:, None]  # [N, Hkv, S]
    bias = np.where(keys <= last, np.float32(0), np.float32(MASKED))
    return [mx.array(head_rows.astype(np.int32)), mx.array(bias[:, None, None, None])]


def _decode_work(head_rows: mx.array, bias: mx.array) -> Work:
    """Return the work described by the arrays of :func:`_decodes_as_arrays`."""
    num_rows, _, num_keys = head_rows.shape
    span = Span(head_rows, [ScoreTile(0, 0, num_keys, (bias,))])
    return Work([Unit([Queries(num_rows, 1, 0)], [span])], [], None, num_rows * num_keys, num_rows * num_keys)
