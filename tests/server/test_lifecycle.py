"""Server shutdown: after signals, after the death of its engine, and after failing to bind its address."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from metal_engine.errors import ConfigError
from metal_engine.server import run
from metal_engine.server.app import create_app
from metal_engine.server.connections.acceptor import Acceptor
from metal_engine.server.errors import APIError
from metal_engine.server.listen import listen
from metal_engine.server.run import Server
from metal_engine.server.workers import Weight
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error, sse_events
from tests.support.fake_process import DEADLY, ENDLESS
from tests.support.serving import DEADLINE, wait_until
from tools.fixtures.fake_engine import FakeRunner, fake_config, fake_engine

ROOT = Path(__file__).resolve().parents[2]
STREAM = {"prompt": "a", "max_tokens": 90_000, "stream": True}


class Process:
    def __init__(self, popen: subprocess.Popen[str], url: str) -> None:
        self.popen = popen
        self.url = url

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=DEADLINE)

    def stream(self, **changes: Any) -> Any:
        return httpx.stream("POST", f"{self.url}/v1/completions", json={**STREAM, **changes}, timeout=DEADLINE)

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health", timeout=DEADLINE).json()

    def wait_for_status(self, status: str) -> None:
        wait_until(lambda: self.health()["status"] == status, status)

    def wait_for_running(self, number: int) -> None:
        wait_until(lambda: self.health()["running"] == number, f"{number} requests")

    def end(self) -> tuple[int, str]:
        """Wait for the end of the process. Return its status and log."""
        _, log = self.popen.communicate(timeout=DEADLINE)
        return self.popen.returncode, log


@contextmanager
def process(step_time: float = 0.005, *, open_files: int | None = None, **settings: Any) -> Iterator[Process]:
    """Start a server process. ``open_files`` limits its file descriptors (default: the limit of this process)."""
    command = [sys.executable, "-m", "tests.support.fake_process", json.dumps({"port": 0, **settings})]
    limited = [] if open_files is None else ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh"]
    popen = subprocess.Popen(
        [*limited, *command, str(step_time)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert popen.stdout is not None
        url = popen.stdout.readline().strip()
        assert url, popen.communicate()[1]
        yield Process(popen, url)
    finally:
        popen.kill()
        popen.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_requests_in_flight_finish_after_a_shutdown_signal(number: int) -> None:
    # The requests last 10 s, unless the test shortens them: a busy machine may need seconds for the checks.
    with process(step_time=0.05) as server, ThreadPoolExecutor() as pool, server.stream(max_tokens=200) as response:
        events = response.iter_lines()
        next(events)
        whole = pool.submit(server.post, prompt="b", max_tokens=200)
        server.wait_for_running(2)
        server.popen.send_signal(number)
        server.wait_for_status("draining")
        refused = server.post(prompt="late")
        error = check_error(refused, 503, None, "shutting_down")
        assert "shutting down" in error["message"] and refused.headers["retry-after"]
        server.popen.send_signal(signal.SIGUSR1)
        assert [line for line in events if line][-1] == "data: [DONE]"
        assert whole.result().json()["usage"]["completion_tokens"] == 200
        status, log = server.end()
        assert status == 0 and "Traceback" not in log


def test_requests_that_take_too_long_are_cut_with_an_error() -> None:
    with process(shutdown_timeout=0.2) as server, ThreadPoolExecutor() as pool, server.stream() as response:
        events = response.iter_lines()
        next(events)
        whole = pool.submit(server.post, prompt="b", max_tokens=90_000)
        server.wait_for_running(2)
        server.popen.terminate()
        last = json.loads([line for line in events if line][-1].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down" and last["error"]["type"] == "server_error"
        check_error(whole.result(), 503, None, "shutting_down")
        status, log = server.end()
        assert status == 0 and "Traceback" not in log
        assert "cut 2 requests" in log


def test_shutdown_does_not_wait_for_a_client_that_does_not_read() -> None:
    """The client's connection is full, so that even the last event cannot be written."""
    with process(step_time=0.0, shutdown_timeout=0.2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            body = json.dumps({**STREAM, "prompt": [[65 + i % 26] for i in range(40)]})
            head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            server.wait_for_running(40)
            time.sleep(1.0)  # lets the buffers fill; the test is valid either way
            server.popen.terminate()
            status, log = server.end()
        assert status == 0 and "Traceback" not in log, log


def test_a_second_signal_stops_at_once(number: int = signal.SIGINT) -> None:
    """The server stops although a stream is open and a step runs forever."""
    with process(shutdown_timeout=1000) as server, ThreadPoolExecutor() as pool, server.stream() as response:
        events = response.iter_lines()
        next(events)
        stuck = pool.submit(server.post, prompt=[ENDLESS])
        server.wait_for_running(2)
        server.popen.send_signal(number)
        server.wait_for_status("draining")
        server.popen.send_signal(number)
        last = json.loads([line for line in events if line][-1].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down"
        check_error(stuck.result(), 503, None, "shutting_down")
        status, log = server.end()
        assert status == 128 + number and "Traceback" not in log


def test_the_death_of_the_engine_ends_the_process() -> None:
    with process() as server, server.stream() as response:
        events = response.iter_lines()
        next(events)
        check_error(server.post(prompt=[DEADLY]), 503, None, "engine_dead")
        assert sse_events("\n\n".join(line for line in events if line))[-1]["error"]["code"] == "engine_dead"
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert health.json()["status"] == "error" and "killed by a token" in health.json()["error"]
        status, log = server.end()
        assert status == 1
        assert log.count("the engine thread has died") == 1


@pytest.mark.parametrize("part", ["prepare", "listen", "listen on a Unix socket"])
def test_an_error_at_the_start_ends_the_workers_and_the_engine(
    part: str, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an error about the socket is an error about its address."""
    problem = OSError(errno.EADDRINUSE, "not available")

    async def prepare() -> None:
        if part == "prepare":
            raise problem

    def start(*_: object) -> None:
        raise problem

    monkeypatch.setattr(Acceptor, "start", start)
    monkeypatch.setattr("gc.freeze", lambda: None)  # settings of the process, which later tests would keep
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    config = fake_config()
    engine = fake_engine(FakeRunner(config.cache.block_size), config)
    app = create_app(engine, ["x"])
    server = Server(app, app.state.models, prepare=prepare)
    uds = str(short_folder / "socket") if "Unix" in part else None
    expected: tuple[type[Exception], str] = (OSError, "not available")
    if part != "prepare":
        address = r"--port \d+" if uds is None else f"--uds {uds}"
        expected = ConfigError, f"cannot listen on {address}: not available"
    has_ended: list[bool] = []

    def shut_down(timeout: float) -> bool:
        has_ended.append(engine.shutdown(timeout))
        return has_ended[-1]

    with listen(ServerArgs(port=0, uds=uds)) as listener, pytest.raises(expected[0], match=expected[1]):
        run._run(server, listener, shut_down)
    assert has_ended == [True]
    with pytest.raises(APIError, match="shutting down"):
        asyncio.run(app.state.models.workers.run(Weight.LIGHT, int))


def test_a_signal_while_the_model_loads(demo_path: Path) -> None:
    command = [sys.executable, "-m", "metal_engine", "serve", "demo", "--port", "0", "--log-level", "debug"]
    loading = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert loading.stderr is not None
    assert "BLAS" in loading.stderr.readline() or sys.platform == "darwin"  # logged just before MLX is imported
    loading.send_signal(signal.SIGINT)
    _, log = loading.communicate(timeout=DEADLINE)
    assert loading.returncode == 128 + signal.SIGINT and "Traceback" not in log, log


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a short folder: socket paths have about a hundred bytes, which pytest's folders exceed on macOS."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_name_with_addresses_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    both = [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for family, address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    for host, shown in (("localhost", "localhost"), ("", "127.0.0.1")):
        with listen(ServerArgs(host=host, port=0)) as listener:
            address, port = listener.socket.getsockname()
            assert (address, listener.url) == ("127.0.0.1", f"http://{shown}:{port}")


def test_a_port_in_use_is_detected_despite_address_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, SO_REUSEADDR allows that for different addresses, as SO_REUSEPORT does on Linux."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(socket, "SO_REUSEADDR", socket.SO_REUSEPORT)
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with (
                pytest.raises(ConfigError, match="is in use"),
                listen(ServerArgs(host=host, port=port, api_key=("k",))),
            ):
                pass
    with listen(ServerArgs(port=port)):
        pass


def test_a_stale_unix_socket_is_replaced_and_a_regular_file_is_kept(short_folder: Path) -> None:
    path = short_folder / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listen(ServerArgs(uds=str(path))):
        assert path.is_socket()
    assert not path.exists()
    with listen(ServerArgs(uds=str(path))):
        path.unlink()
        path.write_text("mine")
    with pytest.raises(ConfigError, match="--uds"), listen(ServerArgs(uds=str(path))):
        pass
    assert path.read_text() == "mine"


def test_unix_domain_socket(short_folder: Path) -> None:
    path = short_folder / "engine.sock"
    with process(uds=str(path)) as server:
        assert server.url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://engine", timeout=DEADLINE) as client:
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()
            assert answer["usage"]["completion_tokens"] == 3
            command = [*map(str, server.popen.args)]  # type: ignore[union-attr]
            second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
            assert second.returncode == 1 and "--uds" in second.stderr and "in use" in second.stderr
            assert client.get("/health").status_code == 200
        server.popen.terminate()
        assert server.end()[0] == 0
    assert not path.exists()
