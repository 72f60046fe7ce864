"""Several ranks refuse images before they read the weights, and serve text."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.image_files import data_url, encoded, picture
from tests.support.ranked_server import RankedServer
from tests.support.vision import CONFIGS
from tests.test_image_input import SIZES, write_vision_checkpoint


def test_images_on_several_ranks(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path / "m", CONFIGS["mistral3"])
    flags = ["--served-model-name", "m"]
    flags += [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with RankedServer(tmp_path / "m", *flags) as server:
        reason = "several ranks take text only"
        lines = [line for line in server.lines if reason in line or "loaded the weights" in line]
        assert reason in lines[0] and "loaded the weights" in lines[-1], server.lines
        text = {"model": "m", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=text).json()["usage"]["completion_tokens"] == 3
        part = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(20, 12)))}}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": [part]}]}
        )
        place = "messages[0].content[0].image_url.url"
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"{place}: images are not supported: {reason}"
