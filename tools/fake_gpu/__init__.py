"""Fake GPU that computes nothing, for measuring the host side: dispatch, copies of the KV cache, idle time.

:func:`install` patches the CPU-only libmlx of this process before ``mlx.core`` is imported. MLX and the engine then run
as on a Mac, but kernels only take time. README.md describes the model and its limits.

    python -m tools.fake_gpu report
"""

from .device import Counts, FakeGpu, FakeGpuError, FakeGpuSettings, install

__all__ = ["Counts", "FakeGpu", "FakeGpuError", "FakeGpuSettings", "install"]
