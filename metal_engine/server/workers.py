"""Threads for what would hold up the event loop: reading large bodies, rendering and tokenizing prompts, compiling."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from metal_engine.cancellation import Cancelled, caller_disconnected, check_cancelled
from metal_engine.server.errors import shutting_down
from metal_engine.server.large_bodies import ALWAYS_SMALL_BYTES

T = TypeVar("T")

# Bytes from which work on a text takes long: a tokenizer needs 0.1 s for so many.
HEAVY_BYTES = 1 << 18


class Weight(enum.Enum):
    """Which threads do a piece of work, so that quick work never queues behind slow work; and how many there are.

    Threads that run Python take turns of 5 ms with the event loop, so few are heavy. Compiling waits for processes, and
    who asks for a grammar that is known must not wait for those who ask for others.
    """

    LIGHT = ("light", 4)
    HEAVY = ("heavy", 2)
    COMPILING = ("compiling", 64)

    @classmethod
    def of(cls, num_bytes: int) -> Weight:
        """Of work on a text or a body of so many bytes."""
        return cls.HEAVY if num_bytes >= HEAVY_BYTES else cls.LIGHT


class Workers:
    """Runs work in threads, and drops work whose client has disconnected. Belongs to the event loop.

    Attributes:
        num_heavy: number of pieces of heavy work so far.
    """

    def __init__(self) -> None:
        self._pools = {
            weight: ThreadPoolExecutor(weight.value[1], thread_name_prefix=f"{weight.value[0]}-work")
            for weight in Weight
        }
        self._in_flight: dict[threading.Event, tuple[Weight, Future[Any]]] = {}
        self._dropped: set[Weight] = set()
        self.num_heavy = 0

    @property
    def is_heavy_in_flight(self) -> bool:
        """True while heavy work runs or is queued."""
        return any(weight is Weight.HEAVY for weight, _ in self._in_flight.values())

    async def run(self, weight: Weight, work: Callable[..., T], *args: object) -> T:
        """Returns ``work(*args)``. Cancelling takes it out of the queue, or makes
        :func:`metal_engine.cancellation.is_cancelled` true within it."""
        if weight in self._dropped:
            raise shutting_down()
        left = threading.Event()
        context = contextvars.copy_context()
        context.run(caller_disconnected.set, left)
        future: Future[T] = self._pools[weight].submit(context.run, _unless_left, work, *args)
        self._in_flight[left] = weight, future
        self.num_heavy += weight is Weight.HEAVY
        try:
            return await asyncio.wrap_future(future)
        except Cancelled as cancelled:  # dropped
            raise shutting_down() from cancelled
        except asyncio.CancelledError as cancelled:
            if left.is_set():  # dropped, before it began
                raise shutting_down() from cancelled
            left.set()
            future.cancel()
            raise
        finally:
            del self._in_flight[left]

    def drop(self, weight: Weight) -> None:
        """End work of a kind, from now on: who waits for it is told that the server shuts down."""
        self._dropped.add(weight)
        for left, (kind, future) in list(self._in_flight.items()):
            if kind is weight:
                left.set()
                future.cancel()

    async def run_if_large(self, num_bytes: int, work: Callable[..., T], *args: object) -> T:
        """Returns ``work(*args)``, which takes 10 ms at most for ``ALWAYS_SMALL_BYTES``: in a thread for more."""
        return work(*args) if num_bytes <= ALWAYS_SMALL_BYTES else await self.run(Weight.of(num_bytes), work, *args)

    def close(self) -> None:
        """Drop everything: what is queued, and what is under way as soon as it notices."""
        for weight in Weight:
            self.drop(weight)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _unless_left(work: Callable[..., T], *args: object) -> T:
    check_cancelled()
    return work(*args)
