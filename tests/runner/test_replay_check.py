"""Tests of the check of replayed steps at startup: correct replay stays enabled, any other replay is disabled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.kv_cache.recurrent import RecurrentState
from metal_engine.kv_cache.rows import TracedRows
from metal_engine.kv_cache.writes import TracedWrites
from metal_engine.loading.build import build_engine
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner import replay_check as replay_check_module
from metal_engine.runner.replay import DecodeReplay
from metal_engine.runner.replay_check import check_replay
from metal_engine.runner.start_check import CheckDeadline
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tests.engine.test_quantized_kv import model_of
from tests.support.checkpoint_files import write_checkpoint
from tests.support.sweeps import sweep
from tests.support.tiny_engine import tiny_reference

RECURRENT = ["qwen3_next", "mamba"]  # with and without attention layers
SCHEDULER = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64, max_num_seqs=8)


def checked(
    architecture: str = "llama",
    *,
    dtype: mx.Dtype = mx.float32,
    kv_cache_dtype: str = "auto",
    block_size: int = 8,
    **sizes: int,
) -> tuple[DecodeReplay, PagedModel]:
    cache = CacheConfig(block_size=block_size, num_blocks=sizes.get("num_blocks", 8), num_padding_blocks=1)
    mlx_lm_model = tiny_reference(architecture=architecture) if architecture == "mamba" else model_of(architecture)
    mlx_lm_model.set_dtype(dtype)
    model, backend = PagedModel(mlx_lm_model, kv_cache_dtype=kv_cache_dtype), PortableBackend()
    model.pool.allocate(cache.num_blocks + 1, block_size, SCHEDULER.max_num_seqs)
    replay = DecodeReplay(model, backend, padding_block=cache.num_blocks, max_num_seqs=SCHEDULER.max_num_seqs)
    check_replay(model, backend, replay, SCHEDULER, cache)
    return replay, model


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((name, mx.float32) for name in ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3", *RECURRENT)),
        *((name, mx.bfloat16) for name in ("llama", "gemma3_text")),  # MLX's CPU has experts in float32 only
    ],
)
def test_startup_check_keeps_correct_replay_enabled(architecture: str, dtype: mx.Dtype, kv_cache_dtype: str) -> None:
    replay, model = checked(architecture, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert replay.refusal is None and replay.num_traces > 0
    lengths = {array.shape[0] for state in model.pool.states for array in state.arrays.values()}
    assert lengths <= {9 * 8, 1 + SCHEDULER.max_num_seqs}
    of_requests = [state for state in model.pool.states if isinstance(state, RecurrentState)]
    assert not any(pending for state in of_requests for pending in state._pending.values())


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (1, 8), (2, 2)])
def test_in_a_small_cache(num_blocks: int, block_size: int) -> None:
    """A cache for a single token has no second step to compare."""
    replay, _ = checked(num_blocks=num_blocks, block_size=block_size)
    assert replay.refusal is None and (replay.num_traces > 0) == (num_blocks * block_size > 1)


def test_startup_check_timeout_disables_replay_and_logs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replay_check_module, "CheckDeadline", lambda: CheckDeadline(-1.0))
    replay, model = checked("qwen3_next")
    assert replay.refusal is not None and "takes more than" in replay.refusal and replay.num_traces == 0
    (record,) = caplog.records
    assert "takes more than" in record.message and record.exc_info is None
    of_requests = [state for state in model.pool.states if isinstance(state, RecurrentState)]
    assert not any(pending for state in of_requests for pending in state._pending.values())


def one_row_off(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        logits, hidden = forward(*args)
        return mx.concatenate([logits[:-2], 1.01 * logits[-2:-1], logits[-1:]]), hidden

    return wrong


def not_a_number(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (forward(*args)[0] * mx.array(float("nan")), None)


def no_number_later(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: PagedModel, input_ids: mx.array, positions: mx.array, *rest: Any) -> Any:
        logits, hidden = forward(self, input_ids, positions, *rest)
        return logits + mx.where(positions.max() > 2, float("nan"), 0.0), hidden

    return wrong


def nowhere(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a forward write to the padding block."""

    def wrong(self: PagedModel, input_ids: mx.array, positions: mx.array, rows: TracedRows, *rest: Any) -> Any:
        writes = TracedWrites(mx.full(positions.shape, 64, mx.int32))
        return forward(self, input_ids, positions, replace(rows, writes=writes), *rest)

    return wrong


def other_slots(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: PagedModel, input_ids: mx.array, positions: mx.array, rows: TracedRows, *rest: Any) -> Any:
        slots: mx.array = rows.writes._slots  # type: ignore[attr-defined]
        writes = TracedWrites(mx.concatenate([slots[1:], slots[:1]]))
        return forward(self, input_ids, positions, replace(rows, writes=writes), *rest)

    return wrong


def other_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, input_ids, positions, *rest: forward(self, input_ids, positions + positions // 2, *rest)


def old_states(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a forward leave the recurrent states unchanged."""

    def wrong(self: PagedModel, *args: Any) -> Any:
        before = self.pool.snapshot()
        logits = forward(self, *args)
        for state, then in zip(self.pool.states, before, strict=True):
            if isinstance(state, RecurrentState):
                state.restore(then)
        return logits

    return wrong


def states_of_others(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make each row write its recurrent state to the slot of the next row."""

    def wrong(self: PagedModel, input_ids: mx.array, *rest: Any) -> Any:
        logits = forward(self, input_ids, *rest)
        slots = tuple(range(1, input_ids.size + 1))
        self.pool.put_states((*slots[1:], slots[0]), self.pool.read_states(slots))
        return logits

    return wrong


WRONG = [not_a_number, no_number_later, nowhere, other_slots, other_positions]
TYPES = [(mx.float32, "auto"), (mx.float32, "int8"), (mx.float16, "auto"), (mx.bfloat16, "auto"), (mx.bfloat16, "int8")]


@pytest.mark.parametrize(
    ("make", "dtype", "kv_cache_dtype"),
    sweep(
        [(one_row_off, mx.float32, "auto"), *((make, *types) for make in WRONG for types in TYPES)],
        [(one_row_off, mx.float32, "auto"), *((make, *types) for make, types in zip(WRONG, TYPES, strict=True))],
    ),
)
def test_startup_check_disables_replay_with_wrong_logits(
    make: Callable[..., Any],
    dtype: mx.Dtype,
    kv_cache_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(PagedModel, "forward_of_arrays", make(PagedModel.forward_of_arrays))
    with caplog.at_level(logging.WARNING):
        replay, _ = checked(dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert replay.refusal is not None and "replayed logits differ from the logits of built steps by" in replay.refusal
    assert replay.refusal in caplog.text and replay.num_traces == 0


@pytest.mark.parametrize("architecture", RECURRENT)
@pytest.mark.parametrize("make", [not_a_number, old_states, states_of_others])
def test_wrong_states_are_refused(make: Callable[..., Any], architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedModel, "forward_of_arrays", make(PagedModel.forward_of_arrays))
    replay, _ = checked(architecture)
    assert replay.refusal is not None and "replayed logits differ from the logits of built steps by" in replay.refusal


def test_a_step_that_fails_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an operation fails when it runs. A conversion to NumPy then gives zeros, in built and replayed steps."""
    forward = PagedModel.forward_of_arrays

    def failing(*args: Any) -> Any:
        logits, hidden = forward(*args)
        return logits + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0], hidden

    monkeypatch.setattr(PagedModel, "forward_of_arrays", failing)
    replay, _ = checked()
    assert replay.refusal is not None and "LU factorization failed" in replay.refusal


def test_a_step_that_fails_is_the_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    evaluate = DecodeReplay.forward

    def failing(*args: Any) -> Any:
        logits, outcome = evaluate(*args)
        if outcome == "traced":
            raise RuntimeError("no such kernel")
        return logits, outcome

    monkeypatch.setattr(DecodeReplay, "forward", failing)
    replay, model = checked()
    assert replay.refusal == "the trial at startup failed (no such kernel)" and replay.num_traces == 0
    assert "no such kernel" in caplog.text
    model.pool.evaluate()
    assert all(np.isfinite(np.array(array)).all() for state in model.pool.states for array in state.arrays.values())


@pytest.mark.parametrize("is_right", [pytest.param(True, marks=pytest.mark.full), False])
def test_build_engine_runs_the_replay_check_before_the_first_request(
    is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_right:
        monkeypatch.setattr(PagedModel, "forward_of_arrays", one_row_off(PagedModel.forward_of_arrays))
    model = write_checkpoint(tmp_path / "m")
    engine = build_engine(EngineArgs(model=str(model), replay_decodes="always", max_model_len=64))
    try:
        assert (engine.core.metrics.replay_refusal is None) == is_right
    finally:
        engine.close()
