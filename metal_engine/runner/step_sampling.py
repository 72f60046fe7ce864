"""Turns the logits of a step into tokens: edits, sampling, log probabilities, and the transfer to the host."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_engine.kv_cache.rows import StepRows
from metal_engine.request import TokenLogprobs
from metal_engine.runner.batch import PackedBatch, RequestTable
from metal_engine.runner.logits_edits import NoTokenLeftError, StepEdits
from metal_engine.runner.logprobs import LogprobArrays, compute_logprobs
from metal_engine.runner.sampler import sample
from metal_engine.runner.token_broadcast import TokenBroadcast
from metal_engine.step import ModelOutput, PromptLogprobs, SchedulerOutput

# Maximum wait for the masks of the grammars of a step. Most need a tenth of a millisecond.
_MASK_SECONDS = 0.02


@dataclass(frozen=True)
class _PromptRows:
    """Rows of logits that predict consecutive prompt tokens of one request."""

    request_id: str
    start: int  # index of the first predicted token
    rows: np.ndarray  # [T] packed rows
    targets: np.ndarray  # [T] the tokens that the rows predict
    num_top: int


class StepSampling:
    """Sampling of one step. Order of use: construct, :meth:`build`, evaluate, :meth:`result`.

    The constructor updates the logits edits of each sampling request with the request's new tokens, on the host only.

    Args:
        allow_late_masks: True if a token may be recomputed because its grammar mask is late. Otherwise, the step waits
            for the mask.
        broadcast: distributes rank 0's tokens to all ranks; None if there is one rank.

    Attributes:
        logits_indices: packed rows whose logits :meth:`build` needs, [R + T] int32: rows that sample, then rows that
            predict prompt tokens with requested log probabilities.
        has_masks: True if :meth:`build` computes masks on the host, which may take milliseconds.
        tokens: sampled tokens after :meth:`build`, [R] int32; None if nothing samples.
    """

    def __init__(
        self,
        table: RequestTable,
        plan: SchedulerOutput,
        batch: PackedBatch,
        *,
        allow_late_masks: bool = True,
        broadcast: TokenBroadcast | None = None,
    ) -> None:
        self._broadcast = broadcast
        self._mask_seconds = _MASK_SECONDS if allow_late_masks else math.inf
        self._sampling = table.sampling
        self._req_ids = plan.sampled_req_ids
        self._drafts = plan.scheduled_spec_decode_tokens
        # For each row of a step with drafts: request id, and number of drafts before the row.
        self._rows: list[tuple[str, int]] = []
        if self._drafts:
            self._rows = [(r, i) for r in self._req_ids for i in range(1 + len(self._drafts.get(r, ())))]
        self._usable: dict[str, int] = {}  # request id -> number of drafts that may be accepted, if not all
        self._indices = batch.sample_indices
        self._positions = table.output_positions(batch)
        # Copied now, because the index may belong to another request when the result is read.
        self._num_top = table.sampling.logprobs[batch.sample_indices]  # [R], -1: not requested
        self._errors: dict[str, str] = {}
        self._late: set[str] = set()
        self._num_unmasked = 0
        self._edits = self._collect_edits(table)
        self._prompt_rows = _prompt_rows(table, plan, batch.rows)
        self.logits_indices = batch.rows.logits_indices
        if self._prompt_rows:
            self.logits_indices = np.concatenate([self.logits_indices, *(p.rows for p in self._prompt_rows)])
        self.tokens: mx.array | None = None
        self._logprobs: LogprobArrays | None = None
        self._prompt_logprobs: LogprobArrays | None = None

    def _row(self, row: int) -> tuple[str, int]:
        """Return the request of a row, and the number of drafts before the row."""
        return self._rows[row] if self._drafts else (self._req_ids[row], 0)

    def _collect_edits(self, table: RequestTable) -> StepEdits | None:
        if not self._drafts and len(table.without_edits) == len(table.edits):
            return None
        edits = StepEdits()
        for row, index in enumerate(self._indices.tolist()):
            request_edits = table.edits.get(index)
            if request_edits is None or (index in table.without_edits and not self._drafts):
                continue
            request_id, num_drafts = self._row(row)
            token_ids = table.token_ids(index, num_drafts)
            try:
                drafts = self._drafts.get(request_id, [])
                if num_drafts == 0:
                    request_edits.catch_up(token_ids, drafts)
                if not request_edits.has_edits_after(drafts[:num_drafts]):
                    continue
                edits.add(row, request_edits, token_ids, int(self._positions[row]), num_drafts)
            except NoTokenLeftError as error:
                self._give_up(row, str(error))
        return edits if edits.rows else None

    def _give_up(self, row: int, message: str) -> None:
        """Handle a row at which no token can be sampled. If no draft is before the row, its request fails.

        Otherwise, the last draft before the row is rejected, and so are all later drafts. If that draft is then sampled
        anyway, the next step reaches the row without drafts.
        """
        request_id, num_drafts = self._row(row)
        if num_drafts:
            self._usable[request_id] = min(num_drafts - 1, self._usable.get(request_id, num_drafts))
        else:
            self._errors[request_id] = message

    @property
    def has_masks(self) -> bool:
        return self._edits is not None and bool(self._edits.grammars)

    def _masks(self, edits: StepEdits, logits: mx.array, is_dispatched: bool) -> np.ndarray:
        """Return the masks of the step's grammars, [G, W] int32.

        A request whose grammar fails gets an error. A request whose mask is not ready in time is added to ``_late``.
        """
        masks = np.full((len(edits.grammars), -(-logits.shape[-1] // 32)), -1, np.int32)
        late = self._fill(masks, edits, range(len(masks)), time.monotonic() + self._mask_seconds)
        if late and is_dispatched:
            mx.eval(logits)  # the wait blocks no other request: the device is busy anyway
            late = self._fill(masks, edits, late, time.monotonic())
        self._late |= {self._row(edits.rows[edits.grammars[i][0]])[0] for i in late}
        return masks

    def _fill(self, masks: np.ndarray, edits: StepEdits, wanted: Iterable[int], deadline: float) -> list[int]:
        """Fill in the masks of the grammars with the indices ``wanted``.

        Return the indices of grammars whose masks are not ready at ``deadline``, a time of ``time.monotonic``.
        """
        late = []
        for i in wanted:
            row, grammar, num_drafts = edits.grammars[i]
            try:
                if not grammar.fill_mask(masks[i], deadline, num_drafts):
                    late.append(i)
            except ValueError as error:
                self._give_up(edits.rows[row], f"structured output failed: {error}")
                self._num_unmasked += num_drafts > 0
        return late

    def build(self, logits: mx.array, *, is_dispatched: bool) -> None:
        """Build the graph on the step's logits, [R + T, vocab_size].

        Args:
            is_dispatched: True if the device is computing the logits already.
        """
        num_sampled = len(self._indices)
        if self._broadcast is not None and not self._broadcast.is_source:
            self.tokens = self._broadcast.receive(num_sampled, logits) if num_sampled else None
            return
        if self._prompt_rows:
            targets = mx.array(np.concatenate([p.targets for p in self._prompt_rows]))
            num_top = max(p.num_top for p in self._prompt_rows)
            self._prompt_logprobs = compute_logprobs(logits[num_sampled:], targets, num_top)
            logits = logits[:num_sampled]
        if num_sampled:
            self.tokens = self._sample(logits, is_dispatched)
            if self._broadcast is not None:
                self.tokens = self._broadcast.send(self.tokens)
            wanted = np.flatnonzero(self._num_top >= 0)
            if len(wanted):
                at = mx.array(wanted.astype(np.int32))
                self._logprobs = compute_logprobs(logits[at], self.tokens[at], int(self._num_top.max()))

    def _sample(self, logits: mx.array, is_dispatched: bool) -> mx.array:
        edits = self._edits
        if edits is None:
            return sample(logits, self._sampling, self._indices, self._positions)
        masks = self._masks(edits, logits, is_dispatched)
        edited = np.array(edits.rows, np.int32)
        changed = edits.apply(logits[mx.array(edited)].astype(mx.float32), masks)
        tokens = sample(changed, self._sampling, self._indices[edited], self._positions[edited])
        if len(edited) == len(self._indices):
            return tokens
        plain = np.setdiff1d(np.arange(len(self._indices), dtype=np.int32), edited)
        others = sample(logits[mx.array(plain)], self._sampling, self._indices[plain], self._positions[plain])
        order = np.argsort(np.concatenate([edited, plain])).astype(np.int32)
        return mx.concatenate([tokens, others])[mx.array(order)]

    @property
    def late_req_ids(self) -> set[str]:
        """Requests whose samples are void. See :attr:`ModelOutput.late_req_ids`.

        Valid after :meth:`build` or :meth:`set_late_requests`.
        """
        return self._late

    def void_samples(self, request_ids: set[str]) -> None:
        """Void the samples of ``request_ids`` that were drawn without a grammar mask.

        These requests need a mask because of a token that was unknown when the step was built.
        """
        edits = self._edits
        masked = set() if edits is None else {self._row(edits.rows[i])[0] for i, _, _ in edits.grammars}
        self._late |= request_ids.intersection(self._req_ids) - masked

    def set_late_requests(self, request_ids: set[str]) -> None:
        """Set the requests with void samples, as reported by the rank that sampled."""
        self._late = request_ids

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate before :meth:`result`; empty if the step computes only KV."""
        arrays = [] if self.tokens is None else [self.tokens]
        for logprobs in (self._logprobs, self._prompt_logprobs):
            arrays += [] if logprobs is None else logprobs.arrays
        return arrays

    def result(self) -> ModelOutput:
        """Return the step's output. Call it after :attr:`arrays` have been evaluated."""
        output = ModelOutput([] if self.tokens is None else np.array(self.tokens).tolist())
        output.errors, output.late_req_ids = self._errors, self._late
        output.num_unmasked_drafts = self._num_unmasked
        num_tops = self._num_top.tolist()
        if self._logprobs is not None:
            tokens = self._logprobs.on_host([k for k in num_tops if k >= 0])
            of_rows = iter(tokens)
            if not self._drafts:
                output.logprobs = {r: [next(of_rows)] for r, k in zip(self._req_ids, num_tops, strict=True) if k >= 0}
        if self._drafts:
            self._match(output, [None if k < 0 or self._logprobs is None else next(of_rows) for k in num_tops])
        if self._prompt_logprobs is not None:
            num_tops = [p.num_top for p in self._prompt_rows for _ in p.targets]
            tokens = self._prompt_logprobs.on_host(num_tops)
            for part in self._prompt_rows:
                count = len(part.targets)
                output.prompt_logprobs[part.request_id] = PromptLogprobs(part.start, tokens[:count])
                tokens = tokens[count:]
        return output

    def release(self) -> None:
        """Drop the arrays. Do not call :meth:`result` afterwards."""
        self.tokens = self._logprobs = self._prompt_logprobs = None

    def _match(self, output: ModelOutput, logprobs: list[TokenLogprobs | None]) -> None:
        """Count each request's accepted drafts, and keep the sample after the last accepted draft.

        A draft is accepted if it equals the token sampled in its place, and all drafts before it are accepted::

            rows      last token   draft 0   draft 1   draft 2
            samples   = draft 0    = draft 1    x         -        2 accepted, then x

        Args:
            output: output with the samples of all rows, [R]. Afterwards, it has one sample per request, the numbers of
                accepted drafts, and the log probabilities of accepted drafts and samples.
            logprobs: log probabilities of each row's sample, [R]; None if not requested.
        """
        samples, output.sampled_token_ids = output.sampled_token_ids, []
        first = 0
        for request_id in self._req_ids:
            drafts = self._drafts.get(request_id, ())
            num_accepted = 0
            if request_id not in self._late and request_id not in self._errors:
                usable = drafts[: self._usable.get(request_id, len(drafts))]
                while num_accepted < len(usable) and usable[num_accepted] == samples[first + num_accepted]:
                    num_accepted += 1
            if drafts:
                output.num_accepted_tokens[request_id] = num_accepted
            end = first + num_accepted + 1
            output.sampled_token_ids.append(samples[end - 1])
            if of_request := [entry for entry in logprobs[first:end] if entry is not None]:
                output.logprobs[request_id] = of_request
            first += 1 + len(drafts)


def _prompt_rows(table: RequestTable, plan: SchedulerOutput, rows: StepRows) -> list[_PromptRows]:
    if not table.num_prompt_logprobs_requests:
        return []
    found = []
    for i, request_id in enumerate(plan.num_scheduled_tokens):
        index = table.index(request_id)
        num_top = int(table.sampling.prompt_logprobs[index])
        if num_top < 0:
            continue
        first = int(rows.cu_seqlens_q[i])
        start = int(rows.positions[first]) + 1  # the token at position p predicts the token at p + 1
        end = min(int(rows.seq_lens[i]) + 1, table.num_prompt_tokens(index))
        if start < end:
            found.append(
                _PromptRows(
                    request_id,
                    start,
                    np.arange(first, first + end - start, dtype=np.int32),
                    table.token_ids(index)[start:end].copy(),
                    num_top,
                )
            )
    return found
