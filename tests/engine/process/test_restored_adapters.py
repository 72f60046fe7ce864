"""LoRA adapters after the death of an engine's process: a new process has them before the requests that use them."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.process import wire
from metal_engine.engine.process.remote import EngineCalls
from metal_engine.engine.process.remote_adapters import RemoteAdapters
from metal_engine.errors import AdapterError
from metal_engine.lora_adapter import Adapter
from metal_engine.request import RequestOutput, merge_outputs
from metal_engine.sampling_params import SamplingParams
from tests.support import adapters
from tests.support.engine_child import is_running, pid_of, started
from tests.support.serving import wait_until
from tests.support.tiny_engine import tiny_reference
from tools.fixtures.fake_engine import byte_ids

PROMPT = byte_ids("Once upon a time")
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, logprobs=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with the adapters a, b, c and d."""
    model = tiny_reference()
    for seed, name in enumerate("abcd"):
        adapters.write_mlx_lm(tmp_path / name, adapters.products(model, adapters.ALL, 2, seed))
    return tmp_path


@pytest.fixture
def engine(root: Path) -> Iterator[AsyncEngine]:
    """Yield an engine with adapter a, and slots for three more."""
    engine = started("adapted", folder=str(root / "a"), max_loras=4, max_restarts=10)
    yield engine
    engine.shutdown()


def find(engine: AsyncEngine, name: str) -> Adapter:
    adapter = engine.adapters.find(name)
    assert adapter is not None
    return adapter


class Requests:
    """Requests of adapters. Each is held by the engine from the call of :meth:`begin` on."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._engine = engine
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, request_id: str, adapter: Adapter | None) -> None:
        """Begin a request, and wait for its first token."""
        (prepared,) = self._engine.preparer.prepare_all([PROMPT], PARAMS, adapter=adapter)
        self.outputs[request_id] = received = []

        async def run() -> None:
            async for output in self._engine.generate(request_id, prepared):
                received.append(output)

        self._tasks.append(asyncio.ensure_future(run()))
        while not received:
            await asyncio.sleep(0.001)

    async def merged(self) -> dict[str, RequestOutput]:
        await asyncio.gather(*self._tasks)
        return {request_id: merge_outputs(outputs) for request_id, outputs in self.outputs.items()}


async def begin_all(engine: AsyncEngine, root: Path) -> Requests:
    """Begin a request without an adapter, and requests with current, replaced and unloaded adapters."""
    requests = Requests(engine)

    async def load(name: str, path: str, **options: Any) -> Adapter:
        return await asyncio.to_thread(engine.load_adapter, name, path, root, **options)

    await load("x", "b")
    await requests.begin("replaced", find(engine, "x"))
    await load("x", "c", in_place=True)
    await requests.begin("current", find(engine, "x"))
    await load("y", "d")
    await requests.begin("unloaded", find(engine, "y"))
    assert engine.adapters is not None and engine.adapters.unload("y")
    await requests.begin("start", find(engine, "a"))
    await requests.begin("base", None)
    return requests


async def die(engine: AsyncEngine) -> None:
    while not is_running(pid_of(engine)):  # the next process has not been started yet
        await asyncio.sleep(0.001)
    os.kill(pid_of(engine), signal.SIGKILL)
    while not engine.is_restarting:
        await asyncio.sleep(0.001)


def check_equal(ours: dict[str, RequestOutput], theirs: dict[str, RequestOutput], lost: tuple[str, ...] = ()) -> None:
    assert ours.keys() == theirs.keys()
    for name, output in ours.items():
        if name in lost:
            continue
        assert output.error is None, name
        assert output.token_ids == theirs[name].token_ids, name
        for a, b in zip(output.logprobs or [], theirs[name].logprobs or [], strict=True):
            assert abs(a.logprob - b.logprob) < 1e-3


def unload_all(engine: AsyncEngine) -> None:
    for name in ("x", "y"):
        engine.adapters.unload(name)


def test_requests_continue_with_their_adapters(engine: AsyncEngine, root: Path) -> None:
    async def run(num_deaths: int) -> dict[str, RequestOutput]:
        requests = await begin_all(engine, root)
        for _ in range(num_deaths):
            await die(engine)
        return await requests.merged()

    undisturbed = asyncio.run(run(0))
    assert len({tuple(output.token_ids) for output in undisturbed.values()}) == 5, "the adapters matter"
    unload_all(engine)
    check_equal(asyncio.run(run(2)), undisturbed)
    assert engine.adapters is not None and [one.name for one in engine.adapters.adapters] == ["a", "x"]
    # Only the adapters a and x take slots.
    for name in ("x1", "x2"):
        wait_until(lambda name=name: loads(engine, name, root), "a free slot")  # type: ignore[misc]
    with pytest.raises(AdapterError, match="no room"):
        engine.load_adapter("x3", "d", root)
    with pytest.raises(AdapterError, match="has already been loaded"):
        engine.load_adapter("x", "c", root)


def loads(engine: AsyncEngine, name: str, root: Path) -> bool:
    try:
        engine.load_adapter(name, "d", root)
    except AdapterError:
        return False
    return True


def test_adapters_that_are_gone_or_have_changed(
    engine: AsyncEngine, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(*, changed: bool) -> dict[str, RequestOutput]:
        requests = await begin_all(engine, root)
        if changed:
            shutil.rmtree(root / "c")
            adapters.write_mlx_lm(root / "d", adapters.products(tiny_reference(), adapters.ALL, 2, 9))
            await die(engine)
        return await requests.merged()

    undisturbed = asyncio.run(run(changed=False))
    unload_all(engine)
    found = asyncio.run(run(changed=True))
    check_equal(found, undisturbed, lost=("current", "unloaded"))
    lost = "the LoRA adapter {!r} was lost when the engine's process ended: "
    assert (found["current"].error or "").startswith(lost.format("x")), "its folder is gone"
    assert found["unloaded"].error == lost.format("y") + "its files have changed since it was loaded"
    assert engine.adapters is not None and engine.adapters.find("x") is None
    assert "the LoRA adapter 'x' must be loaded again" in caplog.text
    # The new files can be loaded under both names.
    for name in ("x", "y"):
        assert engine.load_adapter(name, "d", root).name == name


def test_a_load_returns_the_adapter_even_if_unloaded_before_the_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load returns the adapter, as the registry in the process of the engine does."""
    calls = EngineCalls(lambda message: None, threading.RLock())
    remote = RemoteAdapters(calls, [])

    def wait(reply: Future[wire.Reply]) -> wire.Reply:
        calls.resolve(wire.Reply(0, wire.LoadedAdapter("x", "folder", 1, 2, "fingerprint", None)))
        assert remote.unload("x")
        return reply.result()

    monkeypatch.setattr(calls, "wait", wait)
    assert remote.load("x", "folder", Path(), in_place=False).name == "x"
    assert remote.find("x") is None


def test_find_returns_an_adapter_in_use_during_a_drop_of_unused_adapters() -> None:
    calls = EngineCalls(lambda message: None, threading.RLock())
    remote = RemoteAdapters(calls, [wire.LoadedAdapter("x", "folder", 1, 2, "fingerprint", None)])
    used, found = remote.find("x"), queue.SimpleQueue()  # type: queue.SimpleQueue[Adapter | None]

    class Table(dict[str, Adapter]):
        def pop(self, *arguments: Any) -> Adapter:
            adapter: Adapter = super().pop(*arguments)
            finder = threading.Thread(target=lambda: found.put(remote.find("x")))
            finder.start()
            finder.join(0.2)  # ends only if it does not wait
            return adapter

    remote._adapters = Table(remote._adapters)
    assert not remote._drop_unused("x")
    assert found.get(timeout=60) is used


def test_a_reply_may_arrive_before_its_adapter_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = EngineCalls(lambda message: sent.set(), threading.RLock())
    sent = threading.Event()
    remote = RemoteAdapters(calls, [])
    hold = remote._hold

    def hold_late(*args: Any) -> Adapter:
        time.sleep(0.2)
        return hold(*args)

    def resolve() -> None:
        sent.wait()
        calls.resolve(wire.Reply(0, wire.LoadedAdapter("x", "folder", 1, 2, "fingerprint", None)))

    monkeypatch.setattr(remote, "_hold", hold_late)
    thread = threading.Thread(target=resolve)
    thread.start()
    assert remote.load("x", "folder", Path(), in_place=False).name == "x"
    thread.join()
