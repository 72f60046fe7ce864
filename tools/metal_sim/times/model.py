"""Time of one launch on a chip."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from . import facts
from .facts import Chip


@dataclass(frozen=True)
class Threadgroup:
    """A threadgroup. ``cycles``: issue cycles of all its SIMD groups. ``loops``: iterations of one SIMD group."""

    cycles: float
    loops: float


@dataclass(frozen=True)
class Launch:
    """A launch.

    Attributes:
        groups: threadgroups, in the order in which the GPU starts them.
        simds: SIMD groups of a threadgroup.
        resident: threadgroups that a core has room for.
        memory: bytes that cross the memory's bus.
        last_level: bytes that come from the system level cache, without memory.
        cache: bytes that cores read from their shared cache.
        threadgroup_memory: bytes that cores read and write in threadgroup memory.
    """

    groups: Sequence[Threadgroup] = ()
    simds: int = 1
    resident: int = 1
    memory: float = 0
    last_level: float = 0
    cache: float = 0
    threadgroup_memory: float = 0


def issue_rate(simds: float) -> float:
    """Return the share of the peak rate at which a core issues instructions of ``simds`` SIMD groups."""
    for (few, low), (many, high) in pairwise(facts.ISSUE_RATES):
        if simds <= many:
            return low + (high - low) * (simds - few) / (many - few)
    return facts.ISSUE_RATES[-1][1]


def busiest_core(groups: Sequence[Threadgroup], cores: int) -> float:
    """Return the cycles of the busiest core if each group goes to the core with the least work."""
    loads = [0.0] * cores
    for group in groups:
        heapq.heapreplace(loads, loads[0] + group.cycles)
    return max(loads)


def limits(launch: Launch, chip: Chip) -> dict[str, float]:
    """Return the seconds that each resource needs for a launch: memory, issue, cache, core and latency.

    A launch without threadgroups only needs memory.
    """
    bandwidth = chip.bandwidth * facts.BANDWIDTH_SHARE
    found = {"memory": launch.memory / bandwidth + launch.last_level / (bandwidth * facts.LAST_LEVEL_RATE)}
    if not launch.groups:
        return found
    used = min(chip.cores, len(launch.groups))
    on_a_core = min(launch.resident, -(-len(launch.groups) // chip.cores))
    per_second = facts.SCHEDULERS * chip.clock * issue_rate(on_a_core * launch.simds)
    found["issue"] = busiest_core(launch.groups, chip.cores) / per_second
    found["cache"] = launch.cache / (used * facts.CACHE_BYTES * chip.clock)
    found["core"] = (launch.cache + launch.threadgroup_memory) / (used * facts.CORE_BYTES * chip.clock)
    # In each iteration, a SIMD group waits for its loads. It issues at most one instruction per cycle.
    waits = [g.loops * facts.LATENCY + g.cycles / launch.simds / chip.clock for g in launch.groups]
    found["latency"] = max(max(waits), sum(waits) / (chip.cores * launch.resident))
    return found


def seconds(launch: Launch, chip: Chip) -> float:
    """Return the time that the slowest resource needs for a launch."""
    return max(limits(launch, chip).values())


def limit(launches: Sequence[Launch], chip: Chip) -> str:
    """Return the name of the resource that limits the longest launch."""
    longest = max(launches, key=lambda launch: seconds(launch, chip))
    found = limits(longest, chip)
    return max(found, key=lambda name: found[name])
