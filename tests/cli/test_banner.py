"""Tests the start-up block: all rows, and plain lines if the output is not a terminal."""

from __future__ import annotations

import dataclasses
import errno
import io
from typing import Any

from rich.console import Console

from metal_engine.cli.banner import print_banner, startup_rows
from metal_engine.loading.image_encoder import with_largest_image
from metal_engine.settings.config import RankInfo, VisionConfig
from tests.support.image_serving import VISION, seeing_config
from tools.fixtures.fake_engine import fake_config

URL = "http://127.0.0.1:8000"


def rows() -> dict[str, str]:
    config = fake_config(num_blocks=1000, block_size=16, max_model_len=4000, max_num_batched_tokens=512)
    model = dataclasses.replace(
        config.model,
        name="demo",
        model_type="llama",
        num_layers=30,
        num_params=134_515_008,
        weight_bytes=3 << 30,
        kv_bytes_per_token=1 << 16,
    )
    return startup_rows(dataclasses.replace(config, model=model, step_bytes=24 << 20), URL, ("demo", "alias"))


def test_rows() -> None:
    assert rows() == {
        "model": "demo, served as demo, alias",
        "architecture": "llama, 30 layers, 135 M parameters",
        "dtype": "float32",
        "device": "fake: Python",
        "attention": "fake",
        "memory": "weights 3.00 GiB, KV cache 1000 MiB, largest step 24 MiB; MLX holds 4.00 GiB at most",
        "KV cache": "16,000 tokens in 1,000 blocks of 16; 4.0 requests of the maximum length at once",
        "limits": "4,000 tokens a request, 64 requests at once, 512 tokens a step",
        "sampling": "temperature 1, top_p 1 by default. No generation_config.json is in use; "
        "set --generation-config to a folder with one",
        "URL": URL,
    }


def test_how_many_tokens_more_fit_quantized() -> None:
    config = fake_config(num_blocks=1000, block_size=16, max_model_len=4000)
    model = dataclasses.replace(
        config.model, kv_dtype="int8", kv_bytes_per_token=68 << 10, unquantized_kv_bytes_per_token=128 << 10
    )
    shown = startup_rows(dataclasses.replace(config, model=model), URL, ("demo",))["KV cache"]
    # 16,000 tokens of 68 KiB are 8,500 of 128 KiB, of which 531 whole blocks hold 8,496.
    assert shown.startswith("16,000 tokens in int8 (7,504 more than unquantized) in 1,000 blocks of 16; 4.0 requests")


def test_the_sampling_of_requests_that_set_none() -> None:
    def shown(**changes: Any) -> str | None:
        config = fake_config(num_blocks=1000, block_size=16)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
        return startup_rows(config, URL, ("demo",)).get("sampling")

    recommended = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.0}
    assert (
        shown(default_sampling=recommended) == "temperature 0.7, top_p 1, top_k 20 by default, as the model recommends"
    )
    assert shown(can_generate=False) is None


def test_banner_is_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    print_banner(rows(), Console(file=out, force_terminal=False, width=40))
    lines = out.getvalue().splitlines()
    assert len(lines) == len(rows())
    assert lines[-1].split(": ", 1) == ["URL", f"         {URL}"]


def test_a_panel_on_a_terminal() -> None:
    out = io.StringIO()
    print_banner(rows(), Console(file=out, force_terminal=True, width=120, color_system=None))
    assert URL in out.getvalue() and "metal-engine" in out.getvalue().splitlines()[0]


def test_a_full_disk() -> None:
    """The server starts although the rows cannot be written."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    for is_terminal in (False, True):
        print_banner(rows(), Console(file=Full(), force_terminal=is_terminal))


def test_banner_lists_the_layers_and_weights_of_each_rank() -> None:
    ranks = (RankInfo(host="a", weight_bytes=1 << 30, peak_bytes=2 << 30, num_layers=30),) * 2
    assert startup_rows(dataclasses.replace(fake_config(), ranks=ranks), URL, ("fake",))["ranks"] == (
        "2; 0 on a: 30 layers, weights 1.00 GiB (at most 2.00 GiB to read them); "
        "1 on a: 30 layers, weights 1.00 GiB (at most 2.00 GiB to read them)"
    )


def test_the_limit_of_images_is_shown() -> None:
    def shown(vision: VisionConfig = VISION, most: int = 128, budget: int = 512) -> str:
        config = seeing_config()
        scheduler = dataclasses.replace(config.scheduler, max_num_encoder_tokens=most, max_num_batched_tokens=budget)
        config = dataclasses.replace(config, scheduler=scheduler)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vision=vision))
        return startup_rows(with_largest_image(config), "http://a", ("fake",))["images"]

    assert "64 tokens an image at most" in shown()
    assert "32 tokens an image at most" in shown(most=32)
    assert "128 tokens an image at most" in shown(dataclasses.replace(VISION, max_image_tokens=None))
    gemma3 = VisionConfig(family="gemma3", image_token_id=1, num_features=256, max_image_tokens=1280)
    gemma3 = dataclasses.replace(gemma3, bidirectional_layers="every layer")
    assert shown(gemma3, 2048) == "256 tokens each; one step computes a whole image"
    gemma4 = VisionConfig(
        family="gemma4", image_token_id=1, max_image_tokens=300, bidirectional_layers="layers with windows"
    )
    assert shown(gemma4, 2048).startswith("280 tokens an image at most; one step computes a whole image; larger")
    assert shown(gemma4, 2048, budget=264).startswith("140 tokens an image at most")  # 201 beside 63 decodes
    assert "images" not in startup_rows(fake_config(), "http://a", ("fake",))
