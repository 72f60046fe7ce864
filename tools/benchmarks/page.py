"""Measures the cost of the web page: throughput with and without viewers, and the CPU time of an open, idle page.

    python -m tools.benchmarks.page viewers [--rounds 7] [--streams 64] [--viewers 3] [--step-ms 12]
    python -m tools.benchmarks.page idle [--seconds 30]

`viewers` runs a server on a runner that makes up tokens and takes a fixed time per step, as a device does. Additional
work of the host then shows in the throughput. Rounds with viewers, which read `/watch` as browsers do, alternate with
rounds without viewers. Each pair of rounds gives a ratio. `idle` measures the CPU time of a real browser with all its
processes, and of the server, while the page is open and idle. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tools.benchmarks.server_overhead import ROOT, run_clients

# Bytes per read.
_READ_BYTES = 1 << 16


async def view(url: str, started: asyncio.Event) -> None:
    """Read `/watch` until the task is cancelled. Sets ``started`` when the first bytes have arrived."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        while await reader.read(_READ_BYTES):
            started.set()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def viewing(url: str, number: int) -> AsyncIterator[None]:
    events = [asyncio.Event() for _ in range(number)]
    tasks = [asyncio.create_task(view(url, event)) for event in events]
    await asyncio.gather(*(event.wait() for event in events))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def one_round(url: str, args: argparse.Namespace, viewers: int) -> float:
    """Run all streams once while ``viewers`` clients read `/watch`. Return the tokens per second of all streams."""
    async with viewing(url, viewers):
        _, seconds = await run_clients(url, args, args.tokens)
    return args.streams * args.tokens / seconds


def run_viewers(args: argparse.Namespace) -> None:
    rate = 1000 * args.streams / args.step_ms
    command = [sys.executable, "-m", "tools.benchmarks.server_overhead", "--serve", "--rate", str(rate)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        asyncio.run(one_round(url, args, 0))  # covers imports and first connections
        # The order alternates, so that slow changes of the machine affect both.
        pairs = []
        for i in range(args.rounds):
            order = (0, args.viewers) if i % 2 else (args.viewers, 0)
            speeds = {viewers: asyncio.run(one_round(url, args, viewers)) for viewers in order}
            pairs.append((speeds[0], speeds[args.viewers]))
    finally:
        server.kill()
        server.wait()
    ratios = [with_viewers / without for without, with_viewers in pairs]
    print(
        json.dumps(
            {
                "streams": args.streams,
                "viewers": args.viewers,
                "step_ms": args.step_ms,
                "tokens_per_second": round(statistics.median(without for without, _ in pairs)),
                "with_viewers": round(statistics.median(w for _, w in pairs)),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(ratio, 4) for ratio in ratios],
            }
        )
    )


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds that a process and its descendants have used so far. Linux only."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, waiting = 0.0, [root]
    while waiting:
        process = waiting.pop()
        total += seconds.get(process, 0.0)
        waiting += children.get(process, [])
    return total


def run_idle(args: argparse.Namespace) -> None:
    from tools.fixtures.browser import find_chromium, open_browser

    executable = find_chromium()
    if executable is None:
        sys.exit("Chromium was not found")
    command = [sys.executable, "-m", "tools.benchmarks.server_overhead", "--serve", "--rate", "2000"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        with open_browser(executable) as browser:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(url)
            page.wait_for_selector("#connection[data-state=live]")
            page.click("#demo-eight")
            page.wait_for_selector("#demo-stop", state="hidden")
            time.sleep(5)
            # The browser is a descendant of this process, through playwright's process. So is the server.
            before, of_server = cpu_seconds(os.getpid()), cpu_seconds(server.pid)
            time.sleep(args.seconds)
            of_all, of_server = cpu_seconds(os.getpid()) - before, cpu_seconds(server.pid) - of_server
    finally:
        server.kill()
        server.wait()
    shares = {"browser": (of_all - of_server) / args.seconds, "server": of_server / args.seconds}
    print(json.dumps({"seconds": args.seconds, **{f"{name}_core": round(s, 4) for name, s in shares.items()}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["viewers", "idle"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=12.0, help="time of a step on the simulated device in ms")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    args.endpoint = "chat"
    if args.what == "viewers":
        run_viewers(args)
    else:
        run_idle(args)


if __name__ == "__main__":
    main()
