"""Finds the kinds of attention that a model's layers use."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.indexed import Common, IndexQueries, KeySelection, SelectionPlan
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.kv_cache.state import IndexState, KVState
from metal_engine.models.paged_model import PagedModel, forward_error

_BLOCK_SIZE = 8


class _RecordingAttention:
    """Attention that records the kind of every call and returns zeros."""

    def __init__(self) -> None:
        self.kinds: list[AttentionKind] = []

    def attend(
        self,
        q: mx.array,  # [N, num_heads, head_dim]
        state: KVState,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [num_heads]
        chunk: int | None = None,
        selection: KeySelection | None = None,
    ) -> mx.array:  # [N, num_heads, v_head_dim]
        self.kinds.append(AttentionKind.of(q, state, window, softcap, sinks))
        return mx.zeros((*q.shape[:2], state.spec.v_head_dim), q.dtype)

    def select_keys(self, plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common) -> KeySelection:
        raise AssertionError("a request of one token does not select keys")


def attention_kinds(paged: PagedModel) -> list[AttentionKind]:
    """Return the kind of each attention call of a model, in the order of its forward pass.

    The list has one entry per call, also for a layer that reuses the K and V of another layer. Builds the graph of a
    step of one token without evaluating it. Allocates the pool of ``paged``, and releases it at the end.

    Raises:
        UnsupportedModelError: the forward pass does not run over a paged cache.
    """
    recording = _RecordingAttention()
    state_slots = np.array([ZERO_STATE_SLOT], np.int32), np.array([1], np.int32)
    block_table, contexts = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    rows = step_rows(block_table, contexts, [1], _BLOCK_SIZE, state_slots=state_slots)
    paged.pool.allocate(1, _BLOCK_SIZE, 1)
    try:
        paged(mx.zeros((1,), mx.int32), rows, recording)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise forward_error(error) from error
    finally:
        paged.pool.release()
    return recording.kinds
