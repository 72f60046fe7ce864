"""Measures the cost of planning: `schedule()` and `update()` per running request and step, without a model.

    python -m tools.benchmarks.control_plane

The base case has 256 running decodes with contexts of 8,192 tokens and 10,000 waiting requests. One number varies at a
time: running requests, waiting requests, or the context length. Prints medians over the steps. Prefix caching is on.
"""

from __future__ import annotations

import argparse
import statistics
import time

from metal_engine.request import Request
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import ModelOutput

BLOCK_SIZE = 16


def measure(num_running: int, num_waiting: int, context_len: int, num_steps: int) -> float:
    """Return the median time of a step per running request in microseconds."""
    max_tokens = num_steps + 64
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=1 << 30,
            max_num_seqs=num_running,
            max_model_len=context_len + max_tokens,
            max_num_partial_prefills=4,
            long_prefill_token_threshold=2048,
            max_long_partial_prefills=4,
        ),
        CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_running * (context_len + max_tokens) // BLOCK_SIZE * 2,
            enable_prefix_caching=True,
        ),
    )
    params = SamplingParams(max_tokens=max_tokens)
    for i in range(num_running):
        # Lengths differ, so that blocks fill in different steps.
        prompt = [i] + [1] * (context_len - 1 - i % BLOCK_SIZE)
        scheduler.add_request(Request(f"running-{i}", prompt, params, max_tokens=max_tokens))
    while len(scheduler.running) < num_running:
        plan = scheduler.schedule()
        scheduler.update(plan, ModelOutput([7] * len(plan.sampled_req_ids)))
    for i in range(num_waiting):
        scheduler.add_request(Request(f"waiting-{i}", [i] * 32, params, max_tokens=max_tokens))
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        output = ModelOutput([7] * len(plan.sampled_req_ids))
        again = time.perf_counter()
        scheduler.update(plan, output)
        times.append(middle - start + time.perf_counter() - again)
        assert len(plan.num_scheduled_tokens) == num_running
    return statistics.median(times) / num_running * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print("running  waiting  context   us per running request per step")
    base = (256, 10_000, 8192)
    cases = [base, (64, *base[1:]), (1024, 10_000, 2048), (256, 10_000, 2048)]
    cases += [(256, 0, 8192), (256, 100_000, 8192), (256, 10_000, 512), (256, 10_000, 32_768)]
    for case in cases:
        print(f"{case[0]:7d}  {case[1]:7d}  {case[2]:7d}   {measure(*case, args.steps):.2f}", flush=True)


if __name__ == "__main__":
    main()
