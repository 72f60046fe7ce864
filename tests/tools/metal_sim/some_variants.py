"""Kernel variants that `make test` compiles for Apple GPUs: one of each kind that published checkpoints need."""

from __future__ import annotations

import mlx.core as mx

from tools.metal_sim.shapes import Attention, Convolution, GatedDelta, Layer, Mamba2
from tools.metal_sim.variants import Recorder, Variant

SOME: tuple[tuple[Layer, mx.Dtype], ...] = (
    (Attention(32, 8, 64, 64), mx.float16),
    (Attention(16, 4, 128, 128), mx.bfloat16),
    (Attention(32, 2, 128, 128, window=True), mx.float16),
    (Attention(48, 2, 128, 128), mx.float16),
    (Attention(32, 8, 160, 160), mx.float16),
    (Attention(64, 4, 192, 128), mx.float16),
    (Attention(16, 8, 256, 256, softcap=True), mx.float16),
    (Attention(32, 2, 256, 256), mx.bfloat16),
    (Attention(16, 2, 512, 512), mx.float16),
    (Attention(16, 1, 512, 512, rope_dim=64), mx.bfloat16),
    (Attention(128, 1, 512, 512, rope_dim=64), mx.float16),
    (GatedDelta(16, 32, 128, 128), mx.bfloat16),
    (Mamba2(128, 8, 64, 128), mx.float16),
    (Convolution(4, bias=True), mx.bfloat16),
)
WITH_IMAGES = Attention(8, 4, 256, 256, window=True)
WITH_INDEX = Attention(64, 1, 512, 512, rope_dim=64)
QUANTIZED = (mx.bfloat16, "int8"), (mx.float16, "int4")
QUANTIZED_LAYER = Attention(32, 8, 128, 128)
TENSOR = Attention(16, 4, 128, 128)


def some_variants() -> list[Variant]:
    """Return the variants, those for GPUs with matrix units included."""
    recorder = Recorder()
    for layer, dtype in SOME:
        recorder.record(layer, {"some"}, dtype)
    recorder.record(WITH_IMAGES, {"gemma3"}, mx.bfloat16)
    for dtype, kv_cache_dtype in QUANTIZED:
        recorder.record_quantized(QUANTIZED_LAYER, {"some"}, dtype, kv_cache_dtype)
    recorder.record(WITH_INDEX, {"deepseek_v32"}, mx.bfloat16)
    recorder.record_quantized(WITH_INDEX, {"deepseek_v32"}, mx.bfloat16, "int8")
    recorder.record_tensor_ops(TENSOR, {"some"}, mx.float16)
    # Merging depends little on the layer.
    merges = [v for v in recorder.variants.values() if v.kernel == "merge_splits"]
    others = [v for v in recorder.variants.values() if v.kernel != "merge_splits"]
    return [*others, merges[0]]
