"""The configuration of image processing is read from the files of a checkpoint."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from metal_engine.checkpoints.image_processors import MAX_IMAGE_TOKENS, read_vision
from metal_engine.errors import ModelLoadError
from metal_engine.media.families.find import find_family
from metal_engine.settings.config import VisionConfig

QWEN = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
}
QWEN_PROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
INTERNVL = {
    "model_type": "internvl_chat", "image_token_index": 151667, "downsample_ratio": 0.5, "force_image_size": 448,
    "max_dynamic_patch": 6, "vision_config": {"image_size": 448, "patch_size": 14},
}  # fmt: skip
# As published: the fields that matter, the size of an image, and its tokens without and with the default limit.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int], int, int]] = {
    "Qwen3-VL": (QWEN, QWEN_PROCESSOR, (4032, 3024), 11844, 1230),
    "Qwen2.5-VL": (
        {**QWEN, "model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2},
        (1280, 720), 1196, 1196,
    ),
    "LLaVA 1.5": (
        {"model_type": "llava", "image_token_index": 32000, "vision_config": {"image_size": 336, "patch_size": 14}},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
         "crop_size": {"height": 336, "width": 336}},
        (640, 480), 576, 576,
    ),
    "Mistral Small 3.1": (
        {"model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2,
         "vision_config": {"model_type": "pixtral", "patch_size": 14}},
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        (4032, 3024), 55 * 42, 35 * 27,
    ),
    "Pixtral": (
        {"model_type": "llava", "image_token_index": 10, "vision_config": {"model_type": "pixtral", "patch_size": 16}},
        {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}},
        (1024, 512), 64 * 32, 35 * 18,
    ),
    "SmolVLM": (
        {"model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 4,
         "vision_config": {"image_size": 512, "patch_size": 16}},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        (2048, 1536), 13 * 64, 13 * 64,
    ),
    "Idefics 3": (
        {"model_type": "idefics3", "image_token_id": 128257, "scale_factor": 2,
         "vision_config": {"image_size": 364, "patch_size": 14}},
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
        (1456, 1456), 17 * 169, 5 * 169,
    ),
    "InternVL 3.5, for transformers": (
        {"model_type": "internvl", "image_token_id": 151671, "downsample_ratio": 0.5,
         "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}},
        {"crop_to_patches": False, "size": {"height": 448, "width": 448}, "max_patches": 12},
        (2000, 1500), 13 * 256, 5 * 256,
    ),
    "InternVL 3": (INTERNVL, {"size": 448, "crop_size": 448}, (2000, 1000), 3 * 256, 3 * 256),
    "LFM2-VL": (
        {"model_type": "lfm2_vl", "image_token_id": 396, "downsample_factor": 2, "vision_config": {"patch_size": 16}},
        {"do_image_splitting": False, "encoder_patch_size": 16, "max_image_tokens": 256, "tile_size": 512},
        (1600, 1600), 9 * 256 + 256, 4 * 256 + 256,
    ),
    "Kimi-VL": (
        {"model_type": "kimi_vl", "media_placeholder_token_id": 163605,
         "vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]}},
        {"in_token_limit": 4096, "patch_size": 14},
        (1400, 1400), 1024, 1024,
    ),
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], processor: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def num_tokens(vision: VisionConfig, size: tuple[int, int], max_tokens: int | None) -> int:
    family = find_family(vision, max_tokens)
    return family.num_tokens(tuple(family.grid(*size)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints(name: str, tmp_path: Path) -> None:
    config, processor, size, whole, limited = PUBLISHED[name]
    vision = read_vision(write(tmp_path, config, processor), {})
    assert num_tokens(vision, size, None) == whole
    assert vision.max_image_tokens == MAX_IMAGE_TOKENS
    assert num_tokens(vision, size, MAX_IMAGE_TOKENS) == limited <= MAX_IMAGE_TOKENS


def test_own_settings_replace_the_limit(tmp_path: Path) -> None:
    vision = read_vision(write(tmp_path, QWEN, QWEN_PROCESSOR), {"max_pixels": 4_000_000})
    assert vision.max_image_tokens is None
    assert 3_700 < num_tokens(vision, (4032, 3024), None) * 32**2 / 1000 < 4_000


def test_newer_checkpoints_nest_the_processor(tmp_path: Path) -> None:
    nested = {"image_processor": QWEN_PROCESSOR, "processor_class": "x"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert num_tokens(read_vision(write(tmp_path, QWEN, None), {}), (4032, 3024), None) == 11844


@pytest.mark.parametrize(
    ("name", "content", "token_id"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"151667": {"content": "<IMG_CONTEXT>"}}}, 151667),
        ("added_tokens.json", {"<img>": 151665, "<IMG_CONTEXT>": 151667}, 151667),
        ("added_tokens.json", {"<img>": 151665}, None),
    ],
)
def test_internvl_has_its_image_token_in_the_tokenizer(
    name: str, content: dict[str, Any], token_id: int | None, tmp_path: Path
) -> None:
    write(tmp_path, {key: value for key, value in INTERNVL.items() if key != "image_token_index"}, None)
    (tmp_path / name).write_text(json.dumps(content))
    with nullcontext() if token_id else pytest.raises(ModelLoadError, match="image_token_id"):
        assert read_vision(tmp_path, {}).image_token_id == token_id


def test_missing_files_and_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"preprocessor_config\.json"):
        read_vision(write(tmp_path, QWEN, None), {})
    with pytest.raises(ModelLoadError, match="image_token_id"):
        read_vision(write(tmp_path, {"model_type": "qwen3_vl", "vision_config": {}}, QWEN_PROCESSOR), {})
