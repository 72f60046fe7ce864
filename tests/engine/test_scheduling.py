"""Scheduling settings change when tokens are computed, but not which tokens: compares all settings with the default."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from tests.support.running import run
from tests.support.tiny_engine import tiny_engine, tiny_reference
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.stepped_engine import SteppedEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def with_knobs(engine: SteppedEngine, *, caching: bool = False, **knobs: Any) -> SteppedEngine:
    """Return the engine with other scheduler settings."""
    cache = replace(engine.config.cache, enable_prefix_caching=caching)
    engine.core.scheduler = Scheduler(replace(engine.config.scheduler, **knobs), cache)
    return engine


GUIDE = "You are a patient guide to a small town. " + "The bakery opens at six, the mill at eight. " * 3
STORY = "Once upon a time there was a fox who lived at the edge of a wide and quiet forest. " * 4
# Two shared prefixes with different ends, one prompt twice, and short prompts between them.
PROMPTS = [
    byte_ids(text)
    for text in (
        GUIDE + "Where do I get bread?",
        STORY + "One day",
        "Tides are",
        GUIDE + "When does the mill open?",
        STORY + "The fox",
        STORY + "The fox",
        "1, 2, 3, 4,",
        GUIDE,
    )
]


@cache
def plain_outputs() -> list[list[int]]:
    return run(tiny_engine(max_num_batched_tokens=96, enable_prefix_caching=False), PROMPTS, GREEDY)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"caching": True}, id="caching"),
        pytest.param(
            {"caching": True, "max_num_partial_prefills": 4, "long_prefill_token_threshold": 64},
            id="caching and partial prefills",
        ),
        pytest.param(
            {"max_num_partial_prefills": 4, "page_aligned_scheduling": True, "max_attention_work": 4000},
            id="aligned and capped",
        ),
        pytest.param(
            {
                "caching": True,
                "max_num_partial_prefills": 3,
                "max_long_partial_prefills": 2,
                "page_aligned_scheduling": True,
                "max_attention_work": 4000,
                "scheduling_policy": "priority",
                "num_blocks": 46,  # a small pool: preempted requests resume from cached blocks
            },
            id="all, in a tight pool",
        ),
    ],
)
def test_equal_outputs(knobs: dict[str, Any]) -> None:
    num_blocks = knobs.get("num_blocks", 512)
    engine = tiny_engine(max_num_batched_tokens=96, num_blocks=num_blocks)
    engine = with_knobs(engine, **{name: value for name, value in knobs.items() if name != "num_blocks"})
    outputs = run(engine, PROMPTS, GREEDY, at_once=6)
    if knobs.get("caching"):
        assert engine.scheduler.blocks._cached
    assert bool(engine.stats.num_preemptions) == (num_blocks == 46)
    model = tiny_reference()
    for prompt, plain, other in zip(PROMPTS, plain_outputs(), outputs, strict=True):
        assert compare_outputs(model, prompt, plain, other).equal
