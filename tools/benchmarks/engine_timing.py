"""Engine that is stepped directly and timed: common code of the scheduling benchmarks."""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs


@dataclass
class TimedStep:
    """Work of one step, and its time in seconds."""

    seconds: float
    num_decodes: int
    num_prefill_tokens: int
    prefill_work: int  # (query row, visible key) pairs of chunks
    decode_work: int  # (query row, visible key) pairs of decodes


@dataclass
class Timed:
    """Arrival of one request and of each of its tokens, in seconds of ``time.perf_counter``."""

    arrival: float
    token_times: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


class TimedEngine:
    """Steps an engine and records the times of all steps and tokens."""

    def __init__(self, model: str = "demo", **engine_args: Any) -> None:
        engine = build_engine(EngineArgs(model=model, dtype="float32", **engine_args))
        self.core, self.preparer = engine.core, engine.preparer
        self.steps: list[TimedStep] = []
        self.requests: dict[str, Timed] = {}

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> Timed:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(request_id, self.preparer.prepare(prompt, params))
        timed = self.requests[request_id] = Timed(time.perf_counter())
        return timed

    def step(self) -> TimedStep:
        """Run one step of the engine. Return its work, derived from the progress of the scheduler's requests.

        A request that computes one token counts as a decode, all other requests as prefill.
        """
        scheduler = self.core.scheduler
        before = {r: request.num_computed_tokens for r, request in scheduler.requests.items()}
        requests = dict(scheduler.requests)
        start = time.perf_counter()
        outputs = self.core.step()
        now = time.perf_counter()
        step = TimedStep(now - start, 0, 0, 0, 0)
        for request_id, request in requests.items():
            context = before[request_id]
            if request.last_step != self.core.num_steps - 1:
                continue
            cached = request.num_cached_tokens if context == 0 else 0
            rows = request.num_computed_tokens - context - cached
            context += cached
            work = rows * context + rows * (rows + 1) // 2
            if rows == 1:
                step.num_decodes += 1
                step.decode_work += work
            else:
                step.num_prefill_tokens += rows
                step.prefill_work += work
        for output in outputs:
            timed = self.requests[output.request_id]
            timed.token_times.append(now)
            timed.num_cached_tokens = output.num_cached_tokens
        self.steps.append(step)
        return step

    def run(self) -> None:
        while self.core.has_requests:
            self.step()

    def warm_up(self) -> None:
        """Run one short request, so that one-time costs are not measured."""
        self.submit("warm-up", random_prompt(random.Random(1), 40), 3)
        self.run()
        self.core.scheduler.prefix_cache.forget()
        self.steps.clear()
        self.requests.clear()

    def close(self) -> None:
        """Release the model and its cache.

        Does not call ``core.close``, which would end this thread's streams. Later engines need them.
        """
        del self.core
        gc.collect()


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Return random token ids. Times do not depend on a prompt's contents."""
    return [rng.randrange(100, 40_000) for _ in range(length)]


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value with ``percent`` of all values at or below it."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * percent) // 100) - 1)]


def describe(values: list[float]) -> str:
    """Return median, P99 and maximum of times in seconds as a text."""
    return f"median {statistics.median(values):.2f} s, P99 {percentile(values, 99):.2f} s, max {max(values):.2f} s"
