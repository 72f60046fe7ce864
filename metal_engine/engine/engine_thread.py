"""The one thread that owns the model. MLX arrays and streams belong to the thread that made them, so it builds
the engine and runs every step; other threads hand it requests and are handed outputs."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from metal_engine.engine.core import EngineCore
from metal_engine.engine.device_access import FairDeviceLock
from metal_engine.engine.engine_threads import EngineThreads, LentThread
from metal_engine.engine.step_observer import FrameSink
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput
from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# How long requests are taken in before the next step. One takes 10 to 400 us; with prefix caching its prompt's blocks
# are hashed, too: 19 ms for 262,144 tokens.
_TAKE_IN_SECONDS = 0.01

OutputSink = Callable[[list[RequestOutput]], None]


class EngineDeadError(RuntimeError):
    """The engine thread has ended, so no request can be served."""


@dataclass(frozen=True)
class _Add:
    request_id: str
    prepared: PreparedRequest
    index: int
    options: RequestOptions | None
    arrival_time: float


@dataclass(frozen=True)
class _Abort:
    request_id: str


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
    """Builds an engine in a thread and steps it while there are requests.

    Args:
        build: makes the engine; called in the thread.
        on_outputs: called in the thread, once per step, with that step's outputs. Must not block.
        turns: where several models share the device: each step takes a turn, and so does the end.
        on_end: called in the thread when it ends: no further output comes for any request.
        threads: lend it a thread; without them it has one of its own. "The thread has ended" is for the engine's part.

    Attributes:
        error: what ended the thread, if it ended on its own; None while it runs.
    """

    def __init__(
        self,
        build: Callable[[], EngineCore],
        on_outputs: OutputSink,
        turns: FairDeviceLock | None = None,
        on_end: Callable[[str], None] = lambda message: None,
        threads: EngineThreads | None = None,
    ) -> None:
        self._build = build
        self._on_outputs = on_outputs
        self._turns = turns
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Watch | _Call | None] = queue.SimpleQueue()  # None: stop
        self._ready = threading.Event()
        self._engine: EngineCore | None = None
        self.error: BaseException | None = None
        # Held to submit and to stop, so that no request slips into the inbox of a thread that has ended.
        self._lock = threading.Lock()
        self._stopped = False
        self._thread: threading.Thread | LentThread = (
            threading.Thread(target=self._main, name="engine", daemon=True)
            if threads is None
            else threads.lend(self._main)
        )

    def start(self) -> EngineCore:
        """Start the thread and wait for the engine. Raises what building it raised."""
        self._thread.start()
        self._ready.wait()
        if self._engine is None:
            assert self.error is not None
            self._thread.join()  # its streams are closed before the process may end
            raise self.error
        return self._engine

    def submit(
        self, request_id: str, prepared: PreparedRequest, index: int = 0, options: RequestOptions | None = None
    ) -> None:
        """Queue output ``index`` of a request. What is generated, or an error, arrives at ``on_outputs``.

        Raises:
            EngineDeadError: the thread has ended.
        """
        with self._lock:
            if self._stopped:
                raise self._dead()
            self._inbox.put(_Add(request_id, prepared, index, options, time.monotonic()))

    def abort(self, request_id: str) -> None:
        """End a request before the next step; no further output comes for it after that."""
        self._inbox.put(_Abort(request_id))

    def watch(self, on_frame: FrameSink | None) -> None:
        """Tell ``on_frame`` what steps do from the next one on, in the thread; it must not block. None: nobody."""
        self._inbox.put(_Watch(on_frame))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, between two steps, and wait for it. Raises what it raises; it must be short.

        Raises:
            EngineDeadError: the thread has ended.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._stopped:
                raise self._dead()
            self._inbox.put(_Call(function, done))
        done.result()

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self.error or 'it was shut down'}")

    def shutdown(self, timeout: float | None = 10.0) -> bool:
        """Stop after the step under way. Returns whether the thread has ended within ``timeout`` seconds."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- in the thread ---

    def _main(self) -> None:
        try:
            self._engine = self._build()
        except BaseException as error:  # noqa: BLE001  (handed to the thread that waits in start())
            self.error = error
            return
        finally:
            self._ready.set()
        if self._engine.ranks is not None:
            self._engine.ranks.on_rank_lost(self._lose)
        message = "the engine was shut down"
        try:
            self._loop(self._engine)
        except BaseException as error:
            logger.critical("the engine thread has died", exc_info=True)
            self.error = error
            message = f"the engine has stopped: {error}"
        try:
            # Before anyone is told: they may end the process. In a turn: another model's memory may be measured.
            with nullcontext() if self._turns is None else self._turns.turn():
                self._engine.close()
        finally:
            self._fail_everything(self._engine, message)

    def _lose(self, error: RunnerLostError) -> None:
        """A rank is lost: everybody is told. In another thread, for this one may hang in a step that never ends."""
        assert self._engine is not None
        self.error = error
        self._fail_everything(self._engine, f"the engine has stopped: {error}")

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
        step = engine.step if self._turns is None else partial(self._turns.run, engine.step)
        while True:
            if self._turns is None:  # else within the turn, by the step
                engine.dispatch_second_part()
            outputs = self._process_inbox(engine)
            if outputs is None:
                return
            if engine.has_requests:
                outputs += step()
            if outputs:
                self._on_outputs(outputs)

    def _process_inbox(self, engine: EngineCore) -> list[RequestOutput] | None:
        """Take in what has arrived; wait for it if there is nothing else to do.

        Two thousand may arrive in one go, too many to come between two steps: then the rest waits for the next call.

        Returns:
            The errors of requests that could not be added; None if the thread is to stop.
        """
        end = time.monotonic() + _TAKE_IN_SECONDS
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
            if isinstance(message, _Abort):
                engine.abort_request(message.request_id)
                continue
            try:
                engine.add_request(
                    message.request_id,
                    message.prepared,
                    message.options,
                    index=message.index,
                    arrival_time=message.arrival_time,
                )
            except ValueError as error:
                return [RequestOutput(message.request_id, finish_reason="error", error=str(error))]
            except Exception as error:
                # A mistake here: it is this request's failure alone.
                logger.exception("request %s could not be added", message.request_id)
                engine.abort_request(message.request_id)
                text = f"the request could not be added: {type(error).__name__}: {error}"
                return [RequestOutput(message.request_id, finish_reason="error", error=text)]
        return []
