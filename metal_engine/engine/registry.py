"""Several models in one process: found by name, loaded when they are needed, unloaded when others need the memory."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

from metal_engine.engine.device_share import DeviceTurns
from metal_engine.engine.model_entry import Load, ModelEntry, ModelState, RunningModel, Start
from metal_engine.errors import ModelLoadError, ModelTooLargeError, NoRoomError, one_line
from metal_engine.settings.config import DeviceInfo, EngineConfig
from metal_engine.settings.fields import format_size

logger = logging.getLogger(__name__)

# One loads; beside it models are unloaded.
_NUM_THREADS = 3
# How often a model's thread that waits for memory looks whether the registry has been closed.
_CLOSED_SECONDS = 0.5

_ANY_BYTES = 1 << 62


class RegistryClosedError(RuntimeError):
    """The process is about to end: nothing is loaded any more."""


class ModelRegistry:
    """Models by name, within one budget of memory. Belongs to one event loop, but for :meth:`shutdown`.

    Models are loaded one at a time, in the order in which they were asked for. One that needs room has others unloaded:
    those without requests first, the least recently used first of all. One with requests gets no new ones then; these
    wait until it is loaded again. So nobody waits for ever, and no request is cut off.

    Args:
        memory_bytes: what all models may take together.
        keep_alive: seconds for which a model stays loaded after its last request; 0: until its memory is needed.

    Attributes:
        at_unload: called with each model that is about to be unloaded, when no request uses it any more.
    """

    def __init__(self, memory_bytes: int, keep_alive: float = 0.0) -> None:
        self.memory_bytes = memory_bytes
        self.keep_alive = keep_alive
        self.turns = DeviceTurns()
        self.is_closed = False
        self.at_unload: list[Callable[[RunningModel], None]] = []
        self._entries: list[ModelEntry] = []
        self._by_name: dict[str, ModelEntry] = {}
        self._waiting: deque[ModelEntry] = deque()
        self._loader: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="models")

    # --- names ---

    def add(self, name: str, start: Start) -> ModelEntry:
        """Have a model that can be loaded. Raises ValueError for a name that is taken."""
        entry = ModelEntry(name, start)
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
    def entries(self) -> tuple[ModelEntry, ...]:
        return tuple(self._entries)

    # --- use ---

    def is_ready(self, entry: ModelEntry) -> bool:
        """Whether a request for a model would not have to wait."""
        return entry.state is ModelState.LOADED and not entry.is_closing and entry.failure is None

    async def use(self, entry: ModelEntry, *, may_evict: bool = True) -> RunningModel:
        """Have a model for one request, until :meth:`release`; loads it if it has to.

        Args:
            may_evict: whether others may be unloaded for it.

        Raises:
            ModelLoadError: it cannot be loaded.
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
            load = self._ask(entry, may_evict)
            load.num_waiting += 1
            try:
                await asyncio.shield(load.done)
            finally:
                load.num_waiting -= 1
                entry.touch()
                self._start_timer(entry)  # if all have left that it was loaded for

    def release(self, entry: ModelEntry) -> None:
        """End one use of a model."""
        entry.num_leases -= 1
        entry.last_used = time.monotonic()
        entry.touch()
        self._start_timer(entry)

    async def load(self, entry: ModelEntry, *, may_evict: bool = True) -> None:
        """Have a model loaded, without using it. Takes and raises what :meth:`use` does."""
        await self.use(entry, may_evict=may_evict)
        self.release(entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Unload a model when its requests have ended; a load that is under way is given up."""
        if entry.load is not None and entry.state is not ModelState.LOADED:
            entry.load.is_cancelled = True
            await asyncio.wait([entry.load.done])
        await self._unloaded(entry)

    # --- loading, one after the other ---

    def _ask(self, entry: ModelEntry, may_evict: bool) -> Load:
        """The load that is to come for a model."""
        if self.is_closed:
            raise RegistryClosedError("the server is shutting down")
        if entry.load is None:
            entry.load = Load(asyncio.get_running_loop().create_future(), may_evict)
            self._waiting.append(entry)
            if self._loader is None or self._loader.done():
                self._loader = asyncio.ensure_future(self._load_all())
        return entry.load

    async def _load_all(self) -> None:
        while self._waiting:
            entry = self._waiting.popleft()
            load = entry.load
            assert load is not None
            error = await self._load(entry, load)
            entry.load = None
            if load.done.done():  # cut
                continue
            if error is None:
                load.done.set_result(None)
            else:
                load.done.set_exception(error)
                load.done.exception()  # taken note of, even if nobody waits any more
            self._start_timer(entry)

    async def _load(self, entry: ModelEntry, load: Load) -> Exception | None:
        """Load a model; returns what went wrong."""
        if entry.is_closing or entry.failure is not None:
            await self._unloaded(entry)
        entry.state = ModelState.LOADING
        loop = asyncio.get_running_loop()
        share = _RegistryShare(self, entry, load, loop)
        started = time.monotonic()
        try:
            entry.starting = self._threads.submit(_start, entry, share, self.turns)
            entry.running = await asyncio.wrap_future(entry.starting)
            entry.starting = None
        except Exception as error:  # noqa: BLE001  (told to whoever asked for the model)
            entry.state, entry.num_bytes, entry.step_bytes, entry.starting = ModelState.UNLOADED, 0, 0, None
            if not isinstance(error, NoRoomError):
                entry.error = one_line(error)
                logger.error("cannot load %s: %s", entry.name, entry.error)
            return error
        entry.state, entry.error, entry.loaded_by = ModelState.LOADED, None, load
        entry.num_loads += 1
        entry.max_model_len = entry.running.engine.config.scheduler.max_model_len
        entry.last_used = time.monotonic()
        size = format_size(entry.num_bytes)
        logger.info("loaded %s in %.1f s; it takes %s at most", entry.name, time.monotonic() - started, size)
        return None

    async def claim(self, entry: ModelEntry, load: Load, num_bytes: int) -> None:
        """Give a model that is being loaded so many bytes, in all. Raises as :meth:`DeviceShare.claim`."""
        self.check_fits(entry, num_bytes)
        while self._taken_beside(entry) + num_bytes > self.memory_bytes:
            self.check_wanted(entry, load)
            if not load.may_evict:
                raise NoRoomError(f"{entry.name} does not fit beside the models that are loaded")
            others = [one for one in self._entries if one is not entry and one.num_bytes]
            # First those that nobody uses, or that go already.
            victim = min(others, key=lambda one: (not (one.is_idle or one.is_closing), one.last_used))
            await self._unloaded(victim)
        self.check_wanted(entry, load)
        entry.num_bytes = num_bytes

    def check_fits(self, entry: ModelEntry, num_bytes: int) -> None:
        """Raises ModelTooLargeError for more than all models may take; in any thread."""
        missing = num_bytes - self.memory_bytes
        if missing > 0:
            message = (
                f"{entry.name} takes {format_size(num_bytes)} with its KV cache, and models may take "
                f"{format_size(self.memory_bytes)} (--models-memory): {format_size(missing)} are missing"
            )
            raise ModelTooLargeError(message, missing)

    def check_wanted(self, entry: ModelEntry, load: Load) -> None:
        """Raises ModelLoadError for a load that was given up."""
        if self.is_closed or load.is_cancelled:
            raise ModelLoadError(f"{entry.name} was to be unloaded before it was loaded")

    def _taken_beside(self, entry: ModelEntry) -> int:
        return sum(one.num_bytes for one in self._entries if one is not entry)

    def settle(self, entry: ModelEntry, step_bytes: int) -> tuple[int, int]:
        """See :meth:`DeviceShare.settle`; in the model's thread, while no other model is loaded or given memory."""
        entry.step_bytes = step_bytes
        return sum(one.num_bytes for one in self._entries), max(one.step_bytes for one in self._entries)

    # --- unloading ---

    async def _unloaded(self, entry: ModelEntry) -> None:
        """Unload a model, or wait until that is done. Nothing if it is not loaded."""
        if entry.unloading is None:
            if entry.state is not ModelState.LOADED:
                return
            entry.is_closing = True
            self._stop_timer(entry)
            entry.unloading = asyncio.ensure_future(self._unload(entry))
        await asyncio.shield(entry.unloading)

    async def _unload(self, entry: ModelEntry) -> None:
        await entry.becomes_idle()
        assert entry.running is not None
        engine, failure = entry.running.engine, entry.failure
        for tell in self.at_unload:
            tell(entry.running)
        entry.state = ModelState.UNLOADING
        entry.running, entry.loaded_by, entry.ending = None, None, engine
        await asyncio.get_running_loop().run_in_executor(self._threads, engine.shutdown, None)
        entry.ending = None
        entry.state, entry.num_bytes, entry.step_bytes = ModelState.UNLOADED, 0, 0
        entry.error = None if failure is None else f"its engine has stopped: {one_line(failure)}"
        entry.is_closing, entry.unloading = False, None
        logger.info("unloaded %s", entry.name)

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
        if entry.is_idle and entry.state is ModelState.LOADED and not entry.is_closing:
            entry.is_closing = True
            entry.unloading = asyncio.ensure_future(self._unload(entry))

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
        self._threads.shutdown(wait=stopped, cancel_futures=True)
        return stopped


def _start(entry: ModelEntry, share: _RegistryShare, turns: DeviceTurns) -> RunningModel:
    """Load a model, in a thread. An error keeps no frame alive, for a frame may keep weights."""
    try:
        return entry.start(share, turns)
    except ModelTooLargeError as error:
        failure: Exception = ModelTooLargeError(str(error), error.missing_bytes)
        _forget_frames(error)
    except NoRoomError as error:
        failure = NoRoomError(str(error))
        _forget_frames(error)
    except Exception as error:  # noqa: BLE001  (raised again)
        failure = ModelLoadError(one_line(error, 1000))
        _forget_frames(error)
    raise failure


def _forget_frames(error: BaseException) -> None:
    """Clear the frames that an error went through, and those before it that it was raised for."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


class _RegistryShare:
    """A model's share of the device (:class:`metal_engine.engine.device_share.DeviceShare`)."""

    def __init__(self, registry: ModelRegistry, entry: ModelEntry, load: Load, loop: asyncio.AbstractEventLoop) -> None:
        self._registry = registry
        self._entry = entry
        self._load = load
        self._loop = loop

    def turn(self) -> AbstractContextManager[None]:
        self._registry.check_wanted(self._entry, self._load)
        return self._registry.turns.turn()

    def limited(self, device: DeviceInfo) -> DeviceInfo:
        return replace(device, memory_bytes=self._registry.memory_bytes)

    def unlimited(self, device: DeviceInfo) -> DeviceInfo:
        return replace(device, memory_bytes=_ANY_BYTES)

    def check_fits(self, num_bytes: int) -> None:
        self._registry.check_fits(self._entry, num_bytes)

    def claim(self, num_bytes: int) -> None:
        claim = self._registry.claim(self._entry, self._load, num_bytes)
        future = asyncio.run_coroutine_threadsafe(claim, self._loop)
        while True:
            try:
                return future.result(_CLOSED_SECONDS)
            except TimeoutError:
                if self._registry.is_closed:  # nobody runs the loop any more
                    raise ModelLoadError(f"{self._entry.name} is not wanted any more") from None

    def settle(self, config: EngineConfig) -> tuple[int, int]:
        return self._registry.settle(self._entry, config.step_bytes)
