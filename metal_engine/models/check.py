"""Proof, at load, that a model runs right through the seam: a few tokens, chunked and interleaved, against the
model's own cache."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.attention.backend import AttentionBackend, AttentionMetadata
from metal_engine.models.errors import UnsupportedModelError
from metal_engine.models.paged_model import PagedModel

_NUM_TOKENS = 16
_BLOCK_SIZE = 8
# Largest difference of logits, relative to their largest magnitude. Rounding differs between the two ways to
# compute the same thing by a few units in the last place per layer; a wrong position, mask or slot is of order 1.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}


def check_paged_model(paged: PagedModel, backend: AttentionBackend, vocab_size: int) -> None:
    """Run two requests of 16 tokens, each in two chunks, packed together; compare with mlx-lm's own forward.

    The chunks are of unequal length and the requests' blocks interleave, so that positions, slots, block
    tables and the causal edge all matter. Leaves ``paged`` without a cache.

    Raises:
        UnsupportedModelError: the logits differ, or some layer did not write and attend exactly once.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (2, _NUM_TOKENS)).astype(np.int32)
    blocks_per_request = -(-_NUM_TOKENS // _BLOCK_SIZE)
    block_table = np.arange(2 * blocks_per_request, dtype=np.int32).reshape(blocks_per_request, 2).T[:, ::-1]
    paged.allocate(2 * blocks_per_request, _BLOCK_SIZE)
    try:
        got = {}
        # (first, end) of each request's share of the two steps.
        for shares in (((0, 5), (0, 11)), ((5, 16), (11, 16))):
            for request, logits in _run_step(paged, backend, tokens, block_table, shares).items():
                got[request, shares[request][1]] = logits
        for layer, cache in enumerate(paged.layer_caches):
            if cache.num_writes != 2 or cache.num_reads != 2:
                raise UnsupportedModelError(
                    f"layer {layer} wrote its KV {cache.num_writes} and attended {cache.num_reads} times in 2 steps"
                )
    finally:
        paged.release()
    for (request, end), logits in got.items():
        own = paged.model(mx.array(tokens[request : request + 1, :end]), cache=make_prompt_cache(paged.model))
        expected = np.array(own[0, -1].astype(mx.float32))
        scale = np.abs(expected).max()
        error = np.abs(logits - expected).max() / scale if scale > 0 else np.abs(logits).max()
        if not error <= _TOLERANCE[paged.kv_specs[0].dtype]:
            raise UnsupportedModelError(
                f"its logits through the paged cache differ from mlx-lm's own by {error:.1e} of their size"
            )


def _run_step(
    paged: PagedModel,
    backend: AttentionBackend,
    tokens: np.ndarray,  # [2, num_tokens]
    block_table: np.ndarray,  # [2, max_blocks]
    shares: tuple[tuple[int, int], ...],
) -> dict[int, np.ndarray]:
    positions = np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in shares])
    requests = np.concatenate([np.full(end - first, r, np.int32) for r, (first, end) in enumerate(shares)])
    cu_seqlens_q = np.cumsum([0] + [end - first for first, end in shares]).astype(np.int32)
    slots = block_table[requests, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=np.array([end for _, end in shares], np.int32),
        block_table=np.ascontiguousarray(block_table),
        slot_mapping=mx.array(slots),
        block_size=_BLOCK_SIZE,
    )
    logits = paged(
        mx.array(tokens[requests, positions]),
        mx.array(positions),
        metadata,
        backend.plan(metadata),
        mx.array(cu_seqlens_q[1:] - 1),
    )
    if logits.shape[0] != len(shares):
        raise UnsupportedModelError("its LM head does not read the output of its trunk")
    array = np.array(logits.astype(mx.float32))
    return dict(enumerate(array))
