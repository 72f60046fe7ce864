"""Pooling of hidden states: one vector for each pooled prompt, which may take several steps.

The vector is a mean of hidden states. The pooling type selects the tokens: all tokens of the prompt (MEAN), the last
token (LAST) or the first token (CLS). A step sums the hidden states of its rows on the device. The host adds up the
sums of a prompt's chunks. A preempted request starts again with a new sum, which steps in flight do not change. A
prompt with ``token_ids`` gets the logits of these tokens at its last token instead of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_engine.kv_cache.rows import StepRows
from metal_engine.pooling_params import PoolingParams
from metal_engine.step import SchedulerOutput

# Lower bound of the norm, so that a zero vector stays zero.
_TINY = float(np.finfo(np.float32).tiny)


class PooledPrompt:
    """Running sum of the hidden states of a prompt since its request was last admitted.

    Args:
        params: pooling parameters, with the model's defaults filled in.
        num_prompt_tokens: length of the prompt.
    """

    def __init__(self, params: PoolingParams, num_prompt_tokens: int) -> None:
        self.params = params
        last = num_prompt_tokens - 1
        first_and_end = {"LAST": (last, num_prompt_tokens), "CLS": (0, 1), "MEAN": (0, num_prompt_tokens)}
        self._first, self._end = first_and_end[params.pooling_type or "LAST"]
        self._sum: np.ndarray | None = None  # [H] float64
        self._count = 0

    def wanted(self, start: int, end: int) -> tuple[int, int]:
        """Return the range (first, end) of the positions from ``start`` to ``end`` - 1 whose hidden states count.

        The range may be empty.
        """
        first = max(start, self._first)
        return first, max(first, min(end, self._end))

    def add(self, part: np.ndarray, count: int) -> None:
        """Add the sum of the hidden states of ``count`` tokens, [H] float32."""
        self._sum = part.astype(np.float64) if self._sum is None else self._sum + part
        self._count += count

    def vector(self) -> np.ndarray:
        """Return the prompt's vector, [D] float32. All of its tokens must have been added."""
        assert self._sum is not None and self._count == self._end - self._first, "a part of the prompt was not pooled"
        vector = (self._sum / self._count)[: self.params.dimensions]
        if self.params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), _TINY)
        return vector.astype(np.float32)


@dataclass(frozen=True)
class _Part:
    """Rows of one prompt whose hidden states this step sums.

    ``start`` and ``end`` are a range of the hidden states given to :meth:`StepPooling.build`.
    """

    prompt: PooledPrompt
    start: int
    end: int


class StepPooling:
    """Pooling of one step. Order of use: construct, :meth:`build`, evaluate, :meth:`result`.

    Args:
        prompts: pooled prompts in this step, by request id.
        scheduled: the step's requests in packing order.
        rows: packed rows of the step.
        pooled_req_ids: requests whose prompts the step completes.

    Attributes:
        hidden_indices: packed rows whose hidden states :meth:`build` needs, [P] int32.
        logits_indices: packed rows whose logits :meth:`build` needs, [S] int32.
    """

    def __init__(
        self, prompts: Mapping[str, PooledPrompt], scheduled: list[str], rows: StepRows, pooled_req_ids: list[str]
    ) -> None:
        self._parts: list[_Part] = []
        self._done = [(request_id, prompts[request_id]) for request_id in pooled_req_ids]
        self._scored = [(r, prompt) for r, prompt in self._done if prompt.params.token_ids]
        of_request = {request_id: i for i, request_id in enumerate(scheduled)}
        hidden: list[np.ndarray] = []
        num_hidden = 0
        for request_id, prompt in prompts.items():
            if prompt.params.token_ids:
                continue
            i = of_request[request_id]
            row, start = int(rows.cu_seqlens_q[i]), int(rows.context_lens[i])
            first, end = prompt.wanted(start, int(rows.seq_lens[i]))
            if first < end:
                hidden.append(np.arange(row + first - start, row + end - start, dtype=np.int32))
                self._parts.append(_Part(prompt, num_hidden, num_hidden + end - first))
                num_hidden += end - first
        self.hidden_indices = np.concatenate(hidden) if hidden else np.zeros(0, np.int32)
        last_rows = [rows.cu_seqlens_q[1 + of_request[request_id]] - 1 for request_id, _ in self._scored]
        self.logits_indices = np.array(last_rows, np.int32)
        self._sums: mx.array | None = None  # [parts, H] float32
        self._logits: list[mx.array] = []  # one array for each scored prompt, float32

    @classmethod
    def of(cls, held: Mapping[str, PooledPrompt], plan: SchedulerOutput, rows: StepRows) -> StepPooling:
        """Return the pooling of a plan's step.

        Args:
            held: pooled prompts of all requests that the runner holds, by request id.
        """
        scheduled = list(plan.num_scheduled_tokens)
        prompts = {r: prompt for r in scheduled if (prompt := held.get(r)) is not None}
        return cls(prompts, scheduled, rows, plan.pooled_req_ids)

    def build(self, hidden: mx.array | None, logits: mx.array) -> None:
        """Build the graph on the hidden states, [P, H], and the logits, [S, vocab_size], of the requested rows."""
        if self._parts:
            assert hidden is not None
            # One prompt at a time, because a float32 copy of all rows of a chunk would be large.
            sums = [hidden[part.start : part.end].astype(mx.float32).sum(axis=0) for part in self._parts]
            self._sums = mx.stack(sums)
        for row, (_, prompt) in enumerate(self._scored):
            self._logits.append(logits[row][mx.array(prompt.params.token_ids)].astype(mx.float32))

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate before :meth:`result`; empty if no row of this step counts."""
        return self._logits if self._sums is None else [self._sums, *self._logits]

    def result(self) -> dict[str, np.ndarray]:
        """Return the vectors or logits of the prompts that the step completes, [D] float32, by request id.

        Adds the step's sums to all its prompts, so it must be called exactly once.
        """
        if self._sums is not None:
            for part, total in zip(self._parts, np.array(self._sums), strict=True):
                part.prompt.add(total, part.end - part.start)
        logits = {r: np.array(values) for (r, _), values in zip(self._scored, self._logits, strict=True)}
        return {r: logits[r] if r in logits else prompt.vector() for r, prompt in self._done}

    def release(self) -> None:
        """Drop the arrays. Do not call :meth:`result` afterwards."""
        self._sums, self._logits = None, []
