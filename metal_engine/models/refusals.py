"""Reasons why a model that was loaded cannot run on this device."""

from __future__ import annotations

import logging

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from metal_engine.device.info import computes_on_cpu
from metal_engine.errors import UnsupportedModelError

logger = logging.getLogger(__name__)


def refuse_half_precision_experts(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the model has experts in half precision and runs on a CPU.

    MLX multiplies unquantized experts on a CPU in float32 only. Quantized experts run in any type.
    """
    if not computes_on_cpu():
        return
    for module in model.modules():
        if isinstance(module, SwitchLinear) and module.weight.dtype != mx.float32:
            dtype = str(module.weight.dtype).removeprefix("mlx.core.")
            raise UnsupportedModelError(f"its experts are in {dtype}, and MLX on a CPU needs --dtype float32 for them")


def forward_error(error: Exception) -> UnsupportedModelError:
    """Return the exception for an error of a packed forward. Logs messages of several lines in full.

    MLX raises a RuntimeError for operations that the device does not support, such as half-precision experts on a CPU.
    """
    first, *others = f"{type(error).__name__}: {error}".splitlines()
    if others:
        logger.error("a packed forward fails: %s", "\n".join([first, *others]))
    return UnsupportedModelError(f"its forward does not run over a paged cache ({first})")
