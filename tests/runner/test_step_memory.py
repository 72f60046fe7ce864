"""Tests of the measurement of a step's memory before the KV cache is sized: real steps stay within it."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable.groups import CPU_LIMITS
from metal_engine.errors import ConfigError
from metal_engine.loading.build import build_engine
from metal_engine.models.draft_head import PagedDraftHead
from metal_engine.models.paged_model import PagedModel
from metal_engine.request import Request
from metal_engine.runner import step_memory
from metal_engine.runner.encode_memory import measure_encode_bytes
from metal_engine.runner.head_drafter import HeadDrafter
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.step_memory import measure_step_bytes
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import MARGIN_BYTES, CacheConfig, SchedulerConfig
from tests.support.checkpoint_files import write_checkpoint
from tests.support.draft_heads import random_head
from tests.support.memory import settled_memory
from tests.support.speculation import head_config
from tests.support.vision import tiny_vision
from tools.fixtures.tiny_models import tiny_model

NUM_TOKENS, NUM_SEQS = 512, 8


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Collect the garbage of other tests. Its memory could otherwise be freed while a test measures."""
    gc.collect()


@pytest.mark.parametrize("has_head", [False, True])
def test_real_steps_take_no_more(has_head: bool) -> None:
    model = tiny_model(vocab_size=4096)
    paged, backend = PagedModel(model), PortableBackend()
    head = PagedDraftHead(random_head(model), paged) if has_head else None
    measured = measure_step_bytes(paged, backend, 16, None, NUM_TOKENS, NUM_SEQS, head=head)
    assert not paged.pool.is_allocated
    cache = CacheConfig(block_size=16, num_blocks=400)
    config = SchedulerConfig(
        max_num_batched_tokens=NUM_TOKENS,
        max_num_seqs=NUM_SEQS,
        max_model_len=1024,
        max_num_partial_prefills=4,
        speculative=head_config() if has_head else None,
    )
    drafter = None if head is None else HeadDrafter(head, paged.pool, backend, cache)
    runner, scheduler = ModelRunner(paged, backend, config, cache, drafter=drafter), Scheduler(config, cache)
    rng = np.random.default_rng(0)
    for i, length in enumerate([900, 512, 100, 30, 3, 600, 17, 64]):
        params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=6, seed=i)
        scheduler.add_request(Request(str(i), rng.integers(0, 4096, length).tolist(), params, max_tokens=6))
    held = settled_memory()
    while scheduler.has_requests:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan).result())
    taken = mx.get_peak_memory() - held
    # Longer contexts than in the measured step: a few tiles of scores, and a span of K and V.
    longer = 4 * (4 * CPU_LIMITS.scores + 2 * CPU_LIMITS.span)
    assert longer < MARGIN_BYTES / 8
    assert 0.2 * measured < taken < measured + longer, (taken, measured)


def test_measured_step_memory_grows_with_the_step_size() -> None:
    paged = PagedModel(tiny_model(vocab_size=4096))
    sizes = [(16, 1), (256, 1), (256, 32), (1024, 64)]
    taken = [measure_step_bytes(paged, PortableBackend(), 16, None, *size) for size in sizes]
    assert 0 < taken[0] < taken[1] < taken[2] < taken[3]


@pytest.mark.parametrize(
    ("max_positions", "num_tokens", "num_seqs", "lengths"),
    [(None, 20, 4, [17, 1, 1, 1]), (8, 20, 4, [8, 8, 3, 1]), (8, 8, 8, [1] * 8), (3, 100, 2, [3, 3])],
)
def test_requests_of_the_measurement_stay_within_max_positions(
    max_positions: int | None, num_tokens: int, num_seqs: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    forward = PagedModel.forward

    def note(self: PagedModel, input_ids, rows, *rest, **more):  # type: ignore[no-untyped-def]
        requests, at = np.repeat(np.arange(num_seqs), rows.seq_lens), rows.positions
        slots = rows.block_table[requests, at // 4] * 4 + at % 4
        assert np.array_equal(slots, rows.slot_mapping) and len(set(slots.tolist())) == len(at)
        seen.append((rows.seq_lens.tolist(), at.tolist()))
        return forward(self, input_ids, rows, *rest, **more)

    monkeypatch.setattr(PagedModel, "forward", note)
    paged = PagedModel(tiny_model())
    measure_step_bytes(paged, PortableBackend(), 4, max_positions, num_tokens, num_seqs)
    assert seen and all(one == (lengths, [p for length in lengths for p in range(length)]) for one in seen)


def test_garbage_does_not_lower_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    run_step, paged = step_memory._run_step, PagedModel(tiny_model(vocab_size=4096))

    def collecting(*args: Any) -> int:
        gc.collect()
        return run_step(*args)

    def measured() -> int:
        return measure_step_bytes(paged, PortableBackend(), 16, None, NUM_TOKENS, NUM_SEQS)

    expected = measured()
    monkeypatch.setattr(step_memory, "_run_step", collecting)
    garbage: list[Any] = [mx.zeros(64 << 20, mx.uint8)]
    garbage.append(garbage)
    mx.eval(garbage[0])
    del garbage
    assert measured() > 0.7 * expected


def test_freed_buffers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX reuses a freed buffer of up to twice the requested size, which would distort the measurement."""
    kept: list[int] = []
    forward = PagedModel.forward

    def note(self: PagedModel, *given, **more):  # type: ignore[no-untyped-def]
        kept.append(mx.get_cache_memory())
        return forward(self, *given, **more)

    monkeypatch.setattr(PagedModel, "forward", note)
    paged = PagedModel(tiny_model())
    mx.eval([mx.random.normal((size,)) for size in (3000, 9000, 20000)])
    mx.synchronize()
    assert mx.get_cache_memory() > 0
    measure_step_bytes(paged, PortableBackend(), 16, None, 64, 8)
    assert kept and not any(kept)


@pytest.mark.parametrize(
    ("runs", "most"), [([300, 522, 338, 400, 410], 522), ([(16 << 20) + 1, 0, 0, 0, 0], (16 << 20) + 1)]
)
def test_of_small_steps_the_largest_counts(runs: list[int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps vary most, so they run several times. A large step runs once, because it takes long."""
    left = list(runs)
    monkeypatch.setattr(step_memory, "_run_step", lambda *_: mx.get_active_memory() + left.pop(0))
    taken = measure_step_bytes(PagedModel(tiny_model()), PortableBackend(), 16, None, 64, 8)
    assert abs(taken - most) < 64  # small arrays are freed meanwhile
    assert len(left) == (0 if most < 1 << 20 else 4)


@pytest.mark.parametrize(("mine", "theirs", "num_runs"), [(300, 17 << 20, 1), (17 << 20, 17 << 20, 1), (300, 400, 5)])
def test_all_ranks_run_as_many_steps(mine: int, theirs: int, num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank ran fewer steps, the other ranks would wait for it forever."""
    runs: list[int] = []
    monkeypatch.setattr(step_memory, "_run_step", lambda *_: runs.append(mine) or mx.get_active_memory() + mine)
    paged = PagedModel(tiny_model())
    taken = measure_step_bytes(
        paged, PortableBackend(), 16, None, 64, 8, max_over_ranks=lambda what, number: max(number, theirs)
    )
    assert (len(runs), taken) == (num_runs, theirs)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("[malloc] Unable to allocate 5 bytes.\nmore"), "[malloc] Unable"), (MemoryError(), "MemoryError")],
)
def test_out_of_memory_in_the_measurement_names_the_flag_to_lower(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = tiny_vision("qwen3_vl")

    def fail(*_: object, **__: object) -> mx.array:
        raise error

    monkeypatch.setattr(PagedModel, "forward", fail)
    monkeypatch.setattr(vision.encoder, "encode", fail)
    with pytest.raises(ConfigError, match=rf"lower --max-num-batched-tokens \({re.escape(reason)}"):
        measure_step_bytes(vision.paged, PortableBackend(), 4, None, 16, 2)
    with pytest.raises(ConfigError, match=rf"lower --max-num-encoder-tokens \({re.escape(reason)}"):
        measure_encode_bytes(vision.paged, 64)
    assert not vision.paged.pool.is_allocated


def test_engine_config_includes_step_memory_in_peak_bytes(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    engine = build_engine(EngineArgs(model=str(model), kv_cache_memory_bytes=1 << 26, max_num_batched_tokens=2048))
    config = engine.core.config
    assert config.step_bytes > 1 << 20
    assert config.peak_bytes == config.model.weight_bytes + config.kv_bytes + config.step_bytes
    assert (1 << 26) - (1 << 20) < config.kv_bytes <= 1 << 26
    engine.close()
