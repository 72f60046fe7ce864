"""Pressure on the memory of the machine, as macOS reports it to programs."""

from __future__ import annotations

import ctypes
import enum
import sys

_NAME = b"kern.memorystatus_vm_pressure_level"


class MemoryPressure(enum.IntEnum):
    """Level of memory pressure. At CRITICAL, macOS is about to end programs."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def memory_pressure() -> MemoryPressure:
    """Return the current pressure. Return NORMAL on systems other than macOS, and if macOS reports an unknown level."""
    if sys.platform != "darwin":
        return MemoryPressure.NORMAL
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    failed = ctypes.CDLL(None).sysctlbyname(_NAME, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    known = not failed and level.value in iter(MemoryPressure)
    return MemoryPressure(level.value) if known else MemoryPressure.NORMAL
