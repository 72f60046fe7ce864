"""Measures requests that share a long prefix: time to first token without prefix caching, with a cold and a warm cache.

    python -m tools.benchmarks.prefix_caching

All requests arrive at once.

- *off*: every request computes the prefix.
- *cold*: the cache is empty. The first request computes the prefix, and the other requests wait for the result.
- *warm*: an earlier request has cached the prefix.
"""

from __future__ import annotations

import argparse
import random
import statistics

from tools.benchmarks.engine_timing import TimedEngine, describe, random_prompt


def burst(engine: TimedEngine, name: str, prefix: list[int], args: argparse.Namespace) -> list[float]:
    """Send one burst of requests and return their times to first token."""
    rng = random.Random(name)
    engine.steps.clear()
    timed = [
        engine.submit(f"{name}-{i}", prefix + random_prompt(rng, args.tail), args.max_tokens)
        for i in range(args.requests)
    ]
    engine.run()
    computed = sum(step.num_prefill_tokens for step in engine.steps)
    cached = sum(t.num_cached_tokens for t in timed)
    print(f"{name:5} {describe([t.ttft for t in timed])}; {computed} tokens computed, {cached} cached", flush=True)
    return [t.ttft for t in timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--common", type=int, default=1000, help="tokens of the shared prefix")
    parser.add_argument("--tail", type=int, default=50, help="tokens after the prefix, different in each request")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    args = parser.parse_args()
    prefix = random_prompt(random.Random(0), args.common)

    ttfts = {}
    for name, enable in (("off", False), ("on", True)):
        engine = TimedEngine(
            args.model, enable_prefix_caching=enable, max_num_batched_tokens=args.max_num_batched_tokens
        )
        engine.warm_up()
        for burst_name in ("off",) if name == "off" else ("cold", "warm"):
            ttfts[burst_name] = burst(engine, burst_name, prefix, args)
        engine.close()
    medians = {name: statistics.median(values) for name, values in ttfts.items()}
    print(f"median TTFT: off / warm = {medians['off'] / medians['warm']:.1f}, ", end="")
    print(f"cold / warm = {medians['cold'] / medians['warm']:.1f}, off / cold = {medians['off'] / medians['cold']:.1f}")


if __name__ == "__main__":
    main()
