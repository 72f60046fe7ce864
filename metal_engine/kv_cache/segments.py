"""Groups a step's segments into batches for recurrent layers.

A segment consists of the rows of one request in a step (``rows.py``). A recurrent layer computes the new state of each
segment from an initial state. It cannot process packed rows directly, so it receives *groups* of segments. Each of
these groups is a regular batch:

- all segments of one row with an initial state,
- all segments of one row that start a request,
- each longer segment alone.

No group has padding, because a padding token would change a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

# Reserved slot that holds an all-zero state: the initial state of a new request.
ZERO_STATE_SLOT = 0
# Pseudo slot for padding rows, without storage. They read an arbitrary state, and their output state is discarded.
PADDING_SLOT = -1

Slots = tuple[int, ...]


@dataclass(frozen=True)
class SegmentGroup:
    """Segments that a layer processes as one batch [b, s, ...].

    Attributes:
        rows: indices of the group's b * s packed rows.
        length: s, the number of rows of each segment.
        reads: [b] slots of the initial states. ``ZERO_STATE_SLOT`` for all segments if they start requests.
        writes: [b] slots for the new states.
    """

    rows: slice | mx.array
    length: int
    reads: Slots
    writes: Slots

    @property
    def is_fresh(self) -> bool:
        """True if the segments start requests, so that they have no initial state."""
        return self.reads[0] == ZERO_STATE_SLOT

    def take(self, x: mx.array, axis: int = 1) -> mx.array:
        """Select the group's rows from an array of packed rows, as a batch.

        Args:
            x: packed rows, [N, ..., 1, ...].
            axis: axis of ``x`` with size 1.

        Returns:
            Rows [b, ..., s, ...], with size s at ``axis``.
        """
        x = x[self.rows]
        return x if self.length == 1 else x.swapaxes(0, axis)


@dataclass(frozen=True)
class ConvolutionPlan:
    """Indices for a causal convolution over all segments at once.

    All segments form one sequence. Each segment follows the ``keep`` inputs that are stored in its initial state.

    Attributes:
        source: [N + B * keep] int32, the sequence as indices into the concatenation of the states, [B * keep, C], and
            the packed rows, [N, C].
        outputs: [N] int32, index of each packed row's output in the convolution's result.
        last: [B, keep] int32, indices in the sequence of the inputs that each segment keeps for the next step.
    """

    source: mx.array
    outputs: mx.array
    last: mx.array


class Segments:
    """Segments of one step, created once for all layers.

    Args:
        cu_seqlens: [B+1] int32, exclusive prefix sum of the segments' lengths.
        reads: [B] int32, slots of the initial states; ``ZERO_STATE_SLOT`` for a segment that starts a request.
        writes: [B] int32, slots for the new states.

    Attributes:
        groups: batches that cover all segments.
        num_rows: N, the number of packed rows.
    """

    def __init__(self, cu_seqlens: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
        self.cu_seqlens = cu_seqlens
        self.num_rows = int(cu_seqlens[-1])
        self.reads: Slots = tuple(reads.tolist())
        self.writes: Slots = tuple(writes.tolist())
        self.groups: list[SegmentGroup] = []
        self._lengths = np.diff(cu_seqlens)
        self._plans: dict[int, ConvolutionPlan] = {}
        packed = []  # packed rows of each group
        for is_fresh in (False, True):
            ones = np.flatnonzero((self._lengths == 1) & ((reads == ZERO_STATE_SLOT) == is_fresh))
            if len(ones):
                packed.append(self._add(cu_seqlens[ones], ones))
        for index in np.flatnonzero(self._lengths > 1):
            packed.append(self._add(np.arange(cu_seqlens[index], cu_seqlens[index + 1]), np.array([index])))
        order = np.argsort(np.concatenate(packed)).astype(np.int32)
        self._order = None if (order == np.arange(self.num_rows)).all() else mx.array(order)

    def _add(self, rows: np.ndarray, segments: np.ndarray) -> np.ndarray:
        is_run = len(rows) == rows[-1] - rows[0] + 1
        self.groups.append(
            SegmentGroup(
                slice(int(rows[0]), int(rows[-1]) + 1) if is_run else mx.array(rows.astype(np.int32)),
                length=int(self._lengths[segments[0]]),
                reads=tuple(self.reads[i] for i in segments),
                writes=tuple(self.writes[i] for i in segments),
            )
        )
        return rows

    @classmethod
    def alike(cls, num_segments: int, length: int) -> Segments:
        """Create segments of equal length, for a trace. Segment i has slot i + 1, so none starts a request."""
        slots = np.arange(1, num_segments + 1, dtype=np.int32)
        return cls(np.arange(num_segments + 1, dtype=np.int32) * np.int32(length), slots, slots)

    @property
    def is_decode(self) -> bool:
        """True if every segment is one row with an initial state."""
        return len(self.groups) == 1 and self.groups[0].length == 1 and not self.groups[0].is_fresh

    @cached_property
    def tables(self) -> tuple[mx.array, mx.array]:
        """Arrays for kernels, int32: ``cu_seqlens``, [B+1], and the row of each segment's initial state, [B].

        The states of a step are in one array, with segment i in row i. The second array therefore has i for segment i,
        or -1 if the segment starts a request.
        """
        reads = [-1 if slot == ZERO_STATE_SLOT else index for index, slot in enumerate(self.reads)]
        return mx.array(self.cu_seqlens), mx.array(reads)

    def join(self, parts: Sequence[mx.array], axis: int = 1) -> mx.array:
        """Join one array per group, [b, ..., s, ...] with size s at ``axis``, to packed rows, [N, ..., 1, ...]."""
        rows = [p if g.length == 1 else p.swapaxes(0, axis) for p, g in zip(parts, self.groups, strict=True)]
        packed = rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)
        return packed if self._order is None else packed[self._order]

    def convolution_plan(self, keep: int) -> ConvolutionPlan:
        """Return the indices for a convolution. The result is cached by ``keep``.

        Args:
            keep: number of inputs that a segment keeps: the size of the convolution's kernel minus one.
        """
        if keep not in self._plans:
            num_kept = len(self.reads) * keep
            # All segments form one sequence. Each segment follows the inputs that it kept from earlier steps.
            starts = self.cu_seqlens[:-1] + np.arange(len(self.reads)) * keep
            rows = np.repeat(starts + keep - self.cu_seqlens[:-1], self._lengths) + np.arange(self.num_rows)
            source = np.empty(self.num_rows + num_kept, np.int32)
            source[(starts[:, None] + np.arange(keep)).ravel()] = np.arange(num_kept)
            source[rows] = num_kept + np.arange(self.num_rows)
            last = (starts + self._lengths)[:, None] + np.arange(keep)
            arrays = (mx.array(a.astype(np.int32)) for a in (source, rows - keep, last))
            self._plans[keep] = ConvolutionPlan(*arrays)
        return self._plans[keep]
