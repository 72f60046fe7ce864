"""Kills the process of a server's engine at random moments during requests. No answer may be lost or different.

    python -m tools.benchmarks.engine_death [--deaths 50] [--streams 16 64] [--kinds kill abort hang error]
    python -m tools.benchmarks.engine_death --models attention hybrid quantized lora ranks
    python -m tools.benchmarks.engine_death --model MODEL --serve-args "--max-num-seqs 32"

A real server runs. Streams of all APIs (log probabilities, several outputs, tools, grammars, seeds, stop strings) keep
it busy. Each request is first answered without deaths. Its later answers must be equal, except for small differences of
log probabilities. The report has the parts of the pause after a death: the start of a process, the load of the model,
and the recomputation until each stream has its next token. It also shows counters of the server that have decreased.
The exit status is 1 if anything is wrong. With a quantized KV cache, batches round differently, so that answers differ
without deaths, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.benchmarks.engine_death.deaths import KINDS, Deaths, Report
from tools.benchmarks.engine_death.models import MODELS
from tools.benchmarks.engine_death.requests import MixedRequest, mixed_requests
from tools.benchmarks.engine_death.server import WORKER
from tools.benchmarks.engine_death.streams import Streams
from tools.benchmarks.engine_death.worker import LOADS
from tools.compare.peers import OURS, running


def worker_of(server_pid: int) -> int | None:
    """Return the process id of a server's engine; None if the engine has no process.

    The engine's process is the oldest, because a spare process starts later. Ids are no measure of age: the system
    begins again with small ids after the largest.
    """
    columns = (flag for name in ("pid", "ppid", "etime", "command") for flag in ("-o", f"{name}="))
    # -ww: whole commands, whatever COLUMNS is
    listed = subprocess.run(["ps", "-A", "-ww", *columns], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in listed.stdout.splitlines()]
    ages = {int(pid): _seconds(age) for pid, parent, age, name in rows if int(parent) == server_pid and WORKER in name}
    return max(sorted(ages), key=ages.__getitem__, default=None)


def _seconds(elapsed: str) -> int:
    """Return the seconds of a time in the format of ``ps``: ``[[days-]hours:]minutes:seconds``."""
    days, _, clock = elapsed.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return 86_400 * int(days or 0) + seconds


async def measure(
    url: str,
    find_pid: Callable[[], int | None],
    requests: Sequence[MixedRequest],
    *,
    num_streams: int,
    num_deaths: int,
    kinds: Sequence[str],
    gap: float,
    seed: int,
) -> Report:
    """Have a server answer each request without deaths, then again and again under ``num_deaths`` deaths.

    The other arguments are those of :class:`Deaths` and :class:`Streams`.
    """
    streams = Streams(url, num_streams)
    try:
        await streams.answer_once(requests)
        return await Deaths(streams, find_pid, kinds, gap, seed).run(requests, num_deaths, num_streams)
    finally:
        await streams.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=50, help="deaths for each number of streams")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64], help="numbers of requests at a time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["attention"], help="kinds of models")
    parser.add_argument("--model", default="demo", help="the model, except of the kind hybrid")
    parser.add_argument("--serve-args", default="", help="more arguments for the server")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of an output")
    parser.add_argument("--num-each", type=int, default=2, help="different requests of each kind")
    parser.add_argument("--gap", type=float, default=4.0, help="largest time between a restart and a death in seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    is_good = True
    for kind in args.models:
        with tempfile.TemporaryDirectory() as folder:
            is_good &= _measure_kind(kind, Path(folder), args)
    return 0 if is_good else 1


def _measure_kind(kind: str, folder: Path, args: argparse.Namespace) -> bool:
    """Start a server of a kind of model and print a report for each number of streams. Return True if all are good."""
    model = MODELS[kind](folder, args.model)
    names = (model.model, *model.adapters)
    requests = [request for name in names for request in mixed_requests(name, args.num_each, args.max_tokens)]
    os.environ[LOADS] = str(folder / "loads")
    extra = [*model.serve_args, *args.serve_args.split()]
    is_good = True
    with running(OURS, model.model, same_blas=True, extra=extra, module=WORKER.replace("worker", "server")) as server:
        for num_streams in args.streams:
            report = asyncio.run(
                measure(
                    server.url,
                    lambda: worker_of(server.pid),
                    requests,
                    num_streams=num_streams,
                    num_deaths=args.deaths,
                    kinds=args.kinds,
                    gap=args.gap,
                    seed=args.seed,
                )
            )
            print(f"{kind}: {report}", flush=True)
            is_good &= report.is_good
    return is_good


if __name__ == "__main__":
    sys.exit(main())
