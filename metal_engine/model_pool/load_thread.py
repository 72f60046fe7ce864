"""Loads one model in a thread. The thread claims memory from the registry, and converts errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from metal_engine.engine.device_access import DeviceAccess
from metal_engine.errors import (
    InsufficientMemoryError,
    LoadCancelledError,
    ModelLoadError,
    ModelTooLargeError,
    clear_traceback_frames,
    one_line,
)
from metal_engine.model_pool.model_entry import Load, LoadedEngine, ModelSource

if TYPE_CHECKING:
    from metal_engine.model_pool.registry import ModelRegistry

# Interval at which a thread that waits for memory checks whether the registry was closed.
_CLOSED_SECONDS = 0.5


class RegistryDeviceAccess(DeviceAccess):
    """A model's access to the device, granted by the registry.

    Attributes:
        signature: signature of the model's files, taken before any file was read; None before that.
    """

    def __init__(self, registry: ModelRegistry, load: Load, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(registry.budget.memory_bytes)
        self._registry = registry
        self._load = load
        self._loop = loop
        self.signature: object = None

    def check_wanted(self) -> None:
        self._registry.check_wanted(self._load)

    def check_fits(self, num_bytes: int) -> None:
        self._registry.budget.check_fits(self._load.entry, num_bytes)

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        self.check_fits(num_bytes)
        most = self._registry.budget.memory_bytes
        if not self._load.num_bytes:  # first load: the model's size is not known yet
            loading_bytes = most if step_bytes is None else max(loading_bytes, num_bytes + step_bytes)
        wanted = max(num_bytes, min(loading_bytes, most))
        future = asyncio.run_coroutine_threadsafe(self._registry.claim(self._load, wanted), self._loop)
        while True:
            try:
                return future.result(_CLOSED_SECONDS)
            except TimeoutError:
                if self._registry.is_closed:  # the event loop has ended
                    raise ModelLoadError(f"the load of {self._load.entry.name} was cancelled") from None


def load_in_thread(source: ModelSource, access: RegistryDeviceAccess) -> LoadedEngine:
    """Load a model, and store the signature of its files in ``access``.

    Clears the frames of an error's traceback, because a frame can keep weights in memory.

    Raises:
        ModelLoadError: any failure, possibly as a subclass.
    """
    try:
        access.signature = source.signature()
        return source.start(access)
    except Exception as error:  # noqa: BLE001  (raised below)
        failure = to_model_load_error(error)
        clear_traceback_frames(error)
    raise failure


def to_model_load_error(error: Exception) -> ModelLoadError:
    """Return a new ModelLoadError, or subclass, with an error's message. It has no traceback."""
    if isinstance(error, ModelTooLargeError):
        return ModelTooLargeError(str(error), error.missing_bytes)
    for kind in (InsufficientMemoryError, LoadCancelledError):
        if isinstance(error, kind):
            return kind(str(error))
    return ModelLoadError(one_line(error, 1000))
