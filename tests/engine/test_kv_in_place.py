"""The KV cache is written in place: a step must not copy the pool, which would cost its size in time and memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.mlx_ops import MlxOpsBackend
from metal_engine.config import CacheConfig, SchedulerConfig
from metal_engine.models.paged_model import PagedModel
from metal_engine.request import Request, SamplingParams
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.scheduling.scheduler import Scheduler
from tests.tiny_models import tiny_model

NUM_STEPS = 200


@pytest.mark.parametrize("num_layers", [1, 30])
def test_writes_stay_in_place_over_200_decode_steps(num_layers: int) -> None:
    paged = PagedModel(tiny_model(num_hidden_layers=num_layers))
    # K or V of one layer is 4 MB: large against everything else in a step of this model.
    cache = CacheConfig(block_size=16, num_blocks=2048)
    array_bytes = cache.num_tokens * 2 * 16 * 4
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=512)
    runner = ModelRunner(paged, MlxOpsBackend(), config, cache)
    scheduler = Scheduler(config, cache)
    for i in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 10)
        prompt = np.random.default_rng(i).integers(0, 256, 20 + 7 * i).tolist()
        scheduler.add_request(Request(str(i), prompt, params, max_tokens=NUM_STEPS + 10))

    def step() -> None:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan).result())

    for _ in range(3):  # prefills
        step()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(NUM_STEPS):
        step()
    assert mx.get_active_memory() - before < array_bytes / 4
    assert mx.get_peak_memory() - before < array_bytes / 2, "a step held a second copy of a cache array"


def test_the_measurement_sees_a_copy() -> None:
    """The same measure on a write that cannot be in place, since the old array is still wanted."""
    cache = mx.zeros((32768, 2, 16))
    mx.eval(cache)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    kept = cache
    cache = mx.array(cache)
    cache[mx.array([5])] = 1.0
    mx.eval(cache)
    assert mx.get_peak_memory() - before >= kept.nbytes / 2


def _aligned_runner(num_blocks: int) -> tuple[PagedModel, ModelRunner, Scheduler]:
    paged = PagedModel(tiny_model(num_hidden_layers=2))
    cache = CacheConfig(block_size=16, num_blocks=num_blocks)
    config = SchedulerConfig(
        max_num_batched_tokens=90,
        max_num_seqs=8,
        max_model_len=512,
        max_num_partial_prefills=3,
        page_aligned_scheduling=True,
    )
    return paged, ModelRunner(paged, MlxOpsBackend(), config, cache), Scheduler(config, cache)


def _add(scheduler: Scheduler, lengths: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for i, length in enumerate(lengths):
        prompt = np.random.default_rng(i).integers(0, 256, length).tolist()
        scheduler.add_request(Request(str(i), prompt, params, max_tokens=max_tokens))


def test_writing_by_block_leaves_the_same_cache_as_writing_by_slot() -> None:
    caches, num_by_block = [], 0
    for by_block in (False, True):
        mx.random.seed(0)  # the same weights
        paged, runner, scheduler = _aligned_runner(num_blocks=64)
        runner._writes_blocks = by_block
        _add(scheduler, [5, 100, 64, 33], 4)
        while scheduler.has_requests:
            plan = scheduler.schedule()
            num_by_block += by_block and any(n >= 16 for n in plan.num_scheduled_tokens.values())
            scheduler.update(plan, runner.execute(plan).result())
        caches.append([np.array(a) for c in paged.layer_caches for a in (c.keys, c.values)])
    assert num_by_block >= 3
    for slot, block in zip(*caches, strict=True):
        assert np.abs(slot).max() > 0
        np.testing.assert_array_equal(slot, block)


def test_writes_by_block_stay_in_place() -> None:
    _, runner, scheduler = _aligned_runner(num_blocks=16_384)
    array_bytes = 16_384 * 16 * 2 * 16 * 4
    _add(scheduler, [500, 400, 480], 2)
    plan = scheduler.schedule()
    scheduler.update(plan, runner.execute(plan).result())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    while scheduler.has_requests:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan).result())
    assert mx.get_peak_memory() - before < array_bytes / 2, "a step held a second copy of a cache array"
