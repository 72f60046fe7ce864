"""Server with several ranks, started by the command on one machine, for tests of shutdown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import httpx

from metal_engine.settings.fields import ENV_PREFIX

ROOT = Path(__file__).parents[2]


def children_of(pid: int) -> list[int]:
    """Return the ids of the child processes of a process, oldest first (Linux).

    Ids are no measure of age: the system begins again with small ids after the largest.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # the process has ended
            continue
        fields = text.rpartition(")")[2].split()  # the third field and the fields after it
        if int(fields[1]) == pid:
            found.append((int(fields[19]), int(stat.parent.name)))  # start time, id
    return [child for _, child in sorted(found)]


def is_alive(pid: int) -> bool:
    """Return True if a process is running. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class RankedServer:
    """``metal-engine serve`` with several ranks.

    Attributes:
        url: URL of the server.
        ranks: process ids, by rank.
        lines: lines of standard error so far.
    """

    def __init__(self, model: Path, *flags: str, num_ranks: int = 2, **settings: object) -> None:
        """Start the server and wait until it is ready.

        Args:
            settings: settings without a flag, which the environment passes.
        """
        command = [sys.executable, "-m", "metal_engine", "serve", str(model), "--port", "0", *flags]
        command += ["--tensor-parallel-size", str(num_ranks)]
        # By default, each rank would fill 2 GiB of memory for its KV cache, which takes a second of CPU time.
        command += ["--kv-cache-memory-bytes", "64MiB"]
        env = {**os.environ, **{f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in settings.items()}}
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
        self.lines: list[str] = []
        self.url = ""
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_ready.wait()
        assert self.url, "".join(self.lines)
        self.ranks = self.find_ranks()
        assert len(self.ranks) == num_ranks

    def find_ranks(self) -> list[int]:
        """Return the ids of the current ranks, by rank. Rank 0 may be a process of the server."""
        for leader in (self.process.pid, *children_of(self.process.pid)):
            followers = [pid for pid in children_of(leader) if b"metal_engine.rank_worker" in command_of(pid)]
            if followers:
                return [leader, *sorted(followers, key=_rank_of)]
        return []

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.match(r"URL: +(\S+)", line):
                self.url = match[1]
                self._is_ready.set()
        self._is_ready.set()

    def said(self) -> str:
        return "".join(self.lines)

    def stream(self, num_tokens: int, prompt: str = "Tides") -> httpx.Response:
        """Send a request and return the streaming response."""
        body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body["temperature"] = 0
        client = httpx.Client(timeout=120)
        request = client.build_request("POST", f"{self.url}/v1/completions", json=body)
        return client.send(request, stream=True)

    def health(self) -> str:
        """Return the status reported by /health, or ``gone`` if no server responds."""
        try:
            return str(httpx.get(f"{self.url}/health", timeout=10).json()["status"])
        except httpx.HTTPError:
            return "gone"

    def num_running(self) -> int:
        """Return the number of running requests from /metrics."""
        found = re.search(r"^vllm:num_requests_running\S* (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return int(float(found[1]))

    def seconds_until_all_ended(self, but: int | None = None) -> float:
        """Wait until all ranks have ended, except the process ``but``. Return the seconds that this took."""
        start = time.monotonic()
        while any(is_alive(pid) for pid in self.ranks if pid != but):
            time.sleep(0.02)
            self.process.poll()
            assert time.monotonic() - start < 300, self.said()
        return time.monotonic() - start

    def __enter__(self) -> RankedServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the server and all running ranks, and read the rest of their output."""
        for pid in {self.process.pid, *self.ranks}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(30)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _rank_of(pid: int) -> int:
    return int(re.search(rb"MLX_RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[1])
