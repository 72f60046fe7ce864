"""Which attention backend a setting means on this machine."""

from __future__ import annotations

import mlx.core as mx

from metal_engine.attention.backend import AttentionBackend
from metal_engine.attention.metal.backend import BLOCK_SIZES, THREADGROUPS_PER_CORE, MetalBackend
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.device.info import gpu_core_count
from metal_engine.errors import ConfigError


def choose_backend(setting: str, block_size: int) -> AttentionBackend:
    """``auto`` is the kernel where there is Metal. It never falls back by itself: a shape that the kernel does not
    do is an error at load, and the portable backend is for who asks for it.

    Raises:
        ConfigError: there is no Metal here, or the kernel does not do such blocks.
    """
    has_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    if setting == "mlx" or (setting == "auto" and not has_metal):
        return PortableBackend()
    if not has_metal:
        raise ConfigError("--attention-backend", "metal needs Apple's Metal, and there is none here; use mlx")
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            "--block-size",
            f"{block_size} does not go with the metal attention backend: choose one of "
            f"{', '.join(map(str, BLOCK_SIZES))}, or --attention-backend mlx",
        )
    num_cores = gpu_core_count()
    return MetalBackend(target_threadgroups=num_cores and THREADGROUPS_PER_CORE * num_cores)
