"""State of the running step, for layer caches and for the functions that replace mlx-lm's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from metal_engine.attention.backend import StepAttention
from metal_engine.attention.indexed import SelectionPlan
from metal_engine.attention.portable.groups import Dims
from metal_engine.kv_cache.rows import StepRows, TracedRows
from metal_engine.recurrence.metal import MetalRecurrence

if TYPE_CHECKING:
    from metal_engine.lora.layers import AdapterRows
    from metal_engine.models.multimodal.merging import StepImages


class CurrentStep:
    """State of the running step of a model or a draft head.

    The model or head owns one instance. It sets the fields at the start of each forward pass, and resets them at the
    end. All its layer caches and replaced functions read the instance.
    """

    def __init__(self, recurrence: MetalRecurrence | None = None) -> None:
        self.recurrence = recurrence  # for all steps
        self.rows: StepRows | TracedRows | None = None
        self.attention: StepAttention | None = None
        self.positions: mx.array | None = None  # [N]
        self.adapters: AdapterRows | None = None  # None: no row has an adapter
        self.images: StepImages | None = None  # None: no row has features of an image
        self.logits_indices: mx.array | None = None  # [R]
        self.hidden_indices: mx.array | slice | None = None  # [P]
        self.hidden: mx.array | None = None  # [P, 1, hidden_size], rows of hidden_indices, set by the trunk
        # Plans by (number of keys that a row selects, dimensions of the index). None: all rows attend to all keys.
        self.selection_plans: dict[tuple[int, Dims], SelectionPlan | None] = {}
        self.given: mx.array | None = None  # [R, 1, hidden_size], output of the trunk, which then does not run
