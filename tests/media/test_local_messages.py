"""Images in the messages of LLM.chat, which may name files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metal_engine.media.image_preparer import ImagePreparer
from metal_engine.media.local_messages import insert_images, split_images
from tests.support.image_files import encoded, picture
from tests.support.image_serving import IMAGE, VISION, seeing_config, seeing_tokenizer, shared_decoder
from tools.fixtures.fake_engine import fake_config


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "PATH", "detail": "high"}},
        {"type": "image_url", "image_url": "PATH"},
        {"type": "image", "image": "PATH"},
        {"type": "image", "path": "PATH"},
        {"type": "image", "url": "file://PATH"},
    ],
)
def test_files_are_inserted(part: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(64, 48)))
    given: dict[str, Any] = {
        name: value.replace("PATH", str(path)) if isinstance(value, str) else {**value, "url": str(path)}
        for name, value in part.items()
    }
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, given]}, {"role": "user", "content": "a"}]
    found, sources = split_images(messages)
    assert found[0]["content"][1] == {"type": "image"} and found[1] is messages[1]
    tokenizer = seeing_tokenizer()
    preparer = ImagePreparer(VISION, lambda text: tokenizer.encode(text, add_special_tokens=False))
    preparer._decoder = shared_decoder()
    prompt = tokenizer.apply_chat_template(found)
    ids, images = insert_images(preparer, prompt, sources, seeing_config())
    assert images is not None and ids.count(IMAGE) == images.num_features == 48
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\] is not a PNG"):
        insert_images(preparer, prompt, sources, seeing_config())


def test_other_parts_have_no_image() -> None:
    for part in ({"type": "image"}, {"type": "image_url", "image_url": {}}, {"type": "image", "image": 5}):
        with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\] has no image"):
            split_images([{"role": "user", "content": [part]}])
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\]: images are not downloaded here"):
        split_images([{"role": "user", "content": [{"type": "image", "image": "https://a.example/b.png"}]}])


@pytest.mark.parametrize("kind", ["input_audio", "video_url", None])
def test_audio_and_video_are_refused(kind: str | None) -> None:
    content = [{"type": "text", "text": "hear"}, {"type": kind, "input_audio": {"data": "AA=="}}]
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\]: content of type .* is not supported"):
        split_images([{"role": "user", "content": content}])


def test_models_without_images_say_so() -> None:
    _, sources = split_images([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
    with pytest.raises(ValueError, match="the model takes text only"):
        insert_images(None, [1], sources, fake_config())
    assert insert_images(None, [1], [], fake_config()) == ([1], None)
