"""Clients that keep a server busy with requests, and compare each answer with an undisturbed one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from tools.benchmarks.engine_death.answers import Parts, difference, error_of, events_of, is_end, merged
from tools.benchmarks.engine_death.requests import MixedRequest

_TIMEOUT = httpx.Timeout(600.0)


@dataclass(eq=False)
class SentRequest:
    """Request that a client has sent.

    Attributes:
        times: arrival of each part of the answer, in seconds of ``time.monotonic``.
        num_deaths: number of deaths of the engine since the last part of the answer.
    """

    request: MixedRequest
    times: list[float] = field(default_factory=list)
    num_deaths: int = 0

    def next_part(self, after: float) -> float | None:
        """Return the time of the first part that arrived later than ``after``; None if there is none."""
        return next((at for at in self.times if at > after), None)


@dataclass
class Tally:
    """Results of requests.

    Attributes:
        num_answers: number of whole answers, equal or different.
        lost: errors of requests without a whole answer.
        different: descriptions of the differences between answers and undisturbed answers.
    """

    num_answers: int = 0
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


class Streams:
    """Clients of a server, each with one request at a time.

    Args:
        url: address of the server.
        num_streams: number of clients.

    Attributes:
        open: requests without a whole answer.
        expected: undisturbed answers, by the request's name.
    """

    def __init__(self, url: str, num_streams: int) -> None:
        self.open: set[SentRequest] = set()
        self.expected: dict[str, Parts] = {}
        self._num_streams = num_streams
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits, trust_env=False)

    async def answer_once(self, requests: Sequence[MixedRequest]) -> None:
        """Send each request once, without deaths, and store the answers. Raises RuntimeError if an answer is lost."""
        tally = Tally()
        await self._send_all(iter(requests), tally)
        if tally.lost:
            raise RuntimeError(f"a request without a death: {tally.lost[0]}")

    async def answer_until(self, requests: Sequence[MixedRequest], end: asyncio.Event) -> Tally:
        """Send the requests again and again until ``end`` is set. Return the results when all answers have arrived."""
        tally = Tally()
        await self._send_all(itertools.takewhile(lambda _: not end.is_set(), itertools.cycle(requests)), tally)
        return tally

    async def _send_all(self, requests: Iterator[MixedRequest], tally: Tally) -> None:
        async def send_some() -> None:
            for request in requests:
                await self._send(request, tally)

        await asyncio.gather(*(send_some() for _ in range(self._num_streams)))

    async def _send(self, request: MixedRequest, tally: Tally) -> None:
        sent = SentRequest(request)
        self.open.add(sent)
        try:
            answer = await self._answer(sent)
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            tally.lost.append(f"{request.name}: {type(error).__name__}: {error}")
        else:
            tally.num_answers += 1
            if problem := difference(answer, self.expected.setdefault(request.name, answer)):
                tally.different.append(f"{request.name}: {problem}")
        finally:
            self.open.remove(sent)

    async def _answer(self, sent: SentRequest) -> Parts:
        """Send a request and return its whole answer. Raises RuntimeError if the answer is an error or ends early."""
        events = []
        async with self._client.stream("POST", sent.request.path, json=sent.request.body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                for event in events_of(line):
                    if error := error_of(event):
                        raise RuntimeError(error[:300])
                    events.append(event)
                    sent.times.append(time.monotonic())
                    sent.num_deaths = 0
        if not any(map(is_end, events[-3:])):
            raise RuntimeError(f"the answer ends after {len(events)} events")
        return merged(events)

    async def metrics(self) -> dict[str, float]:
        """Return the values of all counters of the server by name with labels, including those of histograms."""
        text = (await self._client.get("/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if line[:1] not in ("#", "")]
        ends = ("_total", "_sum", "_count", "_bucket")
        return {name: float(value) for name, _, value in lines if name.partition("{")[0].endswith(ends)}

    async def num_restarts(self) -> float:
        """Return how often the process of the engine has been replaced."""
        counters = await self.metrics()
        return sum(count for name, count in counters.items() if "restart_seconds_count" in name)

    async def close(self) -> None:
        await self._client.aclose()
