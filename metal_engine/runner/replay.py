"""Runs decode steps by replaying a graph that MLX has traced, instead of building the graph in Python again.

The graphs of two steps in which every row samples (decodes, and verifications of drafts) differ only in their sizes.
Sizes are therefore rounded up to size classes, and a trace is kept for each combination of size classes::

    rows           | r0 r1 r2 r3 r4 .. .. .. |    padding: rows of requests of one token, in the padding block
    block tables   | width: a power of two blocks
    states         | s0 s1 s2 s3 s4 .. .. .. |    recurrent states; padding rows have arbitrary states
    attention tables: see the backend's ``tables``

Everything that changes from step to step is an argument of the trace. The arrays of the KV cache are arguments, and
their new versions are results. A trace therefore does not refer to the pool, and writes are in place as in a built
step. A trace does refer to the model's weights, so it must not outlive the model.

If the previous step had the same requests in the same order, its recurrent states are passed to the trace unchanged.
Otherwise, separate operations gather the states of the step's requests first.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import (
    AttentionBackend,
    ReplayableAttention,
    ReplayableBackend,
    StepAttention,
    StepTables,
    size_class,
)
from metal_engine.errors import one_line
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.rows import StepRows, TracedRows
from metal_engine.kv_cache.segments import PADDING_SLOT, ZERO_STATE_SLOT, Segments, Slots
from metal_engine.kv_cache.writes import TracedWrites
from metal_engine.runner.view_fusion import fused_views
from metal_engine.settings.config import NO_REPLAY_WITH_INDEX, NO_REPLAY_WITHOUT_KERNEL
from metal_engine.step import DecodeForward, DecodeOutcome, SchedulerOutput

logger = logging.getLogger(__name__)

# A trace of a model with 30 layers takes 1.3 MB of memory and about 20 ms to create.
MAX_TRACES = 32
# A combination of sizes is traced when it occurs for the third time. While a batch grows
# or shrinks, the sizes in between occur only once or twice.
TRACE_AT = 3
MIN_TABLE_BLOCKS = 16

_Trace = Callable[..., Any]

# The forward of a draft head has the head's output, [N, hidden_size], in the place of the logits.
ForwardResult = tuple[mx.array, mx.array | None]
"""Logits of a forward, [R, vocab_size], and hidden states of all rows, [N, hidden_size], or None."""


class ReplayableModel(Protocol):
    """A model whose decode steps can be traced: a paged model, or its draft head.

    Attributes:
        pool: states that the model reads and writes.
    """

    @property
    def pool(self) -> StatePool: ...

    @property
    def forward_of_arrays(self) -> Callable[..., ForwardResult]:
        """See :meth:`metal_engine.models.paged_model.PagedModel.forward_of_arrays`."""


class DecodeReplay:
    """Traces of a model's decode steps.

    Belongs to the thread that runs the steps.

    Args:
        padding_block: id of a block of the pool that no request uses, for the K and V of padding rows.
        max_num_seqs: maximum number of requests in a step. It limits padding, because there is no memory for the
            recurrent states of more requests. None: no limit, because no state is recurrent.
        needs_hidden: True if steps return the hidden states of all rows, too.
        steps: name of the steps in messages.
        trace_at: see ``TRACE_AT``.

    Attributes:
        refusal: short reason why replay is disabled; None while it is enabled.
    """

    def __init__(
        self,
        model: ReplayableModel,
        backend: AttentionBackend,
        *,
        padding_block: int,
        max_num_seqs: int | None = None,
        needs_hidden: bool = False,
        steps: str = "decode steps",
        trace_at: int = TRACE_AT,
    ) -> None:
        self._model = model
        self._pool = model.pool
        self._backend = backend if isinstance(backend, ReplayableBackend) else None
        self._padding_block = padding_block
        self._max_num_seqs = max_num_seqs
        self._options: dict[str, Any] = {"hidden_indices": slice(None)} if needs_hidden else {}
        self._steps_name = steps
        self._trace_at = trace_at
        self._work_keys: Hashable | None = None if self._pool.has_tokens else ()
        self._traces: OrderedDict[Hashable, _Trace] = OrderedDict()  # least recently used first
        self._num_seen: Counter[Hashable] = Counter()  # by sizes without a trace
        self._broken: set[Hashable] = set()  # sizes whose trace raised when replayed: they are built
        self._num_runs = 0  # number of times that a traced function has run as Python code
        self.refusal = self._refusal_of_model()

    def _refusal_of_model(self) -> str | None:
        if self._pool.has_index:
            return NO_REPLAY_WITH_INDEX
        return NO_REPLAY_WITHOUT_KERNEL if self._backend is None else None

    def reset_traces(self) -> None:
        """Delete all traces and clear recorded failures. Call it if replay did not cause the failures."""
        self._traces.clear()
        self._num_seen.clear()
        self._broken.clear()
        self.refusal = self._refusal_of_model()

    @property
    def num_traces(self) -> int:
        return len(self._traces)

    def drop_traces(self) -> None:
        """Delete all traces, which releases the weights they refer to. Traces are recreated on demand."""
        self._traces.clear()

    def learn(self, attention: StepAttention) -> None:
        """Record which attention variants the model's layers use, from the attention of a built step.

        Only the first record counts. Steps of a model with attention are not traced before it.
        """
        if self._work_keys is None and isinstance(attention, ReplayableAttention):
            self._work_keys = attention.work_keys or None

    def forward(
        self, inputs: tuple[mx.array, ...], rows: StepRows, build: Callable[[], ForwardResult]
    ) -> tuple[ForwardResult, DecodeOutcome]:
        """Run the forward of a step in which every row samples.

        Args:
            inputs: first arguments of the model's ``forward_of_arrays``, up to the positions, [N, ...] each.
            rows: validated rows.
            build: builds the graph of the step if it is not replayed.

        Returns:
            The result of the step's forward, and the outcome: ``replayed``, ``traced``, or the reason why it was built
            (:class:`metal_engine.step.DecodeForward`).
        """
        if self.refusal is not None or self._backend is None:
            return build(), "refused"
        larger = self._padded(rows)
        if self._work_keys is None or larger is None:
            return build(), "untraced"
        tables = self._backend.tables(larger, self._work_keys)
        if tables is None:
            return build(), "large"
        key = tables.key, larger.num_requests if self._pool.is_recurrent else None
        before = self._pool.pending_states()
        trace = self._traces.get(key)
        if trace is not None:
            self._traces.move_to_end(key)
            num_runs = self._num_runs
            try:
                result = self._run(trace, inputs, larger, tables, rows.num_tokens)
                return result, "replayed" if self._num_runs == num_runs else self._not_replayed()
            except Exception as error:  # noqa: BLE001  (raised again by build(), unless the trace is the cause)
                reason = one_line(error)  # not the error itself: see below
            del self._traces[key]
            self._pool.restore_pending_states(before)
            built = build()
            self._broken.add(key)
            logger.warning("a trace of %d rows cannot be replayed, and is dropped: %s", larger.num_tokens, reason)
            return built, "untraced"
        if not self._is_worth_tracing(key):
            return build(), "untraced"
        trace = mx.compile(self._function(tables, larger))
        try:
            result = self._run(trace, inputs, larger, tables, rows.num_tokens)
        except Exception as error:  # noqa: BLE001  (raised again by build(), unless tracing is the cause)
            # Do not keep the error: its traceback refers to the pool's arrays, so the next writes would copy them.
            reason = one_line(error)
        else:
            self._keep(key, trace)
            return result, "traced"
        self._pool.restore_pending_states(before)
        built = build()
        self.refuse(f"its forward cannot be traced ({reason})")
        return built, "refused"

    def failed(self, forward: DecodeForward | None, behind: Iterable[DecodeForward], error: Exception) -> None:
        """Handle a failed step. A trace may be the cause, so delete all traces.

        If a trace ran for the first time in the failed step or in a step behind it, the trace is assumed to be the
        cause, and replay is disabled. Otherwise each newly traced step would fail. If the failed step was built, the
        steps queued behind it are not assumed to be the cause.

        Args:
            forward: forward of the failed step; None if not every row of it sampled.
            behind: forwards of the steps that were queued behind the failed step.
        """
        self._traces.clear()
        if self.refusal is not None or forward is None or forward.outcome not in ("replayed", "traced"):
            return
        if forward.outcome == "traced" or any(later.outcome == "traced" for later in behind):
            self.refuse(f"a step failed that was replayed for the first time ({one_line(error)})")

    def _not_replayed(self) -> DecodeOutcome:
        """Return the outcome of a step for which MLX called the traced function again instead of replaying the trace.

        Disables replay if MLX does not trace functions at all.
        """
        if _compiles():
            return "traced"
        self.refuse("MLX compiles nothing")
        return "refused"

    def refuse(self, why: str) -> None:
        """Disable replay, delete all traces and log a warning. ``why`` becomes the refusal."""
        self.refusal = why
        self._traces.clear()
        logger.warning("%s are built instead of replayed, which takes more time on the host: %s", self._steps_name, why)

    def _is_worth_tracing(self, key: Hashable) -> bool:
        if key in self._broken:
            return False
        if len(self._num_seen) > 8 * MAX_TRACES:  # the number of sizes is unlimited
            self._num_seen.clear()
        self._num_seen[key] += 1
        return self._num_seen[key] >= self._trace_at

    def _padded(self, rows: StepRows) -> StepRows | None:
        """Return the step padded to a size class. Return None if the step's recurrent states do not suit a trace.

        They suit a trace if all requests have an initial state and the same number of rows.
        """
        if not self._pool.is_recurrent:
            return padded(rows, self._padding_block)
        if not _are_alike(rows):
            return None
        # Padding requests have one row each, so a step whose requests have several rows gets no padding.
        max_requests = self._max_num_seqs if rows.num_requests == rows.num_tokens else rows.num_requests
        return padded(rows, self._padding_block, max_requests)

    def _function(self, tables: StepTables, rows: StepRows) -> _Trace:
        """Return the function to trace: a forward whose arguments are all arrays, including the pool's arrays."""
        model, pool, attention_over, options = self._model, self._pool, tables.attention, self._options
        segments = (
            Segments.alike(rows.num_requests, rows.num_tokens // rows.num_requests) if pool.is_recurrent else None
        )
        state_slots = () if segments is None else segments.writes

        def forward(
            inputs: tuple[mx.array, ...],
            positions: mx.array,
            slots: mx.array,
            given: list[mx.array],
            arrays: list[mx.array],
        ) -> tuple[ForwardResult, list[mx.array]]:
            self._num_runs += 1
            pool.attach_arrays(arrays, state_slots)
            traced = TracedRows(TracedWrites(slots), segments)
            with fused_views():
                result = model.forward_of_arrays(*inputs, positions, traced, attention_over(given), **options)
            return result, pool.detach_arrays(state_slots, state_slots)

        return forward

    def _run(
        self, trace: _Trace, inputs: tuple[mx.array, ...], rows: StepRows, tables: StepTables, num_tokens: int
    ) -> ForwardResult:
        """Return the result of the first ``num_tokens`` rows of a padded step.

        On error, the pool is unchanged, except for pending recurrent states.
        """
        if missing := rows.num_tokens - num_tokens:
            inputs = tuple(mx.concatenate([x, mx.zeros((missing, *x.shape[1:]), x.dtype)]) for x in inputs)
        rotary = rows.positions if rows.rotary_positions is None else rows.rotary_positions
        positions, slots = mx.array(rotary), mx.array(rows.slot_mapping)
        reads, writes = _state_slots(rows) if self._pool.is_recurrent else ((), ())
        arrays = self._pool.detach_arrays(reads, writes)
        try:
            # This releases the arguments, because writes are in place only without another reference to the old arrays.
            (logits, hidden), arrays = trace(inputs, positions, slots, tables.arrays, arrays)
        finally:
            self._pool.attach_arrays(arrays, writes)
        return logits[:num_tokens], None if hidden is None else hidden[:num_tokens]

    def _keep(self, key: Hashable, trace: _Trace) -> None:
        del self._num_seen[key]
        self._traces[key] = trace
        if len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)


def is_decode(plan: SchedulerOutput, rows: StepRows, num_logits: int) -> bool:
    """Return True if every row of a step samples once, and the step can be replayed.

    A step cannot be replayed if it loads KV from a store, or if its rotary positions have three axes.

    Args:
        num_logits: number of rows whose logits the step needs.
    """
    has_a_sample_each = len(rows.logits_indices) == num_logits == rows.num_tokens
    return has_a_sample_each and not plan.loads_kv and not rows.has_axes


def _compiles() -> bool:
    """Return True if ``mx.compile`` traces functions. After ``mx.disable_compile``, it runs them in each call."""
    num_runs = 0

    def function(x: mx.array) -> mx.array:
        nonlocal num_runs
        num_runs += 1
        return x + 1

    compiled, x = mx.compile(function), mx.array(0)
    compiled(x)
    compiled(x)
    return num_runs == 1


def _are_alike(rows: StepRows) -> bool:
    """Return True if all requests have the same number of rows and an initial recurrent state."""
    length = rows.num_tokens // rows.num_requests
    return bool((rows.query_lens == length).all() and (rows.state_reads != ZERO_STATE_SLOT).all())


def _state_slots(rows: StepRows) -> tuple[Slots, Slots]:
    """Return the slots of the initial and of the final recurrent states of the requests."""
    return tuple(rows.state_reads.tolist()), tuple(rows.state_writes.tolist())


def padded(rows: StepRows, padding_block: int, max_num_requests: int | None = None) -> StepRows:
    """Pad a step to a size class, with a wider block table and with one-token requests at its end.

    Args:
        padding_block: block that all padding requests use.
        max_num_requests: maximum number of requests after padding; None: no limit.
    """
    missing = size_class(rows.num_tokens) - rows.num_tokens
    if max_num_requests is not None:
        missing = min(missing, max_num_requests - rows.num_requests)
    num_requests, num_blocks = rows.block_table.shape
    width = max(MIN_TABLE_BLOCKS, 1 << (num_blocks - 1).bit_length())
    block_table = np.full((num_requests + missing, width), padding_block, np.int32)
    block_table[:num_requests, :num_blocks] = rows.block_table
    if not missing:
        return replace(rows, block_table=block_table)
    # Extend the existing arrays: a new layout of the step takes ten times as long.
    zeros, numbers = np.zeros(missing, np.int32), np.arange(missing, dtype=np.int32)
    requests, new_rows = num_requests + numbers, rows.num_tokens + numbers
    return replace(
        rows,
        cu_seqlens_q=np.concatenate([rows.cu_seqlens_q, new_rows + 1]),
        seq_lens=np.concatenate([rows.seq_lens, zeros + 1]),
        block_table=block_table,
        request_of_row=np.concatenate([rows.request_of_row, requests]),
        positions=np.concatenate([rows.positions, zeros]),
        rotary_positions=None if rows.rotary_positions is None else np.concatenate([rows.rotary_positions, zeros]),
        slot_mapping=np.concatenate([rows.slot_mapping, zeros + padding_block * rows.block_size]),
        logits_indices=np.concatenate([rows.logits_indices, new_rows]),
        sample_requests=np.concatenate([rows.sample_requests, requests]),
        state_reads=np.concatenate([rows.state_reads, zeros + PADDING_SLOT]),
        state_writes=np.concatenate([rows.state_writes, zeros + PADDING_SLOT]),
    )
