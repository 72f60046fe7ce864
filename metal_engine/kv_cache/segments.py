"""Groups a step's rows into segments for recurrent layers. Each segment has an initial state and writes a new state.

A layer that carries a state from token to token cannot process packed rows directly. It receives *groups* of segments.
Each group is a regular batch:

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
        rows: b * s packed rows.
        length: s, the number of rows of each segment.
        reads: [b] slots of the initial states. Either all or none of them are ``ZERO_STATE_SLOT``.
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
        """Return the group's rows of packed rows as a batch.

        Args:
            x: packed rows, [N, ..., 1, ...]. The dimension of size 1 is ``axis``.

        Returns:
            Rows [b, ..., s, ...]. The dimension of size s is ``axis``.
        """
        x = x[self.rows]
        return x if self.length == 1 else x.swapaxes(0, axis)


@dataclass(frozen=True)
class ConvolutionPlan:
    """Indices for a causal convolution over all segments at once, each after the inputs kept from earlier steps.

    Attributes:
        source: [N + B * keep] int32, indices into the states [B * keep, C] followed by the packed rows [N, C].
        outputs: [N] int32, index of each packed row's output.
        last: [B, keep] int32, indices of the inputs that each segment keeps for the next step.
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
        """Create segments of equal length, for a trace: the initial states are in the order of the segments."""
        slots = np.arange(1, num_segments + 1, dtype=np.int32)
        return cls(np.arange(num_segments + 1, dtype=np.int32) * np.int32(length), slots, slots)

    @property
    def is_decode(self) -> bool:
        """True if every segment is one row with an initial state."""
        return len(self.groups) == 1 and self.groups[0].length == 1 and not self.groups[0].is_fresh

    @cached_property
    def tables(self) -> tuple[mx.array, mx.array]:
        """Arrays for kernels: ``cu_seqlens`` [B+1], and [B] the index of each segment's initial state, or -1."""
        reads = [-1 if slot == ZERO_STATE_SLOT else index for index, slot in enumerate(self.reads)]
        return mx.array(self.cu_seqlens), mx.array(reads)

    def join(self, parts: Sequence[mx.array], axis: int = 1) -> mx.array:
        """Join the groups' arrays [b, ..., s at ``axis``, ...] to packed rows [N, ..., 1 at ``axis``, ...]."""
        rows = [p if g.length == 1 else p.swapaxes(0, axis) for p, g in zip(parts, self.groups, strict=True)]
        packed = rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)
        return packed if self._order is None else packed[self._order]

    def convolution_plan(self, keep: int) -> ConvolutionPlan:
        """Return the indices for a convolution.

        Args:
            keep: inputs that a segment keeps: the size of the convolution's kernel minus one.
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
