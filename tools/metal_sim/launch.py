"""Runs a compiled kernel on NumPy buffers, counts its work, and turns faults into errors with source lines."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from .build import Built
from .errors import CheckError, MetalSimError, Place, ToolchainError
from .symbolize import place_of
from .toolchain import runtime_library

MAX_THREADGROUP_MEMORY = 32 << 10
MAX_THREADS = 1024
MAX_BUFFERS = 31

_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_void_p),
        ("bytes", _U64),
        *[(n, _U32) for n in ("item", "kind", "initialised", "copy_in")],
        *[(n, _U64) for n in ("read_bytes", "written_bytes", "unique_read", "unique_written", "reads", "writes")],
    ]


class _Counts(ctypes.Structure):
    _fields_ = [
        (n, _U64)
        for n in (
            "threadgroups",
            "threads",
            "threadgroup_read",
            "threadgroup_written",
            "products",
            "barriers",
            "simdgroup_barriers",
            "simd_operations",
            "atomics",
        )
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", _U32),
        ("space", _U32),
        ("buffer", ctypes.c_int32),
        ("size", _U32),
        ("offset", ctypes.c_int64),
        ("write", _U32),
        ("thread", _U32 * 3),
        ("threadgroup", _U32 * 3),
        *[(n, _U32) for n in ("other_thread", "other_write", "across_threadgroups")],
        ("pc", _U64),
        ("other_pc", _U64),
        ("line", _U32),
        ("other_line", _U32),
        ("file", ctypes.c_char * 96),
        ("message", ctypes.c_char * 256),
    ]


class _Variable(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", _U64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("grid", _U32 * 3),
        ("group", _U32 * 3),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("n_buffers", _U32),
        ("n_variables", _U32),
        ("variables", ctypes.POINTER(_Variable)),
        ("image_begin", ctypes.c_void_p),
        ("image_end", ctypes.c_void_p),
        ("granule", _U32),
        ("pad", _U32),
        ("counts", _Counts),
        ("fault", _Fault),
    ]


_KINDS = (
    "none",
    "out of bounds",
    "uninitialised read",
    "race",
    "barrier divergence",
    "SIMD divergence",
    "missing lane",
    "misaligned access",
    "write to input",
    "arithmetic",
    "granule",
)
_GRANULE = _KINDS.index("granule")
_KIND_OF_BUFFER = {"input": 0, "output": 1, "constant": 2}


@dataclass
class BufferSpec:
    """Buffer of a launch: its name in the kernel, its contents and its kind."""

    name: str
    array: np.ndarray
    kind: str  # "input", "output" or "constant"
    initialised: bool = True  # for outputs: True if the kernel may read the contents of ``array``


@dataclass(frozen=True)
class BufferCounts:
    """Size of one buffer in bytes, and the bytes that a launch read from it and wrote to it.

    ``unique_read`` and ``unique_written`` count the bytes of each element once. ``reads`` and ``writes`` are numbers of
    accesses.
    """

    name: str
    kind: str
    size: int
    read: int
    written: int
    unique_read: int
    unique_written: int
    reads: int
    writes: int


@dataclass(frozen=True)
class LaunchCounts:
    """Counts of one launch. ``threadgroup_read`` and ``threadgroup_written`` are bytes of threadgroup memory."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    buffers: dict[str, BufferCounts]
    threadgroups: int
    threads: int
    threadgroup_memory: int  # bytes declared
    threadgroup_read: int
    threadgroup_written: int
    products: int  # 8x8 matrix products
    barriers: int
    simdgroup_barriers: int
    simd_operations: int
    atomics: int


@dataclass
class _Log:
    recording: bool = False
    launches: list[LaunchCounts] = field(default_factory=list)


_log = _Log()


@contextmanager
def record_launches() -> Iterator[list[LaunchCounts]]:
    """Collect the counts of every launch within this context, in order. Yields the list, which grows."""
    before, _log.recording, _log.launches = (_log.recording, _log.launches), True, []
    try:
        yield _log.launches
    finally:
        _log.recording, _log.launches = before


_last: list[LaunchCounts] = []


def last_launches(n: int = 1) -> list[LaunchCounts]:
    """Return the counts of the last launches, oldest first. At most 16 are stored."""
    return _last[-n:]


@cache
def _runtime() -> ctypes.CDLL:
    # Kernels resolve their calls against this library.
    lib = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    lib.ms_launch.restype = ctypes.c_char_p
    return lib


class LoadedKernel:
    """Built kernel, loaded into this process.

    Raises:
        CheckError: the kernel declares more threadgroup memory than Metal has.
    """

    def __init__(self, name: str, built: Built):
        _runtime()
        self.name = name
        self.built = built
        self._library = ctypes.CDLL(str(built.library))
        self._entry = ctypes.cast(self._library.ms_entry, ctypes.c_void_p).value
        count = len(built.variables)
        self._variables = (_Variable * count).in_dll(self._library, "ms_variables") if count else None
        self.threadgroup_memory = sum(-(-v.bytes // 16) * 16 for v in self._variables or ())
        self._image = _image_of(self._entry or 0)
        self._granule = 4
        if self.threadgroup_memory > MAX_THREADGROUP_MEMORY:
            sizes = ", ".join(f"{n} {v.bytes}" for n, v in zip(built.variables, self._variables or (), strict=True))
            raise CheckError(
                f"{name} declares {self.threadgroup_memory} bytes of threadgroup memory; Metal has "
                f"{MAX_THREADGROUP_MEMORY} ({sizes})"
            )

    def launch(
        self, buffers: list[BufferSpec], grid: tuple[int, int, int], threadgroup: tuple[int, int, int]
    ) -> LaunchCounts:
        """Run the kernel to its end and return its counts. Output arrays are filled in place.

        Raises:
            MetalSimError: the kernel's first fault.
            CheckError: Metal rejects the sizes.
            ToolchainError: the runtime cannot launch the kernel.
        """
        check_sizes(self.name, grid, threadgroup, len(buffers))
        # MLX clips the threadgroup to the grid before it dispatches.
        group = tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True))
        while True:
            launch, structures = self._prepare(buffers, grid, group)
            if why := _runtime().ms_launch(ctypes.byref(launch)):
                raise ToolchainError(f"cannot launch {self.name}: {why.decode()}")
            if launch.fault.kind != _GRANULE:
                break
            self._granule //= 2
        if launch.fault.kind:
            raise self._error(launch.fault, buffers)
        counts = self._counts(launch, structures, buffers, grid, group)
        _last.append(counts)
        del _last[:-16]
        if _log.recording:
            _log.launches.append(counts)
        return counts

    def _prepare(
        self, buffers: list[BufferSpec], grid: tuple[int, ...], group: tuple[int, ...]
    ) -> tuple[_Launch, ctypes.Array[_Buffer]]:
        structures = (_Buffer * max(1, len(buffers)))()
        for s, b in zip(structures, buffers, strict=False):
            assert b.array.flags.c_contiguous
            s.host = b.array.ctypes.data
            s.bytes = b.array.nbytes
            s.item = b.array.itemsize
            s.kind = _KIND_OF_BUFFER[b.kind]
            s.initialised = b.initialised
            s.copy_in = b.kind != "output" or b.initialised
        launch = _Launch()
        launch.entry = self._entry
        launch.grid[:] = grid
        launch.group[:] = group
        launch.buffers = structures
        launch.n_buffers = len(buffers)
        launch.n_variables = len(self.built.variables)
        if self._variables is not None:
            launch.variables = ctypes.cast(self._variables, ctypes.POINTER(_Variable))
        launch.image_begin, launch.image_end = self._image
        launch.granule = self._granule
        return launch, structures

    def _counts(
        self,
        launch: _Launch,
        structures: ctypes.Array[_Buffer],
        buffers: list[BufferSpec],
        grid: tuple[int, ...],
        group: tuple[int, ...],
    ) -> LaunchCounts:
        per_buffer = {
            b.name: BufferCounts(
                name=b.name,
                kind=b.kind,
                size=s.bytes,
                read=s.read_bytes,
                written=s.written_bytes,
                unique_read=s.unique_read,
                unique_written=s.unique_written,
                reads=s.reads,
                writes=s.writes,
            )
            for b, s in zip(buffers, structures, strict=False)
        }
        numbers = {n: getattr(launch.counts, n) for n, _ in _Counts._fields_}
        return LaunchCounts(
            kernel=self.name,
            grid=tuple(grid),  # type: ignore[arg-type]
            threadgroup=tuple(group),  # type: ignore[arg-type]
            buffers=per_buffer,
            threadgroup_memory=self.threadgroup_memory,
            **numbers,
        )

    def _error(self, f: _Fault, buffers: list[BufferSpec]) -> MetalSimError:
        begin = self._image[0]
        place = place_of(self.built.library, f.pc - begin) if f.pc else None
        if f.line:
            place = Place(f.file.decode().rsplit("/", 1)[-1], f.line)
        other = place_of(self.built.library, f.other_pc - begin) if f.other_pc else None
        name, index, what = self._subject(f, buffers)
        thread = f"thread {tuple(f.thread)} of threadgroup {tuple(f.threadgroup)}"
        kind = _KINDS[f.kind]
        verb = "writes" if f.write else "reads"
        text = f.message.decode()
        if kind == "race":
            who = "an atomic operation" if f.other_thread == 0xFFFE else "another thread"
            if f.other_thread < 0x8000:
                who = f"thread {f.other_thread}"
            if f.across_threadgroups:
                who += " of another threadgroup"
            text = (
                f"{thread} {verb} {what}, which {who} {'wrote' if f.other_write else 'read'}"
                f"{f' at {other}' if other else ''} with no barrier between them"
            )
        elif kind in ("barrier divergence", "SIMD divergence"):
            text = f"{text} ({thread}{f'; the other at {other}' if other else ''})"
        elif what:
            text = f"{thread} {verb} {f.size} bytes at {what}{': ' + text if text else ''}"
            if kind == "uninitialised read":
                text += ", which nothing wrote"
        else:
            text = f"{thread}: {text}"
        at = f"{place}: " if place else ""
        return MetalSimError(
            f"{self.name}: {at}{kind}: {text}", kind=kind, buffer=name, index=index, place=place, other_place=other
        )

    def _subject(self, f: _Fault, buffers: list[BufferSpec]) -> tuple[str | None, int | None, str]:
        if f.buffer < 0 or f.space not in (1, 2):
            return None, None, ""
        if f.space == 1:
            b = buffers[f.buffer]
            index = f.offset // b.array.itemsize
            return b.name, index, f"{b.name}[{index}] (a buffer of {b.array.size} elements)"
        assert self._variables is not None
        name, size = self.built.variables[f.buffer], self._variables[f.buffer].bytes
        return name, f.offset, f"byte {f.offset} of threadgroup variable {name} ({size} bytes)"


def check_sizes(name: str, grid: tuple[int, ...], threadgroup: tuple[int, ...], buffers: int) -> None:
    """Raise CheckError for sizes that Metal rejects."""
    for what, size in (("grid", grid), ("threadgroup", threadgroup)):
        if len(size) != 3 or any(int(s) != s or s <= 0 for s in size):
            raise CheckError(f"{name}: {what} {tuple(size)} must be three positive sizes")
    if any(g >= 1 << 32 for g in grid):
        raise CheckError(f"{name}: grid {tuple(grid)} is too large")
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > MAX_THREADS:
        raise CheckError(f"{name}: a threadgroup of {threads} threads; Metal allows {MAX_THREADS}")
    if buffers > MAX_BUFFERS:
        raise CheckError(f"{name}: {buffers} buffers; Metal allows {MAX_BUFFERS}")


def _image_of(address: int) -> tuple[int, int]:
    """Return the address range of the library that contains ``address``."""

    class Info(ctypes.Structure):
        _fields_ = [
            ("name", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("at", ctypes.c_void_p),
        ]

    info = Info()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    # Constants are near the code. The exact end does not matter.
    return info.base, info.base + (16 << 20)
