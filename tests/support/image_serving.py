"""Live server on a fake runner whose model takes images, with the image processing of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from metal_engine.media.decoder_client import ImageDecoder
from metal_engine.settings.config import EngineConfig, VisionConfig
from metal_engine.settings.server_args import ServerArgs
from metal_engine.text.tokenizer import Tokenizer
from tests.support.serving import Served, serve
from tools.fixtures.fake_engine import VOCAB_SIZE, fake_config, tiny_tokenizer

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
START, IMAGE, END = (VOCAB_SIZE + i for i in range(3))
# The form of Qwen3-VL's template: parts in order, images also in the results of calls.
TEMPLATE = (
    "{% macro written(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ written(m.content) }}"
    "{% if m.tool_calls %}<tool_call>{{ m.tool_calls | tojson }}</tool_call>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = VisionConfig(
    family="qwen3_vl",
    image_token_id=IMAGE,
    processor={"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1 << 20}},
    patch_size=4,
    merge_size=2,
    max_image_tokens=64,
)


def seeing_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """Return the tiny tokenizer with the marks of images."""
    backend = tiny_tokenizer().hf_tokenizer.backend_tokenizer
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    hf.chat_template = template
    return Tokenizer(hf)


def seeing_config(**options: Any) -> EngineConfig:
    config = fake_config(vocab_size=VOCAB_SIZE + len(MARKS), **options)
    scheduler = replace(config.scheduler, max_num_encoder_tokens=128, image_cache_tokens=256)
    return replace(config, model=replace(config.model, image_refusal=None, vision=VISION), scheduler=scheduler)


@contextmanager
def serve_seeing(template: str = TEMPLATE, args: ServerArgs | None = None, **options: Any) -> Iterator[Served]:
    """Yield a server whose model takes images."""
    with serve(config=seeing_config(**options), tokenizer=seeing_tokenizer(template), args=args) as served:
        served.engine.preparer.images._decoder = shared_decoder()
        yield served


class _SharedDecoder(ImageDecoder):
    """Decoder of all servers of a test process, because its process takes a second to start."""

    def close(self) -> None:
        pass


@cache
def shared_decoder() -> ImageDecoder:
    """Return the decoder that all tests of a process share."""
    return _SharedDecoder(VISION)
