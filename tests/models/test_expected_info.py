"""Facts about a model before its weights are read equal the facts after they are read."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.requirements import CheckpointRequirements
from metal_engine.errors import ConfigError
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.state import IndexState
from metal_engine.loading.load_checks import check_before_loading
from metal_engine.models.info import expected_model_info
from metal_engine.models.own_caches_model import open_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.settings.resolve import check_kv_cache, resolve_config
from tests.support.memory import settled_memory
from tools.fixtures.architectures import SUPPORTED, configuration
from tools.fixtures.tiny_models import random_model

_EVERYDAY = ("llama", "deepseek_v3", "gemma3n", "gpt_oss", "qwen3_5", "mamba", "falcon_h1")


def facts(model_type: str) -> CheckpointRequirements:
    return CheckpointRequirements(configuration(model_type), 1, 1, "float32")


@pytest.mark.parametrize(
    "model_type", [name if name in _EVERYDAY else pytest.param(name, marks=pytest.mark.full) for name in SUPPORTED]
)
def test_kv_of_a_token(model_type: str) -> None:
    info = expected_model_info("x", facts(model_type))
    paged = PagedModel(random_model(configuration(model_type)))
    assert info is not None and info.kv_bytes_per_token == paged.pool.bytes_per_token
    assert info.state_bytes_per_request == paged.pool.bytes_per_request
    num_layers = sum(not isinstance(state, IndexState) for state in paged.pool.states)
    assert (info.vocab_size, info.num_layers) == (paged.vocab_size, num_layers)


def test_convolutions_are_not_experts() -> None:
    """The configuration has a projection to 200 elements, and a convolution of 4 tokens with 128 channels."""
    config = configuration("mamba2") | {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 32,
        "n_groups": 1,
        "conv_kernel": 4,
    }
    info = expected_model_info("x", CheckpointRequirements(config, 1, 1, "float32"))
    assert info is not None and info.layer_width == 2 * 64 + 2 * 32 + 4


def test_a_section_of_the_text_model_may_be_null() -> None:
    requirements = facts("llama")
    requirements.config["text_config"] = None
    assert expected_model_info("x", requirements) == expected_model_info("x", facts("llama"))


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--speculative-config", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ("--kv-cache-dtype", {"kv_cache_dtype": "int8"}),
        ("--kv-cache-dir", {"kv_cache_dir": "x"}),
        ("--kv-transfer-config", {"kv_transfer_config": '{"kv_connector": "x", "kv_role": "kv_both"}'}),
        ("--tensor-parallel-size", {"tensor_parallel_size": 2}),
        ("--enable-lora", {"enable_lora": True}),
    ],
)
def test_models_over_mlx_lm_caches_refuse_settings_that_need_packed_steps(flag: str, setting: dict[str, Any]) -> None:
    """Refuse by the configuration alone, before weights are read."""
    info = expected_model_info("x", facts("deepseek_v41"))
    device = DeviceInfo(kind="cpu", name="x", compute="x", memory_bytes=1 << 34)
    assert info is not None and info.own_caches_reason == "its state is not a plain KV cache (LayerCache)"
    assert not resolve_config(EngineArgs(model="x"), info, device, "mlx").cache.enable_prefix_caching
    with pytest.raises(ConfigError) as error:
        check_kv_cache(EngineArgs(model="x", **setting), info, device)
    assert error.value.flag == flag


def test_ranks_are_refused_for_models_over_mlx_lm_caches_before_sharding() -> None:
    device = DeviceInfo(kind="cpu", name="x", compute="x", memory_bytes=1 << 34)
    args = EngineArgs(model="x", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="over mlx-lm's own caches") as error:
        check_before_loading(args, facts("deepseek_v41"), device, lambda model: pytest.fail("it was divided"))
    assert error.value.flag == "--tensor-parallel-size"


def test_memory_of_mlx_lm_caches_stays_within_the_estimate() -> None:
    """Count what a chunk of 600 tokens and a decode hold: a window must not keep all tokens of the chunk."""
    paged = open_paged_model(random_model(configuration("deepseek_v41")))
    info = expected_model_info("x", facts("deepseek_v41"))
    pool, tokens = paged.pool, 0
    assert (info.kv_bytes_per_token, info.state_bytes_per_request) == (pool.bytes_per_token, pool.bytes_per_request)
    pool.allocate(200, 4, 2)
    gc.collect()  # otherwise, garbage of other tests could be freed while this test measures
    before = mx.get_active_memory()
    slots = np.array([1], np.int32)
    for length in (600, 1):
        reads = slots if tokens else np.zeros_like(slots)
        rows = step_rows(
            np.arange(200)[None].astype(np.int32), np.array([tokens], np.int32), [length], 4, state_slots=(reads, slots)
        )
        mx.eval(paged(mx.arange(length) % 97, rows, PortableBackend().for_step(rows)), pool.writes_done_marker())
        tokens += length
        mx.synchronize()
        held = mx.get_active_memory() - before
        assert held <= pool.bytes_per_request + tokens * pool.bytes_per_token
        assert held > tokens * pool.bytes_per_token / 2


def test_expected_info_is_none_for_a_model_that_cannot_be_built() -> None:
    for config in ({"model_type": "llama"}, {"model_type": "x", "model_file": "x.py"}):
        assert expected_model_info("x", CheckpointRequirements(config, 1, 1, "float32")) is None


def test_large_weights_are_never_made() -> None:
    """The weights would take 140 GB."""
    config = configuration("llama") | {
        "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    }  # fmt: skip
    before = settled_memory()
    info = expected_model_info("x", CheckpointRequirements(config, 1, 1, "bfloat16"))
    assert info is not None and info.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert mx.get_peak_memory() - before < 64 << 20
