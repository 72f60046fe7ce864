"""Several models in one process: found by name, loaded when they are needed, unloaded when others need the memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from metal_engine.engine.device_access import FairDeviceLock
from metal_engine.engine.engine_threads import EngineThreads
from metal_engine.errors import LoadCancelledError, NoRoomError, one_line
from metal_engine.model_pool.load_queue import LoadQueue
from metal_engine.model_pool.loading import RegistryShare, load_in_thread, to_model_load_error
from metal_engine.model_pool.memory_budget import MemoryBudget
from metal_engine.model_pool.model_entry import FailedLoad, Load, LoadedEngine, ModelEntry, ModelSource, ModelState
from metal_engine.settings.fields import format_size

logger = logging.getLogger(__name__)

# One loads; beside it models are unloaded.
_NUM_THREADS = 3
# After a failure a model is not tried again for so long, unless its files have changed.
RETRY_SECONDS = 10.0


class RegistryClosedError(RuntimeError):
    """The process is about to end: nothing is loaded any more."""


class ModelRegistry:
    """Models by name, within one budget of memory. Belongs to one event loop, but for :meth:`shutdown`.

    Models are loaded one at a time; :class:`LoadQueue` has the rule by which they go. One that needs room has others
    unloaded: those without requests first, the least recently used first of all. One with requests gets no new ones
    then; these wait until it is loaded again. So nobody waits for ever, and no request is cut off. A load that nobody
    waits for any more is given up, and what was to go for it stays.

    Args:
        memory_bytes: what all models may take together.
        keep_alive: seconds for which a model stays loaded after its last request; 0: until its memory is needed.
        threads: lend the engines theirs; ended by :meth:`shutdown`.

    Attributes:
        at_unload: called with each model that is about to be unloaded, when no request uses it any more.
    """

    def __init__(self, memory_bytes: int, keep_alive: float = 0.0, threads: EngineThreads | None = None) -> None:
        self.keep_alive = keep_alive
        self.turns = FairDeviceLock()
        self.engine_threads = threads or EngineThreads()
        self.is_closed = False
        self.at_unload: list[Callable[[LoadedEngine], None]] = []
        self._entries: list[ModelEntry] = []
        self._by_name: dict[str, ModelEntry] = {}
        self.budget = MemoryBudget(memory_bytes, self._entries)
        self._queue = LoadQueue(self.budget)
        self._loading: tuple[Load, asyncio.Task[None]] | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="models")

    # --- names ---

    def add(self, name: str, source: ModelSource) -> ModelEntry:
        """Have a model that can be loaded. Raises ValueError for a name that is taken."""
        entry = ModelEntry(name, source)
        self.add_name(name, entry)
        self._entries.append(entry)
        return entry

    def add_name(self, name: str, entry: ModelEntry) -> None:
        """Have a model found by one more name. Raises ValueError for one that is taken."""
        if name in self._by_name:
            raise ValueError(f"the name {name!r} is taken")
        self._by_name[name] = entry

    def find(self, name: str) -> ModelEntry | None:
        """The model of a name; None if there is none."""
        return self._by_name.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were added."""
        return tuple(self._by_name)

    @property
    def memory_bytes(self) -> int:
        """What all models may take together."""
        return self.budget.memory_bytes

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        return tuple(self._entries)

    # --- use ---

    def is_ready(self, entry: ModelEntry) -> bool:
        """Whether a request for a model would not have to wait."""
        return entry.state is ModelState.LOADED and not entry.is_closing and entry.failure is None

    async def use(self, entry: ModelEntry, *, may_evict: bool = True) -> LoadedEngine:
        """Have a model for one request, until :meth:`release`; loads it if it has to.

        Args:
            may_evict: whether others may be unloaded for it.

        Raises:
            ModelLoadError: it cannot be loaded, or could not be just now and its files are the same.
            LoadCancelledError: it was unloaded meanwhile.
            NoRoomError: others would have to be unloaded for it.
            ModelTooLargeError: it never fits.
            RegistryClosedError: the process is about to end.
        """
        load: Load | None = None
        while True:
            # One that was loaded for this request is used, even if it is to be unloaded after that.
            if self.is_ready(entry) or (load is not None and load is entry.loaded_by and entry.failure is None):
                assert entry.running is not None
                entry.num_leases += 1
                entry.last_used = time.monotonic()
                self._stop_timer(entry)
                entry.touch()
                return entry.running
            if entry.failed is not None and entry.load is None:
                await self._check_failed(entry, entry.failed)
                continue
            load = self._ask(entry, may_evict)
            load.num_waiting += 1
            try:
                await asyncio.shield(load.done)
            finally:
                load.num_waiting -= 1
                entry.touch()
                if load in self._queue and not load.is_wanted:
                    self._finish(load, LoadCancelledError(f"nobody waits for {entry.name} any more"))
                self._start_timer(entry)  # if all have left that it was loaded for
                self._go_on()

    async def _check_failed(self, entry: ModelEntry, failed: FailedLoad) -> None:
        """Raises what a model could not be loaded for, if another try is not worth it yet; else forgets it."""
        if time.monotonic() < failed.until:
            signature = await asyncio.get_running_loop().run_in_executor(self._threads, entry.source.signature)
            if signature == failed.signature:
                raise to_model_load_error(failed.error)
        if entry.failed is failed:
            entry.failed = None

    def release(self, entry: ModelEntry) -> None:
        """End one use of a model."""
        entry.num_leases -= 1
        entry.last_used = time.monotonic()
        entry.touch()
        self._start_timer(entry)
        self._go_on()

    async def load(self, entry: ModelEntry, *, may_evict: bool = True) -> None:
        """Have a model loaded, without using it. Takes and raises what :meth:`use` does."""
        await self.use(entry, may_evict=may_evict)
        self.release(entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Unload a model when its requests have ended.

        A load that waits is given up at once; one that is under way, as soon as its thread notices. Who waits for it is
        told so at once, as a LoadCancelledError.
        """
        if entry.load is not None:
            entry.load.is_cancelled = True
            self._finish(entry.load, LoadCancelledError(_unwanted(entry)))
            self._go_on()
        if self._loading is not None and self._loading[0].entry is entry:
            await asyncio.wait([self._loading[1]])
        await self._unloaded(entry)

    # --- loading, one after the other ---

    def _ask(self, entry: ModelEntry, may_evict: bool) -> Load:
        """The load that is to come for a model."""
        if self.is_closed:
            raise RegistryClosedError("the server is shutting down")
        if entry.load is None:
            done = asyncio.get_running_loop().create_future()
            entry.load = Load(entry, done, may_evict, entry.known_bytes)
            self._queue.add(entry.load)
            # When the caller has begun to wait for it.
            asyncio.get_running_loop().call_soon(self._go_on)
        entry.load.may_evict |= may_evict
        return entry.load

    def _go_on(self) -> None:
        """Begin with the next load if there is none under way and one may go, and see who has to go for the others."""
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
            if load_now.num_bytes and load_now.may_evict:  # what is idle now is to be idle when memory is claimed
                idle = self.budget.victims(load_now.entry, load_now.num_bytes, also_used=False)
                for entry in idle or ():
                    self._close(entry)
            load_now.entry.state = ModelState.LOADING
            self._loading = load_now, asyncio.ensure_future(self._run(load_now))
            self._go_on()  # who waits for those that stay is served
        for entry in self._queue.close_for_first():
            self._close(entry, self._queue.first)

    async def _run(self, load: Load) -> None:
        """Try a load; put it back into the queue if it has to wait."""
        load.lacks_room = load.was_given_up = False
        error: Exception | None = None
        try:
            await self._load(load)
        except Exception as problem:  # noqa: BLE001  (told to whoever asked for the model)
            error = problem
        self._loading = None
        # One that was given up may have been asked for again, before its thread had ended.
        if error is not None and load.is_wanted and (load.lacks_room or load.was_given_up):
            self._queue.add(load)
        else:
            self._finish(load, error)
        self._go_on()

    async def _load(self, load: Load) -> None:
        """Load a model. Raises what went wrong."""
        entry = load.entry
        share = RegistryShare(self, load, asyncio.get_running_loop())
        started = time.monotonic()
        entry.starting = self._threads.submit(load_in_thread, entry.source, share, self.turns, self.engine_threads)
        try:
            running = await asyncio.wrap_future(entry.starting)
        except Exception as error:
            entry.state, entry.num_bytes, entry.step_bytes, entry.starting = ModelState.UNLOADED, 0, 0, None
            if not (load.is_cancelled or isinstance(error, NoRoomError | LoadCancelledError)):
                entry.error = one_line(error)
                entry.failed = FailedLoad(to_model_load_error(error), share.signature, time.monotonic() + RETRY_SECONDS)
                logger.error("cannot load %s: %s", entry.name, entry.error)
            raise
        entry.starting = None  # not before: at the end it is waited for
        entry.running, entry.state, entry.error, entry.loaded_by = running, ModelState.LOADED, None, load
        entry.num_loads += 1
        entry.max_model_len = running.engine.config.scheduler.max_model_len
        entry.last_used = time.monotonic()
        size = format_size(entry.num_bytes)
        logger.info("loaded %s in %.1f s; it takes %s at most", entry.name, time.monotonic() - started, size)

    def _finish(self, load: Load, error: Exception | None) -> None:
        """End a load; who waits for it is told."""
        self._queue.remove(load)
        self._reopen_victims(load)
        if load.entry.load is load:
            load.entry.load = None
        if not load.done.done():
            if error is None:
                load.done.set_result(None)
            else:
                load.done.set_exception(error)
                load.done.exception()  # taken note of, even if nobody waits any more
        self._start_timer(load.entry)

    async def claim(self, load: Load, num_bytes: int) -> None:
        """Give a model that is being loaded so many bytes, in all. Raises as :meth:`DeviceAccess.claim`."""
        entry = load.entry
        self.budget.check_fits(entry, num_bytes)
        if not entry.num_bytes:  # the first claim; what it took before it may take again
            num_bytes = max(num_bytes, load.num_bytes)
        load.num_bytes = entry.known_bytes = num_bytes
        while self.budget.free_for(entry) < num_bytes:
            self.check_wanted(load)
            if not load.may_evict:
                raise self.budget.out_of_memory_error(entry, num_bytes)
            victims = self.budget.victims(entry, num_bytes, also_used=False)
            if victims is None:
                load.lacks_room = True
                raise NoRoomError(f"{entry.name} has to wait for models in use")
            await asyncio.gather(*(self._unloaded(one) for one in victims))
        self.check_wanted(load)
        entry.num_bytes = num_bytes

    def check_wanted(self, load: Load) -> None:
        """Raises LoadCancelledError for a load that nobody waits for; in its thread, or the event loop."""
        if self.is_closed or not load.is_wanted:
            load.was_given_up = True
            raise LoadCancelledError(_unwanted(load.entry))

    def settle(self, entry: ModelEntry, step_bytes: int) -> tuple[int, int]:
        """See :meth:`DeviceAccess.settle`; in the model's thread, while no other model is loaded or given memory."""
        entry.step_bytes = step_bytes
        return self.budget.taken_bytes, max(one.step_bytes for one in self._entries)

    # --- unloading ---

    async def _unloaded(self, entry: ModelEntry) -> None:
        """Unload a model, or wait until that is done. Nothing if it is not loaded."""
        if entry.unloading is not None or entry.state is ModelState.LOADED:
            self._close(entry)
            assert entry.unloading is not None
            await asyncio.shield(entry.unloading)

    def _close(self, entry: ModelEntry, load: Load | None = None) -> None:
        """Have a loaded model unloaded when its requests have ended; with a load, unless that is given up first."""
        if entry.unloading is None:
            entry.is_closing, entry.closed_for = True, load
            self._stop_timer(entry)
            entry.unloading = asyncio.ensure_future(self._unload(entry))
        elif load is None:
            entry.closed_for = None

    def _reopen_victims(self, load: Load) -> None:
        """Let models that were to go for a load stay, unless they are gone."""
        for entry in load.victims:
            if entry.closed_for is load and entry.state is ModelState.LOADED:
                assert entry.unloading is not None
                entry.unloading.cancel()
                entry.is_closing, entry.unloading, entry.closed_for = False, None, None
                self._start_timer(entry)
        load.victims = ()

    async def _unload(self, entry: ModelEntry) -> None:
        await entry.becomes_idle()
        running, failure = entry.running, entry.failure
        assert running is not None
        for tell in self.at_unload:
            try:
                tell(running)
            except Exception:
                logger.exception("%s is unloaded, and not everybody could be told", entry.name)
        entry.state = ModelState.UNLOADING
        entry.running, entry.loaded_by, entry.ending = None, None, running.engine
        entry.error = None if failure is None else f"its engine has stopped: {one_line(failure)}"
        del running
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, entry.ending.shutdown, None)
        except Exception as error:
            entry.error = f"it could not be unloaded properly: {one_line(error)}"
            logger.exception("%s could not be unloaded properly", entry.name)
        entry.state, entry.num_bytes, entry.step_bytes = ModelState.UNLOADED, 0, 0
        entry.is_closing, entry.unloading, entry.closed_for, entry.ending = False, None, None, None
        logger.info("unloaded %s", entry.name)
        self._go_on()

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
        """End all requests, those that wait for a model too, and load nothing any more. In the event loop."""
        self.is_closed = True
        for entry in self._entries:
            self._stop_timer(entry)
            if entry.load is not None and not entry.load.done.done():
                entry.load.done.set_exception(RegistryClosedError(message))
                entry.load.done.exception()
            if entry.running is not None:
                entry.running.engine.cut_requests(message)

    def shutdown(self, timeout: float) -> bool:
        """Stop all engines, when the event loop has ended. Returns whether all have, within ``timeout`` seconds."""
        self.is_closed = True
        deadline = time.monotonic() + timeout
        stopped = True
        for entry in self._entries:
            engine = entry.ending if entry.running is None else entry.running.engine
            try:
                if entry.starting is not None:  # ends as soon as it asks for memory or the device
                    engine = entry.starting.result(max(deadline - time.monotonic(), 0.0)).engine
            except TimeoutError:
                stopped = False
            except Exception as error:  # noqa: BLE001  (it has not been loaded)
                logger.debug("%s was not loaded: %s", entry.name, error)
            if engine is not None:
                stopped &= engine.shutdown(max(deadline - time.monotonic(), 0.0))
        stopped &= self.engine_threads.close(max(deadline - time.monotonic(), 0.0))
        self._threads.shutdown(wait=stopped, cancel_futures=True)
        return stopped


def _unwanted(entry: ModelEntry) -> str:
    return f"{entry.name} was to be unloaded before it was loaded"
