"""Server side of a process that runs an engine: its start, its messages and the reason of its end."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

from metal_engine.engine.device_access import DeviceAccess
from metal_engine.engine.process import wire
from metal_engine.engine.process.channel import Channel
from metal_engine.engine.process.error_output import ErrorOutput
from metal_engine.engine.process.packed_results import unpacked_error
from metal_engine.errors import ModelLoadError
from metal_engine.python_process import start_python
from metal_engine.settings.config import DeviceInfo

logger = logging.getLogger(__name__)

# Maximum wait, after the socket has closed, for the exit status of the process.
_EXIT_SECONDS = 2.0
# Time for a process that hangs to write the stacks of its threads.
_DUMP_SECONDS = 0.3
_WHILE_LOADING = (wire.Device, wire.CheckFits, wire.Claim, wire.Ready)

M = TypeVar("M", bound=wire.Message)


class ProcessEndedError(ModelLoadError):
    """The process has ended before its model was loaded."""


class EngineProcess:
    """Spawned process of an engine. The process imports its modules, and waits for :meth:`build`.

    The thread that spawns the process must outlive the process: on Linux, the system ends both together.

    Args:
        module: main module of the process, which gets the descriptor of a socket as its argument.
        start: first message to the process.
        stall_seconds: time after which a process that reads no message is killed.
    """

    def __init__(self, module: str, start: wire.Start, stall_seconds: float) -> None:
        self._reason = ""  # reason that the process has given for its end
        self._errors = ErrorOutput()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.popen = start_python(module, theirs, stderr=self._errors.descriptor)
        finally:
            self._errors.start()
        self._channel = Channel(ours, stall_seconds)
        self.send = self._channel.send
        self.send(start)

    @property
    def has_ended(self) -> bool:
        return self.popen.poll() is not None

    @property
    def last_words(self) -> str:
        """Last lines that the ended process has written to its standard error. See :meth:`ErrorOutput.last_words`."""
        return self._errors.last_words()

    def device(self) -> DeviceInfo:
        """Wait until the process has imported its modules, and return its device. Raises as :meth:`build`.

        Call it at most once, before :meth:`build`.
        """
        try:
            return self._receive_one(wire.Device).info
        except (EOFError, wire.WireError) as error:
            raise ProcessEndedError(f"no model can be loaded: {self._ended(error)}") from error

    def build(self, order: wire.Build, access: DeviceAccess) -> wire.Ready:
        """Build the engine, and wait until the model is loaded. After an error, the caller has to kill the process.

        Args:
            access: grants the memory that the process claims. Errors of its methods are raised.

        Raises:
            ModelLoadError: the model cannot be loaded.
            ProcessEndedError: the process has ended.
            ConfigError: the settings cannot work.
        """
        self.send(order)
        try:
            while not isinstance(message := self._receive_one(_WHILE_LOADING), wire.Ready):
                if isinstance(message, wire.CheckFits):
                    access.check_fits(message.num_bytes)
                elif isinstance(message, wire.Claim):
                    access.claim(message.num_bytes, message.loading_bytes, message.step_bytes)
                    self.send(wire.Granted())
        except (EOFError, wire.WireError) as error:
            raise ProcessEndedError(f"the model cannot be loaded: {self._ended(error)}") from error
        return message

    def _receive_one(self, kinds: type[M] | tuple[type[M], ...]) -> M:
        """Receive a message whose type is one of ``kinds``.

        Raises the error of a :class:`wire.Refused`, EOFError if the process has ended, and WireError for any other
        message.
        """
        message = wire.decode_from_engine(self._channel.receive())
        if isinstance(message, wire.Refused):
            raise unpacked_error(message.error)
        if not isinstance(message, kinds):
            raise wire.WireError(f"a message of type {type(message).__name__} while the model is loaded")
        return message

    def receive_all(self, on_message: Callable[[wire.FromEngine], None]) -> str:
        """Pass all messages to ``on_message`` until the process ends. Return the reason of the end.

        Kills the process if a message is malformed or ``on_message`` raises an error.
        """
        try:
            while True:
                message = wire.decode_from_engine(self._channel.receive())
                if isinstance(message, wire.Ended):
                    self._reason = message.message.removeprefix("the engine has stopped: ")
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
        return self._reason or problem

    def end_hang(self, hang: str) -> None:
        """Make a process that hangs write the stacks of its threads to its standard error. Then kill it. Thread-safe.

        Takes ``_DUMP_SECONDS``.

        Args:
            hang: description of the hang, which :meth:`receive_all` returns as the reason of the end.
        """
        self._channel.problem = hang
        self.popen.send_signal(wire.DUMP_SIGNAL)
        time.sleep(_DUMP_SECONDS)
        self.popen.kill()
        self._channel.close()

    def kill(self) -> None:
        """Close the channel, kill the process, and wait up to ``_EXIT_SECONDS`` for its end."""
        self._channel.close()
        self.popen.kill()
        try:
            self.popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("the engine's process %d does not end: the system does not kill it", self.popen.pid)
        self._errors.wait()


def _cause(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"{name}, which the system sends if memory runs out" if -status == signal.SIGKILL else name
