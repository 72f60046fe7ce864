"""Scheduling settings change when tokens are computed, but not which tokens: compares all settings with the default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import MakeEngine
from tests.support.running import run
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.stepped_engine import SteppedEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def with_knobs(engine: SteppedEngine, *, caching: bool = False, **knobs: Any) -> SteppedEngine:
    """Return the engine with other scheduler settings."""
    cache = replace(engine.config.cache, enable_prefix_caching=caching)
    engine.core.scheduler = Scheduler(replace(engine.config.scheduler, **knobs), cache)
    return engine


@pytest.fixture(scope="module")
def prompts(demo_tokenizer: Tokenizer) -> list[list[int]]:
    """Return prompts: two shared prefixes with different ends, one prompt twice, and short prompts between them."""
    guide = "You are a patient guide to a small town. " + "The bakery opens at six, the mill at eight. " * 3
    story = "Once upon a time there was a fox who lived at the edge of a wide and quiet forest. " * 4
    texts = [
        guide + "Where do I get bread?",
        story + "One day",
        "Tides are",
        guide + "When does the mill open?",
        story + "The fox",
        story + "The fox",
        "1, 2, 3, 4,",
        guide,
    ]
    return [demo_tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def plain_outputs(prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    return {}


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"caching": True}, id="caching", marks=pytest.mark.full),
        pytest.param(
            {"caching": True, "max_num_partial_prefills": 4, "long_prefill_token_threshold": 64},
            id="caching and partial prefills",
        ),
        pytest.param(
            {"max_num_partial_prefills": 4, "page_aligned_scheduling": True, "max_attention_work": 4000},
            id="aligned and capped",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {
                "caching": True,
                "max_num_partial_prefills": 3,
                "max_long_partial_prefills": 2,
                "page_aligned_scheduling": True,
                "max_attention_work": 4000,
                "scheduling_policy": "priority",
                "num_blocks": 22,  # a small pool: preempted requests resume from cached blocks
            },
            id="all, in a tight pool",
        ),
    ],
)
def test_equal_outputs(
    knobs: dict[str, Any],
    make_engine: MakeEngine,
    prompts: list[list[int]],
    plain_outputs: dict[str, list[list[int]]],
    reference_model: Any,
) -> None:
    if not plain_outputs:
        plain_outputs["outputs"] = run(make_engine(budget=96), prompts, GREEDY)
    knobs = dict(knobs)
    engine = with_knobs(make_engine(budget=96, num_blocks=knobs.pop("num_blocks", 512)), **knobs)
    outputs = run(engine, prompts, GREEDY, at_once=6)
    if knobs.get("caching"):
        assert engine.scheduler.blocks._cached
    for prompt, plain, other in zip(prompts, plain_outputs["outputs"], outputs, strict=True):
        assert compare_outputs(reference_model, prompt, plain, other).equal


def test_the_second_turn_of_a_chat_computes_only_what_is_new(
    make_engine: MakeEngine, demo_tokenizer: Tokenizer
) -> None:
    engine = with_knobs(make_engine(), caching=True)
    messages = [{"role": "user", "content": "Name three rivers, with a sentence about each of them."}]

    def turn(request_id: str, max_tokens: int = 1, cache_salt: str = "") -> tuple[list[int], list[int], int]:
        prompt = demo_tokenizer.apply_chat_template(messages)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        engine.add_request(request_id, engine.prepare(prompt, params, cache_salt))
        outputs = []
        while engine.has_requests:
            outputs += engine.step()
        return prompt, [t for o in outputs for t in o.token_ids], outputs[-1].num_cached_tokens

    prompt, answer, cached = turn("first", max_tokens=24)
    assert cached == 0
    text = demo_tokenizer.decode(answer, skip_special_tokens=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Which is the longest?"}]
    second_prompt, _, cached = turn("second")
    # Whole blocks of the earlier tokens. The output's text may tokenize differently at its end.
    seen = prompt + answer[:-1]
    common = next((i for i, (a, b) in enumerate(zip(seen, second_prompt, strict=False)) if a != b), len(seen))
    assert cached == common // 16 * 16
    assert cached > len(prompt) // 16 * 16, "a part of the output is cached, too"
    assert turn("other tenant", cache_salt="other")[2] == 0
