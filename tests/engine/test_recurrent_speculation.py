"""Speculation on recurrent models: equal outputs, and states that are reset after rejected drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.recurrent_states import DRAFTS_INTERVAL
from tests.engine.test_recurrent import ARCHITECTURES, GREEDY, PROMPTS, hybrid_engine, own_answer, own_answers, prompts
from tests.runner.test_speculation import EVERYTHING, check_same
from tests.support.speculation import KnownOutputs, propose_from, speculative_config
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.fixtures.recurrent_architectures import RECURRENT
from tools.fixtures.stepped_engine import SteppedEngine


def speculating(architecture: str, answers: list[list[int]], rightness: float = 0.7, **config: Any) -> SteppedEngine:
    """Return an engine whose drafts are right with the given probability."""
    engine = hybrid_engine(architecture, speculative=speculative_config(config.pop("num_drafts", 4)), **config)
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    propose_from(engine, KnownOutputs(known, rightness=rightness))
    return engine


def answer_all(engine: SteppedEngine) -> list[list[int]]:
    return [token_ids(outputs) for outputs in run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])]


WAYS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "chunks of any size": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "preempted": {"num_blocks": 26, "max_num_seqs": 4, "num_drafts": 6, "rightness": 0.9},
    "one ahead": {"ahead": True},
    "one ahead, preempted": {"ahead": True, "num_blocks": 26, "max_num_batched_tokens": 16},
    "few slots": {"num_state_slots": 12, "max_num_seqs": 6},
    "replayed": {"replay": True, "max_num_seqs": 1},
    "replayed, behind": {"replay": True, "behind": True, "max_num_seqs": 1},
    "replayed, one ahead, preempted": {"replay": True, "ahead": True, "num_blocks": 26, "max_num_batched_tokens": 16},
}
QUICK = [(name, "one by one") for name in ARCHITECTURES] + [
    ("qwen3_5", way) for way in ("chunks of any size", "preempted", "one ahead, preempted", "few slots")
]
QUICK += [("mamba", "preempted"), *((name, "replayed") for name in ("qwen3_5", "mamba"))]
FULL = [(name, way) for name in RECURRENT for way in WAYS if (name, way) not in QUICK]


@pytest.mark.parametrize(
    ("architecture", "way"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.full) for pair in FULL)]
)
def test_answers_are_mlx_lms(architecture: str, way: str) -> None:
    answers = own_answers(architecture)
    engine = speculating(architecture, answers, **WAYS[way])
    for _ in range(2):  # the second time, the prompts' prefixes are cached
        assert answer_all(engine) == answers
    metrics = engine.metrics
    assert 0 < sum(metrics.num_accepted_tokens) < metrics.num_draft_tokens
    assert bool(engine.scheduler.num_preemptions) == ("preempted" in way)
    assert engine.scheduler.blocks.num_used_blocks == 0
    if "replayed" in way:
        assert engine.metrics.num_decode_forwards["replayed"] > 10


@pytest.mark.parametrize("architecture", ["qwen3_5", "mamba"])
def test_padded_verification_steps_are_replayed(architecture: str) -> None:
    """Three requests with five rows each are padded to a size with a fourth request. No request has a single row."""
    answers = own_answers(architecture)
    engine = speculating(architecture, answers, rightness=1.0, replay=True, max_num_seqs=4)
    for _ in range(2):
        outputs = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS[:3]])
        assert [token_ids(o) for o in outputs] == answers[:3]
    assert engine.metrics.num_decode_forwards["replayed"] > 2


def test_right_drafts_cost_no_step_more() -> None:
    """Accepted drafts are not computed again. After a rejection, the recomputation is part of the next step."""
    prompt, params = PROMPTS[0], replace(GREEDY, max_tokens=24)
    answer = own_answer("qwen3_5", prompt, 24)
    for rightness, num_steps in ((1.0, 1 + 5), (0.0, 1 + 24)):
        engine = hybrid_engine("qwen3_5", speculative=speculative_config(4))
        propose_from(engine, KnownOutputs({tuple(prompt): answer}, rightness=rightness))
        assert [token_ids(o) for o in run_all(engine, [(prompt, params)])] == [answer]
        assert engine.num_steps == num_steps
        assert bool(sum(engine.metrics.num_accepted_tokens)) == (rightness == 1.0)


@pytest.fixture(scope="module")
def without() -> list[list[RequestOutput]]:
    return run_all(tiny_engine(architecture="qwen3_5", num_state_slots=160), EVERYTHING)


@pytest.mark.parametrize(
    "config", [{"num_blocks": 24, "max_num_batched_tokens": 40}, pytest.param({"ahead": True}, marks=pytest.mark.full)]
)
def test_drafts_do_not_change_outputs_with_any_sampling_feature(
    without: list[list[RequestOutput]], config: dict[str, Any]
) -> None:
    """Covers all sampling features: seeds, truncation, penalties, grammars, stops, log probabilities."""
    speculative = speculative_config(4)
    engine = tiny_engine(architecture="qwen3_5", num_state_slots=160, speculative=speculative, **config)
    known = {tuple(p): token_ids(output) for (p, _), output in zip(EVERYTHING, without, strict=True)}
    propose_from(engine, KnownOutputs(known, rightness=0.8))
    check_same(run_all(engine, EVERYTHING), without)
    assert sum(engine.metrics.num_accepted_tokens)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
def test_the_next_turn_resumes_from_a_state_near_the_end_of_the_output(ahead: bool) -> None:
    """Steps with drafts cross block boundaries. Now and then, a step ends at a boundary and stores its state."""
    (prompt, question), (num_outputs, block_size) = prompts(8, [30, 9]), (200, 16)
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    answer = own_answer("qwen3_5", prompt, num_outputs)
    engine = hybrid_engine("qwen3_5", speculative=speculative_config(4), block_size=block_size, ahead=ahead)
    propose_from(engine, KnownOutputs({tuple(prompt): answer}, rightness=0.97))
    assert [token_ids(o) for o in run_all(engine, [(prompt, params)])] == [answer]
    assert sum(engine.metrics.num_accepted_tokens) > 100
    second = [*prompt, *answer, *question]
    propose_from(engine, KnownOutputs({tuple(second): own_answer("qwen3_5", second)}))
    (outputs,) = run_all(engine, [(second, GREEDY)])
    assert token_ids(outputs) == own_answer("qwen3_5", second)
    assert len(prompt) + num_outputs - outputs[0].num_cached_tokens <= DRAFTS_INTERVAL + 3 * block_size
