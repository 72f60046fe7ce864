"""Server side of the parts of an engine in another process: its calls, grammars, LoRA adapters and frames.

The process holds a grammar or an adapter until the server releases it. The server may drop its last reference in any
thread, so the release is sent with the next message.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from metal_engine.cancellation import check_cancelled
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.process import wire
from metal_engine.engine.process.packed_requests import packed_grammar, packed_text
from metal_engine.engine.process.packed_results import unpacked_error
from metal_engine.engine.step_observer import Frame, FrameSink
from metal_engine.errors import AdapterError
from metal_engine.lora_adapter import Adapter
from metal_engine.output_phases import OutputPhases
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig
from metal_engine.token_rules import Grammar

logger = logging.getLogger(__name__)

# Interval between two checks of a waiting call for cancellation.
_POLL_SECONDS = 0.02


class Calls:
    """Calls to the process of an engine, and the objects there that the server has dropped. Thread-safe.

    Args:
        send: sends a message. Raises EngineDeadError if the engine has ended.
        lock: reentrant lock that is held while a new process gets the messages of the one before it.
    """

    def __init__(self, send: Callable[[wire.Message], None], lock: threading.RLock) -> None:
        self.send = send
        self._ids = itertools.count()
        self._lock = lock
        self._error: Exception | None = None
        self._pending: dict[int, tuple[wire.Call, Future[wire.Reply]]] = {}
        self.grammars: weakref.WeakSet[RemoteGrammar] = weakref.WeakSet()
        self.dropped_grammars: deque[int] = deque()
        self.dropped_adapters: deque[int] = deque()

    def begin(self, message: wire.Call) -> Future[wire.Reply]:
        """Number a call and send it. Return the future of its reply."""
        message.call, reply = next(self._ids), Future[wire.Reply]()
        with self._lock:
            if self._error is not None:
                raise self._error
            self.release()
            self.send(message)
            self._pending[message.call] = message, reply
        return reply

    def messages(self) -> list[wire.Call]:
        """Return the messages that a new process needs: grammars that are in use, and calls without a reply."""
        needed = {grammar.message.call: grammar.message for grammar in self.grammars}
        return list((needed | {call: message for call, (message, _) in self._pending.items()}).values())

    @staticmethod
    def wait(reply: Future[wire.Reply]) -> wire.Reply:
        """Wait for the reply of a call. Raises the error of the call, or Cancelled if the client has disconnected."""
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
        """Release the dropped objects in the process. Later messages do not name them."""
        dropped = self.dropped_grammars, self.dropped_adapters
        if any(dropped):
            keys = [[one.popleft() for _ in range(len(one))] for one in dropped]
            self.send(wire.Release(*keys))

    def resolve(self, reply: wire.Reply) -> None:
        """Pass on the reply of a call."""
        with self._lock:
            pending = self._pending.pop(reply.call, None)
        if pending is not None:
            pending[1].set_result(reply)

    def fail(self, error: Exception) -> None:
        """Fail all calls, also later ones."""
        with self._lock:
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
        number: number of the watch.
    """

    def __init__(self, on_frame: FrameSink | None, number: int) -> None:
        self._on_frame = on_frame
        self.number = number
        self._num_requests = 0

    @property
    def message(self) -> wire.Watch:
        """Message that starts the watch in a process, or turns frames off."""
        return wire.Watch(None if self._on_frame is None else self.number)

    def receive(self, message: wire.FrameOf) -> None:
        """Pass on a frame."""
        if message.watch == self.number and self._on_frame is not None:
            self._num_requests = max([self._num_requests, *(seen.key + 1 for seen in message.frame.requests)])
            self._on_frame(message.frame)

    def begin_again(self) -> None:
        """Void all earlier frames, because a new process numbers its requests from 0."""
        if self._on_frame is not None:
            self._on_frame(Frame(forget=True, finished=list(range(self._num_requests))))


class RemoteGrammar:
    """Grammar in the process of the engine, with the message that makes it. Its key is the number of the call."""

    def __init__(self, message: wire.MakeGrammar) -> None:
        self.message = message


class RemoteGrammars:
    """Factory of grammars in the process of the engine. Implements ``metal_engine.engine.token_rules.GrammarMaker``."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def grammar_for(
        self, structured: StructuredOutputsParams | None, phases: OutputPhases | None, stop_token_ids: np.ndarray
    ) -> Grammar:
        """See :meth:`metal_engine.engine.token_rules.GrammarMaker.grammar_for`."""
        message = wire.MakeGrammar(0, *packed_grammar(structured, phases), stop_token_ids.tobytes())
        reply = self._calls.begin(message)
        grammar = RemoteGrammar(message)
        self._calls.grammars.add(grammar)
        weakref.finalize(grammar, self._calls.dropped_grammars.append, message.call).atexit = False
        if structured is not None:
            self._calls.wait(reply)
        return cast(Grammar, grammar)  # only the process of the engine follows outputs

    def close(self) -> None:
        """Do nothing: the grammars end with the process."""


class RemoteAdapters:
    """LoRA adapters in the process of the engine, by name. Implements ``metal_engine.engine.transport.AdapterTable``.

    Args:
        loaded: adapters that were loaded with the model.
    """

    def __init__(self, calls: Calls, loaded: list[wire.LoadedAdapter]) -> None:
        self._calls = calls
        self._held: weakref.WeakKeyDictionary[Adapter, weakref.finalize] = weakref.WeakKeyDictionary()
        self._adapters = {one.name: self._hold(one) for one in loaded}
        self._loading = threading.Lock()

    def find(self, name: str | None) -> Adapter | None:
        return self._adapters.get(name) if name is not None else None

    @property
    def adapters(self) -> list[Adapter]:
        """Loaded adapters in the order of loading."""
        return list(self._adapters.values())

    def load(self, name: str, path: str, within: Path, *, in_place: bool) -> Adapter:
        """See :meth:`metal_engine.lora.registry.AdapterRegistry.load`."""
        with self._loading:
            try:
                adapter = self._load(name, path, within, in_place)
            except AdapterError as error:
                if not in_place or error.param != "lora_name" or not self._drop_unused(name):
                    raise
                adapter = self._load(name, path, within, in_place)
            self._adapters[name] = adapter
            return adapter

    def _load(self, name: str, path: str, within: Path, in_place: bool) -> Adapter:
        texts = packed_text(name), packed_text(path), packed_text(str(within))
        reply = self._calls.wait(self._calls.begin(wire.LoadAdapter(0, *texts, in_place)))
        if reply.adapter is None:
            raise wire.WireError("a reply without the loaded adapter")
        return self._hold(reply.adapter)

    def _hold(self, loaded: wire.LoadedAdapter) -> Adapter:
        adapter = Adapter(
            loaded.name, loaded.path, loaded.slot, loaded.rank, loaded.fingerprint, loaded.base_model_name
        )
        self._held[adapter] = end = weakref.finalize(adapter, self._calls.dropped_adapters.append, loaded.slot)
        end.atexit = False
        return adapter

    def has(self, adapter: Adapter) -> bool:
        """Return True if the process holds an adapter."""
        return adapter in self._held

    def reset(self, loaded: list[wire.LoadedAdapter]) -> None:
        """Drop the adapters that a new process has not loaded at its start, in the same slots."""
        there = {(one.slot, one.fingerprint) for one in loaded}
        for adapter, end in list(self._held.items()):
            if (adapter.slot, adapter.fingerprint) not in there:
                end.detach()
                del self._held[adapter]
                if self._adapters.get(adapter.name) is adapter:
                    del self._adapters[adapter.name]
                    logger.warning("the LoRA adapter %r must be loaded again", adapter.name)
        self._calls.dropped_adapters.clear()

    def _drop_unused(self, name: str) -> bool:
        """Drop the adapter of a name if no request uses it, so that its slot becomes free. Return True if so."""
        reference = weakref.ref(self._adapters.pop(name)) if name in self._adapters else None
        if reference is not None and (used := reference()) is not None:
            self._adapters[name] = used
            return False
        return reference is not None

    def unload(self, name: str) -> bool:
        """See :meth:`metal_engine.lora.registry.AdapterRegistry.unload`."""
        if self._adapters.pop(name, None) is None:
            return False
        self._calls.send(wire.UnloadAdapter(packed_text(name)))
        return True
