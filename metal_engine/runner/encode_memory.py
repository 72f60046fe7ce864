"""Measures the memory of encoding the largest image, by encoding it before the cache is sized."""

from __future__ import annotations

import gc
from math import ceil, isqrt

import mlx.core as mx

from metal_engine.device.info import computes_on_cpu
from metal_engine.device.streams import synchronize
from metal_engine.errors import ConfigError, one_line
from metal_engine.models.paged_model import PagedModel

# Largest image that is encoded on a CPU, where it takes seconds. The memory of larger images is extrapolated.
CPU_TOKENS = 256


def measure_encode_bytes(model: PagedModel, num_tokens: int) -> int:
    """Encode an image of about ``num_tokens`` tokens, and measure MLX's peak memory.

    On a CPU, the image has at most about ``CPU_TOKENS`` tokens. If it is smaller than requested, the result is
    extrapolated.

    Returns:
        Peak memory during the encoding minus the memory in use before it, in bytes.

    Raises:
        ConfigError: the device cannot encode so large an image.
    """
    assert model.images is not None
    encoder = model.images.encoder
    measured = min(num_tokens, CPU_TOKENS) if computes_on_cpu() else num_tokens
    rows = isqrt(measured)
    sample = encoder.sample(rows, measured // rows)
    gc.collect()  # garbage that is freed during the encoding would lower the result
    mx.clear_cache()
    synchronize()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    try:
        features = encoder.encode(sample.inputs, sample.num_features)
        mx.eval(features.arrays)
        synchronize()
    except (MemoryError, RuntimeError) as error:  # MLX's allocator raises RuntimeError
        raise ConfigError(
            "--max-num-encoder-tokens",
            f"an image of {sample.num_features} tokens cannot be encoded on this device; lower "
            f"--max-num-encoder-tokens ({one_line(error)})",
        ) from error
    finally:
        mx.clear_cache()
    return ceil((mx.get_peak_memory() - held) * max(1.0, num_tokens / sample.num_features))
