"""Compare steps of engines with different settings in rotation, for machines whose speed changes over minutes.

    python -m tools.compare.steps --step decode --num-requests 16 \\
        OPENBLAS_THREAD_TIMEOUT=23,lane_elements=None OPENBLAS_THREAD_TIMEOUT=15,lane_elements=None ""

Each variant is an engine in its own process, which waits while other variants run their steps. A variant is a list of
environment variables (upper case) and fields of attention's ``CPU_LIMITS`` (lower case). An empty variant changes
nothing. With tree=PATH, the variant runs in another worktree of this project, with that worktree's copy of this tool:

    git worktree add ../before main~5 && python -m tools.compare.steps tree=../before ""

Ratios are medians over rounds, relative to the first variant in the same round. Name a variant twice to see the noise.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from metal_engine.device.blas.load import load_optimized_blas
from metal_engine.loading.build import build_engine
from metal_engine.request import RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs

_IS_VARIANT = "METAL_ENGINE_COMPARE_STEPS"  # variable that turns a process into one of the variants
_STEPS_OF_A_TURN = 5
_TREE = Path(__file__).resolve().parents[2]


def be_variant(args: argparse.Namespace, limits: dict[str, object]) -> None:
    """Build the engine, print ``ready``, and run steps for each line on stdin: one prefill step, or five decode steps.

    After these steps, prints a JSON list of their seconds, without the first decode step.
    """
    load_optimized_blas()
    from metal_engine.attention.portable import backend as portable

    portable.CPU_LIMITS = replace(portable.CPU_LIMITS, **limits)  # type: ignore[arg-type]
    budget = max(512, 2 * args.num_requests)
    engine = build_engine(
        EngineArgs(
            model=args.model,
            enable_prefix_caching=False,
            max_num_batched_tokens=budget,
            max_num_seqs=args.num_requests,
            kv_cache_memory_bytes=args.kv_cache_mib * 2**20,
        )
    )
    core = engine.core
    names: list[str] = []
    num_prefill_steps = 2 + args.num_requests * args.prompt_len // (budget - args.num_requests)
    num_steps = num_prefill_steps + args.turns * _STEPS_OF_A_TURN

    def begin() -> None:
        for name in names:
            core.end_request(name, RequestStatus.FINISHED_ABORTED)
        names[:] = [f"{time.monotonic_ns()}-{i}" for i in range(args.num_requests)]
        for name in names:
            prompt = [random.randrange(100, 40_000) for _ in range(args.prompt_len)]
            params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
            core.add_request(name, engine.preparer.prepare(prompt, params))

    if args.step == "decode":
        begin()
        for _ in range(num_prefill_steps):
            core.step()
    print("ready", flush=True)
    for _ in sys.stdin:
        if args.step == "prefill":
            begin()
        seconds = []
        for _ in range(_STEPS_OF_A_TURN if args.step == "decode" else 1):
            start = time.perf_counter()
            core.step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds[1:] or seconds), flush=True)  # the first of several steps starts with a cold cache


def _start(variant: str) -> subprocess.Popen[str]:
    env, limits, tree = dict(os.environ), {}, _TREE
    for setting in filter(None, variant.split(",")):
        name, _, value = setting.partition("=")
        if name == "tree":
            tree = Path(value).resolve()
        elif name.isupper():
            env[name] = value
        else:
            limits[name] = ast.literal_eval(value)
    env[_IS_VARIANT] = repr(limits)
    # Run as a module, so that the engine is imported from the current folder. Earlier commits have a script instead.
    script = tree / "tools" / "compare_steps.py"
    tool = [str(script)] if script.exists() else ["-m", "tools.compare.steps"]
    command = [sys.executable, *tool, *sys.argv[1:]]
    process = subprocess.Popen(command, env=env, cwd=tree, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"variant {variant!r} did not start")
    return process


def _turn(process: subprocess.Popen[str]) -> float:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return statistics.median(json.loads(process.stdout.readline()))


def _take_turns(processes: list[subprocess.Popen[str]], turns: int) -> list[list[float]]:
    """Return for each process a list with the median seconds of a step in each turn."""
    seconds: list[list[float]] = [[] for _ in processes]
    for turn in range(turns):
        for i in range(len(processes)):  # each variant is first equally often
            at = (turn + i) % len(processes)
            seconds[at].append(_turn(processes[at]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--step", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=150)
    parser.add_argument("--kv-cache-mib", type=int, default=256)
    parser.add_argument("--turns", type=int, default=25)
    args = parser.parse_args()
    if _IS_VARIANT in os.environ:
        be_variant(args, ast.literal_eval(os.environ[_IS_VARIANT]))
        return

    processes: list[subprocess.Popen[str]] = []
    try:
        processes += map(_start, args.variants)
        seconds = _take_turns(processes, args.turns)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(f"{args.step} steps of {args.num_requests} requests, prompts of {args.prompt_len} tokens")
    for variant, taken in zip(args.variants, seconds, strict=True):
        ratio = statistics.median(s / first for s, first in zip(taken, seconds[0], strict=True))
        print(f"  {statistics.median(taken) * 1e3:8.1f} ms   {ratio:.3f} of the first   {variant or 'as it is'}")


if __name__ == "__main__":
    main()
