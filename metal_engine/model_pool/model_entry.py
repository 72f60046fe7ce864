"""Data about one registered model: its state, its requests and its memory."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.device_access import DeviceAccess


class ModelState(enum.Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True, eq=False)
class LoadedEngine:
    """Engine and response format of a loaded model."""

    engine: AsyncEngine
    answer_format: AnswerFormat


# Loads a model and blocks until it is ready. Called in a thread. Raises the errors of loading.
Start = Callable[[DeviceAccess], LoadedEngine]


@dataclass(frozen=True)
class ModelSource:
    """Functions that load a model and check its files.

    Attributes:
        start: loads the model, and blocks until it is ready. Called in a thread.
        signature: returns a value that changes when the model's files change. Called in a thread. Must not raise.
    """

    start: Start
    signature: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class FailedLoad:
    """Record of a failed load, which avoids reading unchanged files again.

    Attributes:
        error: error whose copy is raised for further requests.
        signature: signature of the files, taken before they were read.
        until: time after which the load is tried again even with unchanged files, in seconds of ``time.monotonic``.
    """

    error: Exception
    signature: object
    until: float


@dataclass(eq=False)
class Load:
    """Requested load of a model, shared by all requests that wait for the model.

    Attributes:
        done: future that resolves to None when the model is loaded, or raises the reason of the failure.
        may_evict: True if other models may be unloaded for this load.
        num_bytes: memory of the model in bytes, according to the last claim of this load. Before this load's first
            claim, according to the last claim of earlier loads; 0 if there were no claims.
        num_waiting: number of callers that await the load.
        is_cancelled: True if an unload of the model was requested after the load.
        was_given_up: True if the load's thread ended early: the load was cancelled, or its waiters have left.
        lacks_memory: True if the load's thread found that models in use have to be unloaded first.
        victims: models in use that were closed for this load.
        is_due: True once the victims are unloaded. Then no other load may start before this load.
        asked_at: time of the request in seconds of ``time.monotonic``.
    """

    entry: ModelEntry
    done: asyncio.Future[None]
    may_evict: bool = True
    num_bytes: int = 0
    num_waiting: int = 0
    is_cancelled: bool = False
    was_given_up: bool = False
    lacks_memory: bool = False
    victims: tuple[ModelEntry, ...] = ()
    is_due: bool = False
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def is_wanted(self) -> bool:
        """True if the load has waiters and is not cancelled. Can be read in any thread."""
        return not self.is_cancelled and self.num_waiting > 0


@dataclass(eq=False)
class ModelEntry:
    """Registered model. Belongs to the event loop.

    Attributes:
        name: name under which the model was registered. Additional names may refer to the same entry.
        loaded_engine: engine and response format while the model is loaded.
        num_bytes: device memory reserved for the model so far, in bytes.
        num_leases: number of requests that use the model.
        load: queued or running load; None if there is none.
        loaded_by: load that loaded the model.
        closed_for: load that needs this model's memory. If this load is cancelled before the model is unloaded, the
            model stays loaded. None if no load is the reason for closing the model.
        known_bytes: memory that the model claimed last, in bytes; 0 before its first claim.
        failed: last failed load, which blocks retries for a while.
        is_closing: True if the model is to be unloaded. New requests wait until it is loaded again.
        last_used: time when a request last started or ended, in seconds of ``time.monotonic``.
        error: reason why the last load failed or the engine stopped; None if there was no error.
        num_loads: number of successful loads.
        max_model_len: context length in tokens; None until the model was loaded once.
        unloading: task that waits until the model is idle and unloads it; None if the model is not closing.
        keep_alive: timer that unloads the idle model; None while it is not running.
        starting: future of the thread that loads the model; None while the model is not being loaded.
        ending: engine that is being shut down, if any.
    """

    name: str
    source: ModelSource
    state: ModelState = ModelState.UNLOADED
    loaded_engine: LoadedEngine | None = None
    num_bytes: int = 0
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
        """True if no request uses the model, and no request that waited for its last load is about to use it."""
        return not self.num_leases and not (self.loaded_by is not None and self.loaded_by.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the model to be loaded."""
        return 0 if self.load is None else self.load.num_waiting

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine; None while the engine runs, or if the model is not loaded."""
        return None if self.loaded_engine is None else self.loaded_engine.engine.error

    def touch(self) -> None:
        """Wake :meth:`becomes_idle` if the model is idle. Call it after each change of its leases and waiters."""
        if self.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def becomes_idle(self) -> None:
        """Wait until no request uses the model."""
        while not self.is_idle:
            self._idle.clear()
            await self._idle.wait()
