"""Async scheduling changes when tokens reach the host, but not which tokens: the demo model with and without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import MakeEngine
from tools.compare.equal_outputs import MAX_GAP, compare_outputs
from tools.fixtures.stepped_engine import SteppedEngine

GUIDE = "You are a patient guide to a small town. " + "The bakery opens at six, the mill at eight. " * 5
STORY = "Once upon a time there was a fox who lived at the edge of a wide and quiet forest. " * 6


@dataclass(frozen=True)
class Ask:
    text: str
    params: SamplingParams


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


# Shared prefixes, chunks, single tokens, stops of each kind, and seeds. Each request ends at a different time.
ASKED = [
    Ask(GUIDE + "Where do I get bread?", greedy(12, ignore_eos=True)),
    Ask(STORY + "One day", greedy(9, ignore_eos=True)),
    Ask("Tides are", SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=11, ignore_eos=True)),
    Ask("The capital of France is", greedy(1)),
    Ask(GUIDE + "When does the mill open?", greedy(10, stop=("eight", "Eight"))),
    Ask("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n", greedy(20)),
    Ask(STORY + "The fox", SamplingParams(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)),
    Ask(STORY + "The fox", greedy(8, ignore_eos=True)),
    Ask("1, 2, 3, 4,", SamplingParams(temperature=0.7, top_k=20, max_tokens=9, ignore_eos=True)),
]


def ask_all(engine: SteppedEngine, tokenizer: Tokenizer) -> list[list[RequestOutput]]:
    """Add one request per step, so that prompts, chunks and decodes share steps."""
    outputs: list[list[RequestOutput]] = [[] for _ in ASKED]
    num_asked = 0
    while num_asked < len(ASKED) or engine.has_requests:
        if num_asked < len(ASKED):
            ask = ASKED[num_asked]
            engine.add_request(str(num_asked), engine.prepare(tokenizer.encode(ask.text), ask.params))
            num_asked += 1
        for output in engine.step():
            assert output.error is None, output.error
            outputs[int(output.request_id)].append(output)
        engine.scheduler.check_integrity()
    assert engine.stats.num_used_blocks == 0
    return outputs


def with_caching(engine: SteppedEngine) -> SteppedEngine:
    cache = replace(engine.config.cache, enable_prefix_caching=True)
    config = replace(engine.config.scheduler, max_num_partial_prefills=2)
    engine.core.scheduler = Scheduler(config, cache)
    return engine


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.fixture(scope="module")
def one_by_one() -> dict[str, list[list[RequestOutput]]]:
    return {}


@pytest.mark.parametrize(
    ("num_blocks", "behind"),
    [
        pytest.param(512, True, id="roomy-behind"),
        pytest.param(14, False, id="tight-after the end"),
        pytest.param(512, False, id="roomy-after the end", marks=pytest.mark.full),
        pytest.param(14, True, id="tight-behind", marks=pytest.mark.full),
    ],
)
def test_equal_outputs(
    num_blocks: int,
    behind: bool,
    make_engine: MakeEngine,
    demo_tokenizer: Tokenizer,
    reference_model: Any,
    one_by_one: dict[str, list[list[RequestOutput]]],
) -> None:
    if not one_by_one:
        one_by_one["outputs"] = ask_all(make_engine(budget=96), demo_tokenizer)
    engine = with_caching(make_engine(budget=96, num_blocks=num_blocks, ahead=True, behind=behind))
    ahead = ask_all(engine, demo_tokenizer)
    assert (engine.stats.num_preemptions > 0) == (num_blocks == 14)
    assert engine.scheduler.blocks._cached
    num_same = 0
    for ask, a, b in zip(ASKED, one_by_one["outputs"], ahead, strict=True):
        num_same += tokens_of(a) == tokens_of(b)
        if tokens_of(a) == tokens_of(b):
            assert (a[-1].finish_reason, a[-1].stop_reason) == (b[-1].finish_reason, b[-1].stop_reason)
            assert "".join(o.text for o in a) == "".join(o.text for o in b)
            continue
        prompt = demo_tokenizer.encode(ask.text)
        assert ask.params.is_greedy, "a seeded sample differs"
        assert compare_outputs(reference_model, prompt, tokens_of(a), tokens_of(b)).gap < MAX_GAP
    assert num_same >= len(ASKED) - 1
    reasons = {o[-1].finish_reason for o in ahead}
    assert reasons == {"stop", "length"}


def test_samples_of_a_mixed_step_are_gathered_on_the_device(
    make_engine: MakeEngine, demo_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with decodes and chunks is built before any token of the previous step is on the host."""
    engine = make_engine(budget=24, ahead=True)
    runner: Any = engine.runner
    built: list[tuple[int, int]] = []  # number of rows with pending tokens, and number of all rows
    input_ids = type(runner)._input_ids

    def spy(self: Any, batch: Any) -> mx.array:
        built.append((len(batch.pending_rows), len(batch.input_ids)))
        return input_ids(self, batch)

    monkeypatch.setattr(type(runner), "_input_ids", spy)
    for i, length in enumerate([3, 5, 70]):
        prompt = np.random.default_rng(i).integers(100, 1000, length).tolist()
        engine.add_request(str(i), engine.prepare(prompt, greedy(8, ignore_eos=True)))
    while engine.has_requests:
        engine.step()
    assert any(0 < pending < rows for pending, rows in built), built
    # All inputs of decodes came from the device, except the first, which is the prompt's last token.
    assert sum(pending for pending, _ in built) == 3 * 7
