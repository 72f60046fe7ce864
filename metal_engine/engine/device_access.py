"""Access of a model to the device: a lock that one model holds at a time, and a reserved part of the memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol, TypeVar

from metal_engine.settings.config import DeviceInfo, EngineConfig

T = TypeVar("T")

_ANY_BYTES = 1 << 62


class FairDeviceLock:
    """Lock that gives the device to one model's thread at a time, first come, first served.

    Two busy models therefore alternate step by step. With a plain ``threading.Lock``, a thread that releases the lock
    and requests it again would usually get it before the waiting threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()  # one held lock per waiting thread, released to resume it

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Return a context manager that holds exclusive use of the device."""
        with self._lock:
            own = threading.Lock() if self._is_taken else None
            if own is not None:
                own.acquire()
                self._waiting.append(own)
            self._is_taken = True
        if own is not None:
            own.acquire()
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._is_taken = False

    def run(self, step: Callable[[], T]) -> T:
        """Call ``step`` while holding the device. Return its result."""
        with self.hold():
            return step()


class DeviceAccess(Protocol):
    """Interface through which a model uses the device while it is being loaded. Called in the model's thread.

    Attributes:
        memory_bytes: memory budget of all models in bytes; None without a budget.
    """

    memory_bytes: int | None

    def check_wanted(self) -> None:
        """Raise LoadCancelledError if the load is cancelled or has no waiters."""

    def hold_device(self) -> AbstractContextManager[None]:
        """Return a context manager that holds exclusive use of the device. Do not call :meth:`claim` inside it."""

    def limited(self, device: DeviceInfo) -> DeviceInfo:
        """Return the device with its memory limited to the budget of all models together."""

    def unlimited(self, device: DeviceInfo) -> DeviceInfo:
        """Return the device for checks of model files, with practically unlimited memory.

        Memory that other models hold may be freed, so only claims check the memory.
        """

    def check_fits(self, num_bytes: int) -> None:
        """Raise ModelTooLargeError if ``num_bytes`` exceeds the memory for all models. Claims nothing."""

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        """Reserve ``num_bytes`` in total for this model. May block until other models are unloaded.

        Args:
            loading_bytes: memory needed until the next claim, if larger than ``num_bytes``.
            step_bytes: estimate of the memory that the largest step needs in addition to ``num_bytes``. If None, the
                claim is for the whole budget. Ignored after the model's first claim, because the model's size is then
                known.

        Raises:
            ModelTooLargeError: the claim exceeds the memory for all models.
            ModelLoadError: the load was cancelled.
        """

    def record_step_bytes(self, config: EngineConfig) -> tuple[int, int]:
        """Record the model's step size. Return the memory of all models and the largest step of any model, in bytes."""


class ExclusiveDeviceAccess:
    """Device access of the only model of a server."""

    memory_bytes: int | None = None

    def check_wanted(self) -> None:
        pass

    def hold_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def limited(self, device: DeviceInfo) -> DeviceInfo:
        return device

    def unlimited(self, device: DeviceInfo) -> DeviceInfo:
        return device

    def check_fits(self, num_bytes: int) -> None:
        pass

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        pass

    def record_step_bytes(self, config: EngineConfig) -> tuple[int, int]:
        return config.peak_bytes, config.step_bytes


WHOLE_DEVICE = ExclusiveDeviceAccess()


class LimitedDevice:
    """The memory of a device for several models. Base class of their :class:`DeviceAccess`.

    Args:
        memory_bytes: memory for all models together, in bytes.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes: int | None = memory_bytes

    def limited(self, device: DeviceInfo) -> DeviceInfo:
        assert self.memory_bytes is not None
        return replace(device, memory_bytes=self.memory_bytes)

    def unlimited(self, device: DeviceInfo) -> DeviceInfo:
        return replace(device, memory_bytes=_ANY_BYTES)
