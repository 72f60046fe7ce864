"""Distributes the tokens that rank 0 samples to the other ranks, as part of the step's graph."""

from __future__ import annotations

import mlx.core as mx


class TokenBroadcast:
    """Sends rank 0's samples to every rank. The ranks compute a sum, to which all ranks except rank 0 add zeros.

    The sum is an unevaluated array, so the next step can be built before the tokens are computed.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.is_source = group.rank() == 0

    def send(self, tokens: mx.array) -> mx.array:
        """Return rank 0's samples as all ranks receive them, [R] -> [R] int32. Call it on rank 0."""
        return mx.distributed.all_sum(tokens.astype(mx.int32), group=self._group)

    def receive(self, num_rows: int, logits: mx.array) -> mx.array:
        """Return rank 0's samples, [R] int32. Call it on the other ranks.

        The exchange follows ``logits``, as on rank 0, so that all ranks exchange the same arrays in the same order.
        """
        zeros = mx.depends([mx.zeros((num_rows,), mx.int32)], [logits])[0]
        return mx.distributed.all_sum(zeros, group=self._group)
