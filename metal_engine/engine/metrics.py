"""Counters and histograms of the engine. The engine's thread writes them, and any thread may read them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.request import Request, RequestOutput
from metal_engine.step import ModelOutput, SchedulerOutput

# Upper bounds of the buckets in seconds, from a step of a small model to a long response on a slow machine.
_REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
                        80, 160, 640, 2560)  # fmt: skip
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
                  7.5, 10, 20, 40, 80)  # fmt: skip
_TOKENS = tuple(1 << i for i in range(18))


class Histogram:
    """Histogram: counts of values by bucket. One thread adds values while others read.

    Attributes:
        bounds: inclusive upper bounds of the buckets, increasing. The last bucket has no bound.
        counts: number of values in each bucket (not cumulative). The unbounded bucket is last.
        sum: sum of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class _Times:
    """Times of a request's events in seconds of :func:`time.monotonic`; 0 for events that have not happened yet.

    Attributes:
        ends_in_text: True if the request has stop strings. ``EngineClient`` then reports the end of the request with
            :meth:`EngineMetrics.finished`, unless the request fails.
    """

    arrival: float
    num_prompt_tokens: int
    ends_in_text: bool
    num_output_tokens: int = 0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class EngineMetrics:
    """Totals since the engine was created. Durations are in seconds. A request arrives when it is submitted.

    ``restart`` and the attributes from ``first_token`` to ``step_time`` are histograms (:class:`Histogram`). A pooling
    request has no tokens. It counts only in the metrics about prompts and whole requests.

    Attributes:
        num_prompt_tokens: tokens of the computed prompts, including tokens found in the prefix cache.
        num_generation_tokens: number of sampled tokens. Tokens after a stop string are counted at first. When the
            client reports the stop string, an equal number of later tokens is left out of the count.
        num_cache_queries: number of tokens looked up in the prefix cache. A request counts again at each admission.
        num_cache_hits: number of these tokens that were found in the prefix cache, or loaded from a store.
        num_rows: rows of packed steps by kind. ``decode``: the only row of a request, not counting drafts. ``fresh``:
            rows of a request's first step after an admission. ``chunk``: other rows of a request with several rows.
            ``draft``: drafts, present only if there were any. Drafts are counted at the end of a step, because a draft
            model may return fewer drafts than planned.
        num_steps: number of steps by the time of their planning: ``ahead`` (while the previous step ran) or ``after``
            (after the previous step had ended).
        num_finished: number of finished requests by finish reason.
        first_token: time from arrival to the first token.
        inter_token: time between two consecutive steps that yield tokens of a request.
        end_to_end: time from arrival to the last token, or to the pooled vector.
        queue: time from arrival to the first step.
        prefill: time from the first step to the first token.
        decode: time from the first token to the last.
        inference: time from the first step to the last token, or to the pooled vector.
        prompt_tokens: prompt lengths of finished requests.
        generation_tokens: output lengths of finished requests.
        step_tokens: number of rows in each step.
        step_time: time from the start of planning a step to its tokens.
        num_failed_steps: number of steps that raised an error.
        num_retried_requests: number of requests of failed steps that were computed again, counted once for each failed
            step.
        num_resumed_requests: number of requests that continued in a new engine, counted once for each new engine.
        restart: time from the end of an engine until a new engine continues its requests.
        num_late_masks: number of rows computed again, because their grammar mask was late, or because the engine found
            out too late that they need a mask.
        num_unconstrained_calls: number of tool calls whose grammars failed, so that their text was free.
        image_encode_seconds: total time that the device took for encoding images.
        num_decode_forwards: number of steps in which every row samples, by the outcome of the forward pass
            (:class:`metal_engine.step.DecodeForward`). Empty if replay was not requested.
        replay_refusal: reason why no step is replayed; None if there is no known reason.
        num_drafts: number of proposals. A proposal consists of all drafts of one request in one step.
        num_draft_tokens: number of proposed draft tokens.
        num_accepted_tokens: list of the numbers of accepted draft tokens, one for each position in a proposal.
        num_unmasked_tokens: number of draft tokens for which the grammar mask after the draft was missing.
        kv_transfer: statistics of KV transfer; None without KV transfer.
    """

    def __init__(self, kv_transfer: KVTransferStats | None = None, replay_refusal: str | None = None) -> None:
        self.kv_transfer = kv_transfer
        self.num_failed_steps = 0
        self.num_retried_requests = 0
        self.num_resumed_requests = 0
        self.restart = Histogram(_REQUEST_SECONDS)
        self.num_late_masks = 0
        self.num_unconstrained_calls = 0
        self.image_encode_seconds = 0.0
        self.num_decode_forwards: Counter[str] = Counter()
        self.replay_refusal = replay_refusal
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens: list[int] = []
        self.num_unmasked_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._num_beyond_stop = 0  # number of tokens after stop strings that are still to be subtracted
        self.num_cache_queries = 0
        self.num_cache_hits = 0
        self.num_rows = {"decode": 0, "chunk": 0, "fresh": 0}
        self.num_steps = {"ahead": 0, "after": 0}
        self.num_finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.inter_token = Histogram(_TOKEN_SECONDS)
        self.end_to_end = Histogram(_REQUEST_SECONDS)
        self.queue = Histogram(_REQUEST_SECONDS)
        self.prefill = Histogram(_REQUEST_SECONDS)
        self.decode = Histogram(_REQUEST_SECONDS)
        self.inference = Histogram(_REQUEST_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.step_tokens = Histogram(_TOKENS)
        self.step_time = Histogram(_TOKEN_SECONDS)
        self._times: dict[str, _Times] = {}

    def arrived(self, request: Request, arrival: float | None = None) -> None:
        """Record that a request has been queued.

        If another engine has begun the request, that engine has counted the prompt and the first token. They are not
        counted again.

        Args:
            arrival: arrival time in seconds of ``time.monotonic``. Default: now.
        """
        now = time.monotonic()
        arrival = now if arrival is None else arrival
        ends_in_text = bool(request.sampling_params.stop)
        times = _Times(arrival, request.num_prompt_tokens, ends_in_text, request.num_output_tokens)
        if request.num_output_tokens:
            times.scheduled = times.first_token = times.last_token = now
        self._times[request.request_id] = times

    def scheduled(self, plan: SchedulerOutput, now: float, *, is_ahead: bool = False) -> None:
        """Count a step that is about to run.

        Args:
            is_ahead: True if the step was planned before the previous step ended.
        """
        self.num_steps["ahead" if is_ahead else "after"] += 1
        num_rows = plan.num_scheduled_tokens  # includes draft tokens, which are subtracted below
        self.step_tokens.add(sum(num_rows.values()))
        if drafts := plan.scheduled_spec_decode_tokens:
            num_rows = {r: n - len(drafts.get(r, ())) for r, n in num_rows.items()}
        num_decodes = list(num_rows.values()).count(1)
        num_fresh = 0
        for new in plan.new_requests:
            num_fresh += num_rows[new.request_id]
            num_decodes -= num_rows[new.request_id] == 1
            self.num_cache_queries += len(new.token_ids)
            self.num_cache_hits += new.num_computed_tokens
            times = self._times.get(new.request_id)
            if times is not None and not times.scheduled:  # otherwise, the request resumes after preemption
                times.scheduled = now
                self.queue.add(now - times.arrival)
        self.num_rows["decode"] += num_decodes
        self.num_rows["fresh"] += num_fresh
        self.num_rows["chunk"] += sum(num_rows.values()) - num_decodes - num_fresh

    def computed(self, output: ModelOutput) -> None:
        """Count the late masks, failed grammars and encode time of a step, and the outcome of its forward pass."""
        self.image_encode_seconds += output.encode_seconds
        self.num_late_masks += len(output.late_req_ids)
        self.num_unconstrained_calls += output.num_unconstrained_calls
        if output.decode_forward is not None:
            self.num_decode_forwards[output.decode_forward.outcome] += 1
            self.replay_refusal = output.decode_forward.refusal

    def speculated(self, plan: SchedulerOutput, output: ModelOutput) -> None:
        """Count the drafts of a step, and the accepted drafts of each request."""
        self.num_unmasked_tokens += output.num_unmasked_drafts
        for request_id in plan.scheduled_spec_decode_tokens:
            drafts = output.drafts_of(plan, request_id)
            if not drafts:
                continue
            self.num_drafts += 1
            self.num_rows["draft"] = self.num_rows.get("draft", 0) + len(drafts)
            self.num_draft_tokens += len(drafts)
            missing = len(drafts) - len(self.num_accepted_tokens)
            self.num_accepted_tokens += [0] * missing
            for position in range(output.num_accepted_tokens[request_id]):
                self.num_accepted_tokens[position] += 1

    def produced(self, outputs: Iterable[RequestOutput], started: float, now: float) -> None:
        """Count the outputs of a step, and its duration from ``started`` to ``now``."""
        self.step_time.add(now - started)
        inter_token = self.inter_token
        num_tokens = 0
        for output in outputs:
            times = self._times.get(output.request_id)
            if times is None:
                continue
            if output.token_ids:
                num_tokens += len(output.token_ids)
                times.num_output_tokens += len(output.token_ids)
                if times.last_token:
                    inter_token.add(now - times.last_token)
                else:
                    times.first_token = now
                    self.num_prompt_tokens += times.num_prompt_tokens
                    self.first_token.add(now - times.arrival)
                    self.prefill.add(now - times.scheduled)
                times.last_token = now
            elif output.pooled is not None:
                times.last_token = now
                self.num_prompt_tokens += times.num_prompt_tokens
            if output.finish_reason is not None and (output.error is not None or not times.ends_in_text):
                self.finished(output.request_id, output.finish_reason)
        num_dropped = min(self._num_beyond_stop, num_tokens)
        self._num_beyond_stop -= num_dropped
        self.num_generation_tokens += num_tokens - num_dropped

    def finished(self, request_id: str, reason: str, num_output_tokens: int | None = None) -> None:
        """Count a request that has ended. Unknown ids are ignored.

        Args:
            num_output_tokens: number of output tokens up to the stop string. Default: all tokens.
        """
        times = self._times.pop(request_id, None)
        if times is None:
            return
        if num_output_tokens is None:
            num_output_tokens = times.num_output_tokens
        self._num_beyond_stop += times.num_output_tokens - num_output_tokens
        self.num_finished[reason] += 1
        if reason not in ("stop", "length"):
            return  # the durations of aborted and failed requests are not representative
        self.prompt_tokens.add(times.num_prompt_tokens)
        self.end_to_end.add(times.last_token - times.arrival)
        self.inference.add(times.last_token - times.scheduled)
        if times.first_token:
            self.generation_tokens.add(num_output_tokens)
            self.decode.add(times.last_token - times.first_token)
