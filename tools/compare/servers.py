"""Compare OpenAI-compatible servers for MLX on this machine: same weights, same BLAS, same requests.

    python -m tools.compare.servers run --scenario 1 --rounds 3 --results build/compare
    python -m tools.compare.servers report --results build/compare [--plot docs/images/compare.png]

A round starts each server in turn, sends it the scenario's requests, and stops it. All servers of a round get the same
requests, and each round has different requests. Each server, scenario and round has its own result file, so a long
comparison can run in pieces (``--first-round``) and be reported together. Peers are installed once from PyPI into the
cache directory.

Scenario 7 preloads nothing, as with a default installation. In all other scenarios, peers use metal-engine's OpenBLAS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metal_engine.bench.args import BenchServeArgs
from metal_engine.bench.client import BenchClient, RequestRecord
from metal_engine.bench.datasets import BenchRequest
from metal_engine.bench.serve import request_json
from metal_engine.bench.server_memory import server_peak_bytes
from metal_engine.bench.stats import summarize
from metal_engine.bench.tokens import load_prompt_tokenizer
from metal_engine.device.cache_dir import cache_dir
from tools.compare.peers import OURS, PEERS, PeerServer, install, running
from tools.compare.scenarios import SCENARIOS, Group, PeerScenario
from tools.fixtures.export_mlx import export

Result = dict[str, Any]


def demo_directory() -> Path:
    """Return the demo model as an MLX directory whose outputs never stop by themselves."""
    folder = cache_dir() / "compare" / "demo"
    if not (folder / "config.json").exists():
        export(folder, "demo", never_stops=True)
    return folder


async def run_groups(args: BenchServeArgs, model: str, groups: Sequence[Group]) -> dict[str, list[RequestRecord]]:
    async with BenchClient(args, model) as client:
        start = time.perf_counter()

        async def one(request: BenchRequest, after: float, slots: asyncio.Semaphore) -> RequestRecord:
            await asyncio.sleep(start + after - time.perf_counter())
            async with slots:
                return await client.send(request)

        async def all_of(group: Group) -> list[RequestRecord]:
            slots = asyncio.Semaphore(group.max_concurrency or len(group.requests))
            work = (one(r, t, slots) for r, t in zip(group.requests, group.due, strict=True))
            return list(await asyncio.gather(*work))

        records = await asyncio.gather(*map(all_of, groups))
    return dict(zip((group.name for group in groups), records, strict=True))


def measure(scenario: PeerScenario, server: PeerServer, model: Path, seed: int) -> Result:
    """Send one server the scenario's requests and return the figures.

    Raises:
        RuntimeError: a request failed or its result was not as requested.
    """
    tokenizer = load_prompt_tokenizer(str(model))
    args = BenchServeArgs(base_url=server.url, tokenizer=str(model), progress=False)
    phases = scenario.phases(tokenizer, seed)
    # Requests before the measurement, so that everything that is compiled or allocated at first use exists.
    warm_ups = [BenchRequest(f"{i} bottles of beer on the wall, " * 4, 8) for i in range(3)]
    warm_up = Group("warm-up", warm_ups, [0.0] * len(warm_ups), 1)
    groups: dict[str, Any] = {}
    for phase in ([warm_up], *phases):
        for name, records in asyncio.run(run_groups(args, str(model), phase)).items():
            failed = [r.error for r in records if r.error]
            if failed:
                raise RuntimeError(f"{server.name} failed {len(failed)} of {len(records)} in {name}: {failed[0]}")
            groups[name] = {
                "summary": summarize(records).to_json(),
                "requests": [request_json(record) for record in records],
            }
    peak = server_peak_bytes(server.url)
    return {"groups": groups, "peak_mib": None if peak is None else peak / (1 << 20)}


def run(args: argparse.Namespace) -> None:
    scenario = SCENARIOS[args.scenario]
    names = [OURS, *(args.peers.split(",") if args.peers is not None else scenario.peers)]
    names = [name for name in names if name]
    for name in names[1:]:
        install(PEERS[name])
    model = args.model or demo_directory()
    args.results.mkdir(parents=True, exist_ok=True)
    for round_ in range(args.first_round, args.first_round + args.rounds):
        # Each round starts with another server.
        order = names[round_ % len(names) :] + names[: round_ % len(names)]
        for name in order:
            extra = args.serve_args.split() if name == OURS and args.serve_args else []
            print(f"round {round_}, {name} ... ", end="", flush=True)
            with running(name, model, same_blas=scenario.same_blas, extra=extra) as server:
                result = measure(scenario, server, model, seed=round_)
            version = "" if name == OURS else PEERS[name].version
            result |= {"server": name, "version": version, "scenario": scenario.name, "round": round_}
            result |= {"command": [Path(server.command[0]).name, *server.command[1:]]}
            result |= {"same_blas": scenario.same_blas, "date": time.strftime("%Y-%m-%d")}
            path = args.results / f"{scenario.name}-{round_}-{name}.json"
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(_one_line(scenario, result), flush=True)
    report(args.results, [scenario])


def _one_line(scenario: PeerScenario, result: Result) -> str:
    parts = []
    for group, content in result["groups"].items():
        if group != "warm-up":
            figures = ", ".join(f"{m} {content['summary'][m]:.1f}" for m in scenario.show)
            parts.append(f"{group}: {figures}")
    return "; ".join(parts)


def read_results(folder: Path) -> dict[str, dict[str, list[Result]]]:
    """Return the results in a folder by scenario and server, e.g. ``found["1"]["mlx-lm"]``: one result a round."""
    found: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found[result["scenario"]][result["server"]].append(result)
    return found


def median_of(rounds: Sequence[Result], group: str, metric: str) -> float:
    return statistics.median(r["groups"][group]["summary"][metric] for r in rounds)


def report(folder: Path, scenarios: Sequence[PeerScenario]) -> None:
    """Print the results in a folder as Markdown.

    Each scenario gets a table of medians over rounds, and for each goal metal-engine's ratio to the best peer.
    """
    found = read_results(folder)
    for scenario in scenarios:
        servers = found.get(scenario.name)
        if not servers:
            continue
        first = next(iter(servers.values()))[0]
        blas = "the same BLAS for all" if scenario.same_blas else "nothing preloaded"
        rounds = ", ".join(f"{name} {len(r)}" for name, r in servers.items())
        print(f"\n### {scenario.name}: {scenario.title} ({blas}; rounds: {rounds}; {first['date']})\n")
        groups = [group for group in first["groups"] if group != "warm-up"]
        print("| server | requests | " + " | ".join(scenario.show) + " | peak MiB |")
        print("| --- | --- |" + " --- |" * (len(scenario.show) + 1))
        for name, results in servers.items():
            peaks = [r["peak_mib"] for r in results if r["peak_mib"] is not None]
            peak = f"{max(peaks):,.0f}" if peaks else "?"
            for group in groups:
                figures = " | ".join(f"{median_of(results, group, m):,.1f}" for m in scenario.show)
                print(f"| {name} {results[0]['version']} | {group} | {figures} | {peak} |")
        _print_goals(scenario, servers)


def _print_goals(scenario: PeerScenario, servers: dict[str, list[Result]]) -> None:
    peers = {name: results for name, results in servers.items() if name != OURS}
    if OURS not in servers or not peers:
        return
    print()
    for goal in scenario.goals:
        ours = median_of(servers[OURS], goal.group, goal.metric)
        values = {name: median_of(results, goal.group, goal.metric) for name, results in peers.items()}
        best = (max if goal.at_least else min)(values, key=values.__getitem__)
        ratio = ours / values[best]
        met = ratio >= goal.factor if goal.at_least else ratio <= goal.factor
        wanted = f"{'at least' if goal.at_least else 'at most'} {goal.factor:g}"
        print(
            f"- {goal.metric} of {goal.group}: {ratio:.2f} times the best peer's ({best}); "
            f"goal: {wanted}: {'met' if met else 'MISSED'}"
        )


def plot(folder: Path, path: Path) -> None:
    """Write a plot to ``path``: a panel for each goal, and in each panel a bar for each server."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = read_results(folder)
    panels = [(s, g) for s in SCENARIOS.values() if s.name in found for g in s.goals]
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (scenario, goal) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        servers = found[scenario.name]
        values = [median_of(results, goal.group, goal.metric) for results in servers.values()]
        colors = ["tab:orange" if name == OURS else "tab:gray" for name in servers]
        axes.barh(list(servers), values, color=colors)
        axes.invert_yaxis()
        direction = "more is better" if goal.at_least else "less is better"
        axes.set_title(f"{scenario.name}: {goal.metric}, {goal.group}\n({direction})", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running_ = commands.add_parser("run", help="run a scenario, and report it")
    running_.add_argument("--scenario", choices=SCENARIOS, required=True)
    running_.add_argument("--rounds", type=int, default=3)
    running_.add_argument("--first-round", type=int, default=0)
    running_.add_argument("--peers", help="comma-separated names; default: the scenario's; empty: only metal-engine")
    running_.add_argument("--model", type=Path, help="MLX directory; default: the demo model, exported once")
    running_.add_argument("--serve-args", help="more arguments for metal-engine's server")
    reporting = commands.add_parser("report", help="print tables and draw the plot of earlier runs")
    reporting.add_argument("--plot", type=Path)
    for one in (running_, reporting):
        one.add_argument("--results", type=Path, default=Path("build/compare"))
    args = parser.parse_args()
    # SIGTERM raises an exception, so that the running server is stopped.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if args.command == "run":
        run(args)
        return
    report(args.results, list(SCENARIOS.values()))
    if args.plot:
        plot(args.results, args.plot)


if __name__ == "__main__":
    main()
