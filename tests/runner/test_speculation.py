"""Tests that drafts do not change outputs, with all kinds of sampling, in the whole engine on a tiny model."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from metal_engine.grammars.grammar_client import GrammarMatcher
from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.scheduling.speculation.ngram import NgramProposer
from tests.support.speculation import KnownOutputs, propose_from, speculative_config
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.stepped_engine import SteppedEngine

Requests = list[tuple[list[int], SamplingParams]]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 18, "ignore_eos": True, **fields})


GRAMMARS = [
    StructuredOutputsParams(regex="([a-m][n-z]){20}"),
    StructuredOutputsParams(regex="(ab|cd)*e"),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    StructuredOutputsParams(choice=("yes", "no", "yesterday")),
]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "temperature": 2.0, "top_k": 12},
    {"seed": 3, "top_p": 0.8},
    {"seed": 4, "min_p": 0.05, "temperature": 1.5},
    {"seed": 5, "repetition_penalty": 1.8},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.9},
    {"seed": 6, "frequency_penalty": -0.7, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logit_bias": {5: 4.0, 97: -100.0}},
    {"seed": 7, "allowed_token_ids": (3, 9, 27, 81, 243)},
    {"seed": 8, "bad_words": ("ab", "ba", "aa", "the"), "logit_bias": {97: 9.0, 98: 9.0}},
    {"seed": 9, "min_tokens": 12, "stop_token_ids": (3, 100), "logit_bias": {3: 8.0, 100: 8.0}},
    {"seed": 10, "stop": ("a", "qu"), "include_stop_str_in_output": True},
    {"seed": 11, "logprobs": 4},
    {"temperature": 0, "logprobs": 0, "prompt_logprobs": 2},
    {"seed": 12, "ignore_eos": False, "min_tokens": 3},
]
EVERYTHING: Requests = [
    *((byte_ids(f"prompt {i} the thing"), params(**fields)) for i, fields in enumerate(SAMPLED)),
    *(
        (byte_ids(f"{i} follows"), SamplingParams(seed=20 + i, max_tokens=18, structured_outputs=one, **more))
        for i, one in enumerate(GRAMMARS)
        for more in ({}, {"repetition_penalty": 1.2, "logprobs": 1, "min_tokens": 4})
    ),
]


GRAMMAR_REQUESTS = slice(len(SAMPLED), None)


def seen(outputs: list[RequestOutput]) -> tuple[Any, ...]:
    """Return everything that a user sees of an output, regardless of its division into chunks."""
    last = outputs[-1]
    return (
        token_ids(outputs),
        "".join(output.text for output in outputs),
        [end for output in outputs for end in output.token_ends],
        last.finish_reason,
        last.stop_reason,
        last.error,
        last.num_output_tokens,
    )


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    return [value for entry in entries for value in (entry.logprob, *(value for _, value in entry.top))]


@functools.cache
def without() -> list[list[RequestOutput]]:
    """Return the outputs without speculation. Other tests show that batching does not change them."""
    return run_all(tiny_engine(), EVERYTHING)


def known(requests: Requests, outputs: list[list[RequestOutput]], **options: Any) -> KnownOutputs:
    return KnownOutputs(
        {tuple(p): token_ids(output) for (p, _), output in zip(requests, outputs, strict=True)}, **options
    )


def speculating(num_drafts: int = 4, **config: Any) -> SteppedEngine:
    return tiny_engine(speculative=speculative_config(num_drafts), **config)


def check_same(ours: list[list[RequestOutput]], theirs: list[list[RequestOutput]]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert seen(a) == seen(b), EVERYTHING[i] if len(ours) == len(EVERYTHING) else i
        np.testing.assert_allclose(logprobs(a), logprobs(b), atol=1e-4)
        assert [o.prompt_logprobs is None for o in a] == [True] * len(a) or a[0].prompt_logprobs is not None


@pytest.mark.parametrize(
    ("num_drafts", "rightness", "config"),
    [
        (4, 0.8, {}),
        (1, 0.5, {"max_num_batched_tokens": 24}),
        (7, 0.9, {"num_blocks": 24, "max_num_batched_tokens": 40}),
        (4, 0.9, {"ahead": True}),
        pytest.param(5, 0.9, {"ahead": True, "num_blocks": 24}, marks=pytest.mark.full),
        pytest.param(3, 0.0, {}, marks=pytest.mark.full),
        pytest.param(3, 1.0, {"block_size": 1, "num_blocks": 2000}, marks=pytest.mark.full),
        pytest.param(12, 0.95, {"block_size": 16}, marks=pytest.mark.full),
    ],
)
def test_outputs_equal_outputs_without_drafts(num_drafts: int, rightness: float, config: dict[str, Any]) -> None:
    engine = speculating(num_drafts, **config)
    # Requests with grammars share prompts, and known drafts depend on the prompt only, so a wrong draft may be right
    # for another request.
    num_requests = len(EVERYTHING if rightness else SAMPLED)
    requests, expected = EVERYTHING[:num_requests], without()[:num_requests]
    propose_from(engine, known(requests, expected, rightness=rightness))
    check_same(run_all(engine, requests), expected)
    assert engine.stats.num_used_blocks == 0
    assert bool(engine.stats.num_preemptions) == ("num_blocks" in config and config["num_blocks"] < 100)
    metrics = engine.metrics
    assert metrics.num_drafts and metrics.num_draft_tokens
    assert bool(sum(metrics.num_accepted_tokens)) == (rightness > 0)
    assert (sum(metrics.num_accepted_tokens) < metrics.num_draft_tokens) or rightness == 1.0
    assert metrics.num_generation_tokens == sum(len(token_ids(outputs)) for outputs in expected)


def test_right_drafts_are_all_accepted() -> None:
    """Uses requests that end by length, one at a time, so that few steps run."""
    for request, outputs in zip(EVERYTHING, without(), strict=True):
        if outputs[-1].finish_reason != "length" or request[1].seed not in (None, 1, 6, 11, 20):
            continue
        engine = speculating(4)
        propose_from(engine, known([request], [outputs], rightness=1.0))
        check_same(run_all(engine, [request]), [outputs])
        assert sum(engine.metrics.num_accepted_tokens) == engine.metrics.num_draft_tokens
        assert engine.num_steps == 1 + math.ceil((len(token_ids(outputs)) - 1) / 5)


def test_outputs_are_unchanged_if_grammar_masks_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are late in some steps."""
    expected, fill_mask, calls = without(), GrammarMatcher.fill_mask, iter(range(1 << 30))

    def now_and_then(self: GrammarMatcher, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        return (num_drafts > 0 or next(calls) % 5 in (1, 3)) and fill_mask(self, mask, math.inf, num_drafts)

    monkeypatch.setattr(GrammarMatcher, "fill_mask", now_and_then)
    engine = speculating(4)
    propose_from(engine, known(EVERYTHING, expected, rightness=0.9))
    check_same(run_all(engine, EVERYTHING), expected)
    assert engine.metrics.num_late_masks > 20


def test_drafts_without_grammar_masks_are_counted_and_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft without a mask is accepted, and outputs are the same."""
    requests, outputs = EVERYTHING[GRAMMAR_REQUESTS], without()[GRAMMAR_REQUESTS]
    fill_mask = GrammarMatcher.fill_mask

    def alone(self: GrammarMatcher, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        if num_drafts:
            raise ValueError("too complex")
        return fill_mask(self, mask, math.inf)

    monkeypatch.setattr(GrammarMatcher, "fill_mask", alone)
    engine = speculating(4)
    propose_from(engine, known(requests, outputs, rightness=1.0))
    check_same(run_all(engine, requests), outputs)
    assert engine.metrics.num_unmasked_tokens == engine.metrics.num_draft_tokens > 0
    assert not any(engine.metrics.num_accepted_tokens)


def test_ngram_drafts_of_repetitive_output_are_accepted() -> None:
    """A greedy model with few tokens soon repeats itself."""
    requests = [(byte_ids("in the end"), params(temperature=0, max_tokens=80, allowed_token_ids=(97, 98, 99)))]
    engine = speculating(4)
    propose_from(engine, NgramProposer(speculative_config(4)))
    check_same(run_all(engine, requests), run_all(tiny_engine(), requests))
    assert sum(engine.metrics.num_accepted_tokens) > 40
    assert engine.num_steps < 40


def test_outputs_do_not_depend_on_how_long_steps_take() -> None:
    """Drafts come from n-grams, and their number depends on measured step times."""
    engine = speculating(4)
    check_same(run_all(engine, EVERYTHING), without())
