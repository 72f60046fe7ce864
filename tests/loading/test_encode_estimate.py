"""Tests of the memory for images that is claimed before a load. The claim is at most 16 times the
measurement, whose peak depends on when MLX frees arrays."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from mlx.utils import tree_flatten

from metal_engine.engine.device_access import DeviceAccess
from metal_engine.loading.build import build_engine
from metal_engine.loading.encode_estimate import estimate_encode_bytes
from metal_engine.runner.encode_memory import measure_encode_bytes
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.loading.test_image_encoder import SIZES, write_vision_checkpoint
from tests.support.vision import CONFIGS, QWEN3_VL, tiny_vision

CPU = DeviceInfo(kind="cpu", name="test", compute="test", memory_bytes=1 << 40)
METAL = DeviceInfo(kind="metal", name="test", compute="test", memory_bytes=1 << 40)


# Kimi's encoder makes a table of 512 x 512 rotary positions, which is larger than the tiny model's layers.
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"kimi_vl"}))
def test_no_less_than_is_measured(name: str) -> None:
    for num_tokens in (64, 256, 1024):
        paged = tiny_vision(name).paged
        gc.collect()  # otherwise, garbage of other tests could be freed while this test measures
        measured = measure_encode_bytes(paged, num_tokens)
        assert measured < estimate_encode_bytes(CONFIGS[name], CPU, num_tokens) < 16 * measured, num_tokens
        assert 0 < estimate_encode_bytes(CONFIGS[name], METAL, num_tokens) < 16 * measured


def test_the_memory_of_larger_images_is_extrapolated_by_their_tokens() -> None:
    """An image that is not a multiple of the measured image counts in full, and the estimate covers it."""
    model = tiny_vision("qwen3_vl").paged
    measured = measure_encode_bytes(model, 511)
    assert 1.5 * measure_encode_bytes(model, 256) < measured < estimate_encode_bytes(CONFIGS["qwen3_vl"], CPU, 511)


class RecordedClaims(DeviceAccess):
    """Device of several models that records the claims of one model."""

    def __init__(self) -> None:
        super().__init__(1 << 32)
        self.claims: list[tuple[int, int, int | None]] = []

    def check_fits(self, num_bytes: int) -> None:
        assert num_bytes > 0

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        self.claims.append((num_bytes, loading_bytes, step_bytes))


@pytest.mark.parametrize("refused_for", ["", "a missing package", "a setting"])
def test_the_first_claim_covers_the_last(refused_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vision_checkpoint(tmp_path, QWEN3_VL)
    if refused_for == "a missing package":
        monkeypatch.setattr("metal_engine.checkpoints.image_encoders._mlx_vlm_problem", lambda: "not installed")
    wrong = '{"size": "large"}' if refused_for == "a setting" else None
    access = RecordedClaims()
    config = build_engine(EngineArgs(model=str(tmp_path), mm_processor_kwargs=wrong, **SIZES), access).core.config
    assert (config.model.image_refusal is None) == (not refused_for)
    (first, _, step_bytes), (last, *_) = access.claims
    assert step_bytes is not None and last == config.peak_bytes <= first + step_bytes
    kept = config.scheduler.image_cache_tokens * config.model.feature_bytes
    expected = config.model.weight_bytes + config.kv_bytes + kept
    if refused_for == "a setting":  # the files' headers were counted before the setting was read
        expected += sum(array.nbytes for _, array in tree_flatten(tiny_vision("qwen3_vl").encoder.parameters()))
    assert first == expected and (kept > 1 << 20) == (not refused_for)
