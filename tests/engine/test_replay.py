"""Replayed decode steps on MLX's CPU backend: same tokens as built steps, and no leftover memory."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from metal_engine.kv_cache.rows import step_rows
from metal_engine.models.paged_model import PagedModel
from metal_engine.pooling_params import PoolingParams
from metal_engine.runner import replay
from metal_engine.runner.pending_step import PendingStep
from metal_engine.runner.replay import DecodeReplay, padded
from metal_engine.sampling_params import SamplingParams
from tests.engine.test_failed_steps import Fault, run_with_fault
from tests.engine.test_quantized_kv import model_of
from tests.support import adapters
from tests.support.demo import engine_for
from tests.support.running import add_all, drain, run
from tests.support.speculation import KnownOutputs, draft_for_free, propose_from, speculative_config
from tests.support.sweeps import diagonal
from tests.support.tiny_engine import run_pooling, tiny_reference, token_ids
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import tiny_model

VOCAB_SIZE = 97
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate((5, 23, 1, 40, 9, 31))]
# Each request ends at a different time, so that steps get fewer rows.
EACH = [SamplingParams(temperature=0.0, max_tokens=6 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]


def tiny(model: nn.Module, *, kv_cache_dtype: str = "auto", replay: bool = True, **sizes: Any) -> SteppedEngine:
    defaults = {"budget": 64, "block_size": 8, "num_blocks": 64, "max_num_seqs": 8, "vocab_size": VOCAB_SIZE}
    paged = PagedModel(model, kv_cache_dtype=kv_cache_dtype)
    return engine_for(paged, tiny_tokenizer(), replay=replay, **{**defaults, **sizes})


def replay_of(engine: SteppedEngine) -> DecodeReplay:
    found = engine.runner.replay  # type: ignore[attr-defined]
    assert isinstance(found, DecodeReplay)
    return found


def num_replayed(engine: SteppedEngine) -> int:
    """Return the number of steps that ran through a trace, including each trace's first run."""
    forwards = engine.metrics.num_decode_forwards
    return forwards["replayed"] + forwards["traced"]


MODELS = [
    pytest.param("llama", "auto", id="plain"),
    pytest.param("gemma3_text", "auto", id="windows"),
    pytest.param("deepseek_v3", "auto", id="latents, experts"),
    pytest.param("llama", "int8", id="int8"),
    pytest.param("deepseek_v3", "int4", id="int4 latents"),
    pytest.param("qwen3_next", "auto", id="recurrent"),
]


DISPATCH = [
    pytest.param({}, id="one by one"),
    pytest.param({"ahead": True}, id="one ahead"),
    pytest.param({"ahead": True, "behind": True}, id="behind"),
]


@pytest.mark.parametrize(("name", "kv_cache_dtype", "dispatch"), diagonal(MODELS, DISPATCH))
def test_equal_outputs(name: str, kv_cache_dtype: str, dispatch: dict[str, bool]) -> None:
    expected = run(tiny(model_of(name), kv_cache_dtype=kv_cache_dtype, replay=False), PROMPTS, EACH)
    engine = tiny(model_of(name), kv_cache_dtype=kv_cache_dtype, num_blocks=20, **dispatch)
    assert run(engine, PROMPTS, EACH) == expected
    assert engine.metrics.num_decode_forwards["replayed"] > 10
    assert replay_of(engine).num_traces > 2


@pytest.mark.parametrize(("name", "kv_cache_dtype"), MODELS)
def test_equal_outputs_with_padded_rows(name: str, kv_cache_dtype: str) -> None:
    """Steps of eleven requests are padded to twelve rows, and to ten rows when two requests have ended."""
    eleven = [[*prompt, i] for i, prompt in enumerate([*PROMPTS, *PROMPTS[:5]])]
    each = [SamplingParams(temperature=0.0, max_tokens=8 + i, ignore_eos=True) for i in range(11)]
    sizes: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 11, "budget": 512, "num_blocks": 96}
    expected = run(tiny(model_of(name), replay=False, **sizes), eleven, each)
    engine = tiny(model_of(name), ahead=True, behind=True, **sizes)
    assert run(engine, eleven, each) == expected
    assert engine.metrics.num_decode_forwards["replayed"] > 5


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
def test_verifications_of_drafts(ahead: bool) -> None:
    """Drafts have different lengths, and some are rejected. With async scheduling, some steps have no drafts."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = run(tiny(model_of("llama"), replay=False), PROMPTS, greedy)
    speculative = speculative_config(3, longest=3, shortest=1)
    engine = tiny(model_of("llama"), speculative=speculative, ahead=ahead)
    propose_from(engine, KnownOutputs({tuple(p): o for p, o in zip(PROMPTS, expected, strict=True)}))
    if not ahead:  # with async scheduling, drafts pay only if most are right
        draft_for_free(engine)
    assert run(engine, PROMPTS, greedy) == expected
    metrics = engine.metrics
    assert sum(metrics.num_accepted_tokens) > 0
    assert ahead or sum(metrics.num_accepted_tokens) < metrics.num_draft_tokens
    assert metrics.num_decode_forwards["replayed"] > 3


# --- steps that are built ---


class Evaluating(nn.Module):
    """Layer that reads its values, which a trace does not have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        assert x.max().item() < 1e30
        return self.inner(x)


def test_a_model_that_cannot_be_traced_is_built(caplog: pytest.LogCaptureFixture) -> None:
    expected = run(tiny(model_of("llama"), replay=False), PROMPTS, EACH)
    model: Any = model_of("llama")
    model.model.layers[1].mlp = Evaluating(model.model.layers[1].mlp)
    engine = tiny(model)
    with caplog.at_level(logging.WARNING, replay.__name__):
        assert run(engine, PROMPTS, EACH) == expected
    assert len([r for r in caplog.records if r.name == replay.__name__]) == 1
    refusal = engine.metrics.replay_refusal
    assert refusal is not None and "cannot be traced" in refusal
    assert set(engine.metrics.num_decode_forwards) <= {"refused", "untraced"}
    assert replay_of(engine).num_traces == 0


@pytest.mark.parametrize("is_late", [False, True], ids=["from the start", "later"])
def test_replay_is_off_if_mlx_compilation_is_disabled(is_late: bool) -> None:
    """Without compilation, MLX returns functions unchanged. All steps are then built."""
    expected = run(tiny(model_of("llama"), replay=False), PROMPTS, EACH)
    engine = tiny(model_of("llama"), ahead=True)
    if is_late:
        assert run(engine, PROMPTS, EACH) == expected and engine.metrics.num_decode_forwards["replayed"] > 10
    engine.metrics.num_decode_forwards.clear()
    mx.disable_compile()
    try:
        assert run(engine, PROMPTS, EACH) == expected
    finally:
        mx.enable_compile()
    assert engine.metrics.replay_refusal == "MLX compiles nothing"
    assert engine.metrics.num_decode_forwards["replayed"] == 0 and engine.metrics.num_decode_forwards["refused"] > 10
    assert replay_of(engine).num_traces == 0


@pytest.mark.own_process
@pytest.mark.parametrize("dispatch", [pytest.param({}, id="one by one", marks=pytest.mark.full), *DISPATCH[1:]])
def test_a_trace_that_fails_at_first_is_the_last(dispatch: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may refuse a fused kernel. Without disabling replay, steps would fail each time that sizes are traced."""
    fault = Fault()
    model = tiny_model(num_hidden_layers=4, vocab_size=300)
    fault.install(model, monkeypatch)
    sizes = {"vocab_size": 300, "max_num_seqs": 3, **dispatch}
    expected = run_with_fault(tiny(model, replay=False, **sizes), fault, "", 1000)
    engine = tiny(model, **sizes)
    kept = replay_of(engine)
    function = kept._function

    def failing(*step: Any) -> Any:
        fault.kind = "eval"
        return function(*step)

    monkeypatch.setattr(kept, "_function", failing)
    assert run_with_fault(engine, fault, "", 1000) == expected
    assert engine.metrics.num_failed_steps == 1
    refusal = engine.metrics.replay_refusal
    assert refusal is not None and "failed that was replayed for the first time" in refusal
    assert kept.num_traces == 0 and engine.metrics.num_decode_forwards["refused"] > 0


@pytest.mark.own_process
@pytest.mark.parametrize(("dispatch", "point"), diagonal(DISPATCH, ["tokens", "logits"]))
def test_replayed_steps_that_fail_at_either_end(
    dispatch: dict[str, bool], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures in the middle of a replayed step and in other steps are tested in tests/engine/test_failed_steps.py."""
    fault = Fault(point)
    model = tiny_model(num_hidden_layers=4, vocab_size=300)
    fault.install(model, monkeypatch)
    sizes = {"vocab_size": 300, "max_num_seqs": 3, **dispatch}
    expected = run_with_fault(tiny(model, replay=False, **sizes), fault, "", 1000)
    engine = tiny(model, **sizes)
    assert run_with_fault(engine, fault, "", 1000) == expected
    assert run_with_fault(engine, fault, "eval", 5) == expected
    assert fault.num_replayed == 1 and engine.metrics.num_failed_steps == 1
    assert run_with_fault(engine, fault, "", 1000) == expected
    assert engine.metrics.replay_refusal is None and replay_of(engine).num_traces > 0


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_traces_are_built_again_after_a_replayed_step_fails(
    dispatch: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny(model_of("llama"), **dispatch)
    expected = run(engine, PROMPTS, EACH)
    kept = replay_of(engine)
    num_traces, num_at_failure = kept.num_traces, []
    wait = PendingStep.wait

    def fails_once(step: PendingStep) -> None:
        wait(step)
        if step.decode_forward is not None and step.decode_forward.outcome == "replayed":
            monkeypatch.setattr(PendingStep, "wait", wait)
            num_at_failure.append(kept.num_traces)
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(PendingStep, "wait", fails_once)
    add_all(engine, zip(PROMPTS, EACH, strict=True))
    while not engine.metrics.num_failed_steps:
        engine.step()
    assert num_at_failure == [num_traces] and kept.num_traces == 0 and kept.refusal is None
    drain(engine)
    assert run(engine, PROMPTS, EACH) == expected
    assert engine.metrics.replay_refusal is None and kept.num_traces > 2


@pytest.mark.parametrize("outcome", [None, "untraced", "replayed"], ids=["prefill", "built", "replayed"])
@pytest.mark.parametrize("behind", [False, True], ids=["one ahead", "behind"])
def test_a_trace_is_not_blamed_for_the_step_before(
    behind: bool, outcome: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the failed step was traced. It may be the cause only if it ran behind a replayed step."""
    engine = tiny(model_of("llama"), ahead=True, behind=behind)
    expected = run(engine, PROMPTS, EACH)
    kept, runner = replay_of(engine), engine.runner
    kept.drop_traces()
    if outcome == "untraced":
        kept._trace_at = 2
    wait = PendingStep.wait
    is_dispatched: list[bool] = []

    def fails_once(step: PendingStep) -> None:
        wait(step)
        found = step.decode_forward and step.decode_forward.outcome
        steps: Any = runner._steps  # type: ignore[attr-defined]
        after = [s for s in steps if s is not step and s.decode_forward and s.decode_forward.outcome == "traced"]
        if not is_dispatched and found == outcome and after:
            is_dispatched.append(after[0].is_dispatched)
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(PendingStep, "wait", fails_once)
    add_all(engine, zip(PROMPTS, EACH, strict=True))
    drain(engine)
    assert is_dispatched == [behind] and engine.metrics.num_failed_steps == 1
    is_blamed = behind and outcome == "replayed"
    assert (kept.refusal is not None) == is_blamed
    assert run(engine, PROMPTS, EACH) == expected
    assert (kept.num_traces > 2) == (engine.metrics.replay_refusal is None) == (not is_blamed)


def test_a_step_that_cannot_be_built_either_does_not_speak_against_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(vocab_size=VOCAB_SIZE)
    mlp = type(model.layers[1].mlp)
    call, is_broken = mlp.__call__, False

    def breaking(self: Any, x: mx.array) -> mx.array:
        if is_broken:
            raise RuntimeError("refused while building")
        return call(self, x)

    monkeypatch.setattr(mlp, "__call__", breaking)
    engine = tiny(model)
    add_all(engine, zip(PROMPTS, EACH, strict=True))
    while not engine.metrics.num_decode_forwards:
        engine.step()
    replay_of(engine).drop_traces()
    is_broken = True
    assert not engine.step() and engine.metrics.num_failed_steps == 1
    is_broken = False
    drain(engine)
    expected = run(tiny(model, replay=False), PROMPTS, EACH)
    assert run(engine, PROMPTS, EACH) == expected
    assert engine.metrics.replay_refusal is None and engine.metrics.num_decode_forwards["replayed"] > 10


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_a_trace_that_raises_is_dropped(dispatch: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    """The failed step is built instead, and so are later steps of the same size. Other traces stay in use."""
    engine = tiny(model_of("llama"), **dispatch)
    expected = run(engine, PROMPTS, EACH)
    kept = replay_of(engine)
    key = list(kept._traces)[-1]
    others = dict(list(kept._traces.items())[:-1])
    num_calls = 0

    def broken(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("it cannot be replayed")

    kept._traces[key] = broken
    engine.metrics.num_decode_forwards.clear()
    with caplog.at_level(logging.WARNING, replay.__name__):
        for _ in range(3):
            assert run(engine, PROMPTS, EACH) == expected
    assert len([r for r in caplog.records if "it cannot be replayed" in r.message]) == num_calls == 1
    assert engine.metrics.num_failed_steps == 0 and engine.metrics.replay_refusal is None
    assert engine.metrics.num_decode_forwards["untraced"] >= 3 and engine.metrics.num_decode_forwards["replayed"] > 10
    assert kept._traces == others


@pytest.mark.parametrize("outcome", ["traced", "replayed"])
def test_states_are_not_carried_on_twice(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is built after a failed replay starts from the states before the replay."""
    expected = run(tiny(model_of("qwen3_next"), replay=False), PROMPTS, EACH)
    engine = tiny(model_of("qwen3_next"), ahead=True)
    run_trace, num_failed = DecodeReplay._run, 0

    def failing(self: DecodeReplay, *args: Any) -> Any:
        nonlocal num_failed
        num_traces, logits = self._num_runs, run_trace(self, *args)
        if num_failed or (outcome == "traced") != (self._num_runs > num_traces):
            return logits
        num_failed += 1
        raise RuntimeError("too late")

    monkeypatch.setattr(DecodeReplay, "_run", failing)
    assert run(engine, PROMPTS, EACH) == expected
    assert num_failed == 1 and engine.metrics.num_failed_steps == 0
    assert (engine.metrics.replay_refusal is None) == (outcome == "replayed")


def test_requests_that_begin_are_built() -> None:
    """Prompts of one token have no initial state."""
    ones = [[i] for i in range(5)]
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    expected = run(tiny(model_of("qwen3_next"), replay=False), ones, greedy)
    engine = tiny(model_of("qwen3_next"))
    for _ in range(2):  # the engine's first step is built in any case
        assert run(engine, ones, greedy) == expected
    assert engine.metrics.num_decode_forwards == {"untraced": 2, "traced": 1, "replayed": 7}


def test_steps_after_pooled_prompts_are_replayed() -> None:
    engine = tiny(model_of("llama"))
    run_pooling(engine, [(PROMPTS[1], PoolingParams(pooling_type="MEAN"))])
    run(engine, PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert engine.metrics.num_decode_forwards["replayed"] > 5


def test_steps_with_adapters_are_built(tmp_path: Path) -> None:
    weights = adapters.products(tiny_reference(), adapters.ALL, rank=2, seed=1)
    folder = adapters.write_mlx_lm(tmp_path / "one", weights)
    answers: dict[bool, list[list[int]]] = {}
    for is_replayed in (False, True):
        engine = adapters.adapted_engine({"one": folder}, replay=is_replayed)
        answers[is_replayed] = []
        for name in ("one", None):
            greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
            adapter = engine.adapters.find(name) if engine.adapters is not None and name else None
            (prepared,) = engine.prepare_all([[5, 6, 7]], greedy, adapter=adapter)
            engine.add_request("r", prepared)
            answers[is_replayed].append(token_ids(drain(engine)["r"]))
    assert answers[True] == answers[False] and answers[True][0] != answers[True][1]
    assert engine.metrics.num_decode_forwards["adapters"] == 8 and engine.metrics.num_decode_forwards["replayed"] > 4


# --- padding ---


def test_padding_rows_are_requests_of_the_padding_block() -> None:
    table = np.arange(18, dtype=np.int32).reshape(9, 2)
    rows = step_rows(table, np.arange(3, 12, dtype=np.int32), np.ones(9, np.int32), 8)
    step = padded(rows, 99)
    assert step.num_tokens == step.num_requests == 10 and step.block_table.shape == (10, 16)
    np.testing.assert_array_equal(step.slot_mapping, [*rows.slot_mapping, 99 * 8])
    np.testing.assert_array_equal(step.positions, [*rows.positions, 0])
    np.testing.assert_array_equal(step.block_table[:9, :2], table)
    step.validate(100)


@pytest.mark.parametrize("max_num_seqs", [9, 10])
def test_no_more_rows_are_padded_than_states_have_room(max_num_seqs: int) -> None:
    """A step of nine requests is padded to ten if ten states fit. The tenth leaves no state in a real slot."""
    nine = [*PROMPTS, *PROMPTS[:3]]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    sizes = {"max_num_seqs": max_num_seqs, "budget": 256}
    engine = tiny(model_of("qwen3_next"), **sizes)
    assert run(engine, nine, greedy) == run(tiny(model_of("qwen3_next"), replay=False, **sizes), nine, greedy)
    pending = [p for state in replay_of(engine)._pool._recurrent for each in state._pending.values() for p in each]
    assert pending and all(p.values.shape[0] == len(p.slots) == max_num_seqs for p in pending)


# --- leftover memory ---


def decode(engine: SteppedEngine, num_tokens: int = 40) -> None:
    run(engine, PROMPTS, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))


def test_traces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_TRACES", 3)
    engine = tiny(model_of("llama"))
    kept = replay_of(engine)
    for _ in range(2):
        run(engine, PROMPTS, EACH)
        assert kept.num_traces == 3 and len(kept._num_seen) <= 8 * 3 + 1
    assert engine.metrics.num_decode_forwards["replayed"] > 20


def test_rare_step_sizes_are_not_traced() -> None:
    engine = tiny(model_of("llama"), trace_at=replay.TRACE_AT)
    run(engine, PROMPTS[:2], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert engine.metrics.num_decode_forwards == {"untraced": 2} and replay_of(engine).num_traces == 0
    decode(engine)
    assert engine.metrics.num_decode_forwards["replayed"] > 20


def test_a_closed_engine_releases_weights_and_threads() -> None:
    """Traces reference the weights. An engine that did not drop its traces would keep the weights in memory."""
    threads = set(threading.enumerate())
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = tiny(tiny_model(vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=1024))
    decode(engine, 12)
    assert replay_of(engine).num_traces > 1
    engine.close()
    del engine
    gc.collect()
    mx.clear_cache()
    weight_bytes = 256 * 1024 * 4
    assert mx.get_active_memory() - before < weight_bytes / 4
    assert set(threading.enumerate()) <= threads
