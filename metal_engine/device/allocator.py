"""What the system's allocator keeps of memory that was freed."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of glibc's mallopt, and the variables with which users set them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_MAX_KEPT_BYTES = 1 << 20


def give_back_freed_memory() -> None:
    """Have glibc keep 1 MiB at the end of each of its arenas, and take blocks from 1 MiB on from the system one by one.

    Without this it learns from the first large body that is freed: from then on each thread's arena serves blocks of up
    to 32 MiB, and keeps up to 64 MiB for later. What the environment sets stays. Other allocators, such as macOS's,
    are left alone.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in VARIABLES):
        return
    libc = ctypes.CDLL(None)
    for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        libc.mallopt(parameter, _MAX_KEPT_BYTES)
