"""Creates the attention kernel and its variants for a kernel factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metal_engine.device.metal_kernels import kernel_text

KernelFactory = Callable[..., Any]


def attention_kernel(
    kernel_factory: KernelFactory, *, tensor_ops: bool = False, selected: bool = False, quantized: bool = False
) -> Any:
    """Create the attention kernel, or a variant of it for tensor operations, selected keys or quantized caches."""
    name, header = "paged_attention", kernel_text("attention_rows.metal")
    inputs = ["q", "k_cache", "v_cache"]
    if tensor_ops:
        name += "_tensor"
        header = f"#define TENSOR_OPS\n{header}{kernel_text('attention_products.metal')}"
    if selected:
        name += "_selected"
        header = f"#define SELECTED\n{header}"
    if quantized:
        name += "_quantized"
        header = f"#define QUANTIZED\n{header}{kernel_text('attention_quantized.metal')}"
        inputs += ["k_scales", "k_biases", "v_scales", "v_biases"]
    return kernel_factory(
        name=name,
        header=header,
        input_names=[*inputs, "block_table", "items", "numbers", "window_size", "sinks"]
        + (["selected", "list_rows"] if selected else []),
        output_names=["out", "partial_out", "partial_lse"],
        source=kernel_text("paged_attention.metal"),
    )
