"""The process of an engine: runs the engine in a thread, and exchanges messages with the server.

The process ends when the server ends: its main thread then reads the end of the socket. If the main thread cannot read
the socket, ``end_with_parent.py`` ends the process.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NoReturn

from metal_engine.device.allocator import give_back_freed_memory
from metal_engine.device.blas.threads import blas_threads
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.device_access import FULL_ACCESS, DeviceAccess
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.engine.process import wire
from metal_engine.engine.process.channel import Channel
from metal_engine.engine.process.end_with_parent import end_with_parent
from metal_engine.engine.process.keyed_resources import KeyedResources
from metal_engine.engine.process.packed_requests import unpacked_text
from metal_engine.engine.process.packed_results import (
    packed_adapter,
    packed_error,
    packed_metrics,
    packed_output,
    printable,
    unpacked_output,
)
from metal_engine.engine.step_observer import Frame
from metal_engine.engine.transport import EngineDeadError
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.request import PreparedRequest, RequestOutput, RequestStatus
from metal_engine.settings.config import DeviceInfo
from metal_engine.step import SchedulerOutput

logger = logging.getLogger(__name__)

# Interval in seconds at which changed stats and metrics (`wire.Numbers`) are sent. They are also sent before outputs
# that finish requests.
_NUMBERS_SECONDS = 0.1
_BLAS_INTERVALS = 10  # adaptations of the number of BLAS threads are this many intervals apart
_HEARTBEAT_INTERVALS = 10  # unchanged stats and metrics are sent this many intervals apart
_IDLE_INTERVALS = 100  # freed memory goes back to the system after this many intervals without a change

# PrepareFunction imports the modules of the engine. BuildFunction builds the engine.
PrepareFunction = Callable[[], DeviceInfo]
BuildFunction = Callable[[wire.Build, DeviceAccess], BuiltEngine]


class _ServersDevice(DeviceAccess):
    """Device access of one of several models. :meth:`claim` blocks until the server grants the memory.

    If the server refuses the memory, it kills this process, so :meth:`check_fits` and :meth:`claim` raise no errors.

    Args:
        send: sends a message to the server.
    """

    def __init__(self, memory_bytes: int, send: Callable[[wire.Message], None]) -> None:
        super().__init__(memory_bytes)
        self._send = send
        self._granted = threading.Semaphore(0)

    def check_fits(self, num_bytes: int) -> None:
        self._send(wire.CheckFits(num_bytes))

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        self._send(wire.Claim(num_bytes, loading_bytes, step_bytes))
        self._granted.acquire()

    def grant(self) -> None:
        """Wake the thread that waits in :meth:`claim`."""
        self._granted.release()


class EngineChild:
    """Engine in this process for a server at the other end of a channel.

    Args:
        channel: channel to the server.
        prepare: function that imports the modules of the engine and returns its device. Called in the engine's thread.
        build: function that builds the engine. Called in the engine's thread after the server has sent
            :class:`wire.Build`.
    """

    def __init__(self, channel: Channel, prepare: PrepareFunction, build: BuildFunction) -> None:
        self._channel = channel
        self._order: Future[wire.Build] = Future()
        self._device: _ServersDevice | None = None  # access to a device that other models use

        def prepare_and_build() -> BuiltEngine:
            channel.send(wire.Device(prepare()))
            order = self._order.result()
            return build(order, self._device or FULL_ACCESS)

        self._thread = EngineThread(prepare_and_build)
        self._engine: BuiltEngine | None = None
        self._is_shutting_down = False
        self._sent_numbers: wire.Numbers | None = None
        self._sending_numbers = threading.Lock()
        self._computing: list[str] = []  # requests of the last step
        # Requests that wait for grammars or adapters. The lock is held to add them to the engine, and to end requests.
        self._waiting: set[str] = set()
        self._lock = threading.Lock()
        self._resources = KeyedResources(self._thread, lambda: self._built, channel.send)

    def run(self) -> None:
        """Build the engine, and process messages until the server sends :class:`wire.Shutdown`.

        Raises:
            EOFError: the server has ended.
            WireError: a message is malformed.
        """
        threading.Thread(target=self._start, name="engine-numbers", daemon=True).start()
        while True:
            message = wire.decode_to_engine(self._channel.receive())
            if isinstance(message, wire.Shutdown):
                self._is_shutting_down = True
                if self._engine is not None:
                    self._thread.shutdown(None)
                self._channel.flush()
                return
            self._process(message)

    def _start(self) -> None:
        """Build the engine, report it to the server, and send its stats and metrics from then on.

        Runs in its own thread, and never returns. If the engine cannot be built, the process ends.
        """
        try:
            self._engine = engine = self._thread.start(self._on_outputs, self._on_end)
        except BaseException as error:
            if not isinstance(error, ConfigError | ModelLoadError):
                logger.critical("the engine cannot be built", exc_info=True)
                error = ModelLoadError(f"the engine cannot be built: {type(error).__name__}: {error}")
            self._channel.send(wire.Refused(packed_error(error)))
            self._exit(1)
        engine.core.on_plan = self._on_plan
        engine.core.is_replaceable = True
        # Everything loaded so far stays in memory. Without `freeze`, the garbage collector would scan it during steps.
        gc.collect()
        gc.freeze()
        self._send_ready(engine)
        self._report()

    def _send_ready(self, engine: BuiltEngine) -> None:
        adapters = None if engine.adapters is None else engine.adapters.adapters
        self._resources.add_loaded(adapters or ())
        path = engine.tokenizer_path
        self._channel.send(
            wire.Ready(
                self._numbers(),
                engine.config,
                sorted(engine.preparer.tokenizer.eos_token_ids),
                None if path is None else str(path),
                None if adapters is None else [packed_adapter(adapter) for adapter in adapters],
            )
        )

    def _report(self) -> NoReturn:
        threads = blas_threads(os.getppid())
        num_idle = interval = 0
        while True:
            if self._send_numbers(is_heartbeat=not interval % _HEARTBEAT_INTERVALS):
                num_idle = 0
            num_idle += 1
            interval += 1
            if num_idle == _IDLE_INTERVALS:
                give_back_freed_memory()
            if threads is not None and not interval % _BLAS_INTERVALS:
                threads.adapt()
            time.sleep(_NUMBERS_SECONDS)

    @property
    def _built(self) -> BuiltEngine:
        assert self._engine is not None, "a message before the engine was ready"
        return self._engine

    def _send_numbers(self, *, is_heartbeat: bool = False) -> bool:
        """Send the engine's stats and metrics if they have changed. Return True if they have changed.

        Several threads may call this method. The messages are in order of time.

        Args:
            is_heartbeat: True to send stats and metrics even if they have not changed.
        """
        with self._sending_numbers:
            numbers = self._numbers()
            has_changed = numbers != self._sent_numbers
            if has_changed or is_heartbeat:
                self._sent_numbers = numbers
                self._channel.send(numbers)
        return has_changed

    def _numbers(self) -> wire.Numbers:
        return wire.Numbers(self._built.stats, packed_metrics(self._built.metrics))

    def _exit(self, status: int) -> NoReturn:
        self._channel.flush()
        sys.stderr.flush()
        os._exit(status)  # a regular exit would tear down MLX while other threads use it

    # --- messages of the engine ---

    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        if self._thread.error is not None:
            return  # the outputs are errors for all requests, but a new process may continue the requests
        if any(output.finish_reason is not None for output in outputs):
            self._send_numbers()
        self._channel.send(wire.Outputs([packed_output(output) for output in outputs], self._built.stats))

    def _on_plan(self, plan: SchedulerOutput) -> None:
        """Send the ids of a step's requests to the server, unless the previous step had the same requests.

        If the step ends this process, the server can still read the message from the socket.
        """
        request_ids = list(plan.num_scheduled_tokens)
        if request_ids != self._computing:
            self._computing = request_ids
            self._channel.send(wire.Computing(request_ids))

    def _on_frame(self, number: int, frame: Frame) -> None:
        self._channel.send(wire.FrameOf(number, frame))

    def _on_end(self, message: str) -> None:
        if not self._is_shutting_down:
            self._channel.send(wire.Ended(printable(message)))
            self._exit(1)

    # --- messages of the server ---

    def _process(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Build():
                if message.memory_bytes is not None:
                    self._device = _ServersDevice(message.memory_bytes, self._channel.send)
                self._order.set_result(message)
            case wire.Granted():
                if self._device is not None:
                    self._device.grant()
            case wire.ImageInputs():
                self._resources.add_image_inputs(message)
            case wire.Submit():
                self._waiting.add(message.request_id)
                self._add_when_made(message)
            case wire.End():
                with self._lock:
                    self._waiting.discard(message.request_id)
                    status = RequestStatus.of(message.finish_reason)
                    self._thread.end(message.request_id, status, message.num_output_tokens)
            case wire.Watch():
                self._thread.watch(None if message.number is None else partial(self._on_frame, message.number))
            case wire.MakeGrammar():
                self._resources.make_grammar(message)
            case wire.LoadAdapter():
                self._resources.load_adapter(message)
            case wire.UnloadAdapter():
                self._resources.unload_adapter(unpacked_text(message.name))
            case wire.ReleaseMemory():
                self._thread.release_memory()
            case wire.Release():
                self._resources.release(message)

    def _add_when_made(self, message: wire.Submit, _: object = None) -> None:
        """Add a request to the engine when its grammar is made and its adapter is loaded.

        Returns at once: if one of the two is pending, its completion calls this method again. Only resumed requests
        have to wait. If the grammar or the adapter fails, the request ends with an error.
        """
        if message.request_id not in self._waiting:
            return  # the request has ended
        needed = self._resources.needed_by(message)
        for made in needed:
            if not made.done():
                made.add_done_callback(partial(self._add_when_made, message))
                return
        error = next((made.exception() for made in needed if made.exception() is not None), None)
        if error is None:
            self._add(message, self._resources.unpacked(message))
        else:
            self._waiting.discard(message.request_id)
            self._on_outputs([RequestOutput(message.request_id, finish_reason="error", error=str(error))])

    def _add(self, message: wire.Submit, prepared: PreparedRequest) -> None:
        so_far = None if message.so_far is None else unpacked_output(message.so_far)
        arguments = message.seed, message.options, so_far, message.num_failures
        with self._lock, suppress(EngineDeadError):  # `_on_end` reports the end of the engine to the server
            if message.request_id in self._waiting:
                self._waiting.remove(message.request_id)
                self._thread.submit(message.request_id, prepared, *arguments)


def serve_engine(
    sock: socket.socket, set_up: Callable[[wire.Start], tuple[PrepareFunction, BuildFunction]]
) -> NoReturn:
    """Run an engine for the server at the other end of a socket. Then end this process.

    Args:
        sock: socket to the server.
        set_up: function that sets up this process, and returns the functions that prepare and build the engine.
    """
    end_with_parent()
    # The server ends this process. A signal to all processes, as from systemd, must not lose the requests in flight.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(wire.DUMP_SIGNAL)
    channel = Channel(sock)
    try:
        start = wire.decode_to_engine(channel.receive())
        if not isinstance(start, wire.Start):
            raise wire.WireError(f"a first message of type {type(start).__name__}")
        EngineChild(channel, *set_up(start)).run()
    except EOFError:
        pass  # the server has ended
    except BaseException:
        logger.critical("the engine's process fails", exc_info=True)
        os._exit(1)
    os._exit(0)
