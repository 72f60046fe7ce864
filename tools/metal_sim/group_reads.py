"""Counts how often the attention kernel reads scales and biases of quantized K and V.

docs/dev/kernels.md explains work items, and the direct and the staged way to compute them.
"""

from __future__ import annotations

from metal_engine.attention.metal.variants import AttentionShape, variant_of


def group_reads(shape: AttentionShape, *, is_direct: bool) -> tuple[int, int]:
    """Return the numbers of scales that a work item reads per key and per value. Biases are read equally often.

    A staged item reads each scale once. A direct item also reads each scale once, unless SIMD groups have parts of the
    same group of columns. In that case, each SIMD group reads the scale.
    """
    variant = variant_of(shape)
    split_at = shape.v_head_dim if shape.is_latent else shape.head_dim
    parts = variant.parts if is_direct else 1

    def read(begin: int, end: int, columns: int) -> int:
        of_part = -(-(end - begin) // (4 * columns * parts)) * 4 * columns
        return sum(
            -(-min(end, first + of_part) // shape.group_size) - first // shape.group_size
            for first in range(begin, end, of_part or 1)
        )

    keys = read(0, split_at, variant.k_columns) + read(split_at, shape.head_dim, variant.rest_columns)
    return keys, 0 if shape.is_latent else read(0, shape.v_head_dim, variant.v_columns)
