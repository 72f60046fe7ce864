"""Raw requests of every shape: each gets the right status in OpenAI's shape, without a hang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from metal_engine.settings.server_args import ServerArgs
from tests.server.test_lifecycle import process
from tests.support.raw_http import (
    BODY,
    H2C,
    JSON,
    SHAPES,
    WEBSOCKET,
    Shape,
    answers,
    chunk,
    chunked,
    crowd,
    exchange,
    get,
    post,
)
from tests.support.serving import Served, serve, wait_until
from tools.fixtures.fake_engine import fake_config

# Longer than any pause in these tests, but short enough to wait for.
SECONDS = {"timeout_read": 2.0, "timeout_keep_alive": 1.0}


@pytest.fixture(scope="module")
def hurried() -> Iterator[Served]:
    """Yield a server with short time limits."""
    with serve(args=ServerArgs(shutdown_timeout=1, **SECONDS)) as served:
        yield served


def problem(shape: Shape, received: bytes) -> str | None:
    """Return a description of the first wrong response to a shape, or None."""
    found = answers(received)
    if len(found) != len(shape.statuses):
        return f"{shape.name}: {[answer.status for answer in found]}"
    for answer, allowed in zip(found, shape.statuses, strict=True):
        if answer.status not in allowed:
            return f"{shape.name}: {answer.status}, {answer.body[:200]!r}"
        if answer.status >= 400 and answer.json().keys() != {"error"}:
            return f"{shape.name}: {answer.body[:200]!r}"
        if "x-request-id" not in answer.headers:
            return f"{shape.name}: no id"
    return None


async def send_all(port: int, shapes: list[Shape], piece: int | None = None) -> list[str]:
    """Send all shapes concurrently while polling /health. Return the problems."""
    num_healthy = 0

    async def watch() -> None:
        nonlocal num_healthy
        while True:
            received = await exchange(port, get(headers=b"Connection: close\r\n"))
            assert [answer.status for answer in answers(received)] == [200]
            num_healthy += 1
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    received = await asyncio.gather(*(exchange(port, shape.data, piece) for shape in shapes))
    if watching.done():
        await watching
    watching.cancel()
    assert num_healthy > 3
    return [p for shape, sent in zip(shapes, received, strict=True) if (p := problem(shape, sent)) is not None]


def test_every_shape(hurried: Served) -> None:
    assert asyncio.run(send_all(hurried.server.port, SHAPES)) == []


@pytest.mark.parametrize(
    "piece", [37, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_in_pieces(hurried: Served, piece: int) -> None:
    """The parser's state and the server's counters do not depend on where the bytes are cut."""
    short = [shape for shape in SHAPES if shape.at_any_pace and len(shape.data) <= 60 * piece]
    assert asyncio.run(send_all(hurried.server.port, short, piece)) == []


@pytest.mark.full
@pytest.mark.parametrize("piece", [None, 1000])
def test_every_shape_on_the_real_loop(piece: int | None) -> None:
    with process(**SECONDS) as server:
        shapes = [shape for shape in SHAPES if piece is None or (shape.at_any_pace and len(shape.data) <= 100 * piece)]
        assert asyncio.run(send_all(int(server.url.rpartition(":")[2]), shapes, piece)) == []


def test_upgrade_headers_do_not_discard_the_request_body(hurried: Served) -> None:
    whole = chunk(BODY[:7]) + chunk(BODY[7:]) + b"0\r\n\r\n"
    requests = [post()]
    for headers in (H2C, WEBSOCKET, H2C + WEBSOCKET, H2C.replace(b"h2c", b"H2C")):
        requests += [post(headers), chunked(whole, headers), post(b"X: y\r\n" + headers + b"Z: \xff\r\n")]

    async def texts() -> list[str]:
        sent = (exchange(hurried.server.port, data, piece) for data in requests for piece in (None, 11))
        return [answers(one)[0].json()["choices"][0]["text"] for one in await asyncio.gather(*sent)]

    first, *others = asyncio.run(texts())
    assert first and set(others) == {first}


def test_errors_have_the_shape_of_their_api(hurried: Served) -> None:
    starts = (b"X: a\x01\r\n", 400), (b"X: " + b"a" * 70_000, 431)

    async def check(path: bytes, keys: set[str], kind: type) -> None:
        requests = [(post(start).replace(b"/v1/completions", path), status) for start, status in starts]
        for data, status in [*requests, (get(path + b"?" + b"a" * 70_000), 431), (get(path)[:-2], 408)]:
            (answer,) = answers(await exchange(hurried.server.port, data))
            assert answer.status == status and answer.json().keys() == keys
            assert isinstance(answer.json()["error"], kind)

    async def check_all() -> None:
        await asyncio.gather(
            check(b"/v1/completions", {"error"}, dict),
            check(b"/v1/messages", {"type", "error"}, dict),
            check(b"/api/chat", {"error"}, str),
        )

    asyncio.run(check_all())


@pytest.fixture(scope="module")
def lasting() -> Iterator[Served]:
    """Yield a server whose responses can take minutes."""
    with serve(config=fake_config(max_model_len=100_000, num_blocks=20_000), step_time=0.005) as served:
        yield served


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_disconnect_of_a_pipelining_client_aborts_all_requests(lasting: Served, stream: bytes) -> None:
    with crowd(lasting.url, 1, post(body=b'{"prompt": "a", "max_tokens": 90000, "stream": ' + stream + b"}") + get()):
        wait_until(lambda: lasting.engine.stats.num_running == 1, "the first request to run")


BODIES = {
    "/v1/completions": b'{"prompt": "a"}',
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "a"}]}',
    "/v1/responses": b'{"input": "a"}',
    "/v1/messages": b'{"model": "org/fake-model", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}',
    "/v1/messages/count_tokens": b'{"model": "org/fake-model", "messages": [{"role": "user", "content": "a"}]}',
    "/tokenize": b'{"prompt": "a"}',
    "/detokenize": b'{"tokens": [97]}',
    "/api/generate": b'{"prompt": "a", "stream": false}',
}


def test_cross_origin_posts_without_json_content_type_get_a_400(hurried: Served) -> None:
    """Browsers send these across origins without a preflight: three types of body, and a request without a type."""
    kinds = (b"application/json", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")

    async def statuses(path: str) -> list[int]:
        data = post(b"Origin: https://evil.example\r\n", BODIES[path]).replace(b"/v1/completions", path.encode())
        requests = [*(data.replace(b"application/json", kind) for kind in kinds), data.replace(JSON, b"")]
        received = await asyncio.gather(*(exchange(hurried.server.port, request) for request in requests))
        return [answer.status for one in received for answer in answers(one)]

    async def all_statuses() -> list[list[int]]:
        return await asyncio.gather(*map(statuses, BODIES))

    assert asyncio.run(all_statuses()) == [[200, 400, 400, 400, 400]] * len(BODIES)
