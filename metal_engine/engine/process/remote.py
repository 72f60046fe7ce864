"""Server side of the grammars and LoRA adapters that an engine's process holds.

An object of the process stays there as long as the server refers to it. Objects may be dropped in any thread, so they
are released with the next message.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import numpy as np

from metal_engine.cancellation import check_cancelled
from metal_engine.engine.process import wire
from metal_engine.engine.process.packed_requests import packed_grammar, packed_text
from metal_engine.engine.process.packed_results import unpacked_error
from metal_engine.errors import AdapterError
from metal_engine.lora_adapter import Adapter
from metal_engine.output_phases import OutputPhases
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.token_rules import Grammar

# Interval at which a call checks whether its client has left.
_POLL_SECONDS = 0.02


class Calls:
    """Calls to the process of an engine, and the objects there that the server has dropped. Thread-safe.

    Args:
        send: sends a message. Raises EngineDeadError if the process has ended.
    """

    def __init__(self, send: Callable[[wire.Message], None]) -> None:
        self.send = send
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._pending: dict[int, Future[wire.Reply]] = {}
        self.dropped_grammars: deque[int] = deque()
        self.dropped_adapters: deque[int] = deque()

    def begin(self, message: Callable[[int], wire.Message]) -> tuple[int, Future[wire.Reply]]:
        """Send a call. Return its number, and the future of its reply.

        Args:
            message: function that returns the message of the call with a number.
        """
        call, reply = next(self._ids), Future[wire.Reply]()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending[call] = reply
        self.release()
        self.send(message(call))
        return call, reply

    @staticmethod
    def wait(reply: Future[wire.Reply]) -> wire.Reply:
        """Wait for the reply of a call. Raises the error of the call, or Cancelled if the client has left."""
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
        """Release the dropped objects in the process. They were in use until now, so earlier messages may name them."""
        dropped = self.dropped_grammars, self.dropped_adapters
        if any(dropped):
            keys = [[one.popleft() for _ in range(len(one))] for one in dropped]
            self.send(wire.Release(*keys))

    def resolve(self, reply: wire.Reply) -> None:
        """Pass on the reply of a call."""
        with self._lock:
            pending = self._pending.pop(reply.call, None)
        if pending is not None:
            pending.set_result(reply)

    def fail(self, error: Exception) -> None:
        """Fail all calls, also later ones."""
        with self._lock:
            self._error, failed = error, list(self._pending.values())
            self._pending.clear()
        for pending in failed:
            pending.set_exception(error)


class RemoteGrammar:
    """Grammar in the process of the engine, by its key."""

    def __init__(self, key: int) -> None:
        self.key = key


class RemoteGrammars:
    """Factory of grammars in the process of the engine. Implements ``metal_engine.engine.token_rules.GrammarMaker``."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def grammar_for(
        self, structured: StructuredOutputsParams | None, phases: OutputPhases | None, stop_token_ids: np.ndarray
    ) -> Grammar:
        """See :meth:`metal_engine.engine.token_rules.GrammarMaker.grammar_for`."""
        packed = packed_grammar(structured, phases)
        key, reply = self._calls.begin(lambda call: wire.MakeGrammar(call, *packed, stop_token_ids.tobytes()))
        grammar = RemoteGrammar(key)
        weakref.finalize(grammar, self._calls.dropped_grammars.append, key).atexit = False
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
        self._adapters = {one.name: self._held(one) for one in loaded}
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
        reply = self._calls.wait(self._calls.begin(lambda call: wire.LoadAdapter(call, *texts, in_place))[1])
        if reply.adapter is None:
            raise wire.WireError("a reply without the loaded adapter")
        return self._held(reply.adapter)

    def _held(self, loaded: wire.LoadedAdapter) -> Adapter:
        adapter = Adapter(
            loaded.name, loaded.path, loaded.slot, loaded.rank, loaded.fingerprint, loaded.base_model_name
        )
        weakref.finalize(adapter, self._calls.dropped_adapters.append, loaded.slot).atexit = False
        return adapter

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
