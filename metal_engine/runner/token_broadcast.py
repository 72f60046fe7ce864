"""One rank of a group samples; its tokens come to the others as part of the step's graph."""

from __future__ import annotations

import mlx.core as mx


class TokenBroadcast:
    """Brings rank 0's samples to every rank: the others add zeros to them, so no two ranks go on from other tokens.

    The sum is an array like any other: the step after may be built on it before anybody knows the tokens.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.samples = group.rank() == 0

    def sent(self, tokens: mx.array) -> mx.array:
        """On rank 0: its samples, [R], as all ranks have them, [R] int32."""
        return mx.distributed.all_sum(tokens.astype(mx.int32), group=self._group)

    def received(self, num_rows: int, logits: mx.array) -> mx.array:
        """On the others: rank 0's samples, [R] int32.

        They come after ``logits``, as they do on rank 0: all ranks exchange the same arrays in the same order.
        """
        zeros = mx.depends([mx.zeros((num_rows,), mx.int32)], [logits])[0]
        return mx.distributed.all_sum(zeros, group=self._group)
