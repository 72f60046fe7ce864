"""The engine's thread, with an engine that only takes time."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from metal_engine.engine.async_engine import AsyncEngine, Reservation
from metal_engine.engine.engine_thread import EngineThread, _Call
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.transport import EngineDeadError
from metal_engine.request import PreparedRequest, RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import RunnerLostError
from metal_engine.token_rules import NO_RULES
from tests.support.serving import wait_until
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import FakeRunner, fake_config, generated, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine


class SlowCore:
    """Engine that takes 4 ms to add a request, and never finishes a request."""

    @property
    def core(self) -> Any:
        return self

    def __init__(self) -> None:
        self.log: list[str] = []

    @property
    def has_requests(self) -> bool:
        return "add" in self.log

    @property
    def request_ids(self) -> list[str]:
        return []

    def add_request(self, *args: Any, **options: Any) -> None:
        time.sleep(0.004)
        self.log.append("add")

    def dispatch_second_part(self) -> None:
        """Does nothing, because no device is used."""

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Ignore the callback, because the engine has one rank."""

    def step(self) -> list[RequestOutput]:
        self.log.append("step")
        return []

    def close(self) -> None:
        pass


def test_an_interrupted_start_ends_the_thread_after_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()

    def build() -> SteppedEngine:
        interrupted.wait()
        return tiny_engine()

    def interrupt() -> None:
        raise KeyboardInterrupt

    thread = EngineThread(build)
    monkeypatch.setattr(thread._ready, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start(lambda outputs: None)
    interrupted.set()
    thread._thread.join(60)
    assert not thread._thread.is_alive()


def test_steps_go_on_while_many_requests_come_in() -> None:
    core: Any = SlowCore()
    thread = EngineThread(lambda: core)
    prepared = PreparedRequest([1], SamplingParams(), 16, NO_RULES)
    for i in range(20):
        thread.submit(str(i), prepared)
    thread.start(lambda outputs: None)
    wait_until(lambda: core.log.count("add") == 20, "all requests")
    assert thread.shutdown()
    between_steps = "".join("+" if entry == "add" else " " for entry in core.log).split()
    # The requests of 10 ms, and the one being added at that time.
    assert sum(map(len, between_steps)) == 20 and max(map(len, between_steps)) <= 4


def test_both_parts_of_a_step_are_dispatched_before_the_inbox_is_processed() -> None:
    """The rest of a two-part GPU step is dispatched before the inbox is processed, which may take 10 ms."""
    found: list[tuple[bool, bool]] = []
    all_came, ended = threading.Event(), threading.Event()

    def build() -> SteppedEngine:
        engine = tiny_engine(behind=True)
        add = engine.core.add_request

        def looked(*args: Any, **options: Any) -> None:
            look()
            add(*args, **options)

        engine.core.add_request = looked  # type: ignore[method-assign]
        return engine

    def look() -> None:
        found.extend((step.is_dispatched, step.has_second_part) for step in engine.runner._steps)

    def on_outputs(outputs: list[RequestOutput]) -> None:
        assert not any(output.error for output in outputs)
        if not all_came.is_set():  # each time with a step in flight
            thread.submit(str(len(found)), prepared)
            thread._inbox.put(_Call(look, Future()))
            if len(found) > 8:
                all_came.set()
        elif not engine.core.request_ids:
            ended.set()

    thread = EngineThread(build)
    engine = thread.start(on_outputs)
    prepared = engine.prepare([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    thread.submit("first", prepared)
    assert ended.wait(60)
    assert thread.shutdown()
    assert len(found) > 8 and set(found) == {(True, False)}


def test_requests_fail_after_a_rank_loss_even_if_the_step_never_ends() -> None:
    config = fake_config()
    runner = FakeRunner(config.cache.block_size)
    runner.running.clear()
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread = EngineThread(lambda: SteppedEngine(config, runner, tiny_tokenizer()))
    prepared = thread.start(outputs.put).prepare([1, 2, 3], SamplingParams(max_tokens=4))
    thread.submit("a", prepared)
    wait_until(lambda: runner.has_arrived, "the step")
    thread.submit("b", prepared)
    error = RunnerLostError("rank 1 (here) has gone")
    threading.Thread(target=runner.lose_rank, args=(error,)).start()
    told = outputs.get(timeout=60)
    message = "the engine has stopped: rank 1 (here) has gone"
    assert {output.request_id: output.error for output in told} == dict.fromkeys("ab", message)
    assert thread.error is error
    with pytest.raises(EngineDeadError, match="rank 1"):
        thread.submit("c", prepared)
    runner.running.set()


def test_a_step_that_finds_ranks_lost_ends_the_engine() -> None:
    """A lost rank ends the engine. Other errors of a step end only its requests."""
    config = fake_config()
    runner = FakeRunner(config.cache.block_size)
    runner.raise_next = RunnerLostError("rank 2 (there) has gone")
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread = EngineThread(lambda: SteppedEngine(config, runner, tiny_tokenizer()))
    thread.submit("a", thread.start(outputs.put).prepare([1, 2, 3], SamplingParams(max_tokens=4)))
    assert [output.error for output in outputs.get(timeout=60)] == ["the engine has stopped: rank 2 (there) has gone"]
    assert isinstance(thread.error, RunnerLostError)


def test_a_request_of_another_engine_continues() -> None:
    config = fake_config()
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    runner = FakeRunner(config.cache.block_size)
    thread = EngineThread(lambda: SteppedEngine(config, runner, tiny_tokenizer()))
    core = thread.start(outputs.put)
    prompt = [1, 2, 3]
    tokens = generated(prompt, 9)
    so_far = RequestOutput("a", tokens[:4], num_cached_tokens=2, num_predicted_tokens=(3, 1))
    thread.submit("a", core.prepare(prompt, SamplingParams(max_tokens=9)), seed=7, so_far=so_far)
    received = [outputs.get(timeout=60)[0] for _ in range(5)]
    assert [token_id for output in received for token_id in output.token_ids] == tokens[4:]
    assert [output.finish_reason for output in received] == [None] * 4 + ["length"]
    assert {(output.num_cached_tokens, output.num_predicted_tokens) for output in received} == {(2, (3, 1))}
    assert runner.seen_seeds == [7]
    assert thread.shutdown()
    metrics = core.core.metrics
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.generation_tokens.sum) == (0, 5, 9)


def test_a_waiting_request_fails_if_another_request_takes_the_same_id() -> None:
    engine = AsyncEngine(cast(Any, None))
    engine._client = cast(Any, SimpleNamespace(submit=lambda *_: None, abort=lambda request_id: None))
    prepared = RequestPreparer(fake_config(), tiny_tokenizer()).prepare([1, 2, 3], SamplingParams())
    reservation = Reservation(engine, [3] * 3, num_at_once=1)

    async def begin(request_id: str, reservation: Reservation | None = None) -> asyncio.Task[list[RequestOutput]]:
        async def run() -> list[RequestOutput]:
            return [output async for output in engine.generate(request_id, prepared, reservation=reservation)]

        task = asyncio.ensure_future(run())
        await asyncio.sleep(0)
        return task

    def finish(request_id: str) -> None:
        engine._queues[request_id].put(RequestOutput(request_id, finish_reason="length"))

    async def run_all() -> None:
        first = await begin("a", reservation)
        waiting, other = await begin("b", reservation), await begin("b")
        finish("a")
        with pytest.raises(ValueError, match="'b' is in use"):
            await asyncio.wait_for(waiting, 60)
        finish("b")
        last = await begin("c", reservation)
        finish("c")
        await asyncio.gather(first, other, last)

    asyncio.run(run_all())
