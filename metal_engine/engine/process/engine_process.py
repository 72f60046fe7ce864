"""Server side of an engine in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metal_engine.checkpoints.tokenizer import load_tokenizer
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.process import wire
from metal_engine.engine.process.channel import Channel
from metal_engine.engine.process.packed_requests import packed_request
from metal_engine.engine.process.packed_results import unpacked_error, unpacked_output, update_metrics
from metal_engine.engine.process.remote import Calls, RemoteAdapters, RemoteGrammar, RemoteGrammars
from metal_engine.engine.step_observer import FrameSink
from metal_engine.engine.transport import EndSink, EngineDeadError, OutputSink
from metal_engine.errors import AdapterError, ModelLoadError
from metal_engine.lora_adapter import Adapter
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, RequestStatus
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import EngineConfig
from metal_engine.text.chat_template_file import read_chat_template
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Time after which a process that reads no message counts as broken.
_STALL_SECONDS = 30.0
# Time for a process whose socket has ended to end by itself, so that its exit status is known.
_EXIT_SECONDS = 2.0


@dataclass
class RemoteEngine:
    """Started engine in another process. Implements :class:`metal_engine.engine.transport.StartedEngine`."""

    config: EngineConfig
    preparer: RequestPreparer
    adapters: RemoteAdapters | None
    stats: SchedulerStats
    metrics: EngineMetrics


class EngineProcess:
    """Runs an engine in a process of its own. Implements :class:`metal_engine.engine.transport.Transport`.

    A thread starts the process and receives its messages. It lives as long as the process: on Linux, the system ends
    the process when the thread that has started it ends.

    Args:
        module: name of the process's main module, which gets the descriptor of a socket as its argument.
        start: first message to the process.
        make_tokenizer: function that returns the tokenizer of the loaded model.
        stall_seconds: time after which a process that reads no message counts as broken.
    """

    def __init__(
        self,
        module: str,
        start: wire.Start,
        make_tokenizer: Callable[[wire.Ready], Tokenizer],
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._module = module
        self._start_message = start
        self._make_tokenizer = make_tokenizer
        self._on_outputs: OutputSink = lambda outputs: None
        self._on_end: EndSink = lambda message: None
        ours, self._theirs = socket.socketpair()
        self._channel = Channel(ours, stall_seconds)
        self._calls = Calls(self._send)
        self._process: subprocess.Popen[bytes] | None = None
        self._engine: RemoteEngine | None = None
        self._ready = threading.Event()
        self._is_shutting_down = False
        self._last_words = ""  # reason that the process has given for its end
        # Number of the current watch, and its callback. Frames of earlier watches are dropped.
        self._watch: tuple[int, FrameSink | None] = (0, None)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.error: BaseException | None = None

    def launch(self) -> None:
        """Start the process, and do not wait for it."""
        if self._thread.ident is None:
            self._thread.start()

    def start(self, on_outputs: OutputSink, on_end: EndSink = lambda message: None) -> RemoteEngine:
        """Start the process and wait for the engine. Raises the errors of building it. Callbacks run in a thread."""
        self._on_outputs, self._on_end = on_outputs, on_end
        self.launch()
        self._ready.wait()
        if self._engine is None:
            assert self.error is not None
            raise self.error
        return self._engine

    def _send(self, message: wire.Message) -> None:
        if self.error is not None or self._is_shutting_down:
            raise self._dead()
        self._channel.send(message)

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self.error or 'it was shut down'}")

    def submit(
        self,
        request_id: str,
        prepared: PreparedRequest,
        seed: int = 0,
        options: RequestOptions | None = None,
        so_far: RequestOutput | None = None,
    ) -> None:
        """Queue one output of a request. See :meth:`metal_engine.engine.engine_thread.EngineThread.submit`."""
        grammar = prepared.rules.grammar
        key = grammar.key if isinstance(grammar, RemoteGrammar) else None
        self._send(packed_request(request_id, prepared, seed, options, so_far, key))
        self._calls.release()

    def end(self, request_id: str, status: RequestStatus, num_output_tokens: int | None = None) -> None:
        """End a request. See :meth:`metal_engine.engine.engine_thread.EngineThread.end`."""
        assert status.finish_reason is not None
        self._channel.send(wire.End(request_id, status.finish_reason, num_output_tokens))

    def watch(self, on_frame: FrameSink | None) -> None:
        """Set the callback for frames. See :meth:`metal_engine.engine.transport.Transport.watch`."""
        number = self._watch[0] + 1
        self._watch = number, on_frame
        self._channel.send(wire.Watch(None if on_frame is None else number))

    def load_adapter(self, name: str, path: str, within: Path, *, in_place: bool) -> Adapter:
        """Load a LoRA adapter, and wait for it. See :meth:`metal_engine.lora.registry.AdapterRegistry.load`."""
        if self._engine is None or self._engine.adapters is None:
            raise AdapterError("the engine was started without --enable-lora")
        return self._engine.adapters.load(name, path, within, in_place=in_place)

    def shutdown(self, timeout: float | None = 10.0) -> bool:
        """Stop after the step in flight. Return True if the process has ended within ``timeout`` seconds.

        Otherwise, the process is killed.
        """
        self._channel.send(wire.Shutdown())
        self._is_shutting_down = True
        if self._thread.is_alive():
            self._thread.join(timeout)
        has_ended = not self._thread.is_alive()
        self._kill()
        return has_ended

    # --- in the thread ---

    def _main(self) -> None:
        try:
            self._engine = self._launch()
        except BaseException as error:  # noqa: BLE001  (raised by start())
            self._kill()
            self.error = error
            return
        finally:
            self._ready.set()
        problem = self._receive_all(self._engine)
        if self._is_shutting_down:
            self._calls.fail(self._dead())
            return
        self.error = RuntimeError(problem)
        logger.critical("the engine has stopped: %s", problem)
        self._calls.fail(self._dead())
        self._on_end(f"the engine has stopped: {problem}")

    def _launch(self) -> RemoteEngine:
        """Start the process and wait until it has loaded the model."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with self._theirs as theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's interrupt must not reach this process
            )
        self._channel.send(self._start_message)
        try:
            ready = wire.decode_from_engine(self._channel.receive())
            if isinstance(ready, wire.Refused):
                raise unpacked_error(ready.error)
            if not isinstance(ready, wire.Ready):
                raise wire.WireError(f"a first message of type {type(ready).__name__}")
            metrics = EngineMetrics()
            update_metrics(metrics, ready.numbers.metrics)
        except (EOFError, wire.WireError) as error:
            raise ModelLoadError(f"the model cannot be loaded: {self._ended(error)}") from error
        preparer = RequestPreparer(ready.config, self._make_tokenizer(ready), RemoteGrammars(self._calls))
        adapters = None if ready.adapters is None else RemoteAdapters(self._calls, ready.adapters)
        return RemoteEngine(ready.config, preparer, adapters, ready.numbers.stats, metrics)

    def _receive_all(self, engine: RemoteEngine) -> str:
        """Process the messages of the engine until its end. Return the reason."""
        try:
            while True:
                self._process_message(engine, wire.decode_from_engine(self._channel.receive()))
        except (EOFError, wire.WireError) as error:
            return self._ended(error)
        except Exception as error:
            logger.exception("a message of the engine's process cannot be processed")
            return self._ended(wire.WireError(f"a message that cannot be processed: {type(error).__name__}: {error}"))

    def _process_message(self, engine: RemoteEngine, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                engine.stats = message.stats
                self._on_outputs([unpacked_output(output) for output in message.outputs])
            case wire.Numbers():
                engine.stats = message.stats
                update_metrics(engine.metrics, message.metrics)
            case wire.Reply():
                self._calls.resolve(message)
            case wire.FrameOf():
                number, on_frame = self._watch
                if message.watch == number and on_frame is not None:
                    on_frame(message.frame)
            case wire.Ended():
                self._last_words = message.message.removeprefix("the engine has stopped: ")
            case _:
                raise wire.WireError(f"an unexpected message of type {type(message).__name__}")

    def _ended(self, error: EOFError | wire.WireError) -> str:
        """End the process after an error of its channel. Return the reason of the end."""
        assert self._process is not None
        problem = f"the engine's process has sent {error}"
        if isinstance(error, EOFError):
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                problem = "the engine's process has closed its socket"
            else:
                problem = f"the engine's process has ended with {_cause(self._process.returncode)}"
            if self._channel.problem:
                problem = f"the engine's process hangs: {self._channel.problem}"
        self._kill()
        return self._last_words or problem

    def _kill(self) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _cause(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    name = signal.Signals(-status).name
    return f"{name}, which the system sends if memory runs out" if -status == signal.SIGKILL else name


def tokenizer_of(args: EngineArgs, ready: wire.Ready) -> Tokenizer:
    """Return the tokenizer of a model that another process has loaded.

    Raises:
        ModelLoadError: the tokenizer cannot be read.
    """
    assert ready.tokenizer_path is not None
    tokenizer = load_tokenizer(Path(ready.tokenizer_path), trust_remote_code=args.trust_remote_code)
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(args.chat_template)
    return Tokenizer(
        tokenizer, frozenset(ready.eos_token_ids), allow_special_tokens_in_content=args.allow_special_tokens_in_content
    )
