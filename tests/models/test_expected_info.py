"""Facts about a model before its weights are read equal the facts after they are read."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from metal_engine.checkpoints.requirements import CheckpointRequirements
from metal_engine.errors import UnsupportedModelError
from metal_engine.models.info import expected_model_info
from metal_engine.models.paged_model import PagedModel
from tools.fixtures.architectures import SUPPORTED, UNSUPPORTED, configuration
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
    assert info is not None
    assert info.kv_bytes_per_token == paged.pool.bytes_per_token
    assert info.state_bytes_per_request == paged.pool.bytes_per_request
    assert info.vocab_size == paged.vocab_size and info.num_layers == len(paged.pool.states)


def test_the_refused_are_refused() -> None:
    for model_type in ("deepseek_v41",):
        reason = UNSUPPORTED[model_type][1]
        with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
            expected_model_info("x", facts(model_type))


def test_what_cannot_be_made_is_left_to_loading() -> None:
    assert expected_model_info("x", CheckpointRequirements({"model_type": "llama"}, 1, 1, "float32")) is None
    assert (
        expected_model_info("x", CheckpointRequirements({"model_type": "x", "model_file": "x.py"}, 1, 1, "float32"))
        is None
    )


def test_large_weights_are_never_made() -> None:
    """The weights would take 140 GB."""
    config = {
        **configuration("llama"),
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    }
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    info = expected_model_info("x", CheckpointRequirements(config, 1, 1, "bfloat16"))
    assert info is not None and info.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert mx.get_peak_memory() - before < 64 << 20
