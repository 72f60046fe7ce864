"""A GPU that computes nothing, for what the host does with one: dispatch, copies of the KV cache, idle time.

:func:`install` patches the CPU-only libmlx of this process, before ``mlx.core`` is imported: MLX and the engine then
run as on a Mac, and kernels only take time. README.md says what is modelled and what is not.

    python -m tools.fake_gpu report
"""

from .device import Counts, FakeGpu, FakeGpuError, FakeGpuSettings, install

__all__ = ["Counts", "FakeGpu", "FakeGpuError", "FakeGpuSettings", "install"]
