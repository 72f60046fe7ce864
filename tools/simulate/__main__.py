"""Simulates N replicas of the engine behind a router: the figures of docs/dev/scaling-limits.md.

    python -m tools.simulate --replicas 1 4 16 64 --plot docs/images/replicas.png
    python -m tools.simulate --vary load pool        # one setting at a time, at 16 replicas
    python -m tools.simulate --steps my_mac.json     # step times that tools.benchmarks.step_time_model measured there

Each replica is the project's scheduler with its prefix cache. A model fitted to measured steps gives the time of a
step. Users' chats are drawn at random, see tools/simulate/traffic.py. All random numbers are seeded.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.benchmarks.simulate_scheduler import make_config
from tools.benchmarks.step_time_model import STEPS_FILE, StepTimeModel, load
from tools.simulate.plot import plot_replicas
from tools.simulate.routing import POLICIES, RouterConfig
from tools.simulate.scenario import BLOCK_SIZE, Loss, SimulatedFleet, SimulatedScenario
from tools.simulate.store import StoreConfig
from tools.simulate.summary import HEADER, SimulationSummary, summarize
from tools.simulate.traffic import TrafficConfig, make_chats

MEGABYTE = 1_000_000
# Small fleets are run repeatedly, to get as many requests as a fleet of this size.
_REPLICAS_TOGETHER = 16


@dataclass(frozen=True)
class Varied:
    """A setting to vary.

    Attributes:
        title: heading of its column.
        values: for each value, its label in the table, and the arguments of the command line that change.
    """

    title: str
    values: dict[str, dict[str, Any]]


VARIED = {
    "load": Varied("load", {f"{x:g} x": {"load": x} for x in (0.5, 0.75, 1.0, 1.25, 1.5)}),
    "pool": Varied("pool, tokens a replica", {f"{x:,}": {"pool_tokens": x} for x in (8_192, 16_384, 32_768, 65_536)}),
    "balance": Varied(
        "load above the mean by",
        {f"{x}": {"balance_abs": x} for x in (0, 2, 64)}
        | {f"{x}, not capped": {"balance_abs": x, "balance_capped": False} for x in (8, 16, 64)},
    ),
    "guard": Varied(
        "guard, cap",
        {
            "guard, cap": {},
            "no guard, cap": {"guarded": False},
            "guard, no cap": {"balance_capped": False},
            "neither": {"guarded": False, "balance_capped": False},
        },
    ),
    "threshold": Varied("cache threshold", {f"{x:g}": {"cache_threshold": x} for x in (0.1, 0.3, 0.6, 0.9)}),
    "tree": Varied("tokens remembered", {f"{x:,}": {"tree_tokens": x} for x in (65_536, 262_144, 524_288, 16_777_216)}),
    "store": Varied("store, MB/s", {"none": {}} | {f"{x:g}": {"store_mb": x} for x in (1, 10, 100, 1250)}),
    "lost": Varied("replicas lost", {f"{x}": {"lost": x} for x in (0, 1, 4)}),
    "noticed": Varied(
        "one lost, noticed after s", {f"{x:g}": {"lost": 1, "noticed_after": x} for x in (0.0, 15.0, 180.0)}
    ),
    "systems": Varied("system prompts", {f"{x}": {"systems": x} for x in (1, 8, 64, 512)}),
    "turns": Varied("turns of a chat, mean", {f"{x:g}": {"turns": x} for x in (1.0, 2.5, 5.0)}),
    "seed": Varied("seed", {f"{x}": {"seed": x} for x in (0, 1, 2)}),
}


def scenario_of(args: argparse.Namespace, num_replicas: int, policy: str) -> SimulatedScenario:
    """Return the scenario of the arguments with ``num_replicas`` replicas."""
    lost = args.lost and Loss(
        num_replicas=args.lost, at=args.warm_up + 60, noticed_after=args.noticed_after, seconds=args.lost_for
    )
    store = args.store_mb and StoreConfig(
        bandwidth=args.store_mb * MEGABYTE, block_bytes=BLOCK_SIZE * args.kv_bytes_per_token
    )
    return SimulatedScenario(
        num_replicas=num_replicas,
        policy=policy,
        warm_up=args.warm_up,
        period=args.period,
        scheduler=make_config(max_num_partial_prefills=4),
        pool_blocks=args.pool_tokens // BLOCK_SIZE,
        router=RouterConfig(
            cache_threshold=args.cache_threshold,
            balance_abs=args.balance_abs,
            balance_rel=args.balance_rel,
            balance_capped=args.balance_capped,
            guarded=args.guarded,
            max_tree_blocks=args.tree_tokens // BLOCK_SIZE,
        ),
        store=store or None,
        loss=lost or None,
    )


def traffic_of(args: argparse.Namespace, num_replicas: int) -> TrafficConfig:
    """Return the traffic of all users of ``num_replicas`` replicas."""
    return TrafficConfig(
        num_users=round(args.users_per_replica * num_replicas),
        chats_per_day=args.chats_per_day * args.load,
        mean_turns=args.turns,
        num_systems=args.systems,
    )


def run(args: argparse.Namespace, num_replicas: int, policy: str, model: StepTimeModel) -> SimulationSummary:
    """Run a scenario and return its figures. Small fleets are run several times with different seeds."""
    scenario = scenario_of(args, num_replicas, policy)
    fleets = []
    for number in range(max(1, _REPLICAS_TOGETHER // num_replicas)):
        chats = make_chats(traffic_of(args, num_replicas), scenario.end, 1000 * args.seed + number)
        fleet = SimulatedFleet(scenario, model, chats)
        fleet.run()
        fleets.append(fleet)
    return summarize(fleets)


def run_all(
    jobs: list[tuple[argparse.Namespace, int, str]], processes: int, model: StepTimeModel
) -> Iterator[SimulationSummary]:
    """Yield the results of calls of :func:`run` in the order of ``jobs``."""
    if processes == 1:
        yield from (run(*job, model) for job in jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(run, *zip(*jobs, strict=True), itertools.repeat(model))


def print_header(first: list[str], with_store: bool) -> None:
    columns = [*first, *HEADER, *(["from store", "read / written MB/s"] if with_store else [])]
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns), flush=True)


def print_row(first: list[str], summary: SimulationSummary, with_store: bool) -> None:
    read, written = (f"{rate / MEGABYTE:.1f}" for rate in summary.store_bytes_per_second)
    of_store = [f"{summary.from_store:.1%}", f"{read} / {written}"] if with_store else []
    print("| " + " | ".join([*first, *summary.row, *of_store]) + " |", flush=True)


def scale(args: argparse.Namespace, model: StepTimeModel) -> dict[str, dict[int, SimulationSummary]]:
    """Run all policies at all numbers of replicas. Prints the table and returns its summaries by policy."""
    summaries: dict[str, dict[int, SimulationSummary]] = {policy: {} for policy in args.policies}
    print_header(["policy", "replicas", "users"], bool(args.store_mb))
    rows = list(itertools.product(args.policies, args.replicas))
    # With one replica, policies do not differ, so only one is run.
    jobs = [(args, count, policy) for policy, count in rows if count > 1 or policy == args.policies[0]]
    results = run_all(jobs, args.processes, model)
    for policy, count in rows:
        alone = summaries[args.policies[0]].get(1) if count == 1 else None
        summary = summaries[policy][count] = alone or next(results)
        users = f"{round(args.users_per_replica * count):,}"
        print_row([policy, str(count), users], summary, bool(args.store_mb))
    return summaries


def vary(args: argparse.Namespace, model: StepTimeModel) -> None:
    """Vary one setting at a time with ``args.replicas[0]`` replicas. Prints a table for each setting."""
    jobs: dict[str, tuple[argparse.Namespace, int, str]] = {}  # jobs of all tables, without duplicates
    for name, policy in itertools.product(args.vary, args.policies):
        for changes in VARIED[name].values.values():
            changed = argparse.Namespace(**(vars(args) | changes))
            jobs[f"{policy} {changed}"] = (changed, args.replicas[0], policy)
    results = zip(jobs, run_all(list(jobs.values()), args.processes, model), strict=True)
    done: dict[str, SimulationSummary] = {}
    for name in args.vary:
        with_store = bool(args.store_mb) or name == "store"
        print_header(["policy", VARIED[name].title], with_store)
        for policy in args.policies:
            for label, changes in VARIED[name].values.items():
                changed = argparse.Namespace(**(vars(args) | changes))
                key = f"{policy} {changed}"
                while key not in done:
                    done.update([next(results)])
                print_row([policy, label], done[key], with_store)
        print()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", help="1 4 16 64, or 16 with --vary")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="default: cache_aware session round_robin")
    parser.add_argument(
        "--vary", nargs="+", choices=VARIED, help="settings to vary one at a time, at the first number of replicas"
    )
    parser.add_argument("--plot", type=Path, help="file to draw TTFT and hit rates to (needs matplotlib)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; figures do not depend on it")
    parser.add_argument("--warm-up", type=float, default=1800.0, help="simulated seconds before requests count")
    parser.add_argument("--period", type=float, default=1800.0, help="simulated seconds in which requests count")
    steps = parser.add_argument_group("step times")
    steps.add_argument("--steps", type=Path, default=STEPS_FILE, help="measured steps, by step_time_model")
    steps.add_argument("--speed", type=float, default=1.0, help="factor by which steps are faster than measured")
    users = parser.add_argument_group("traffic")
    users.add_argument("--users-per-replica", type=float, default=100_000 / 64)
    users.add_argument("--chats-per-day", type=float, default=2.0, help="mean chats of a user")
    users.add_argument("--load", type=float, default=1.0, help="factor on --chats-per-day")
    users.add_argument("--turns", type=float, default=2.5, help="mean turns of a chat")
    users.add_argument("--systems", type=int, default=64, help="number of system prompts")
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument("--pool-tokens", type=int, default=32_768, help="tokens that a replica's KV cache holds")
    router = parser.add_argument_group("routing: cache_aware and exact, and the overload guard of all policies")
    defaults = RouterConfig()
    router.add_argument("--cache-threshold", type=float, default=defaults.cache_threshold)
    router.add_argument("--balance-abs", type=int, default=defaults.balance_abs)
    router.add_argument("--balance-rel", type=float, default=defaults.balance_rel)
    router.add_argument(
        "--balance-not-capped", dest="balance_capped", action="store_false", help="do not cap --balance-abs"
    )
    router.add_argument(
        "--not-guarded", dest="guarded", action="store_false", help="do not exclude overloaded replicas"
    )
    router.add_argument(
        "--tree-tokens",
        type=int,
        default=defaults.max_tree_blocks * BLOCK_SIZE,
        help="tokens in the prefix tree, for all replicas",
    )
    store = parser.add_argument_group("shared KV store")
    store.add_argument("--store-mb", type=float, help="MB/s of its shared link in each direction (default: no store)")
    store.add_argument("--kv-bytes-per-token", type=int, default=46_080, help="default: the demo model in float32")
    lost = parser.add_argument_group("lost replicas")
    lost.add_argument("--lost", type=int, default=0, help="number of replicas lost one minute into the period")
    lost.add_argument("--lost-for", type=float, default=300.0, help="seconds until lost replicas return")
    lost.add_argument("--noticed-after", type=float, default=15.0, help="seconds until the router detects the loss")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    args.replicas = args.replicas or ([16] if args.vary else [1, 4, 16, 64])
    args.policies = args.policies or ["cache_aware", "session", "round_robin"]
    measured = load(args.steps)
    model = replace(measured, **{name: value / args.speed for name, value in vars(measured).items()})
    if args.speed != 1:
        print(f"  assumed to be {args.speed:g} times as fast: an assumption, not a measurement")
    rate = args.users_per_replica * args.chats_per_day * args.load / 86_400
    print(
        f"{args.period:,.0f} simulated seconds after {args.warm_up:,.0f} of warm-up; {rate:.4f} chats a second and "
        f"replica; {args.pool_tokens:,} tokens of cache a replica\n"
    )
    start = time.monotonic()
    gc.disable()  # few cycles exist, but many objects would be scanned
    try:
        if args.vary:
            vary(args, model)
        else:
            summaries = scale(args, model)
            if args.plot is not None:
                plot_replicas(summaries, args.plot)
    finally:
        gc.enable()
    print(f"simulated in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
