"""The client of an engine: seeds, text, and stop strings that are found while the engine goes on."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput, merge_outputs
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.speculation.ngram import NgramProposer
from metal_engine.text.detokenizer import Detokenizer
from tests.support.speculation import propose_from, speculative_config
from tools.fixtures.fake_engine import (
    FakeRunner,
    NextToken,
    byte_ids,
    fake_config,
    generated,
    hash_chain,
    tiny_tokenizer,
)
from tools.fixtures.stepped_engine import SteppedEngine

# Text that the fake model generates after the prompt.
TEXT = bytes(generated(byte_ids("prompt"), 40)).decode()


def repeated(tokens: list[int], num_prompt_tokens: int) -> int:
    """Return a token that repeats, so that drafts are right."""
    return ord("abcdefg"[len(tokens) % 7])


def make_engine(next_token: NextToken = hash_chain, *, ahead: bool = False, drafts: bool = False) -> SteppedEngine:
    speculative = speculative_config() if drafts else None
    config = fake_config(async_scheduling=ahead, speculative=speculative)
    engine = SteppedEngine(config, FakeRunner(config.cache.block_size, next_token), tiny_tokenizer())
    if speculative:
        propose_from(engine.core, NgramProposer(speculative))
    return engine


def run_late(engine: SteppedEngine, delays: list[int]) -> dict[str, RequestOutput]:
    """Run all requests, while the client receives outputs a few steps late. Return each request's merged output."""
    late: deque[list[RequestOutput]] = deque()
    received: dict[str, list[RequestOutput]] = {}
    for step in range(1000):
        late.append(engine.core.step() if engine.has_requests else [])
        while late and (len(late) > delays[step % len(delays)] or not engine.has_requests):
            for output in engine.client.receive(late.popleft()):
                received.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
        if not engine.has_requests and not late:
            break
    assert not engine.request_ids and engine.stats.num_used_blocks == 0
    return {request_id: merge_outputs(outputs) for request_id, outputs in received.items()}


def counts_of(engine: SteppedEngine) -> tuple[Any, ...]:
    metrics = engine.metrics
    assert not metrics._times
    return (
        dict(metrics.num_finished),
        metrics.generation_tokens.counts,
        metrics.generation_tokens.sum,
        metrics.num_generation_tokens - metrics._num_beyond_stop,
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_and_metrics_do_not_depend_on_the_lag_of_the_client(ahead: bool, drafts: bool, seed: int) -> None:
    """Text, tokens, counts and metrics do not depend on the time at which a stop string is found."""
    rng = random.Random(seed)
    next_token = repeated if drafts else hash_chain
    requests = []
    for i in range(12):
        prompt = byte_ids(f"prompt {i} " * rng.randint(1, 4))
        text = bytes(generated(prompt, 30, next_token)).decode()
        begin = rng.randrange(25)
        stop = (text[begin : begin + rng.randint(1, 4)], "never found")[: rng.randint(0, 2)]
        requests.append(
            (prompt, SamplingParams(max_tokens=rng.randint(1, 30), stop=stop, min_tokens=rng.choice([0, 1])))
        )
    found, counts = [], []
    for delays in ([0], [1], [rng.randint(0, 9) for _ in range(7)], [50]):
        engine = make_engine(next_token, ahead=ahead, drafts=drafts)
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(str(i), engine.prepare(prompt, params))
        found.append(run_late(engine, delays))
        counts.append(counts_of(engine))
    assert not drafts or any(engine.metrics.num_accepted_tokens)
    assert all(outputs == found[0] for outputs in found) and all(one == counts[0] for one in counts)
    assert {output.finish_reason for output in found[0].values()} == {"stop", "length"}


def test_tokens_after_a_stop_string_are_subtracted_later() -> None:
    """The count of tokens never decreases."""
    engine = make_engine()
    engine.add_request("a", engine.prepare(byte_ids("prompt"), SamplingParams(max_tokens=40, stop=TEXT[4:6])))
    (*_, last) = engine.client.receive([output for _ in range(10) for output in engine.core.step()])
    assert (last.stop_reason, last.num_output_tokens) == (TEXT[4:6], 6)
    assert engine.metrics.num_generation_tokens == 10 and engine.metrics.num_finished["stop"] == 1
    assert not engine.has_requests
    engine.add_request("b", engine.prepare(byte_ids("prompt"), SamplingParams(max_tokens=9)))
    totals = [10]
    while engine.has_requests:
        engine.step()
        totals.append(engine.metrics.num_generation_tokens)
    assert totals == [10, 10, 10, 10, 10, 11, 12, 13, 14, 15]


def test_late_outputs_of_an_aborted_request_are_discarded() -> None:
    """The client uses the id again, while outputs of the aborted request are on their way."""
    engine = make_engine()
    engine.add_request("a", engine.prepare(byte_ids("old"), SamplingParams(max_tokens=20)))
    old = engine.core.step() + engine.core.step()
    engine.abort_request("a")
    engine.add_request("a", engine.prepare(byte_ids("prompt"), SamplingParams(max_tokens=4)))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("a", engine.prepare(byte_ids("third"), SamplingParams()))
    assert len(old) == 2 and engine.client.receive(old) == []
    assert run_late(engine, [0])["a"].text == TEXT[:4]


def test_tokens_that_cannot_be_decoded_fail_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    for request_id, prompt in (("a", "prompt"), ("b", "a prompt")):
        engine.add_request(request_id, engine.prepare(byte_ids(prompt), SamplingParams(max_tokens=3)))
    add, (bad,) = Detokenizer.add, generated(byte_ids("a prompt"), 1)
    monkeypatch.setattr(Detokenizer, "add", lambda text, token_id: 1 / 0 if token_id == bad else add(text, token_id))
    outputs = run_late(engine, [0])
    assert outputs["a"].text == TEXT[:3]
    assert outputs["b"].finish_reason == "error" and "cannot be decoded: division" in (outputs["b"].error or "")
    assert engine.metrics.num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}


def test_pooled_vectors_pass_through() -> None:
    engine = make_engine()
    (prepared,) = engine.prepare_pooling([byte_ids("prompt")], PoolingParams(pooling_type="LAST"))
    engine.add_request("a", prepared)
    (output,) = engine.step()
    assert output.request_id == "a" and output.pooled is not None and output.finished
    assert not engine.request_ids and engine.metrics.num_finished["stop"] == 1
