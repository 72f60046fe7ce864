"""Run Metal kernels without Metal.

``metal_kernel`` is a drop-in for ``mx.fast.metal_kernel``: same constructor, same call, ``mx.array`` results. It
compiles the source that MLX would pass to Metal, checks it against Metal's rules, and runs it thread by thread on the
CPU. It raises :class:`MetalSimError` for errors that a GPU does not report: accesses out of bounds, reads of
uninitialised memory, races, divergent barriers. See docs/dev/kernels.md.
"""

from .errors import CheckError, MetalSimError, ToolchainError
from .kernel import FlushingKernel, SimulatedKernel, metal_kernel
from .launch import LaunchCounts, last_launches, record_launches
from .raw import RawKernel

__all__ = [
    "CheckError",
    "FlushingKernel",
    "LaunchCounts",
    "MetalSimError",
    "RawKernel",
    "SimulatedKernel",
    "ToolchainError",
    "last_launches",
    "metal_kernel",
    "record_launches",
]
