"""Deaths of engines under requests: their kinds and moments, and the parts of the pauses that follow."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.benchmarks.engine_death.requests import MixedRequest
from tools.benchmarks.engine_death.streams import SentRequest, Streams, Tally
from tools.benchmarks.engine_death.worker import LOADS

# Kind of death -> signal. A stopped process hangs, and an error is raised in a step (``worker.py``).
KINDS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "hang": signal.SIGSTOP, "error": signal.SIGUSR2}
# A server ends after more than 10 restarts in 60 s.
_MAX_DEATHS, _DEATH_SECONDS = 9, 61.0
# Every tenth death is a kill while a new process loads the model.
_SHARE_DURING_LOADS = 0.1
_HANG_SECONDS = 120.0
_READY_SECONDS = 600.0
_POLL_SECONDS = 0.2


@dataclass
class Pause:
    """Time without output after a death, in seconds.

    Attributes:
        start: time between the death and the start of the load.
        load: load of the model.
        recompute: time between the end of the load and the moment when every stream has had its next part.
    """

    start: float
    load: float
    recompute: float


@dataclass
class Report:
    """Results of a run.

    Attributes:
        num_streams: number of clients.
        kinds: number of deaths by kind.
        tally: results of the requests.
        pauses: pauses after deaths whose new process was not killed during its load. Failed steps have no pauses.
        hang_seconds: duration of each hang in seconds, until the server has replaced the process.
        problems: counters that have decreased, and hangs that the server has not noticed.
        counts: increases of counters of the server.
    """

    num_streams: int
    kinds: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    pauses: list[Pause] = field(default_factory=list)
    hang_seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not (self.tally.lost or self.tally.different or self.problems)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        tally = self.tally
        lines = [
            f"{self.num_streams} streams, {self.kinds.total()} deaths ({kinds}): {tally.num_answers} answers, "
            f"{len(tally.lost)} lost, {len(tally.different)} different"
        ]
        for name in ("start", "load", "recompute"):
            seconds = [getattr(pause, name) for pause in self.pauses]
            if seconds:
                lines.append(f"  {name}: median {statistics.median(seconds):.2f} s, largest {max(seconds):.2f} s")
        if self.hang_seconds:
            lines.append(f"  hangs were noticed after {', '.join(f'{one:.0f}' for one in self.hang_seconds)} s")
        lines += [f"  {name}: {count:g}" for name, count in self.counts.items()]
        lines += [f"  LOST {one}" for one in tally.lost]
        lines += [f"  DIFFERENT {one}" for one in tally.different]
        return "\n".join([*lines, *(f"  PROBLEM {one}" for one in self.problems)])


class Deaths:
    """Ends the process of a server's engine at random moments while the server answers requests.

    Args:
        streams: clients of the server.
        find_pid: function that returns the id of the engine's process, or None if there is none.
        kinds: kinds of deaths, from :data:`KINDS`.
        gap: largest time between the end of a restart and the next death in seconds.
        seed: seed of the kinds and moments.
    """

    def __init__(
        self, streams: Streams, find_pid: Callable[[], int | None], kinds: Sequence[str], gap: float, seed: int
    ) -> None:
        self._streams = streams
        self._find_pid = find_pid
        self._kinds = kinds
        self._next_kinds: list[str] = []  # each kind has the same share
        self._gap = gap
        self._random = random.Random(seed)
        self._recent: deque[float] = deque()
        self._load_seconds = 1.0

    async def run(self, requests: Sequence[MixedRequest], num_deaths: int, num_streams: int) -> Report:
        """Send requests until the engine has died ``num_deaths`` times, and wait for all answers."""
        end = asyncio.Event()
        before = latest = await self._streams.metrics()
        answers = asyncio.ensure_future(self._streams.answer_until(requests, end))
        report = Report(num_streams)
        watched: list[tuple[float, float, list[SentRequest]]] = []
        during_load = False
        try:
            for i in range(num_deaths):
                await self._wait(during_load)
                self._next_kinds = self._next_kinds or self._random.sample(self._kinds, len(self._kinds))
                kind = self._next_kinds.pop() if not during_load else "kill"
                report.kinds[kind] += 1
                began, held = time.monotonic(), [sent for sent in self._streams.open if sent.request.is_stream]
                if not during_load:
                    for sent in self._streams.open:
                        sent.num_deaths += 1
                num_restarts = await self._streams.num_restarts()
                await self._die(kind, report)
                during_load = kind != "error" and i + 1 < num_deaths and self._random.random() < _SHARE_DURING_LOADS
                if kind != "error" and not during_load:
                    await self._until_restarted(num_restarts)
                    watched.append((began, time.monotonic(), held))
                    self._load_seconds = watched[-1][1] - began
                if not during_load:
                    latest = self._compared(latest, await self._streams.metrics(), report)
        finally:
            end.set()
            report.tally = await answers
        latest = self._compared(latest, await self._streams.metrics(), report)
        names = ("restart_seconds_count", "resumed_requests_total", "failed_steps_total", "retried_requests_total")
        report.counts = {n: v - before.get(n, 0) for n, v in latest.items() if n.partition("{")[0].endswith(names)}
        report.pauses = _pauses(watched)
        return report

    async def _wait(self, during_load: bool) -> None:
        """Wait for the next moment of a death.

        A death comes only when a stream has received a part of its answer. A request gets an error if three processes
        die while they compute it, without a token in between. Therefore, this method waits until no request has had
        more than one death since its last part. A response that is not a stream has no parts before its end, so its
        request survives at most two deaths.
        """
        while not any(sent.times for sent in self._streams.open):
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(self._random.uniform(0.0, self._load_seconds if during_load else self._gap))
        while not during_load and any(sent.num_deaths > 1 for sent in self._streams.open):
            await asyncio.sleep(_POLL_SECONDS)
        while self._recent and len(self._recent) >= _MAX_DEATHS:
            await asyncio.sleep(max(self._recent[0] + _DEATH_SECONDS - time.monotonic(), 0.0))
            self._recent.popleft()

    async def _die(self, kind: str, report: Report) -> None:
        """End the engine's process, and wait until it no longer exists. The kind ``error`` only makes a step fail.

        Raises:
            RuntimeError: no process of the engine was found within ``_READY_SECONDS``.
        """
        pid = await self._until(self._find_pid, "a process of the engine")
        os.kill(pid, KINDS[kind])
        if kind == "error":
            return
        began = time.monotonic()
        self._recent.append(began)
        while self._find_pid() == pid:
            await asyncio.sleep(_POLL_SECONDS)
            if time.monotonic() - began > _HANG_SECONDS:
                report.problems.append(f"the server has not noticed a {kind} within {_HANG_SECONDS:.0f} s")
                os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
        if kind == "hang":
            report.hang_seconds.append(time.monotonic() - began)

    async def _until_restarted(self, num_before: float) -> None:
        """Wait until the engine has restarted more than ``num_before`` times.

        Raises:
            RuntimeError: the engine has no new process after ``_READY_SECONDS``.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while await self._streams.num_restarts() <= num_before:
            await asyncio.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine has no new process after {_READY_SECONDS:.0f} s")

    @staticmethod
    async def _until(find: Callable[[], int | None], what: str) -> int:
        deadline = time.monotonic() + _READY_SECONDS
        while (found := find()) is None:
            await asyncio.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server has no {what}")
        return found

    @staticmethod
    def _compared(before: dict[str, float], after: dict[str, float], report: Report) -> dict[str, float]:
        """Add counters that have decreased to the report's problems. Return ``after``."""
        report.problems += [
            f"{name} has gone from {value:g} to {after.get(name, 0.0):g}"
            for name, value in before.items()
            if after.get(name, 0.0) < value
        ]
        return after


def _pauses(watched: Sequence[tuple[float, float, list[SentRequest]]]) -> list[Pause]:
    """Return the pauses, each divided into its parts. Reads the times of the loads from the file ``LOADS``.

    Args:
        watched: for each pause: time of the death, time at which the new engine was ready, and streams at the death.
    """
    path = Path(os.environ[LOADS])
    loads = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    pauses = []
    for death, ready, held in watched:
        load = next(((began, ended) for began, ended in reversed(loads) if death < began < ready), None)
        if load is not None:
            parts = [at for sent in held if (at := sent.next_part(load[1])) is not None]
            pauses.append(Pause(load[0] - death, load[1] - load[0], max(parts, default=load[1]) - load[1]))
    return pauses
