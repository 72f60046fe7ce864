"""Engines of tests in processes of their own, and processes that only pretend to be engines.

``python -m tests.support.engine_child`` is the process. The arguments of the message
:class:`metal_engine.engine.process.wire.Build` select a function of this module, which builds the engine.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.engine.device_access import DeviceAccess
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.process import wire
from metal_engine.engine.process.child import BuildFunction, PrepareFunction, serve_engine
from metal_engine.engine.process.limits import ProcessLimits
from metal_engine.engine.process.spawner import Spawner
from metal_engine.engine.process.supervisor import EngineSupervisor
from metal_engine.errors import ConfigError
from metal_engine.python_process import channel_to_parent
from metal_engine.text.tokenizer import Tokenizer
from tools.benchmarks.engine_death.worker import failing
from tools.fixtures.fake_engine import FakeRunner, fake_config, tiny_tokenizer

MODULE = "tests.support.engine_child"
# In the engine's process: the socket to the server, beside the channel.
_sockets: list[socket.socket] = []


def process_of(
    build: str,
    tokenizer: Tokenizer | None = None,
    *,
    max_restarts: int = 0,
    limits: dict[str, float] | None = None,
    fails: bool = False,
    **options: Any,
) -> EngineSupervisor:
    """Return an engine that has not been started. Without ``spare_delay`` in ``limits``, there is no spare process.

    Args:
        build: name of a function of this module, which is called with ``options`` in the engine's process.
        max_restarts: maximum number of restarts.
        limits: other limits on the engine's processes.
        fails: True for steps that fail on demand (:func:`failing`).
    """
    args = {"build": build, "options": options}
    others: dict[str, Any] = {"spare_delay": math.inf, **(limits or {})}
    process_limits = ProcessLimits(max_restarts=max_restarts, **others)
    spawner = Spawner(MODULE, wire.Start([{"fails": fails}], "info", "text"), process_limits)
    return EngineSupervisor(spawner, args, lambda ready: tokenizer or tiny_tokenizer())


def started(build: str, **options: Any) -> AsyncEngine:
    """Return a started engine in a process of its own. Arguments as for :func:`process_of`."""
    engine = AsyncEngine(process_of(build, **options))
    engine.start()
    return engine


def pid_of(engine: AsyncEngine) -> int:
    """Return the id of the engine's process."""
    return engine._transport._process.popen.pid


def is_running(process_id: int) -> bool:
    """Return True if a process runs: a zombie does not."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process_id}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


# --- in the process ---


def fake(step_time: float = 0.0, delayed_by: str = "", **config: Any) -> BuiltEngine:
    """Return an engine on a fake runner.

    Args:
        delayed_by: path of a file. The engine is built when the file does not exist.
    """
    while delayed_by and Path(delayed_by).exists():
        time.sleep(0.005)
    settings = fake_config(**config)
    core = EngineCore(settings, FakeRunner(settings.cache.block_size, step_time=step_time))
    return BuiltEngine(core, RequestPreparer(settings, tiny_tokenizer()))


def slowed(engine: Any, step_seconds: float) -> Any:
    """Make each step of an engine take at least ``step_seconds``, and return the engine."""
    step = engine.core.step

    def slow_step() -> Any:
        time.sleep(step_seconds)
        return step()

    engine.core.step = slow_step
    return engine


def tiny(template: str = "", step_seconds: float = 0.0, **config: Any) -> Any:
    """Return an engine on a tiny model. A template selects the tokenizer of the tests of phases."""
    from tests.server.generation.test_phases import tokenizer
    from tests.support.tiny_engine import tiny_engine

    return slowed(tiny_engine(tokenizer=tokenizer(template) if template else None, **config), step_seconds)


def seeing(name: str) -> Any:
    """Return an engine on the tiny vision model of an architecture."""
    from tests.support.vision import make_engine, tiny_vision

    return make_engine(tiny_vision(name))


def keeping(what: str, step_seconds: float = 0.0) -> Any:
    """Return an engine on a tiny model that keeps more than KV between steps."""
    from tests.support.speculation import draft_model_config, speculative_config
    from tests.support.tiny_engine import tiny_engine, tiny_reference

    options: dict[str, dict[str, Any]] = {
        "recurrent states": {"architecture": "qwen3_5", "num_state_slots": 96, "ahead": True},
        "drafts": {"speculative": speculative_config(), "ahead": True},
        "draft model": {"speculative": draft_model_config(3), "draft": tiny_reference()},
    }
    return slowed(tiny_engine(num_blocks=512, **options[what]), step_seconds)


def adapted(folder: str, max_loras: int) -> Any:
    """Return an engine with the LoRA adapter ``a``."""
    from tests.support.adapters import adapted_engine

    return adapted_engine({"a": Path(folder)}, max_loras=max_loras)


def deadly(token: int, num_tokens: int) -> BuiltEngine:
    """Return a fake engine whose process is killed by a step of a request whose first token is ``token``.

    Args:
        num_tokens: number of output tokens of the request before the step.
    """
    engine = fake()

    def error_for(tokens: list[int]) -> None:
        if tokens[0] == token and len(tokens) >= num_tokens + (3 if num_tokens else 1):
            os.kill(os.getpid(), signal.SIGKILL)

    runner: Any = engine.core.runner
    runner.error_for = error_for
    return engine


def mortal(marker: str) -> BuiltEngine:
    """Return a fake engine whose thread ends in a step with more than four running requests.

    Only one thread ends: it creates the file ``marker``, and engines run normally once the file exists.
    """
    engine = fake()
    step = engine.core.step

    def step_or_end() -> Any:
        if engine.stats.num_running > 4 and not Path(marker).exists():
            Path(marker).touch()
            raise SystemExit("an end in the thread")
        return step()

    engine.core.step = step_or_end  # type: ignore[method-assign]
    return engine


def faulty(folder: str, faults: list[str]) -> BuiltEngine:
    """Return a fake engine whose process has the next fault of a list. Later processes have no fault.

    A process that a busy machine ends before its fault leaves the fault to the next process.

    Args:
        folder: folder for counting faults: each fault creates a file in it.
        faults: faults while the engine is built (``load``, ``loading``, ``refused``), or in its ninth step (``hang``,
            ``stop``, ``nonsense``, ``device``, ``abort``).
    """
    number = len(list(Path(folder).iterdir()))
    fault = faults[number] if number < len(faults) else ""
    begun = Path(folder) / str(number)
    if fault in ("load", "loading", "refused"):
        begun.touch()
    if fault == "load":
        killed()
    elif fault == "loading":
        time.sleep(600)
    elif fault == "refused":
        refused()
    engine = fake()
    step, num_steps = engine.core.step, itertools.count()

    def fail(tokens: list[int]) -> Exception:
        return RuntimeError("[METAL] Command buffer execution failed")

    def faulty_step() -> Any:
        if fault and next(num_steps) >= 8:
            begun.touch()
            match fault:
                case "hang":
                    time.sleep(600)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "nonsense":
                    _socket().sendall(b"\x00" * 8)
                    time.sleep(600)
                case "device":
                    engine.core.runner.error_for = fail  # type: ignore[attr-defined]
                case "abort":
                    flood()
                    os.abort()
        return step()

    engine.core.step = faulty_step  # type: ignore[method-assign]
    return engine


def flood() -> None:
    """Write more to the standard error than a pipe holds."""
    for i in range(4000):
        print(f"line {i} " + "x" * 500, file=sys.stderr)
    print("\x1b[31mterminate called: [METAL] a fault\x1b[0m", file=sys.stderr, flush=True)


def flooding() -> BuiltEngine:
    """Return a fake engine after a flood in the standard error."""
    flood()
    return fake()


def refused() -> BuiltEngine:
    """Raise an error about a setting."""
    raise ConfigError("--block-size", "is wrong")


def broken() -> BuiltEngine:
    """Raise an error of an unexpected type, like a bug."""
    raise ZeroDivisionError("a bug")


def killed() -> BuiltEngine:
    """End this process as the system does if memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def talking(first: str) -> BuiltEngine:
    """Write the bytes of a text to the server instead of messages. Builds no engine."""
    _socket().sendall(first.encode("latin-1"))
    time.sleep(60)
    raise AssertionError


def closing() -> BuiltEngine:
    """Close the connection to the server, and keep the process running. Builds no engine."""
    _socket().shutdown(socket.SHUT_RDWR)
    time.sleep(60)
    raise AssertionError


def dying_later(after: str) -> BuiltEngine:
    """Return an engine whose first step writes the bytes of a text to the server. Without a text, its thread ends."""
    engine = fake()

    def step() -> Any:
        if not after:
            raise SystemExit("an end in the thread\udce9")  # a lone surrogate
        _socket().sendall(after.encode("latin-1"))
        time.sleep(60)

    engine.core.step = step  # type: ignore[method-assign]
    return engine


def _socket() -> socket.socket:
    return _sockets[0]


def _set_up(start: wire.Start) -> tuple[PrepareFunction, BuildFunction]:
    def build(order: wire.Build, access: DeviceAccess) -> BuiltEngine:
        return globals()[order.args["build"]](**order.args["options"])

    return lambda: fake_config().device, failing(build) if start.models[0]["fails"] else build


if __name__ == "__main__":
    _sockets.append(channel_to_parent())
    serve_engine(_sockets[0].dup(), _set_up)
