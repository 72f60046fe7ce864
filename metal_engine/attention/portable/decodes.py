"""Work of a step as two arrays of sizes that other steps share, for a trace that these steps replay.

Every packed row forms a request of one row here, regardless of the request that it belongs to. All rows are padded to
the same number of keys (the drawing in ``planning`` shows such a group).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import size_class
from metal_engine.attention.portable.groups import Dims, Limits
from metal_engine.attention.portable.planning import MASKED, Queries, ScoreTile, Span, Unit, Work
from metal_engine.kv_cache.rows import StepRows


def decodes_as_arrays(rows: StepRows, window: int | None, dims: Dims, limits: Limits) -> list[mx.array] | None:
    """Return the keys that each row reads, and a mask of the keys that it sees.

    Returns:
        [N, Hkv, S] int32 for ``KVState.read_heads``, and [N, 1, 1, 1, S] float32, 0 or ``MASKED``. None if there are
        more keys than a group may gather at once.
    """
    last = rows.positions[:, None]  # [N, 1]
    first = np.zeros_like(last) if window is None else np.maximum(0, last - (window - 1))
    num_keys = size_class(max(limits.min_keys, int((last - first).max()) + 1))
    per_key = rows.num_tokens * max(dims.num_kv_heads * dims.head_dim / limits.span, dims.num_heads / limits.scores)
    if num_keys > limits.min_keys and num_keys * per_key > 1:
        return None
    keys = first + np.arange(num_keys)  # [N, S]
    # Padding repeats the row's own key, so that a row reads only its own request's slots.
    slots = rows.slots(rows.request_of_row[:, None], np.minimum(keys, last))
    head_rows = slots[:, None] * dims.num_kv_heads + np.arange(dims.num_kv_heads)[:, None]  # [N, Hkv, S]
    bias = np.where(keys <= last, np.float32(0), np.float32(MASKED))
    return [mx.array(head_rows.astype(np.int32)), mx.array(bias[:, None, None, None])]


def decode_work(head_rows: mx.array, bias: mx.array) -> Work:
    """Return the work that arrays of :func:`decodes_as_arrays` describe."""
    num_rows, _, num_keys = head_rows.shape
    span = Span(head_rows, [ScoreTile(0, 0, num_keys, (bias,))])
    return Work([Unit([Queries(num_rows, 1, 0)], [span])], [], None, num_rows * num_keys, num_rows * num_keys)
