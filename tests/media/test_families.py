"""Token ids, positions and encoder inputs equal those of the models' own processors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from metal_engine.media.families.base import ImageProcessorFamily
from metal_engine.media.families.find import FAMILIES, find_family
from metal_engine.media.image_preparer import ImagePreparer, LoadedImage
from metal_engine.prompt_images import PIXEL_OFFSET, PIXEL_SCALE, PIXELS, PromptImages
from metal_engine.settings.config import VisionConfig
from metal_engine.text.tokenizer import Tokenizer
from tests.support.image_files import picture
from tools.fixtures.fake_engine import tiny_tokenizer

# Sizes: both orientations, sizes to be enlarged, reduced and rounded, and a narrow one.
SIZES = [(64, 48), (48, 64), (20, 12), (300, 200), (131, 397), (64, 64), (400, 25)]


def tokenizer(*marks: str) -> PreTrainedTokenizerFast:
    backend = tiny_tokenizer().hf_tokenizer.backend_tokenizer
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")


Golden = Callable[[str, list[Image.Image]], dict[str, np.ndarray]]


def golden_of(processor: Any, *, nested: bool = False, **options: Any) -> Golden:
    """Return the arrays of a model's own processor. ``nested`` if it takes a list of images for each text."""

    def golden(text: str, images: list[Image.Image]) -> dict[str, np.ndarray]:
        found = processor(text=[text], images=[images] if nested else images, **options)
        return {name: np.asarray(value) for name, value in found.items() if not name.startswith("_")}

    return golden


class Case:
    """Image processing of a tiny checkpoint, and the model's own processor.

    Attributes:
        marker: text of an image in a prompt, by default ``image``.
    """

    def __init__(
        self, hf: PreTrainedTokenizerFast, image: str, golden: Golden, *, marker: str = "", **vision: Any
    ) -> None:
        self.hf, self.marker, self.golden = hf, marker or image, golden
        self.vision = VisionConfig(image_token_id=hf.convert_tokens_to_ids(image), **vision)
        self.family: ImageProcessorFamily = find_family(self.vision, None)
        self._tokenizer = Tokenizer(hf)

    def load(self, images: list[Image.Image]) -> list[LoadedImage]:
        loaded = []
        for i, one in enumerate(images):
            grid, inputs = self.family.inputs(one)
            assert grid == tuple(self.family.grid(*one.size))
            loaded.append(LoadedImage(bytes([i]), grid, inputs))
        return loaded

    def prompt(self, text: str, images: list[LoadedImage]) -> tuple[list[int], PromptImages]:
        def encode(segment: str) -> list[int]:
            return self._tokenizer.encode(segment, add_special_tokens=False)

        return ImagePreparer(self.vision, encode).insert(encode(text), images)


AS_NUMPY = {"return_tensors": "np"}
PATCHES = {"patch_size": 4, "merge_size": 2}


def qwen3_vl() -> Case:
    module = pytest.importorskip("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    hf = tokenizer("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    own = module.Qwen3VLImageProcessor(patch_size=4, min_pixels=8 * 8, max_pixels=64 * 64)
    processor = module.Qwen3VLProcessor(own, hf, module.Qwen3VLVideoProcessor(patch_size=4), chat_template=None)
    settings = {
        **PATCHES, "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    golden, marker = golden_of(processor, **AS_NUMPY), "<|vision_start|><|image_pad|><|vision_end|>"
    return Case(hf, "<|image_pad|>", golden, marker=marker, family="qwen3_vl", processor=settings, **PATCHES)


def qwen2_5_vl() -> Case:
    """The settings of older checkpoints: limits of pixels instead of a size."""
    module = pytest.importorskip("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    case = qwen3_vl()
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    settings = {"patch_size": 4, "min_pixels": 256, "max_pixels": 2048, "image_mean": mean, "image_std": std}
    own, videos = module.Qwen3VLImageProcessor(**settings), module.Qwen3VLVideoProcessor(patch_size=4)
    golden = golden_of(module.Qwen3VLProcessor(own, case.hf, videos, chat_template=None), **AS_NUMPY)
    options = {"marker": case.marker, "family": "qwen2_5_vl", "processor": settings, **PATCHES}
    return Case(case.hf, "<|image_pad|>", golden, **options)


def llava() -> Case:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    settings = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    hf, own = tokenizer("<image>"), CLIPImageProcessorPil(**settings)
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    golden = golden_of(LlavaProcessor(own, hf, patch_size=4, **options), **AS_NUMPY)
    processor = {"image_processor_type": "CLIPImageProcessor", **settings}
    return Case(hf, "<image>", golden, family="llava", processor=processor, num_features=64)


def mistral3() -> Case:
    module = pytest.importorskip("mlx_vlm.models.mistral3.processing_mistral3")
    hf, settings = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]"), {"size": {"longest_edge": 64}, "patch_size": 4}
    own = module.PixtralImageProcessor(**settings)
    golden = golden_of(module.Mistral3Processor(own, hf, patch_size=4, spatial_merge_size=2), **AS_NUMPY)
    return Case(hf, "[IMG]", golden, family="mistral3", processor=settings, **PATCHES)


def idefics3() -> Case:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    settings = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    hf = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows)
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**settings), hf, image_seq_len=16)
    golden = golden_of(processor, nested=True, **AS_NUMPY)
    return Case(hf, "<image>", golden, family="idefics3", processor=settings, num_features=16)


def internvl(family: str = "internvl") -> Case:
    """The settings as the reader of checkpoints completes them."""
    name = "processing_internvl" if family == "internvl" else "processor"
    module = pytest.importorskip(f"mlx_vlm.models.{family}.{name}")
    hf, own = tokenizer("<img>", "</img>", "<IMG_CONTEXT>"), module.InternVLImageProcessor(size=32, dynamic_max_num=6)
    kind = module.InternVLProcessor if family == "internvl" else module.InternVLChatProcessor
    mark = "<IMG_CONTEXT>" if family == "internvl" else "<image>"  # mlx-vlm's, in the prompt
    golden = golden_of(kind(own, hf, num_image_token=16))
    settings = {
        "size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 6,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    options = {"family": family, "processor": settings, "num_features": 16}
    return Case(
        hf, "<IMG_CONTEXT>", lambda text, images: golden(text.replace("<IMG_CONTEXT>", mark), images), **options
    )


def lfm2_vl() -> Case:
    module = pytest.importorskip("mlx_vlm.models.lfm2_vl.processing_lfm2_vl")
    rows = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
    hf = tokenizer("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *rows)
    settings = {
        "encoder_patch_size": 4, "downsample_factor": 2, "min_image_tokens": 4, "max_image_tokens": 16,
        "tile_size": 32, "resample": 2, "max_tiles": 6,
    }  # fmt: skip
    processor = module.Lfm2VlProcessor(module.Lfm2VlNumpyImageProcessor(**settings), hf)
    return Case(hf, "<image>", golden_of(processor, nested=True, **AS_NUMPY), family="lfm2_vl", processor=settings)


def kimi_vl(pad_input: bool = False) -> Case:
    module = pytest.importorskip("mlx_vlm.models.kimi_vl.processing_kimi_vl")
    hf = tokenizer("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
    settings = {"patch_size": 4, "in_token_limit": 256, "pad_input": pad_input}
    golden = golden_of(module.KimiVLProcessor(module.KimiVLImageProcessor(**settings), hf))
    marker = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    return Case(hf, "<|media_pad|>", golden, marker=marker, family="kimi_vl", processor=settings, **PATCHES)


def with_marks(hf: PreTrainedTokenizerFast, image: str, boi: str, eoi: str) -> PreTrainedTokenizerFast:
    """Set the fields that Gemma's processors read."""
    hf.image_token, hf.boi_token, hf.eoi_token = image, boi, eoi
    hf.image_token_id = hf.convert_tokens_to_ids(image)
    return hf


def gemma3() -> Case:
    """The tokenizer has a token for each number of newlines, as Gemma's, so text and image share such a token."""
    module = pytest.importorskip("mlx_vlm.models.gemma3.processing_gemma3")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    marks = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    hf = with_marks(tokenizer(*marks, *("\n" * count for count in range(1, 8))), *marks)
    settings = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    own = Gemma3ImageProcessorPil(**settings)
    own.fetch_images = lambda images: images
    golden = golden_of(module.Gemma3Processor(own, hf, image_seq_length=16), nested=True, **AS_NUMPY)
    placeholder = {"marker": marks[1], "placeholder_token_id": hf.convert_tokens_to_ids(marks[1])}
    options = {"family": "gemma3", "processor": settings, "num_features": 16, "bidirectional_layers": "every layer"}
    return Case(hf, marks[0], golden, **placeholder, **options)


def gemma4() -> Case:
    module = pytest.importorskip("mlx_vlm.models.gemma4.processing_gemma4")
    marks = ("<|image|>", "<|image>", "<image|>")
    hf = with_marks(tokenizer(*marks), *marks)
    settings = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}
    processor = module.Gemma4Processor(module.Gemma4ImageProcessor(**settings), hf)

    def golden(text: str, images: list[Image.Image]) -> dict[str, np.ndarray]:
        """mlx-vlm's processor leaves the division into patches of the first image to the encoder."""
        found = dict(processor(text=[text], images=[images], return_tensors="np"))
        pixels = np.asarray(found["pixel_values"][0])  # [3, height, width]
        rows, columns = pixels.shape[1] // 4, pixels.shape[2] // 4
        patches = pixels.reshape(3, rows, 4, columns, 4).transpose(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
        positions = [[column, row] for row in range(rows) for column in range(columns)]
        ids = np.asarray(found["input_ids"])
        return {"input_ids": ids, "pixel_values": patches, "image_position_ids": np.array([positions])}

    return Case(hf, marks[0], golden, family="gemma4", processor=settings, bidirectional_layers="layers with windows")


CASES: dict[str, Callable[[], Case]] = {
    one.__name__: one
    for one in (qwen3_vl, qwen2_5_vl, llava, mistral3, idefics3, internvl, lfm2_vl, kimi_vl, gemma3, gemma4)
} | {"padded kimi_vl": lambda: kimi_vl(pad_input=True), "internvl_chat": lambda: internvl("internvl_chat")}


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


# Names that the golden processors give to arrays besides the inputs of the encoder.
NO_INPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "image_token_id", "image_rows", "image_cols"}


def check_inputs(golden: dict[str, np.ndarray], loaded: LoadedImage) -> None:
    assert loaded.inputs is not None
    inputs = dict(loaded.inputs)
    integers, scale, offset = (inputs.pop(name) for name in (PIXELS, PIXEL_SCALE, PIXEL_OFFSET))
    assert integers.dtype == np.uint8
    pixels, expected = integers * scale + offset, golden[PIXELS]
    if "spatial_shapes" in inputs:  # LFM2-VL's encoder masks padding, so it may have any value
        pixels = np.where(inputs["pixel_attention_mask"][..., None], pixels, 0)
    np.testing.assert_allclose(pixels.reshape(expected.shape), expected, rtol=0, atol=2e-6)
    for name, array in inputs.items():
        assert np.array_equal(array.reshape(golden[name].shape), golden[name]), name


@pytest.mark.parametrize("name", CASES)
def test_one_image_equals_the_models_processor(name: str) -> None:
    case = case_of(name)
    for seed, size in enumerate(SIZES):
        one = picture(*size, seed)
        text = f"what?\n{case.marker}\nthe"
        golden = case.golden(text, [one])
        (loaded,) = case.load([one])
        ids, _ = case.prompt(text, [loaded])
        assert ids == golden["input_ids"][0].tolist(), size
        check_inputs(golden, loaded)


@pytest.mark.parametrize("name", CASES)
def test_several_images_equal_the_models_processor(name: str) -> None:
    case = case_of(name)
    images = [picture(*size, seed) for seed, size in enumerate([(64, 48), (40, 88), (64, 48)])]
    text = f"{case.marker}one{case.marker}{case.marker}\nand more"
    ids, inserted = case.prompt(text, case.load(images))
    assert ids == case.golden(text, images)["input_ids"][0].tolist()
    inserted.check(len(ids))
    assert all(ids[at] == case.vision.image_token_id for one in inserted.images for at in one.positions)
    assert sum(one.num_features for one in inserted.images) == ids.count(case.vision.image_token_id)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_axes_equal_the_models_positions(name: str) -> None:
    language = pytest.importorskip(f"mlx_vlm.models.{name}.language")
    import mlx.core as mx

    case = case_of(name)
    marks = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    ids_of_marks = {f"{field}_token_id": case.hf.convert_tokens_to_ids(mark) for field, mark in marks.items()}

    class Model:
        """The fields that the computation of positions reads."""

        vision = type("Vision", (), {"spatial_merge_size": 2})
        config = type("Config", (), {**ids_of_marks, "vision_config": vision})

    for sizes in ([(64, 48)], [(40, 88), (300, 200), (20, 12)]):
        images = [picture(*size, seed) for seed, size in enumerate(sizes)]
        text = "begin" + "".join(f"{case.marker}text{i}" for i in range(len(images)))
        loaded = case.load(images)
        ids, inserted = case.prompt(text, loaded)
        grids = mx.array([one.grid for one in loaded])
        positions, delta = language.LanguageModel.get_rope_index(Model(), mx.array([ids]), grids)
        assert inserted.axes is not None
        assert np.array_equal(inserted.axes.prompt, np.array(positions)[:, 0])
        assert inserted.axes.delta == int(np.array(delta).item())


@pytest.mark.parametrize("name", CASES)
def test_limits_bound_the_tokens(name: str) -> None:
    case = case_of(name)
    for most in (70, 140) if name == "gemma4" else (20, 40, 100):
        family = find_family(case.vision, most)
        for size in SIZES:
            grid = tuple(family.grid(*size))
            found, _ = family.inputs(picture(*size))
            assert found == grid
            # These families have one size, whole tiles, or padding beyond the limit.
            if name not in ("llava", "gemma3", "idefics3", "padded kimi_vl"):
                assert family.num_tokens(grid) <= most


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("name", CASES)
def test_the_largest_image(name: str, limit: int | None) -> None:
    family = find_family(case_of(name).vision, limit)
    sizes = [(side, round(side * ratio)) for side in (100, 300, 900) for ratio in np.geomspace(0.1, 10, 60)]
    if name == "padded kimi_vl":
        sizes.append((2040, 2))  # padding makes the narrowest image the largest
    found = []
    for width, height in sizes:
        with contextlib.suppress(ValueError):
            found.append(family.num_tokens(tuple(family.grid(width, height))))
    assert 0.85 * family.most_tokens <= max(found) <= family.most_tokens


def test_every_family_is_tested() -> None:
    tested = {case_of(name).vision.family for name in CASES}
    assert tested | {"qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "pixtral", "smolvlm", "lfm2-vl"} == FAMILIES
