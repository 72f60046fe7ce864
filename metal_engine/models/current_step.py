"""The step being run, which layer caches and the replaced functions of mlx-lm's models look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from metal_engine.attention.backend import StepAttention
from metal_engine.kv_cache.rows import StepRows, TracedRows
from metal_engine.recurrence.metal import MetalRecurrence

if TYPE_CHECKING:
    from metal_engine.lora.layers import AdapterRows


class CurrentStep:
    """The step being run: set by ``PagedModel.forward``, read by the layer caches, which share one."""

    def __init__(self, recurrence: MetalRecurrence | None = None) -> None:
        self.recurrence = recurrence  # of all steps
        self.rows: StepRows | TracedRows | None = None
        self.attention: StepAttention | None = None
        self.positions: mx.array | None = None  # [N]
        self.adapters: AdapterRows | None = None  # None: no row has any
        self.logits_indices: mx.array | None = None  # [R]
        self.hidden_indices: mx.array | None = None  # [P]
        self.hidden: mx.array | None = None  # [P, 1, hidden_size], of those rows, once the trunk has run
