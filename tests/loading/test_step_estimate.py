"""Tests of the memory estimate of a step before its model is loaded: not below the measurement, nor far above it."""

from __future__ import annotations

import gc
from copy import deepcopy
from itertools import cycle, product
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.requirements import CheckpointRequirements
from metal_engine.loading.step_estimate import estimate_step_bytes
from metal_engine.models.info import expected_model_info
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.step_memory import measure_step_bytes
from metal_engine.settings.config import DeviceInfo, ModelInfo
from tests.support.sweeps import sweep
from tools.fixtures.architectures import SUPPORTED, configuration
from tools.fixtures.tiny_models import random_model

CPU = DeviceInfo(kind="cpu", name="test", compute="test", memory_bytes=1 << 40)
METAL = DeviceInfo(kind="metal", name="test", compute="test", memory_bytes=1 << 40)
BLOCK_SIZE = 16
# Configuration, number of tokens, and number of sampling rows, by the part that takes most memory.
SIZES: dict[str, tuple[dict[str, int], int, int]] = {
    "tiny": ({}, 64, 8),
    "scores": ({}, 512, 8),
    "logits": ({"vocab_size": 8000}, 64, 16),
    "layers": ({"intermediate_size": 1024, "moe_intermediate_size": 512}, 256, 8),
    "both": ({"vocab_size": 2000, "intermediate_size": 1024, "moe_intermediate_size": 512}, 256, 64),
}
# Dense models, models with experts, and recurrent models, with the most demanding models of each kind. `make test`
# runs one size of each model.
SOME = ("llama", "gpt_neox", "gemma3n", "hunyuan", "qwen3_moe", "qwen3_next", "mamba2", "jamba", "falcon_h1")


def changed(model_type: str, change: dict[str, int]) -> dict[str, Any]:
    """Return a configuration with other sizes, for the sizes that it contains."""
    config = deepcopy(configuration(model_type))
    parts = [config] + [config[name] for name in ("text_config",) if name in config]
    for part in parts:
        part |= {name: size for name, size in change.items() if name in part}
    return config


def sizes_of(model_type: str, change: dict[str, int], num_tokens: int, num_rows: int) -> tuple[ModelInfo, int, int]:
    """Return the model's metadata before its load, and the measured and the estimated bytes of its step on a CPU."""
    config = changed(model_type, change)
    info = expected_model_info(model_type, CheckpointRequirements(config, 1, 1, "float32"))
    paged = PagedModel(random_model(config))
    longest = info.max_position_embeddings
    gc.collect()  # otherwise, garbage of other tests could be freed while this test measures
    measured = measure_step_bytes(paged, PortableBackend(), BLOCK_SIZE, longest, num_tokens, num_rows)
    return info, measured, estimate_step_bytes(info, CPU, BLOCK_SIZE, 1 << 40, num_tokens, num_rows)


@pytest.mark.parametrize(
    ("model_type", "size"), sweep(product(SUPPORTED, SIZES), zip(SOME, cycle(SIZES), strict=False))
)
def test_no_less_than_is_measured(model_type: str, size: str) -> None:
    info, measured, estimated = sizes_of(model_type, *SIZES[size])
    assert measured <= estimated, (measured, estimated, info)
    _, num_tokens, num_rows = SIZES[size]
    assert estimate_step_bytes(info, METAL, BLOCK_SIZE, 1 << 40, num_tokens, num_rows) >= estimated


def test_logits_are_not_counted_on_top_of_layers() -> None:
    """Logits take most of the memory in this step, and are predictable for most LM heads.

    10 to 11 arrays of the size of all logits are measured, depending on when a busy machine runs MLX's threads. 14 are
    estimated. The layers on top of them would be another 6.
    """
    _, measured, estimated = sizes_of("llama", {"vocab_size": 8000, "intermediate_size": 1024}, 64, 16)
    assert estimated < 1.55 * measured, (measured, estimated)


def test_a_cache_that_is_smaller_than_the_steps_is_counted() -> None:
    info, _, estimated = sizes_of("llama", *SIZES["tiny"])
    _, num_tokens, num_rows = SIZES["tiny"]
    cache = (num_tokens + num_rows * BLOCK_SIZE) * info.kv_bytes_per_token
    mx.clear_cache()
    assert estimate_step_bytes(info, CPU, BLOCK_SIZE, 0, num_tokens, num_rows) == estimated + cache
