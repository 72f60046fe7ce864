"""Server's interface to an engine in another process: calls, grammars and frames.

The engine's process holds a grammar, an adapter or the inputs of an image until the server sends a release. The server
may drop its last reference in any thread, so the release is queued. The server sends queued releases together with
another message, or when stats from the engine's process arrive.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from metal_engine.cancellation import check_cancelled
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.process import wire
from metal_engine.engine.process.packed_requests import packed_grammar
from metal_engine.engine.process.packed_results import unpacked_error
from metal_engine.engine.step_observer import Frame, FrameSink
from metal_engine.output_phases import OutputPhases
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig
from metal_engine.token_rules import Grammar

if TYPE_CHECKING:
    from metal_engine.engine.process.remote_adapters import RemoteAdapters

# Interval between two checks of a waiting call for cancellation.
_POLL_SECONDS = 0.02


class EngineCalls:
    """Calls to the process of an engine. Also collects the keys of objects there that the server has dropped.

    Thread-safe.

    Args:
        send: sends a message. Raises EngineDeadError if the engine has ended.
        lock: reentrant lock. The caller holds it while a new process gets the messages of the previous process.

    Attributes:
        lock: the lock. Also held while callbacks of a reply run.
        grammars: weak references to the grammars that the server uses.
        dropped_grammars, dropped_adapters, dropped_images: keys that :meth:`release` will send.
    """

    def __init__(self, send: Callable[[wire.Message], None], lock: threading.RLock) -> None:
        self.send = send
        self._ids = itertools.count()
        self.lock = lock
        self._error: Exception | None = None
        self._pending: dict[int, tuple[wire.Call, Future[wire.Reply]]] = {}
        self.grammars: weakref.WeakSet[RemoteGrammar] = weakref.WeakSet()
        self.dropped_grammars: deque[int] = deque()
        self.dropped_adapters: deque[int] = deque()
        self.dropped_images: deque[int] = deque()

    def begin(self, message: wire.Call) -> Future[wire.Reply]:
        """Set the number of a call, which becomes the key of its result, and send the call.

        Returns the future of the reply. Raises EngineDeadError if the engine has ended.
        """
        message.call, reply = next(self._ids), Future[wire.Reply]()
        with self.lock:
            if self._error is not None:
                raise self._error
            self.release()
            self.send(message)
            self._pending[message.call] = message, reply
        return reply

    def messages(self) -> list[wire.Call]:
        """Return the calls that a new process must get: grammars that are in use, and calls without a reply."""
        needed = {grammar.message.call: grammar.message for grammar in self.grammars}
        return list((needed | {call: message for call, (message, _) in self._pending.items()}).values())

    @staticmethod
    def wait(reply: Future[wire.Reply]) -> wire.Reply:
        """Wait for the reply of a call.

        Raises the error of the call, EngineDeadError if the engine has ended, or Cancelled if the client has
        disconnected.
        """
        while True:
            check_cancelled()
            try:
                found = reply.result(_POLL_SECONDS)
            except TimeoutError:
                continue
            if found.error is not None:
                raise unpacked_error(found.error)
            return found

    def release(self) -> None:
        """Send a message that releases the dropped objects in the process, and forget the calls that make them.

        Raises EngineDeadError.
        """
        dropped = self.dropped_grammars, self.dropped_adapters, self.dropped_images
        if any(dropped):
            keys = [[one.popleft() for _ in range(len(one))] for one in dropped]
            for key in keys[0]:  # the client of a call without a reply has disconnected
                self._pending.pop(key, None)
            self.send(wire.Release(*keys))

    def resolve(self, reply: wire.Reply) -> None:
        """Set the result of a call's future to its reply. Replies of unknown calls are ignored."""
        with self.lock:
            if (pending := self._pending.pop(reply.call, None)) is not None:
                pending[1].set_result(reply)

    def fail(self, error: Exception) -> None:
        """Fail all calls without a reply, and all later calls."""
        with self.lock:
            self._error, failed = error, list(self._pending.values())
            self._pending.clear()
        for _, pending in failed:
            pending.set_exception(error)


@dataclass
class RemoteEngine:
    """Started engine in another process. Implements :class:`metal_engine.engine.transport.StartedEngine`."""

    config: EngineConfig
    preparer: RequestPreparer
    adapters: RemoteAdapters | None
    stats: SchedulerStats
    metrics: EngineMetrics


class RemoteWatch:
    """Callback for the frames of an engine in another process. Frames of earlier watches are dropped.

    Args:
        on_frame: callback; None if frames are off.
        number: number of the watch, which the process repeats in each frame.
    """

    def __init__(self, on_frame: FrameSink | None, number: int) -> None:
        self._on_frame = on_frame
        self.number = number
        self._num_requests = 0
        self._is_whole = False

    @property
    def message(self) -> wire.Watch:
        """Message that starts the watch in a process, or turns frames off."""
        return wire.Watch(None if self._on_frame is None else self.number)

    def receive(self, message: wire.FrameOf) -> None:
        """Pass a frame to the callback, unless it belongs to an earlier watch."""
        if message.watch == self.number and self._on_frame is not None:
            self._num_requests = max([self._num_requests, *(seen.key + 1 for seen in message.frame.requests)])
            self._is_whole = message.frame.is_whole
            self._on_frame(message.frame)

    def interrupt(self) -> None:
        """Pass an empty frame to the callback, because the process has ended.

        With each frame, viewers get the current stats, which show that the engine is restarting.
        """
        if self._on_frame is not None:
            self._on_frame(Frame(is_whole=self._is_whole))

    def begin_again(self) -> None:
        """Pass a frame to the callback that voids all earlier frames: a new process numbers its requests from 0."""
        if self._on_frame is not None:
            self._on_frame(Frame(forget=True, finished=list(range(self._num_requests))))


class RemoteGrammar:
    """Grammar in the process of the engine, with the message that makes it. Its key there is ``message.call``."""

    def __init__(self, message: wire.MakeGrammar) -> None:
        self.message = message


class RemoteGrammars:
    """Factory of grammars in the process of the engine.

    Implements ``metal_engine.engine.token_rules_maker.GrammarMaker``.
    """

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls

    def grammar_for(
        self, structured: StructuredOutputsParams | None, phases: OutputPhases | None, stop_token_ids: np.ndarray
    ) -> Grammar:
        """See :meth:`metal_engine.engine.token_rules_maker.GrammarMaker.grammar_for`.

        Returns a :class:`RemoteGrammar`. Also raises EngineDeadError.
        """
        message = wire.MakeGrammar(0, *packed_grammar(structured, phases), stop_token_ids.tobytes())
        with self._calls.lock:
            reply = self._calls.begin(message)
            grammar = RemoteGrammar(message)
            self._calls.grammars.add(grammar)
        weakref.finalize(grammar, self._calls.dropped_grammars.append, message.call).atexit = False
        if structured is not None:
            self._calls.wait(reply)
            message.was_made = True
        return cast(Grammar, grammar)  # only the process of the engine follows outputs

    def close(self) -> None:
        """Do nothing: the grammars end with the process."""
