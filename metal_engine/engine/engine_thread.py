"""The thread that owns the model.

MLX arrays and streams belong to the thread that created them. This thread therefore builds the engine and runs every
step. Other threads send it requests and receive outputs from it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.engine.step_observer import FrameSink
from metal_engine.engine.transport import EndSink, EngineDeadError, OutputSink
from metal_engine.errors import AdapterError
from metal_engine.lora_adapter import Adapter
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, RequestStatus
from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# Time for processing the inbox before the next step. Adding a request takes 10 to 400 µs.
_INBOX_SECONDS = 0.01


@dataclass(frozen=True)
class _Add:
    request_id: str
    prepared: PreparedRequest
    seed: int
    options: RequestOptions | None
    so_far: RequestOutput | None
    num_failures: int
    arrival_time: float


@dataclass(frozen=True)
class _End:
    request_id: str
    status: RequestStatus
    num_output_tokens: int | None


@dataclass(frozen=True)
class _Watch:
    on_frame: FrameSink | None


@dataclass(frozen=True)
class _Call:
    function: Callable[[], None]
    done: Future[None]

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:  # noqa: BLE001  (raised by call())
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class EngineThread:
    """Runs an engine in a thread: builds the engine, and steps it while there are requests.

    Implements :class:`metal_engine.engine.transport.Transport`.

    Args:
        build: function that builds the engine. Called in the thread.

    Attributes:
        error: error that ended the thread, or the loss of a rank; None while it runs or after a shutdown.
        is_restarting: False: a thread that has ended is not replaced.
    """

    is_restarting = False

    def __init__(self, build: Callable[[], BuiltEngine]) -> None:
        self._build = build
        self._on_outputs: OutputSink
        self._on_end: EndSink
        self._inbox: queue.SimpleQueue[_Add | _End | _Watch | _Call | None] = queue.SimpleQueue()  # None: stop
        self._ready = threading.Event()
        self._engine: BuiltEngine | None = None
        self.error: BaseException | None = None
        # Held to submit and to stop. Without it, a request could enter the inbox after the thread has ended.
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self, on_outputs: OutputSink, on_end: EndSink = lambda message: None) -> BuiltEngine:
        """Start the thread and wait until the engine is built. Raises the errors of ``build``.

        If the wait is interrupted, the thread ends after the build. The callbacks run in the started thread. If a rank
        is lost, another thread calls them.
        """
        self._on_outputs, self._on_end = on_outputs, on_end
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # such as KeyboardInterrupt
            self._inbox.put(None)
            raise
        if self._engine is None:
            assert self.error is not None
            self._thread.join()  # the thread closes its streams before the process may end
            raise self.error
        return self._engine

    def submit(
        self,
        request_id: str,
        prepared: PreparedRequest,
        seed: int = 0,
        options: RequestOptions | None = None,
        so_far: RequestOutput | None = None,
        num_failures: int = 0,
    ) -> None:
        """Queue one output of a request. Outputs or an error are passed to ``on_outputs``.

        Args:
            request_id: id that is new to the engine.
            seed: seed of the output's random draws.
            so_far: outputs of another engine, after which the request continues (:meth:`EngineCore.add_request`).
            num_failures: number of failures in the other engine since the last token.

        Raises:
            EngineDeadError: the thread has ended.
        """
        with self._lock:
            if self._stopped:
                raise self._dead()
            self._inbox.put(_Add(request_id, prepared, seed, options, so_far, num_failures, time.monotonic()))

    def end(self, request_id: str, status: RequestStatus, num_output_tokens: int | None = None) -> None:
        """End a request before the next step. See :meth:`EngineCore.end_request`.

        Returns at once. Outputs that the thread passes on before it ends the request may still arrive.
        """
        self._inbox.put(_End(request_id, status, num_output_tokens))

    def watch(self, on_frame: FrameSink | None) -> None:
        """Set the callback for frames from the next step on. None turns frames off.

        The callback runs in the engine's thread and must not block.
        """
        self._inbox.put(_Watch(on_frame))

    def load_adapter(self, name: str, path: str, within: Path | None, *, in_place: bool) -> Adapter:
        """Load a LoRA adapter, and wait for it. See :meth:`metal_engine.engine.transport.Transport.load_adapter`."""
        adapters = None if self._engine is None else self._engine.adapters
        if adapters is None:
            raise AdapterError("the engine was started without --enable-lora")
        return adapters.load(name, path, self.call, within=within, in_place=in_place)

    def call(self, function: Callable[[], None]) -> None:
        """Call a short function in the thread between two steps, and wait for it.

        Raises the errors of the function, and EngineDeadError if the thread has ended.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._stopped:
                raise self._dead()
            self._inbox.put(_Call(function, done))
        done.result()

    def release_memory(self) -> None:
        """Free the KV cache of an idle engine. See :meth:`metal_engine.engine.transport.Transport.release_memory`."""
        if self._engine is not None:
            self._inbox.put(_Call(self._engine.core.release_memory, Future()))

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self.error or 'it was shut down'}")

    def shutdown(self, timeout: float | None = 10.0) -> bool:
        """Stop after the step in flight. See :meth:`metal_engine.engine.transport.Transport.shutdown`.

        Open requests get an error output.
        """
        self._inbox.put(None)
        # The engine's thread itself may collect an LLM that the program has dropped.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- in the thread ---

    def _main(self) -> None:
        try:
            self._engine = self._build()
        except BaseException as error:  # noqa: BLE001  (raised by start())
            self.error = error
            return
        finally:
            self._ready.set()
        core = self._engine.core
        core.on_rank_lost(self._lose)
        message = "the engine was shut down"
        try:
            self._loop(core)
        except BaseException as error:
            logger.critical("the engine thread has died", exc_info=True)
            self.error = error
            message = f"the engine has stopped: {error}"
        try:
            # Close before clients are notified, because the notification may end the process.
            self._engine.close()
        finally:
            self._fail_everything(core, message)

    def _lose(self, error: RunnerLostError) -> None:
        """Fail all open requests because a rank is lost. Later calls of :meth:`submit` raise EngineDeadError.

        Called in another thread, because the engine's thread may hang in a step that never ends.
        """
        assert self._engine is not None
        self.error = error
        self._fail_everything(self._engine.core, f"the engine has stopped: {error}")

    def _fail_everything(self, engine: EngineCore, message: str) -> None:
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        requests = engine.request_ids
        while True:
            try:
                waiting = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(waiting, _Add):
                requests.append(waiting.request_id)
            elif isinstance(waiting, _Call):
                waiting.done.set_exception(self._dead())
        self._on_outputs([RequestOutput(r, finish_reason="error", error=message) for r in requests])
        self._on_end(message)

    def _loop(self, engine: EngineCore) -> None:
        while True:
            engine.dispatch_second_part()
            outputs = self._process_inbox(engine)
            if outputs is None:
                return
            if engine.has_requests:
                outputs += engine.step()
            if outputs:
                self._on_outputs(outputs)

    def _process_inbox(self, engine: EngineCore) -> list[RequestOutput] | None:
        """Process the inbox. Block until a message arrives if the engine is idle.

        Stops after ``_INBOX_SECONDS``, because thousands of requests may arrive at once. The next call processes the
        rest.

        Returns:
            Error outputs of requests that could not be added; None if the thread has to stop.
        """
        end = time.monotonic() + _INBOX_SECONDS
        while not engine.has_requests or (time.monotonic() < end and not self._inbox.empty()):
            while not engine.has_requests and self._inbox.empty() and engine.flush_frames():
                pass
            message = self._inbox.get()
            if message is None:
                return None
            if isinstance(message, _Watch):
                engine.watch(message.on_frame)
                continue
            if isinstance(message, _Call):
                message.run()
                continue
            if isinstance(message, _End):
                engine.end_request(message.request_id, message.status, message.num_output_tokens)
                continue
            try:
                engine.add_request(
                    message.request_id,
                    message.prepared,
                    message.seed,
                    message.options,
                    so_far=message.so_far,
                    num_failures=message.num_failures,
                    arrival_time=message.arrival_time,
                )
            except ValueError as error:
                return [RequestOutput(message.request_id, finish_reason="error", error=str(error))]
            except Exception as error:
                # A bug in the engine. Only this request fails.
                logger.exception("request %s could not be added", message.request_id)
                engine.end_request(message.request_id, RequestStatus.FINISHED_ERROR)
                text = f"the request could not be added: {type(error).__name__}: {error}"
                return [RequestOutput(message.request_id, finish_reason="error", error=text)]
        return []
