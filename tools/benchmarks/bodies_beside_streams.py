"""Measures how much large request bodies slow down running outputs, with the engine in a thread and in a process.

    python -m tools.benchmarks.bodies_beside_streams
    python -m tools.benchmarks.bodies_beside_streams --model FOLDER --streams 64 --clients 3 --rounds 4

Two servers of the same model run, with and without a process for the engine, and are measured in rotation. A server
generates some streams, first alone, then while clients post bodies of 15.7 MB. The prompt in such a body is longer than
the context, so its answer is an error. The rates come from the servers' own counts of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections import Counter

import httpx

from tools.compare.peers import OURS, running

BODY_BYTES = 15_700_000
_MODEL = "measured"
# Seconds between the first requests and the measurement.
_LEAD = 2.0
_TOKENS = "metal_engine:generation_tokens_total"


def body() -> bytes:
    """Return a chat request of 15.7 MB."""
    text = ("many words in a long text, " * (BODY_BYTES // 27 + 1))[:BODY_BYTES]
    return json.dumps({"model": _MODEL, "messages": [{"role": "user", "content": text}]}).encode()


class Load:
    """Load of one server: streams of outputs, and clients that post large bodies.

    Attributes:
        begin: start of the measurement, in seconds of ``time.monotonic``.
        end: end of the measurement and of the load, in seconds of ``time.monotonic``.
        gaps: seconds between consecutive parts of a stream during the measurement.
        statuses: number of responses to large bodies by status.
    """

    def __init__(self, client: httpx.AsyncClient, body: bytes, seconds: float) -> None:
        self._client, self._body = client, body
        self.begin = time.monotonic() + _LEAD
        self.end = self.begin + seconds
        self.gaps: list[float] = []
        self.statuses: Counter[int] = Counter()

    async def stream(self, number: int) -> None:
        """Request streams one after another until ``end``, and record the seconds between their parts in ``gaps``."""
        request = {"model": _MODEL, "prompt": f"({number}) Once upon a time", "max_tokens": 400, "stream": True}
        while time.monotonic() < self.end:
            last = 0.0
            async with self._client.stream("POST", "/v1/completions", json=request | {"ignore_eos": True}) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    if last and self.begin <= now < self.end:
                        self.gaps.append(now - last)
                    last = now
                    if now >= self.end:
                        break

    async def post(self) -> None:
        """Post large bodies one after another until ``end``, and count the responses in ``statuses``."""
        while time.monotonic() < self.end:
            response = await self._client.post("/v1/chat/completions", content=self._body)
            self.statuses[response.status_code] += 1

    async def rate(self) -> float:
        """Return the tokens per second that the server generates between ``begin`` and ``end``."""
        await asyncio.sleep(self.begin - time.monotonic())
        first, began = await self._num_tokens(), time.monotonic()
        await asyncio.sleep(self.end - time.monotonic())
        return (await self._num_tokens() - first) / (time.monotonic() - began)

    async def _num_tokens(self) -> float:
        lines = (await self._client.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_TOKENS))


async def measure(url: str, body: bytes, args: argparse.Namespace, num_clients: int) -> tuple[float, Load]:
    """Put load on one server. Return the tokens per second that it generates, and the load with its measurements."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        load = Load(client, body, args.seconds)
        posts = [asyncio.create_task(load.post()) for _ in range(num_clients)]
        streams = [asyncio.create_task(load.stream(i)) for i in range(args.streams)]
        rate = await load.rate()
        await asyncio.gather(*streams)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
    return rate, load


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--clients", type=int, default=3, help="clients that post large bodies")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    large = body()
    rates: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        urls = {}
        for mode in ("--no-engine-process", "--engine-process"):
            flags = (mode, "--served-model-name", _MODEL, "--max-num-seqs", str(args.streams))
            urls[mode] = stack.enter_context(running(OURS, args.model, same_blas=True, extra=flags)).url
        print("mode                 clients  tokens/s  p99 gap, ms  largest, ms  bodies")
        for turn in range(args.rounds + 1):
            for mode, url in urls.items():
                for num_clients in (0, args.clients):
                    rate, load = asyncio.run(measure(url, large, args, num_clients))
                    if not turn:  # the first round compiles and traces
                        continue
                    rates.setdefault((mode, num_clients), []).append(rate)
                    gaps = 1000 * statistics.quantiles(load.gaps, n=100)[-1], 1000 * max(load.gaps)
                    statuses = ", ".join(f"{number} x {status}" for status, number in load.statuses.items())
                    print(
                        f"{mode:19}  {num_clients:7}  {rate:8.1f}  {gaps[0]:11.1f}  {gaps[1]:11.1f}  {statuses}",
                        flush=True,
                    )
    for mode in urls:
        alone, beside = (statistics.median(rates[mode, n]) for n in (0, args.clients))
        print(f"{mode}: {beside / alone:.2f} of the tokens/s without large bodies")


if __name__ == "__main__":
    main()
