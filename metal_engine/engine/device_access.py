"""How a model that is not alone uses the device: in turns with the others, and within a share of its memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

from metal_engine.settings.config import DeviceInfo, EngineConfig

T = TypeVar("T")


class FairDeviceLock:
    """Lets the threads of several models use the device one at a time, first come, first served.

    So two models that are both busy alternate step by step. A plain lock would not do: a thread that asks for it again
    at once mostly gets it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()  # one for each thread that waits, held until its turn comes

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within it, the device is this thread's."""
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
        """Returns ``step()``, run in a turn of this thread's."""
        with self.turn():
            return step()


class DeviceAccess(Protocol):
    """What a model has of the device while it is loaded. Its methods are called in the model's thread."""

    def turn(self) -> AbstractContextManager[None]:
        """Within it, no other model uses the device. Nothing is to be claimed there."""

    def limited(self, device: DeviceInfo) -> DeviceInfo:
        """The device with no more memory than models may take together."""

    def unlimited(self, device: DeviceInfo) -> DeviceInfo:
        """The device as checks of files are to see it: what others hold may be given back, and claims judge that."""

    def check_fits(self, num_bytes: int) -> None:
        """Raises ModelTooLargeError if there never will be so many bytes for this model. Claims nothing."""

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        """Have so many bytes of memory for this model, in all; may wait until others are unloaded.

        Args:
            loading_bytes: what it takes while it is loaded, until the next claim, if that is more.
            step_bytes: what its largest step may take besides; of no account where the model was loaded before, and
                it is known. None where nobody can tell: it has all there is for models.

        Raises:
            ModelTooLargeError: there never will be as many.
            ModelLoadError: the model is not wanted any more.
        """

    def settle(self, config: EngineConfig) -> tuple[int, int]:
        """Say what the model takes. Returns what all models take, and the largest step of any, in bytes."""


class ExclusiveDeviceAccess:
    """The share of a model that has the device for itself."""

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def limited(self, device: DeviceInfo) -> DeviceInfo:
        return device

    def unlimited(self, device: DeviceInfo) -> DeviceInfo:
        return device

    def check_fits(self, num_bytes: int) -> None:
        pass

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        pass

    def settle(self, config: EngineConfig) -> tuple[int, int]:
        return config.peak_bytes, config.step_bytes


WHOLE_DEVICE = ExclusiveDeviceAccess()
