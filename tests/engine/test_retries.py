"""Requests of failed steps are computed again, and a request that makes every step fail is found."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput, merge_outputs
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import KVCacheLostError, RunnerLostError
from tests.support.mixed_requests import MODELS, MODES, add_mixed, check_equal
from tests.support.running import add_all, drain
from tests.support.sweeps import sweep
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import FakeRunner, byte_ids, fake_config, generated, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine

# --- requests that make steps fail --------------------------------------------------------------------------

INNOCENTS = [byte_ids(f"an innocent request, number {i}"[i:]) for i in range(8)]
KILLER = byte_ids("kills the step")
SHORT = SamplingParams(max_tokens=9)


def fake(**config: Any) -> SteppedEngine:
    resolved = fake_config(**config)
    return SteppedEngine(resolved, FakeRunner(resolved.cache.block_size), tiny_tokenizer())


def merged(engine: SteppedEngine) -> dict[str, RequestOutput]:
    """Run all requests to their end. Return each request's merged output."""
    return {request_id: merge_outputs(outputs) for request_id, outputs in drain(engine).items()}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("error", [RuntimeError, KVCacheLostError])
@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 12, "num_blocks": 16, "max_num_seqs": 4}])
@pytest.mark.parametrize("place", [0, 4, 8])
def test_only_the_request_that_makes_steps_fail_gets_an_error(
    place: int, config: dict[str, int], error: type[Exception], num_tokens: int, ahead: bool
) -> None:
    """The request has ``num_tokens`` tokens, and each step that computes its next token fails."""
    engine = fake(async_scheduling=ahead, **config)
    engine.runner.error_for = lambda tokens: (
        error("killed") if tokens[: len(KILLER)] == KILLER and len(tokens) == len(KILLER) + num_tokens else None
    )
    prompts = [*INNOCENTS[:place], KILLER, *INNOCENTS[place:]]
    add_all(engine, [(prompt, SHORT) for prompt in prompts])
    outputs = merged(engine)
    for i, prompt in enumerate(prompts):
        if prompt is KILLER:
            assert (outputs[str(i)].error or "").endswith(f"failed: {error.__name__}: killed")
        else:
            assert outputs[str(i)].token_ids == generated(prompt, 9)
    metrics = engine.metrics
    assert (metrics.num_failed_steps, metrics.num_finished["error"], metrics.num_finished["length"]) == (3, 1, 8)
    assert metrics.num_retried_requests >= 2


def test_all_requests_fail_if_every_step_fails() -> None:
    engine = fake()
    engine.runner.error_for = lambda tokens: RuntimeError("gone")
    add_all(engine, [(prompt[:5], SHORT) for prompt in INNOCENTS])
    (pooled,) = engine.prepare_pooling([byte_ids("pooled")], PoolingParams(pooling_type="LAST"))
    engine.add_request("8", pooled)
    outputs = merged(engine)
    assert [outputs[str(i)].finish_reason for i in range(9)] == ["error"] * 9
    assert engine.metrics.num_failed_steps == 2 + 9, "two steps of all requests, then each request alone"
    engine.runner.error_for = None
    engine.add_request("after", engine.prepare(KILLER, SHORT))
    assert merged(engine)["after"].token_ids == generated(KILLER, 9)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KVCacheLostError])
def test_a_replaceable_engine_ends_before_a_request_fails(error: type[Exception], ahead: bool) -> None:
    engine = fake(async_scheduling=ahead)
    engine.core.is_replaceable = True
    add_all(engine, [(prompt[:5], SamplingParams(max_tokens=90)) for prompt in INNOCENTS])
    for _ in range(2):  # a step between failed steps shows that the device works
        for _ in range(2):
            engine.runner.raise_next = error("gone")
            engine.step()
        progressed: set[str] = set()
        while len(progressed) < len(INNOCENTS):
            progressed |= {output.request_id for output in engine.step()}
    engine.runner.error_for = lambda tokens: error("gone")
    with pytest.raises(RunnerLostError, match=f"3 steps in a row have failed, the last with {error.__name__}: gone"):
        for _ in range(6):
            assert not any(output.error for output in engine.step())
    assert len(engine.request_ids) == 8


def test_only_errors_of_the_device_end_a_replaceable_engine() -> None:
    engine = fake()
    engine.core.is_replaceable = True
    engine.runner.error_for = lambda tokens: ValueError("a bug") if tokens[: len(KILLER)] == KILLER else None
    add_all(engine, [(KILLER, SHORT)] * 2)
    assert [output.finish_reason for output in merged(engine).values()] == ["error", "error"]


def test_a_token_clears_a_request_of_suspicion() -> None:
    """Two steps fail before each token of the request."""
    engine = fake()
    failures: dict[int, int] = {}

    def error_for(tokens: list[int]) -> Exception | None:
        failures[len(tokens)] = failures.get(len(tokens), 0) + 1
        return RuntimeError("transient") if failures[len(tokens)] <= 2 else None

    engine.runner.error_for = error_for
    engine.add_request("a", engine.prepare(byte_ids("prompt"), SHORT))
    assert merged(engine)["a"].token_ids == generated(byte_ids("prompt"), 9)
    assert engine.metrics.num_failed_steps == engine.metrics.num_retried_requests == 18


def test_a_suspect_that_leaves_makes_room_for_the_next() -> None:
    engine = fake()
    engine.runner.error_for = lambda tokens: RuntimeError("failed")
    add_all(engine, [(prompt, SHORT) for prompt in INNOCENTS[:3]])
    assert engine.step() == engine.step() == []
    engine.runner.error_for = None
    engine.scheduler.config = replace(engine.scheduler.config, max_num_batched_tokens=4)
    engine.step()
    assert len(engine.scheduler.running) == 1
    engine.abort_request("0")
    engine.add_request("new", engine.prepare(byte_ids("new"), SHORT))
    outputs = merged(engine)
    assert outputs.keys() == {"1", "2", "new"}
    assert all(outputs[str(i)].token_ids == generated(INNOCENTS[i], 9) for i in (1, 2))


@pytest.mark.parametrize(
    ("model", "mode", "seed"),
    sweep(product(MODELS, MODES, range(2)), [("attention", "drafts", 0), ("recurrent", "drafts ahead", 0)]),
)
def test_steps_that_fail_at_random(model: str, mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4% of steps fail, while they are built or on the device. No step with a suspect fails.

    Steps without drafts are tested in tests/engine/test_failures_stateful.py.
    """
    engine = tiny_engine(**MODELS[model], **MODES[mode], max_num_batched_tokens=24, num_blocks=64)
    rng = random.Random(seed)

    def fail(where: str) -> None:
        if rng.random() < 0.02 and not any(request.is_suspect for request in engine.scheduler.requests.values()):
            raise RuntimeError(where)

    for owner, name in ((ModelRunner, "_build"), (PendingStep, "wait")):
        original = getattr(owner, name)

        def call(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            fail(name)
            return result

        monkeypatch.setattr(owner, name, call)
    for _ in range(3):
        engine.client._seeds.seed(engine.config.seed)
        add_mixed(engine)
        check_equal(drain(engine), model)
    assert engine.metrics.num_failed_steps and not engine.runner._steps  # type: ignore[attr-defined]
    assert engine.metrics.num_finished["error"] == 0
