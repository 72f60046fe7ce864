"""A gateway, servers behind it and the KV store that they share, as processes of this machine.

Each is ended when its ``with`` block is left. A signal of the terminal reaches none of them: whoever started them
ends them, in order.
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

# As docs/several-macs.md and docs/launchd have them. The gateway's circuit breaker would leave a server that was killed
# under load out for 60 s, however well it is by then, unless the checks saw it dead: nobody would be there to take
# over if another one is told to end meanwhile. Its overload protection would ask a dead server, again and again, as
# long as the others have eight requests waiting. Requests that fail are asked of another server without the two.
ROUTING_FLAGS = (
    *("--disable-circuit-breaker", "--disable-worker-overload-protection"),
    *("--health-success-threshold", "1", "--load-monitor-interval", "1"),
)
# Half of it, five seconds at most, the gateway waits in any case when it is told to end.
GRACE_SECONDS = 4
_START_SECONDS = 300.0


class NotStartedError(RuntimeError):
    """A process has ended, or said nothing for long, before it was ready."""


@contextmanager
def running(
    name: str, command: Sequence[str], is_ready: Callable[[], bool], log: TextIO | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready; it is told to end afterwards, and waited for.

    Args:
        name: for errors.
        is_ready: asked until it says yes.
        log: what takes what the process prints; None: nobody.

    Raises:
        NotStartedError: it has not become ready.
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
    """Tell a process to end and wait for it; what has not ended in time is killed."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def shared_store(log: TextIO | None = None) -> Iterator[str]:
    """A Valkey or Redis server that forgets everything at its end; its URL.

    Raises:
        NotStartedError: there is none on this machine, or it has not started.
    """
    binary, port = valkey_binary(), free_port()
    if binary is None:
        raise NotStartedError("there is no Valkey or Redis server here: install one (on a Mac: brew install valkey)")

    def is_ready() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    memory = ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *memory]
    with running("KV store", command, is_ready, log):
        yield f"redis://127.0.0.1:{port}/0"


def transfer_config(store_url: str, role: str = "kv_both", **options: Any) -> str:
    """What ``--kv-transfer-config`` takes for a shared store."""
    extra = {"url": store_url, **options}
    return json.dumps({"kv_connector": "valkey", "kv_role": role, "kv_connector_extra_config": extra})


@contextmanager
def model_server(
    model: str, *flags: str, log: TextIO | None = None, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """``metal-engine serve MODEL``, ready: its URL and its process."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "metal_engine", "serve", model, "--port", str(port), *flags]
    with running("server", command, lambda: answers(f"{url}/ready"), log) as process:
        yield url, process


def gateway_command(port: int, metrics_port: int, *flags: str) -> list[str]:
    """The command that starts the gateway for this machine alone, looking after its servers every second."""
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
    """The gateway, ready, with so many servers behind it: its URL and its process.

    Args:
        flags: of ``smg launch``: which servers, and how they are chosen.

    Raises:
        NotStartedError: it is not installed, or has not started.
    """
    if find_spec("smg") is None:
        raise NotStartedError("the gateway is not installed: pip install 'metal-engine[gateway]'")
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = gateway_command(port, free_port(), *flags)
    with running("gateway", command, lambda: len(healthy_servers(url)) >= num_servers, log) as process:
        yield url, process


def healthy_servers(url: str) -> list[str]:
    """The URLs of the servers that a gateway sends requests to now."""
    try:
        workers = httpx.get(f"{url}/workers", timeout=5.0).raise_for_status().json()["workers"]
    except (httpx.HTTPError, ValueError):
        return []
    return [worker["url"] for worker in workers if worker["is_healthy"]]
