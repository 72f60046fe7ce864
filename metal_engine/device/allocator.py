"""Settings of glibc's allocator for a server: which freed memory it keeps, and when it returns memory to the system."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

# Parameters of mallopt, and their values.
_SETTINGS = {
    # One arena for all threads: malloc_trim returns free memory at the end of the main arena only.
    "M_ARENA_MAX": (-8, 1),
    # Map each block of at least this size separately. 32 MiB is the maximum that glibc accepts.
    "M_MMAP_THRESHOLD": (-3, 32 << 20),
    # Keep up to this much free memory at the arena's end. A step of the demo model frees less.
    "M_TRIM_THRESHOLD": (-1, 256 << 20),
}


def _has_own_settings() -> bool:
    # On other systems, libc_ver would read the whole Python.
    is_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    return not is_glibc or any(name in os.environ for name in VARIABLES)


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, so that the next step causes no page faults for it.

    Call this before the process starts threads, and call :func:`give_back_freed_memory` from time to time. Does nothing
    with other allocators, or if the environment has settings of glibc's allocator.
    """
    if _has_own_settings():
        return
    libc = ctypes.CDLL(None)
    for parameter, value in _SETTINGS.values():
        libc.mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Return all free memory of glibc to the system. Takes some milliseconds.

    Does nothing with other allocators, or if the environment has settings of glibc's allocator.
    """
    if not _has_own_settings():
        ctypes.CDLL(None).malloc_trim(0)
