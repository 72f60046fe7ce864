"""Compares replayed decode steps with the same steps built in Python, when a server starts.

A trace differs from the operations that it replaces: MLX fuses some operations into new kernels, which Metal compiles.
Therefore, a few steps run both ways before the first request. This also compiles the kernels at startup, not at the
third token of the first request.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend
from metal_engine.errors import clear_traceback_frames, one_line
from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.models.check import LOGITS_TOLERANCE
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.replay import TRACE_AT, DecodeReplay
from metal_engine.runner.start_check import CheckDeadline, CheckTooSlowError
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import KVCacheLostError

logger = logging.getLogger(__name__)

# Steps of three requests with one token each: three, so that padding is tested too.
_NUM_ROWS = 3
_NUM_STEPS = 4
_ATTEMPTS = 3


def check_replay(
    model: PagedModel, backend: AttentionBackend, replay: DecodeReplay, scheduler: SchedulerConfig, cache: CacheConfig
) -> None:
    """Disable ``replay`` if its results differ from the results of built steps. Call it before the first request.

    Writes to the first blocks of the cache and to the first slots for recurrent states. Their contents are not used
    later.
    """
    if replay.refusal is not None:
        return
    num_steps = min(_NUM_STEPS, scheduler.max_model_len, cache.num_blocks * cache.block_size)
    blocks_of_one = -(-num_steps // cache.block_size)
    num_rows = min(_NUM_ROWS, scheduler.max_num_seqs, cache.num_blocks // blocks_of_one)
    block_table = np.arange(num_rows * blocks_of_one, dtype=np.int32).reshape(num_rows, blocks_of_one)
    # Rounding can select another expert or another quantized value of K and V. A bug shows in every attempt.
    is_exact = model.dtype == mx.float32 and model.kv_bits is None
    deadline = CheckDeadline()
    try:
        for seed in range(1 if is_exact else _ATTEMPTS):
            gap = _largest_gap(model, backend, replay, block_table, cache.block_size, num_steps, seed, deadline)
            if gap <= LOGITS_TOLERANCE[model.dtype]:
                return
    except CheckTooSlowError as error:
        replay.refuse(str(error))
        model.pool.forget_states(set(range(1, num_rows + 1)))
        return
    except Exception as error:
        logger.exception("replaying a step failed")
        replay.refuse(f"the trial at startup failed ({one_line(error)})")
        clear_traceback_frames(error)  # the local variables refer to arrays of the cache
        with suppress(KVCacheLostError):  # the cache held nothing yet
            model.pool.recover(error)
        return
    finally:
        mx.clear_cache()
    replay.refuse(f"replayed logits differ from the logits of built steps by {gap:.1g} of their size")


def _largest_gap(
    model: PagedModel,
    backend: AttentionBackend,
    replay: DecodeReplay,
    block_table: np.ndarray,
    block_size: int,
    num_steps: int,
    seed: int,
    deadline: CheckDeadline,
) -> float:
    """Return the largest difference between the logits of a replayed step and of the same step built.

    Each difference is divided by the largest magnitude of the built step's logits. The result is NaN if a difference is
    NaN, and 0 if no step was replayed.
    """
    gaps = [0.0]
    num_rows = len(block_table)
    pool, slots = model.pool, tuple(range(1, num_rows + 1))
    replayed_states: list[mx.array] = []
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, (num_steps, num_rows)).astype(np.int32)
    for step in range(num_steps):
        deadline.check()
        reads = slots if step else (ZERO_STATE_SLOT,) * num_rows
        state_slots = np.array(reads, np.int32), np.array(slots, np.int32)
        rows = step_rows(
            block_table, np.full(num_rows, step, np.int32), [1] * num_rows, block_size, state_slots=state_slots
        )
        input_ids = mx.array(tokens[step])
        replayed = None
        # The first step is only built, to record which attention variants the layers use. Its rows see only one key.
        if step:
            # Replay before building. Otherwise the replayed step would find K and V of its tokens even if it failed to
            # write them. It starts from the recurrent states that the last replayed step has written.
            built_states = pool.read_states(slots)
            pool.put_states(slots, replayed_states)
            replayed = _replayed(model, replay, input_ids, rows)
            replayed_states = pool.read_states(slots)
            pool.put_states(slots, built_states)
        built = _built(model, backend, replay, input_ids, rows)
        if replayed is None:
            replayed_states = pool.read_states(slots)
        else:
            gaps.append(float(np.abs(replayed - built).max() / (np.abs(built).max() or 1.0)))
    pool.forget_states(set(slots))
    return float(np.max(gaps))


def _built(
    model: PagedModel, backend: AttentionBackend, replay: DecodeReplay, input_ids: mx.array, rows: StepRows
) -> np.ndarray:
    attention = backend.for_step(rows)
    logits = model(input_ids, rows, attention)
    mx.eval(logits)  # raises errors of operations; the conversion to NumPy would not
    model.pool.evaluate()
    replay.learn(attention)
    return np.array(logits.astype(mx.float32))


def _replayed(model: PagedModel, replay: DecodeReplay, input_ids: mx.array, rows: StepRows) -> np.ndarray | None:
    """Replay a step and return its logits, [R, vocab_size] float32; None if the step cannot be replayed."""
    for _ in range(TRACE_AT):
        (logits, _), outcome = replay.forward((input_ids,), rows, lambda: (mx.array(0.0), None))
        if outcome in ("traced", "replayed"):
            mx.eval(logits)
            model.pool.evaluate()
            return np.array(logits.astype(mx.float32))
    return None
