"""Properties that layers of one kind share in every step: shape, cut and the kernels' template arguments."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from metal_engine.attention.metal.cuts import Cut
from metal_engine.attention.metal.planning import IMAGE_ITEM_FIELDS, ITEM_FIELDS, MAX_SPLITS
from metal_engine.attention.metal.variants import AttentionShape, KernelVariant, check_supported, variant_of
from metal_engine.kv_cache.spec import AttentionSpec, QuantizedKVSpec
from metal_engine.kv_cache.state import KVState

ShapeKey = tuple[mx.Dtype, int, AttentionSpec, int]


def shape_key(q: mx.array, state: KVState) -> ShapeKey:
    """Return the arguments of :func:`make_shape`."""
    return q.dtype, q.shape[1], state.spec, state.block_size


def make_shape(dtype: mx.Dtype, num_heads: int, spec: AttentionSpec, block_size: int) -> AttentionShape:
    """Return the shape of a layer's attention from its type, query heads, stored state and block size."""
    is_latent = spec.latent_dim is not None
    v_head_dim = spec.v_head_dim if spec.latent_dim is None else spec.latent_dim
    bits, group_size = (spec.bits, spec.group_size) if isinstance(spec, QuantizedKVSpec) else (0, 0)
    return AttentionShape(
        dtype, spec.head_dim, v_head_dim, num_heads, spec.num_kv_heads, block_size, is_latent, bits, group_size
    )


def shape_of(q: mx.array, state: KVState) -> AttentionShape:
    """Return the shape of a layer's attention from its queries, [N, Hq, D], and its state."""
    return make_shape(*shape_key(q, state))


@dataclass(frozen=True)
class LayerKind:
    """Shape, cut and template arguments of a kind of layer."""

    shape: AttentionShape
    cut: Cut
    variant: KernelVariant
    template: list[tuple[str, mx.Dtype | int]]
    merge_template: list[tuple[str, mx.Dtype | int]]


def make_kind(
    shape: AttentionShape, cut: Cut, has_window: bool, has_softcap: bool, has_sinks: bool, has_images: bool
) -> LayerKind:
    """Return the properties of a kind of layer. Raises UnsupportedAttentionError for an unsupported shape.

    Args:
        shape: shape of the layers' attention.
        cut: cut of the kernel's work.
        has_images: True if rows of images attend to later rows.
    """
    check_supported(shape)
    variant = variant_of(shape, cut)
    template: list[tuple[str, mx.Dtype | int]] = [
        *shape.template,
        *variant.template,
        ("ITEM_FIELDS", IMAGE_ITEM_FIELDS if has_images else ITEM_FIELDS),
        ("HAS_WINDOW", has_window),
        ("HAS_SOFTCAP", has_softcap),
        ("HAS_SINKS", has_sinks),
        ("HAS_IMAGES", has_images),
    ]
    merge_template: list[tuple[str, mx.Dtype | int]] = [
        ("T", shape.dtype),
        ("D", shape.v_head_dim),
        ("G", shape.group),
        ("HAS_SINKS", has_sinks),
        ("MAX_SPLITS", MAX_SPLITS),
    ]
    return LayerKind(shape, cut, variant, template, merge_template)
