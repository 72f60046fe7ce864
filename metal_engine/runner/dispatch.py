"""Chooses when to dispatch a step that was built while the previous step runs: queued behind it, or after it ends.

With queued dispatch, the device starts the next step without a pause. However, MLX writes to a layer's arrays in place
only if the previous step has released them when the write is submitted. Otherwise MLX silently writes to a copy. On
Metal, a step releases an array when the command buffer that reads it has completed.

MLX blocks its caller while ten command buffers are unfinished. If a step has about fourteen or more command buffers,
the previous step has therefore released a layer's arrays in time, and nothing is copied.

The number of command buffers in a model's steps is only known at run time. A few steps therefore run at startup on a
busy device, and their peak memory shows whether they made copies.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

import mlx.core as mx
import numpy as np

from metal_engine.device.streams import synchronize
from metal_engine.errors import one_line
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.runner.start_check import CheckDeadline, CheckTooSlowError
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import EngineConfig
from metal_engine.settings.fields import format_size
from metal_engine.step import NewRequestData, SchedulerOutput

logger = logging.getLogger(__name__)

QUEUED = "each step is queued while the previous step runs"
SEQUENTIAL = "each step is dispatched after the end of the previous step"
_MAX_ROWS = 32
_NUM_STEPS = 4
# In the trial steps, recurrent states take at most 1 / _STATES_SHARE of the smallest array of the cache.
_STATES_SHARE = 8
# Matrix products that keep a Mac's GPU busy while the host dispatches two steps: 40 ms on the fastest GPU, 400 ms on
# the slowest. The input takes 64 MiB, and the outputs are small.
_BUSY_SHAPE = 512, 1 << 16
_BUSY_PRODUCTS = 32
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_NUM_STEPS + 1, ignore_eos=True)


def choose_dispatch(runner: ModelRunner, config: EngineConfig) -> str:
    """Enable queued dispatch in a runner if the device is a GPU and queued steps copy no part of the KV cache.

    Runs trial steps, so call it before the first step. A failed trial is logged, and leaves queued dispatch disabled.

    Returns:
        Description of the dispatch mode, with the reason.
    """
    if config.device.kind == "cpu":
        return f"{SEQUENTIAL}: a CPU gains nothing from queued steps"
    if config.ranks:
        return f"{SEQUENTIAL}: several ranks share the model"
    scheduler, cache, pool = config.scheduler, config.cache, runner.pool
    num_steps = min(_NUM_STEPS, scheduler.max_model_len, cache.num_blocks * cache.block_size)
    if num_steps < 2:
        return f"{SEQUENTIAL}: a request fits only one step"
    blocks_of_one = -(-num_steps // cache.block_size)
    num_rows = min(_MAX_ROWS, scheduler.max_num_seqs, cache.num_blocks // blocks_of_one)
    array_bytes = pool.smallest_array_bytes
    if not array_bytes:
        return f"{SEQUENTIAL}: without a KV cache, the trial cannot detect copies"
    if pool.is_recurrent:
        # A queued step adds its states to the peak memory, which must not be mistaken for a copy of the KV cache.
        num_rows = min(num_rows, array_bytes // (_STATES_SHARE * pool.bytes_per_request))
        if num_rows < 1:
            return f"{SEQUENTIAL}: the recurrent states are too large to detect a copy of the KV cache"
    blocks = np.arange(num_rows * blocks_of_one).reshape(num_rows, blocks_of_one).tolist()
    refusal = runner.replay_refusal
    try:
        more = _more_bytes(runner, blocks, num_steps)
        pool.forget_states(set(range(1, num_rows + 1)))
    except CheckTooSlowError as error:
        logger.warning("steps are not queued on the device: %s", error)
        pool.forget_states(set(range(1, num_rows + 1)))
        return f"{SEQUENTIAL}: {error}"
    except Exception as error:
        logger.exception("steps are not queued: the trial failed")
        with suppress(Exception):  # a stream may raise the error again, which must not fail the first request's step
            synchronize()
        if runner.replay is not None and refusal is None:
            runner.replay.reset_traces()  # queued steps may have caused the refusal
        return f"{SEQUENTIAL}: the trial of queued steps failed: {type(error).__name__}: {one_line(error)}"
    logger.debug("two steps at a time take %d bytes more; an array of the cache has %d", more, array_bytes)
    # A copy adds the size of an array to the peak, minus other memory that was freed since the sequential steps.
    runner.allow_queued_dispatch = more < array_bytes / 2
    return (
        QUEUED
        if runner.allow_queued_dispatch
        else f"{SEQUENTIAL}: queued steps would copy {format_size(more)} of the KV cache"
    )


def _more_bytes(runner: ModelRunner, blocks: list[list[int]], num_steps: int) -> int:
    """Return by how many bytes queued dispatch raises the peak memory of steps. Leaves queued dispatch disabled.

    If the runner replays steps, two further runs allow replay, because replayed steps may have fewer command buffers
    than built steps. The first run with replay builds most steps and traces one. The second run replays all steps.

    Raises:
        CheckTooSlowError: the runs take too long.
        Exception: any error of a step.
    """
    replays = runner.replays
    matrix = mx.array(np.zeros(_BUSY_SHAPE, np.float16))
    mx.eval(matrix)
    deadline = CheckDeadline()
    try:
        peaks = []
        for allow_queued_dispatch, is_replayed in [
            (False, False),
            (True, False),
            *([(True, True)] * 2 if replays else []),
        ]:
            runner.allow_queued_dispatch, runner.replays = allow_queued_dispatch, is_replayed
            peaks.append(_peak_bytes(runner, blocks, num_steps, matrix, deadline))
        return max(peaks[1:]) - peaks[0]
    finally:
        runner.allow_queued_dispatch, runner.replays = False, replays
        mx.clear_cache()


def _peak_bytes(
    runner: ModelRunner, blocks: list[list[int]], num_steps: int, matrix: mx.array, deadline: CheckDeadline
) -> int:
    """Return the peak memory in bytes of decode steps, of which two are in flight. Their outputs are discarded.

    Args:
        blocks: block ids of each request.
        matrix: input of the products that keep the device busy.
        deadline: time limit of the whole trial.
    """
    req_ids = [f"warm-up {row}" for row in range(len(blocks))]
    peak = 0
    in_flight: deque[PendingStep] = deque()
    try:
        for step_id in range(num_steps):
            deadline.check()
            plan = SchedulerOutput(
                step_id, num_scheduled_tokens=dict.fromkeys(req_ids, 1), sampled_req_ids=list(req_ids)
            )
            if step_id == 0:
                plan.new_requests = list(map(_request, req_ids, blocks, range(1, len(blocks) + 1)))
            if not in_flight:
                synchronize()
                mx.clear_cache()
                # Keep the products: memory that is freed during the steps would hide copies.
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
    """Finish all steps, even after a failed step. Raise the first error."""
    error: Exception | None = None
    while in_flight:
        try:
            in_flight.popleft().result()
        except Exception as failed:  # noqa: BLE001 (raised below; a step built on a failed step is void)
            error = error or failed
    if error is not None:
        raise error


def _keep_busy(matrix: mx.array) -> list[mx.array]:
    """Dispatch work that keeps the device busy while the host dispatches two steps. Return its outputs."""
    products = [matrix @ matrix.T for _ in range(_BUSY_PRODUCTS)]
    mx.async_eval(products)
    return products
