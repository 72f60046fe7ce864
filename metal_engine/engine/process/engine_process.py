"""A process that runs an engine, as its server sees it: its start, its messages and the reason of its end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from metal_engine.engine.process import wire
from metal_engine.engine.process.channel import Channel
from metal_engine.engine.process.packed_results import unpacked_error
from metal_engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

# Time after the end of the socket for the process to exit, so that its exit status is known.
_EXIT_SECONDS = 2.0


class EngineProcess:
    """Spawned process of an engine. The calling thread must live as long as the process.

    On Linux, the system ends the process when the thread that has spawned it ends.

    Args:
        module: main module of the process, which gets the descriptor of a socket as its argument.
        start: first message to the process.
        stall_seconds: time after which a process that reads no message is killed.
    """

    def __init__(self, module: str, start: wire.Start, stall_seconds: float) -> None:
        self._last_words = ""  # reason that the process has given for its end
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's interrupt must not reach this process
            )
        self._channel = Channel(ours, stall_seconds)
        self.send = self._channel.send
        self.send(start)

    def wait_until_ready(self) -> wire.Ready:
        """Wait until the model is loaded.

        Raises:
            ModelLoadError: the model cannot be loaded, or the process has ended.
            ConfigError: the settings cannot work.
        """
        try:
            ready = wire.decode_from_engine(self._channel.receive())
            if isinstance(ready, wire.Refused):
                raise unpacked_error(ready.error)
            if not isinstance(ready, wire.Ready):
                raise wire.WireError(f"a first message of type {type(ready).__name__}")
        except (EOFError, wire.WireError) as error:
            raise ModelLoadError(f"the model cannot be loaded: {self._ended(error)}") from error
        return ready

    def receive_all(self, on_message: Callable[[wire.FromEngine], None]) -> str:
        """Pass on all messages until the process ends. Return the reason of the end."""
        try:
            while True:
                message = wire.decode_from_engine(self._channel.receive())
                if isinstance(message, wire.Ended):
                    self._last_words = message.message.removeprefix("the engine has stopped: ")
                else:
                    on_message(message)
        except (EOFError, wire.WireError) as error:
            return self._ended(error)
        except Exception as error:
            logger.exception("a message of the engine's process cannot be processed")
            return self._ended(wire.WireError(f"a message that cannot be processed: {type(error).__name__}: {error}"))

    def _ended(self, error: EOFError | wire.WireError) -> str:
        """Kill the process after an error of its channel. Return the reason of the end."""
        problem = f"the engine's process has sent {error}"
        if isinstance(error, EOFError):
            try:
                self.popen.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                problem = "the engine's process has closed its socket"
            else:
                problem = f"the engine's process has ended with {_cause(self.popen.returncode)}"
            if self._channel.problem:
                problem = f"the engine's process hangs: {self._channel.problem}"
        self.kill()
        return self._last_words or problem

    def kill(self) -> None:
        """End the process at once, unless it has ended."""
        self._channel.close()
        self.popen.kill()
        self.popen.wait()


def _cause(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    name = signal.Signals(-status).name
    return f"{name}, which the system sends if memory runs out" if -status == signal.SIGKILL else name
