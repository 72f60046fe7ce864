"""Proof, at load, that a model runs right through the seam: a few tokens, chunked and interleaved, against
the model's own forward over its own cache."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.utils import get_total_parameters

from metal_engine.attention.backend import AttentionBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.segments import NO_STATE
from metal_engine.kv_cache.writes import choose_writes
from metal_engine.models.paged_model import PagedModel
from metal_engine.models.rounded_cache import own_caches

logger = logging.getLogger(__name__)

_NUM_TOKENS = 16  # of a request at least, and half a small block more than a block
_BLOCK_SIZE = 8
_MAX_BLOCK_SIZE = 32  # larger ones would only make the requests longer: no kernel does them
# Of which the two requests use the last and the first: states must come from where they were left.
_NUM_STATE_SLOTS = 3
# A longer request, to cross a sliding window, is run if all of the check stays within so much work: a
# second or two. Its logits are computed for every token by the model's own forward, which bounds the window
# too.
_CPU_FLOPS, _GPU_FLOPS = 2e11, 1e13
_MAX_WINDOW = 1024
# Largest difference of logits, relative to their largest magnitude. Rounding differs between the two ways
# to compute the same thing by a few units in the last place per layer; a wrong position, mask or slot is of
# order 1.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}
# Half precision may send a token to another expert where two are about equally good, and then logits differ by much.
# Other tokens tell that from a mistake, which shows every time.
_ATTEMPTS = {mx.float32: 1, mx.float16: 3, mx.bfloat16: 3}
# The same over quantized K and V, by bits. mlx-lm's forward gets them rounded, too; but where a number lies between two
# that can be kept, the least difference sends it to the other, and in half precision there are many such. Other tokens
# have theirs elsewhere. Measured on 70 architectures in float32: 0.007 at most, but for one in 50, which is up to 0.14;
# in half precision on 14 of them: 0.12 and 0.22 (int8), 0.34 and 0.44 (int4).
_QUANTIZED_TOLERANCE = {
    8: {mx.float32: 1e-2, mx.float16: 1e-1, mx.bfloat16: 3e-1},
    4: {mx.float32: 3e-2, mx.float16: 4e-1, mx.bfloat16: 6e-1},
}
_QUANTIZED_ATTEMPTS = 3


class _LogitsDiffer(UnsupportedModelError):
    pass


def check_paged_model(
    paged: PagedModel,
    backend: AttentionBackend,
    vocab_size: int,
    block_size: int = _BLOCK_SIZE,
    *,
    agree: Callable[[int], int] = lambda length: length,
) -> None:
    """Run two requests, each in two chunks and a decode, packed together; compare with mlx-lm's own forward.

    Requests are a little longer than a block; the first is longer still where that takes it past a sliding window at
    little cost. The chunks are of unequal length and the requests' blocks interleave, so that positions, slots, block
    tables and the causal edge all matter. Leaves ``paged`` without a cache.

    Args:
        block_size: the server's.
        agree: where ``paged`` is a rank's share of a model, makes of a length that which all ranks run.

    Raises:
        UnsupportedModelError: the logits differ, or some layer did not write once a step and attend.
        UnsupportedAttentionError: the backend does not do the model's shape.
    """
    attempts = _ATTEMPTS[paged.dtype] if paged.kv_bits is None else _QUANTIZED_ATTEMPTS
    block_size = min(block_size, _MAX_BLOCK_SIZE)
    num_tokens = max(_NUM_TOKENS, block_size + _BLOCK_SIZE)
    lengths = (agree(_first_length(paged, num_tokens)), num_tokens)
    for seed in range(attempts):
        try:
            return _check(paged, backend, vocab_size, block_size, lengths, np.random.default_rng(seed))
        except _LogitsDiffer:
            if seed == attempts - 1:
                raise


def _check(
    paged: PagedModel,
    backend: AttentionBackend,
    vocab_size: int,
    block_size: int,
    lengths: tuple[int, int],
    rng: np.random.Generator,
) -> None:
    num_tokens = lengths[1]
    tokens = [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
    max_blocks = -(-lengths[0] // block_size)
    # [2, max_blocks]: each request's blocks in falling order, the two taking turns.
    block_table = np.arange(2 * max_blocks, dtype=np.int32).reshape(max_blocks, 2).T[:, ::-1]
    # (first, end) of each request's share of the steps: two chunks, then a decode, in the other order.
    cut, last = lengths[0] - 11, (lengths[0] - 1, num_tokens - 1)
    steps = (((0, cut), (0, 11)), ((cut, last[0]), (11, last[1])), ((last[0], lengths[0]), (last[1], num_tokens)))
    orders = ([0, 1], [0, 1], [1, 0])
    before = [(cache.num_writes, cache.num_reads) for cache in paged.layer_caches]
    paged.pool.allocate(2 * max_blocks, block_size, _NUM_STATE_SLOTS)
    try:
        got = [
            _run_step(paged, backend, tokens, block_table, block_size, shares, order)
            for shares, order in zip(steps, orders, strict=True)
        ]
        for layer, (cache, (num_writes, num_reads)) in enumerate(zip(paged.layer_caches, before, strict=True)):
            num_writes, num_reads = cache.num_writes - num_writes, cache.num_reads - num_reads
            if num_writes != len(steps) or num_reads < len(steps):  # more reads: layers that share their KV
                raise UnsupportedModelError(
                    f"the packed forward does not reach the cache of layer {layer}, which stored KV in {num_writes} "
                    f"and attended in {num_reads} of {len(steps)} steps"
                )
    except UnsupportedAttentionError:
        raise  # it says by itself what cannot be done
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise forward_fails(error) from error
    finally:
        paged.pool.release()
    tolerance = (_TOLERANCE if paged.kv_bits is None else _QUANTIZED_TOLERANCE[paged.kv_bits])[paged.dtype]
    specs = [state.spec for state in paged.pool.states]
    for request, sequence in enumerate(tokens):
        own = paged.model(mx.array(sequence)[None], cache=own_caches(paged.model, specs))[0]
        for logits, shares in zip(got, steps, strict=True):
            expected = np.array(own[shares[request][1] - 1].astype(mx.float32))
            scale = np.abs(expected).max()
            gap = np.abs(logits[request] - expected).max() / (scale if scale > 0 else 1.0)
            if not gap <= tolerance:
                raise _LogitsDiffer(
                    f"its logits through the paged cache are off from mlx-lm's own by {gap:.1g} of their size"
                )


def forward_fails(error: Exception) -> UnsupportedModelError:
    """What to raise for an error of a packed forward. Logs a text of many lines, such as a compiler's, in full.

    MLX raises a RuntimeError for what a device cannot do, such as experts in half precision on a CPU.
    """
    first, *others = f"{type(error).__name__}: {error}".splitlines()
    if others:
        logger.error("a packed forward fails: %s", "\n".join([first, *others]))
    return UnsupportedModelError(f"its forward does not run over a paged cache ({first})")


def _first_length(paged: PagedModel, least: int) -> int:
    """Tokens of the first request: past the largest window that is affordable, and not less than asked for."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    # A product and a sum for each parameter and token, through the paged cache and again without.
    flops = _GPU_FLOPS if on_gpu else _CPU_FLOPS
    affordable = flops / (4 * get_total_parameters(paged.model)) - least
    lengths = [w + _BLOCK_SIZE for w in paged.windows if w <= _MAX_WINDOW and w + _BLOCK_SIZE <= affordable]
    return max([least, *lengths])


def _run_step(
    paged: PagedModel,
    backend: AttentionBackend,
    tokens: list[np.ndarray],
    block_table: np.ndarray,  # [2, max_blocks]
    block_size: int,
    shares: tuple[tuple[int, int], ...],
    order: list[int],
) -> np.ndarray:
    """One packed step; the logits of each request's last row, [2, vocab_size] float32.

    Args:
        order: in which the requests are packed.
    """
    first, end = np.array([shares[request] for request in order], np.int32).T
    # Whole blocks are written as an engine would write them under page-aligned scheduling; others by slot or run.
    make_writes = choose_writes(page_aligned=True)
    slots = np.array([_NUM_STATE_SLOTS, 1], np.int32)[order]
    state_slots = np.where(first > 0, slots, NO_STATE), slots
    lens = end - first
    rows = step_rows(block_table[order], first, lens, block_size, state_slots=state_slots, make_writes=make_writes)
    input_ids = np.concatenate([tokens[request][slice(*shares[request])] for request in order])
    logits = paged(mx.array(input_ids), rows, backend.for_step(rows))
    if logits.shape[0] != len(shares):
        raise UnsupportedModelError("its LM head does not read the output of its trunk")
    return np.array(logits.astype(mx.float32))[np.argsort(order)]
