"""When the device is given a step that was built while the one before it runs: behind that one, or after its end.

Behind, the device goes on at once. But a step writes to the KV cache in place only where the one before has let go of a
layer's arrays by then, which on Metal is when the command buffer that reads them is done; MLX writes to a copy else,
and says nothing. MLX lets its caller go on while up to ten command buffers are unfinished, so steps of about fourteen
and more copy nothing. How many a model's steps have is known when they run: so some run at the start, on a device that
is kept busy, and memory tells.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

import mlx.core as mx
import numpy as np

from metal_engine.device.streams import synchronize
from metal_engine.errors import one_line
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import EngineConfig
from metal_engine.settings.fields import format_size
from metal_engine.step import NewRequestData, SchedulerOutput

logger = logging.getLogger(__name__)

BEHIND = "each step behind the one before"
AFTER = "each step after the end of the one before"
_MAX_ROWS = 32
_NUM_STEPS = 4
# Recurrent states take no more, in those steps, than this part of an array of the cache.
_STATES_SHARE = 8
# Products that keep a Mac's GPU busy while the host dispatches two steps, for 40 ms of the fastest and 400 of the
# slowest. They take 64 MiB, and little for what they put out.
_BUSY_SHAPE = 512, 1 << 16
_BUSY_PRODUCTS = 32
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_NUM_STEPS + 1, ignore_eos=True)


def choose_dispatch(runner: ModelRunner, pool: StatePool, config: EngineConfig) -> str:
    """Have a runner dispatch steps behind others, on a GPU, if that copies nothing; to be called before any step.

    Returns:
        How steps are dispatched, and why, in words.
    """
    if config.device.kind == "cpu":
        return f"{AFTER}: a CPU gains nothing behind it"
    if config.ranks:
        return f"{AFTER}: several ranks share the model"
    scheduler, cache = config.scheduler, config.cache
    num_steps = min(_NUM_STEPS, scheduler.max_model_len, cache.num_blocks * cache.block_size)
    if num_steps < 2:
        return f"{AFTER}: a request has room for one step"
    blocks_of_one = -(-num_steps // cache.block_size)
    num_rows = min(_MAX_ROWS, scheduler.max_num_seqs, cache.num_blocks // blocks_of_one)
    array_bytes = pool.smallest_array_bytes
    if pool.is_recurrent:
        # A step behind another adds its states to the memory at the peak; they must not pass for a copy.
        num_rows = min(num_rows, array_bytes // (_STATES_SHARE * pool.bytes_per_request))
        if num_rows < 1:
            return f"{AFTER}: beside recurrent states so large, no copy of the KV cache would be seen"
    blocks = np.arange(num_rows * blocks_of_one).reshape(num_rows, blocks_of_one).tolist()
    refusal = runner.replay_refusal
    try:
        more = _more_bytes(runner, blocks, num_steps)
        pool.forget_states(set(range(1, num_rows + 1)))
    except Exception as error:
        logger.exception("no step goes behind another: trying it failed")
        with suppress(Exception):  # what a stream keeps of the same error is not for the first request's step
            synchronize()
        if runner.replay is not None and refusal is None:
            runner.replay.reset_traces()  # going behind may have been the cause of what it refuses now
        return f"{AFTER}: trying it behind failed: {type(error).__name__}: {one_line(error)}"
    logger.debug("two steps at a time take %d bytes more; an array of the cache has %d", more, array_bytes)
    # A copy adds an array, less what else went since the peak of steps one after the other.
    runner.allow_queued_dispatch = more < array_bytes / 2
    return (
        BEHIND
        if runner.allow_queued_dispatch
        else f"{AFTER}: behind it, {format_size(more)} of the KV cache would be copied"
    )


def _more_bytes(runner: ModelRunner, blocks: list[list[int]], num_steps: int) -> int:
    """How much more memory steps take at their peak if they go behind others; the runner has none go behind then.

    Replayed steps count, too, if there are any: they may have fewer kernels than built ones, and so fewer command
    buffers. Most steps of the first run that replays are built, and one is traced; all of the second are replayed.
    """
    replays = runner.replays
    matrix = mx.array(np.zeros(_BUSY_SHAPE, np.float16))
    mx.eval(matrix)
    try:
        peaks = []
        for allow_queued_dispatch, is_replayed in [
            (False, False),
            (True, False),
            *([(True, True)] * 2 if replays else []),
        ]:
            runner.allow_queued_dispatch, runner.replays = allow_queued_dispatch, is_replayed
            peaks.append(_peak_bytes(runner, blocks, num_steps, matrix))
        return max(peaks[1:]) - peaks[0]
    finally:
        runner.allow_queued_dispatch, runner.replays = False, replays
        mx.clear_cache()


def _peak_bytes(runner: ModelRunner, blocks: list[list[int]], num_steps: int, matrix: mx.array) -> int:
    """Memory at the peak of steps of requests with these blocks, one ahead; what they write is read by nobody.

    Args:
        matrix: what the device is kept busy with.
    """
    req_ids = [f"warm-up {row}" for row in range(len(blocks))]
    peak = 0
    in_flight: deque[PendingStep] = deque()
    try:
        for step_id in range(num_steps):
            plan = SchedulerOutput(
                step_id, num_scheduled_tokens=dict.fromkeys(req_ids, 1), sampled_req_ids=list(req_ids)
            )
            if step_id == 0:
                plan.new_requests = list(map(_request, req_ids, blocks, range(1, len(blocks) + 1)))
            if not in_flight:
                synchronize()
                mx.clear_cache()
                # It stays, with all that comes of it: memory that goes during the steps would hide what they copy.
                products = _keep_busy(matrix)
                mx.reset_peak_memory()
            in_flight.append(runner.execute(plan))
            if len(in_flight) == 2 or step_id == num_steps - 1:
                _finish(in_flight)
                peak = max(peak, mx.get_peak_memory())
                del products
        return peak
    finally:
        try:
            _finish(in_flight)
        finally:
            runner.forget(req_ids)


def _request(request_id: str, block_ids: list[int], state_slot: int) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=block_ids,
        sampling_params=_GREEDY,
        state_slots=(ZERO_STATE_SLOT, state_slot),
    )


def _finish(in_flight: deque[PendingStep]) -> None:
    """Finish them all, those too that come after one that fails; raises the first error."""
    error: Exception | None = None
    while in_flight:
        try:
            in_flight.popleft().result()
        except Exception as failed:  # noqa: BLE001  (raised below; a step on top of one that failed is void)
            error = error or failed
    if error is not None:
        raise error


def _keep_busy(matrix: mx.array) -> list[mx.array]:
    """Give the device something to do that takes longer than the host needs for two steps; returns what comes of it."""
    products = [matrix @ matrix.T for _ in range(_BUSY_PRODUCTS)]
    mx.async_eval(products)
    return products
