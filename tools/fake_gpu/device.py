"""Installs the fake GPU in this process's libmlx and reads its counts."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from .build import FakeGpuError, build

# Versions of MLX whose patched functions, and rules that device.cpp repeats, have been reviewed.
TRIED = ("0.32.4",)
# Function of libmlx -> name of its replacement in `fake_replace` of device.cpp.
_REPLACED = {
    "mlx::core::gpu::is_available()": "true",
    "mlx::core::metal::is_available()": "true",
    "mlx::core::gpu::device_count()": "one",
    "mlx::core::gpu::new_stream(mlx::core::Stream)": "nothing",
    "mlx::core::gpu::new_thread_unsafe_stream(mlx::core::Stream)": "nothing",
    "mlx::core::gpu::clear_streams()": "nothing",
    "mlx::core::gpu::eval(mlx::core::array&)": "eval",
    "mlx::core::gpu::finalize(mlx::core::Stream)": "finalize",
    "mlx::core::gpu::synchronize(mlx::core::Stream)": "synchronize",
    "mlx::core::Event::signal(mlx::core::Stream)": "signal",
    "mlx::core::Event::wait()": "wait",
    # Metal has kernels for these operations. On a CPU, they become graphs of other operations.
    "mlx::core::fast::RMSNorm::use_fallback(mlx::core::Stream)": "false",
    "mlx::core::fast::RoPE::use_fallback(mlx::core::Stream)": "false",
    "mlx::core::fast::LayerNorm::use_fallback(mlx::core::Stream)": "false",
    "mlx::core::fast::ScaledDotProductAttention::use_fallback": "false",
    "mlx::core::detail::compile_available_for_device(mlx::core::Device const&)": "true",
}
_DEVICE_INFO: dict[str, Any] = {
    "device_name": "Fake GPU",
    "architecture": "applegpu_g13g",
    "memory_size": 64 << 30,
    "max_recommended_working_set_size": 48 << 30,
}
_NUM_CORES = 10


@dataclass(frozen=True)
class FakeGpuSettings:
    """Costs of operations, and limits of command buffers.

    Attributes:
        encode_us: host time for each kernel in microseconds, in place of Metal's encoding, which does not run here.
        view_us: host time for each view in microseconds.
        kernel_us: device time for each kernel in microseconds.
        us_per_mb: device time in microseconds for each MiB that a kernel reads or writes.
        max_ops: kernels after which a command buffer is committed, as ``MLX_MAX_OPS_PER_BUFFER``.
        max_mb: "megabytes" (2**20 elements) after which a command buffer is committed, as ``MLX_MAX_MB_PER_BUFFER``.
        pool_array_bytes: smallest size of a new array that counts as a copy of a pool's array.
        is_late: True to complete a command buffer only when a thread waits for the device: for the end of a step, or
            in MLX's throttle. The completed work then does not depend on the speed of the host.
    """

    encode_us: float = 0.0
    view_us: float = 0.0
    kernel_us: float = 0.0
    us_per_mb: float = 0.0
    max_ops: int = 40
    max_mb: int = 40
    pool_array_bytes: int = 1 << 62
    is_late: bool = False


@dataclass(frozen=True)
class Counts:
    """Counts of the device's work since the last reset. Times are in nanoseconds.

    Attributes:
        kernels: evaluated operations, except views.
        views: evaluated views.
        copies: writes into a part of an array that copied the array, of any size, because it was still in use.
        pool_copies: new arrays of at least ``pool_array_bytes``.
        commits: committed command buffers with at least one kernel.
        encode_ns: host time in the fake GPU, including ``encode_us`` and ``view_us``.
        busy_ns: device time of kernels.
        idle_ns: idle device time between kernels.
        finished: completed command buffers, including empty ones.
    """

    kernels: int = 0
    views: int = 0
    copies: int = 0
    pool_copies: int = 0
    commits: int = 0
    encode_ns: int = 0
    busy_ns: int = 0
    idle_ns: int = 0
    finished: int = 0

    @property
    def busy(self) -> float:
        """Fraction of time in which the device was busy; 0 without any work."""
        return self.busy_ns / max(self.busy_ns + self.idle_ns, 1)


class _CSettings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("encode_us", "view_us", "kernel_us", "us_per_mb")),
        *((name, ctypes.c_long) for name in ("max_ops", "max_mb", "pool_array_bytes", "is_late")),
    ]


class FakeGpu:
    """Fake GPU of this process, made by :func:`install`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.configure(FakeGpuSettings())

    def configure(self, settings: FakeGpuSettings) -> None:
        """Apply costs and limits from the next operation on."""
        self.settings = settings
        self._library.fake_configure(ctypes.byref(_CSettings(*astuple(settings))))

    def counts(self, *, reset: bool = False) -> Counts:
        """Return the counts since the last reset. With ``reset``, counting begins again at 0."""
        found = (ctypes.c_long * len(Counts.__dataclass_fields__))()
        self._library.fake_counts(found, reset)
        return Counts(*found)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Prevent command buffers from completing inside the context.

        Inside the context, a thread that waits for a command buffer, or commits an eleventh one, blocks until the
        context ends.
        """
        self._library.fake_gate(False)
        try:
            yield
        finally:
            self._library.fake_gate(True)


@functools.cache
def install() -> FakeGpu:
    """Patch libmlx and return the fake GPU. Later calls return the same object.

    Raises:
        FakeGpuError: ``mlx.core`` has been imported before, the machine or the version of MLX is not supported, or a
            compiler or ``nm`` is missing.
    """
    if "mlx.core" in sys.modules:
        raise FakeGpuError("mlx.core has been imported: the fake GPU must be installed before")
    mlx, version = _find_mlx()
    # Load the library that the fake GPU was linked with first, with its symbols global.
    libmlx = mlx / "lib" / "libmlx.so"
    ctypes.CDLL(str(libmlx), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(build(mlx, version)))
    library.fake_replace.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.fake_replace.restype = library.fake_gate.restype = ctypes.c_bool
    library.fake_gate.argtypes, library.fake_gate.restype = [ctypes.c_bool], None
    library.fake_counts.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    base = _loaded_at(libmlx)
    for name, offset in _offsets(libmlx).items():
        if not library.fake_replace(base + offset, _REPLACED[name].encode()):
            raise FakeGpuError("this system does not allow a program to change its own code")
    gpu = FakeGpu(library)
    _change_python()
    return gpu


def _find_mlx() -> tuple[Path, str]:
    """Return the folder of the mlx package and its version.

    Raises:
        FakeGpuError: the machine or the version of MLX is not supported, or MLX is not installed.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise FakeGpuError(f"the fake GPU is for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    spec = importlib.util.find_spec("mlx")
    if spec is None or not spec.submodule_search_locations:
        raise FakeGpuError("MLX is not installed")
    for package in ("mlx", "mlx-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise FakeGpuError(f"{package} is not installed: the fake GPU patches its libmlx.so") from error
        if version not in TRIED:
            raise FakeGpuError(
                f"the fake GPU was tried with MLX {', '.join(TRIED)}, but {package} {version} is installed; see "
                "tools/fake_gpu/README.md for the code to review before adding a version"
            )
    return Path(spec.submodule_search_locations[0]), version


def _loaded_at(library: Path) -> int:
    """Return the address at which a library begins in this process. Raises FakeGpuError if it is not loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_, path = line.split(maxsplit=5)
        if int(offset, 16) == 0 and os.path.samefile(path, library) if path.startswith("/") else False:
            return int(span.split("-")[0], 16)
    raise FakeGpuError(f"{library} is not loaded in this process")


def _offsets(library: Path) -> dict[str, int]:
    """Return the offsets in libmlx of the functions of :data:`_REPLACED`. Raises FakeGpuError if one is missing."""
    try:
        listed = subprocess.run(["nm", "-C", str(library)], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise FakeGpuError(f"nm (binutils) cannot list the functions of {library}: {error}") from error
    found: dict[str, int] = {}
    for address, name in re.findall(r"^([0-9a-f]+) [tT] (.*)$", listed, re.M):
        if "[clone" in name:
            continue
        known = name if name in _REPLACED else name.split("(")[0]
        if known in _REPLACED:
            found[known] = int(address, 16)
    if missing := _REPLACED.keys() - found.keys():
        raise FakeGpuError(f"{library} lacks {', '.join(sorted(missing))}")
    return found


def _change_python() -> None:
    """Replace Python functions that describe the device, and set MLX's memory limit to the fake GPU's memory."""
    import mlx.core as mx

    from metal_engine.device import info

    changed: Any = mx
    changed.device_info = lambda device=None: dict(_DEVICE_INFO)
    changed.set_wired_limit = lambda limit: 0
    # MLX's own limit depends on this machine's memory. Beyond the limit, MLX waits for steps and never copies.
    mx.set_memory_limit(_DEVICE_INFO["memory_size"])
    info.gpu_core_count = lambda: _NUM_CORES
