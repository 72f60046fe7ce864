"""Models over quantized K and V: the packed run against mlx-lm's own forward over K and V rounded the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.errors import ConfigError, UnsupportedModelError
from metal_engine.kv_cache.quantized import QuantizedKVState
from metal_engine.kv_cache.spec import QuantizedKVSpec, RecurrentSpec
from metal_engine.models.check import check_paged_model
from metal_engine.models.layer_cache import AttentionMask, LayerCache
from metal_engine.models.paged_model import PagedModel
from tools.fixtures.architecture_parts import VOCAB_SIZE
from tools.fixtures.architectures import SUPPORTED, configuration
from tools.fixtures.tiny_models import random_model
from tools.fixtures.wide_heads import wide_configuration

# One of each kind of attention: plain, windows, softcap, sinks, latents, shared K and V, other heads of V than of K,
# and two that carry a state from token to token beside it.
KINDS = ["llama", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v3", "gemma4", "deepseek_v2", "qwen3_next", "falcon_h1"]


def wide_model(model_type: str, kv_cache_dtype: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> PagedModel:
    model = random_model(wide_configuration(model_type), seed, dtype)
    return PagedModel(model, kv_cache_dtype=kv_cache_dtype)


def check(paged: PagedModel) -> None:
    check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("model_type", KINDS)
def test_the_check_passes(model_type: str, kv_cache_dtype: str) -> None:
    paged = wide_model(model_type, kv_cache_dtype)
    specs = [state.spec for state in paged.pool.states]
    assert any(isinstance(spec, QuantizedKVSpec) for spec in specs)
    assert all(isinstance(spec, QuantizedKVSpec | RecurrentSpec) for spec in specs)
    check(paged)


@pytest.mark.full
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_every_architecture_is_checked_or_refused(model_type: str, kv_cache_dtype: str) -> None:
    try:
        paged = wide_model(model_type, kv_cache_dtype)
    except ConfigError as error:
        assert error.flag == "--kv-cache-dtype"
    except UnsupportedModelError:  # the widened configuration does not fit together
        with pytest.raises((UnsupportedModelError, ValueError)):
            PagedModel(random_model(wide_configuration(model_type)))
    else:
        check(paged)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("model_type", ["llama", "gemma4"])
def test_the_check_passes_in_half_precision(model_type: str, kv_cache_dtype: str, dtype: mx.Dtype) -> None:
    for seed in range(2):
        check(wide_model(model_type, kv_cache_dtype, seed, dtype))


# --- mistakes: each in one place of what is stored or read ---------------------------------------------------


def _scale_of_another_group(state: QuantizedKVState, kept: dict[str, mx.array]) -> None:
    kept["key_scales"] = mx.roll(kept["key_scales"], 1, axis=-1 if kept["key_scales"].shape[-1] > 1 else 1)


def _no_bias(state: QuantizedKVState, kept: dict[str, mx.array]) -> None:
    kept["key_biases"] = mx.zeros_like(kept["key_biases"])


def _no_bias_of_values(state: QuantizedKVState, kept: dict[str, mx.array]) -> None:
    kept["value_biases"] = mx.zeros_like(kept["value_biases"])


def _scale_of_keys_for_values(state: QuantizedKVState, kept: dict[str, mx.array]) -> None:
    kept["value_scales"], kept["value_biases"] = kept["key_scales"], kept["key_biases"]


def _half_the_scale(state: QuantizedKVState, kept: dict[str, mx.array]) -> None:
    kept["value_scales"] = kept["value_scales"] / 2


MISTAKES = [_scale_of_another_group, _no_bias, _no_bias_of_values, _scale_of_keys_for_values, _half_the_scale]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_notices_mistakes(
    mistake: Any, kv_cache_dtype: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = QuantizedKVState.encode

    def encode_wrongly(self: QuantizedKVState, rows: Mapping[str, mx.array]) -> dict[str, mx.array]:
        kept = encode(self, rows)
        mistake(self, kept)
        return kept

    monkeypatch.setattr(QuantizedKVState, "encode", encode_wrongly)
    with pytest.raises(UnsupportedModelError, match="logits through the paged cache are off"):
        check(wide_model("gemma2", kv_cache_dtype, dtype=dtype))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_the_check_notices_a_window_that_is_left_out(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerCache, "make_mask", lambda *_, **__: AttentionMask(None))
    with pytest.raises(UnsupportedModelError, match="logits through the paged cache are off"):
        check(wide_model("gemma3_text", kv_cache_dtype, dtype=mx.bfloat16))


def test_heads_that_no_group_divides_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim 8") as refused:
        PagedModel(random_model(configuration("llama")), kv_cache_dtype="int8")
    assert refused.value.flag == "--kv-cache-dtype"
    PagedModel(random_model(configuration("mamba2")), kv_cache_dtype="int8")  # it has none
