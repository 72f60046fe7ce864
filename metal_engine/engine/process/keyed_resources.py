"""Resources in the engine's process that requests of the server use: grammars, adapters and inputs of images."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metal_engine.cancellation import caller_disconnected
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.engine.process import wire
from metal_engine.engine.process.packed_images import InputArrays, unpacked_inputs
from metal_engine.engine.process.packed_requests import (
    unpacked_phases,
    unpacked_request,
    unpacked_structured,
    unpacked_text,
)
from metal_engine.engine.process.packed_results import packed_adapter, packed_error
from metal_engine.errors import AdapterError
from metal_engine.grammars.compiler import GrammarRefusedError
from metal_engine.lora_adapter import Adapter
from metal_engine.request import PreparedRequest
from metal_engine.token_rules import Grammar

# Maximum number of structured outputs whose grammars are made at once. `GrammarCompiler` allows fewer waiting grammars.
_MAX_GRAMMARS = 32
# Number of retries for a grammar that an earlier process has made: only a time limit on a busy machine can refuse it.
_NUM_RETRIES = 3


@dataclass(frozen=True)
class _KeyedGrammar:
    """Grammar that the server has requested.

    Attributes:
        made: future of the grammar.
        released: set when the server has released the grammar, which cancels its compilation.
    """

    made: Future[Grammar]
    released: threading.Event


class KeyedResources:
    """Grammars, adapters and image inputs that the server has requested and not released.

    Each has a key that the server has chosen. Messages refer to it by this key.

    Args:
        thread: thread of the engine.
        built: returns the engine, after it was built.
        send: sends a message to the server.
    """

    def __init__(
        self, thread: EngineThread, built: Callable[[], BuiltEngine], send: Callable[[wire.Message], None]
    ) -> None:
        self._thread = thread
        self._built = built
        self._send = send
        self._grammars: dict[int, _KeyedGrammar] = {}
        self._adapters: dict[int, Future[Adapter]] = {}
        self._image_inputs: dict[int, InputArrays] = {}
        self._grammar_calls = ThreadPoolExecutor(_MAX_GRAMMARS, thread_name_prefix="engine-grammars")
        self._adapter_calls = ThreadPoolExecutor(1, thread_name_prefix="engine-adapters")  # in order

    # --- for requests ---

    def needed_by(self, message: wire.Submit) -> list[Future[Any]]:
        """Return the futures of a request's grammar and adapter; an empty list for a request that has neither."""
        needed: list[Future[Any]] = []
        if message.rules.grammar is not None:
            needed.append(self._grammars[message.rules.grammar].made)
        if message.adapter is not None:
            needed.append(self._adapters[message.adapter])
        return needed

    def unpacked(self, message: wire.Submit) -> PreparedRequest:
        """Return the request of a message. Its resources must have been made. Raises WireError."""
        grammar = None if message.rules.grammar is None else self._grammars[message.rules.grammar].made.result()
        adapter = None if message.adapter is None else self._adapters[message.adapter].result()
        return unpacked_request(message, grammar, adapter, self._image_inputs)

    def release(self, message: wire.Release) -> None:
        """Drop the resources that the message names, and cancel the compilations of released grammars."""
        for key in message.adapters:
            self._adapters.pop(key, None)
        for key in message.images:
            self._image_inputs.pop(key, None)
        for key in message.grammars:
            if (lent := self._grammars.pop(key, None)) is not None:
                lent.released.set()

    # --- making them ---

    def add_image_inputs(self, message: wire.ImageInputs) -> None:
        """Store the encoder inputs of an image under the message's key. Raises WireError."""
        self._image_inputs[message.key] = unpacked_inputs(message)

    def make_grammar(self, message: wire.MakeGrammar) -> None:
        """Make a grammar, and send a :class:`wire.Reply`. A structured output is compiled in another thread."""

        def make() -> Grammar:
            stop_token_ids = np.frombuffer(message.stop_token_ids, np.int32)
            structured, phases = unpacked_structured(message.structured), unpacked_phases(message.phases)
            make_once = partial(self._built().preparer.grammars.grammar_for, structured, phases, stop_token_ids)
            for _ in range(_NUM_RETRIES if message.was_made else 0):
                with suppress(GrammarRefusedError):
                    return make_once()
            return make_once()

        lent = _KeyedGrammar(Future(), threading.Event())
        if message.structured is None:  # needs no compilation that the server waits for
            try:
                lent.made.set_result(make())
            except Exception as error:  # noqa: BLE001  (raised in the server)
                lent.made.set_exception(error)
        else:
            context = contextvars.copy_context()
            context.run(caller_disconnected.set, lent.released)
            lent = _KeyedGrammar(self._grammar_calls.submit(context.run, make), lent.released)
        self._grammars[message.call] = lent
        lent.made.add_done_callback(partial(self._answer, message.call))

    def add_loaded(self, adapters: Iterable[Adapter]) -> None:
        """Store adapters that were loaded with the model. The key of each is its negative slot."""
        for adapter in adapters:
            loaded: Future[Adapter] = Future()
            loaded.set_result(adapter)
            self._adapters[-adapter.slot] = loaded

    def load_adapter(self, message: wire.LoadAdapter) -> None:
        """Load an adapter in another thread, and send a :class:`wire.Reply`."""
        self._adapters[message.call] = loaded = self._adapter_calls.submit(self._loaded, message)
        loaded.add_done_callback(partial(self._answer, message.call))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter in another thread, after all loads that were requested before."""
        self._adapter_calls.submit(self._unload, name)

    def _loaded(self, message: wire.LoadAdapter) -> Adapter:
        """Load an adapter and return it.

        If an earlier process had the adapter, the message contains the adapter's fingerprint. If this process has
        already loaded an adapter with this fingerprint, this adapter is returned.

        Raises:
            AdapterError: the adapter cannot be loaded, or its files have changed since an earlier process loaded it.
        """
        name, path = unpacked_text(message.name), unpacked_text(message.path)
        within = None if message.within is None else Path(unpacked_text(message.within))
        if message.fingerprint is None:
            return self._thread.load_adapter(name, path, within, in_place=message.in_place)
        there = [] if (table := self._built().adapters) is None else table.adapters
        if (found := next((one for one in there if one.fingerprint == message.fingerprint), None)) is not None:
            return found
        del there  # an error keeps this frame, which must not hold slots
        problem = f"the LoRA adapter {name!r} was lost when the engine's process ended"
        try:
            adapter = self._thread.load_adapter(name, path, within, in_place=True)
        except AdapterError as error:
            raise AdapterError(f"{problem}: {error}", error.param) from None
        if adapter.fingerprint != message.fingerprint:
            self._unload(name)
            del adapter
            raise AdapterError(f"{problem}: its files have changed since it was loaded")
        return adapter

    def _unload(self, name: str) -> None:
        if (adapters := self._built().adapters) is not None:
            adapters.unload(name)

    def _answer(self, call: int, made: Future[Any]) -> None:
        """Send the result of a call or its error. Errors after the end of the engine are not sent."""
        if (error := made.exception()) is None:
            result = made.result()
            self._send(wire.Reply(call, packed_adapter(result) if isinstance(result, Adapter) else None))
        elif self._thread.error is None:  # otherwise, another process may succeed
            self._send(wire.Reply(call, error=packed_error(error)))
