"""Periodic work of the server: returns memory to the system, and adapts the number of BLAS threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from metal_engine.device.allocator import give_back_freed_memory
from metal_engine.device.blas.threads import blas_threads
from metal_engine.device.memory_pressure import MemoryPressure, memory_pressure
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.workers import Workers

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
# Idle polls before the server returns memory. The delay keeps memory between the turns of a conversation.
_IDLE_POLLS = 10
# Minimum number of polls between returns of memory after large bodies. Each return causes page faults in the next step.
_BUSY_POLLS = 5
# Minimum idle time of a model in seconds before its memory is released, by memory pressure.
_IDLE_SECONDS = {MemoryPressure.WARNING: 10.0, MemoryPressure.CRITICAL: 0.0}

ReleaseMemory = Callable[[float], None]
"""Function that releases the memory of models. Its argument is the minimum idle time of a model in seconds."""


class FreedMemory:
    """Decides when the allocator returns freed memory to the system. :meth:`is_due` is called about once a second."""

    def __init__(self, lifecycle: Lifecycle, workers: Workers) -> None:
        self._lifecycle = lifecycle
        self._workers = workers
        self._returned = self._counts()
        self._num_idle_polls = 0
        self._polls_since = 0

    def _counts(self) -> tuple[int, int]:
        return self._lifecycle.num_begun, self._workers.num_heavy

    def is_due(self) -> bool:
        """Return True if memory is to be returned now: after large bodies, or if the server is idle after requests.

        Counts one poll. If the result is True, the caller must return the memory. Later results then depend on later
        requests only.
        """
        self._polls_since += 1
        self._num_idle_polls = 0 if self._lifecycle.num_active else self._num_idle_polls + 1
        counts = self._counts()
        had_large = counts[1] != self._returned[1] and not self._workers.is_heavy_in_flight
        is_idle = counts != self._returned and self._num_idle_polls >= _IDLE_POLLS
        if not is_idle and not (had_large and self._polls_since >= _BUSY_POLLS):
            return False
        self._returned, self._polls_since = counts, 0
        return True


def release_idle_memory(release_memory: ReleaseMemory, pressure: MemoryPressure) -> None:
    """Under memory pressure, release memory of models that have been idle for some time.

    The time is shorter under higher pressure. Without pressure, nothing is released.
    """
    if pressure in _IDLE_SECONDS:
        release_memory(_IDLE_SECONDS[pressure])


async def run_upkeep(lifecycle: Lifecycle, workers: Workers, release_memory: ReleaseMemory) -> None:
    """Do the periodic work of the server once a second, until cancelled.

    Adapts the number of BLAS threads. Under memory pressure, releases the memory of idle models. Returns freed memory
    to the system at the start, and when :meth:`FreedMemory.is_due` returns True. An error is logged once, until it
    changes or the work succeeds.
    """
    memory, threads = FreedMemory(lifecycle, workers), blas_threads()
    await asyncio.to_thread(give_back_freed_memory)  # memory that loading freed
    logged = ""
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        try:
            if threads is not None:
                threads.adapt()
            release_idle_memory(release_memory, memory_pressure())
            if memory.is_due():
                await asyncio.to_thread(give_back_freed_memory)
            logged = ""
        except Exception as error:
            if repr(error) != logged:
                logged = repr(error)
                logger.exception("periodic work of the server has failed, and is repeated every %g s", _POLL_SECONDS)
