"""Tests of the draft model with features that complicate drafts: asynchronous planning and recurrent states."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.request import RequestOutput
from tests.runner.test_draft_model import PLAIN, drafting_engine, share_accepted
from tests.runner.test_speculation import EVERYTHING, Requests, check_same, params
from tests.support.tiny_engine import run_all, tiny_engine, tiny_reference
from tools.fixtures.fake_engine import VOCAB_SIZE, byte_ids
from tools.fixtures.tiny_models import tiny_model

# With only two tokens, even the guesses of a random model are right sometimes.
FEW = (97, 98)
GUESSED: Requests = [
    (byte_ids(text), params(allowed_token_ids=FEW, max_tokens=50, **fields))
    for text, fields in (
        ("once upon a time there was", {"temperature": 0}),
        ("abc", {"seed": 1}),
        ("a long prompt " * 4, {"seed": 2, "top_p": 0.9}),
        ("what follows is", {"seed": 3, "repetition_penalty": 1.2}),
    )
]
HYBRID: dict[str, Any] = {"architecture": "qwen3_5", "num_state_slots": 160}


@pytest.fixture(scope="module")
def without() -> list[list[RequestOutput]]:
    return run_all(tiny_engine(), EVERYTHING)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"num_blocks": 24, "max_num_batched_tokens": 40},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    ],
)
def test_steps_ahead_give_the_same(without: list[list[RequestOutput]], config: dict[str, Any]) -> None:
    """A step with drafts waits for the tokens of the previous step. Steps without drafts need not wait."""
    engine = drafting_engine(tiny_reference(), ahead=True, **config)
    check_same(run_all(engine, EVERYTHING), without)
    assert bool(engine.stats.num_preemptions) == ("num_blocks" in config)
    assert engine.metrics.num_drafts and min(engine.metrics.num_steps.values()) > 0
    assert engine.stats.num_used_blocks == 0


def test_all_drafts_of_the_model_itself_are_accepted_beside_steps_ahead() -> None:
    engine = drafting_engine(tiny_reference(), ahead=True, max_num_batched_tokens=32)
    run_all(engine, PLAIN)
    assert share_accepted(engine) == 1.0 and engine.metrics.num_draft_tokens > 40
    assert min(engine.metrics.num_steps.values()) > 0


def test_drafts_that_do_not_pay_are_tried_between_steps_ahead() -> None:
    """Probes continue long after all early drafts have been rejected."""
    engine = drafting_engine(tiny_model(7, vocab_size=VOCAB_SIZE), ahead=True)
    engine.add_request("0", engine.prepare(byte_ids("abc"), params(seed=1, max_tokens=460)))
    numbers = []
    while engine.has_requests:
        engine.step()
        numbers.append(engine.metrics.num_draft_tokens)
    assert share_accepted(engine) < 0.1
    assert 0 < numbers[200] < numbers[-1]


RECURRENT = [*EVERYTHING[::2], *GUESSED]


@pytest.fixture(scope="module")
def recurrent_without() -> list[list[RequestOutput]]:
    return run_all(tiny_engine(**HYBRID), RECURRENT)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"num_blocks": 30, "max_num_batched_tokens": 40},
        {"ahead": True},
        pytest.param({"ahead": True, "num_blocks": 30, "max_num_batched_tokens": 24}, marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 9, "max_num_seqs": 9}, marks=pytest.mark.full),
        pytest.param({"block_size": 1, "num_blocks": 2000}, marks=pytest.mark.full),
    ],
)
def test_recurrent_models_give_the_same(recurrent_without: list[list[RequestOutput]], config: dict[str, Any]) -> None:
    """After a rejection, accepted tokens are recomputed, and further drafts follow them."""
    engine = drafting_engine(tiny_model(7, vocab_size=VOCAB_SIZE), 3, **HYBRID, **config)
    check_same(run_all(engine, RECURRENT), recurrent_without)
    assert bool(engine.stats.num_preemptions) == (config.get("num_blocks", 100) < 100)
    assert engine.stats.num_used_blocks == 0
    accepted = engine.metrics.num_accepted_tokens
    assert sum(accepted) > 10 and len(accepted) == 3 and accepted[2] > 0
    assert share_accepted(engine) < 0.9
