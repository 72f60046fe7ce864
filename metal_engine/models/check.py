"""Check at load that a model runs correctly over the paged cache.

Runs two short requests in packed steps, chunk by chunk. Compares the logits with the result of mlx-lm's forward pass
over mlx-lm's own cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import get_total_parameters

from metal_engine.attention.backend import AttentionBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.kv_cache.writes import choose_writes
from metal_engine.models.cache_tree import map_caches
from metal_engine.models.check_chunks import small_chunks
from metal_engine.models.check_rounding import ComparingBackend, with_recording_states
from metal_engine.models.check_selection import SelectionCheck, small_selection
from metal_engine.models.indexer import IndexCache
from metal_engine.models.layer_cache import Attention, AttentionCall, AttentionOwner, OwnedKeys
from metal_engine.models.paged_model import PagedModel, forward_error

_NUM_TOKENS = 16  # minimum length of a request, which also has at least _BLOCK_SIZE tokens more than a block
_BLOCK_SIZE = 8  # default block size of the check
_MAX_BLOCK_SIZE = 32  # no kernel supports larger blocks, and they would only make the requests longer
# The two requests use the last and the first slot, so that states must be read from the slots they were written to.
_NUM_STATE_SLOTS = 3
# A longer request, which crosses a sliding window, is run if the whole check stays within this number of operations (a
# second or two) and the window within _MAX_WINDOW tokens. mlx-lm's own forward pass computes logits for every token.
_CPU_FLOPS, _GPU_FLOPS = 2e11, 1e13
_MAX_WINDOW = 1024
# Largest difference of logits relative to their largest magnitude. The two computations differ by a few units in the
# last place per layer. A wrong position, mask or slot causes a difference of order 1.
LOGITS_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}
# In half precision, rounding may route a token to another expert if two experts have nearly equal scores. Its logits
# then differ greatly. The check is repeated with other tokens, because a bug shows in every attempt.
_ATTEMPTS = {mx.float32: 1, mx.float16: 3, mx.bfloat16: 3}

# Returns the maximum of a number over all ranks that share a model. The string names the number.
MaxOverRanks = Callable[[str, int], int]


def check_paged_model(
    paged: PagedModel,
    backend: AttentionBackend,
    vocab_size: int,
    block_size: int = _BLOCK_SIZE,
    *,
    max_over_ranks: MaxOverRanks = lambda what, number: number,
) -> float:
    """Run two requests, each in two chunks and a decode, packed together. Compare with mlx-lm's own forward pass.

    The requests are a little longer than a block. If the model has a sliding window and the check remains cheap, the
    first request is longer than the window. The chunks have unequal lengths and the requests' blocks interleave, so
    that a wrong position, slot, block table or causal edge changes the logits. If layers attend within chunks of the
    context, both sides run with short chunks (:mod:`metal_engine.models.check_chunks`). If layers have an index, both
    sides select few keys, and each layer's selection is compared (:mod:`metal_engine.models.check_selection`).
    Allocates the pool of ``paged``, and releases it at the end.

    If K and V are quantized, the logits are compared with unquantized K and V and the portable backend, so that the
    bound can be tight. A second run with quantized K and V and ``backend`` compares the attention of each layer
    (:mod:`metal_engine.models.check_rounding`).

    Args:
        paged: model to check.
        backend: attention backend to check.
        vocab_size: number of token ids.
        block_size: block size of the server.
        max_over_ranks: returns the maximum of a number over all ranks. Required if ``paged`` is one rank's shard: all
            ranks must run the same number of tokens and attempts.

    Returns:
        Largest difference of a logit, divided by the largest magnitude of the logits of its row.

    Raises:
        UnsupportedModelError: a step failed, the logits or the selected keys differ, attention over quantized K and V
            differs, or a layer did not write exactly once and attend at least once in every step.
        UnsupportedAttentionError: the backend does not support the attention of a layer.
    """
    block_size = min(block_size, _MAX_BLOCK_SIZE)
    with small_chunks(paged), small_selection(paged):
        if paged.kv_bits is None:
            return _check_logits(paged, backend, vocab_size, block_size, max_over_ranks)
        with paged.using_pool(paged.pool.unquantized()):
            gap = _check_logits(paged, PortableBackend(), vocab_size, block_size, max_over_ranks)
        with paged.using_pool(with_recording_states(paged.pool)):
            _run(paged, ComparingBackend(backend), _Requests.of(paged, vocab_size, block_size, 0, max_over_ranks))
        return gap


@dataclass(frozen=True)
class _Requests:
    """Tokens of two requests and their division into three steps.

    Attributes:
        tokens: tokens of each request.
        block_size: tokens of a block.
        block_table: [2, max_blocks], blocks of each request in descending order, alternating between the requests.
        ranges: for each step, the range (first, end) of each request's tokens in the step, without ``end``.
        orders: for each step, the indices of the requests in packing order.
    """

    tokens: list[np.ndarray]
    block_size: int
    block_table: np.ndarray
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    orders: tuple[list[int], ...]

    @classmethod
    def of(
        cls, paged: PagedModel, vocab_size: int, block_size: int, seed: int, max_over_ranks: MaxOverRanks
    ) -> _Requests:
        rng = np.random.default_rng(seed)
        num_tokens = max(_NUM_TOKENS, block_size + _BLOCK_SIZE)
        lengths = (max_over_ranks("tokens of the check", _first_length(paged, num_tokens)), num_tokens)
        tokens = [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
        max_blocks = -(-lengths[0] // block_size)
        block_table = np.arange(2 * max_blocks, dtype=np.int32).reshape(max_blocks, 2).T[:, ::-1]
        # Two chunks, then a decode with the requests in reverse order.
        cut, last = lengths[0] - 11, (lengths[0] - 1, num_tokens - 1)
        ranges = (((0, cut), (0, 11)), ((cut, last[0]), (11, last[1])), ((last[0], lengths[0]), (last[1], num_tokens)))
        return cls(tokens, block_size, block_table, ranges, ([0, 1], [0, 1], [1, 0]))


def _check_logits(
    paged: PagedModel, backend: AttentionBackend, vocab_size: int, block_size: int, max_over_ranks: MaxOverRanks
) -> float:
    selection = SelectionCheck(paged)
    # mlx-lm's own caches may hold values of 4 or 8 bits, whose rounding depends on the chunks. float32's tolerance is
    # too small for such values.
    dtype = mx.float16 if paged.own_caches_reason and paged.dtype == mx.float32 else paged.dtype
    for seed in range(_ATTEMPTS[dtype]):
        requests = _Requests.of(paged, vocab_size, block_size, seed, max_over_ranks)
        with selection.recording():
            logits = _run(paged, backend, requests)
        gap = _largest_gap(paged, logits, requests, selection)
        is_off = not gap <= LOGITS_TOLERANCE[dtype] or not selection.is_same
        # All ranks try again, or no rank: a rank that continued alone would wait for the others forever.
        if not max_over_ranks("logits that are off", int(is_off)):
            return gap
    if not is_off:
        raise UnsupportedModelError("its logits through the paged cache are off from mlx-lm's own on another rank")
    if not selection.is_same:
        raise UnsupportedModelError("its index selects other keys through the paged cache than in mlx-lm's own pass")
    raise UnsupportedModelError(
        f"its logits through the paged cache are off from mlx-lm's own by {gap:.1g} of their size"
    )


def _run(paged: PagedModel, backend: AttentionBackend, requests: _Requests) -> list[np.ndarray]:
    """Run the requests. Return the logits of each request's last row, [2, vocab_size] float32 for each step.

    Allocates and releases the pool.

    Raises:
        UnsupportedAttentionError: the attention backend does not support a layer.
        UnsupportedModelError: a step failed for another reason, or a layer did not write exactly once and attend at
            least once in each step.
    """
    before = [(cache.num_writes, cache.num_reads) for cache in paged.layer_caches]
    paged.pool.allocate(requests.block_table.size, requests.block_size, _NUM_STATE_SLOTS)
    try:
        steps = zip(requests.ranges, requests.orders, strict=True)
        logits = [_run_step(paged, backend, requests, ranges, order) for ranges, order in steps]
    except UnsupportedAttentionError:
        raise  # the error already explains the problem
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise forward_error(error) from error
    finally:
        paged.pool.release()
    num_steps = len(logits)
    for layer, (cache, (num_writes, num_reads)) in enumerate(zip(paged.layer_caches, before, strict=True)):
        num_writes, num_reads = cache.num_writes - num_writes, cache.num_reads - num_reads
        if num_writes != num_steps or num_reads < num_steps:  # layers that share KV read more often
            raise UnsupportedModelError(
                f"the packed forward does not reach the cache of layer {layer}, which stored KV in {num_writes} "
                f"and attended in {num_reads} of {num_steps} steps"
            )
    return logits


def _largest_gap(paged: PagedModel, logits: list[np.ndarray], requests: _Requests, selection: SelectionCheck) -> float:
    """Return the largest difference from mlx-lm's own logits. NaN if a logit is NaN.

    Each difference is divided by the largest magnitude of mlx-lm's logits for the same token.
    """
    gaps = []
    for request, tokens in enumerate(requests.tokens):
        own = _own_logits(paged, mx.array(tokens), selection, int(requests.block_table[request, 0]))
        mx.eval(own)  # raises errors of operations; the conversion to NumPy would not
        for found, ranges in zip(logits, requests.ranges, strict=True):
            expected = np.array(own[ranges[request][1] - 1].astype(mx.float32))
            scale = np.abs(expected).max()
            gaps.append(np.abs(found[request] - expected).max() / (scale if scale > 0 else 1.0))
    return float(np.max(gaps))


def _first_length(paged: PagedModel, least: int) -> int:
    """Return the length of the first request: past the largest affordable window, and at least ``least`` tokens."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    # A multiplication and an addition per parameter and token, once through the paged cache and once without.
    flops = _GPU_FLOPS if on_gpu else _CPU_FLOPS
    affordable = flops / (4 * get_total_parameters(paged.model)) - least
    lengths = [w + _BLOCK_SIZE for w in paged.windows if w <= _MAX_WINDOW and w + _BLOCK_SIZE <= affordable]
    return max([least, *lengths])


def _run_step(
    paged: PagedModel,
    backend: AttentionBackend,
    requests: _Requests,
    ranges: tuple[tuple[int, int], ...],
    order: list[int],
) -> np.ndarray:
    """Run one packed step. Return the logits of each request's last row, [2, vocab_size] float32."""
    first, end = np.array([ranges[request] for request in order], np.int32).T
    # Whole blocks are written as under page-aligned scheduling, other rows by slot or as runs.
    make_writes = choose_writes(page_aligned=True)
    slots = np.array([_NUM_STATE_SLOTS, 1], np.int32)[order]
    state_slots = np.where(first > 0, slots, ZERO_STATE_SLOT), slots
    block_table, lens = requests.block_table[order], end - first
    rows = step_rows(block_table, first, lens, requests.block_size, state_slots=state_slots, make_writes=make_writes)
    input_ids = np.concatenate([requests.tokens[request][slice(*ranges[request])] for request in order])
    logits = paged(mx.array(input_ids), rows, backend.for_step(rows))
    if logits.shape[0] != len(ranges):
        raise UnsupportedModelError("its LM head does not read the output of its trunk")
    mx.eval(logits)  # raises errors of operations
    return np.array(logits.astype(mx.float32))[np.argsort(order)]


class _ExactCache(AttentionOwner):
    """Wrapper of an mlx-lm cache, with attention computed in float32. Delegates all other members to the cache.

    In half precision, MLX on a CPU also rounds the scores to half precision. In a model whose key biases are large,
    scores are large, and rounding them changes the logits as much as a bug would.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store K and V, [B, num_kv_heads, T, head_dim]. Return all stored K and V."""
        keys, values = self._cache.update_and_fetch(keys, values)
        return OwnedKeys(keys, self), values

    def attend(self, call: AttentionCall, original: Attention) -> mx.array:
        """Compute attention, [B, num_heads, T, v_head_dim], in the queries' dtype."""
        queries, keys, values = (_in_float32(array) for array in (call.queries, call.keys, call.values))
        out = original(queries, keys, values, None, call.scale, _in_float32(call.mask), _in_float32(call.sinks))
        return out.astype(call.queries.dtype)


def _in_float32(part: Any) -> Any:
    """Convert numbers to float32. Boolean masks, strings and None are returned unchanged."""
    return part.astype(mx.float32) if isinstance(part, mx.array) and part.dtype != mx.bool_ else part


def _own_logits(paged: PagedModel, tokens: mx.array, selection: SelectionCheck, first_block: int) -> mx.array:
    """Return the logits of a prompt, [T] int32, from a patched model's own forward pass: [T, vocab_size].

    Args:
        selection: comparison of the keys that mlx-lm's indexes select with the keys that the packed steps selected.
        first_block: first block of the request in the packed steps, which identifies the request in ``selection``.
    """
    packed = iter(paged.layer_caches)

    def exact(cache: Any) -> Any:
        layer = next(packed, None)
        if layer is None:  # the model runs over mlx-lm's own caches
            return cache
        if isinstance(layer, IndexCache):
            return selection.own_cache(layer, cache, first_block)
        return _ExactCache(cache) if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache) else cache

    return paged.model(tokens[None], cache=map_caches(exact, make_prompt_cache(paged.model)))[0]
