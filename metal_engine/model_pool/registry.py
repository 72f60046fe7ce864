"""Registry of the models that one server has: finds them by name, loads them on demand, evicts idle models."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from metal_engine.errors import InsufficientMemoryError, LoadCancelledError, one_line
from metal_engine.model_pool.load_queue import LoadQueue
from metal_engine.model_pool.load_thread import RegistryDeviceAccess, load_in_thread, to_model_load_error
from metal_engine.model_pool.memory_budget import MemoryBudget
from metal_engine.model_pool.model_entry import FailedLoad, Load, LoadedEngine, ModelEntry, ModelSource, ModelState
from metal_engine.settings.fields import format_size

logger = logging.getLogger(__name__)

# One thread loads a model. The other threads unload models and check the files of models at the same time.
_NUM_THREADS = 3
# Delay before a failed load is tried again, unless the model's files have changed.
RETRY_SECONDS = 10.0
# Delay from the end of an engine to a garbage collection, so that its threads have dropped their references.
_COLLECT_SECONDS = 0.5


class RegistryClosedError(RuntimeError):
    """The server is shutting down, so no model is loaded any more."""


class ModelRegistry:
    """Models by name, within one memory budget. Belongs to one event loop, except for :meth:`shutdown`.

    Models are loaded one at a time, in the order that :class:`LoadQueue` chooses. If memory is short, other models are
    unloaded, idle models first. A model in use that has to be unloaded is closed: it gets no new requests, and is
    unloaded once its running requests have ended. New requests for it wait until it is loaded again. This avoids
    starvation, and no running request is aborted. A load without waiting clients is cancelled, and the models that were
    closed for it stay loaded.

    Args:
        memory_bytes: memory budget of all models together, in bytes.
        keep_alive: seconds for which a model stays loaded after its last request. 0 keeps a model until its memory is
            needed.

    Attributes:
        entries: registered models.
        at_unload: callbacks, called with each model that is about to be unloaded, after its last request.
    """

    def __init__(self, memory_bytes: int, keep_alive: float = 0.0) -> None:
        self.keep_alive = keep_alive
        self.is_closed = False
        self.at_unload: list[Callable[[LoadedEngine], None]] = []
        self.entries: list[ModelEntry] = []
        self._by_name: dict[str, ModelEntry] = {}
        self.budget = MemoryBudget(memory_bytes, self.entries)
        self._queue = LoadQueue(self.budget)
        self._loading: tuple[Load, asyncio.Task[None]] | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="models")

    # --- names ---

    def add(self, name: str, source: ModelSource) -> ModelEntry:
        """Register a model. Raises ValueError if the name is taken."""
        entry = ModelEntry(name, source)
        self.add_name(name, entry)
        self.entries.append(entry)
        return entry

    def add_name(self, name: str, entry: ModelEntry) -> None:
        """Register an additional name of a model. Raises ValueError if the name is taken."""
        if name in self._by_name:
            raise ValueError(f"the name {name!r} is taken")
        self._by_name[name] = entry

    def find(self, name: str) -> ModelEntry | None:
        """Return the model registered under a name, or None."""
        return self._by_name.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All registered names in the order of registration."""
        return tuple(self._by_name)

    # --- use ---

    def is_ready(self, entry: ModelEntry) -> bool:
        """Return True if a request could use the model now: it is loaded, not closing, and its engine runs."""
        return entry.state is ModelState.LOADED and not entry.is_closing and entry.failure is None

    async def use(self, entry: ModelEntry, *, may_evict: bool = True) -> LoadedEngine:
        """Lease a model for one request, until :meth:`release`. Load the model if necessary, and wait for it.

        Args:
            may_evict: True if other models may be unloaded to make room for this model.

        Raises:
            ModelLoadError: loading failed, or failed recently and the model's files have not changed since.
            LoadCancelledError: the model was unloaded while the request waited.
            InsufficientMemoryError: other models would have to be unloaded, and ``may_evict`` is False.
            ModelTooLargeError: the model exceeds the memory budget.
            RegistryClosedError: the server is shutting down.
        """
        load: Load | None = None
        while True:
            # A model loaded for this request serves the request, even if an unload is pending.
            if self.is_ready(entry) or (load is not None and load is entry.loaded_by and entry.failure is None):
                assert entry.loaded_engine is not None
                entry.num_leases += 1
                entry.last_used = time.monotonic()
                self._stop_timer(entry)
                entry.touch()
                return entry.loaded_engine
            if entry.failed is not None and entry.load is None:
                await self._check_failed(entry, entry.failed)
                continue
            load = self._pending_load(entry, may_evict)
            load.num_waiting += 1
            try:
                await asyncio.shield(load.done)
            finally:
                load.num_waiting -= 1
                entry.touch()
                if load in self._queue and not load.is_wanted:
                    self._finish(load, LoadCancelledError(f"no request waits for {entry.name} any more"))
                self._start_timer(entry)  # in case all waiters have disconnected
                self._start_next_load()

    async def _check_failed(self, entry: ModelEntry, failed: FailedLoad) -> None:
        """Raise a copy of the last load error if the retry delay has not passed and the model's files are unchanged.

        Otherwise, clear the error.
        """
        if time.monotonic() < failed.until:
            signature = await asyncio.get_running_loop().run_in_executor(self._threads, entry.source.signature)
            if signature == failed.signature:
                raise to_model_load_error(failed.error)
        if entry.failed is failed:
            entry.failed = None

    def release(self, entry: ModelEntry) -> None:
        """End one request's lease of a model."""
        entry.num_leases -= 1
        entry.last_used = time.monotonic()
        entry.touch()
        self._start_timer(entry)
        self._start_next_load()

    async def load(self, entry: ModelEntry, *, may_evict: bool = True) -> None:
        """Load a model without using it. Takes the arguments and raises the errors of :meth:`use`."""
        await self.use(entry, may_evict=may_evict)
        self.release(entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Unload a model after its running requests have ended, and wait until it is unloaded.

        A queued load is cancelled at once, a running load as soon as its thread checks for cancellation. Requests that
        wait for the model get a LoadCancelledError at once.
        """
        if entry.load is not None:
            entry.load.is_cancelled = True
            self._finish(entry.load, LoadCancelledError(_unwanted(entry)))
            self._start_next_load()
        if self._loading is not None and self._loading[0].entry is entry:
            await asyncio.wait([self._loading[1]])
        await self._close_and_wait(entry)

    def unload_idle(self, seconds: float) -> None:
        """Start to unload the idle models that have served no request for ``seconds``. Call it if memory is short."""
        for entry in self.entries:
            is_unused = entry.is_idle and time.monotonic() - entry.last_used >= seconds
            if is_unused and entry.state is ModelState.LOADED and entry.unloading is None:
                logger.warning("memory is short: unloading %s", entry.name)
                self._close(entry)

    # --- loading, one after the other ---

    def _pending_load(self, entry: ModelEntry, may_evict: bool) -> Load:
        """Return the pending load of a model. Queue a new load if there is none.

        Raises RegistryClosedError if the server is shutting down.
        """
        if self.is_closed:
            raise RegistryClosedError("the server is shutting down")
        if entry.load is None:
            done = asyncio.get_running_loop().create_future()
            entry.load = Load(entry, done, may_evict, entry.known_bytes)
            self._queue.add(entry.load)
            # Deferred until the caller is counted as a waiter: a load without waiters is cancelled.
            asyncio.get_running_loop().call_soon(self._start_next_load)
        entry.load.may_evict |= may_evict
        return entry.load

    def _start_next_load(self) -> None:
        """Start the next load if none is running, and close models whose memory the queued loads need.

        Also resolves queued loads of models that are ready.
        """
        if self.is_closed or not self._queue:
            return
        for load in list(self._queue):
            if self.is_ready(load.entry):
                self._finish(load, None)
            elif load.entry.failure is not None:
                self._close(load.entry)
        if self._loading is None and (load_now := self._queue.next()) is not None:
            self._queue.remove(load_now)
            self._reopen_victims(load_now)
            # Close idle victims now: requests could start on them before the load claims their memory.
            if load_now.num_bytes and load_now.may_evict:
                idle = self.budget.victims(load_now.entry, load_now.num_bytes, also_used=False)
                for entry in idle or ():
                    self._close(entry)
            load_now.entry.state = ModelState.LOADING
            self._loading = load_now, asyncio.ensure_future(self._run(load_now))
            self._start_next_load()  # resolves the loads of models that were reopened
        for entry in self._queue.close_for_first():
            self._close(entry, self._queue.first)

    async def _run(self, load: Load) -> None:
        """Run a load to its end. Requeue a load that lacks memory, or that was given up and has new waiters."""
        load.lacks_memory = load.was_given_up = False
        error = await self._load(load)
        self._loading = None
        # A cancelled load may have new waiters that came before its thread ended.
        if error is not None and load.is_wanted and (load.lacks_memory or load.was_given_up):
            self._queue.add(load)
        else:
            self._finish(load, error)
        self._start_next_load()

    async def _load(self, load: Load) -> Exception | None:
        """Load a model in a thread. Return the error of the load; None if it was successful."""
        entry = load.entry
        access = RegistryDeviceAccess(self, load, asyncio.get_running_loop())
        started = time.monotonic()
        entry.starting = self._threads.submit(load_in_thread, entry.source, access)
        try:
            loaded = await asyncio.wrap_future(entry.starting)
        except Exception as error:  # noqa: BLE001  (raised in the requests that wait for the model)
            entry.state, entry.num_bytes, entry.starting = ModelState.UNLOADED, 0, None
            if not (load.is_cancelled or isinstance(error, InsufficientMemoryError | LoadCancelledError)):
                entry.error = one_line(error)
                entry.failed = FailedLoad(
                    to_model_load_error(error), access.signature, time.monotonic() + RETRY_SECONDS
                )
                logger.error("cannot load %s: %s", entry.name, entry.error)
            self._collect_later()
            return error
        entry.starting = None  # only now: shutdown() waits for this future
        entry.loaded_engine, entry.state, entry.error, entry.loaded_by = loaded, ModelState.LOADED, None, load
        entry.num_loads += 1
        entry.max_model_len = loaded.engine.config.scheduler.max_model_len
        entry.last_used = time.monotonic()
        size = format_size(entry.num_bytes)
        logger.info("loaded %s in %.1f s; it takes %s at most", entry.name, time.monotonic() - started, size)
        return None

    def _finish(self, load: Load, error: Exception | None) -> None:
        """Remove a load from the queue, reopen its victims, and resolve the future that its waiters await.

        Args:
            error: error that the waiters get; None if the model is loaded.
        """
        self._queue.remove(load)
        self._reopen_victims(load)
        if load.entry.load is load:
            load.entry.load = None
        if not load.done.done():
            if error is None:
                load.done.set_result(None)
            else:
                load.done.set_exception(error)
                load.done.exception()  # marks the exception as retrieved, in case there are no waiters
        self._start_timer(load.entry)

    async def claim(self, load: Load, num_bytes: int) -> None:
        """Reserve ``num_bytes`` in total for a model that is being loaded. Unloads idle models if necessary.

        Raises:
            InsufficientMemoryError: models in use have to be unloaded first (``load.lacks_memory`` is then True), or
                other models may not be unloaded.
            LoadCancelledError: see :meth:`check_wanted`.
        """
        entry = load.entry
        if not entry.num_bytes:  # the first claim reserves at least the memory of the last load
            num_bytes = max(num_bytes, load.num_bytes)
        load.num_bytes = entry.known_bytes = num_bytes
        while self.budget.free_for(entry) < num_bytes:
            self.check_wanted(load)
            if not load.may_evict:
                raise self.budget.out_of_memory_error(entry, num_bytes)
            victims = self.budget.victims(entry, num_bytes, also_used=False)
            if victims is None:
                load.lacks_memory = True
                raise InsufficientMemoryError(f"{entry.name} has to wait for models in use")
            await asyncio.gather(*(self._close_and_wait(one) for one in victims))
        self.check_wanted(load)
        entry.num_bytes = num_bytes

    def check_wanted(self, load: Load) -> None:
        """Raise LoadCancelledError if a load is cancelled or has no waiters, or if the registry is closed.

        Records the load as given up before raising. Can be called in any thread.
        """
        if self.is_closed or not load.is_wanted:
            load.was_given_up = True
            raise LoadCancelledError(_unwanted(load.entry))

    # --- unloading ---

    async def _close_and_wait(self, entry: ModelEntry) -> None:
        """Unload a model, or wait for its unload to finish. No effect if the model is not loaded."""
        if entry.unloading is not None or entry.state is ModelState.LOADED:
            self._close(entry)
            assert entry.unloading is not None
            await asyncio.shield(entry.unloading)

    def _close(self, entry: ModelEntry, load: Load | None = None) -> None:
        """Stop giving a model new requests, and unload it after its last request.

        Args:
            load: load that needs the memory. If this load is cancelled first, the model stays loaded. None: the
                model is unloaded in any case.
        """
        if entry.unloading is None:
            entry.is_closing, entry.closed_for = True, load
            self._stop_timer(entry)
            entry.unloading = asyncio.ensure_future(self._shut_down_when_idle(entry))
        elif load is None:
            entry.closed_for = None

    def _reopen_victims(self, load: Load) -> None:
        """Reopen the models that were to be unloaded for a load and are still loaded."""
        for entry in load.victims:
            if entry.closed_for is load and entry.state is ModelState.LOADED:
                assert entry.unloading is not None
                entry.unloading.cancel()
                entry.is_closing, entry.unloading, entry.closed_for = False, None, None
                self._start_timer(entry)
        load.victims = ()

    async def _shut_down_when_idle(self, entry: ModelEntry) -> None:
        await entry.becomes_idle()
        loaded, failure = entry.loaded_engine, entry.failure
        assert loaded is not None
        for callback in self.at_unload:
            try:
                callback(loaded)
            except Exception:
                logger.exception("a callback failed while %s was being unloaded", entry.name)
        entry.state = ModelState.UNLOADING
        entry.loaded_engine, entry.loaded_by, entry.ending = None, None, loaded.engine
        entry.error = None if failure is None else f"its engine has stopped: {one_line(failure)}"
        del loaded
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, entry.ending.shutdown, None)
        except Exception as error:
            entry.error = f"it could not be unloaded properly: {one_line(error)}"
            logger.exception("%s could not be unloaded properly", entry.name)
        entry.state, entry.num_bytes = ModelState.UNLOADED, 0
        entry.is_closing, entry.unloading, entry.closed_for, entry.ending = False, None, None, None
        logger.info("unloaded %s", entry.name)
        self._collect_later()
        self._start_next_load()

    @staticmethod
    def _collect_later() -> None:
        """Schedule a garbage collection, which deletes an ended engine: the engine is part of reference cycles.

        Python alone would collect the engine much later, because most of its memory, such as tens of MiB of the
        tokenizer, is outside Python's objects.
        """
        asyncio.get_running_loop().call_later(_COLLECT_SECONDS, gc.collect)

    def _start_timer(self, entry: ModelEntry) -> None:
        if self.keep_alive and entry.is_idle and entry.state is ModelState.LOADED and not self.is_closed:
            self._stop_timer(entry)
            loop = asyncio.get_running_loop()
            entry.keep_alive = loop.call_later(self.keep_alive, self._expire, entry)

    @staticmethod
    def _stop_timer(entry: ModelEntry) -> None:
        if entry.keep_alive is not None:
            entry.keep_alive.cancel()
            entry.keep_alive = None

    def _expire(self, entry: ModelEntry) -> None:
        entry.keep_alive = None
        if entry.is_idle and entry.state is ModelState.LOADED:
            self._close(entry)

    # --- the end ---

    def cut(self, message: str) -> None:
        """Close the registry: abort all requests, even requests that wait for a model, and stop loading models.

        Call it in the event loop.

        Args:
            message: error message for the requests.
        """
        self.is_closed = True
        for entry in self.entries:
            self._stop_timer(entry)
            if entry.load is not None:
                self._finish(entry.load, RegistryClosedError(message))
            if entry.loaded_engine is not None:
                entry.loaded_engine.engine.cut_requests(message)

    def shutdown(self, timeout: float) -> bool:
        """Stop all engines after the event loop has ended. Return True if all stopped within ``timeout`` seconds.

        Waits for a model that is being loaded, to stop its engine, too.
        """
        self.is_closed = True
        deadline = time.monotonic() + timeout
        stopped = True
        for entry in self.entries:
            engine = entry.ending if entry.loaded_engine is None else entry.loaded_engine.engine
            try:
                if entry.starting is not None:  # its thread finds the registry closed
                    engine = entry.starting.result(max(deadline - time.monotonic(), 0.0)).engine
            except TimeoutError:
                stopped = False
            except Exception as error:  # noqa: BLE001  (the model was not loaded)
                logger.debug("%s was not loaded: %s", entry.name, error)
            if engine is not None:
                stopped &= engine.shutdown(max(deadline - time.monotonic(), 0.0))
        self._threads.shutdown(wait=stopped, cancel_futures=True)
        return stopped


def _unwanted(entry: ModelEntry) -> str:
    return f"the load of {entry.name} was cancelled: the model was to be unloaded, or no request waits for it"
