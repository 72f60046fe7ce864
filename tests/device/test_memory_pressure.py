"""Pressure on the machine's memory."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from metal_engine.device.memory_pressure import MemoryPressure, memory_pressure


@pytest.mark.parametrize(
    ("value", "status", "expected"),
    [(1, 0, "NORMAL"), (2, 0, "WARNING"), (4, 0, "CRITICAL"), (3, 0, "NORMAL"), (4, -1, "NORMAL")],
)
def test_levels_of_macos(monkeypatch: pytest.MonkeyPatch, value: int, status: int, expected: str) -> None:
    class Library:
        def __init__(self, name: None) -> None:
            """Stand in for the C library."""

        @staticmethod
        def sysctlbyname(name: bytes, level: Any, size: Any, new: None, new_size: ctypes.c_size_t) -> int:
            assert (name, size._obj.value) == (b"kern.memorystatus_vm_pressure_level", 4)
            level._obj.value = value
            return status

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert memory_pressure() is MemoryPressure[expected]
