"""Speculation in the whole engine: compared with mlx-lm, with aborts, failed steps, next turns and the server."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from metal_engine.models.paged_model import PagedModel
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.speculation.ngram import NgramProposer
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import engine_for
from tests.support.running import run
from tests.support.speculation import KnownOutputs, propose_from, speculative_config
from tests.support.sweeps import sweep
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.stepped_engine import SteppedEngine

TASKS = [
    "Repeat this: the quick brown fox jumps over the lazy dog. The quick brown fox",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3,",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "Once upon a time",
]


@pytest.mark.parametrize(
    ("num_drafts", "budget", "at_once"),
    [(4, 512, 2), pytest.param(2, 16, 4, marks=pytest.mark.full), pytest.param(8, 61, 3, marks=pytest.mark.full)],
)
def test_greedy_outputs_are_mlx_lms(
    paged_demo: PagedModel, demo_tokenizer: Tokenizer, reference_model: Any, num_drafts: int, budget: int, at_once: int
) -> None:
    num_tokens = 8 if at_once == 2 else 40
    prompts = [demo_tokenizer.encode(text) for text in TASKS[:at_once]]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine = engine_for(
        paged_demo, demo_tokenizer, vocab_size=49152, budget=budget, block_size=16, num_blocks=128, max_num_seqs=8,
        speculative=speculative_config(num_drafts, longest=3, shortest=1),
    )  # fmt: skip
    propose_from(engine, NgramProposer(speculative_config(num_drafts, longest=3, shortest=1)))
    for prompt, output in zip(prompts, run(engine, prompts, params, at_once=at_once), strict=True):
        golden = [int(t) for t, _ in generate_step(mx.array(prompt), reference_model, max_tokens=num_tokens)]
        assert compare_outputs(reference_model, prompt, golden, output).equal
    metrics = engine.metrics
    assert 0 < sum(metrics.num_accepted_tokens) < metrics.num_draft_tokens


def known_to(requests: list[tuple[list[int], SamplingParams]], outputs: list[list[int]]) -> KnownOutputs:
    return KnownOutputs({tuple(prompt): tokens for (prompt, _), tokens in zip(requests, outputs, strict=True)})


def requests_of(seed: int, num: int = 12) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (byte_ids(f"{i} " + "prompt " * rng.randrange(6)), SamplingParams(seed=i, max_tokens=40, ignore_eos=True))
        for i in range(num)
    ]


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one ahead": {"ahead": True},
    "recurrent": {"architecture": "qwen3_next", "num_state_slots": 300},
    "recurrent, one ahead": {"architecture": "qwen3_next", "num_state_slots": 300, "ahead": True},
}


@pytest.mark.parametrize(
    ("kind", "seed"), sweep(product(MODELS, range(5)), [("plain", 0), ("one ahead", 1), ("recurrent, one ahead", 0)])
)
def test_aborts(kind: str, seed: int) -> None:
    """Aborted requests change nothing for other requests, and leave nothing behind."""
    model = MODELS[kind]
    requests = requests_of(seed)
    expected = [token_ids(outputs) for outputs in run_all(tiny_engine(**{**model, "ahead": False}), requests)]
    engine = tiny_engine(speculative=speculative_config(5), num_blocks=40, **model)
    propose_from(engine, known_to(requests, expected))
    rng = random.Random(seed)
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), engine.prepare(prompt, params))
    found: list[list[int]] = [[] for _ in requests]
    gone: set[int] = set()
    while engine.has_requests:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
        if rng.random() < 0.2 and engine.request_ids and len(gone) < len(requests) - 1:  # one request stays
            victim = rng.choice(engine.request_ids)
            engine.abort_request(victim)
            gone.add(int(victim))
        if rng.random() < 0.1:
            engine.scheduler.preempt_all()
        engine.scheduler.check_integrity()
    assert 0 < len(gone) < len(requests) and engine.stats.num_used_blocks == 0
    for i, tokens in enumerate(expected):
        assert found[i] == (tokens[: len(found[i])] if i in gone else tokens)


def test_the_next_turn_hits_cached_blocks_of_accepted_drafts() -> None:
    """Prompts that continue an output use its cached blocks, and give the same output as without them."""
    requests = requests_of(5, num=4)
    engines: list[SteppedEngine] = [
        tiny_engine(num_blocks=400),
        tiny_engine(speculative=speculative_config(5), num_blocks=400),
    ]
    firsts = [token_ids(outputs) for outputs in run_all(engines[0], requests)]
    propose_from(engines[1], known_to(requests, firsts))
    assert [token_ids(outputs) for outputs in run_all(engines[1], requests)] == firsts
    turns = [([*p, *tokens, *byte_ids(" and?")], params) for (p, params), tokens in zip(requests, firsts, strict=True)]
    plain = run_all(engines[0], turns)
    propose_from(engines[1], known_to(turns, [token_ids(outputs) for outputs in plain]))
    ours = run_all(engines[1], turns)
    assert [token_ids(outputs) for outputs in ours] == [token_ids(outputs) for outputs in plain]
    cached = [[outputs[0].num_cached_tokens for outputs in of] for of in (ours, plain)]
    assert cached[0] == cached[1] and min(cached[0]) >= 40


def test_drafts_in_a_requests_first_step_do_not_lower_the_count_of_rows() -> None:
    """The cache has all blocks of a repeated prompt, and the first step computes the one remaining token."""
    engine = tiny_engine(speculative=speculative_config(4), num_blocks=40)
    prompt = byte_ids("x" * (2 * engine.config.cache.block_size + 1))
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))]
    propose_from(engine, known_to(requests, [token_ids(outputs) for outputs in run_all(tiny_engine(), requests)]))
    run_all(engine, requests)
    before = dict(engine.metrics.num_rows)
    engine.add_request("again", engine.prepare(*requests[0]))
    engine.step()
    assert engine.metrics.num_rows == before | {"fresh": before["fresh"] + 1, "draft": before["draft"] + 4}
