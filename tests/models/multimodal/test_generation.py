"""Outputs of models with images equal mlx-vlm's own, however the steps are packed."""

from __future__ import annotations

from functools import cache
from itertools import chain, cycle, product
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.request import RequestOptions, RequestOutput
from metal_engine.runner.features import Encoding
from tests.support.running import drain
from tests.support.speculation import draft_for_free, speculative_config
from tests.support.sweeps import sweep
from tests.support.vision import (
    CONFIGS,
    QWEN3_VL,
    Golden,
    VisionPrompt,
    gap,
    golden,
    make_engine,
    make_tiny_vision,
    merged,
    prepared,
    run,
    tiny_vision,
    vision_prompt,
)

NUM_TOKENS = 12
TOLERANCE = 1e-3
PARTS: tuple[tuple[int | tuple[int, int, int], ...], ...] = (
    (7, (4, 6, 1), 9),
    (23,),
    (3, (2, 2, 2), 2, (6, 4, 3), 11),
    (1, (4, 6, 1), 4, (4, 6, 4), 3),
)


# Alone: one prompt at a time in whole steps. Packed and chunked at odd sizes, preempted, cached, one ahead, replayed.
OPTIONS: tuple[dict[str, object], ...] = (
    {"budget": 512, "max_num_seqs": 1},
    {"budget": 37},
    {"budget": 5},
    {"budget": 19, "ahead": True},
    {"budget": 64, "num_blocks": 15, "encoder_tokens": 24, "image_cache_tokens": 30},
    {"budget": 24, "caching": True, "num_blocks": 64, "stagger": 3},
    {"budget": 40, "ahead": True, "behind": True, "replay": True, "caching": True, "trace_at": 4},
)
# Families with parts of their own in the packed step: axes, features after layers, recurrent layers.
WHOLE = ("qwen3_vl", "qwen3_5")
SELF_SEEING = ("gemma3", "gemma4")  # tests/models/multimodal/test_gemma.py
FAMILIES = [name for name in CONFIGS if name not in SELF_SEEING]


@cache
def cases_of(name: str) -> tuple[list[VisionPrompt], list[Golden]]:
    tiny = tiny_vision(name)
    prompts = [vision_prompt(tiny, parts, seed) for seed, parts in enumerate(PARTS)]
    return prompts, [golden(tiny, prompt, NUM_TOKENS) for prompt in prompts]


# `make test` runs each option once with a family of WHOLE, and one option with each other family.
OTHERS = [name for name in FAMILIES if name not in WHOLE]
QUICK = chain(zip(cycle(WHOLE), OPTIONS, strict=False), zip(OTHERS, cycle(OPTIONS[1:]), strict=False))


@pytest.mark.parametrize(("name", "options"), sweep(product(FAMILIES, OPTIONS), QUICK))
def test_outputs_equal_mlx_vlms(name: str, options: dict[str, Any]) -> None:
    prompts, expected = cases_of(name)
    order = [0, 3, 0, 2, 1, 3] if options.get("caching") else [0, 1, 2, 3]  # repeated prompts share prefixes
    given = dict(options)
    stagger = given.pop("stagger", 0)
    engine = make_engine(tiny_vision(name), **given)
    outputs = run(engine, [prompts[i] for i in order], NUM_TOKENS, stagger=stagger)
    assert max(gap(output, expected[i]) for output, i in zip(outputs, order, strict=True)) < TOLERANCE
    assert engine.scheduler.num_preemptions > 0 or options.get("num_blocks") != 15
    if stagger:
        assert engine.stats.image_cache_hits > 0 and any(output.num_cached_tokens for output in outputs)
    decodes = engine.core.metrics.num_decode_forwards
    assert decodes["replayed"] > 0 or not options.get("replay")
    assert not decodes["refused"]


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


def test_equal_tokens_with_different_images() -> None:
    """The prompts have images a, b and a, and the third finds the prefix of the first."""
    tiny = tiny_vision("qwen3_vl")
    prompts = [vision_prompt(tiny, (21, (4, 6, seed), 9)) for seed in (1, 2, 1)]
    assert prompts[0].token_ids == prompts[1].token_ids
    engine = make_engine(tiny, block_size=4, caching=True)
    outputs = [run(engine, [prompt], NUM_TOKENS)[0] for prompt in prompts]
    assert max(gap(out, golden(tiny, p, NUM_TOKENS)) for out, p in zip(outputs, prompts, strict=True)) < TOLERANCE
    assert [output.num_cached_tokens for output in outputs] == [0, 20, 52]
    assert engine.stats.images_encoded == 2  # the third prompt computes no token of its image


def test_a_request_with_images_resumes_after_generated_tokens() -> None:
    """The prompt's images are computed again, as after the end of an engine's process."""
    prompts, expected = cases_of("qwen3_vl")
    engine = make_engine(tiny_vision("qwen3_vl"), budget=20)
    so_far = RequestOutput("r", expected[3].token_ids[:5], num_cached_tokens=0)
    engine.core.add_request("r", prepared(engine, prompts[3], NUM_TOKENS), so_far=so_far)
    tokens = []
    while engine.core.has_requests:
        tokens += [token for output in engine.core.step() for token in output.token_ids]
    assert tokens == expected[3].token_ids[5:]


def test_the_time_of_encoding_is_counted() -> None:
    """Steps that encode no image add nothing."""
    prompts, _ = cases_of("qwen3_vl")
    engine = make_engine(tiny_vision("qwen3_vl"), budget=19, ahead=True, behind=True)
    run(engine, prompts, 3)
    metrics = engine.core.metrics
    seconds = metrics.image_encode_seconds
    assert 0 < seconds < metrics.step_time.sum
    run(engine, [prompts[1], prompts[0]], 3)  # text, and a prompt whose image is kept
    assert metrics.image_encode_seconds == seconds


def test_the_time_of_encoding_begins_after_the_previous_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 5.0, 9.0])
    # Replaces the module's `time` only: the event loops of other tests' servers use `time.monotonic`.
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("metal_engine.runner.features.time", clock)
    encoding = Encoding([mx.zeros(1)], began=1.0)
    encoding.begin()
    assert [encoding.wait(), encoding.wait()] == [2.0, 2.0]


def test_quantized_keys_and_values() -> None:
    """Steps of any size read the same rounded keys and values, which are close to mlx-vlm's."""
    axes = {"type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = QWEN3_VL["text_config"] | {"head_dim": 32, "rope_scaling": axes}
    tiny = make_tiny_vision(QWEN3_VL | {"text_config": text}, "int8")
    prompts = [vision_prompt(tiny, parts, seed) for seed, parts in enumerate(PARTS)]
    expected = [golden(tiny, prompt, 1) for prompt in prompts]
    whole, *others = (
        run(make_engine(tiny, budget=budget, caching=caching), prompts, 1, stagger=caching)
        for budget, caching in ((512, False), (5, False), (37, True))
    )
    for outputs in others:
        for output, one in zip(outputs, whole, strict=True):
            assert output.token_ids == one.token_ids
            assert output.logprobs[0].logprob == pytest.approx(one.logprobs[0].logprob, abs=TOLERANCE)
    assert 1e-5 < max([gap(output, one) for output, one in zip(whole, expected, strict=True)]) < 0.1


def test_drafts_after_images() -> None:
    """Rows of drafts have the rotary positions of output tokens. Some drafts are accepted, and some are rejected."""
    prompts, expected = cases_of("qwen3_vl")
    engine = make_engine(tiny_vision("qwen3_vl"), speculative=speculative_config(3))
    draft_for_free(engine.core)
    tokens = expected[0].token_ids
    predicted = (*tokens[:4], *[(token + 1) % 240 for token in tokens[4:6]], *tokens[6:])
    request = prepared(engine, prompts[0], NUM_TOKENS)
    engine.add_request("r", request, RequestOptions(predicted_token_ids=predicted))
    assert gap(merged(drain(engine)["r"]), expected[0]) < TOLERANCE
    assert engine.core.metrics.num_draft_tokens > 0
