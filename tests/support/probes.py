"""Probes of delays and memory, measured inside the server's process.

Times are CPU times: other processes on the machine add nothing to them.

- ``loop``: longest time that the event loop's thread works between two ticks of a task that sleeps one millisecond. It
  includes any callback that blocks the loop.
- ``steps``: longest time that the engine's thread works in one call that accepts requests, or in one step. MLX computes
  in its own threads, so this is the host's work.
- ``lock``: longest time that one thread works between two moments at which a sleeping thread gets Python's lock. It
  includes a call into C that keeps the lock. Python code releases the lock after 5 ms. If the machine wakes the
  sleeping thread late, the interval is too long, so measurements are repeated and the smallest counts. 0 on systems
  other than Linux.
- ``memory``: increase of the peak of resident memory, in bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from metal_engine.engine.core import EngineCore
from metal_engine.engine.engine_thread import EngineThread

_TICK_SECONDS = 0.001
_IS_LINUX = sys.platform == "linux"


def thread_clock(native_id: int) -> int:
    """Return the id of Linux's CPU clock of a thread. Reading the clock after the thread's end raises only OSError."""
    return (~native_id << 3) | 6


class Probes:
    """Measurements since the last :meth:`reset`. One instance for a process."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._resident = 0
        self._clocks: dict[int, float] = {}

    def install(self) -> None:
        """Start to measure the engine's threads and the lock. :meth:`watch_loop` measures the event loop."""
        for owner, name in ((EngineThread, "_process_inbox"), (EngineCore, "step")):
            setattr(owner, name, self._timed(getattr(owner, name)))
        threading.Thread(target=self._watch_lock, name="probe", daemon=True).start()

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                self._note("steps", time.thread_time() - started)

        return timed

    def _note(self, name: str, value: float) -> None:
        if value > self._values.get(name, 0.0):
            self._values[name] = value

    async def watch_loop(self) -> None:
        """Measure ``loop`` in the running event loop, forever."""
        last = time.thread_time()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.thread_time()
            self._note("loop", now - last)
            last = now

    def _watch_lock(self) -> None:
        own = threading.get_native_id()
        while _IS_LINUX:
            time.sleep(_TICK_SECONDS)
            clocks: dict[int, float] = {}
            for thread in threading.enumerate():
                if (native_id := thread.native_id) not in (None, own):
                    with suppress(OSError):
                        clocks[native_id] = time.clock_gettime(thread_clock(native_id))
            for native_id, worked in clocks.items():
                self._note("lock", worked - self._clocks.get(native_id, worked))
            self._clocks = clocks

    def reset(self, *, trim: bool = True) -> None:
        """Clear the measurements.

        Args:
            trim: True to also return free memory to the system, which makes the next allocations slow (Linux).
        """
        gc.collect()
        if _IS_LINUX:
            if trim:
                ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident size
        self._resident = peak_resident()
        self._clocks = {}  # the garbage collection above held the lock too
        self._values = {}

    def read(self) -> dict[str, float]:
        """Return ``loop``, ``steps`` and ``lock`` in seconds, and ``memory`` in bytes."""
        names = ("loop", "steps", "lock")
        return {name: self._values.get(name, 0.0) for name in names} | {"memory": peak_resident() - self._resident}


def bytes_in_use() -> dict[str, int]:
    """Return the memory in use in bytes, without memory that allocators keep free (glibc only).

    ``malloc`` counts allocations of glibc. ``python`` is an upper bound for blocks of up to 512 bytes, which Python's
    own allocator gets directly from the system. That allocator keeps most memory that it ever needed at one time.
    """
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    of_all_arenas = ctypes.string_at(text.value or 0, size.value).decode().rpartition("</heap>")[2]
    libc.free(text)
    found = re.findall(r'<(?:total|system) type="(\w+)".* size="(\d+)"', of_all_arenas)
    sizes = {name: int(value) for name, value in found}
    malloc = sizes["current"] - sizes["fast"] - sizes["rest"] + sizes["mmap"]
    return {"malloc": malloc, "python": sys.getallocatedblocks() * 512}


def peak_resident() -> int:
    """Return the peak resident size of this process in bytes. On Linux, it is the peak since the last reset."""
    if _IS_LINUX:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
