"""The check at load for models with quantized K and V: cases that pass, and bugs that it detects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.portable.backend import PortableBackend, PortableStep
from metal_engine.errors import ConfigError, UnsupportedModelError
from metal_engine.kv_cache.quantized import QuantizedKVState
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import IndexSpec, QuantizedKVSpec, RecurrentSpec, quantized_names
from metal_engine.kv_cache.state import KVState
from metal_engine.models.check import check_paged_model
from metal_engine.models.layer_cache import AttentionMask, LayerCache
from metal_engine.models.paged_model import PagedModel
from tests.support.sweeps import diagonal, sweep
from tools.fixtures.architecture_parts import VOCAB_SIZE
from tools.fixtures.architectures import SUPPORTED, configuration
from tools.fixtures.tiny_models import random_model
from tools.fixtures.wide_heads import wide_configuration

# One model for each kind of attention: plain, windows, softcap, sinks, latents, shared K and V, heads of V that differ
# from K's, two models that also have recurrent layers, chunks of the context, and an index.
KINDS = [
    "llama", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v3", "gemma4", "deepseek_v2", "qwen3_next", "falcon_h1",
    "llama4", "deepseek_v32",
]  # fmt: skip


def wide_model(model_type: str, kv_cache_dtype: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> PagedModel:
    model = random_model(wide_configuration(model_type), seed, dtype)
    return PagedModel(model, kv_cache_dtype=kv_cache_dtype)


def check(paged: PagedModel) -> None:
    check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


KV_TYPES = ["int8", "int4"]


@pytest.mark.parametrize(("model_type", "kv_cache_dtype"), diagonal(KINDS, KV_TYPES))
def test_the_check_passes(model_type: str, kv_cache_dtype: str) -> None:
    paged = wide_model(model_type, kv_cache_dtype)
    specs = [state.spec for state in paged.pool.states]
    assert any(isinstance(spec, QuantizedKVSpec) for spec in specs)
    assert all(isinstance(spec, QuantizedKVSpec | RecurrentSpec | IndexSpec) for spec in specs)
    check(paged)


@pytest.mark.full
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_every_architecture_is_checked_or_refused(model_type: str, kv_cache_dtype: str) -> None:
    try:
        paged = wide_model(model_type, kv_cache_dtype)
    except ConfigError as error:
        assert error.flag == "--kv-cache-dtype"
    except (UnsupportedModelError, ValueError):  # the widened configuration is inconsistent
        with pytest.raises((UnsupportedModelError, ValueError)):
            PagedModel(random_model(wide_configuration(model_type)))
    else:
        check(paged)


DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize(
    ("model_type", "kv_cache_dtype", "dtype"),
    sweep(
        product(["llama", "gemma4"], KV_TYPES, DTYPES[1:]),
        [("llama", "int8", mx.bfloat16), ("llama", "int4", mx.float16), ("gemma4", "int4", mx.bfloat16)],
    ),
)
def test_the_check_passes_in_half_precision(model_type: str, kv_cache_dtype: str, dtype: mx.Dtype) -> None:
    for seed in range(2):
        check(wide_model(model_type, kv_cache_dtype, seed, dtype))


@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), diagonal(KV_TYPES, DTYPES))
def test_the_check_passes_with_keys_of_200(kv_cache_dtype: str, dtype: mx.Dtype) -> None:
    """Key biases as in Qwen2's checkpoints: a few elements of each head are a hundred times larger than the others."""
    for seed in range(2):
        model = random_model(wide_configuration("qwen2"), seed, dtype)
        for layer in model.layers:
            biases = mx.random.normal(layer.self_attn.k_proj.bias.shape, key=mx.random.key(seed))
            biases[5::64], biases[40::64] = 200, -200
            layer.self_attn.k_proj.bias = biases.astype(dtype)
        check(PagedModel(model, kv_cache_dtype=kv_cache_dtype))


# Changes to stored rows.
MISTAKES: dict[str, Callable[[dict[str, mx.array]], dict[str, mx.array]]] = {
    "scale of another group": lambda kept: {
        "key_scales": mx.roll(kept["key_scales"], 1, axis=-1 if kept["key_scales"].shape[-1] > 1 else 1)
    },
    "no bias": lambda kept: {"key_biases": mx.zeros_like(kept["key_biases"])},
    "no bias of values": lambda kept: {"value_biases": mx.zeros_like(kept["value_biases"])},
    "scale of keys for values": lambda kept: {"value_scales": kept["key_scales"], "value_biases": kept["key_biases"]},
    "half the scale": lambda kept: {"value_scales": kept["value_scales"] / 2},
}


@pytest.mark.parametrize(("mistake", "kv_cache_dtype", "dtype"), diagonal(MISTAKES, KV_TYPES, DTYPES))
def test_the_check_notices_mistakes(
    mistake: str, kv_cache_dtype: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = QuantizedKVState.encode

    def encode_wrongly(self: QuantizedKVState, rows: Mapping[str, mx.array]) -> dict[str, mx.array]:
        kept = encode(self, rows)
        return kept | MISTAKES[mistake](kept)

    monkeypatch.setattr(QuantizedKVState, "encode", encode_wrongly)
    with pytest.raises(UnsupportedModelError, match=f"attention over keys and values in {kv_cache_dtype} is off by"):
        check(wide_model("llama", kv_cache_dtype, dtype=dtype))


def test_the_check_notices_attention_that_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an operation fails when it runs. A conversion to NumPy then gives zeros, which would pass as exact."""

    class Failing(PortableStep):
        def attend(self, *args: Any, **options: Any) -> mx.array:
            return super().attend(*args, **options) + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]

    class FailingBackend(PortableBackend):
        def for_step(self, rows: StepRows) -> PortableStep:
            return Failing(rows, self._limits, self._weights)

    with pytest.raises(UnsupportedModelError, match="LU factorization failed"):
        check_paged_model(wide_model("llama", "int8"), FailingBackend(), VOCAB_SIZE)


def _later_positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = LayerCache.offset.fget

    def offset(self: LayerCache) -> mx.array:
        rows = self._step.rows
        return positions(self) + mx.array((rows.context_lens > 0).astype(np.int32)[rows.request_of_row])

    monkeypatch.setattr(LayerCache, "offset", property(offset))


def _larger_scale_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = LayerCache.attend
    monkeypatch.setattr(
        LayerCache, "attend", lambda self, call, *rest: attend(self, replace(call, scale=call.scale * 1.5), *rest)
    )


def _larger_scale_in_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PortableStep.attend

    def attend_wrongly(self: PortableStep, q: mx.array, state: KVState, *, scale: float, **options: Any) -> mx.array:
        factor = 1.5 if isinstance(state, QuantizedKVState) else 1
        return attend(self, q, state, scale=scale * factor, **options)

    monkeypatch.setattr(PortableStep, "attend", attend_wrongly)


def _own_rows_in_float(monkeypatch: pytest.MonkeyPatch, *, of_decodes: bool = False) -> None:
    """A step reads its own rows unquantized: always, or only if all its requests decode."""
    write, own = QuantizedKVState.write, "own rows"

    def write_and_keep(self: QuantizedKVState, step: StepRows, rows: Mapping[str, mx.array]) -> None:
        vars(self)[own] = step, rows
        write(self, step, rows)

    def dequantized(self: QuantizedKVState, name: str, rows_of: Callable[[mx.array], mx.array]) -> mx.array:
        packed, *groups = (self.arrays[part] for part in quantized_names(name))
        scales, biases = (array.astype(mx.float32) for array in groups)
        array = mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)
        step, rows = vars(self)[own]
        if not of_decodes or step.num_tokens == step.num_requests:
            array[mx.array(step.slot_mapping)] = rows[name].astype(mx.float32)
        return rows_of(array)

    monkeypatch.setattr(QuantizedKVState, "write", write_and_keep)
    monkeypatch.setattr(QuantizedKVState, "_dequantized", dequantized)


# Mistakes, each with a pattern of the refusal's message.
def _own_rows_of_decodes_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    _own_rows_in_float(monkeypatch, of_decodes=True)


FORWARDS = {
    _later_positions_off_by_one: "logits through the paged cache are off",
    _larger_scale_in_calls: "logits through the paged cache are off",
    _larger_scale_in_the_backend: "its attention over keys and values in int",
    _own_rows_in_float: "its attention (over keys|reads a step's own keys)",
    _own_rows_of_decodes_in_float: "its attention (over keys|reads a step's own keys)",
}


@pytest.mark.parametrize(("make", "kv_cache_dtype", "dtype"), diagonal(FORWARDS, KV_TYPES, DTYPES))
def test_the_check_notices_mistakes_of_a_forward(
    make: Callable[[pytest.MonkeyPatch], None], kv_cache_dtype: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=FORWARDS[make]):
        check(wide_model("llama", kv_cache_dtype, 1, dtype))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_the_check_notices_a_window_that_is_left_out(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerCache, "make_mask", lambda *_, **__: AttentionMask(None))
    with pytest.raises(UnsupportedModelError, match="logits through the paged cache are off"):
        check(wide_model("gemma3_text", kv_cache_dtype, dtype=mx.bfloat16))


def test_heads_that_no_group_divides_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim 8") as refused:
        PagedModel(random_model(configuration("llama")), kv_cache_dtype="int8")
    assert refused.value.flag == "--kv-cache-dtype"
    PagedModel(random_model(configuration("mamba2")), kv_cache_dtype="int8")  # mamba2 has no KV
