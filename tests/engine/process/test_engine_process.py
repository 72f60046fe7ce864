"""The process of an engine ends with the server. If the process fails, the server reports it and nothing hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.process import wire
from metal_engine.engine.process.child import EngineChild
from metal_engine.engine.transport import EngineDeadError
from metal_engine.errors import ConfigError, ModelLoadError, ParameterError
from metal_engine.output_phases import CallPhase, CallTrigger, OutputPhases
from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.engine_child import is_running, pid_of, process_of, started
from tests.support.serving import wait_until
from tools.fixtures.fake_engine import fake_config, generated

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    """Yield an engine whose steps take 5 ms."""
    engine = started("fake", step_time=0.005)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def shared() -> Iterator[AsyncEngine]:
    """Yield an engine whose steps take 5 ms, for tests that leave it idle."""
    engine = started("fake", step_time=0.005)
    yield engine
    engine.shutdown()


async def outputs_of(engine: AsyncEngine, request_id: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
    prepared = await asyncio.to_thread(engine.preparer.prepare, [1, 2, 3], params)
    async for output in engine.generate(request_id, prepared):
        yield output


async def last_of(engine: AsyncEngine, request_id: str, params: SamplingParams = LONG) -> RequestOutput:
    found = [output async for output in outputs_of(engine, request_id, params)]
    return found[-1]


# --- start and end ---


def test_errors_of_settings_are_as_in_one_process() -> None:
    with pytest.raises(ConfigError, match=r"^--block-size is wrong$") as info:
        process_of("refused").start(lambda outputs: None)
    assert info.value.flag == "--block-size"


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        ("killed", {}, "has ended with SIGKILL, which the system sends if memory runs out"),
        pytest.param("closing", {}, "has ended with status 0", marks=pytest.mark.full),
        ("broken", {}, "ZeroDivisionError: a bug"),
        ("talking", {"first": "\x7f" * 40}, "a message of 2139062143 bytes, more than"),
        *(
            pytest.param("talking", {"first": first}, "an invalid message", marks=pytest.mark.full)
            for first in ("\x00" * 4, "\x01\x00\x00\x00\x05")
        ),
    ],
)
def test_a_process_that_fails_while_loading(build: str, options: dict[str, str], message: str) -> None:
    transport = process_of(build, **options)
    with pytest.raises(ModelLoadError, match=message) as info:
        transport.start(lambda outputs: None)
    assert "\n" not in str(info.value)
    assert transport._process is not None and not is_running(transport._process.popen.pid)


def test_the_process_ends_at_a_shutdown(engine: AsyncEngine) -> None:
    process_id = pid_of(engine)
    assert is_running(process_id)
    assert engine.shutdown() and not is_running(process_id)
    assert engine.error is None
    with pytest.raises(EngineDeadError, match="it was shut down"):
        asyncio.run(last_of(engine, "a"))


@pytest.mark.parametrize("timeout", [10.0, 0.0])
def test_a_shutdown_ends_open_requests(engine: AsyncEngine, timeout: float) -> None:
    async def run() -> RequestOutput:
        request = asyncio.ensure_future(last_of(engine, "a"))
        while not engine.stats.num_running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.shutdown, timeout)
        return await asyncio.wait_for(request, 60)

    end = asyncio.run(run())
    assert end.finish_reason == "error" and end.error is not None and "was shut down" in end.error


def test_an_engine_process_flushes_the_channel_before_exit() -> None:
    flushed: list[bool] = []
    channel: Any = SimpleNamespace(
        receive=lambda: wire.encode(wire.Shutdown()), send=lambda message: None, flush=lambda: flushed.append(True)
    )
    EngineChild(channel, lambda: fake_config().device, lambda order, access: pytest.fail("built")).run()
    assert flushed


def test_a_shutdown_while_the_model_is_loaded() -> None:
    transport = process_of("talking", first="")
    transport.launch()
    wait_until(lambda: transport._process is not None, "the process")
    transport.shutdown(10.0)
    assert transport._process is not None and not is_running(transport._process.popen.pid)


_SERVER = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background inherit that it is ignored
from tests.support.engine_child import pid_of, process_of, started
if {loads}:
    transport = process_of("talking", first="")
    transport.launch()
    while transport._process is None:
        time.sleep(0.01)
    print(transport._process.popen.pid, flush=True)
else:
    engine = started("flooding", max_restarts=1, limits={{"spare_delay": 0}})
    while engine._transport._restartable._spawner.spare is None:
        time.sleep(0.01)
    print(pid_of(engine), engine._transport._restartable._spawner.spare.popen.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "loads"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), pytest.param(signal.SIGINT, False, marks=pytest.mark.full)],
)
def test_no_process_is_left_by_a_server_that_is_killed(number: int, loads: bool) -> None:
    """The spare process does not stay, either. The standard error of the server is on a full disk."""
    code = _SERVER.format(loads=loads)
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True) as server,
    ):
        process_ids = [int(word) for word in server.stdout.readline().split()]
        assert len(process_ids) == (1 if loads else 2) and all(map(is_running, process_ids))
        server.send_signal(number)
    wait_until(lambda: not any(map(is_running, process_ids)), "the end of the engine's processes")


# --- requests ---


def test_requests_abort_and_numbers(shared: AsyncEngine) -> None:
    async def run() -> None:
        params = SamplingParams(max_tokens=20)
        ids = [t async for output in outputs_of(shared, "a", params) for t in output.token_ids]
        assert ids == generated([1, 2, 3], 20)
        assert shared.metrics.num_finished["length"] == 1 and shared.metrics.generation_tokens.sum == 20
        async for _ in outputs_of(shared, "b", LONG):
            break

    asyncio.run(run())
    wait_until(lambda: shared.metrics.num_finished["abort"] == 1, "the abort")
    wait_until(lambda: shared.stats.num_running == 0, "the numbers")
    assert shared.stats.num_used_blocks == 0 and shared.num_waiting == 0


def test_a_replaced_observer_gets_no_further_frames(shared: AsyncEngine) -> None:
    async def run() -> None:
        frames: list[tuple[int, object]] = []
        for i in range(3):
            shared.watch(lambda frame, i=i: frames.append((i, frame)))  # type: ignore[misc]
            await last_of(shared, str(i), SamplingParams(max_tokens=60, ignore_eos=True))
        while frames[-1][0] != 2:
            await asyncio.sleep(0.01)
        assert [i for i, _ in frames] == sorted(i for i, _ in frames)
        shared.unwatch()

    asyncio.run(run())


def test_grammars_are_released(shared: AsyncEngine) -> None:
    rules_for = shared.preparer.rules_for
    regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"))
    with pytest.raises(ParameterError, match="structured_outputs") as info:
        rules_for(SamplingParams(structured_outputs=StructuredOutputsParams(regex="(?=a)")))
    assert info.value.name == "structured_outputs"
    rules = rules_for(regex)
    calls = OutputPhases(calls=CallPhase((CallTrigger("<call>", 'call: "x"'),)))
    phase_rules = rules_for(SamplingParams().changed(phases=calls))
    transport = shared._transport
    dropped = transport._calls.dropped_grammars  # type: ignore[attr-defined]
    assert not dropped and rules.grammar is not None and phase_rules.grammar is not None
    assert rules.grammar.message.was_made  # type: ignore[attr-defined]
    keys = {rules.grammar.message.call, phase_rules.grammar.message.call}  # type: ignore[attr-defined]
    del rules, phase_rules
    assert set(dropped) == keys
    rules_for(regex)
    assert not keys & set(dropped)


# --- the end of the process ---


def check_end(engine: AsyncEngine, caplog: pytest.LogCaptureFixture, message: str) -> None:
    """Check that the engine has ended with one line in the log, and refuses requests."""
    wait_until(lambda: engine.error is not None, "the error")
    assert message in str(engine.error)
    wait_until(lambda: bool(caplog.records), "the line in the log")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.partition(" (last words: ")[0] == str(engine.error) and "\n" not in line
    with pytest.raises(EngineDeadError, match="the engine has stopped: "):
        asyncio.run(last_of(engine, "late"))
    with pytest.raises(EngineDeadError, match="the engine has stopped: "):
        engine.preparer.rules_for(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert not is_running(pid_of(engine))
    assert engine.shutdown()


def test_a_process_that_dies_while_idle(engine: AsyncEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        os.kill(pid_of(engine), signal.SIGSEGV)
        check_end(engine, caplog, "has ended with SIGSEGV")


def test_a_process_that_dies_under_load(engine: AsyncEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[RequestOutput]:
        requests = [asyncio.ensure_future(last_of(engine, str(i))) for i in range(8)]
        while engine.stats.num_running < len(requests):  # a later request would be refused
            await asyncio.sleep(0.01)
        os.kill(pid_of(engine), signal.SIGKILL)
        return await asyncio.gather(*requests)

    with caplog.at_level(logging.ERROR):
        ends = asyncio.run(run())
        assert {(output.finish_reason, output.error) for output in ends} == {("error", str(engine.error))}
        check_end(engine, caplog, "has ended with SIGKILL")


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("", "an end in the thread"),
        ("\x08\x00\x00\x00\x91\xa5ready", "an invalid message"),
        pytest.param("\x7f" * 8, "a message of 2139062143 bytes", marks=pytest.mark.full),
        pytest.param("\x00" * 8, "an invalid message", marks=pytest.mark.full),
    ],
)
def test_a_process_that_breaks_in_a_step(after: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = started("dying_later", after=after)
    with caplog.at_level(logging.ERROR):
        end = asyncio.run(last_of(engine, "a"))
        assert end.finish_reason == "error" and end.error is not None and message in end.error
        check_end(engine, caplog, message)


def test_requests_fail_if_the_engine_process_stops_reading_messages(caplog: pytest.LogCaptureFixture) -> None:
    engine = started("fake", limits={"stall_seconds": 0.5}, max_model_len=100_000, num_blocks=20_000)

    async def run() -> list[RequestOutput]:
        prepared = engine.preparer.prepare([1] * 90_000, SamplingParams(max_tokens=4))

        async def end(i: int) -> RequestOutput:
            return [output async for output in engine.generate(str(i), prepared)][-1]

        os.kill(pid_of(engine), signal.SIGSTOP)
        began = time.monotonic()
        requests = [asyncio.ensure_future(end(i)) for i in range(20)]
        await asyncio.sleep(0)
        assert time.monotonic() - began < 1.0, "submitting waits for the process"
        return await asyncio.gather(*requests)

    with caplog.at_level(logging.ERROR):
        assert {output.finish_reason for output in asyncio.run(run())} == {"error"}
        check_end(engine, caplog, "hangs: it has read no message for 0.5 s")
