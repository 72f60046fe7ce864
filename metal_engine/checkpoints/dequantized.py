"""Dequantizes the weights of an mlx-lm model, for devices that compute quantized products slowly."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model


def dequantize(model: nn.Module) -> nn.Module:
    """Replace the quantized layers of a model by layers with plain weights, in place. Return the model."""
    with_global_scales = [
        (name, _dequantized(module))
        for name, module in model.named_modules()
        if isinstance(module, QuantizedSwitchLinear) and module.global_scale is not None
    ]
    if with_global_scales:
        model.update_modules(tree_unflatten(with_global_scales))
    return dequantize_model(model)


def _dequantized(experts: QuantizedSwitchLinear) -> SwitchLinear:
    """Return experts with plain weights. mlx-lm's function ignores the scale that nvfp4 has for each expert."""
    plain = SwitchLinear(experts.input_dims, experts.output_dims, experts.num_experts, bias="bias" in experts)
    parts = zip(experts.weight, experts.scales, experts.global_scale, strict=True)
    plain.weight = mx.stack(
        [
            mx.dequantize(weight, scales, None, experts.group_size, experts.bits, experts.mode, global_scale)
            for weight, scales, global_scale in parts
        ]
    )
    if "bias" in experts:
        plain.bias = experts.bias
    return plain
