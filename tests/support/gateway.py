"""The real gateway before servers on fake runners, each a process of its own, for tests of what they do together."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.serving import DEADLINE, wait_until
from tools.fixtures.fake_engine import byte_ids, generated
from tools.gateway.processes import gateway, healthy_servers

ROOT = Path(__file__).resolve().parents[2]
MODEL = "fake"


class FakeServer:
    """A server process that can be killed and started again at the same address."""

    def __init__(self, port: int, step_time: float, popen: subprocess.Popen[str]) -> None:
        self.port, self.step_time, self.popen = port, step_time, popen
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    def begin(cls, port: int, step_time: float = 0.005) -> FakeServer:
        """Starts it; :meth:`wait` says when it answers."""
        settings = json.dumps({"port": port, "shutdown_timeout": DEADLINE})
        command = [sys.executable, "-m", "tests.support.fake_process", settings, str(step_time)]
        popen = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return cls(port, step_time, popen)

    def wait(self) -> FakeServer:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline().strip() == self.url
        return self

    def kill(self) -> None:
        """As ``kill -9`` does; nothing if it has ended."""
        self.popen.kill()
        self.end()

    def end(self) -> int:
        """Waits for its end; returns its status."""
        status = self.popen.wait(DEADLINE)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return status

    @property
    def num_running(self) -> int:
        return int(httpx.get(f"{self.url}/health", timeout=DEADLINE).json()["running"])

    @property
    def num_finished(self) -> int:
        """Requests that it has answered whole."""
        lines = httpx.get(f"{self.url}/metrics", timeout=DEADLINE).text.splitlines()
        prefix = "metal_engine:request_success_total{"
        counts = [line for line in lines if line.startswith(prefix) and '"length"' in line]
        return sum(int(float(line.split()[-1])) for line in counts)


@contextmanager
def before(urls: Sequence[str], *flags: str, num_ready: int | None = None) -> Iterator[str]:
    """The gateway before some servers; its URL. ``num_ready`` of them answer already; None: all."""
    num_ready = len(urls) if num_ready is None else num_ready
    with gateway("--worker-urls", *urls, *flags, num_servers=num_ready) as (url, process):
        yield url
        process.kill()  # it would wait for seconds


@contextmanager
def before_pair(prefill: str, decode: str) -> Iterator[str]:
    """The gateway before a server that prefills and one that decodes; its URL."""
    flags = ["--pd-disaggregation", "--prefill", prefill, "--decode", decode]
    with gateway(*flags, num_servers=2) as (url, process):
        yield url
        process.kill()


def wait_for_servers(url: str, servers: Sequence[FakeServer]) -> None:
    """Until the gateway sends requests to these servers, and to no others."""
    wanted = sorted(server.url for server in servers)
    wait_until(lambda: sorted(healthy_servers(url)) == wanted, "the gateway to see which servers are well")


def prompts(number: int, name: str) -> list[str]:
    """Prompts of which no two begin alike; none of their characters joins with another to a token."""
    return [f"{i:03}{name}" + "0123456789" * 4 for i in range(number)]


def expected(prompt: str, num_tokens: int) -> str:
    """What any server answers."""
    return bytes(generated(byte_ids(prompt), num_tokens)).decode(errors="replace")


def ask_all(
    url: str,
    texts: Sequence[str],
    num_tokens: int,
    *,
    at_once: int,
    after: int = 0,
    do: Callable[[], None] | None = None,
) -> list[httpx.Response]:
    """Asks for a completion of each text, so many at once; does something when ``after`` have been answered."""
    done = threading.Semaphore(0)

    def one(text: str) -> httpx.Response:
        body: dict[str, Any] = {"model": MODEL, "prompt": text, "max_tokens": num_tokens, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 0}, timeout=DEADLINE)
        done.release()
        return answer

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(one, text) for text in texts]
        if do is not None:
            for _ in range(after):
                assert done.acquire(timeout=DEADLINE)
            do()
        return [future.result() for future in futures]
