"""Compare the whole server with the server of another commit on the same requests, over several alternating starts.

    python -m tools.benchmarks.server_against eb2337c [--starts 4] [--model demo] [--serve-args "--block-size 32"]

Both servers run in this Python environment: the working tree of this checkout, and the files of the other commit,
unpacked into the cache directory. Each start of a server answers every load. The table has each load's medians and
their ratio (this checkout's figure over the other's). ``thread_s`` is the CPU time of the busiest thread in seconds. On
a CPU, this thread computes MLX's operations for the engine. ``cpu_s`` is the CPU time of the server and its processes.
Run it on idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from metal_engine.bench.args import BenchServeArgs
from metal_engine.bench.datasets import BenchRequest
from metal_engine.bench.stats import summarize
from metal_engine.bench.tokens import PromptTokenizer, load_prompt_tokenizer
from metal_engine.device.cache_dir import cache_dir
from tools.compare.peers import OURS, ROOT, PeerServer, running
from tools.compare.scenarios import Group, at_once, random_requests
from tools.compare.servers import run_groups

HERE = "here"
# Name of a load -> requests at once, prompt tokens, output tokens.
LOADS = {"decode": (16, 20, 64), "prompts": (16, 154, 32)}
# Figure -> True if more is better.
FIGURES = {"output_throughput": True, "median_ttft_ms": False, "median_tpot_ms": False}
Figures = dict[str, float]


def unpack(revision: str) -> tuple[str, Path]:
    """Return a commit's short name, and a folder with its files.

    Raises:
        SystemExit: git does not know the revision.
    """
    parse = ["git", "rev-parse", "--short", f"{revision}^{{commit}}"]
    parsed = subprocess.run(parse, cwd=ROOT, capture_output=True, text=True)
    if parsed.returncode:
        raise SystemExit(f"git does not know {revision!r}: {parsed.stderr.strip()}")
    name = parsed.stdout.strip()
    folder = cache_dir() / "against" / name
    if not folder.exists():
        archive = subprocess.run(["git", "archive", name], cwd=ROOT, capture_output=True, check=True).stdout
        partial = folder.with_suffix(f".{os.getpid()}")
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(partial, filter="data")
        partial.rename(folder)
    return name, folder


def thread_seconds(pid: int) -> dict[int, float]:
    """Return the CPU seconds so far of each thread of a process and of its descendants, by thread id.

    The result is empty on systems without ``/proc``.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    seconds: dict[int, float] = {}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            fields = (thread / "stat").read_text().rpartition(")")[2].split()
            children = (thread / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        seconds[int(thread.name)] = (int(fields[11]) + int(fields[12])) / ticks
        for child in children:
            seconds |= thread_seconds(int(child))
    return seconds


def cpu_seconds(before: dict[int, float], after: dict[int, float]) -> Figures:
    """Return the CPU seconds between two readings: of the busiest thread, and of all threads. NaN without readings."""
    spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()] or [float("nan")]
    return {"thread_s": max(spent), "cpu_s": sum(spent)}


def measure(server: PeerServer, model: str, tokenizer: PromptTokenizer, seed: int) -> dict[str, Figures]:
    """Send every load to a server that has just started, and return the figures of each.

    Raises:
        RuntimeError: the server failed a request.
    """
    args = BenchServeArgs(base_url=server.url, tokenizer=model, progress=False)
    warm_up = [BenchRequest(f"{i} bottles of beer on the wall, " * 4, 8) for i in range(16)]
    loads = {
        "warm-up": warm_up,
        **{
            name: random_requests(tokenizer, seed, count, input_len, output_len)
            for name, (count, input_len, output_len) in LOADS.items()
        },
    }
    figures: dict[str, Figures] = {}
    for name, requests in loads.items():
        before = thread_seconds(server.pid)
        group: Group = at_once(name, requests)
        records = asyncio.run(run_groups(args, model, [group]))[name]
        seconds = cpu_seconds(before, thread_seconds(server.pid))
        failed = [record.error for record in records if record.error]
        if failed:
            raise RuntimeError(f"{server.name} failed {len(failed)} of {len(records)} in {name}: {failed[0]}")
        summary = summarize(records).to_json()
        figures[name] = {figure: summary[figure] for figure in FIGURES} | seconds
    del figures["warm-up"]
    return figures


def report(results: dict[str, list[dict[str, Figures]]], other: str) -> str:
    """Return a Markdown table of medians, with the range over the starts, and of ratios."""

    def cell(name: str, load: str, figure: str) -> str:
        values = [start[load][figure] for start in results[name]]
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    lines = [f"| load | figure | {HERE} | {other} | ratio |", "| --- | --- | ---: | ---: | ---: |"]
    for load, (count, input_len, output_len) in LOADS.items():
        title = f"{load}: {count} at once, {input_len} in, {output_len} out"
        for figure in (*FIGURES, "thread_s", "cpu_s"):
            ours, theirs = (statistics.median(start[load][figure] for start in results[n]) for n in (HERE, other))
            ratio = f"{ours / theirs:.2f}" if theirs else "-"
            lines.append(f"| {title} | {figure} | {cell(HERE, load, figure)} | {cell(other, load, figure)} | {ratio} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--starts", type=int, default=4, help="starts of each server")
    parser.add_argument("--model", default="demo", help="model of both servers")
    parser.add_argument("--serve-args", default="", help="more arguments for both servers")
    parser.add_argument("--json", type=Path, help="write the figures of each start to this file")
    args = parser.parse_args(argv)
    other, folder = unpack(args.revision)
    tokenizer = load_prompt_tokenizer(args.model)
    roots = {other: folder, HERE: ROOT}
    results: dict[str, list[dict[str, Figures]]] = defaultdict(list)
    for start in range(args.starts):
        # Alternate the order: this checkout runs first in every second turn.
        for name in sorted(roots, key=lambda one: (one == HERE) != bool(start % 2)):
            extra = args.serve_args.split()
            with running(OURS, args.model, same_blas=True, extra=extra, root=roots[name]) as server:
                figures = measure(server, args.model, tokenizer, seed=start)
            results[name].append(figures)
            speeds = ", ".join(f"{load} {one['output_throughput']:.1f} tokens/s" for load, one in figures.items())
            print(f"start {start + 1}, {name}: {speeds}", file=sys.stderr, flush=True)
    print(report(results, other))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
