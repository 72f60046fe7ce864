"""Compares the engine's tokens with mlx-lm's, for architectures that use caches in an unusual way."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.models.own_caches_model import OwnCachesModel
from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.tiny_engine import greedy_tokens, run_all, tiny_engine, tiny_reference, token_ids
from tools.fixtures.architectures import OWN_CACHES
from tools.fixtures.fake_engine import VOCAB_SIZE

REPLAYED = ["afm7", "baichuan_m1", "gpt_bigcode", "iquestloopcoder", "llama4", "longcat_flash_ngram", "plamo", "plamo2"]
ARCHITECTURES = [*REPLAYED, "deepseek_v32", "glm_moe_dsa", "minimax_m3_vl"]
NUM_TOKENS = 6
ARRAYS_OF_A_REQUEST = 6 * 5  # at most, in deepseek_v41's caches
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Longer than the windows and chunks of the tiny configurations. The requests end in different steps.
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB_SIZE, n).tolist() for n in (5, 23, 1, 40, 17)]


@cache
def mlx_lms_tokens(architecture: str, dtype: mx.Dtype = mx.float32) -> list[list[int]]:
    model = tiny_reference(architecture=architecture, dtype=dtype)
    return [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def engine_of(architecture: str, **config: Any) -> Any:
    defaults = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 256, "max_model_len": 512, "num_state_slots": 24}
    return tiny_engine(architecture=architecture, **{**defaults, **config})


def outputs_of(engine: Any, num_prompts: int = len(PROMPTS)) -> tuple[list[list[int]], int]:
    """Return the tokens of the first requests, and the number of prompt tokens that came from the prefix cache."""
    outputs = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS[:num_prompts]])
    return [token_ids(own) for own in outputs], sum(own[-1].num_cached_tokens for own in outputs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_of_odd_sizes_then_cached_prefixes(architecture: str) -> None:
    engine = engine_of(architecture, max_num_batched_tokens=7)
    assert outputs_of(engine) == (mlx_lms_tokens(architecture), 0)
    tokens, num_cached = outputs_of(engine)
    assert tokens == mlx_lms_tokens(architecture)
    assert num_cached > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_preempted_requests_and_steps_planned_ahead(architecture: str) -> None:
    engine = engine_of(architecture, ahead=True, num_blocks=22)
    assert outputs_of(engine)[0] == mlx_lms_tokens(architecture)
    assert engine.scheduler.num_preemptions


@pytest.mark.parametrize("architecture", OWN_CACHES)
def test_alone_in_chunks_then_preempted_ahead_then_after_a_failed_step(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run requests one after another over mlx-lm's own caches, without a prefix cache. Their memory is released."""
    engine = engine_of(architecture, max_num_batched_tokens=7, enable_prefix_caching=False)
    assert outputs_of(engine, 3) == (mlx_lms_tokens(architecture)[:3], 0)
    engine = engine_of(architecture, behind=True, num_blocks=22, enable_prefix_caching=False)
    assert outputs_of(engine)[0] == mlx_lms_tokens(architecture)
    assert engine.scheduler.num_preemptions
    assert not engine.runner.pool.own_caches.pending()  # no step comes after the last request
    engine = engine_of(architecture, enable_prefix_caching=False)
    original, calls = OwnCachesModel.forward, iter(range(100))

    def fail_after_the_forward(self: OwnCachesModel, *args: Any) -> Any:
        result = original(self, *args)
        if next(calls) == 5:
            raise RuntimeError("a failed step")
        return result

    monkeypatch.setattr(OwnCachesModel, "forward", fail_after_the_forward)
    assert outputs_of(engine, 2)[0] == mlx_lms_tokens(architecture)[:2]
    assert engine.metrics.num_failed_steps == 1


@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("architecture", OWN_CACHES)
def test_alone_beside_a_grammar_a_stop_string_and_an_abort(architecture: str, dtype: mx.Dtype) -> None:
    """All prompts fit into a step, so that mlx-lm computes the same chunks, and rounds in the same way."""
    engine = engine_of(architecture, dtype=dtype, max_num_batched_tokens=256, enable_prefix_caching=False)
    expected = mlx_lms_tokens(architecture, dtype)
    plain = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    streamed = ["".join(output.text for output in outputs) for outputs in plain]  # stop strings are found in it
    text, prompt = max(zip(streamed, PROMPTS, strict=True), key=lambda one: len(one[0]))
    grammar = StructuredOutputsParams(regex="[a-c]{7}")
    requests = {
        "stopped": (prompt, replace(GREEDY, stop=[text[-2:]])),
        "aborted": (PROMPTS[3], replace(GREEDY, max_tokens=400)),
        "in the grammar": (PROMPTS[0], SamplingParams(temperature=1.0, seed=1, structured_outputs=grammar)),
        "plain": (PROMPTS[4], GREEDY),
    }
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in requests}
    for name, request in requests.items():
        engine.add_request(name, engine.prepare(*request))
    num_steps = 0
    while engine.has_requests:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_integrity()
        num_steps += 1
        if num_steps == 3:
            engine.abort_request("aborted")
        if num_steps == 4:
            assert len(engine.runner.pool.own_caches.pending()) <= ARRAYS_OF_A_REQUEST * len(engine.request_ids)
    texts = {name: "".join(output.text for output in parts) for name, parts in outputs.items()}
    assert texts["stopped"] == text[: text.index(text[-2:])]
    assert outputs["stopped"][-1].finish_reason == outputs["in the grammar"][-1].finish_reason == "stop"
    assert re.fullmatch("[a-c]{7}", texts["in the grammar"])
    assert token_ids(outputs["plain"]) == expected[4]
    assert not outputs["aborted"][-1].finish_reason
    assert not engine.runner.pool.own_caches.pending()
    assert engine.scheduler.blocks.num_used_blocks == 0


@pytest.mark.parametrize("architecture", REPLAYED)
def test_replayed_decodes(architecture: str) -> None:
    """Two requests, whose decodes all have the same sizes: MLX compiles each traced size."""
    engine = engine_of(architecture, replay=True)
    assert outputs_of(engine, 2)[0] == mlx_lms_tokens(architecture)[:2]
    assert engine.metrics.num_decode_forwards["replayed"] >= NUM_TOKENS - 4
