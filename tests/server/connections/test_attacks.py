"""Clients that occupy connections without useful requests: other clients are served, and memory is bounded."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import pytest
import uvloop

from metal_engine.device.descriptors import open_file_limit
from metal_engine.errors import ConfigError
from metal_engine.server.connections import limits
from metal_engine.server.connections.limits import RESERVED_DESCRIPTORS, ConnectionLimits
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.server.test_lifecycle import ROOT, Process, process
from tests.server.test_protection import finish, hold
from tests.support.raw_http import BODY, address, answers, crowd, get, post, rest
from tests.support.serving import DEADLINE, Served, serve, wait_until

HALF_HEAD = get()[:-2] + b"X: "
MIB = 1 << 20
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def statuses(one: socket.socket) -> list[int]:
    return [answer.status for answer in answers(rest(one))]


def resident_bytes(server: Process) -> int:
    kib = subprocess.run(["ps", "-o", "rss=", "-p", str(server.popen.pid)], capture_output=True, text=True, check=True)
    return int(kib.stdout) << 10


LAST = b"Connection: close\r\n"


def ask(url: str) -> None:
    """Check that probes and requests work. While a crowd is connecting, a client may have to retry."""
    for request in (get(headers=LAST), get(b"/ready", LAST), post(LAST)):
        for _ in range(20):
            with crowd(url, 1, request) as (one,):
                if (got := statuses(one)) == [200]:
                    break
            assert got in ([], [503])
        assert got == [200]


# --- too many connections ---

STARTS = [b"", b"G", HALF_HEAD, get(), post(length=b"1000"), b"\x16\x03\x01"]


@pytest.mark.parametrize("start", STARTS, ids=["nothing", "a byte", "half a head", "a request", "half a body", "TLS"])
@pytest.mark.parametrize("loop", [None, pytest.param(uvloop.new_event_loop, marks=pytest.mark.full)])
def test_incomplete_requests_do_not_block_new_connections(start: bytes, loop: LoopFactory | None) -> None:
    """Time limits are long, so the connections that have waited longest are closed to accept new ones."""
    args = ServerArgs(max_connections=20, timeout_read=DEADLINE, timeout_keep_alive=DEADLINE, shutdown_timeout=1)
    with serve(args=args, loop_factory=loop) as served, crowd(served.url, 60, start):
        for _ in range(3):
            ask(served.url)
        assert len(served.server.connections) <= 20
    assert len(served.server.connections) == 0


@pytest.mark.full
def test_2100_half_sent_heads() -> None:
    """2,048 descriptors are the limit that mlx-lm sets for a process."""
    assert open_file_limit(2400) >= 2400  # limit for the clients
    with process(open_files=2048, timeout_read=DEADLINE) as server:
        ask(server.url)
        before = resident_bytes(server)
        with crowd(server.url, 2100, HALF_HEAD + b"a" * 60_000):
            for _ in range(20):
                ask(server.url)
            grown = resident_bytes(server) - before
    assert grown < 2048 * 160_000, grown


def test_evicted_connections_get_a_503_that_names_max_connections() -> None:
    with serve(args=ServerArgs(max_connections=2, timeout_read=DEADLINE)) as few, ExitStack() as stack:
        registry = few.server.connections

        def have_arrived(number: int) -> bool:
            return len(registry) == number and all(one._phase == "body" for one in tuple(registry._open))

        sockets: list[socket.socket] = []
        for number in range(5):
            sockets += stack.enter_context(crowd(few.url, 1, post(length=b"1000")))
            if number >= 2:
                (answer,) = answers(rest(sockets[number - 2]))
                assert answer.status == 503 and answer.json()["error"]["code"] == "overloaded"
                assert "max-connections" in answer.json()["error"]["message"]
            # A connection without a byte would be closed without an answer.
            wait_until(partial(have_arrived, min(number + 1, 2)), "the requests to arrive")
        stack.close()


def test_busy_connections_keep_their_place() -> None:
    with serve(args=ServerArgs(max_connections=3, shutdown_timeout=1)) as served:
        streams = hold(served, 3)
        for _ in range(3 * ConnectionLimits.num_spare):
            with crowd(served.url, 1, get(headers=b"Connection: keep-alive\r\n")) as (one,):
                assert statuses(one) == [200]
        response = served.post("/v1/completions", {"prompt": "a"})
        assert "max-connections" in check_error(response, 503, None, "overloaded")["message"]
        assert response.headers["connection"] == "close" and response.headers["retry-after"] == "1"
        # Spare connections cannot be occupied either, neither by half a request head nor between requests.
        with crowd(served.url, 3 * ConnectionLimits.num_spare, HALF_HEAD) as sockets:
            assert httpx.get(served.url + "/ready").status_code == 200
            assert statuses(sockets[-1]) == [408]
        finish(served, streams)
        assert served.post("/v1/completions", {"prompt": "a"}).status_code == 200


# --- memory ---


def grown_by(server: Process, number: int, data: bytes) -> int:
    """Return the bytes by which the server grows while ``number`` clients send ``data``, until it stops reading."""
    ask(server.url)
    before = resident_bytes(server)

    async def send() -> None:
        try:
            _, writer = await asyncio.open_connection(*address(server.url))
            for start in range(0, len(data), MIB):
                writer.write(data[start : start + MIB])
                await writer.drain()
            writers.append(writer)
        except ConnectionError:
            pass

    async def run() -> int:
        await asyncio.gather(*(send() for _ in range(number)))
        return resident_bytes(server)

    writers: list[asyncio.StreamWriter] = []
    grown = asyncio.run(run()) - before
    ask(server.url)
    return grown


ENDLESS_HEAD = {
    "a header": HALF_HEAD + b"a" * 10 * MIB,
    "headers": get()[:-2] + b"a: b\r\n" * (10 * MIB // 6),
    "a target": b"GET /" + b"a" * 10 * MIB,
    "requests": get() * (10 * MIB // len(get())),
    "a trailer": post(b"Transfer-Encoding: chunked\r\n", b"0\r\nX: " + b"a" * 10 * MIB, length=b""),
    "an extension": post(b"Transfer-Encoding: chunked\r\n", b"1;" + b"a" * 10 * MIB, length=b""),
}


@pytest.mark.parametrize("name", ENDLESS_HEAD)
@pytest.mark.parametrize("number", [8, pytest.param(100, marks=pytest.mark.full)])
def test_endless_heads_trailers_and_pipelined_requests_use_bounded_memory(
    endless: Process, name: str, number: int
) -> None:
    assert grown_by(endless, number, ENDLESS_HEAD[name]) < 24 * MIB + number * (MIB // 2)


@pytest.fixture(scope="module")
def endless() -> Iterator[Process]:
    """Yield a process with a low limit of open files, so that it has few connections."""
    with process(open_files=RESERVED_DESCRIPTORS + 36, timeout_read=5.0) as server:
        yield server


def test_descriptors_set_the_number_of_connections(endless: Process) -> None:
    with crowd(endless.url, 100, HALF_HEAD):
        ask(endless.url)


# --- time ---


@pytest.fixture(scope="module", params=[None, pytest.param(uvloop.new_event_loop, marks=pytest.mark.full)])
def hurried(request: pytest.FixtureRequest) -> Iterator[Served]:
    args = ServerArgs(timeout_read=1.0, timeout_write=0.5, timeout_keep_alive=0.2, shutdown_timeout=1)
    with serve(args=args, loop_factory=request.param) as served:
        yield served


DRIPS = {
    "a head": (HALF_HEAD, b"a", [408]),
    "empty lines": (b"", b"\r\n", []),
    "a body of unknown length": (post(b"Transfer-Encoding: chunked\r\n", b"1;", length=b""), b"a", [408]),
    "a body that nobody wants": (post(length=b"1000000", body=b"").replace(b"/v1/completions", b"/x"), b"a", [404]),
}


@pytest.mark.parametrize("name", DRIPS)
def test_drips_do_not_keep_a_connection(hurried: Served, name: str) -> None:
    start, drip, wanted = DRIPS[name]
    with crowd(hurried.url, 1, start) as (one,):
        one.settimeout(0.05)
        received = b""
        deadline = time.monotonic() + DEADLINE
        while True:
            assert time.monotonic() < deadline
            try:
                one.sendall(drip)
                if not (part := one.recv(65536)):
                    break
                received += part
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert [answer.status for answer in answers(received)] == wanted


def test_a_body_that_pauses_is_a_408(hurried: Served) -> None:
    with crowd(hurried.url, 1, post(length=b"1000")) as (one,):
        (answer,) = answers(rest(one))
    assert answer.status == 408 and "(setting timeout-read)" in answer.json()["error"]["message"]


def test_a_slow_body_with_short_pauses_is_served(hurried: Served) -> None:
    """The whole body takes longer than the limit, but each pause between two parts is shorter."""
    with crowd(hurried.url, 1, post(body=b"", length=b"%d" % len(BODY))) as (one,):
        for i in range(0, len(BODY), 3):
            one.sendall(BODY[i : i + 3])
            time.sleep(0.1)
        assert statuses(one) == [200]


def test_client_timeouts_do_not_apply_while_the_server_computes(hurried: Served) -> None:
    """Limits apply to clients. The server may take longer than any limit."""
    hurried.runner.running.clear()
    with crowd(hurried.url, 1, post()) as (one,):
        time.sleep(1.3)
        hurried.runner.running.set()
        assert statuses(one) == [200]


def test_an_answer_that_is_not_read(hurried: Served) -> None:
    (listening,) = hurried.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = b'{"prompt": "abc", "max_tokens": 400, "n": 100, "stream": true}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address(hurried.url))
        client.sendall(post(body=body))
        wait_until(lambda: hurried.engine.num_open_requests > 0, "the request to run")
        wait_until(lambda: len(hurried.server.connections) == 0, "the connection to be closed")


# --- descriptors ---


def test_too_few_descriptors() -> None:
    command = [sys.executable, "-m", "metal_engine", "serve", "demo", "--port", "0"]
    limited = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *command]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "ulimit -n" in done.stderr and "may have 64" in done.stderr


def test_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "open_file_limit", lambda wanted: min(wanted, 400))
    available = 400 - RESERVED_DESCRIPTORS - ConnectionLimits.num_spare
    assert limits.connection_limits(ServerArgs()).max_connections == available
    assert limits.connection_limits(ServerArgs(max_connections=available)).max_connections == available
    with pytest.raises(ConfigError, match=f"ulimit -n .* or lower max-connections to {available}"):
        limits.connection_limits(ServerArgs(max_connections=available + 1))


@pytest.mark.parametrize(("max_connections", "expected"), [(3000, 3000 + 144), (16, 2048)])
def test_limits_of_the_process(max_connections: int, expected: int) -> None:
    """The soft limit is raised as needed for connections. Importing mlx-lm raises a low limit, and lowers none."""
    code = (
        "import resource\n"
        "from metal_engine.loading.build import build_engine\n"
        "from metal_engine.server.connections.limits import connection_limits\n"
        "from metal_engine.settings.args import EngineArgs\n"
        "from metal_engine.settings.server_args import ServerArgs\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        f"connection_limits(ServerArgs(max_connections={max_connections}))\n"
        "try:\n"
        "    build_engine(EngineArgs(model='/nowhere'))\n"
        "except Exception as error:\n"
        f"    print(type(error).__name__, resource.getrlimit(resource.RLIMIT_NOFILE) == ({expected}, hard))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert result.stdout == "ModelLoadError True\n", result.stderr


@pytest.mark.parametrize(("number", "evicts"), [(errno.EMFILE, True), (errno.EPROTO, False)])
def test_accepting_while_the_system_refuses(
    number: int, evicts: bool, hurried: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server retries at intervals instead of constantly, and then resumes accepting.

    Idle connections are closed only to free what is short.
    """
    (acceptor,) = hurried.server.servers
    (listening,) = acceptor.sockets
    num_failed, num_evicted = 0, 0

    def evict_oldest() -> bool:
        nonlocal num_evicted
        num_evicted += 1
        return False

    class Refusing:
        """The listening socket while the system refuses to accept."""

        fileno = listening.fileno

        def accept(self) -> None:
            nonlocal num_failed
            num_failed += 1
            if num_failed == 3:
                acceptor.sockets = (listening,)
            raise OSError(number, "refused")

    monkeypatch.setattr(hurried.server.connections, "evict_oldest", evict_oldest)
    acceptor.sockets = (Refusing(),)
    ask(hurried.url)
    assert num_failed == 3
    assert num_evicted == (3 if evicts else 0)
