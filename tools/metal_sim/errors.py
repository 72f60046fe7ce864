"""Errors of the simulator."""

from __future__ import annotations

from dataclasses import dataclass


class ToolchainError(RuntimeError):
    """The simulator cannot work: no clang, failed tracing, or an untested version of MLX."""


class CheckError(RuntimeError):
    """The kernel breaks a rule of the language or the device. A Mac would reject it."""


@dataclass(frozen=True)
class Place:
    """Line of the kernel. ``file`` is "<kernel>:source" or "<kernel>:header" for the text given to MLX."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class MetalSimError(RuntimeError):
    """A kernel did something undefined while it ran.

    ``kind`` is one of: out of bounds, uninitialised read, race, barrier divergence, SIMD divergence,
    missing lane, misaligned access, write to input, arithmetic.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        buffer: str | None = None,
        index: int | None = None,
        place: Place | None = None,
        other_place: Place | None = None,
    ):
        super().__init__(message)
        self.kind = kind
        self.buffer = buffer
        self.index = index
        self.place = place
        self.other_place = other_place

    @property
    def line(self) -> int | None:
        return self.place.line if self.place else None
