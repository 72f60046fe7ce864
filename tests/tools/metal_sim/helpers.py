"""A short way to run the body of a kernel."""

import mlx.core as mx
import numpy as np


def run(
    source,
    inputs=None,
    outputs=None,
    *,
    grid=(32, 1, 1),
    threadgroup=(32, 1, 1),
    template=None,
    init_value=None,
    header="",
    name="kernel",
    **options,
):
    """Run a kernel body. ``inputs``: name -> array; ``outputs``: name -> (shape, dtype). Returns NumPy arrays."""
    from tools.metal_sim import metal_kernel

    inputs = {k: v if isinstance(v, mx.array) else mx.array(v) for k, v in (inputs or {}).items()}
    outputs = outputs or {"out": ((32,), mx.float32)}
    kernel = metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=source, header=header, **options
    )
    results = kernel(
        inputs=list(inputs.values()),
        output_shapes=[s for s, _ in outputs.values()],
        output_dtypes=[d for _, d in outputs.values()],
        grid=grid,
        threadgroup=threadgroup,
        template=template,
        init_value=init_value,
    )
    results = [np.array(r.astype(mx.float32) if r.dtype == mx.bfloat16 else r) for r in results]
    return results[0] if len(results) == 1 else results


def line_of(source: str, marker: str) -> int:
    """Return the 1-based number of the line of ``source`` that contains ``marker``."""
    return next(i for i, line in enumerate(source.split("\n"), 1) if marker in line)
