"""What holds a server up, and what it takes, measured within its process.

Times are processor time, not time on the clock: another process that has the machine adds nothing to them.

- ``loop``: what the event loop's thread worked between two ticks of a task that sleeps a millisecond. One callback that
  holds the loop is in one such interval.
- ``steps``: what the engine's thread worked in one call that takes requests in, or in one step. MLX computes in threads
  of its own, so this is the host's work.
- ``lock``: what one thread worked between two moments at which a thread that sleeps a millisecond had Python's lock. A
  call into C that keeps the lock is in one such interval; a thread that gives the lock away lets the sleeper in, in
  Python code after 5 ms. When the machine wakes the sleeper late, the interval is longer than what was held: so a
  measurement is repeated, and the least counts. (Linux only: 0 elsewhere.)
- ``memory``: how far resident memory rose above what it was before, in bytes.
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
    """Linux's clock of a thread's processor time; reading it after the thread's end raises OSError, and no more."""
    return (~native_id << 3) | 6


class Probes:
    """Measures since the last :meth:`reset`. One for a process."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._resident = 0
        self._clocks: dict[int, float] = {}

    def install(self) -> None:
        """Begin to watch the engine's threads and the lock. The event loop is watched by :meth:`watch_loop`."""
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
        """Tick in the event loop, for ever."""
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
        """Forget what was measured, and give back memory that is free, which makes the next memory slow to get."""
        gc.collect()
        if _IS_LINUX:
            if trim:
                ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        self._resident = peak_resident()
        self._clocks = {}  # what was collected here held the lock, too
        self._values = {}

    def read(self) -> dict[str, float]:
        """``loop``, ``steps`` and ``lock`` in seconds, ``memory`` in bytes."""
        names = ("loop", "steps", "lock")
        return {name: self._values.get(name, 0.0) for name in names} | {"memory": peak_resident() - self._resident}


def bytes_in_use() -> dict[str, int]:
    """What is in use of memory, in bytes, whatever the allocators keep beside it (glibc only).

    ``malloc`` is what glibc has given out. ``python`` is the most that the blocks of Python's own allocator have, which
    are of up to 512 bytes; it has them from the system, not from glibc, and keeps most of what it ever had at once.
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
    """The largest resident size of this process, in bytes; on Linux, since it was last reset."""
    if _IS_LINUX:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
