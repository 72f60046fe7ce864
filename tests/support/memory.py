"""Measurement of MLX's memory."""

import gc

import mlx.core as mx


def settled_memory() -> int:
    """Free unused memory and reset the peak. Return the number of bytes in use."""
    mx.synchronize()
    gc.collect()  # garbage of other tests could otherwise be freed while a test measures
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
