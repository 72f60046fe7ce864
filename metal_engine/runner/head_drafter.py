"""Drafts of a model's draft head (:mod:`metal_engine.models.draft_head`).

The head runs in every step of its model, in the step's own graph. From a row's hidden state and the token after the
row, it computes its K and V for the row's slot. The head therefore never lacks the KV of a token::

    tokens       t0 t1 t2 t3 | t4 d5 d6     a step with two drafts, after a step that sampled t4
    hidden       h0 h1 h2 h3 | h4 h5 h6
    next tokens  t1 t2 t3 t4 | s5 s6 s7     samples; if s5 = d5 and s6 != d6, then s6 is the last known token
    KV at slot   0  1  2  3  | 4  5  6      slot 6 is void, and the next step writes it again
    carried      .  .  .  g3 | .  g5 .      the head's output at the row before the last known token

Before the next step, the LM head turns the carried output into the first draft. For each further draft, the head
alone runs again, and its last output replaces the hidden state.

After several decode steps without requested drafts, steps compute only the head's K and V, and carry no output. When a
plan requests drafts again, its step has no drafts yet, and carries an output. The following plans get drafts.

If the token after a row has the feature of an image, the head gets the feature. A chunk may end before an image that is
not encoded yet. The head then gets the embedding of the image token, so its drafts may be worse.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, StepAttention
from metal_engine.device.streams import synchronize
from metal_engine.errors import one_line
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.rows import StepRows
from metal_engine.models.draft_head import PagedDraftHead
from metal_engine.runner.batch import RequestTable
from metal_engine.runner.drafting import DraftTask, TargetStep, sample_drafts, wanted_drafts
from metal_engine.runner.replay import DecodeReplay, ForwardResult, is_decode
from metal_engine.settings.config import CacheConfig
from metal_engine.step import Drafting, ModelOutput, SchedulerOutput

logger = logging.getLogger(__name__)

# Number of steps after the last requested drafts in which the head's output is still carried.
_CARRIED_STEPS = 4


@dataclass(frozen=True, slots=True)
class _Carried:
    """Output of the head at the row before a request's last known token.

    Attributes:
        output: the head's output at all rows that sample in a step, [R, hidden_size].
        row: index of the request's row in ``output``.
        num_tokens: number of known tokens of the request for which the output is valid.
    """

    output: mx.array
    row: int
    num_tokens: int


class HeadDrafter:
    """Drafts tokens for the requests of a :class:`RequestTable`. Belongs to the thread that loaded the model.

    Args:
        head: head whose state is in ``pool``.
        pool: pool of the model, which the model runner allocates.
        backend: attention backend of the model.

    Attributes:
        head: the draft head.
        needs_hidden: see :class:`metal_engine.runner.drafting.Drafter`.
        replay: traces of the head's forwards in decode steps and for drafts; None if they are never replayed.
    """

    needs_hidden = True

    def __init__(
        self, head: PagedDraftHead, pool: StatePool, backend: AttentionBackend, cache_config: CacheConfig
    ) -> None:
        self.head, self._pool, self._backend = head, pool, backend
        self._num_blocks = cache_config.num_blocks
        self.replay: DecodeReplay | None = None
        if cache_config.num_padding_blocks:
            self.replay = DecodeReplay(
                head, backend, padding_block=cache_config.num_blocks, steps="steps of the draft head"
            )
        self._num_new_traces = 0  # traces whose first forward has not completed
        self._carried: dict[str, _Carried] = {}
        self._num_idle_steps = _CARRIED_STEPS  # number of steps since drafts were requested

    def update(self, plan: SchedulerOutput) -> None:
        """Drop the carried outputs of requests that the plan drops or adds."""
        for request_id in (*plan.dropped_req_ids, *(new.request_id for new in plan.new_requests)):
            self._carried.pop(request_id, None)

    # --- following the model ---

    def follow(self, step: TargetStep, tokens: mx.array | None) -> FollowedByHead:
        """Build the head's part of a step, on the step's hidden states and samples.

        Computes the head's output only if it may be carried. Otherwise, computes only K and V.
        """
        assert step.hidden is not None
        rows = step.batch.rows
        next_tokens = _next_tokens(step, tokens)
        self._num_idle_steps += 1
        # The output is also carried in a step with prompts. It costs little of the step's time, and the prompts'
        # requests decode next.
        is_carried = self._num_idle_steps <= _CARRIED_STEPS or rows.num_tokens > len(rows.logits_indices)
        is_carried = is_carried and len(rows.logits_indices) > 0
        num_new_traces, output = self._num_new_traces, None
        if is_decode(step.plan, rows, len(rows.logits_indices)) and (is_carried or self.replay is not None):
            output = self._run(next_tokens, step.hidden, rows, step.attention)
        elif is_carried:
            output = self.head.follow(next_tokens, step.hidden, rows, step.attention, self._backend, step.next_images)
        else:
            self.head.write(next_tokens, step.hidden, rows, step.attention, step.next_images)
        num_new_traces = self._num_new_traces - num_new_traces
        if is_carried:
            return FollowedByHead(self, step, num_new_traces, output)
        return FollowedByHead(self, step, num_new_traces, None, self.head.pool.writes_done_marker())

    def finish_step(self, carried: dict[str, _Carried | None], num_new_traces: int) -> None:
        """Replace the carried outputs of the requests that sampled in a completed step.

        Args:
            carried: request id -> new output; None to carry none for this request.
            num_new_traces: number of traces whose first forward was in the step.
        """
        self._num_new_traces -= num_new_traces
        for request_id, one in carried.items():
            self._carried.pop(request_id, None)
            if one is not None:
                self._carried[request_id] = one

    def _run(
        self, tokens: mx.array, hidden: mx.array, rows: StepRows, attention: StepAttention | None = None
    ) -> mx.array:
        """Replay or build the head's forward. Return its output, [N, hidden_size].

        Args:
            attention: attention over ``rows``; None: created if the forward is built.
        """

        def build() -> ForwardResult:
            planned = attention or self._backend.for_step(rows)
            output = self.head(tokens, hidden, rows, planned)
            if self.replay is not None:
                self.replay.learn(planned)
            return output, None

        if self.replay is None:
            return build()[0]
        (output, _), outcome = self.replay.forward((tokens, hidden), rows, build)
        self._num_new_traces += outcome == "traced"
        return output

    @property
    def replay_refusal(self) -> str | None:
        """See :class:`metal_engine.runner.drafting.Drafter`."""
        return None if self.replay is None else self.replay.refusal

    def failed(self, error: Exception) -> None:
        """Delete all traces after a failed step.

        Disable replay if the first forward of a trace had not completed, because the trace may be the cause.
        """
        if self.replay is None:
            return
        self.replay.drop_traces()
        num_new_traces, self._num_new_traces = self._num_new_traces, 0
        if num_new_traces and self.replay.refusal is None:
            self.replay.refuse(f"its first replay was part of a step that failed ({one_line(error)})")

    # --- drafts ---

    def draft(self, table: RequestTable, plan: SchedulerOutput) -> Drafting | None:
        """Compute the drafts of requests with a carried output. Return None if the plan requests no drafts.

        Other requests get no drafts: their lists are empty. Raises the error of a failed forward. The failure does not
        affect the model's KV, but the head may lose its KV.
        """
        wanted = wanted_drafts(plan)
        if not wanted:
            return None
        self._num_idle_steps = 0
        began = time.perf_counter()
        tasks, outputs = [], []
        for request_id, num_drafts in wanted.items():
            index, carried = table.index(request_id), self._carried.get(request_id)
            if carried is not None and carried.num_tokens == len(table.token_ids(index)):
                tasks.append(DraftTask(request_id=request_id, index=index, num_drafts=num_drafts))
                outputs.append(carried.output[carried.row])
        drafting = Drafting(token_ids={request_id: [] for request_id in wanted})
        if not tasks:
            return drafting
        drafting.token_ids |= {task.request_id: task.drafts for task in tasks}
        try:
            drafting.num_forwards = self._chain(table, tasks, mx.stack(outputs))
        except Exception as error:
            self._carried.clear()
            self.failed(error)
            recovered = [self._pool.recover_state(state) for state in self.head.pool.states]
            if not all(recovered):
                logger.warning("the draft head has lost its KV")
            raise
        drafting.seconds = drafting.forward_seconds = time.perf_counter() - began
        return drafting

    def _chain(self, table: RequestTable, tasks: list[DraftTask], output: mx.array) -> int:
        """Compute drafts, one for each request per forward, from the head's output, [R, hidden_size].

        Each forward is evaluated before the next forward is built: its K and V are then written in place, and the host
        knows the drafts. Returns the number of forwards.
        """
        num_forwards = 0
        while True:
            tokens = sample_drafts(table, tasks, self.head.logits(output))
            mx.eval(tokens, output)
            synchronize()
            self._num_new_traces = 0
            num_forwards += 1
            for task, draft in zip(tasks, np.array(tokens).tolist(), strict=True):
                task.take(draft, table.stop_token_ids(task.index))
                table.write_drafts(task.index, task.drafts)
            going = [row for row, task in enumerate(tasks) if not task.has_ended]
            if not going:
                return num_forwards
            tasks = [tasks[row] for row in going]
            output = self._forward(table, tasks, output[mx.array(going)])

    def _forward(self, table: RequestTable, tasks: list[DraftTask], output: mx.array) -> mx.array:
        """Build a forward at the slot before each request's last draft. Return the head's output, [R, hidden_size]."""
        indices = np.array([task.index for task in tasks], np.int32)
        num_tokens = [len(table.token_ids(task.index, len(task.drafts))) for task in tasks]
        ones = np.ones(len(tasks), np.int32)
        rows = table.rows(indices, np.array(num_tokens, np.int32) - 2, ones, ones)
        if (rotary_positions := table.rotary_positions(indices, rows)) is not None:
            rows = replace(rows, rotary_positions=rotary_positions)
        rows.validate(self._num_blocks)
        drafts = mx.array(np.array([task.drafts[-1] for task in tasks], np.int32))
        before = self.head.pool.snapshot()
        try:
            return self._run(drafts, output, rows)
        except BaseException:
            self.head.pool.restore(before)
            raise

    def release(self) -> None:
        """Release all arrays except the head's weights. Its KV is released with the pool."""
        self._carried.clear()
        if self.replay is not None:
            self.replay.drop_traces()


class FollowedByHead:
    """Part of a model's step that the draft head computes (:class:`metal_engine.runner.drafting.FollowedStep`).

    Args:
        drafter: drafter that carries the step's outputs after :meth:`finish`.
        step: step of the model.
        num_new_traces: number of traces whose first forward is in this step.
        output: the head's output at the rows that sample, [R, hidden_size]; None if it is not computed.
        written: array whose evaluation completes the head's writes; None if ``output`` is computed.
    """

    def __init__(
        self,
        drafter: HeadDrafter,
        step: TargetStep,
        num_new_traces: int,
        output: mx.array | None,
        written: mx.array | None = None,
    ) -> None:
        self._drafter, self._table, self._output = drafter, step.table, output
        self._num_new_traces = num_new_traces
        drafts, rows = step.plan.scheduled_spec_decode_tokens, step.batch.rows
        self._num_rows = {r: 1 + len(drafts.get(r, ())) for r in step.plan.sampled_req_ids}
        self._positions = rows.positions[rows.logits_indices]
        self._written = written

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate with the step."""
        return [array for array in (self._output, self._written) if array is not None]

    def finish(self, output: ModelOutput) -> None:
        """Carry the output at the row before the last known token of each request that has a new token."""
        first = 0
        carried: dict[str, _Carried | None] = {}
        for request_id, num_rows in self._num_rows.items():
            row = first + output.num_accepted_tokens.get(request_id, 0)
            first += num_rows
            carried[request_id] = None
            is_void = request_id in output.late_req_ids or request_id in output.errors
            if self._output is not None and not is_void and self._table.holds(request_id):
                carried[request_id] = _Carried(self._output, row, int(self._positions[row]) + 2)
        self._drafter.finish_step(carried, self._num_new_traces)


def _next_tokens(step: TargetStep, tokens: mx.array | None) -> mx.array:
    """Return the token after each row, [N] int32: a known token, or the sample of the row. 0 if neither exists."""
    batch, rows = step.batch, step.batch.rows
    if tokens is not None and tokens.size == rows.num_tokens:
        return tokens
    following = np.zeros(rows.num_tokens, np.int32)
    following[:-1] = batch.input_ids[1:]
    samples = np.zeros(rows.num_requests, bool)
    samples[rows.sample_requests] = True
    packed = list(step.plan.num_scheduled_tokens)
    for i in np.flatnonzero(~samples).tolist():  # a chunk that ends within its prompt, or at the end of a pooled prompt
        known, end = step.table.token_ids(step.table.index(packed[i])), int(rows.seq_lens[i])
        following[rows.cu_seqlens_q[i + 1] - 1] = known[end] if end < len(known) else 0
    next_tokens = mx.array(following)
    if tokens is not None:
        next_tokens[mx.array(rows.logits_indices)] = tokens
    return next_tokens
