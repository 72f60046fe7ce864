"""One of several models: where it stands, who uses it, what it takes."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.device_access import DeviceAccess, FairDeviceLock
from metal_engine.engine.engine_threads import EngineThreads


class ModelState(enum.Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True, eq=False)
class LoadedEngine:
    """A model that has been loaded: its engine, and how it writes answers."""

    engine: AsyncEngine
    answer_format: AnswerFormat


# Loads a model and blocks until it is ready; called in a thread. Raises what loading raises.
Start = Callable[[DeviceAccess, FairDeviceLock, EngineThreads], LoadedEngine]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        signature: of its files: differs when they have changed; called in a thread.
    """

    start: Start
    signature: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class FailedLoad:
    """Why a model could not be loaded, so that its files are not read again for nothing.

    Attributes:
        signature: of its files before they were read.
        until: when it is worth another try whatever the files are, in seconds of ``time.monotonic``.
    """

    error: Exception
    signature: object
    until: float


@dataclass(eq=False)
class Load:
    """A load that was asked for: those who wait for it, and its end.

    Attributes:
        done: None once the model is loaded, or why it could not be.
        may_evict: others may be unloaded for it.
        num_bytes: what the model takes, as far as it is known; 0 until then.
        is_cancelled: the model was unloaded meanwhile.
        was_given_up: its thread has noticed that nobody wants it, where memory is claimed, or the device.
        lacks_room: its thread has found that it has to wait for others to go.
        victims: models that were in use and have been closed for it.
        is_due: those are gone: no other load goes before it.
    """

    entry: ModelEntry
    done: asyncio.Future[None]
    may_evict: bool = True
    num_bytes: int = 0
    num_waiting: int = 0
    is_cancelled: bool = False
    was_given_up: bool = False
    lacks_room: bool = False
    victims: tuple[ModelEntry, ...] = ()
    is_due: bool = False
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for it; in any thread."""
        return not self.is_cancelled and self.num_waiting > 0


@dataclass(eq=False)
class ModelEntry:
    """A model that the registry knows. Belongs to the event loop.

    Attributes:
        name: by which it was registered; other names may lead to it.
        running: while it is loaded.
        num_bytes: of the device's memory that it has, or has claimed so far.
        step_bytes: what its largest step takes, of them.
        num_leases: requests that use it.
        load: the one that is under way or waits for its turn; None if there is none.
        loaded_by: the one that loaded it.
        closed_for: the load that it is to go for, and need not if that is given up; None if it goes for good.
        known_bytes: what it took when it was last looked at.
        failed: why it is not tried again at once.
        is_closing: it is to be unloaded: new requests wait until it is loaded again.
        last_used: when a request began or ended to use it, in seconds of ``time.monotonic``.
        error: why the last load failed, or its engine ended; None if all is well.
        num_loads: how often it has been loaded.
        starting: the thread's work that loads it; ``ending``: its engine, while that is being shut down.
        max_model_len: tokens of its longest request; None until it has been loaded.
    """

    name: str
    source: ModelSource
    state: ModelState = ModelState.UNLOADED
    running: LoadedEngine | None = None
    num_bytes: int = 0
    step_bytes: int = 0
    num_leases: int = 0
    load: Load | None = None
    loaded_by: Load | None = None
    closed_for: Load | None = None
    known_bytes: int = 0
    failed: FailedLoad | None = None
    is_closing: bool = False
    last_used: float = 0.0
    error: str | None = None
    num_loads: int = 0
    max_model_len: int | None = None
    unloading: asyncio.Task[None] | None = None
    keep_alive: asyncio.TimerHandle | None = None
    starting: Future[LoadedEngine] | None = None
    ending: AsyncEngine | None = None
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_idle(self) -> bool:
        """Whether no request uses it, nor is about to, for it has just been loaded for it."""
        return not self.num_leases and not (self.loaded_by is not None and self.loaded_by.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for it to be loaded."""
        return 0 if self.load is None else self.load.num_waiting

    @property
    def failure(self) -> BaseException | None:
        """What ended its engine; None while that runs, or there is none."""
        return None if self.running is None else self.running.engine.error

    def touch(self) -> None:
        """Wake whoever waits for it to become idle, if it is."""
        if self.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def becomes_idle(self) -> None:
        """Wait until no request uses it."""
        while not self.is_idle:
            self._idle.clear()
            await self._idle.wait()
