"""Variable-length paged attention in float64 NumPy, row by row: what every backend must agree with.

Written from the definitions in ``attention/backend.py`` and sharing nothing with any backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def paged_attention(
    q: np.ndarray,  # [N, Hq, D]
    k_cache: np.ndarray,  # [num_blocks, block_size, Hkv, D]
    v_cache: np.ndarray,  # [num_blocks, block_size, Hkv, Dv]
    cu_seqlens_q: Sequence[int],  # [B+1]
    seq_lens: Sequence[int],  # [B]
    block_table: np.ndarray,  # [B, max_blocks]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,  # [Hq]
) -> np.ndarray:  # [N, Hq, Dv] float64
    num_tokens, num_heads, _ = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = np.full((num_tokens, num_heads, v_cache.shape[-1]), np.nan)
    for i, seq_len in enumerate(seq_lens):
        start, end = cu_seqlens_q[i], cu_seqlens_q[i + 1]
        context_len = seq_len - (end - start)
        for row in range(start, end):
            position = context_len + (row - start)
            first = 0 if window is None else max(0, position - window + 1)
            seen = range(first, position + 1)
            where = [(block_table[i, p // block_size], p % block_size) for p in seen]
            k = np.stack([k_cache[b, o] for b, o in where]).astype(np.float64)  # [keys, Hkv, D]
            v = np.stack([v_cache[b, o] for b, o in where]).astype(np.float64)  # [keys, Hkv, Dv]
            for head in range(num_heads):
                scores = k[:, head // group] @ q[row, head].astype(np.float64) * scale  # [keys]
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                logits = scores if sinks is None else np.append(scores, sinks[head])
                weights = np.exp(scores - logits.max())
                total = np.exp(logits - logits.max()).sum()
                out[row, head] = weights @ v[:, head // group] / total
    return out
