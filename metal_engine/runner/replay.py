"""Runs decode steps by replaying a graph that MLX has traced, instead of building the same graph in Python again.

A step all of whose rows sample (decodes, and verifications of drafts) has the same graph as another one but for its
sizes. So sizes are rounded up, and a trace is kept for each combination of them::

    rows           | r0 r1 r2 r3 r4 .. .. .. |    padded: rows of requests of one token, in the trash block
    block tables   | as wide as a power of two blocks
    tables of attention: see the backend's ``tables``

What changes from step to step goes in as arrays, the KV cache too, and comes out: a trace holds no pool, and the writes
stay in place as in a step that is built. It does hold the model's weights, so it must not outlive the model.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

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
from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.writes import TracedWrites
from metal_engine.models.paged_model import PagedModel

logger = logging.getLogger(__name__)

# A trace of a model with 30 layers takes 1.3 MB of memory and some 20 ms to make.
MAX_TRACES = 32
# How often a combination of sizes comes before it is traced: those between two batch sizes come once or twice.
TRACE_AT = 3
MIN_TABLE_BLOCKS = 16

_Trace = Callable[..., Any]


class DecodeReplay:
    """Traces of a model's decode steps.

    Belongs to the thread that runs the steps.

    Args:
        trash_block: a block of the pool that no request has: where padded rows leave their K and V.
        trace_at: see ``TRACE_AT``.

    Attributes:
        refusal: why nothing is replayed, in a few words; None as long as nothing speaks against it.
        outcome: of the last step that it ran: ``replayed``, or why the step was built: ``untraced``, where its sizes
            are new or rare, ``large``, where it takes too much in one piece, ``refused``.
    """

    def __init__(
        self, model: PagedModel, backend: AttentionBackend, trash_block: int, *, trace_at: int = TRACE_AT
    ) -> None:
        self._model = model
        self._pool = model.pool
        self._backend = backend
        self._trash_block = trash_block
        self._trace_at = trace_at
        self._asked: Hashable | None = None
        self._traces: OrderedDict[Hashable, _Trace] = OrderedDict()  # least recently used first
        self._num_seen: Counter[Hashable] = Counter()  # by sizes that have no trace
        self.outcome = ""
        self.refusal: str | None = None
        if self._pool.is_recurrent:
            self.refusal = "its layers carry recurrent states"
        elif not isinstance(backend, ReplayableBackend):
            self.refusal = "several backends share its attention"

    @property
    def num_traces(self) -> int:
        return len(self._traces)

    def drop_traces(self) -> None:
        """Let go of all traces, and of the weights with them; those that are needed again are made again."""
        self._traces.clear()

    def learn(self, attention: StepAttention) -> None:
        """See in a step that was built what the layers ask of attention."""
        if self._asked is None and isinstance(attention, ReplayableAttention):
            self._asked = attention.asked or None

    def forward(self, input_ids: mx.array, rows: StepRows, build: Callable[[], mx.array]) -> mx.array:
        """The logits of a step all of whose rows sample, [N, vocab_size].

        Args:
            input_ids: [N] int32.
            rows: validated.
            build: makes the graph of the step, where it is not replayed.
        """
        planned = self._plan(rows)
        if planned is None:
            return build()
        larger, tables = planned
        trace = self._traces.get(tables.key)
        if trace is not None:
            self.outcome = "replayed"
            self._traces.move_to_end(tables.key)
            return self._run(trace, input_ids, larger, tables)[: rows.num_tokens]
        if not self._is_worth_tracing(tables.key):
            self.outcome = "untraced"
            return build()
        trace = mx.compile(self._function(tables))
        try:
            logits = self._run(trace, input_ids, larger, tables)
        except Exception as error:  # noqa: BLE001  (raised again by what is built, unless it is tracing that fails)
            # Not the error itself: its traceback holds the pool's arrays, and the next writes would copy them.
            reason = one_line(error)
        else:
            self.outcome = "replayed"
            self._keep(tables.key, trace)
            return logits[: rows.num_tokens]
        built = build()
        self._refuse(f"its forward cannot be traced ({reason})")
        return built

    def _refuse(self, why: str) -> None:
        self.refusal, self.outcome = why, "refused"
        self._traces.clear()
        logger.warning("decode steps are built one by one, which takes longer on the host: %s", why)

    def _plan(self, rows: StepRows) -> tuple[StepRows, StepTables] | None:
        """The padded step with its attention; None if it is to be built."""
        if self.refusal is not None or not isinstance(self._backend, ReplayableBackend):
            self.outcome = "refused"
            return None
        if self._asked is None:
            self.outcome = "untraced"
            return None
        larger = padded(rows, self._trash_block)
        tables = self._backend.tables(larger, self._asked)
        if tables is None:
            self.outcome = "large"
            return None
        return larger, tables

    def _is_worth_tracing(self, key: Hashable) -> bool:
        if len(self._num_seen) > 8 * MAX_TRACES:  # sizes are endless
            self._num_seen.clear()
        self._num_seen[key] += 1
        return self._num_seen[key] >= self._trace_at

    def _function(self, tables: StepTables) -> _Trace:
        """What is traced: a forward over arrays alone, the pool's among them."""
        model, pool, attention_over = self._model, self._pool, tables.attention

        def forward(
            input_ids: mx.array, positions: mx.array, slots: mx.array, given: list[mx.array], arrays: list[mx.array]
        ) -> tuple[mx.array, list[mx.array]]:
            pool.take_back(arrays)
            logits = model.forward_of_arrays(input_ids, positions, TracedWrites(slots), attention_over(given))
            return logits, pool.hand_out()

        return forward

    def _run(self, trace: _Trace, input_ids: mx.array, rows: StepRows, tables: StepTables) -> mx.array:
        """The logits of a padded step. Where it raises, the pool is as it was."""
        missing = rows.num_tokens - input_ids.size
        if missing:
            input_ids = mx.concatenate([input_ids, mx.zeros((missing,), mx.int32)])
        positions, slots = mx.array(rows.positions), mx.array(rows.slot_mapping)
        arrays = self._pool.hand_out()
        try:
            # What went in is let go of: writes are in place only if nothing else holds the old arrays.
            logits, arrays = trace(input_ids, positions, slots, tables.arrays, arrays)
        finally:
            self._pool.take_back(arrays)
        return logits

    def _keep(self, key: Hashable, trace: _Trace) -> None:
        del self._num_seen[key]
        self._traces[key] = trace
        if len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)


def padded(rows: StepRows, trash_block: int) -> StepRows:
    """A step with requests of one token at its end, all in one block, and a wider block table: of a size of few."""
    missing = size_class(rows.num_tokens) - rows.num_tokens
    num_requests, num_blocks = rows.block_table.shape
    width = max(MIN_TABLE_BLOCKS, 1 << (num_blocks - 1).bit_length())
    block_table = np.full((num_requests + missing, width), trash_block, np.int32)
    block_table[:num_requests, :num_blocks] = rows.block_table
    if not missing:
        return replace(rows, block_table=block_table)
    context_lens = np.append(rows.context_lens, np.zeros(missing, np.int32))
    query_lens = np.append(rows.query_lens, np.ones(missing, np.int32))
    return step_rows(block_table, context_lens, query_lens, rows.block_size)
