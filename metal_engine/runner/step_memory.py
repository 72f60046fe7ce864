"""Measures how much memory the largest step takes besides weights and KV cache. Runs it before the cache is sized."""

from __future__ import annotations

import gc
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend
from metal_engine.device.streams import synchronize
from metal_engine.errors import ConfigError, one_line
from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.writes import choose_writes
from metal_engine.models.draft_head import PagedDraftHead
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.sampler import SamplingTable, sample
from metal_engine.sampling_params import SamplingParams

# A step that takes less memory than this is run several times. The number of arrays that exist at a time depends on how
# far MLX schedules operations ahead of the computation. It varies most with very short operations.
_SMALL_BYTES = 16 << 20
_NUM_SMALL_RUNS = 5
# If layers select keys by an index: length of each request's context, as a multiple of the number of selected keys.
_CONTEXT_FACTOR = 4


def measure_step_bytes(
    model: PagedModel,
    backend: AttentionBackend,
    block_size: int,
    max_positions: int | None,
    num_tokens: int,
    num_seqs: int,
    *,
    head: PagedDraftHead | None = None,
    max_over_ranks: Callable[[str, int], int] = lambda what, number: number,
) -> int:
    """Run a step of ``num_tokens`` tokens, of ``num_seqs`` requests that all sample, and measure MLX's peak memory.

    The first requests get as many tokens as possible, and the remaining requests one token each. If layers have an
    index, all requests also have a context, so that their rows select keys. Sampling uses top-p, the expensive path.
    The step also serves as a warm-up that compiles kernels. A step with a small result is run several times, and the
    largest result counts. Allocates the pool of the model, and releases it at the end.

    Args:
        max_positions: maximum length of a request; None: no limit.
        head: draft head that follows the step; None without a draft head.
        max_over_ranks: function of a name and this rank's number. It returns the largest number that a rank has under
            this name, so that all ranks run the step equally often.

    Returns:
        Peak memory in bytes, minus the memory in use before the step, which includes the weights and the step's KV.

    Raises:
        ConfigError: the step does not fit into memory.
    """
    longest = min(max_positions or num_tokens, num_tokens)
    # Every request gets one token. Further tokens go to the first requests; `left` is how many remain before each
    # request.
    left = num_tokens - num_seqs - np.arange(num_seqs) * (longest - 1)
    seq_lens = (1 + np.clip(left, 0, longest - 1)).astype(np.int32)
    num_blocks = -(-seq_lens // block_size)
    ends = np.cumsum(num_blocks)
    # Each request's blocks in order; padding repeats the last block.
    column = np.minimum(np.arange(num_blocks.max()), num_blocks[:, None] - 1)
    # All contexts consist of the last block, repeated. The step does not write to this block.
    num_context_blocks = _num_context_blocks(model, block_size, max_positions, int(seq_lens[0]))
    context = np.full((num_seqs, num_context_blocks), ends[-1])
    block_table = np.hstack([context, (ends - num_blocks)[:, None] + column]).astype(np.int32)
    make_writes = choose_writes(page_aligned=False)
    slots = np.arange(1, num_seqs + 1, dtype=np.int32)
    contexts = np.full_like(seq_lens, num_context_blocks * block_size)
    state_slots = np.zeros_like(slots), slots
    rows = step_rows(block_table, contexts, seq_lens, block_size, state_slots=state_slots, make_writes=make_writes)

    sampling = SamplingTable(num_seqs)
    for index in range(num_seqs):
        sampling.set(index, SamplingParams(temperature=1.0, top_p=0.9), seed=index)
    try:
        model.pool.allocate(int(ends[-1]) + min(1, num_context_blocks), block_size, num_seqs)
        gc.collect()  # garbage that is freed during the step would lower the result
        synchronize()
        held, taken = mx.get_active_memory(), 0
        for _ in range(_NUM_SMALL_RUNS):
            taken = max_over_ranks(
                "bytes of a step", max(taken, _run_step(model, backend, rows, sampling, head) - held)
            )
            if taken >= _SMALL_BYTES:
                break
        return taken
    except (MemoryError, RuntimeError) as error:  # MLX's allocator raises RuntimeError
        raise ConfigError(
            "--max-num-batched-tokens",
            f"a step of {num_tokens} tokens does not run on this device; lower --max-num-batched-tokens "
            f"({one_line(error)})",
        ) from error
    finally:
        model.pool.release()
        mx.clear_cache()


def _num_context_blocks(model: PagedModel, block_size: int, max_positions: int | None, num_tokens: int) -> int:
    """Return the number of blocks of the context before a request of ``num_tokens`` tokens, so that rows select keys.

    With several times as many keys as a row selects, the arrays of a selection have their largest size.
    """
    if model.index_top_k is None:
        return 0
    longest = _CONTEXT_FACTOR * model.index_top_k
    if max_positions is not None:
        longest = min(longest, max_positions - num_tokens)
    return max(0, longest) // block_size


def _run_step(
    model: PagedModel, backend: AttentionBackend, rows: StepRows, sampling: SamplingTable, head: PagedDraftHead | None
) -> int:
    """Run a step whose requests all sample. Return MLX's peak memory during the step, in bytes.

    Clears freed buffers first, because MLX reuses a buffer of up to twice the requested size.
    """
    mx.clear_cache()
    mx.reset_peak_memory()
    num_seqs = rows.num_requests
    adapters = None if model.adapters is None else model.adapters.worst_case_rows(rows.num_tokens)
    input_ids, attention = mx.zeros((rows.num_tokens,), mx.int32), backend.for_step(rows)
    hidden_indices = None if head is None else slice(None)
    logits, hidden = model.forward(input_ids, rows, attention, hidden_indices=hidden_indices, adapters=adapters)
    results = [sample(logits, sampling, np.arange(num_seqs), np.zeros(num_seqs, np.int32))]
    del logits
    if head is not None and hidden is not None:
        results.append(head.follow(input_ids, hidden, rows, attention, backend))
    del hidden
    mx.eval(*results, model.pool.writes_done_marker())
    synchronize()
    return mx.get_peak_memory()
