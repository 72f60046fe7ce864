"""Keeps an engine alive in a process of its own: starts a new process when one ends, and continues the requests."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from metal_engine.engine.device_access import FULL_ACCESS, DeviceAccess
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.process import wire
from metal_engine.engine.process.engine_process import EngineProcess
from metal_engine.engine.process.open_request import OpenRequest
from metal_engine.engine.process.packed_results import MetricsTotals, unpacked_output
from metal_engine.engine.process.remote import EngineCalls, RemoteEngine, RemoteGrammars, RemoteWatch
from metal_engine.engine.process.remote_adapters import RemoteAdapters
from metal_engine.engine.process.remote_images import RemoteImages
from metal_engine.engine.process.restartable_process import RestartableProcess
from metal_engine.engine.process.spawner import Spawner
from metal_engine.engine.step_observer import FrameSink
from metal_engine.engine.transport import EndSink, EngineDeadError, OutputSink
from metal_engine.errors import AdapterError, LoadCancelledError, ModelLoadError
from metal_engine.lora_adapter import Adapter
from metal_engine.request import MAX_FAILURES, PreparedRequest, RequestOptions, RequestOutput, RequestStatus
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Interval of checks for a cancelled load.
_POLL_SECONDS = 0.1


class EngineSupervisor:
    """Runs an engine in a process of its own. Implements :class:`metal_engine.engine.transport.Transport`.

    If the process ends, a new process continues its requests after their output so far, with the same random draws. The
    requests of the last steps may have caused the end. After two ends without a new token, such a request is a suspect,
    and suspects run one at a time. After a third end, it gets an error.

    A process that computes no step although it has requests is killed.

    Args:
        spawner: starts the processes.
        args: settings of the engine.
        make_tokenizer: function that returns the tokenizer of the loaded model.
        access: access to the device. Grants memory to the engine.

    Attributes:
        error: error that ended the engine, or prevented its start; None while it runs or after a shutdown.
    """

    def __init__(
        self,
        spawner: Spawner,
        args: dict[str, Any],
        make_tokenizer: Callable[[wire.Ready], Tokenizer],
        access: DeviceAccess = FULL_ACCESS,
    ) -> None:
        self._restartable = RestartableProcess(spawner, args, access)
        self._access = access
        self._make_tokenizer = make_tokenizer
        self._on_outputs: OutputSink = lambda outputs: None
        self._on_end: EndSink = lambda message: None
        # Held to change the open requests and to send their messages, so that each process gets each request once.
        self._lock = threading.RLock()
        self._open: dict[str, OpenRequest] = {}
        self._is_up = False
        self._is_shutting_down = False
        self._calls = EngineCalls(self._send, self._lock)
        self._images = RemoteImages(self._calls)
        self._engine: RemoteEngine | None = None
        self._metrics = EngineMetrics()
        self._totals = MetricsTotals(self._metrics)
        self._computing: deque[list[str]] = deque(maxlen=2)  # requests of the last two steps
        self._watch = RemoteWatch(None, 0)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.error: BaseException | None = None

    @property
    def is_restarting(self) -> bool:
        """True if no process can take requests: at the start, during a restart, and after a shutdown."""
        return not self._is_up and self.error is None

    @property
    def _process(self) -> EngineProcess | None:
        return self._restartable.current

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self._thread.ident is None:
            self._thread.start()

    def start(self, on_outputs: OutputSink, on_end: EndSink = lambda message: None) -> RemoteEngine:
        """Start the process and wait for the engine. Another thread calls the callbacks.

        Raises the errors of the build, and LoadCancelledError if the load is no longer wanted. The process has then
        ended.
        """
        self._on_outputs, self._on_end = on_outputs, on_end
        self.launch()
        try:
            while not self._ready.wait(_POLL_SECONDS):
                self._access.check_wanted()
        except LoadCancelledError:
            self.shutdown(0.0)
            self._thread.join()  # nothing is claimed after that
            raise
        if self._engine is None:
            assert self.error is not None
            raise self.error
        return self._engine

    def _send(self, message: wire.Message) -> None:
        """Send a message to the process. Raises EngineDeadError if the engine has ended.

        While no process runs, the message is dropped. :meth:`_resume` sends a new process the current state.
        """
        with self._lock:
            if self.error is not None or self._is_shutting_down:
                raise EngineDeadError(str(self.error or "the engine has stopped: it was shut down"))
            if self._is_up and self._process is not None:
                self._process.send(message)

    def submit(
        self,
        request_id: str,
        prepared: PreparedRequest,
        seed: int = 0,
        options: RequestOptions | None = None,
        so_far: RequestOutput | None = None,
    ) -> None:
        """Queue one output of a request. See :meth:`metal_engine.engine.engine_thread.EngineThread.submit`."""
        with self._lock:
            opened = OpenRequest(prepared, seed, options, None, self._images.inputs_of(prepared.images))
            if so_far is not None:
                opened.add(so_far)
            self._send(opened.message(request_id))
            self._open[request_id] = opened
            self._calls.release()

    def end(self, request_id: str, status: RequestStatus, num_output_tokens: int | None = None) -> None:
        """End a request. See :meth:`metal_engine.engine.engine_thread.EngineThread.end`."""
        assert status.finish_reason is not None
        with self._lock:
            self._open.pop(request_id, None)
            if self._is_up and self._process is not None:
                self._process.send(wire.End(request_id, status.finish_reason, num_output_tokens))

    def watch(self, on_frame: FrameSink | None) -> None:
        """Set the callback for frames. See :meth:`metal_engine.engine.transport.Transport.watch`."""
        with self._lock:
            self._watch = RemoteWatch(on_frame, self._watch.number + 1)
            if self._is_up and self._process is not None:
                self._process.send(self._watch.message)

    def load_adapter(self, name: str, path: str, within: Path, *, in_place: bool) -> Adapter:
        """Load a LoRA adapter, and wait for it. See :meth:`metal_engine.lora.registry.AdapterRegistry.load`."""
        if self._engine is None or self._engine.adapters is None:
            raise AdapterError("the engine was started without --enable-lora")
        return self._engine.adapters.load(name, path, within, in_place=in_place)

    def release_memory(self) -> None:
        """Free the KV cache of an idle engine. See :meth:`metal_engine.engine.transport.Transport.release_memory`."""
        with suppress(EngineDeadError):
            self._send(wire.ReleaseMemory())

    def shutdown(self, timeout: float | None = 10.0) -> bool:
        """Stop after the step in flight. Return True if the process has ended within ``timeout`` seconds.

        Otherwise, kill the process and return False. Open requests may get no final output before ``on_end`` is called.
        """
        with self._lock:
            self._is_shutting_down = True
            self._restartable.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
        has_ended = not self._thread.is_alive()
        self._restartable.kill()
        return has_ended

    # --- in the thread ---

    def _main(self) -> None:
        try:
            self._engine = self._first_engine(self._restartable.build())
        except BaseException as error:  # noqa: BLE001  (raised by start())
            self._restartable.kill()
            self.error = error
            return
        finally:
            self._ready.set()
        try:
            while (problem := self._run()) is None:
                pass
        except BaseException as error:  # a fault of this code: without an end, all requests would wait forever
            logger.critical("the engine cannot be kept alive", exc_info=True)
            problem = f"it cannot be kept alive: {type(error).__name__}: {error}"
        self._restartable.kill()
        self._die(problem)

    def _run(self) -> str | None:
        """Receive messages until the process ends. Then start a new process that continues the requests.

        Returns None if a new process continues the requests, otherwise the reason why the engine has ended.
        """
        assert self._process is not None
        problem = cause = self._process.receive_all(self._process_message)
        ended_at = time.monotonic()
        with self._lock:
            self._is_up = False
        self._watch.interrupt()
        while self._restartable.may_restart():
            logger.error("%s%s; a new process continues %d requests", cause, self._last_words, len(self._open))
            try:
                self._resume(self._restartable.build(), ended_at)
                return None
            except Exception as error:  # noqa: BLE001  (logged in the next iteration, or as the problem)
                self._process.kill()
                cause = str(error)
                problem = f"{problem.partition('; then: ')[0]}; then: {cause}"
        return f"{problem}{self._restartable.refusal}"

    @property
    def _last_words(self) -> str:
        words = "" if self._process is None else self._process.last_words
        return f" (last words: {words})" if words else ""

    def _first_engine(self, ready: wire.Ready) -> RemoteEngine:
        self._totals.update(ready.numbers.metrics)
        preparer = RequestPreparer(ready.config, self._make_tokenizer(ready), RemoteGrammars(self._calls))
        adapters = None if ready.adapters is None else RemoteAdapters(self._calls, ready.adapters)
        self._is_up = True
        return RemoteEngine(ready.config, preparer, adapters, ready.numbers.stats, self._metrics)

    def _resume(self, ready: wire.Ready, ended_at: float) -> None:
        """Send a new process the adapters, grammars, images and open requests of the previous process.

        Requests that have failed too often get an error. Updates the metrics about resumed and failed requests.

        Args:
            ready: message of the new process that its model is loaded.
            ended_at: time of the end of the previous process in seconds of ``time.monotonic``.

        Raises:
            ModelLoadError: the KV cache of the new process is smaller.
        """
        engine, process = self._engine, self._process
        assert engine is not None and process is not None
        if ready.config.cache.num_blocks < engine.config.cache.num_blocks:
            raise ModelLoadError("the KV cache has become smaller, so that some requests may not fit")
        with self._lock:
            for request_id in {request_id for ids in self._computing for request_id in ids} & self._open.keys():
                self._open[request_id].num_failures += 1
            self._computing.clear()
            if engine.adapters is not None:
                engine.adapters.restore(ready.adapters or [], process.send)
            for message in itertools.chain(self._calls.messages(), self._images.messages()):
                process.send(message)
            for request_id, opened in self._open.items():
                if opened.num_failures < MAX_FAILURES:
                    process.send(opened.message(request_id))
            process.send(self._watch.message)
            # No message can fail from here on. Until then, these requests stay open for the next process.
            failed = [request_id for request_id, opened in self._open.items() if opened.num_failures >= MAX_FAILURES]
            for request_id in failed:
                del self._open[request_id]
            self._is_up = True
            self._watch.begin_again()
            num_resumed = len(self._open)
        seconds = time.monotonic() - ended_at
        self._metrics.num_resumed_requests += num_resumed
        self._metrics.restart.add(seconds)
        self._metrics.num_finished["error"] += len(failed)
        self._totals.begin_engine(engine.stats)
        engine.stats = self._totals.add_stats(ready.numbers.stats)
        logger.warning("%d requests continue after %.1f s, %d have failed", num_resumed, seconds, len(failed))
        if failed:
            problem = f"the engine's process has ended {MAX_FAILURES} times while it computed this request"
            self._on_outputs([RequestOutput(one, finish_reason="error", error=problem) for one in failed])

    def _die(self, problem: str) -> None:
        dead = EngineDeadError(f"the engine has stopped: {'it was shut down' if self._is_shutting_down else problem}")
        with self._lock:
            self._open.clear()
            if not self._is_shutting_down:
                self.error = dead
        self._calls.fail(dead)
        if self.error is not None:
            logger.critical("%s%s", dead, self._last_words)
        self._on_end(str(dead))

    def _process_message(self, message: wire.FromEngine) -> None:
        engine = self._engine
        assert engine is not None
        match message:
            case wire.Outputs():
                self._follow(message.stats)
                self._on_outputs(self._recorded([unpacked_output(output) for output in message.outputs]))
            case wire.Numbers():
                self._follow(message.stats)
                self._totals.update(message.metrics)
                with self._lock, suppress(EngineDeadError):
                    self._calls.release()
            case wire.Computing():
                self._computing.append(message.request_ids)
            case wire.Reply():
                self._calls.resolve(message)
                if message.error is not None and engine.adapters is not None:
                    engine.adapters.lose(message.call)
            case wire.FrameOf():
                self._watch.receive(message)
            case _:
                raise wire.WireError(f"an unexpected message of type {type(message).__name__}")

    def _follow(self, stats: SchedulerStats) -> None:
        engine = self._engine
        assert engine is not None
        self._restartable.record_stats(engine.stats, stats, has_requests=bool(self._open))
        engine.stats = self._totals.add_stats(stats)

    def _recorded(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Record outputs, so that a new process can continue after them. Return ``outputs``."""
        self._restartable.record_output()
        with self._lock:
            for output in outputs:
                opened = self._open.get(output.request_id)
                if opened is None:
                    continue
                if output.finish_reason is not None:
                    del self._open[output.request_id]
                else:
                    opened.add(output)
        return outputs
