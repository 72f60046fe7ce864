"""Real gateway in front of servers with fake runners, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.serving import DEADLINE, wait_until
from tools.fixtures.fake_engine import byte_ids, generated
from tools.gateway.processes import gateway, healthy_servers

# Shared, because making a client takes longer than a request. No connection is kept open, because tests kill servers.
HTTP = httpx.Client(timeout=DEADLINE, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
ROOT = Path(__file__).resolve().parents[2]
MODEL = "fake"


class FakeServer:
    """Server process that can be killed and restarted at the same address."""

    def __init__(self, port: int, step_time: float, popen: subprocess.Popen[str]) -> None:
        self.port, self.step_time, self.popen = port, step_time, popen
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    def begin(cls, port: int, step_time: float = 0.005) -> FakeServer:
        """Start a server. :meth:`wait` waits until it responds."""
        settings = json.dumps({"port": port, "shutdown_timeout": DEADLINE})
        command = [sys.executable, "-m", "tests.support.fake_process", settings, str(step_time)]
        popen = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return cls(port, step_time, popen)

    def wait(self) -> FakeServer:
        assert self.popen.stdout is not None and self.popen.stdout.readline().strip() == self.url
        return self

    def kill(self) -> None:
        """Kill the process with SIGKILL, if it is running."""
        self.popen.kill()
        self.end()

    def end(self) -> int:
        """Wait for the end of the process and return its status."""
        status = self.popen.wait(DEADLINE)
        self.popen.stdout.close()
        return status

    @property
    def num_open(self) -> int:
        """Number of running and waiting requests."""
        health = HTTP.get(f"{self.url}/health").json()
        return int(health["running"]) + int(health["waiting"])

    @property
    def num_finished(self) -> int:
        """Number of requests that ended because of their token limit."""
        lines = HTTP.get(f"{self.url}/metrics").text.splitlines()
        prefix = "metal_engine:request_success_total{"
        counts = [line for line in lines if line.startswith(prefix) and '"length"' in line]
        return sum(int(float(line.split()[-1])) for line in counts)


@contextmanager
def before(urls: Sequence[str], *flags: str, num_ready: int | None = None) -> Iterator[str]:
    """Yield the URL of a gateway in front of some servers. ``num_ready`` servers respond already (default: all)."""
    num_ready = len(urls) if num_ready is None else num_ready
    with gateway("--worker-urls", *urls, *flags, num_servers=num_ready) as (url, process):
        yield url
        process.kill()  # its normal shutdown takes seconds


@contextmanager
def before_pair(prefill: str, decode: str) -> Iterator[str]:
    """Yield the URL of a gateway in front of a prefill server and a decode server."""
    flags = ["--pd-disaggregation", "--prefill", prefill, "--decode", decode]
    with gateway(*flags, num_servers=2) as (url, process):
        yield url
        process.kill()


def wait_for_servers(url: str, servers: Sequence[FakeServer]) -> None:
    """Wait until the gateway uses exactly these servers."""
    wanted = sorted(server.url for server in servers)
    wait_until(lambda: sorted(healthy_servers(url)) == wanted, "the gateway to see which servers are well")


def servers_with_known_load(url: str) -> list[str]:
    """Return the URLs of the servers whose metrics the gateway had at its last poll."""
    return sorted(load["worker"] for load in HTTP.get(f"{url}/get_loads").json()["loads"])


def prompts(number: int, name: str, first: int = 0) -> list[str]:
    """Return prompts that differ from the first characters on, and whose characters are separate tokens."""
    return [f"{i:03}{name}" + "0123456789" * 4 for i in range(first, first + number)]


def expected(prompt: str, num_tokens: int) -> str:
    """Return the text that any server generates for a prompt."""
    return bytes(generated(byte_ids(prompt), num_tokens)).decode(errors="replace")


def ask(url: str, text: str, num_tokens: int) -> httpx.Response:
    """Send a completion request without streaming and return the response."""
    body: dict[str, Any] = {"model": MODEL, "prompt": text, "max_tokens": num_tokens, "ignore_eos": True}
    return HTTP.post(f"{url}/v1/completions", json={**body, "temperature": 0})


def ask_while(
    url: str, name: str, num_requests: int, num_tokens: int, *, at_once: int, do: Callable[[], None]
) -> list[tuple[str, httpx.Response]]:
    """Send completion requests, ``at_once`` at a time, and call ``do`` in between. Return prompts and responses.

    A quarter of ``num_requests`` are sent before ``do`` is called. Further requests are sent during the call, and at
    least half of ``num_requests`` after it.
    """
    free = threading.Semaphore(at_once)
    sent: list[tuple[str, Future[httpx.Response]]] = []

    def one(text: str) -> httpx.Response:
        try:
            return ask(url, text, num_tokens)
        finally:
            free.release()

    with ThreadPoolExecutor(at_once + 1) as pool:

        def send() -> None:
            assert free.acquire(timeout=DEADLINE)
            (text,) = prompts(1, name, len(sent))
            sent.append((text, pool.submit(one, text)))

        for _ in range(num_requests // 4):
            send()
        doing = pool.submit(do)
        while not doing.done():
            send()
        doing.result()
        for _ in range(max(num_requests // 2, num_requests - len(sent))):
            send()
        return [(text, future.result()) for text, future in sent]
