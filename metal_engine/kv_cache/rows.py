"""Packed rows of one step: the request of each row, the slot of its keys and values, and the rows that sample.

A step packs B requests into N rows, one row per token. Request i owns the rows
``cu_seqlens_q[i]:cu_seqlens_q[i+1]``, its *segment*::

    rows       |-- request 0: fresh prefill --|-- 1: chunk --|2|3|     2, 3: decodes (query_len 1)
    cu_seqlens_q 0                             q0             ^ ^ N

    request i  |------ context_len ------|-- query_len --|
    stored     |------------- seq_lens[i] ---------------|
               position p of a request is in slot block_table[i, p // block_size] * block_size + p % block_size

A request samples at the last ``num_samples[i]`` rows of its segment. A chunk that ends within the prompt samples at no
row. Usually the row of the last known token samples; speculation samples at several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from metal_engine.kv_cache.segments import ZERO_STATE_SLOT, Segments
from metal_engine.kv_cache.writes import MakeWrites, SlotWrites, Writes
from metal_engine.prompt_images import BidirectionalLayers


def slots_of(
    block_table: np.ndarray, requests: np.ndarray | int, positions: np.ndarray | int, block_size: int
) -> np.ndarray:
    """Return the slots of positions of requests. All conversions of positions to slots on the host call this function.

    Args:
        block_table: [B, max_blocks] int32, block ids of each request.
        requests: rows of ``block_table``. ``requests`` and ``positions`` broadcast.
        positions: positions of tokens in their requests.
        block_size: tokens of a block.
    """
    return block_table[requests, positions // block_size] * block_size + positions % block_size


def all_distinct(numbers: np.ndarray) -> bool:
    """Return True if all numbers are different. Takes a fifth of the time of ``np.unique``."""
    in_order = np.sort(numbers)
    return bool((in_order[1:] != in_order[:-1]).all())


@dataclass(frozen=True)
class ImageSpans:
    """Rows of a step that belong to images whose tokens attend to each other.

    Attributes:
        rows: [S, 2] int32, first row of each image and the row after its last one, in ascending order. A span has all
            rows of its image.
        bidirectional_layers: layers in which a row of a span attends to later rows of the span.
    """

    rows: np.ndarray
    bidirectional_layers: BidirectionalLayers


@dataclass(frozen=True)
class StepRows:
    """Rows of one step, created by :func:`step_rows`. All arrays are NumPy arrays of int32."""

    cu_seqlens_q: np.ndarray  # [B+1] exclusive prefix sum of query lengths
    seq_lens: np.ndarray  # [B] number of tokens of each request whose keys and values are stored after this step
    block_table: np.ndarray  # [B, max_blocks] logical -> physical block; entries past seq_len are padding
    block_size: int
    request_of_row: np.ndarray  # [N] index of the request that a row belongs to
    positions: np.ndarray  # [N] absolute position of each row in its request
    slot_mapping: np.ndarray  # [N] slot to which each row's keys and values are written
    logits_indices: np.ndarray  # [R] rows that sample, in packing order
    sample_requests: np.ndarray  # [R] index of the request of each row in logits_indices; may repeat
    state_reads: np.ndarray  # [B] slot of the request's initial recurrent state; 0: a new request
    state_writes: np.ndarray  # [B] slot of the request's new recurrent state; 0 if no layer is recurrent
    make_writes: MakeWrites  # creates `writes`
    # Positions for rotary embeddings: [N], or [3, N] if the three axes differ. None if they equal `positions`.
    rotary_positions: np.ndarray | None = None
    image_spans: ImageSpans | None = None  # None if no row attends to a later row

    def spans_of_layer(self, window: int | None) -> np.ndarray | None:
        """Return the spans of rows that attend to each other in a layer, [S, 2] int32.

        None if the rows of the layer attend only to earlier rows.

        Args:
            window: sliding window of the layer in tokens, or None.
        """
        spans = self.image_spans
        if spans is None or (window is None and spans.bidirectional_layers == "layers with windows"):
            return None
        return spans.rows

    @property
    def has_axes(self) -> bool:
        """True if rotary positions are given for each axis, [3, N]."""
        return self.rotary_positions is not None and self.rotary_positions.ndim == 2

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @cached_property
    def query_lens(self) -> np.ndarray:  # [B]
        return self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]

    @cached_property
    def context_lens(self) -> np.ndarray:  # [B]
        return self.seq_lens - self.query_lens

    @cached_property
    def segments(self) -> Segments:
        """Return the rows grouped into segments for recurrent layers."""
        return Segments(self.cu_seqlens_q, self.state_reads, self.state_writes)

    @cached_property
    def writes(self) -> Writes:
        """Return the object that writes rows to their slots on the device."""
        return self.make_writes(self.slot_mapping, self.block_size)

    def sampling_rows(self) -> StepRows:
        """Return a step that consists of only the rows that sample. The rows before them count as context.

        Requests that do not sample are left out, and so are image spans.
        """
        counts = np.bincount(self.sample_requests, minlength=self.num_requests).astype(np.int32)
        keep = np.flatnonzero(counts)
        counts = counts[keep]
        return step_rows(
            self.block_table[keep],
            self.seq_lens[keep] - counts,
            counts,
            self.block_size,
            num_samples=counts,
            state_slots=(self.state_reads[keep], self.state_writes[keep]),
            make_writes=self.make_writes,
            rotary_positions=None if self.rotary_positions is None else self.rotary_positions[..., self.logits_indices],
        )

    def of_requests(self, requests: np.ndarray) -> StepRows:
        """Return the rows of some requests, laid out as a step that samples at the last row of each request.

        Rotary positions and image spans are left out.

        Args:
            requests: indices of the requests in this step, in the order of the new step.
        """
        return step_rows(
            self.block_table[requests],
            self.context_lens[requests],
            self.query_lens[requests],
            self.block_size,
            state_slots=(self.state_reads[requests], self.state_writes[requests]),
            make_writes=self.make_writes,
        )

    def slots(self, requests: np.ndarray | int, positions: np.ndarray | int) -> np.ndarray:
        """Return the slots of positions of this step's requests (:func:`slots_of`)."""
        return slots_of(self.block_table, requests, positions, self.block_size)

    def validate(self, num_blocks: int, num_state_slots: int = 0) -> None:
        """Raise ValueError if the arrays are inconsistent or exceed a pool of ``num_blocks`` blocks.

        An invalid step must not reach a kernel. Costs a few NumPy passes over N and over the block table.

        Args:
            num_blocks: number of blocks of the pool.
            num_state_slots: number of slots for recurrent states; 0 to skip the checks of these slots.
        """
        for name in _ARRAYS:
            array = getattr(self, name)
            if array.dtype != np.int32:
                raise ValueError(f"bad step: {name} is {array.dtype}, not int32")
            if array.ndim != (2 if name == "block_table" else 1):
                raise ValueError(f"bad step: {name} has shape {array.shape}")
        rotary = self.rotary_positions
        if rotary is not None and rotary.shape not in ((self.num_tokens,), (3, self.num_tokens)):
            raise ValueError(f"bad step: rotary_positions have shape {rotary.shape}")
        self._validate_segments()
        self._validate_spans()
        self._validate_slots(num_blocks)
        self._validate_samples()
        self._validate_states(num_state_slots)

    def _validate_segments(self) -> None:
        num_tokens, num_requests = self.num_tokens, self.num_requests
        if num_tokens == 0:
            raise ValueError("bad step: no tokens")
        if self._has_a_row_each:  # a check with fewer operations
            return
        cu, query_lens = self.cu_seqlens_q, self.query_lens
        if len(cu) != num_requests + 1 or cu[0] != 0 or cu[-1] != num_tokens or (query_lens <= 0).any():
            raise ValueError(f"bad step: cu_seqlens_q {cu.tolist()} does not rise strictly from 0 to {num_tokens}")
        requests = np.repeat(np.arange(num_requests), query_lens)
        if len(self.request_of_row) != num_tokens or (self.request_of_row != requests).any():
            raise ValueError("bad step: request_of_row disagrees with cu_seqlens_q")
        if (self.context_lens < 0).any():
            raise ValueError("bad step: a sequence is shorter than its query")
        offsets = (self.context_lens - cu[:-1])[self.request_of_row]
        if (self.positions != np.arange(num_tokens) + offsets).any():
            raise ValueError("bad step: the positions of a request do not run up to its seq_len - 1")

    def _validate_spans(self) -> None:
        if self.image_spans is None:
            return
        spans = self.image_spans.rows
        if spans.dtype != np.int32 or spans.ndim != 2 or spans.shape[1] != 2:
            raise ValueError(f"bad step: spans of images are {spans.dtype} {spans.shape}, not int32 [S, 2]")
        edges = spans.ravel()
        if (
            (spans[:, 0] >= spans[:, 1]).any()
            or (np.diff(edges) < 0).any()
            or edges[0] < 0
            or edges[-1] > self.num_tokens
        ):
            raise ValueError("bad step: spans of images do not rise within the rows")
        if (self.request_of_row[spans[:, 0]] != self.request_of_row[spans[:, 1] - 1]).any():
            raise ValueError("bad step: the span of an image has rows of two requests")

    @property
    def _has_a_row_each(self) -> bool:
        """True if every request has one row and the arrays that assign rows to requests are valid."""
        numbers = np.arange(self.num_tokens + 1, dtype=np.int32)
        return (
            self.num_requests == self.num_tokens
            and np.array_equal(self.cu_seqlens_q, numbers)
            and np.array_equal(self.request_of_row, numbers[:-1])
            and np.array_equal(self.positions, self.seq_lens - 1)
            and bool(self.positions.min() >= 0)
        )

    def _validate_slots(self, num_blocks: int) -> None:
        num_used = -(-self.seq_lens // self.block_size)  # [B] blocks
        if self.block_table.shape[0] != self.num_requests or self.block_table.shape[1] < num_used.max():
            raise ValueError("bad step: block_table is too small")
        used = self.block_table[np.arange(self.block_table.shape[1]) < num_used[:, None]]  # without padding
        if used.min() < 0 or used.max() >= num_blocks:
            raise ValueError("bad step: block_table exceeds the pool")
        slots = self.slots(self.request_of_row, self.positions)
        if len(self.slot_mapping) != self.num_tokens or (self.slot_mapping != slots).any():
            raise ValueError("bad step: slot_mapping disagrees with block_table")
        if not all_distinct(self.slot_mapping):
            raise ValueError("bad step: two tokens share a slot")

    def _validate_samples(self) -> None:
        requests = self.sample_requests
        if len(requests) == self.num_requests == self.num_tokens:
            numbers = np.arange(self.num_tokens, dtype=np.int32)
            if np.array_equal(requests, numbers) and np.array_equal(self.logits_indices, numbers):
                return  # every row samples: a check with fewer operations
        in_order = len(requests) == 0 or (
            requests[0] >= 0 and requests[-1] < self.num_requests and (requests[1:] >= requests[:-1]).all()
        )
        if not in_order:
            raise ValueError("bad step: sample_requests are not requests in packing order")
        counts = np.bincount(requests, minlength=self.num_requests)
        if (counts > self.query_lens).any():
            raise ValueError("bad step: a request samples at more rows than it has")
        last_rows = _last_rows(self.cu_seqlens_q, counts)
        if len(self.logits_indices) != len(requests) or (self.logits_indices != last_rows).any():
            raise ValueError("bad step: logits_indices are not the last rows of the requests that sample")

    def _validate_states(self, num_state_slots: int) -> None:
        reads, writes = self.state_reads, self.state_writes
        if len(reads) != self.num_requests or len(writes) != self.num_requests:
            raise ValueError("bad step: state_reads and state_writes must have one entry for each request")
        if num_state_slots == 0:
            return
        if writes.min() <= ZERO_STATE_SLOT or writes.max() > num_state_slots or reads.max() > num_state_slots:
            raise ValueError("bad step: the slot of a state exceeds the pool")
        if not all_distinct(writes):
            raise ValueError("bad step: two requests write their states to one slot")
        if ((reads == ZERO_STATE_SLOT) != (self.context_lens == 0)).any():
            raise ValueError("bad step: a request continues without a state, or starts with one")


@dataclass(frozen=True)
class TracedRows:
    """Rows of a step inside a trace. Replaces :class:`StepRows` while the graph of a model is traced for replay.

    Attributes:
        writes: object that writes rows to their slots on the device.
        segments: rows grouped into segments for recurrent layers; None if no layer is recurrent.
    """

    writes: Writes
    segments: Segments | None


_ARRAYS = [field.name for field in fields(StepRows) if field.type == "np.ndarray"]


def step_rows(
    block_table: np.ndarray,
    context_lens: np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    block_size: int,
    *,
    num_samples: Sequence[int] | np.ndarray | None = None,
    state_slots: tuple[np.ndarray, np.ndarray] | None = None,
    make_writes: MakeWrites = SlotWrites,
    rotary_positions: np.ndarray | None = None,
) -> StepRows:
    """Lay out a step: the rows of its requests in packing order. The result has no image spans.

    Example: query lengths 4, 1 and 3, where the last two requests sample once::

        request_of_row   0 0 0 0 1 2 2 2
        cu_seqlens_q     0       4 5     8
        positions        c0 c0+1 c0+2 c0+3 c1 c2 c2+1 c2+2     c: context_lens
        logits_indices           4     7

    Args:
        block_table: [B, max_blocks] int32; entries beyond a request's tokens are ignored.
        context_lens: [B] int32, number of tokens of each request that already have state.
        query_lens: [B] number of tokens of each request in this step.
        block_size: tokens of a block.
        num_samples: [B] number of rows that sample, at the end of each request's rows; None means one row per request.
        state_slots: [B] and [B] int32, slots of the requests' initial and new recurrent states; None if no layer is
            recurrent.
        make_writes: creates the object that writes rows to their slots.
        rotary_positions: [N] or [3, N] int32, positions for rotary embeddings; None if they equal the positions.

    Raises:
        ValueError: the arguments differ in length, or a block table is too short.
    """
    query_lens = np.asarray(query_lens, np.int32)
    num_requests = len(query_lens)
    if block_table.shape[0] != num_requests or len(context_lens) != num_requests:
        raise ValueError("bad step: block_table, context_lens and query_lens differ in length")
    reads, writes = state_slots or (np.zeros(num_requests, np.int32), np.zeros(num_requests, np.int32))
    counts = np.ones(num_requests, np.int32) if num_samples is None else np.asarray(num_samples, np.int32)
    seq_lens = context_lens + query_lens
    if (seq_lens > block_table.shape[1] * block_size).any():
        raise ValueError("bad step: block_table is too small")
    if (query_lens == 1).all() and (counts == 1).all():  # one sampling row per request: fewer operations
        cu_seqlens_q, positions = np.arange(num_requests + 1, dtype=np.int32), seq_lens - 1
        request_of_row, logits_indices, sample_requests = (cu_seqlens_q[:-1].copy() for _ in range(3))
    else:
        cu_seqlens_q = np.zeros(num_requests + 1, np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        request_of_row = np.repeat(np.arange(num_requests, dtype=np.int32), query_lens)
        offsets = (context_lens - cu_seqlens_q[:-1])[request_of_row]
        positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + offsets
        logits_indices = _last_rows(cu_seqlens_q, counts)
        sample_requests = np.repeat(np.arange(num_requests, dtype=np.int32), counts)
    return StepRows(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=block_table,
        block_size=block_size,
        request_of_row=request_of_row,
        positions=positions,
        slot_mapping=slots_of(block_table, request_of_row, positions, block_size),
        logits_indices=logits_indices,
        sample_requests=sample_requests,
        state_reads=reads,
        state_writes=writes,
        make_writes=make_writes,
        rotary_positions=rotary_positions,
    )


def _last_rows(cu_seqlens_q: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the rows at which requests sample: the last ``counts[i]`` rows of request i, [R] int32."""
    ends = np.repeat(cu_seqlens_q[1:], counts)
    # Distance from the end of the request: its last sample is at its last row.
    back = np.repeat(np.cumsum(counts), counts) - np.arange(len(ends))
    return (ends - back).astype(np.int32)
