"""Outputs of models with images equal mlx-vlm's own, however the steps are packed."""

from __future__ import annotations

import pytest

from tests.support.demo import engine_for
from tests.support.vision import CONFIGS, Golden, TinyVision, VisionPrompt, gap, golden, run, tiny_vision, vision_prompt
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine

NUM_TOKENS = 12
TOLERANCE = 1e-3
PARTS: tuple[tuple[int | tuple[int, int, int], ...], ...] = (
    (7, (4, 6, 1), 9),
    (23,),
    (3, (2, 2, 2), 2, (6, 4, 3), 11),
    (1, (4, 6, 1), 4, (4, 6, 4), 3),
)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tiny(request: pytest.FixtureRequest) -> TinyVision:
    return tiny_vision(request.param)


@pytest.fixture(scope="module")
def cases(tiny: TinyVision) -> tuple[list[VisionPrompt], list[Golden]]:
    prompts = [vision_prompt(tiny, parts, seed) for seed, parts in enumerate(PARTS)]
    return prompts, [golden(tiny, prompt, NUM_TOKENS) for prompt in prompts]


def make_engine(tiny: TinyVision, **options: object) -> SteppedEngine:
    sizes = {"budget": 64, "block_size": 8, "num_blocks": 128, "max_num_seqs": 8, "vocab_size": 256}
    return engine_for(tiny.paged, tiny_tokenizer(), **(sizes | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 512},
        {"budget": 37},
        {"budget": 5},
        {"budget": 19, "ahead": True},
        {"budget": 40, "ahead": True, "behind": True, "replay": True},
        {"replay": True},
        {"budget": 33, "num_blocks": 16},
        {"encoder_tokens": 24, "image_cache_tokens": 30},
    ],
    ids=str,
)
def test_outputs_equal_mlx_vlms(
    tiny: TinyVision, cases: tuple[list[VisionPrompt], list[Golden]], options: dict[str, object]
) -> None:
    prompts, expected = cases
    engine = make_engine(tiny, **options)
    outputs = run(engine, prompts, NUM_TOKENS)
    assert max(gap(output, one) for output, one in zip(outputs, expected, strict=True)) < TOLERANCE
    assert engine.scheduler.num_preemptions > 0 or options.get("num_blocks") is None


def test_cached_prefixes_end_within_images() -> None:
    """The second half of an image is computed after a cached prefix that ends within the image."""
    tiny = tiny_vision("qwen3_vl")
    prompt = vision_prompt(tiny, PARTS[3])
    other_end = vision_prompt(tiny, (*PARTS[3][:3], (4, 6, 9), 3))  # differs in its last image
    engine = make_engine(tiny, caching=True, block_size=8)
    run(engine, [other_end], 1)
    output = run(engine, [prompt], NUM_TOKENS)[0]
    assert gap(output, golden(tiny, prompt, NUM_TOKENS)) < TOLERANCE
    assert output.num_cached_tokens == 32
    assert engine.stats.images_encoded == 3


def test_staggered_requests_share_prefixes(tiny: TinyVision, cases: tuple[list[VisionPrompt], list[Golden]]) -> None:
    prompts, expected = cases
    order = [0, 3, 0, 2, 1, 3]
    engine = make_engine(tiny, budget=24, caching=True, num_blocks=64)
    outputs = run(engine, [prompts[i] for i in order], NUM_TOKENS, stagger=3)
    assert max(gap(output, expected[i]) for output, i in zip(outputs, order, strict=True)) < TOLERANCE
    assert engine.stats.image_cache_hits > 0 and any(output.num_cached_tokens for output in outputs)


def test_a_step_of_decodes_is_replayed(tiny: TinyVision, cases: tuple[list[VisionPrompt], list[Golden]]) -> None:
    """Rotary positions that differ from the positions are an input of the trace."""
    prompts, expected = cases
    engine = make_engine(tiny, replay=True)
    outputs = run(engine, prompts, NUM_TOKENS)
    assert max(gap(output, one) for output, one in zip(outputs, expected, strict=True)) < TOLERANCE
    decodes = engine.core.metrics.num_decode_forwards
    assert decodes["replayed"] > 0 and not decodes["refused"], decodes
