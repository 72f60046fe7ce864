"""Draft model: drafts tokens that may follow a request's tokens, with its own KV over the request's block table.

Its KV occupies the same slots as the target's KV, in separate arrays. Before the target's step, one forward of the
draft model computes the tokens that lack its KV, and the first draft. Each further draft takes one forward::

    tokens     t0 ... t5 | t6  t7 |                    t6, t7: new since its last step
    forward 1              t6  t7      -> d0           (a chunk, if the KV of many tokens is missing)
    forward 2                      d0  -> d1
    target                     t7  d0  d1              writes to the same slots of the target's arrays

Each forward is evaluated before the next forward is built. Its KV is then written, and the host knows the draft when it
edits the logits of the next draft.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend
from metal_engine.device.streams import synchronize
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.batch import RequestTable
from metal_engine.runner.drafting import DraftTask, TargetStep, sample_drafts, wanted_drafts
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import NEW_TO_DRAFT_MODEL, Drafting, KVCacheLostError, NewRequestData, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _ModelTask(DraftTask):
    """Work for one request in a step.

    Attributes:
        start, stop: range of the request's tokens that the next forward computes.
    """

    start: int
    stop: int


class DraftModel:
    """Drafts tokens for the requests of a :class:`RequestTable`. Belongs to the thread that loaded the model.

    Args:
        model: model whose only state is KV of every token.
        backend: attention backend of the model.
        vocab_size: vocabulary size of the target model. Sampling draws one random number per entry.
        max_positions: maximum length of a request that gets drafts, in tokens; None: ``max_model_len``.

    Attributes:
        needs_hidden: see :class:`metal_engine.runner.drafting.Drafter`.
        replay_refusal: always None, because the draft model's steps are never replayed.
    """

    needs_hidden = False
    replay_refusal = None

    def __init__(
        self,
        model: PagedModel,
        backend: AttentionBackend,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        vocab_size: int,
        max_positions: int | None = None,
    ) -> None:
        self._model = model
        self._pool = model.pool
        self._backend = backend
        self._config = scheduler_config
        self._block_size, self._num_blocks = cache_config.block_size, cache_config.num_blocks
        self._vocab_size = vocab_size
        self._max_positions = scheduler_config.max_model_len if max_positions is None else max_positions
        self._has_kv = np.zeros(cache_config.num_tokens, bool)  # [num_slots] True: KV of the same token as the target's
        # Request id -> number of leading tokens with KV, as known when the model last ran for the request.
        self._num_computed: dict[str, int] = {}
        self._written: list[np.ndarray] = []  # slots written in this step
        self._pool.allocate(cache_config.num_blocks, cache_config.block_size)

    # --- known KV -------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput) -> None:
        """Record which tokens of the plan's new requests have KV of this model. Drop the plan's dropped requests.

        Blocks that the plan loads from a store have no KV of this model. A cached block has KV of this model only if
        this model has computed the block, too.
        """
        for request_id in plan.dropped_req_ids:
            self._num_computed.pop(request_id, None)
        if plan.kv_connector_metadata is not None:
            for block_id in plan.kv_connector_metadata.loads:
                self._has_kv[block_id * self._block_size : (block_id + 1) * self._block_size] = False
        for new in plan.new_requests:
            self._num_computed[new.request_id] = self._num_cached(new)

    def _num_cached(self, new: NewRequestData) -> int:
        blocks = np.array(new.block_ids, np.int64)[:, None] * self._block_size
        slots = (blocks + np.arange(self._block_size)).ravel()[: new.num_computed_tokens]
        missing = np.flatnonzero(~self._has_kv[slots])
        return int(missing[0]) if len(missing) else len(slots)

    def follow(self, step: TargetStep, tokens: mx.array | None) -> None:
        """Mark this model's KV as outdated in the slots that the target's step will write. Return None.

        The slots that this model has written for the same step stay valid.
        """
        self._has_kv[step.batch.rows.slot_mapping] = False
        for slots in self._written:
            self._has_kv[slots] = True

    # --- a step ---------------------------------------------------------------------------------------------

    def draft(self, table: RequestTable, plan: SchedulerOutput) -> Drafting | None:
        """Compute the drafts and the KV that a plan requests from this model. Return None if the plan requests neither.

        Raises the error of a failed forward. This model then has the same KV as before, or none if the KV was lost.
        """
        self._written.clear()
        began = time.perf_counter()
        drafting = Drafting()
        tasks = self._tasks(table, plan, drafting)
        if not tasks:
            return drafting if drafting.token_ids else None
        drafting.num_tokens = sum(max(0, task.stop - task.start - NEW_TO_DRAFT_MODEL) for task in tasks)
        try:
            self._forward(table, tasks)
            if not drafting.num_tokens:
                drafting.num_forwards, drafting.forward_seconds = 1, time.perf_counter() - began
            self._chain(table, tasks, drafting)
        except Exception as error:
            self._recover(error)
            raise
        drafting.token_ids |= {task.request_id: task.drafts for task in tasks if task.request_id in drafting.token_ids}
        drafting.num_computed_tokens = {task.request_id: task.stop for task in tasks}
        drafting.seconds = time.perf_counter() - began
        return drafting

    def _tasks(self, table: RequestTable, plan: SchedulerOutput, drafting: Drafting) -> list[_ModelTask]:
        """Return the work for each request within the limits of a step. Fill in ``drafting.token_ids``."""
        tasks = []
        num_tokens_left, work = self._config.max_num_batched_tokens, self._config.max_attention_work
        wanted = wanted_drafts(plan)
        drafting.token_ids = {request_id: [] for request_id in wanted}
        for request_id in [*wanted, *plan.draft_model_req_ids]:
            index = table.index(request_id)
            num_known, num_drafts = len(table.token_ids(index)), wanted.get(request_id, 0)
            if not num_drafts:
                num_planned = plan.num_scheduled_tokens[request_id]
                num_known = min(table.num_computed_tokens(index) + num_planned, self._max_positions)
            elif num_known > self._max_positions:
                continue
            num_drafts = min(num_drafts, self._max_positions + 1 - num_known)
            # The target has sampled the newest token, which may differ from the draft in its place.
            end = num_known - 1 if num_drafts else table.num_computed_tokens(index)
            start = min(self._first_missing(table, request_id, index, end), num_known - 1)
            num_rows = min(num_known - start, num_tokens_left, max(1, work // num_known))
            if num_rows <= 0 or work <= 0:
                continue
            num_tokens_left, work = num_tokens_left - num_rows, work - num_rows * num_known
            self._claim(table.slots(index, start, start + num_rows))
            is_behind = start + num_rows < num_known
            tasks.append(
                _ModelTask(
                    request_id=request_id,
                    index=index,
                    num_drafts=0 if is_behind else num_drafts,
                    start=start,
                    stop=start + num_rows,
                )
            )
        return tasks

    def _first_missing(self, table: RequestTable, request_id: str, index: int, end: int) -> int:
        """Return the position of the first of a request's tokens without KV of this model.

        If the tokens before ``end`` all have KV, the result is ``end`` or more.

        A token has KV if this model has computed it for the request, as an accepted draft, or for another request that
        shares the block. A token that replaces a rejected draft has none after the target has written to its slot.

        Args:
            table: requests of the runner.
            request_id: id of the request.
            index: index of the request in ``table``.
            end: end of the tokens to examine.
        """
        start = self._num_computed[request_id]
        if start >= end:
            return start
        missing = np.flatnonzero(~self._has_kv[table.slots(index, start, end)])
        return start + int(missing[0]) if len(missing) else end

    def _claim(self, slots: np.ndarray) -> None:
        """Mark slots as written by the next forward, so that another request that shares them computes no KV for them.

        The other request can read the KV in the same forward, because all writes of a layer precede its reads.
        """
        self._written.append(slots)
        self._has_kv[slots] = True

    def _chain(self, table: RequestTable, tasks: list[_ModelTask], drafting: Drafting) -> None:
        """Compute the drafts after the first drafts, one for each request per forward."""
        began = time.perf_counter()
        while going := [task for task in tasks if task.num_drafts and not task.has_ended]:
            for task in going:
                table.write_drafts(task.index, task.drafts)
                task.start = len(table.token_ids(task.index)) + len(task.drafts) - 1
                task.stop = task.start + 1
                self._claim(table.slots(task.index, task.start, task.stop))
            self._forward(table, going)
            drafting.num_forwards += 1
        drafting.forward_seconds += time.perf_counter() - began

    def _forward(self, table: RequestTable, tasks: list[_ModelTask]) -> None:
        """Compute the tokens of some tasks, and append a draft to each task that wants drafts. Waits for the device."""
        indices = np.array([task.index for task in tasks], np.int32)
        starts = np.array([task.start for task in tasks], np.int32)
        query_lens = np.array([task.stop - task.start for task in tasks], np.int32)
        drafting = [task for task in tasks if task.num_drafts]
        rows = table.rows(indices, starts, query_lens, np.array([task.num_drafts > 0 for task in tasks], np.int32))
        rows.validate(self._num_blocks)
        # The target's token ids may exceed this model's vocabulary, because of padding: clamp them.
        input_ids = np.minimum(table.input_ids(indices, rows), self._model.vocab_size - 1)
        before = self._pool.snapshot()
        try:
            logits = self._model(mx.array(input_ids), rows, self._backend.for_step(rows))
            tokens = self._sample(table, drafting, logits) if drafting else None
        except BaseException:
            self._pool.restore(before)
            raise
        del before  # no other reference to the arrays that are written to
        mx.eval(self._pool.writes_done_marker() if tokens is None else tokens)
        synchronize()
        for task in tasks:
            # Exclude drafts, which may not become tokens of the request.
            self._num_computed[task.request_id] = min(task.stop, len(table.token_ids(task.index)))
        if tokens is not None:
            for task, draft in zip(drafting, np.array(tokens).tolist(), strict=True):
                task.take(draft, table.stop_token_ids(task.index))

    def _sample(self, table: RequestTable, tasks: list[_ModelTask], logits: mx.array) -> mx.array:
        """Return the next draft of each request, [R] int32, from this model's logits."""
        return sample_drafts(table, tasks, self._with_target_width(logits))

    def _with_target_width(self, logits: mx.array) -> mx.array:
        """Pad logits with -inf or cut them to the target's width: [R, V] -> [R, vocab_size].

        The two vocabularies differ only in padding at their ends.
        """
        missing = self._vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=mx.array(-np.inf, logits.dtype))

    def _recover(self, error: Exception) -> None:
        """Restore the KV after a failed forward. The target's KV is not affected."""
        for slots in self._written:
            self._has_kv[slots] = False
        try:
            self._pool.recover(error)
        except KVCacheLostError:
            logger.warning("the draft model has lost its KV and will recompute it")
            self._has_kv.fill(False)
            self._num_computed = dict.fromkeys(self._num_computed, 0)

    def failed(self, error: Exception) -> None:
        """Do nothing: :meth:`follow` has marked the slots that the failed step may have written."""

    def release(self) -> None:
        """Free the KV. Call it in the thread that ran the steps."""
        self._pool.release()
