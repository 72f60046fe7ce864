"""Gateway, servers behind it and their shared KV store, as processes on this machine.

Each process ends when its ``with`` block ends. They do not receive signals of the terminal, so the caller ends them in
order.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

import httpx

from tools.fixtures.ports import free_port
from tools.fixtures.valkey_binary import valkey_binary

# Flags as in docs/several-macs.md and docs/launchd/. Two features of the router are off: both would keep requests
# from healthy servers. The circuit breaker excludes a server killed under load for 60 s, even after a restart, unless a
# health check found it dead. A shutdown of the other server in that time would leave no server. Overload protection
# sends requests to a dead server repeatedly while the others have eight waiting requests. With both turned off, failed
# requests are retried on another server.
ROUTING_FLAGS = (
    *("--disable-circuit-breaker", "--disable-worker-overload-protection"),
    *("--health-success-threshold", "1", "--load-monitor-interval", "1"),
)
# On shutdown, the gateway always waits half of this time, at most five seconds.
GRACE_SECONDS = 4
_START_SECONDS = 300.0


class NotStartedError(RuntimeError):
    """A process ended, or did not become ready in time."""


@contextmanager
def running(
    name: str, command: Sequence[str], is_ready: Callable[[], bool], log: TextIO | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process and yield it once it is ready. At the end, sends it SIGTERM and waits for its end.

    Args:
        name: name for error messages.
        is_ready: polled until it returns True.
        log: file for the output of the process. None discards it.

    Raises:
        NotStartedError: the process ended, or was not ready within ``_START_SECONDS``.
    """
    output = subprocess.DEVNULL if log is None else log
    process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not is_ready():
            if process.poll() is not None:
                raise NotStartedError(f"the {name} has ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise NotStartedError(f"the {name} was not ready within {_START_SECONDS:g} s")
            time.sleep(0.05)
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], timeout: float = 60.0) -> None:
    """Send SIGTERM to a process and wait for its end. Kills it after ``timeout`` seconds."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    """Return True if a GET request to ``url`` gets status 200 within 5 s."""
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def shared_store(log: TextIO | None = None) -> Iterator[str]:
    """Yield the URL of a Valkey or Redis server without persistence.

    Raises:
        NotStartedError: no server is installed, or it did not start.
    """
    binary, port = valkey_binary(), free_port()
    if binary is None:
        raise NotStartedError("no Valkey or Redis server is installed: install one (on a Mac: brew install valkey)")

    def is_ready() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    memory = ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *memory]
    with running("KV store", command, is_ready, log):
        yield f"redis://127.0.0.1:{port}/0"


def transfer_config(store_url: str, role: str = "kv_both", **options: Any) -> str:
    """Return the value of ``--kv-transfer-config`` for a shared store."""
    extra = {"url": store_url, **options}
    return json.dumps({"kv_connector": "valkey", "kv_role": role, "kv_connector_extra_config": extra})


@contextmanager
def model_server(
    model: str, *flags: str, log: TextIO | None = None, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield URL and process of ``metal-engine serve MODEL`` once it is ready.

    Raises:
        NotStartedError: the server ended, or was not ready in time.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "metal_engine", "serve", model, "--port", str(port), *flags]
    with running("server", command, lambda: answers(f"{url}/ready"), log) as process:
        yield url, process


def gateway_command(port: int, metrics_port: int, *flags: str) -> list[str]:
    """Return the command that starts the gateway for this machine only, with health checks every second."""
    return [
        *(sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"),
        *("--shutdown-grace-period-secs", str(GRACE_SECONDS)),
        *ROUTING_FLAGS,
        *flags,
    ]


@contextmanager
def gateway(
    *flags: str, num_servers: int, log: TextIO | None = None, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield URL and process of the gateway once it has ``num_servers`` healthy servers.

    Args:
        flags: flags of ``smg launch`` for the servers and the routing.

    Raises:
        NotStartedError: the gateway is not installed, or did not start.
    """
    if find_spec("smg") is None:
        raise NotStartedError("the gateway is not installed: pip install 'metal-engine[gateway]'")
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = gateway_command(port, free_port(), *flags)
    with running("gateway", command, lambda: len(healthy_servers(url)) >= num_servers, log) as process:
        yield url, process


def healthy_servers(url: str) -> list[str]:
    """Return the URLs of the servers that a gateway currently sends requests to.

    The list is empty if the gateway does not respond.
    """
    try:
        workers = httpx.get(f"{url}/workers", timeout=5.0).raise_for_status().json()["workers"]
    except (httpx.HTTPError, ValueError):
        return []
    return [worker["url"] for worker in workers if worker["is_healthy"]]
