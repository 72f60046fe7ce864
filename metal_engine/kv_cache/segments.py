"""How recurrent layers see a step's rows: as segments, each of which goes on from one state and leaves another.

A layer that carries a state from token to token cannot take packed rows as they are. It gets them in *groups* that are
proper batches: all segments of one row that go on from a state, all of one row that begin a request, and each longer
segment alone. Nothing is ever padded: a padded token would change a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

# The slot of no request. In arrays of states its row is zeros: what a request begins with.
ZERO_STATE_SLOT = 0
# The slot of padded rows. No array has it: they go on from any state, and nobody reads what they leave.
PADDING_SLOT = -1

Slots = tuple[int, ...]


@dataclass(frozen=True)
class SegmentGroup:
    """Segments that a layer takes as one batch [b, s, ...].

    Attributes:
        rows: the packed rows, b * s of them.
        length: s.
        reads: [b] slots of the states they go on from; ``ZERO_STATE_SLOT`` for all of them, or for none.
        writes: [b] slots of the states that they leave.
    """

    rows: slice | mx.array
    length: int
    reads: Slots
    writes: Slots

    @property
    def is_fresh(self) -> bool:
        """Whether they begin requests: there is no state to go on from."""
        return self.reads[0] == ZERO_STATE_SLOT

    def take(self, x: mx.array, axis: int = 1) -> mx.array:
        """The group's rows of packed ``x`` [N, ..., 1 at ``axis``, ...], as [b, ..., s at ``axis``, ...]."""
        x = x[self.rows]
        return x if self.length == 1 else x.swapaxes(0, axis)


@dataclass(frozen=True)
class ConvolutionPlan:
    """Where a causal convolution over all segments at once finds its inputs, each segment after what it keeps.

    Attributes:
        source: [N + B * keep] int32, rows of the states [B * keep, C] followed by the packed rows [N, C].
        outputs: [N] int32, where each packed row's output is.
        last: [B, keep] int32, what each segment keeps of its inputs.
    """

    source: mx.array
    outputs: mx.array
    last: mx.array


class Segments:
    """The segments of one step, made once for all layers.

    Args:
        cu_seqlens: [B+1] int32, exclusive prefix sum of the segments' lengths.
        reads: [B] int32, slots of the states that they go on from; ``ZERO_STATE_SLOT`` for those that begin.
        writes: [B] int32, slots of the states that they leave.

    Attributes:
        groups: batches that cover all segments.
        num_rows: N.
    """

    def __init__(self, cu_seqlens: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
        self.cu_seqlens = cu_seqlens
        self.num_rows = int(cu_seqlens[-1])
        self.reads: Slots = tuple(reads.tolist())
        self.writes: Slots = tuple(writes.tolist())
        self.groups: list[SegmentGroup] = []
        self._lengths = np.diff(cu_seqlens)
        self._plans: dict[int, ConvolutionPlan] = {}
        packed = []  # rows of the groups, one after the other
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
        """Segments of one length, which go on from states at hand in the same order: all that a trace knows of them."""
        slots = np.arange(1, num_segments + 1, dtype=np.int32)
        return cls(np.arange(num_segments + 1, dtype=np.int32) * np.int32(length), slots, slots)

    @property
    def is_decode(self) -> bool:
        """Whether every segment is one row that goes on from a state."""
        return len(self.groups) == 1 and self.groups[0].length == 1 and not self.groups[0].is_fresh

    @cached_property
    def tables(self) -> tuple[mx.array, mx.array]:
        """For kernels: ``cu_seqlens`` [B+1], and [B] which row of the states taken each segment goes on from, or -1."""
        reads = [-1 if slot == ZERO_STATE_SLOT else index for index, slot in enumerate(self.reads)]
        return mx.array(self.cu_seqlens), mx.array(reads)

    def join(self, parts: Sequence[mx.array], axis: int = 1) -> mx.array:
        """The groups' [b, ..., s at ``axis``, ...] as packed rows [N, ..., 1 at ``axis``, ...]."""
        rows = [p if g.length == 1 else p.swapaxes(0, axis) for p, g in zip(parts, self.groups, strict=True)]
        packed = rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)
        return packed if self._order is None else packed[self._order]

    def convolution_plan(self, keep: int) -> ConvolutionPlan:
        """Args: keep: inputs that a segment keeps, the kernel's size less one."""
        if keep not in self._plans:
            num_kept = len(self.reads) * keep
            # All segments in one sequence, each after the inputs that it keeps from before.
            starts = self.cu_seqlens[:-1] + np.arange(len(self.reads)) * keep
            rows = np.repeat(starts + keep - self.cu_seqlens[:-1], self._lengths) + np.arange(self.num_rows)
            source = np.empty(self.num_rows + num_kept, np.int32)
            source[(starts[:, None] + np.arange(keep)).ravel()] = np.arange(num_kept)
            source[rows] = num_kept + np.arange(self.num_rows)
            last = (starts + self._lengths)[:, None] + np.arange(keep)
            arrays = (mx.array(a.astype(np.int32)) for a in (source, rows - keep, last))
            self._plans[keep] = ConvolutionPlan(*arrays)
        return self._plans[keep]
