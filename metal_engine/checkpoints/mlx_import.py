"""Imports MLX, after setting up the environment that MLX reads when it is imported."""

from __future__ import annotations

from metal_engine.checkpoints.known_config import limit_command_buffers
from metal_engine.device.blas.load import BlasInfo, load_optimized_blas
from metal_engine.device.descriptors import keep_open_file_limit
from metal_engine.settings.args import EngineArgs


def import_mlx(*models: EngineArgs) -> BlasInfo:
    """Set the limits of Metal's command buffers for the models, load the BLAS, and import MLX. Return the BLAS."""
    limit_command_buffers(models)
    blas = load_optimized_blas()
    with keep_open_file_limit():
        import mlx_lm.utils  # noqa: F401
    return blas
