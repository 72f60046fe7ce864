"""KV in 8 and 4 bits: its layout, and its values when read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.errors import ConfigError
from metal_engine.kv_cache.pool import make_state
from metal_engine.kv_cache.quantized import QuantizedKVState
from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.spec import ArraySpec, KVSpec, LatentSpec, QuantizedKVSpec, RecurrentSpec, kv_cache_spec
from metal_engine.kv_cache.writes import BlockWrites, RunWrites, SlotWrites
from metal_engine.kv_transfer.runner_side import block_parts

NUM_BLOCKS, BLOCK_SIZE = 5, 32
PLAIN = KVSpec(num_kv_heads=3, head_dim=128, v_head_dim=64, dtype=mx.float16)
NARROW = KVSpec(num_kv_heads=2, head_dim=96, v_head_dim=96, dtype=mx.float32)
LATENT = LatentSpec(latent_dim=40, rope_dim=24, dtype=mx.bfloat16)
SPECS = [pytest.param(PLAIN, id="plain"), pytest.param(NARROW, id="narrow"), pytest.param(LATENT, id="latent")]


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack uint32 [..., W] to integers, lowest bits first, [..., W * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).reshape(*packed.shape[:-1], -1)


def numbers(state: QuantizedKVState, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the dequantized values of an array and their scales, both [num_slots, heads, dim] in float64."""
    one = name.removesuffix("s")
    scales, biases = (
        np.repeat(np.array(state.arrays[f"{one}_{part}"].astype(mx.float32), np.float64), state.group_size, axis=-1)
        for part in ("scales", "biases")
    )
    return unpacked(np.array(state.arrays[name]), state.bits) * scales + biases, scales


def a_step(make_writes: type = SlotWrites) -> StepRows:
    """Return 40 rows that fill block 3 and a quarter of block 1, and one row in block 4."""
    table = np.array([[3, 1], [4, 0]], np.int32)
    return step_rows(table, np.array([0, 2], np.int32), [40, 1], BLOCK_SIZE, make_writes=make_writes)


def random_rows(spec: KVSpec | LatentSpec, num_rows: int) -> dict[str, mx.array]:
    """Return rows whose groups differ in range and offset, so that using another group's scale is noticed."""
    rng = np.random.default_rng(0)
    rows = {}
    for name, array in spec.token_arrays.items():
        heads, dim = array.shape
        size, place = (rng.uniform(0.2, 3, (2, num_rows, heads, dim // 32)) * [[[[1]]], [[[2]]]]).repeat(32, axis=-1)
        rows[name] = mx.array(rng.standard_normal((num_rows, heads, dim)) * size + place).astype(spec.dtype)
    return rows


def written(spec: KVSpec | LatentSpec, kv_cache_dtype: str, make_writes: type = SlotWrites) -> QuantizedKVState:
    state = make_state(kv_cache_spec(spec, kv_cache_dtype))
    assert isinstance(state, QuantizedKVState)
    state.allocate(NUM_BLOCKS, BLOCK_SIZE)
    step = a_step(make_writes)
    state.write(step, random_rows(spec, step.num_tokens))
    mx.eval(state.writes_done_marker())
    return state


@pytest.mark.parametrize("make_writes", [SlotWrites, BlockWrites, RunWrites])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("spec", SPECS)
def test_stored_rows_are_off_by_a_step_at_most(spec: Any, kv_cache_dtype: str, make_writes: type) -> None:
    state, step = written(spec, kv_cache_dtype, make_writes), a_step()
    assert f"int{state.bits}" == kv_cache_dtype
    # The integers are computed before scale and bias are rounded to the layer's type.
    rounding = {mx.float32: 0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[spec.dtype]
    for name, rows in random_rows(spec, step.num_tokens).items():
        stands_for, scales = numbers(state, name)
        expected = np.array(rows.astype(mx.float32), np.float64)
        here = np.abs(scales[step.slot_mapping])
        # Half a step. Up to one step at one end of a group's range, because the other end is exact.
        gaps = np.abs(stands_for[step.slot_mapping] - expected)
        assert (gaps <= here * (1 + rounding * 2 * 2**state.bits) + 1e-5).all() and gaps.mean() < 0.35 * here.mean()
        others = np.setdiff1d(np.arange(NUM_BLOCKS * BLOCK_SIZE), step.slot_mapping)
        assert not stands_for[others].any(), "a row went elsewhere"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("spec", SPECS)
def test_attention_reads_the_dequantized_stored_values(spec: Any, kv_cache_dtype: str) -> None:
    state = written(spec, kv_cache_dtype)
    names = ["keys", "keys"] if spec.latent_dim else ["keys", "values"]
    slots = np.array([97, 32, 130])
    head_rows = slots * spec.num_kv_heads + spec.num_kv_heads - 1
    by_head, by_token = state.read_heads(mx.array(head_rows)), state.read_tokens(mx.array(slots))
    in_place = state.read_tokens(slice(96, 136))
    for name, heads, tokens, run in zip(names, by_head, by_token, in_place, strict=True):
        expected = numbers(state, name)[0]
        assert heads.dtype == tokens.dtype == run.dtype == mx.float32
        np.testing.assert_allclose(np.array(heads), expected[slots, -1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.array(tokens), expected[slots].reshape(3, -1), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.array(run), expected[96:136].reshape(40, -1), rtol=1e-5, atol=1e-5)
    assert (by_head[0] is by_head[1]) == bool(spec.latent_dim)


def test_sizes() -> None:
    """64 numbers take 128 bytes in 16 bits, 64 in 8 bits and 32 in 4 bits, and 4 bytes for a scale and a bias."""
    kv = KVSpec(num_kv_heads=8, head_dim=128, v_head_dim=128, dtype=mx.bfloat16)
    assert kv_cache_spec(kv, "int8").bytes_per_token == kv.bytes_per_token * 68 / 128
    assert kv_cache_spec(kv, "int4").bytes_per_token == kv.bytes_per_token * 36 / 128
    narrow = KVSpec(num_kv_heads=8, head_dim=96, v_head_dim=96, dtype=mx.bfloat16)
    assert kv_cache_spec(narrow, "int8").bytes_per_token == narrow.bytes_per_token * 36 / 64
    assert kv_cache_spec(narrow, "int4").bytes_per_token == narrow.bytes_per_token * 20 / 64
    for spec in (PLAIN, NARROW, LATENT):
        state = written(spec, "int8")
        assert sum(a.nbytes for a in state.arrays.values()) == NUM_BLOCKS * BLOCK_SIZE * state.spec.bytes_per_token
        assert {name: (a.shape[1:], a.dtype) for name, a in state.arrays.items()} == {
            name: (a.shape, a.dtype) for name, a in state.spec.token_arrays.items()
        }


def test_the_parts_of_a_block() -> None:
    parts = block_parts([kv_cache_spec(PLAIN, "int4"), kv_cache_spec(LATENT, "int4")], 16)
    assert [(p.name, p.dtype, p.shape, p.nbytes) for p in parts] == [
        ("layers.0000.keys", "uint32", (16, 3, 16), 3072),
        ("layers.0000.key_scales", "float16", (16, 3, 2), 192),
        ("layers.0000.key_biases", "float16", (16, 3, 2), 192),
        ("layers.0000.values", "uint32", (16, 3, 8), 1536),
        ("layers.0000.value_scales", "float16", (16, 3, 1), 96),
        ("layers.0000.value_biases", "float16", (16, 3, 1), 96),
        ("layers.0001.keys", "uint32", (16, 1, 8), 512),
        ("layers.0001.key_scales", "bfloat16", (16, 1, 1), 32),
        ("layers.0001.key_biases", "bfloat16", (16, 1, 1), 32),
    ]


def test_kv_of_supported_sizes_is_quantized_and_recurrent_state_is_not() -> None:
    recurrent = RecurrentSpec((ArraySpec((4, 64), mx.float32),))
    assert kv_cache_spec(recurrent, "int8") is recurrent and kv_cache_spec(PLAIN, "auto") is PLAIN
    for spec, group_size in ((PLAIN, 64), (NARROW, 32), (LATENT, 64), (LatentSpec(512, 64, mx.float16), 64)):
        assert kv_cache_spec(spec, "int8") == QuantizedKVSpec(spec, 8, group_size)
        assert kv_cache_spec(spec, "int4") == QuantizedKVSpec(spec, 4, group_size)
    for spec in (KVSpec(2, 80, 80, mx.float16), KVSpec(2, 64, 40, mx.float16), LatentSpec(512, 40, mx.float16)):
        with pytest.raises(ConfigError, match="choose auto") as refused:
            kv_cache_spec(spec, "int4")
        assert str(spec) in str(refused.value)
