"""Late grammar masks: only the output with the late mask skips steps, and its tokens stay the same."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.forks.channel import framed
from metal_engine.grammars import grammar_client as compiled_module
from metal_engine.grammars.grammar_client import CompiledGrammar, GrammarMatcher
from metal_engine.grammars.messages import MASK, MASK_ALONE, pack_masks
from metal_engine.runner import step_sampling
from metal_engine.runner.grammar_masks import apply_masks
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.sweeps import diagonal
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.fixtures.fake_engine import byte_ids

NUM_WORDS = 8


@pytest.fixture
def grammar() -> Iterator[tuple[CompiledGrammar, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield CompiledGrammar(ours, NUM_WORDS * 32, 0.0, reopen=lambda: ours), theirs
    theirs.close()


def test_a_late_mask_is_returned_by_a_later_call(grammar: tuple[CompiledGrammar, socket.socket]) -> None:
    compiled, process = grammar
    matcher = compiled.matcher()
    matcher.consume([1, 2])
    mask = np.zeros(NUM_WORDS, np.int32)
    for deadline in (0.0, time.monotonic(), time.monotonic() + 0.01):
        assert not matcher.fill_mask(mask, deadline)
    assert not mask.any()
    process.sendall(framed(pack_masks(MASK, [np.full(NUM_WORDS, 7, np.int32).tobytes()])))
    assert matcher.fill_mask(mask, math.inf) and (mask == 7).all()
    assert len(process.recv(1 << 16)) < 50  # only one request was sent


def test_masks_apply_on_a_cpu_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert apply_masks(mx.zeros((1, 3)), np.array([[5]], np.int32)).tolist() == [[0.0, -math.inf, 0.0]]


@pytest.mark.parametrize("num_more_words", [0, 1])
def test_masks_after_drafts_may_be_wider_than_the_logits(
    grammar: tuple[CompiledGrammar, socket.socket], num_more_words: int
) -> None:
    compiled, process = grammar
    matcher = compiled.matcher()
    matcher.consume([1], [2, 3])
    masks = [np.full(NUM_WORDS + num_more_words, value, np.int32) for value in (5, 6)]  # the third is too complex
    process.sendall(framed(pack_masks(MASK, [one.tobytes() for one in masks])))
    mask = np.zeros(NUM_WORDS, np.int32)
    for num_drafts, value in ((0, 5), (1, 6), (0, 5)):
        assert matcher.fill_mask(mask, math.inf, num_drafts) and (mask == value).all()
    with pytest.raises(ValueError, match="too complex"):
        matcher.fill_mask(mask, math.inf, 2)


def test_that_masks_after_drafts_have_ended_is_logged_once(
    grammar: tuple[CompiledGrammar, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """The warning is logged once per grammar, even for several processes. New outputs may still use the grammar."""
    compiled, process = grammar
    matcher, mask = compiled.matcher(), np.zeros(NUM_WORDS, np.int32)
    for _ in range(3):
        matcher.consume([1], [2])
        process.sendall(framed(pack_masks(MASK_ALONE, [np.full(NUM_WORDS, 5, np.int32).tobytes()])))
        assert matcher.fill_mask(mask, math.inf) and (mask == 5).all()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "keep no drafts" in caplog.text
    assert not compiled.needs_replacement


def test_a_grammar_process_that_never_responds_fails_the_output(
    grammar: tuple[CompiledGrammar, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that has arrived counts, even if it is read after the time limit."""
    monkeypatch.setattr(compiled_module, "_ANSWER_SECONDS", 0.0)
    compiled, process = grammar
    matcher, mask = compiled.matcher(), np.zeros(NUM_WORDS, np.int32)
    matcher.consume([1])
    process.sendall(framed(pack_masks(MASK, [np.full(NUM_WORDS, 7, np.int32).tobytes()])))
    assert matcher.fill_mask(mask, math.inf) and (mask == 7).all()
    with pytest.raises(ValueError, match="too complex"):
        compiled.matcher().fill_mask(mask, math.inf)
    assert compiled.needs_replacement


@pytest.mark.parametrize(("ahead", "block_size"), diagonal([False, True], [1, 4, 16]))
def test_outputs_that_skip_steps_for_late_masks_keep_the_same_tokens(
    ahead: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(max_tokens=25, temperature=0.8, **fields)

    following = params(seed=3, structured_outputs=StructuredOutputsParams(regex="[a-z]{40}"), logprobs=2)
    penalized = params(seed=4, structured_outputs=StructuredOutputsParams(regex="[0-9]{9}x*"), repetition_penalty=1.2)
    requests = [
        (byte_ids("a prompt of some length"), following),
        (byte_ids("b"), params(seed=5)),
        (byte_ids("a prompt of some length, and on"), penalized),
        (byte_ids("sixteen tokens.."), following),
    ]
    sizes = {"block_size": block_size, "num_blocks": 400 // block_size, "max_num_batched_tokens": 16}
    one_by_one = tiny_engine(enable_prefix_caching=False, **sizes)
    alone = [run_all(one_by_one, [request])[0] for request in requests]

    fill_mask, calls = GrammarMatcher.fill_mask, iter(range(1 << 30))
    monkeypatch.setattr(
        GrammarMatcher,
        "fill_mask",
        lambda self, mask, deadline, num_drafts: next(calls) % 5 in (1, 3) and fill_mask(self, mask, math.inf),
    )
    engine = tiny_engine(ahead=ahead, **sizes)
    together = run_all(engine, requests)
    assert [token_ids(outputs) for outputs in together] == [token_ids(outputs) for outputs in alone]
    assert [outputs[-1].finish_reason for outputs in together] == [outputs[-1].finish_reason for outputs in alone]
    for a, b in zip(together, alone, strict=True):
        ours, theirs = ([lp.logprob for o in outputs for lp in o.logprobs or ()] for outputs in (a, b))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert engine.metrics.num_late_masks > 20
    assert engine.stats.num_used_blocks == 0


def test_all_grammars_of_a_step_share_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for late masks only once, regardless of the number of late outputs."""
    engine = tiny_engine()
    asked: list[list[float]] = []

    def late(self: GrammarMatcher, mask: np.ndarray, deadline: float, num_drafts: int) -> bool:
        asked[-1].append(deadline - time.monotonic())
        return False

    monkeypatch.setattr(GrammarMatcher, "fill_mask", late)
    params = SamplingParams(n=8, max_tokens=5, structured_outputs=StructuredOutputsParams(regex="[a-z]{9}"))
    prepared = engine.prepare(byte_ids("a"), params)
    for i in range(8):
        engine.add_request(f"slow{i}", prepared, index=i)
    engine.add_request("quick", engine.prepare(byte_ids("b"), SamplingParams(max_tokens=20, temperature=0)))
    outputs = []
    while "quick" in engine.request_ids:
        asked.append([])
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs if output.request_id == "quick") == 20
    assert {output.request_id for output in outputs} == {"quick"}
    waits = [waits for waits in asked if waits]
    assert len(waits) >= 20
    for seconds in waits:
        first, again = seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]
        assert sorted(seconds, reverse=True) == seconds and first[0] <= step_sampling._MASK_SECONDS and again[0] <= 0
    for i in range(8):
        engine.abort_request(f"slow{i}")
    assert engine.stats.num_used_blocks == 0
