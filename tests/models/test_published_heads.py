"""Architectures with the heads of published models, with the simulated Metal kernel if it supports them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.choice import BackendChoice
from metal_engine.attention.kernel_selftest import try_kernel
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.kv_cache.spec import KVSpec
from metal_engine.models.attention_kinds import attention_kinds
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from tools.fixtures.architectures import SUPPORTED, VOCAB_SIZE
from tools.fixtures.published_heads import PUBLISHED, Heads, is_covered, published_configuration, published_kinds
from tools.fixtures.tiny_models import random_model
from tools.metal_sim import metal_kernel, record_launches

BLOCK_SIZE = 16
SOME = ["phi", "stablelm"]  # head_dim 80 and 160
OTHERS = [name for name in SUPPORTED if name not in SOME]


def few_heads(kind: AttentionKind) -> AttentionKind:
    """Return a kind that uses the same kernels, but with less computation."""
    if not isinstance(kind.spec, KVSpec):
        return kind
    heads = Heads(kind.num_heads, kind.spec.num_kv_heads, kind.spec.head_dim).fewer()
    return replace(kind, spec=replace(kind.spec, num_kv_heads=heads.num_kv_heads), num_heads=heads.num_heads)


def test_every_architecture_is_in_the_table() -> None:
    assert PUBLISHED.keys() == SUPPORTED.keys()
    assert published_kinds("gear") == () == published_kinds("mamba")
    llama, *others = published_kinds("llama")
    assert llama == AttentionKind(KVSpec(8, 128, 128, mx.bfloat16), 32, mx.bfloat16) and set(others) == {llama}
    assert {kind.num_heads for kind in published_kinds("deepseek_v3")} == {128}
    assert {kind.spec.num_kv_heads for kind in published_kinds("mimo_v2_flash")} == {4, 8}


@pytest.mark.parametrize("model_type", [*SOME, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_a_model_with_published_heads(model_type: str) -> None:
    """Compare all layers, chunked and packed, with mlx-lm's forward pass. Each uses the documented backend."""
    paged = PagedModel(random_model(published_configuration(model_type)))
    kinds = attention_kinds(paged)
    chosen = BackendChoice(MetalBackend(metal_kernel)).for_layers(kinds, BLOCK_SIZE)
    assert chosen.layers.metal == sum(map(is_covered, kinds))
    assert chosen.layers.portable == sum(not is_covered(kind) for kind in kinds)
    check_paged_model(paged, chosen.backend, VOCAB_SIZE, BLOCK_SIZE)
    published = published_kinds(model_type)
    assert list(map(is_covered, published)) == list(map(is_covered, kinds))[: len(published)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_layers_in_half_precision(dtype: mx.Dtype) -> None:
    """Compare a decode, a chunk, and a split with its merge with the portable backend, for each kind of layer."""
    kinds = {few_heads(kind) for name in SUPPORTED for kind in published_kinds(name, dtype)}
    metal = MetalBackend(metal_kernel)
    assert len(kinds) > 20
    for kind in kinds:
        if is_covered(kind):
            with record_launches() as launches:
                try_kernel(metal, kind, BLOCK_SIZE)
            assert [launch.kernel for launch in launches] == ["paged_attention", "paged_attention", "merge_splits"]
        else:
            with pytest.raises(UnsupportedAttentionError):
                try_kernel(metal, kind, BLOCK_SIZE)
