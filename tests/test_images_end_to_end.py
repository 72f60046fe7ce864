"""A tiny Qwen3-VL over HTTP and in LLM.chat has mlx-vlm's tokens for the same messages and image files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from metal_engine.checkpoints import image_encoders
from metal_engine.llm import LLM
from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from tests.loading.test_image_encoder import SIZES, write_vision_checkpoint
from tests.support.image_files import data_url, encoded, picture
from tests.support.image_serving import END, IMAGE, START, TEMPLATE, seeing_tokenizer
from tests.support.serving import Served, serve
from tests.support.vision import QWEN3_VL, TinyVision, VisionPrompt, golden
from tools.fixtures.fake_engine import in_thread

CHAT = "/v1/chat/completions"
VOCAB_SIZE = END + 2
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": END + 1,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "vocab_size": VOCAB_SIZE,
}
NUM_TOKENS = 8
MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
A, B = picture(64, 48, 1), picture(40, 80, 2)


def write_seeing_checkpoint(folder: Path) -> TinyVision:
    """Write a tiny Qwen3-VL with the tokenizer and the chat template of :mod:`tests.support.image_serving`."""
    config = deepcopy(QWEN3_VL) | IDS
    config["text_config"]["vocab_size"] = VOCAB_SIZE
    tiny = write_vision_checkpoint(folder, config)
    seeing_tokenizer().hf_tokenizer.save_pretrained(str(folder))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyVision]:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    return folder, write_seeing_checkpoint(folder)


def engine_args(folder: Path) -> EngineArgs:
    return EngineArgs(model=str(folder), **SIZES | {"max_model_len": 512})


@pytest.fixture(scope="module")
def served(checkpoint: tuple[Path, TinyVision]) -> Iterator[Served]:
    args = engine_args(checkpoint[0])
    engine = in_thread(lambda: build_engine(args))
    assert engine.config.model.image_refusal is None
    with serve(engine=engine) as served:
        yield served


def expected(tiny: TinyVision, text: str, images: list[Image.Image]) -> tuple[list[int], list[int]]:
    """Return the prompt's and the output's token ids, with mlx-vlm's processor and generation."""
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
        Qwen3VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    own = Qwen3VLImageProcessor(patch_size=4, min_pixels=64, max_pixels=64 * 64)
    hf = seeing_tokenizer().hf_tokenizer
    hf.pad_token = "<|im_end|>"
    processor = Qwen3VLProcessor(own, hf, Qwen3VLVideoProcessor(patch_size=4), chat_template=None)
    found = processor(text=[text], images=images or None, return_tensors="np")
    ids = np.asarray(found["input_ids"])[0].tolist()
    inputs = {
        "pixel_values": np.asarray(found["pixel_values"], np.float32),
        "image_grid_thw": np.asarray(found["image_grid_thw"], np.int32),
    }
    return ids, golden(tiny, VisionPrompt(ids, None, inputs), NUM_TOKENS).token_ids


def body(messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return {
        "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
        "return_token_ids": True, **options,
    }  # fmt: skip


def image(one: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(one))}}


def test_a_conversation_has_mlx_vlms_tokens(checkpoint: tuple[Path, TinyVision], served: Served) -> None:
    _, tiny = checkpoint
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see "}, image(A), {"type": "text", "text": "?"}]}
    ]
    text = f"<|im_start|>user\nsee {MARKER}?<|im_end|>\n<|im_start|>assistant\n"
    first = served.post(CHAT, body(messages)).json()
    ids, output = expected(tiny, text, [A])
    assert (first["prompt_token_ids"], first["choices"][0]["token_ids"]) == (ids, output)
    assert first["usage"]["prompt_tokens_details"]["image_tokens"] == 48

    messages += [
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [image(B), image(A), {"type": "text", "text": "and these"}]},
    ]
    text = text + f"yes<|im_end|>\n<|im_start|>user\n{MARKER}{MARKER}and these<|im_end|>\n<|im_start|>assistant\n"
    second = served.post(CHAT, body(messages)).json()
    ids, output = expected(tiny, text, [A, B, A])
    assert (second["prompt_token_ids"], second["choices"][0]["token_ids"]) == (ids, output)
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 48 and details["image_tokens"] == 48 + 50 + 48


def test_other_images_have_other_answers(served: Served) -> None:
    logprobs = []
    for one in (A, A.transpose(Image.Transpose.FLIP_LEFT_RIGHT), A):
        content = [image(one), {"type": "text", "text": "what?"}]
        answer = served.post(CHAT, body([{"role": "user", "content": content}], logprobs=True)).json()
        logprobs.append([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])
    assert np.allclose(logprobs[0], logprobs[2], atol=1e-4)
    assert not np.allclose(logprobs[0], logprobs[1], atol=1e-2)


def test_llm_reads_files(checkpoint: tuple[Path, TinyVision], tmp_path: Path) -> None:
    folder, tiny = checkpoint
    A.save(tmp_path / "a.png")
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "?"}],
        }
    ]
    options = {name: value for name, value in SIZES.items() if name != "max_model_len"}
    with LLM(str(folder), max_model_len=512, **options) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        (result,) = llm.chat(messages, params, use_tqdm=False)
    text = f"<|im_start|>user\n{MARKER}?<|im_end|>\n<|im_start|>assistant\n"
    assert (result.prompt_token_ids, result.outputs[0].token_ids) == expected(tiny, text, [A])


def test_without_mlx_vlm_the_server_names_the_package(
    checkpoint: tuple[Path, TinyVision], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(image_encoders, "version", version)
    engine = in_thread(lambda: build_engine(engine_args(checkpoint[0])))
    with serve(engine=engine) as served:
        reason = "mlx-vlm is not installed: pip install 'metal-engine[vision]'"
        assert httpx.get(f"{served.url}/health").json()["images"] == f"refused: {reason}"
        answer = served.post(CHAT, body([{"role": "user", "content": [image(A)]}]))
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message == f"messages[0].content[0].image_url.url: images are not supported: {reason}"
        text = served.post(CHAT, body([{"role": "user", "content": "hello"}]))
        assert len(text.json()["choices"][0]["token_ids"]) == NUM_TOKENS


def test_a_vision_model_without_processor_config_serves_text_only(
    checkpoint: tuple[Path, TinyVision], tmp_path: Path
) -> None:
    folder, _ = checkpoint
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    engine = build_engine(engine_args(tmp_path))
    assert "preprocessor_config.json is missing" in (engine.config.model.image_refusal or "")
    assert engine.preparer.images is None and json.loads((folder / "config.json").read_text())["vision_config"]
