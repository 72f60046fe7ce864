"""Server side of the LoRA adapters of an engine in another process."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from metal_engine.engine.process import wire
from metal_engine.engine.process.packed_requests import packed_text
from metal_engine.engine.process.remote import EngineCalls
from metal_engine.errors import AdapterError
from metal_engine.lora_adapter import Adapter

logger = logging.getLogger(__name__)


class RemoteAdapters:
    """LoRA adapters in the process of the engine, by name. Implements ``metal_engine.engine.transport.AdapterTable``.

    The slot of an adapter is its key in the process. A new process gets the same adapters under the same keys.

    Args:
        loaded: adapters that were loaded with the model.
    """

    def __init__(self, calls: EngineCalls, loaded: list[wire.LoadedAdapter]) -> None:
        self._calls = calls
        # Adapters that the process holds, with the messages that load them.
        self._held: weakref.WeakKeyDictionary[Adapter, wire.LoadAdapter] = weakref.WeakKeyDictionary()
        self._adapters: dict[str, Adapter] = {}
        self._loading = threading.Lock()
        for one in loaded:
            message = wire.LoadAdapter(-one.slot, packed_text(one.name), packed_text(one.path), None, True)
            self._adapters[one.name] = self._hold(message, one)

    def find(self, name: str | None) -> Adapter | None:
        with self._calls.lock:  # `_drop_unused` removes a name for a moment
            return self._adapters.get(name) if name is not None else None

    @property
    def adapters(self) -> list[Adapter]:
        """Loaded adapters in the order of loading."""
        return list(self._adapters.values())

    def load(self, name: str, path: str, within: Path, *, in_place: bool) -> Adapter:
        """See :meth:`metal_engine.lora.registry.AdapterRegistry.load`. Waits for other loads.

        If ``in_place`` fails because no slot is free, drop the unused old adapter of this name and load again.
        """
        with self._loading:
            try:
                return self._load(name, path, within, in_place)
            except AdapterError as error:
                if not in_place or error.param != "lora_name" or not self._drop_unused(name):
                    raise
                return self._load(name, path, within, in_place)

    def _load(self, name: str, path: str, within: Path, in_place: bool) -> Adapter:
        message = wire.LoadAdapter(0, packed_text(name), packed_text(path), packed_text(str(within)), in_place)
        entered: list[Adapter] = []

        def enter(reply: Future[wire.Reply]) -> None:
            """Record a loaded adapter, so that new processes load it, too. No effect if the load has failed."""
            if not reply.exception() and (loaded := reply.result().adapter) is not None:
                self._adapters[name] = adapter = self._hold(message, loaded)
                entered.append(adapter)

        with self._calls.lock:
            reply = self._calls.begin(message)
            reply.add_done_callback(enter)
        self._calls.wait(reply)
        with self._calls.lock:  # `wait` can return before `enter` is called, which happens under this lock
            if not entered:
                raise wire.WireError("a reply without the loaded adapter")
            return entered.pop()  # not from `_adapters`: another thread may have unloaded the name

    def _hold(self, message: wire.LoadAdapter, loaded: wire.LoadedAdapter) -> Adapter:
        message.fingerprint = loaded.fingerprint
        fields = loaded.rank, loaded.fingerprint, loaded.base_model_name
        adapter = Adapter(loaded.name, loaded.path, message.call, *fields)
        self._held[adapter] = message
        weakref.finalize(adapter, self._calls.dropped_adapters.append, message.call).atexit = False
        return adapter

    def restore(self, loaded: list[wire.LoadedAdapter], send: Callable[[wire.Message], None]) -> None:
        """Send a new process the messages that load the adapters of the previous process.

        Call it while the lock of ``calls`` is held. Does not wait for the loads.

        Args:
            loaded: adapters that the new process has loaded at its start.
            send: sends a message to the new process.
        """
        self._calls.dropped_adapters.clear()
        send(wire.Release([], [-one.slot for one in loaded], []))
        held, current = dict(self._held), self.adapters
        wanted = {message.fingerprint for message in held.values()}
        for one in loaded:
            if one.fingerprint not in wanted:
                send(wire.UnloadAdapter(packed_text(one.name)))
        for adapter, message in held.items():
            if adapter not in current:  # only running requests use it
                send(message)
                send(wire.UnloadAdapter(message.name))
        for adapter in current:
            send(held[adapter])

    def lose(self, key: int) -> None:
        """Drop the adapter with this key, because a new process could not load it.

        No effect if no adapter has the key.
        """
        for adapter in self.adapters:
            if adapter.slot == key:
                del self._adapters[adapter.name]
                logger.warning("the LoRA adapter %r must be loaded again", adapter.name)

    def _drop_unused(self, name: str) -> bool:
        """Drop the adapter of a name if no request uses it, so that its slot becomes free.

        Return True if an adapter was dropped.
        """
        with self._calls.lock:
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
