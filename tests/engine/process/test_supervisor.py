"""Engines whose processes die: requests continue in new processes, with the same outputs as in one."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metal_engine.cancellation import Cancelled, caller_disconnected
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.process import wire
from metal_engine.engine.process.engine_process import EngineProcess
from metal_engine.engine.process.remote import EngineCalls, RemoteGrammars
from metal_engine.engine.step_observer import Frame
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import PreparedRequest, RequestOutput, merge_outputs
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.engine_child import is_running, pid_of, started
from tests.support.serving import wait_until
from tools.fixtures.fake_engine import byte_ids, generated

KILLER = 7  # token that ends a process in the step that computes it
INNOCENTS = [byte_ids(f"prompt {i} " + "x" * (5 * i)) for i in range(8)]


async def answer(
    engine: AsyncEngine, request_id: str, prepared: PreparedRequest, received: Counter[str]
) -> RequestOutput:
    """Return all outputs of a request, merged, and count them. An error keeps the tokens before it."""
    outputs = []
    async for output in engine.generate(request_id, prepared):
        outputs.append(output)
        received[request_id] += 1
    return merge_outputs(outputs)


def answers(engine: AsyncEngine, requests: Sequence[PreparedRequest], num_deaths: int = 0) -> list[RequestOutput]:
    """Run requests together. The process is killed while they run, each time after all of them have received output."""
    rng = random.Random(num_deaths)

    async def run() -> list[RequestOutput]:
        received: Counter[str] = Counter()
        tasks = {str(i): asyncio.ensure_future(answer(engine, str(i), one, received)) for i, one in enumerate(requests)}
        for _ in range(num_deaths):
            before = received.copy()
            while not all(task.done() or received[name] > before[name] for name, task in tasks.items()):
                await asyncio.sleep(0.001)
            await asyncio.sleep(rng.random() * 0.02)
            os.kill(pid_of(engine), rng.choice([signal.SIGKILL, signal.SIGABRT]))
            while not engine.is_restarting:
                await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks.values())

    return asyncio.run(run())


def num_deaths(engine: AsyncEngine) -> int:
    return sum(engine.metrics.restart.counts)


def mixed_requests(engine: AsyncEngine) -> list[PreparedRequest]:
    """Return requests that use most of what a request can have."""
    base = {"max_tokens": 24, "ignore_eos": True}
    each = [
        SamplingParams(temperature=0.0, logprobs=3, **base),
        SamplingParams(temperature=0.8, seed=5, logprobs=0, **base),
        SamplingParams(temperature=0.8, seed=6, presence_penalty=1.0, logit_bias={65: 5.0}, **base),
        SamplingParams(temperature=1.0, seed=7, stop=["e", "QQ"], include_stop_str_in_output=True, max_tokens=24),
        SamplingParams(temperature=0.8, seed=8, prompt_logprobs=2, bad_words=["a"], min_tokens=12, max_tokens=24),
        SamplingParams(
            temperature=0.9, seed=9, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-f]{20}")
        ),
    ]
    prompts = [byte_ids(f"{i}: " + "some text " * i) for i in (0, 3)]
    prepared = [one for params in each for one in engine.preparer.prepare_all(prompts, params)]
    return prepared + engine.preparer.prepare_pooling(prompts, PoolingParams(pooling_type="MEAN"))


@pytest.mark.parametrize(
    ("build", "options", "deaths"),
    [
        pytest.param("tiny", {"num_blocks": 512}, 2, id="attention"),
        pytest.param("keeping", {"what": "recurrent states"}, 1, id="hybrid"),
        pytest.param("keeping", {"what": "recurrent states"}, 3, id="hybrid thrice", marks=pytest.mark.full),
        pytest.param("keeping", {"what": "drafts"}, 3, id="drafts", marks=pytest.mark.full),
        pytest.param("keeping", {"what": "draft model"}, 3, id="draft model", marks=pytest.mark.full),
    ],
)
def test_answers_are_whole_and_equal(build: str, options: dict[str, Any], deaths: int) -> None:
    # Slow steps: requests still run when their process is killed, even if this process is delayed.
    engine = started(build, max_restarts=100, step_seconds=0.025, **options)
    try:
        requests = mixed_requests(engine)
        undisturbed = answers(engine, requests)
        before = dict(engine.metrics.num_finished)
        disturbed = answers(engine, requests, num_deaths=deaths)
        assert num_deaths(engine) == deaths and engine.metrics.num_resumed_requests >= deaths
        for ours, theirs in zip(disturbed, undisturbed, strict=True):
            assert ours.error is None
            for name in ("text", "token_ids", "token_ends", "finish_reason", "stop_reason", "num_output_tokens"):
                assert getattr(ours, name) == getattr(theirs, name), name
            for name in ("logprobs", "prompt_logprobs"):
                mine, other = getattr(ours, name) or [], getattr(theirs, name) or []
                assert len(mine) == len(other)
                for a, b in zip(mine, other, strict=True):
                    assert a is b is None or abs(a.logprob - b.logprob) < 1e-3
            assert (ours.pooled is None) == (theirs.pooled is None)
            if ours.pooled is not None and theirs.pooled is not None:
                assert abs(ours.pooled - theirs.pooled).max() < 1e-4
        # Metrics continue. A process sends metrics every 0.1 s, so the ends of the last 0.1 s are missing. Ends by stop
        # strings can be missing, too.
        after = engine.metrics.num_finished
        assert all(after[reason] >= number for reason, number in before.items())
        num_ends = sum(not end.stop_reason for end in undisturbed)
        assert sum(after.values()) - sum(before.values()) > num_ends / 2
    finally:
        engine.shutdown()
    assert not is_running(pid_of(engine))


@pytest.mark.parametrize("num_tokens", [pytest.param(0, marks=pytest.mark.full), 5])
def test_a_request_that_kills_fails_alone(num_tokens: int) -> None:
    """Its prompt has the deadly token, or the deadly length is reached after some tokens."""
    engine = started("deadly", max_restarts=10, token=KILLER, num_tokens=num_tokens)
    try:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        prompts = [*INNOCENTS[:4], [KILLER, 1, 2], *INNOCENTS[4:]]
        ends = answers(engine, engine.preparer.prepare_all(prompts, params))
        for prompt, end in zip(prompts, ends, strict=True):
            if prompt[0] == KILLER:
                assert end.error == "the engine's process has ended 3 times while it computed this request"
            else:
                assert end.error is None and end.token_ids == generated(prompt, 9)
        assert num_deaths(engine) == 3
        assert engine.metrics.num_finished["error"] == 1 and engine.metrics.num_finished["length"] == 8
    finally:
        engine.shutdown()


def test_requests_resume_without_errors_after_the_engine_thread_ends(tmp_path: Path) -> None:
    """The errors of its requests do not reach the clients."""
    engine = started("mortal", max_restarts=10, marker=str(tmp_path / "marker"))
    try:
        requests = engine.preparer.prepare_all(INNOCENTS, SamplingParams(max_tokens=90, ignore_eos=True))
        ends = answers(engine, requests)
        assert [end.error for end in ends] == [None] * 8
        assert [end.token_ids for end in ends] == [generated(prompt, 90) for prompt in INNOCENTS]
        assert num_deaths(engine) == 1
    finally:
        engine.shutdown()


def test_too_many_deaths_end_the_engine() -> None:
    engine = started("deadly", max_restarts=1, token=KILLER, num_tokens=0)
    try:
        (end,) = answers(engine, engine.preparer.prepare_all([[KILLER]], SamplingParams(max_tokens=9)))
        assert end.finish_reason == "error" and end.error is not None
        assert end.error.startswith("the engine has stopped: the engine's process has ended with SIGKILL")
        assert end.error.endswith("; more than 1 new processes in a row without output would be needed")
        wait_until(lambda: engine.error is not None, "the error")
        assert num_deaths(engine) == 1 and not engine.is_restarting
    finally:
        engine.shutdown()


FAULTS = {
    "hang": "hangs: it has computed no step for 1.5 s",
    "load": "the model cannot be loaded: the engine's process has ended with SIGKILL",
    "abort": "has ended with SIGABRT (last words: ",
    "loading": "hangs: it has been loading the model for",
    "refused": "--block-size is wrong",
    "device": "3 steps in a row have failed, the last with RuntimeError: [METAL] Command buffer execution failed",
    "stop": "hangs: it has computed no step for 1.5 s",
    "nonsense": "has sent an invalid message",
}


@pytest.mark.parametrize(
    "names",
    [("abort", "load", "device", "stop"), pytest.param(tuple(FAULTS), marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_answers_are_whole_whatever_fails(
    names: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process fails in another way. The log has one line about each failure, and no request hangs."""
    faults = {name: FAULTS[name] for name in names}
    limits = {"step_seconds": 1.5, "load_seconds": 10.0}
    engine = started("faulty", max_restarts=30, limits=limits, folder=str(tmp_path), faults=list(faults))
    try:
        with caplog.at_level(logging.ERROR):
            requests = engine.preparer.prepare_all(INNOCENTS, SamplingParams(max_tokens=300, ignore_eos=True))
            ends = answers(engine, requests)
        assert [end.error for end in ends] == [None] * 8
        assert [end.token_ids for end in ends] == [generated(prompt, 300) for prompt in INNOCENTS]
        lines = [record.getMessage() for record in caplog.records if "a new process continues" in record.getMessage()]
        assert len(lines) >= len(faults) and not any("\n" in line or "\x1b" in line for line in lines)
        later = iter(lines)  # a busy machine may cause further hangs
        for fault, message in faults.items():
            line = next((line for line in later if message in line), "")
            assert line, fault
            assert fault != "abort" or "terminate called: [METAL] a fault" in line
    finally:
        engine.shutdown()


def test_the_spare_process_is_next() -> None:
    engine = started("fake", max_restarts=10, limits={"spare_delay": 0.0})

    def spare() -> EngineProcess:
        spawner = engine._transport._restartable._spawner
        wait_until(lambda: spawner.spare is not None, "the spare process")
        return spawner.spare

    try:
        first, second = pid_of(engine), spare()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: num_deaths(engine) == 1, "the restart")
        assert pid_of(engine) == second.popen.pid
        third = spare()
        third.popen.kill()
        third.popen.wait()
        os.kill(second.popen.pid, signal.SIGKILL)
        wait_until(lambda: num_deaths(engine) == 2, "the restart")
        assert pid_of(engine) not in (second.popen.pid, third.popen.pid)
        requests = engine.preparer.prepare_all(INNOCENTS, SamplingParams(max_tokens=9, ignore_eos=True))
        assert [end.token_ids for end in answers(engine, requests)] == [generated(one, 9) for one in INNOCENTS]
        last = spare()
    finally:
        engine.shutdown()
    assert not is_running(last.popen.pid) and not is_running(pid_of(engine))


def test_signals_to_all_processes_lose_no_request() -> None:
    """Service managers and terminals send them to the engine's process, too. The server ends it."""
    engine = started("fake", max_restarts=10)
    try:
        pid = pid_of(engine)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        requests = engine.preparer.prepare_all(INNOCENTS, SamplingParams(max_tokens=9, ignore_eos=True))
        assert [end.token_ids for end in answers(engine, requests)] == [generated(one, 9) for one in INNOCENTS]
        assert pid_of(engine) == pid and num_deaths(engine) == 0
    finally:
        engine.shutdown()


def test_requests_and_calls_wait_for_the_new_process() -> None:
    engine = started("fake", max_restarts=10)
    try:
        os.kill(pid_of(engine), signal.SIGKILL)
        wait_until(lambda: engine.is_restarting, "the death")
        # This call gets its reply from the new process.
        regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        assert engine.preparer.rules_for(regex).grammar is not None
        os.kill(pid_of(engine), signal.SIGKILL)
        wait_until(lambda: engine.is_restarting, "the death")
        requests = engine.preparer.prepare_all(INNOCENTS, SamplingParams(max_tokens=9, ignore_eos=True))
        assert engine.error is None
        found = answers(engine, requests)
        assert [end.token_ids for end in found] == [generated(prompt, 9) for prompt in INNOCENTS]
        assert num_deaths(engine) == 2
    finally:
        engine.shutdown()


def test_a_new_process_does_not_make_the_grammar_of_a_client_that_has_disconnected() -> None:
    sent: list[wire.Message] = []
    calls = EngineCalls(sent.append, threading.RLock())
    disconnected = threading.Event()
    disconnected.set()
    context = contextvars.copy_context()
    context.run(caller_disconnected.set, disconnected)
    with pytest.raises(Cancelled):
        context.run(RemoteGrammars(calls).grammar_for, StructuredOutputsParams(regex="a"), None, np.array([], np.int32))
    gc.collect()
    calls.release()
    assert [type(one) for one in sent] == [wire.MakeGrammar, wire.Release] and calls.messages() == []


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="the system has no real-time signals")
def test_a_signal_without_a_name(caplog: pytest.LogCaptureFixture) -> None:
    """Real-time signals other than the first and the last have no name."""
    engine = started("fake", max_restarts=10)
    try:
        number = signal.SIGRTMIN + 1
        with caplog.at_level(logging.ERROR):
            os.kill(pid_of(engine), number)
            requests = engine.preparer.prepare_all(INNOCENTS, SamplingParams(max_tokens=9, ignore_eos=True))
            assert [end.token_ids for end in answers(engine, requests)] == [generated(one, 9) for one in INNOCENTS]
        assert f"the engine's process has ended with signal {int(number)}" in caplog.text
    finally:
        engine.shutdown()


def test_a_fault_of_the_supervisor_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests get an error, and do not wait forever."""
    engine = started("fake", max_restarts=10, step_time=0.005)

    def fail() -> bool:
        raise ZeroDivisionError("a fault")

    async def run() -> RequestOutput:
        received: Counter[str] = Counter()
        (prepared,) = engine.preparer.prepare_all([INNOCENTS[0]], SamplingParams(max_tokens=400, ignore_eos=True))
        request = asyncio.ensure_future(answer(engine, "a", prepared, received))
        while not received:
            await asyncio.sleep(0.01)
        os.kill(pid_of(engine), signal.SIGKILL)
        return await asyncio.wait_for(request, 20)

    try:
        monkeypatch.setattr(engine._transport._restartable, "may_restart", fail)
        end = asyncio.run(run())
        problem = "the engine has stopped: it cannot be kept alive: ZeroDivisionError: a fault"
        assert end.finish_reason == "error" and end.error == problem and str(engine.error) == problem
    finally:
        engine.shutdown()


def test_a_watch_begins_again() -> None:
    engine = started("fake", max_restarts=10, step_time=0.005)

    async def run() -> list[Frame]:
        frames: list[Frame] = []
        engine.watch(frames.append)
        # 300 steps take 1.5 s: the request still runs when its process is killed, even if this process is delayed.
        (prepared,) = engine.preparer.prepare_all([INNOCENTS[0]], SamplingParams(max_tokens=300, ignore_eos=True))
        request = asyncio.ensure_future(answer(engine, "a", prepared, Counter()))
        while not any(frame.requests for frame in frames):
            await asyncio.sleep(0.01)
        os.kill(pid_of(engine), signal.SIGKILL)
        assert (await request).error is None
        while not (frames[-1].finished and not frames[-1].forget):
            await asyncio.sleep(0.01)
        return frames

    try:
        frames = asyncio.run(run())
        (again,) = [i for i, frame in enumerate(frames) if frame.forget]
        assert frames[again].finished == [0]
        assert [seen.key for frame in frames[:again] for seen in frame.requests] == [0]
        assert [seen.key for frame in frames[again:] for seen in frame.requests] == [0]
    finally:
        engine.shutdown()
