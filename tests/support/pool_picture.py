"""State that a page derives from the events of ``/watch``: the block pool as the page would draw it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from metal_engine.scheduling.scheduler import Scheduler


def events_of(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and data of the events of a stream. Skips comments."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@dataclass
class PoolPicture:
    """Block pool as derived from events by the rules of docs/api.md, without other information.

    Attributes:
        tables: block ids of each running request, by the request's key.
        cached: ids of blocks with a cached prefix.
        requests: last description of each unfinished request, by key.
        rows: rows of all events.
        preempted: keys of requests in order of their preemptions.
        is_whole: True if the events describe the whole pool, as the last event says.
        num_snapshots: number of ``snapshot`` events.
    """

    tables: dict[int, list[int]] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    is_whole: bool = False
    num_snapshots: int = 0

    def apply(self, name: str, data: dict[str, Any]) -> None:
        if name == "snapshot":
            self.tables, self.cached, self.requests, self.is_whole = {}, set(), {}, False
            self.num_snapshots += 1
        for request in data.get("requests", ()):
            self.requests[request["key"]] = request
        if name == "snapshot":
            return
        assert self.num_snapshots
        for key, cleared, runs in data.get("tables", ()):
            if cleared:
                self.tables.pop(key, None)
            if runs:
                self.tables.setdefault(key, []).extend(_ids(runs))
        self.cached.update(_ids(data.get("cached", ())))
        self.cached.difference_update(_ids(data.get("uncached", ())))
        for row in data.get("rows", ()):
            for key, *_ in row["segments"]:
                assert key in self.requests, "a row of a request that was not told"
        self.rows += data.get("rows", ())
        self.preempted += data.get("preempted", ())
        for key in data.get("finished", ()):
            self.requests.pop(key)
            assert key not in self.tables, "a finished request has blocks"
        self.is_whole = data["whole"]

    def check(self, scheduler: Scheduler) -> None:
        """Assert that the picture equals the pool: block tables, reference counts, cached prefixes."""
        assert self.is_whole
        blocks = scheduler.blocks
        there = sorted(blocks.block_ids(request_id) for request_id in scheduler.running)
        assert sorted(self.tables.values()) == there
        counts = [0] * blocks.num_blocks
        for table in self.tables.values():
            for block_id in table:
                counts[block_id] += 1
        assert counts == [block.ref_cnt for block in blocks._blocks]
        assert self.cached == {block.block_id for block in blocks._blocks if block.block_hash is not None}


def _ids(runs: Iterable[list[int]]) -> Iterator[int]:
    for first, length in runs:
        yield from range(first, first + length)
