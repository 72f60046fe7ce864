"""``/watch``: a snapshot and frames for each viewer, and no work without a viewer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from metal_engine.server.page import viewers as viewers_module
from metal_engine.server.page.viewers import MAX_VIEWERS, Viewer, Viewers
from metal_engine.settings.config import TEXT_ONLY
from tests.support.pool_picture import PoolPicture, events_of
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tools.fixtures.fake_engine import fake_config

# Shared, because making a client takes longer than most requests.
CLIENT = httpx.Client(timeout=DEADLINE)


@contextlib.contextmanager
def looking(served: Served) -> Iterator[tuple[PoolPicture, Iterator[tuple[str, dict[str, Any]]]]]:
    """Yield a viewer that has read its snapshot."""
    with CLIENT.stream("GET", served.url + "/watch") as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        picture, events = PoolPicture(), events_of(response.iter_lines())
        while not picture.is_whole:
            picture.apply(*next(events))
        yield picture, events


def wait_for_nobody(served: Served) -> None:
    viewers = served.server.config.app.state.viewer_registry.of(None)
    wait_until(lambda: not len(viewers), "viewers to leave")
    wait_until(lambda: served.core._observer is None, "the watch to end")


@pytest.fixture
def small() -> Iterator[Served]:
    """Yield a server with blocks for three requests of four."""
    with serve(config=fake_config(num_blocks=24, max_num_batched_tokens=32)) as served:
        yield served
        wait_for_nobody(served)


def complete(served: Served, prompt: str, max_tokens: int, n: int = 1) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "ignore_eos": True}
    assert CLIENT.post(f"{served.url}/v1/completions", json=body).status_code == 200


def test_the_snapshot_describes_models_pool_limits_and_stats(small: Served) -> None:
    complete(small, "a" * 40, 2)
    with httpx.stream("GET", small.url + "/watch?seconds=0") as response:
        (name, first), *rest = events_of(response.iter_lines())
    assert name == "snapshot" and first["models"] == [MODEL]
    assert first["pool"] == {"num_blocks": 24, "block_size": 8, "num_state_slots": 0, "prefix_caching": True}
    assert first["limits"]["max_num_batched_tokens"] == 32
    assert first["model"]["image_refusal"] == TEXT_ONLY
    assert first["stats"]["generation_tokens"] == 2
    assert [name for name, _ in rest] == ["frame"] * len(rest)


def test_frames_show_the_pool_through_an_exhaustion(small: Served) -> None:
    complete(small, "before anybody looked, a prompt of some blocks", 2)
    with looking(small) as (picture, events):
        picture.check(small.core.scheduler)
        num_before = small.runner.num_steps
        complete(small, "b" * 30, 24, n=6)
        num_preemptions = small.engine.stats.num_preemptions
        assert num_preemptions, "the pool was not exhausted"
        for one in events:
            picture.apply(*one)
            if not picture.requests and one[1]["stats"]["generation_tokens"] == 2 + 6 * 24:
                break
        picture.check(small.core.scheduler)
        assert len(picture.preempted) == num_preemptions
        assert sum(row["steps"] for row in picture.rows) == small.runner.num_steps - num_before
        with looking(small) as (second, _):  # a later viewer gets the same state
            assert second.cached == picture.cached and second.tables == picture.tables


def test_an_abort_is_sent_to_viewers_even_if_no_step_follows(small: Served) -> None:
    with looking(small) as (picture, events):
        small.runner.step_time = 0.01
        body = {"prompt": "a" * 20, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", small.url + "/v1/completions", json=body, timeout=DEADLINE) as answer:
            lines = answer.iter_lines()  # the connection closes when the last reference is dropped
            next(lines)
            while not picture.tables:
                picture.apply(*next(events))
            (request,) = picture.requests.values()
            assert request["prompt_tokens"] == 20 and len(request["id"]) == 12
        while picture.tables:
            picture.apply(*next(events))
        small.runner.step_time = 0.0
        wait_until(lambda: not small.core.has_requests, "the abort")
        picture.check(small.core.scheduler)


def test_steps_are_not_observed_without_viewers(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def forbidden(*_: object) -> None:
        calls.append("called")

    assert small.core._observer is None
    with looking(small):
        assert small.core._observer is not None
    wait_for_nobody(small)
    monkeypatch.setattr("metal_engine.engine.step_observer.StepObserver.planned", forbidden)
    monkeypatch.setattr("metal_engine.engine.step_observer.StepObserver.flush_frames", forbidden)
    monkeypatch.setattr(viewers_module, "event", forbidden)
    complete(small, "a" * 30, 5)
    assert not calls


def test_an_idle_engine_sends_nothing(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with looking(small):
        frames: list[object] = []
        monkeypatch.setattr(Viewer, "put", lambda self, data: frames.append(data))
        flush_frames = small.core.flush_frames
        complete(small, "a", 1)
        wait_until(lambda: len(frames) >= 1, "the frame of the request")
        num_frames = len(frames)
        assert not flush_frames() and len(frames) == num_frames


def test_there_are_so_many_viewers_at_most(small: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            stack.enter_context(looking(small))
        response = CLIENT.get(small.url + "/watch")
        assert response.status_code == 503 and response.headers["retry-after"] == "10"
        assert response.json()["error"]["code"] == "overloaded"
        complete(small, "a", 2)
    wait_for_nobody(small)
    with looking(small):
        pass


@pytest.mark.parametrize("seconds", ["-1", "x", "1e9", "nan"])
def test_seconds_must_be_sensible(small: Served, seconds: str) -> None:
    response = CLIENT.get(small.url + f"/watch?seconds={seconds}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "seconds"


def test_a_stream_ends_in_time_even_if_events_always_wait(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(viewer: Viewer) -> bytes:
        viewer._has_more.set()  # the next event has arrived already
        return b"data"

    monkeypatch.setattr(Viewer, "take", take)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async for _ in Viewers(small.engine, [MODEL]).events(0.1):
            assert loop.time() < began + DEADLINE / 6

    asyncio.run(scenario())


def test_a_viewer_over_the_unread_limit_must_restart_from_a_snapshot() -> None:
    viewer = Viewer()
    viewer.must_begin = False
    for _ in range(viewers_module.MAX_UNREAD):
        viewer.put(b"a")
    assert not viewer.must_begin
    viewer.put(b"a")
    assert viewer.must_begin and viewer.take() == b""
    viewer.must_begin = False
    viewer.put(b"a" * (viewers_module.MAX_UNREAD_BYTES + 1))
    assert viewer.must_begin and viewer.take() == b""


def test_a_viewer_that_does_not_read_does_not_delay_requests(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow viewer has a bounded queue of events, and the state that it finally reads is right."""
    monkeypatch.setattr(viewers_module, "MAX_UNREAD", 4)
    monkeypatch.setattr("metal_engine.engine.step_observer.FRAME_SECONDS", 0.0)

    async def scenario() -> PoolPicture:
        viewers = Viewers(small.engine, [MODEL])
        slow = viewers.events()
        text = (await anext(slow)).decode()
        for i in range(8):
            await asyncio.to_thread(complete, small, f"{i}" * 20, 8)
        (viewer,) = viewers._viewers
        assert len(viewer._unread) <= 4
        picture = PoolPicture()
        while True:
            for one in events_of(text.splitlines()):
                picture.apply(*one)
            if picture.num_snapshots == 2 and picture.is_whole:
                break
            text = (await anext(slow)).decode()
        await slow.aclose()
        assert not len(viewers)
        return picture

    asyncio.run(scenario()).check(small.core.scheduler)


def test_server_shutdown_ends_watch_streams() -> None:
    with serve() as served:
        with looking(served) as (_, events):
            asyncio.run_coroutine_threadsafe(served.server._lifecycle.drain(1), served.loop).result(DEADLINE)
            assert list(events) is not None  # the stream has ended
        wait_for_nobody(served)


def test_a_server_that_ends_has_no_new_viewers() -> None:
    with serve() as served:
        asyncio.run_coroutine_threadsafe(served.server._lifecycle.drain(1), served.loop).result(DEADLINE)
        with CLIENT.stream("GET", served.url + "/watch") as response:
            assert response.status_code == 503
            assert json.loads(response.read())["error"]["code"] == "shutting_down"
