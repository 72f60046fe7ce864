"""Properties that layers of one kind share in every step: shape, cut and the kernels' template arguments."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from metal_engine.attention.metal.cuts import Cut
from metal_engine.attention.metal.planning import IMAGE_ITEM_FIELDS, ITEM_FIELDS, MAX_SPLITS
from metal_engine.attention.metal.variants import AttentionShape, KernelVariant, check_supported, variant_of


@dataclass(frozen=True)
class Kind:
    """Shape, cut and template arguments of a kind of layer."""

    shape: AttentionShape
    cut: Cut
    variant: KernelVariant
    template: list[tuple[str, mx.Dtype | int]]
    merge_template: list[tuple[str, mx.Dtype | int]]


def make_kind(
    shape: AttentionShape, cut: Cut, has_window: bool, has_softcap: bool, has_sinks: bool, has_images: bool
) -> Kind:
    """Return the properties of a kind of layer. Raises UnsupportedAttentionError for an unsupported shape.

    Args:
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
    return Kind(shape, cut, variant, template, merge_template)
