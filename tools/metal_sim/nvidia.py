"""``python -m tools.metal_sim cuda``: runs the engine's kernels on a CUDA GPU, using only the driver.

``cuda_kernel`` is a drop-in for ``mx.fast.metal_kernel``, like the simulator's. MLX generates the source, clang
compiles it to PTX (ptx.py), and the driver compiles the PTX for its GPU and runs it. Arrays are copied in both
directions for each launch. This finds mistakes that need many concurrent threads, also under compute-sanitizer, but
does not show a Mac's speed.

This module has never run on a CUDA GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from .errors import CheckError, ToolchainError
from .kernel import SimulatedKernel
from .launch import BufferSpec
from .ptx import ENTRY, ptx_of
from .signature import Parameter

_LOG_BYTES = 8192
_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES = 5, 6  # CUjit_option


class NoGpuError(ToolchainError):
    """This machine has no CUDA GPU or no working driver."""


class Device(Protocol):
    """GPU functions needed for a launch. Addresses are device addresses."""

    def load(self, ptx: str) -> Any:
        """Compile a kernel and return its handle."""
        ...

    def upload(self, array: np.ndarray) -> int: ...

    def download(self, address: int, array: np.ndarray) -> None: ...

    def free(self, address: int) -> None: ...

    def launch(self, kernel: Any, blocks: Sequence[int], threads: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run a kernel to its end. ``arguments`` are ctypes values."""
        ...


class Driver:
    """First GPU, through libcuda.

    Raises:
        NoGpuError: there is no GPU.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoGpuError(f"no CUDA GPU here: {error}") from error
        device, context, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.create_string_buffer(128)
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(device), 0)
            self._call("cuDeviceGetName", name, len(name), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)
        except ToolchainError as error:
            raise NoGpuError(f"no CUDA GPU here: {error}") from error
        self.name = name.value.decode()

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._cuda, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown error"
            raise ToolchainError(f"{function}: {said} ({status})")

    def load(self, ptx: str) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        try:
            self._call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2, options, values)
        except ToolchainError as error:
            raise CheckError(f"the driver does not compile a kernel: {error}\n{log.value.decode()}") from error
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ENTRY.encode())
        return function

    def upload(self, array: np.ndarray) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, array.nbytes)))
        self._call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return address.value

    def download(self, address: int, array: np.ndarray) -> None:
        to = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyDtoH_v2", to, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def launch(self, kernel: Any, blocks: Sequence[int], threads: Sequence[int], arguments: Sequence[Any]) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        sizes = [ctypes.c_uint(size) for size in (*blocks, *threads)]
        self._call("cuLaunchKernel", kernel, *sizes, ctypes.c_uint(0), None, pointers, None)
        self._call("cuCtxSynchronize")


@dataclass(frozen=True)
class _Loaded:
    """Kernel on the GPU, launched like :class:`tools.metal_sim.launch.LoadedKernel`."""

    name: str
    device: Device
    handle: Any

    def launch(self, buffers: list[BufferSpec], grid: tuple[int, ...], threadgroup: tuple[int, ...]) -> None:
        for axis in (0, 1):
            if grid[axis] % threadgroup[axis] and max(threadgroup[axis + 1 :]) > 1:
                raise CheckError(
                    f"{self.name}: grid {grid} ends within threadgroups of {threadgroup}: warps are no SIMD groups"
                )
        addresses: list[int] = []
        try:
            for buffer in buffers:
                if buffer.kind == "output" and not buffer.initialised:
                    buffer.array.view(np.uint8)[...] = 0xFF  # NaN, or -1: kernels must not rely on the contents
                addresses.append(self.device.upload(buffer.array))
            blocks = [-(-size // of_group) for size, of_group in zip(grid, threadgroup, strict=True)]
            arguments = [*map(ctypes.c_uint64, addresses), *map(ctypes.c_uint32, grid)]
            self.device.launch(self.handle, blocks, threadgroup, arguments)
            for buffer, address in zip(buffers, addresses, strict=True):
                if buffer.kind == "output":
                    self.device.download(address, buffer.array)
        finally:
            for address in addresses:
                self.device.free(address)


class CudaKernel(SimulatedKernel):
    """Kernel on a CUDA GPU that is compiled once per combination of dtypes, size classes and template arguments.

    :class:`tools.metal_sim.kernel.SimulatedKernel` explains size classes.
    """

    def __init__(self, device: Device, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._device = device
        self._loaded: dict[str, tuple[_Loaded, tuple[Parameter, ...]]] = {}

    def compile(  # type: ignore[override]
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> tuple[_Loaded, tuple[Parameter, ...]]:
        text, function, arguments = self.metal_source(inputs, output_dtypes, template)
        if function not in self._loaded:
            ptx = ptx_of(text, function, arguments)
            self._loaded[function] = _Loaded(self.name, self._device, self._device.load(ptx.text)), ptx.buffers
        return self._loaded[function]


@cache
def driver() -> Driver:
    """Return the GPU that this process uses. Raises NoGpuError without a GPU."""
    return Driver()


def cuda_kernel(*arguments: Any, **options: Any) -> CudaKernel:
    """Return a kernel with the interface of ``mx.fast.metal_kernel`` on the first CUDA GPU."""
    return CudaKernel(driver(), *arguments, **options)
