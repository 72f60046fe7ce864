"""What an attention backend is, and the metadata of one packed step that it works from.

A step packs B requests into N rows. Request i owns the rows ``cu_seqlens_q[i]:cu_seqlens_q[i+1]``::

    rows       |-- request 0: fresh prefill --|-- 1: chunk --|2|3|     2, 3: decodes (query_len 1)
    cu_seqlens_q 0                             q0             ^ ^ N

    request i  |------ context_len ------|-- query_len --|
    KV         |------------- seq_lens[i] ---------------|
               row r sees key j  iff  j <= context_len + r  (and j > context_len + r - window)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class BlockWrites:
    """A step's rows, those that fill whole blocks apart: they can be written by block instead of by slot."""

    rows: mx.array  # [W * block_size] packed rows that fill blocks, block after block
    block_ids: mx.array  # [W]
    other_rows: mx.array  # [M]
    other_slots: mx.array  # [M]


def consecutive_runs(numbers: np.ndarray, min_length: int = 1) -> np.ndarray:
    """Where numbers (slots, blocks) follow each other: [num_runs, 3] of first index, length, first number."""
    starts = np.flatnonzero(np.concatenate([[True], np.diff(numbers) != 1]))
    runs = np.stack([starts, np.diff(starts, append=len(numbers)), numbers[starts]], axis=1)
    return runs[runs[:, 1] >= min_length]


@dataclass(frozen=True)
class RunWrites:
    """A step's rows, those with consecutive slots apart: a slice of the cache takes them in one copy."""

    runs: list[tuple[int, int, int]]  # first packed row, number of rows, slot of the first
    other_rows: mx.array  # [M]
    other_slots: mx.array  # [M]


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the rows of a packed step come from and where their KV lives. Built once per step, for all layers.

    Host arrays are int32 NumPy arrays, for planning. ``slot_mapping`` is on the device, for the KV write;
    a backend uploads what else it needs once, in :meth:`AttentionBackend.plan`.
    """

    cu_seqlens_q: np.ndarray  # [B+1] exclusive prefix sum of query lengths
    seq_lens: np.ndarray  # [B] KV length including this step
    block_table: np.ndarray  # [B, max_blocks] logical -> physical block; entries past seq_len are padding
    slot_mapping: mx.array  # [N] block_id * block_size + position % block_size
    block_size: int
    # Faster ways to write than by slot, at most one of them.
    block_writes: BlockWrites | None = (
        None  # on a GPU under page-aligned scheduling, if any row fills a block with others
    )
    run_writes: RunWrites | None = None  # on a CPU, if there are runs that are long enough

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens_q[-1])

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def query_lens(self) -> np.ndarray:  # [B]
        return np.diff(self.cu_seqlens_q)

    @property
    def context_lens(self) -> np.ndarray:  # [B]
        return self.seq_lens - self.query_lens


class AttentionPlan(Protocol):
    """A step's work, planned once and used by every layer."""

    def attend(
        self,
        q: mx.array,  # [N, num_heads, head_dim]
        k_cache: mx.array,  # [num_blocks, block_size, num_kv_heads, head_dim]
        v_cache: mx.array,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [num_heads]
    ) -> mx.array:  # [N, num_heads, v_head_dim], dtype of q
        """Attention of every packed row over its request's KV, this step's KV included (written already).

        ``window`` w: the query at position p sees keys p - w + 1 ... p. ``softcap`` c: scores become
        c * tanh(scores / c). ``sinks``: one logit per head that takes part in the softmax and adds no value.
        """
        ...


class AttentionBackend(Protocol):
    """Turns a step's metadata into a plan."""

    name: str

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan: ...
