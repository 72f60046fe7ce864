"""Turns plans into packed arrays. :class:`RequestTable` stores the requests, :class:`PackedBatch` one step's arrays.

Work per token is done by NumPy operations over the whole step. Python loops run only over new or changed requests.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from metal_engine.kv_cache.rows import StepRows, all_distinct, slots_of, step_rows
from metal_engine.kv_cache.writes import MakeWrites, SlotWrites
from metal_engine.runner.image_rows import ImageRows, ImageTable
from metal_engine.runner.logits_edits import RequestEdits
from metal_engine.runner.sampler import SamplingTable
from metal_engine.runner.step_pooling import PooledPrompt
from metal_engine.step import ModelOutput, NewRequestData, SchedulerOutput


@dataclass(frozen=True)
class PackedBatch:
    """Tokens and rows of one step, on the host: N tokens of B requests. R of the N rows sample.

    All arrays are int32. ``images`` lists the rows whose tokens have image features, and is None without such rows.
    ``next_images`` lists the rows whose next tokens have image features, for a draft head. Without a draft head or such
    rows, ``next_images`` is None.
    """

    input_ids: np.ndarray  # [N]
    rows: StepRows
    sample_indices: np.ndarray  # [R] index in RequestTable of the request that samples at the row
    pending_rows: np.ndarray  # [P] packed rows whose tokens the previous step samples; 0 in `input_ids`
    pending_samples: np.ndarray  # [P] index of each pending row's token among the previous step's samples
    adapter_slots: np.ndarray  # [B] LoRA slot of each request, 0: no adapter; empty if no request has an adapter
    images: ImageRows | None = None
    next_images: ImageRows | None = None

    def is_continued(self, num_samples: int) -> bool:
        """Return True if the step's tokens are exactly the ``num_samples`` samples of the previous step, in order."""
        order = self.pending_samples
        return len(self.input_ids) == len(order) == num_samples and bool((order[1:] > order[:-1]).all())

    def validate(self, num_blocks: int, num_state_slots: int = 0, num_adapter_slots: int = 0) -> None:
        """Raise ValueError if the arrays are inconsistent, because an invalid batch must not reach a kernel.

        Costs a few NumPy passes over N and over the block table.
        """
        for name, array in vars(self).items():
            if name not in ("rows", "images", "next_images") and (array.dtype != np.int32 or array.ndim != 1):
                raise ValueError(f"bad batch: {name} is {array.dtype} of shape {array.shape}, not int32 [n]")
        self.rows.validate(num_blocks, num_state_slots)
        if len(self.input_ids) != self.rows.num_tokens:
            raise ValueError("bad batch: input_ids differ in length from the rows")
        samples_of = self.rows.sample_requests
        if (
            len(self.sample_indices) != len(samples_of)
            or (self.sample_indices < 0).any()
            or not _sample_apart(self.sample_indices, samples_of)
        ):
            raise ValueError("bad batch: sample_indices must be distinct indices, one for each sampling request")
        # Uses flags, because np.isin takes as long as all other checks together.
        samples = np.zeros(self.rows.num_tokens, bool)
        samples[self.rows.logits_indices] = True
        if (
            len(self.pending_rows) != len(self.pending_samples)
            or not _all_flagged(samples, self.pending_rows)
            or (self.pending_samples < 0).any()
            or not all_distinct(self.pending_samples)
        ):
            raise ValueError("bad batch: pending_rows must be sampling rows, each with a different pending sample")
        if len(slots := self.adapter_slots) and (
            len(slots) != self.rows.num_requests or slots.min() < 0 or slots.max() > num_adapter_slots
        ):
            raise ValueError("bad batch: adapter_slots must hold one valid LoRA slot for each request")


def _sample_apart(indices: np.ndarray, samples_of: np.ndarray) -> bool:
    """Return True if the number of distinct table indices equals the number of requests that sample.

    Args:
        indices: [R] table index of each row that samples.
        samples_of: [R] request of each row that samples, in ascending order.
    """
    if all_distinct(indices):
        return bool((samples_of[1:] != samples_of[:-1]).all())
    return len(np.unique(indices)) == len(np.unique(samples_of))


def _all_flagged(flags: np.ndarray, indices: np.ndarray) -> bool:
    """Return True if all ``indices`` are in range and their ``flags`` are set."""
    in_range = not len(indices) or (indices.min() >= 0 and indices.max() < len(flags))
    return bool(in_range and flags[indices].all())


class RequestTable:
    """The runner's data of each request: tokens, block table and sampling parameters. Each request has an index.

    A step may be packed before the samples of the previous step are known. The table stores the positions of these
    samples until :meth:`append_tokens` provides the tokens.

    Args:
        max_num_seqs: maximum number of requests.
        max_model_len: maximum number of tokens of a request.
        block_size: tokens per block.
        make_writes: creates the object that writes a step's rows to their slots.
        needs_next_images: True to find the rows before image tokens, for a draft head.

    Attributes:
        sampling: sampling parameters of the requests.
        edits: index of a request -> edits of its logits. Requests without edits are left out.
        without_edits: indices in ``edits`` whose next token needs no edit, according to the last :meth:`follow_phases`.
        pooling: request id -> pooled prompt, for requests that are pooled.
        num_prompt_logprobs_requests: number of requests with log probabilities of prompt tokens.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        make_writes: MakeWrites = SlotWrites,
        *,
        needs_next_images: bool = False,
    ) -> None:
        self.block_size = block_size
        self._needs_next_images = needs_next_images
        self._make_writes = make_writes
        # Untouched pages of a zeroed array take no memory, so allocating for the longest request costs nothing.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)  # known tokens, without pending ones
        self._last_sample = np.full(max_num_seqs, -1, np.int32)  # index among the last samples; -1: did not sample
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._state_reads = np.zeros(max_num_seqs, np.int32)  # state slots that the next step reads and writes
        self._state_writes = np.zeros(max_num_seqs, np.int32)
        # Requests with a recurrent state and with drafts in the last step: index -> (number of tokens computed before
        # that step, slot of its initial state).
        self._before_drafts: dict[int, tuple[int, int]] = {}
        self.sampling = SamplingTable(max_num_seqs)
        self.edits: dict[int, RequestEdits] = {}  # by index; requests with edits only
        # Requests with phases: True if the next token has to match a grammar, as last reported; None: not reported yet.
        self._constrained: dict[str, bool | None] = {}
        # Requests with phases: tokens after which the output is still free text. If one of them is the next token,
        # `follow_phases` skips the request, and processes the token later.
        self._plain_tokens: dict[str, Set[int]] = {}
        # Indices of requests in `edits` whose next token needs no edit, according to the last `follow_phases`.
        self.without_edits: set[int] = set()
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_seqs
        self.pooling: dict[str, PooledPrompt] = {}  # by request id; pooling requests only
        self.num_prompt_logprobs_requests = 0
        self._adapter_slots = np.zeros(max_num_seqs, np.int32)
        self._num_with_adapter = 0
        self._images = ImageTable(max_num_seqs)
        self._index_of: dict[str, int] = {}
        self._free_indices = list(range(max_num_seqs - 1, -1, -1))

    def add(self, new: NewRequestData) -> None:
        if new.request_id in self._index_of:
            raise ValueError(f"bad plan: {new.request_id!r} is new, but is held already")
        if not self._free_indices:
            raise ValueError(f"bad plan: {new.request_id!r} does not fit, the table is full")
        index = self._free_indices.pop()
        self._index_of[new.request_id] = index
        self._token_ids[index, : len(new.token_ids)] = new.token_ids
        self._num_tokens[index] = len(new.token_ids)
        self._last_sample[index] = -1
        self._num_prompt_tokens[index] = new.num_prompt_tokens
        self._num_computed[index] = new.num_computed_tokens
        self._num_blocks[index] = 0
        self._append_blocks(index, new.block_ids)
        self._state_reads[index], self._state_writes[index] = new.state_slots
        self._stop_token_ids[index] = new.stop_token_ids
        params = new.sampling_params
        self.sampling.set(index, params, new.seed)
        if params.edits_logits:
            self.edits[index] = RequestEdits(params, new.rules, self.token_ids(index), new.num_prompt_tokens)
            if params.has_phase_rules:
                self._constrained[new.request_id] = None
                self._plain_tokens[new.request_id] = frozenset()
        self.num_prompt_logprobs_requests += params.prompt_logprobs is not None
        self._adapter_slots[index] = new.adapter_slot
        self._num_with_adapter += new.adapter_slot > 0
        self._images.add(index, new.images)
        if new.pooling_params is not None:
            self.pooling[new.request_id] = PooledPrompt(new.pooling_params, new.num_prompt_tokens)

    def remove(self, request_id: str) -> None:
        index = self._index_of.pop(request_id, None)
        if index is not None:
            self._free_indices.append(index)
            self._images.remove(index)
            self.edits.pop(index, None)
            self.without_edits.discard(index)
            self._constrained.pop(request_id, None)
            self._plain_tokens.pop(request_id, None)
            self._before_drafts.pop(index, None)
            self.pooling.pop(request_id, None)
            self.num_prompt_logprobs_requests -= int(self.sampling.prompt_logprobs[index] >= 0)
            self._num_with_adapter -= int(self._adapter_slots[index] > 0)

    @property
    def state_slots(self) -> set[int]:
        """Return the state slots that the requests hold."""
        indices = list(self._index_of.values())
        return {*self._state_reads[indices].tolist(), *self._state_writes[indices].tolist()}

    def holds(self, request_id: str) -> bool:
        """Return True if the table has the request."""
        return request_id in self._index_of

    def index(self, request_id: str) -> int:
        """Return the index of a request, which is valid until the request is removed. Raises KeyError if unknown."""
        return self._index_of[request_id]

    def token_ids(self, index: int, num_drafts: int = 0) -> np.ndarray:
        """Return a view of a request's known tokens, plus its first ``num_drafts`` drafts, [T] int32."""
        return self._token_ids[index, : self._num_tokens[index] + num_drafts]

    def num_prompt_tokens(self, index: int) -> int:
        return int(self._num_prompt_tokens[index])

    def num_computed_tokens(self, index: int) -> int:
        """Return how many tokens and drafts of a request have KV after all steps packed so far."""
        return int(self._num_computed[index])

    def slots(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return the slots of positions ``start`` to ``stop`` - 1 of a request, [stop - start] int32."""
        return slots_of(self._block_table, index, np.arange(start, stop), self.block_size)

    def stop_token_ids(self, index: int) -> frozenset[int]:
        """Return the tokens that end a request."""
        return self._stop_token_ids[index]

    def _append_blocks(self, index: int, block_ids: list[int]) -> None:
        start = self._num_blocks[index]
        self._block_table[index, start : start + len(block_ids)] = block_ids
        self._num_blocks[index] = start + len(block_ids)

    def append_tokens(self, request_ids: list[str], output: ModelOutput) -> None:
        """Append a step's accepted drafts and samples to the tokens of its requests.

        Requests that were removed are skipped. A request whose grammar mask was late gets no token, and its last
        computed token counts as not computed.

        Args:
            request_ids: requests that sampled in the step, in the order of ``output.sampled_token_ids``.
            output: results of the step.
        """
        for request_id, num_accepted in output.num_accepted_tokens.items():
            if request_id in self._index_of:
                self._append_accepted(self._index_of[request_id], num_accepted)
        indices = np.fromiter((self._index_of.get(r, -1) for r in request_ids), np.int32, len(request_ids))
        token_ids = np.array(output.sampled_token_ids, np.int32)
        is_held = indices >= 0
        if output.late_req_ids:
            is_late = np.fromiter((r in output.late_req_ids for r in request_ids), bool, len(request_ids))
            self._num_computed[indices[is_held & is_late]] -= 1
            is_held &= ~is_late
        indices, token_ids = indices[is_held], token_ids[is_held]
        self._token_ids[indices, self._num_tokens[indices]] = token_ids
        self._num_tokens[indices] += 1

    def follow_phases(self, request_ids: list[str], output: ModelOutput) -> set[str]:
        """Advance the grammars of outputs with phases past the new tokens. Return the ids of requests that need a mask.

        An output has phases if only parts of it must match a grammar, such as tool calls after free text. A returned
        request needs a mask for its next token.

        Call it after :meth:`append_tokens`, with the same arguments. Sets ``constrained`` in ``output``, and adds to
        its ``num_unconstrained_calls``. Tokens after which the output is still free text may be processed in a later
        call (:attr:`metal_engine.token_rules.Matcher.plain_tokens`).
        """
        waiting: set[str] = set()
        if not self._plain_tokens:
            return waiting
        # Most tokens of free text are plain, so most requests take no time here.
        single = not output.num_accepted_tokens
        token_of = dict(zip(request_ids, output.sampled_token_ids, strict=True)) if single else {}
        for request_id, plain_tokens in self._plain_tokens.items():
            if token_of.get(request_id) in plain_tokens:
                continue
            before = self._constrained[request_id]
            index = self._index_of[request_id]
            edits = self.edits[index]
            assert edits.grammar is not None
            edits.observe(self._token_ids[index, edits.num_processed : self._num_tokens[index]].tolist())
            is_constrained = not edits.grammar.is_free
            output.num_unconstrained_calls += edits.grammar.take_failed_calls()
            if is_constrained:
                waiting.add(request_id)
            if edits.has_edits_after(()):
                self.without_edits.discard(index)
                self._plain_tokens[request_id] = frozenset()
            else:
                self.without_edits.add(index)
                self._plain_tokens[request_id] = edits.grammar.plain_tokens
            if is_constrained != before:
                self._constrained[request_id] = output.constrained[request_id] = is_constrained
        return waiting

    def _append_accepted(self, index: int, num_accepted: int) -> None:
        """Append the accepted drafts to a request's tokens. Drop the rejected drafts and the blocks used only by them.

        If a draft of a request with a recurrent state was rejected, the request returns to the state before the step.
        The accepted drafts must then be computed again.
        """
        num_tokens = self._num_tokens[index] + num_accepted
        before = self._before_drafts.pop(index, None)
        if before is not None and num_tokens < self._num_computed[index]:
            self._num_computed[index], self._state_reads[index] = before
        else:
            self._num_computed[index] = num_tokens
        self._num_tokens[index] = num_tokens
        self._num_blocks[index] = -(-num_tokens // self.block_size)

    def _write_planned_drafts(self, drafts_of: dict[str, list[int]]) -> None:
        for request_id, drafts in drafts_of.items():
            index = self._index_of[request_id]
            if self._state_writes[index]:
                self._before_drafts[index] = int(self._num_computed[index]), int(self._state_reads[index])
            self.write_drafts(index, drafts)

    def write_drafts(self, index: int, drafts: list[int]) -> None:
        """Write drafts after a request's known tokens. The number of known tokens does not change."""
        start = self._num_tokens[index]
        self._token_ids[index, start : start + len(drafts)] = drafts

    def forget_samples(self) -> None:
        """Forget which requests sample in the last packed step, because the step will not run or has failed."""
        self._last_sample.fill(-1)

    def output_positions(self, batch: PackedBatch) -> np.ndarray:
        """Return the index of each sampled token among its request's output tokens, [R]; 0 for the first."""
        rows = batch.rows
        return rows.positions[rows.logits_indices] + 1 - self._num_prompt_tokens[batch.sample_indices]

    def update(self, plan: SchedulerOutput) -> None:
        """Update the table for ``plan``: remove and add requests, and set their new blocks and state slots.

        Raises ValueError or KeyError if the plan contradicts the table.
        """
        for request_id in plan.dropped_req_ids:
            self.remove(request_id)
        for new in plan.new_requests:
            self.add(new)
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self._index_of[request_id], block_ids)
        for request_id, slot in plan.new_state_slots.items():
            self._state_writes[self._index_of[request_id]] = slot

    def pack(self, plan: SchedulerOutput) -> PackedBatch:
        """Pack the tokens of a plan that :meth:`update` has processed, in the plan's order.

        Records these tokens as computed, so call it once for each plan.

        Raises:
            ValueError: the plan contradicts the table, or computes a token that no step has sampled or is sampling.
            KeyError: the plan has a request that the table lacks.
        """
        packed = list(plan.num_scheduled_tokens)
        num_requests = len(packed)
        indices = np.fromiter(map(self._index_of.__getitem__, packed), np.int32, num_requests)
        query_lens = np.fromiter(plan.num_scheduled_tokens.values(), np.int32, num_requests)
        if packed == plan.sampled_req_ids:
            samples = np.ones(num_requests, bool)
        else:
            sampled = set(plan.sampled_req_ids)
            samples = np.fromiter(map(sampled.__contains__, packed), bool, num_requests)
            # Results are matched to requests only by packing order.
            if [r for r in packed if r in sampled] != plan.sampled_req_ids:
                raise ValueError("bad plan: sampled_req_ids are not scheduled requests in packing order")
        num_known = self._num_tokens[indices]
        num_samples = samples
        if drafts_of := plan.scheduled_spec_decode_tokens:
            self._write_planned_drafts(drafts_of)
            num_drafts = np.fromiter((len(drafts_of.get(r, ())) for r in packed), np.int32, num_requests)
            num_known, num_samples = num_known + num_drafts, samples + num_drafts
        rows = self.rows(indices, self._num_computed[indices], query_lens, num_samples)
        pending_rows, pending_samples = self._pending(indices, rows, num_known)
        self._num_computed[indices] = rows.seq_lens
        self._state_reads[indices] = rows.state_writes
        input_ids = self.input_ids(indices, rows)
        input_ids[pending_rows] = 0  # do not use tokens that an earlier request left at the index
        sample_indices = indices[rows.sample_requests]
        self._last_sample.fill(-1)
        self._last_sample[sample_indices] = np.arange(len(sample_indices), dtype=np.int32)
        adapter_slots = self._adapter_slots[indices if self._num_with_adapter else indices[:0]]
        images = next_images = None
        if self._images:
            rows = self._images.add_to_rows(indices, rows)
            images = self._images.rows(indices, rows)
            next_images = self._images.rows(indices, rows, ahead=1) if self._needs_next_images else None
        return PackedBatch(
            input_ids, rows, sample_indices, pending_rows, pending_samples, adapter_slots, images, next_images
        )

    def rotary_positions(self, indices: np.ndarray, rows: StepRows) -> np.ndarray | None:
        """Return rotary positions for rows of the requests at ``indices``. See :meth:`ImageTable.rotary_positions`."""
        return self._images.rotary_positions(indices, rows)

    def rows(
        self, indices: np.ndarray, num_computed: np.ndarray, query_lens: np.ndarray, num_samples: np.ndarray
    ) -> StepRows:
        """Lay out tokens of the requests at ``indices`` as the rows of a step.

        Args:
            indices: [B] indices of the requests in this table.
            num_computed: [B] int32, number of tokens of each request before these tokens.
            query_lens: [B] int32, number of tokens of each request to lay out.
            num_samples: [B], number of rows at the end of each request that sample.

        Raises:
            ValueError: a request has too few blocks for its tokens.
        """
        seq_lens = num_computed + query_lens
        if (seq_lens > self._num_blocks[indices] * self.block_size).any():
            raise ValueError("bad plan: a request has fewer blocks than tokens")
        max_blocks = -(-int(seq_lens.max(initial=0)) // self.block_size)
        return step_rows(
            self._block_table[indices, :max_blocks],
            num_computed,
            query_lens,
            self.block_size,
            num_samples=num_samples,
            state_slots=(self._state_reads[indices], self._state_writes[indices]),
            make_writes=self._make_writes,
        )

    def input_ids(self, indices: np.ndarray, rows: StepRows) -> np.ndarray:
        """Return the tokens at some rows, [N] int32, including drafts written by :meth:`write_drafts`."""
        return self._token_ids[indices[rows.request_of_row], rows.positions]

    def _pending(self, indices: np.ndarray, rows: StepRows, num_known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows whose tokens the last step samples, [P], and the tokens' indices among its samples, [P].

        Args:
            num_known: [B] number of known tokens of each request, including drafts.

        Raises:
            ValueError: a row's token is neither known nor being sampled.
        """
        pending = np.flatnonzero(rows.seq_lens > num_known)
        samples = self._last_sample[indices[pending]]
        # A sample follows all computed tokens, so a query that starts with a pending sample has one row.
        if (rows.query_lens[pending] > 1).any() or (samples < 0).any():
            raise ValueError("bad plan: it computes tokens that are neither known nor being sampled")
        return rows.cu_seqlens_q[1:][pending] - 1, samples
