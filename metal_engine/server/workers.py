"""Threads for work that would block the event loop.

Examples are reading large bodies, rendering and tokenizing prompts, compiling grammars, and decoding images.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from metal_engine.cancellation import Cancelled, caller_disconnected, check_cancelled
from metal_engine.errors import OverloadedError
from metal_engine.server.errors import shutting_down
from metal_engine.server.large_bodies import ALWAYS_SMALL_BYTES

T = TypeVar("T")

# Minimum size of a text for heavy work. A tokenizer takes 0.1 s for this size.
HEAVY_BYTES = 1 << 18
# Maximum number of requests whose images are being loaded or wait to be loaded. Each request holds its body and its
# files in memory. Each has a thread, because only requests in threads take turns at decoding.
_MAX_LOADING = 64


class Weight(enum.Enum):
    """Kind of work. Each kind has its own threads, so that quick work never queues behind slow work.

    The second part of a value is the number of threads. Threads that run Python code alternate with the event loop, so
    only few are for heavy work. Compiling waits for other processes. It has many threads, so that a request for a known
    grammar does not queue behind slow compilations. Images wait for other processes and servers.
    """

    LIGHT = ("light", 4)
    HEAVY = ("heavy", 2)
    COMPILING = ("compiling", 64)
    IMAGES = ("images", _MAX_LOADING)

    @classmethod
    def of(cls, num_bytes: int) -> Weight:
        """Return the weight of work on a text or a body of ``num_bytes`` bytes."""
        return cls.HEAVY if num_bytes >= HEAVY_BYTES else cls.LIGHT


class Workers:
    """Runs work in threads and drops work whose client has disconnected. Must be used in the event loop's thread.

    Attributes:
        num_heavy: number of pieces of work with the weight ``HEAVY`` so far.
    """

    def __init__(self) -> None:
        self._pools = {
            weight: ThreadPoolExecutor(weight.value[1], thread_name_prefix=f"{weight.value[0]}-work")
            for weight in Weight
        }
        self._in_flight: dict[threading.Event, tuple[Weight, Future[Any]]] = {}
        self._dropped: set[Weight] = set()
        self._num_loading = 0
        self.num_heavy = 0

    @property
    def is_heavy_in_flight(self) -> bool:
        """True while work with the weight ``HEAVY`` runs or is queued."""
        return any(weight is Weight.HEAVY for weight, _ in self._in_flight.values())

    async def run(self, weight: Weight, work: Callable[..., T], *args: object) -> T:
        """Return ``work(*args)``, computed in one of the threads for ``weight``.

        Cancelling this coroutine removes queued work from the queue. In running work, it makes
        :func:`metal_engine.cancellation.is_cancelled` return True.

        Raises:
            APIError: status 503, if :meth:`drop` has been called for this weight, before or while the work waits.
            Exception: the exception that ``work`` raises.
        """
        if weight in self._dropped:
            raise shutting_down()
        disconnected = threading.Event()
        context = contextvars.copy_context()
        context.run(caller_disconnected.set, disconnected)
        future: Future[T] = self._pools[weight].submit(context.run, _unless_cancelled, work, *args)
        self._in_flight[disconnected] = weight, future
        self.num_heavy += weight is Weight.HEAVY
        try:
            return await asyncio.wrap_future(future)
        except Cancelled as cancelled:  # dropped
            raise shutting_down() from cancelled
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if disconnected.is_set() and not (task and task.cancelling()):  # dropped before it began
                raise shutting_down() from cancelled
            disconnected.set()
            future.cancel()
            raise
        finally:
            del self._in_flight[disconnected]

    @contextmanager
    def loading_images(self) -> Iterator[None]:
        """Within this context, count a request that loads images.

        Raises OverloadedError if ``_MAX_LOADING`` other requests load images already.
        """
        if self._num_loading >= _MAX_LOADING:
            raise OverloadedError(f"the images of {self._num_loading} other requests are being loaded")
        self._num_loading += 1
        try:
            yield
        finally:
            self._num_loading -= 1

    def drop(self, weight: Weight) -> None:
        """Cancel all work with this weight, and reject new work with it.

        The callers of :meth:`run` get an APIError with status 503: the server is shutting down.
        """
        self._dropped.add(weight)
        for disconnected, (kind, future) in list(self._in_flight.items()):
            if kind is weight:
                disconnected.set()
                future.cancel()

    async def run_if_large(self, num_bytes: int, work: Callable[..., T], *args: object) -> T:
        """Return ``work(*args)``. Run it in a thread if ``num_bytes`` exceeds ``ALWAYS_SMALL_BYTES``.

        Work on fewer bytes runs in the event loop. It must take at most 10 ms. Raises as :meth:`run`.
        """
        return work(*args) if num_bytes <= ALWAYS_SMALL_BYTES else await self.run(Weight.of(num_bytes), work, *args)

    def close(self) -> None:
        """Drop all work: queued work at once, and running work as soon as it checks for cancellation."""
        for weight in Weight:
            self.drop(weight)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _unless_cancelled(work: Callable[..., T], *args: object) -> T:
    check_cancelled()
    return work(*args)
