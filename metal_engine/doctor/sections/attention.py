"""Time of attention over the paged cache, compared with MLX's attention over the same K and V, gathered beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, AttentionKind, StepAttention
from metal_engine.attention.choice import choose_backend
from metal_engine.attention.kernel_selftest import random_state, shuffled_rows
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.sample_steps import attend_kind, random_queries
from metal_engine.doctor.figures import Figure, at_most
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import MLX_FLAG, has_metal
from metal_engine.doctor.timing import in_turns
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import KVSpec
from metal_engine.kv_cache.state import KVState

# Heads of Qwen3-0.6B to Qwen3-8B, which have 16 or 32 query heads.
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 16, 8, 128
_BLOCK_SIZE = 16
# Layers in one evaluation, as in a model's step. With one layer, the launch would dominate.
_DECODE_LAYERS, _PREFILL_LAYERS = 16, 4


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the attention's time for each of ``plan.attention_steps``, relative to MLX's. ``model`` is not used."""
    dtype = mx.float16 if has_metal() else mx.float32
    kind = AttentionKind(KVSpec(_NUM_KV_HEADS, _HEAD_DIM, _HEAD_DIM, dtype), _NUM_HEADS, dtype)
    backend = choose_backend("auto", _BLOCK_SIZE).metal or PortableBackend()
    flag = MLX_FLAG if has_metal() else ""
    yield "computed by", f"{backend.name}, {_NUM_HEADS} query heads, {_NUM_KV_HEADS} KV heads of {_HEAD_DIM}, {dtype}"
    for requests, query, keys in plan.attention_steps:
        ours, theirs = layer_seconds(backend, kind, (requests, query, keys), plan.repeats)
        note = f"{1e3 * ours:.3g} ms a layer beside {1e3 * theirs:.3g} ms"
        what = "decode" if query == 1 else "prompt"
        title = f"{what}, {requests} x {query} on {keys:,}: time relative to `mx.fast.scaled_dot_product_attention`"
        yield Figure(title, ours / theirs, promise=at_most(1.0, slack=0.15, flag=flag), note=note)


def layer_seconds(
    backend: AttentionBackend, kind: AttentionKind, step: tuple[int, int, int], repeats: int
) -> tuple[float, float]:
    """Return the times of a layer's attention by the backend and by MLX, in seconds.

    The backend reads the paged cache, while MLX gets the K and V of this cache already gathered.

    Args:
        step: (number of requests, new tokens of each, keys of each). The keys include the new tokens.
    """
    requests, query, keys = step
    rows = shuffled_rows([(query, keys - query)] * requests, _BLOCK_SIZE)
    state = random_state(kind, rows)
    q = random_queries(kind, rows.num_tokens)
    gathered = _gathered(state, rows, keys)
    by_request = q.reshape(requests, query, *q.shape[1:]).swapaxes(1, 2)
    mx.eval(q, gathered)
    layers = _DECODE_LAYERS if query == 1 else _PREFILL_LAYERS
    calls = {
        "ours": partial(_ours, backend.for_step(rows), kind, q, state, layers),
        "theirs": partial(_theirs, by_request, gathered, None if query == 1 else "causal", layers),
    }
    times = in_turns(calls, repeats)
    return times["ours"] / layers, times["theirs"] / layers


def _ours(attention: StepAttention, kind: AttentionKind, q: mx.array, state: KVState, layers: int) -> list[mx.array]:
    return [attend_kind(attention, kind, q + i, state, None) for i in range(layers)]


def _theirs(q: mx.array, gathered: tuple[mx.array, mx.array], mask: str | None, layers: int) -> list[mx.array]:
    options = {"scale": q.shape[-1] ** -0.5, "mask": mask}
    return [mx.fast.scaled_dot_product_attention(q + i, *gathered, **options) for i in range(layers)]


def _gathered(state: KVState, rows: StepRows, keys: int) -> tuple[mx.array, mx.array]:
    """Return K and V of each request, [requests, num_kv_heads, keys, head_dim]."""
    positions = np.arange(keys)
    slots = rows.block_table[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    indices = mx.array(slots.astype(np.int32))
    keys_of, values_of = (mx.contiguous(array[indices].swapaxes(1, 2)) for array in (state.keys, state.values))
    return keys_of, values_of
