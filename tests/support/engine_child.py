"""Engines of tests in processes of their own, and processes that only pretend to be engines.

``python -m tests.support.engine_child DESCRIPTOR`` is the process. The arguments in its first message select a function
of this module, which builds the engine.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.process import wire
from metal_engine.engine.process.child import serve_engine
from metal_engine.engine.process.supervisor import EngineSupervisor
from metal_engine.errors import ConfigError
from metal_engine.text.tokenizer import Tokenizer
from tools.fixtures.fake_engine import FakeRunner, fake_config, tiny_tokenizer

MODULE = "tests.support.engine_child"


def process_of(
    build: str,
    tokenizer: Tokenizer | None = None,
    *,
    max_restarts: int = 0,
    stall_seconds: float = 30.0,
    **options: Any,
) -> EngineSupervisor:
    """Return an engine that has not been started.

    Args:
        build: name of a function of this module, which is called with ``options`` in the engine's process.
    """
    start = wire.Start({"build": build, "options": options}, "info", "text")
    return EngineSupervisor(MODULE, start, lambda ready: tokenizer or tiny_tokenizer(), max_restarts, stall_seconds)


def started(build: str, **options: Any) -> AsyncEngine:
    """Return a started engine in a process of its own. Arguments as for :func:`process_of`."""
    engine = AsyncEngine(process_of(build, **options))
    engine.start()
    return engine


def pid_of(engine: AsyncEngine) -> int:
    """Return the id of the engine's process."""
    transport: Any = engine._transport
    process_id: int = transport._process.popen.pid
    return process_id


def is_running(process_id: int) -> bool:
    """Return True if a process runs: a zombie does not."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process_id}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


# --- in the process ---


def fake(step_time: float = 0.0, **config: Any) -> BuiltEngine:
    """Return an engine on a fake runner."""
    settings = fake_config(**config)
    core = EngineCore(settings, FakeRunner(settings.cache.block_size, step_time=step_time))
    return BuiltEngine(core, RequestPreparer(settings, tiny_tokenizer()))


def tiny(template: str = "", **config: Any) -> Any:
    """Return an engine on a tiny model. A template selects the tokenizer of the tests of phases."""
    from tests.server.generation.test_phases import tokenizer
    from tests.support.tiny_engine import tiny_engine

    return tiny_engine(tokenizer=tokenizer(template) if template else None, **config)


def adapted(folder: str, max_loras: int) -> Any:
    """Return an engine with the LoRA adapter ``a``."""
    from tests.support.adapters import adapted_engine

    return adapted_engine({"a": Path(folder)}, max_loras=max_loras)


def deadly(token: int, num_tokens: int) -> BuiltEngine:
    """Return a fake engine whose process is killed by a step of a request that begins with a token.

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
    """Return a fake engine whose thread ends in a step with several requests, unless the file ``marker`` exists."""
    engine = fake()
    step = engine.core.step

    def step_or_end() -> Any:
        if engine.stats.num_running > 4 and not Path(marker).exists():
            Path(marker).touch()
            raise SystemExit("an end in the thread")
        return step()

    engine.core.step = step_or_end  # type: ignore[method-assign]
    return engine


def refused() -> BuiltEngine:
    """Raise an error about a setting."""
    raise ConfigError("--block-size", "is wrong")


def broken() -> BuiltEngine:
    """Raise an error that nobody expects."""
    raise ZeroDivisionError("a bug")


def killed() -> BuiltEngine:
    """End this process as the system does if memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def talking(first: str) -> BuiltEngine:
    """Write the bytes of a text to the server instead of messages."""
    _socket().sendall(first.encode("latin-1"))
    time.sleep(60)
    raise AssertionError


def closing() -> BuiltEngine:
    """Close the socket, and go on."""
    _socket().shutdown(socket.SHUT_RDWR)
    time.sleep(60)
    raise AssertionError


def dying_later(after: str) -> BuiltEngine:
    """Return an engine whose first step writes the bytes of a text to the server. Without a text, its thread ends."""
    engine = fake()

    def step() -> Any:
        if not after:
            raise SystemExit("an end in the thread")
        _socket().sendall(after.encode("latin-1"))
        time.sleep(60)

    engine.core.step = step  # type: ignore[method-assign]
    return engine


def _socket() -> socket.socket:
    return socket.socket(fileno=os.dup(int(sys.argv[1])))


def _set_up(start: wire.Start) -> Callable[[], BuiltEngine]:
    build: Callable[[], BuiltEngine] = partial(globals()[start.args["build"]], **start.args["options"])
    return build


if __name__ == "__main__":
    serve_engine(int(sys.argv[1]), _set_up)
