"""Measures the cost of the server without a model: streamed tokens per second over HTTP, and CPU time per token.

    python -m tools.benchmarks.server_overhead --rate 20000 [--streams 64] [--tokens 500] [--endpoint chat|...]
    python -m tools.benchmarks.server_overhead --overload --rate 5000

A real server, engine thread and scheduler run in one process, on a runner that makes up tokens. The client in another
process uses a plain socket for each stream and counts tokens. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metal_engine.server.listen import listen
from metal_engine.server.run import run_server
from metal_engine.settings.server_args import ServerArgs
from metal_engine.step import ModelOutput, RunnerLostError, SchedulerOutput
from tools.fixtures.fake_engine import FakeStep, fake_config, fake_engine

ROOT = Path(__file__).resolve().parents[2]
MAX_NUM_SEQS = 256
MAX_NUM_QUEUED = 256
NUM_REFUSED = 100
USER = [{"role": "user", "content": "hi"}]
# Endpoint -> path, body, and bytes that occur once per token in its stream.
ENDPOINTS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}, b'"delta":{"content":"'),
    "completions": ("/v1/completions", {"prompt": "hi"}, b'"text":"'),
    "responses": ("/v1/responses", {"input": "hi", "store": False}, b"event: response.output_text.delta"),
    "messages": ("/v1/messages", {"model": "fake", "messages": USER}, b'"type":"text_delta"'),
}


class FreeRunner:
    """Runner that generates a letter for every sampling request.

    Args:
        rate: maximum number of tokens per second; 0 for no limit.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._next = 0.0

    def execute(self, plan: SchedulerOutput) -> FakeStep:
        if self._rate:
            now = time.monotonic()
            if now < self._next:
                time.sleep(self._next - now)
            # Lost time is not caught up, because two steps in quick succession would be merged into one event.
            self._next = max(self._next, now) + len(plan.sampled_req_ids) / self._rate
        return FakeStep(ModelOutput([97 + plan.step_id % 26] * len(plan.sampled_req_ids)))

    @property
    def replay_refusal(self) -> None:
        """Reason why decode steps cannot be replayed: always None."""

    def dispatch_second_part(self) -> None:
        """Do nothing: a step is dispatched whole."""

    def release_cache(self) -> bool:
        """Return False: there is no cache."""
        return False

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Ignore the callback, because the engine has one rank."""

    def close(self) -> None:
        """Do nothing: this runner holds no resources."""


def serve(rate: float, profile: str | None) -> None:
    """Run the server's process: prints its URL, and its CPU seconds so far for each line of input."""
    threading.Thread(target=_tell_cpu_seconds, daemon=True).start()
    config = fake_config(
        num_blocks=200_000, block_size=16, max_num_batched_tokens=8192, max_num_seqs=MAX_NUM_SEQS, max_model_len=32_768
    )
    args = ServerArgs(port=0, log_level="warning", max_num_queued_reqs=MAX_NUM_QUEUED)
    engine = fake_engine(FreeRunner(rate), config)
    with listen(args) as listener:
        if profile is not None:
            import cProfile

            profiler = cProfile.Profile()
            profiler.enable()
        run_server(engine, args, ("fake",), listener, on_ready=lambda url: print(url, flush=True))
        if profile is not None:
            profiler.disable()
            profiler.dump_stats(profile)


def _tell_cpu_seconds() -> None:
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


async def stream(host: str, port: int, path: str, body: bytes, mark: bytes) -> tuple[int, int]:
    """Send a request. Return the number of occurrences of ``mark`` in the response (tokens), and its size in bytes."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    num_tokens = num_bytes = 0
    tail = b""
    while data := await reader.read(1 << 16):
        num_bytes += len(data)
        data = tail + data
        num_tokens += data.count(mark)
        tail = data[-len(mark) + 1 :]
    writer.close()
    return num_tokens, num_bytes


async def run_clients(url: str, args: argparse.Namespace, num_tokens: int) -> tuple[int, float]:
    path, body, mark = ENDPOINTS[args.endpoint]
    limit = "max_output_tokens" if args.endpoint == "responses" else "max_tokens"
    content = json.dumps({**body, limit: num_tokens, "stream": True}).encode()
    host, port = url.removeprefix("http://").split(":")
    started = time.perf_counter()
    streams = [stream(host, int(port), path, content, mark) for _ in range(args.streams)]
    counts = await asyncio.gather(*streams)
    seconds = time.perf_counter() - started
    tokens = [tokens for tokens, _ in counts]
    expected = num_tokens
    # If a reader is slower than the engine, several tokens arrive as one event.
    assert all(0 < count <= expected for count in tokens), tokens
    return sum(tokens), seconds


async def overload(url: str) -> list[float]:
    """Fill the server's queue, then send requests one after another. The server must refuse each with status 503.

    Returns:
        Seconds to each of these responses, in ascending order.
    """
    path, body, mark = ENDPOINTS["chat"]
    content = json.dumps({**body, "max_tokens": 30_000, "stream": True}).encode()
    host, port = url.removeprefix("http://").split(":")
    tasks = []
    for _ in range(MAX_NUM_SEQS + MAX_NUM_QUEUED):
        tasks.append(asyncio.create_task(stream(host, int(port), path, content, mark)))
        await asyncio.sleep(0.005)  # running requests must start before the queue fills
    await asyncio.sleep(2)
    seconds = []
    while len(seconds) < NUM_REFUSED:
        started = time.perf_counter()
        refused = await stream(host, int(port), path, content, b"HTTP/1.1 503")
        assert refused[0] == 1, "not refused"
        seconds.append(time.perf_counter() - started)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return sorted(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoint", choices=ENDPOINTS, default="chat")
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="tokens per second that the runner makes at most; without it, the engine runs ahead of the server, which "
        "then sends several tokens as one event",
    )
    parser.add_argument("--overload", action="store_true", help="time to a 503 while the queue is full instead")
    parser.add_argument("--profile", help="write the server's profile (event loop only) to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.rate, args.profile)
        return
    profile = ["--profile", str(Path(args.profile).resolve())] if args.profile else []
    command = [sys.executable, "-m", "tools.benchmarks.server_overhead", "--serve", "--rate", str(args.rate)]
    server = subprocess.Popen([*command, *profile], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        if args.overload:
            seconds = asyncio.run(overload(url))
            median, p90 = (round(1e3 * seconds[int(q * len(seconds))], 1) for q in (0.5, 0.9))
            print(json.dumps({"overload": len(seconds), "ms_to_503_median": median, "ms_to_503_p90": p90}))
            return
        asyncio.run(run_clients(url, args, 20))  # covers imports and first connections
        before = _cpu_seconds(server)
        rounds = [asyncio.run(run_clients(url, args, args.tokens)) for _ in range(args.rounds)]
        cpu = _cpu_seconds(server) - before
    finally:
        if args.profile:
            server.terminate()  # the server writes the profile at its end
        else:
            server.kill()
        server.wait()
    num_tokens = args.rounds * args.streams * args.tokens
    print(
        json.dumps(
            {
                "endpoint": args.endpoint,
                "streams": args.streams,
                "rate": args.rate,
                "tokens_per_second": [round(args.streams * args.tokens / seconds) for _, seconds in rounds],
                "events_per_token": round(sum(events for events, _ in rounds) / num_tokens, 3),
                "server_cpu_us_per_token": round(1e6 * cpu / num_tokens, 1),
            }
        )
    )


def _cpu_seconds(server: subprocess.Popen[str]) -> float:
    """Return the user and system time of the server so far, in seconds."""
    assert server.stdin is not None and server.stdout is not None
    print(file=server.stdin, flush=True)
    return float(server.stdout.readline())


if __name__ == "__main__":
    main()
