"""From a plan to packed arrays: the runner's memory of each request, and one step's int32 arrays.

Everything per token is a NumPy operation over the whole step; Python loops run over requests only where a
request is new or changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metal_engine.runner.logits_edits import RowEdits
from metal_engine.runner.sampler import SamplingRows
from metal_engine.step import NewRequestData, SchedulerOutput


@dataclass(frozen=True)
class PackedBatch:
    """One step's arrays, all int32, on the host. N tokens of B requests, R of which sample."""

    input_ids: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    cu_seqlens_q: np.ndarray  # [B+1]
    seq_lens: np.ndarray  # [B]
    block_table: np.ndarray  # [B, max_blocks]
    slot_mapping: np.ndarray  # [N]
    logits_indices: np.ndarray  # [R] last row of each request that samples
    sampled_rows: np.ndarray  # [R] row of RequestTable of each request that samples
    pending_rows: np.ndarray  # [P] packed rows whose tokens the step before samples; 0 in `input_ids`
    pending_samples: np.ndarray  # [P] where they are among that step's samples

    def validate(self, num_slots: int, block_size: int) -> None:
        """Raise ValueError where the arrays contradict each other; a bad batch must not reach a kernel.

        Costs a few NumPy passes over N and over the block table.
        """
        for name, array in vars(self).items():
            if array.dtype != np.int32:
                raise ValueError(f"bad batch: {name} is {array.dtype}, not int32")
            if array.ndim != (2 if name == "block_table" else 1):
                raise ValueError(f"bad batch: {name} has shape {array.shape}")
        num_tokens, num_requests = len(self.input_ids), len(self.seq_lens)
        if num_tokens == 0:
            raise ValueError("bad batch: no tokens")
        cu = self.cu_seqlens_q
        query_lens = cu[1:] - cu[:-1]
        if len(cu) != num_requests + 1 or cu[0] != 0 or cu[-1] != num_tokens or (query_lens <= 0).any():
            raise ValueError(
                f"bad batch: cu_seqlens_q {cu.tolist()} does not rise strictly from 0 to {num_tokens}"
            )
        if not len(self.positions) == len(self.slot_mapping) == num_tokens:
            raise ValueError("bad batch: positions or slot_mapping differ in length from input_ids")
        context_lens = self.seq_lens - query_lens
        if (context_lens < 0).any():
            raise ValueError("bad batch: a sequence is shorter than its query")
        if (self.positions != np.arange(num_tokens) + np.repeat(context_lens - cu[:-1], query_lens)).any():
            raise ValueError("bad batch: the positions of a request do not run up to its seq_len - 1")

        num_blocks = -(-self.seq_lens // block_size)  # [B]
        if self.block_table.shape[0] != num_requests or self.block_table.shape[1] < num_blocks.max():
            raise ValueError("bad batch: block_table is too small")
        used = self.block_table[np.arange(self.block_table.shape[1]) < num_blocks[:, None]]  # not the padding
        if used.min() < 0 or used.max() >= num_slots // block_size:
            raise ValueError("bad batch: block_table leaves the KV cache")
        block_ids = self.block_table[
            np.repeat(np.arange(num_requests), query_lens), self.positions // block_size
        ]
        if (self.slot_mapping != block_ids * block_size + self.positions % block_size).any():
            raise ValueError("bad batch: slot_mapping disagrees with block_table")
        if len(np.unique(self.slot_mapping)) != num_tokens:
            raise ValueError("bad batch: two tokens share a slot")

        # Flags instead of np.isin, which takes as long as everything else here together.
        is_last = np.zeros(num_tokens, bool)
        is_last[cu[1:] - 1] = True
        samples = np.zeros(num_tokens, bool)
        logits_indices = self.logits_indices
        if (
            len(logits_indices) != len(self.sampled_rows)
            or (logits_indices[1:] <= logits_indices[:-1]).any()
            or not _all_flagged(is_last, logits_indices)
        ):
            raise ValueError("bad batch: logits_indices are not last rows of requests, one each")
        if (self.sampled_rows < 0).any() or len(np.unique(self.sampled_rows)) != len(self.sampled_rows):
            raise ValueError("bad batch: sampled_rows are not distinct rows")
        samples[logits_indices] = True
        if (
            len(self.pending_rows) != len(self.pending_samples)
            or not _all_flagged(samples, self.pending_rows)
            or (self.pending_samples < 0).any()
            or len(np.unique(self.pending_samples)) != len(self.pending_samples)
        ):
            raise ValueError(
                "bad batch: pending_rows are not rows that sample, each after a sample of its own"
            )


def _all_flagged(flags: np.ndarray, indices: np.ndarray) -> bool:
    """Whether all of ``indices`` are within ``flags`` and set there."""
    in_range = not len(indices) or (indices.min() >= 0 and indices.max() < len(flags))
    return bool(in_range and flags[indices].all())


def whole_block_rows(batch: PackedBatch, block_size: int) -> np.ndarray:
    """The packed rows that fill whole blocks, [W, block_size] int32: one row of the result a block."""
    query_lens = np.diff(batch.cu_seqlens_q)
    rows_left = np.repeat(batch.cu_seqlens_q[1:], query_lens) - np.arange(
        len(batch.positions)
    )  # of its request
    starts = np.flatnonzero((batch.positions % block_size == 0) & (rows_left >= block_size))
    return (starts[:, None] + np.arange(block_size)).astype(np.int32)


class RequestTable:
    """What the runner holds of each request: tokens, block table, sampling parameters. One row a request.

    A step may be packed before the samples of the step before are known. Their places are remembered until
    :meth:`append_tokens` brings the tokens themselves.

    Args:
        max_num_rows: requests held at once.
        max_model_len: tokens a request may grow to.
        block_size: tokens per block.
    """

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # Untouched pages of a zeroed array cost no memory, so sizing for the longest request is free.
        self._token_ids = np.zeros((max_num_rows, max_model_len + 1), np.int32)
        self._block_table = np.zeros((max_num_rows, -(-max_model_len // block_size)), np.int32)
        self._num_tokens = np.zeros(max_num_rows, np.int32)  # known, i.e. without pending ones
        self._last_sample = np.full(max_num_rows, -1, np.int32)  # among the last step's; -1: did not sample
        self._num_prompt_tokens = np.zeros(max_num_rows, np.int32)
        self._num_computed = np.zeros(max_num_rows, np.int32)
        self._num_blocks = np.zeros(max_num_rows, np.int32)
        self.sampling = SamplingRows(max_num_rows)
        self.edits: dict[int, RowEdits] = {}  # of the rows that have any
        self.num_prompt_logprobs_requests = 0
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, new: NewRequestData) -> None:
        if new.request_id in self._rows:
            raise ValueError(f"bad plan: {new.request_id!r} is new, but held already")
        if not self._free_rows:
            raise ValueError(f"bad plan: {new.request_id!r} is one request more than can be held")
        row = self._free_rows.pop()
        self._rows[new.request_id] = row
        self._token_ids[row, : len(new.token_ids)] = new.token_ids
        self._num_tokens[row] = len(new.token_ids)
        self._last_sample[row] = -1
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._num_computed[row] = new.num_computed_tokens
        self._num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        params = new.sampling_params
        self.sampling.set(row, params, new.seed)
        if params.edits_logits:
            self.edits[row] = RowEdits(params, new.rules, self.token_ids(row), new.num_prompt_tokens)
        self.num_prompt_logprobs_requests += params.prompt_logprobs is not None

    def remove(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
            self.edits.pop(row, None)
            self.num_prompt_logprobs_requests -= int(self.sampling.prompt_logprobs[row] >= 0)

    def row(self, request_id: str) -> int:
        """Where a request is held."""
        return self._rows[request_id]

    def token_ids(self, row: int) -> np.ndarray:
        """Tokens of a row known so far, [T] int32: a view."""
        return self._token_ids[row, : self._num_tokens[row]]

    def num_prompt_tokens(self, row: int) -> int:
        return int(self._num_prompt_tokens[row])

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self._num_blocks[row]
        self._block_table[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)

    def append_tokens(self, request_ids: list[str], token_ids: np.ndarray) -> None:
        """Append one sampled token, [R], to each request that is still held."""
        rows = np.fromiter((self._rows.get(r, -1) for r in request_ids), np.int32, len(request_ids))
        rows, token_ids = rows[rows >= 0], token_ids[rows >= 0]
        self._token_ids[rows, self._num_tokens[rows]] = token_ids
        self._num_tokens[rows] += 1

    def forget_samples(self) -> None:
        """The step that was packed last will not run: no later one may ask for its samples."""
        self._last_sample.fill(-1)

    def num_output_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that each of ``rows``, [R], which sample in the step packed last, has generated before it."""
        return self._num_computed[rows] - self._num_prompt_tokens[rows]

    def pack(self, plan: SchedulerOutput) -> PackedBatch:
        """Bring the rows up to date with ``plan`` and lay out its tokens.

        Rows of a step, for requests with query lengths 4, 1 and 3::

            req_of_token   0 0 0 0 1 2 2 2
            cu_seqlens_q   0       4 5     8
            positions      c0 c0+1 c0+2 c0+3 c1 c2 c2+1 c2+2     c: tokens computed before

        Raises:
            ValueError: the plan contradicts what is held, or asks for a token that nobody knows or samples.
        """
        for request_id in plan.dropped_req_ids:
            self.remove(request_id)
        for new in plan.new_requests:
            self.add(new)
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self._rows[request_id], block_ids)

        num_requests = len(plan.num_scheduled_tokens)
        rows = np.fromiter(map(self._rows.__getitem__, plan.num_scheduled_tokens), np.int32, num_requests)
        query_lens = np.fromiter(plan.num_scheduled_tokens.values(), np.int32, num_requests)
        cu_seqlens_q = np.zeros(num_requests + 1, np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        num_computed = self._num_computed[rows]
        seq_lens = num_computed + query_lens
        if (seq_lens > self._num_blocks[rows] * self.block_size).any():
            raise ValueError("bad plan: a request has fewer blocks than tokens")
        pending_rows, pending_samples = self._pending(rows, seq_lens, cu_seqlens_q)
        self._num_computed[rows] = seq_lens

        row_of_token = np.repeat(rows, query_lens)
        positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + np.repeat(
            num_computed - cu_seqlens_q[:-1], query_lens
        )
        block_ids = self._block_table[row_of_token, positions // self.block_size]
        max_blocks = -(-int(seq_lens.max(initial=0)) // self.block_size)

        packed = list(plan.num_scheduled_tokens)
        sampled = set(plan.sampled_req_ids)
        samples = np.fromiter(map(sampled.__contains__, packed), bool, num_requests)
        # Tokens come back in packing order and are told apart by nothing else.
        if packed != plan.sampled_req_ids and [r for r in packed if r in sampled] != plan.sampled_req_ids:
            raise ValueError("bad plan: sampled_req_ids are not scheduled requests in packing order")
        input_ids = self._token_ids[row_of_token, positions]
        input_ids[pending_rows] = 0  # not what a request before it left in the row
        sampled_rows = rows[samples]
        self._last_sample.fill(-1)
        self._last_sample[sampled_rows] = np.arange(len(sampled_rows), dtype=np.int32)
        return PackedBatch(
            input_ids=input_ids,
            positions=positions,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=self._block_table[rows, :max_blocks],
            slot_mapping=block_ids * self.block_size + positions % self.block_size,
            logits_indices=cu_seqlens_q[1:][samples] - 1,
            sampled_rows=sampled_rows,
            pending_rows=pending_rows,
            pending_samples=pending_samples,
        )

    def _pending(
        self, rows: np.ndarray, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Packed rows [P] whose tokens are not known, and which samples of the step packed last they are."""
        pending = np.flatnonzero(seq_lens > self._num_tokens[rows])
        samples = self._last_sample[rows[pending]]
        # A sample continues what had been computed then, so it is the token of a query of one row.
        if ((cu_seqlens_q[1:] - cu_seqlens_q[:-1])[pending] > 1).any() or (samples < 0).any():
            raise ValueError("bad plan: it computes tokens that are neither known nor being sampled")
        return cu_seqlens_q[1:][pending] - 1, samples
