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

    Attributes:
        kind: out of bounds, uninitialised read, race, barrier divergence, SIMD divergence, missing lane, misaligned
            access, write to input, or arithmetic.
        buffer: name of the buffer or threadgroup variable; None if the fault concerns none.
        index: index of the element in the buffer, or offset in bytes in the threadgroup variable; None without either.
        place: line of the fault; None if unknown.
        other_place: line of the other access of a race, or of the other thread at a barrier; None if unknown.
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
