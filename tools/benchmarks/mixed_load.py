"""Measures latencies on a real model while long and short prompts are computed together.

    python -m tools.benchmarks.mixed_load ttft   # long prompts arrive, then short ones: their time to first token
    python -m tools.benchmarks.mixed_load itl     # long prompts arrive during decodes: time between tokens

``ttft`` runs twice: with up to 4 prompts in concurrent prefill, of which 1 is long, and with one prompt at a time.
"""

from __future__ import annotations

import argparse
import random
import statistics

from tools.benchmarks.engine_timing import TimedEngine, describe, percentile, random_prompt


def ttft(args: argparse.Namespace) -> None:
    medians = {}
    for name, partial in (("knobs on", 4), ("knobs off", 1)):
        engine = TimedEngine(
            args.model,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_partial_prefills=partial,
            max_attention_work=args.max_attention_work,
        )
        engine.warm_up()
        rng = random.Random(0)
        long = [engine.submit(f"long-{i}", random_prompt(rng, args.long_tokens), 2) for i in range(args.num_long)]
        engine.step()  # the long prompts are in progress
        short = [engine.submit(f"short-{i}", random_prompt(rng, args.short_tokens), 2) for i in range(args.num_short)]
        while engine.core.has_requests and not (args.until_short and all(t.token_times for t in short)):
            engine.step()
        medians[name] = statistics.median(t.ttft for t in short)
        longest = max(step.seconds for step in engine.steps)
        print(f"{name}: {len(engine.steps)} steps, the longest {longest:.2f} s", flush=True)
        print(f"  short: TTFT {describe([t.ttft for t in short])}", flush=True)
        done = [t.ttft for t in long if t.token_times]
        print(f"  long:  {len(done)} of {len(long)} have begun; TTFT {describe(done or [0.0])}", flush=True)
        engine.close()
    print(f"median TTFT of short prompts, off / on: {medians['knobs off'] / medians['knobs on']:.1f}")


def itl(args: argparse.Namespace) -> None:
    engine = TimedEngine(
        args.model, max_num_batched_tokens=args.max_num_batched_tokens, max_attention_work=args.max_attention_work
    )
    engine.warm_up()
    rng = random.Random(0)
    decodes = [
        engine.submit(f"decode-{i}", random_prompt(rng, 16), args.decode_tokens) for i in range(args.num_decodes)
    ]
    for _ in range(4):
        engine.step()
    for i in range(args.num_long):
        engine.submit(f"long-{i}", random_prompt(rng, args.long_tokens), 2)
    engine.run()
    longest = max(step.seconds for step in engine.steps)
    itls = [seconds for t in decodes for seconds in t.itls]
    print(f"{len(itls)} tokens of {args.num_decodes} answers while {args.num_long} long prompts arrive:")
    print(f"  ITL {describe(itls)}; longest step {longest:.2f} s")
    print(f"  P99 ITL / longest step: {percentile(itls, 99) / longest:.2f}")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("ttft", "itl"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-long", type=int, default=8)
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--num-short", type=int, default=16)
    parser.add_argument("--short-tokens", type=int, default=24)
    parser.add_argument("--until-short", action="store_true", help="stop when all short prompts have begun")
    parser.add_argument("--num-decodes", type=int, default=8)
    parser.add_argument("--decode-tokens", type=int, default=60)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-attention-work", type=int, default=None)
    args = parser.parse_args()
    {"ttft": ttft, "itl": itl}[args.what](args)


if __name__ == "__main__":
    main()
