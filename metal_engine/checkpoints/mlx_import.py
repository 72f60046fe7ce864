"""Imports MLX, after setting up the environment that MLX reads when it is imported."""

from __future__ import annotations

from metal_engine.checkpoints.known_config import limit_command_buffers
from metal_engine.device.blas.load import BlasInfo, load_optimized_blas
from metal_engine.device.descriptors import keep_open_file_limit, open_file_limit
from metal_engine.settings.args import EngineArgs

# Open files for models with many files, and for grammars, which take one each. macOS allows 256 by default.
_OPEN_FILES = 2048


def import_mlx(*models: EngineArgs) -> BlasInfo:
    """Set the limits of Metal's command buffers for the models, load the BLAS, and import MLX. Return the BLAS.

    The limit of open files becomes at least ``_OPEN_FILES``.
    """
    limit_command_buffers(models)
    blas = load_optimized_blas()
    with keep_open_file_limit():
        import mlx_lm.utils  # noqa: F401
    open_file_limit(_OPEN_FILES)
    return blas
