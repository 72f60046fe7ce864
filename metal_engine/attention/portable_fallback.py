"""Combines the kernel for most layers of a model with MLX's operations for the layers that it does not support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_engine.attention.backend import AttentionBackend, AttentionKind, StepAttention
from metal_engine.attention.indexed import Common, IndexQueries, KeySelection, SelectionPlan
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import IndexState, KVState


@dataclass(frozen=True)
class FallbackStep:
    """A step's attention by both backends. Each backend plans its work when its first layer calls it."""

    metal: StepAttention
    portable: StepAttention
    on_portable: frozenset[AttentionKind]

    def attend(
        self,
        q: mx.array,  # [N, Hq, D]
        state: KVState,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [Hq]
        chunk: int | None = None,
        selection: KeySelection | None = None,
    ) -> mx.array:  # [N, Hq, Dv], dtype of q
        """See :meth:`metal_engine.attention.backend.StepAttention.attend`."""
        is_portable = AttentionKind.of(q, state, window, softcap, sinks) in self.on_portable
        step = self.portable if is_portable else self.metal
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "chunk": chunk}
        return step.attend(q, state, scale=scale, selection=selection, **options)

    def select_keys(self, plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common) -> KeySelection:
        """See :meth:`metal_engine.attention.backend.StepAttention.select_keys`."""
        return self.metal.select_keys(plan, index, state, common)


@dataclass
class FallbackBackend:
    """Backend that divides layers between two backends.

    The division is fixed: if one backend fails in a step, the step fails.

    Attributes:
        metal: backend of the Metal kernel.
        portable: backend with MLX's operations.
        on_portable: kinds of layers that the portable backend computes.
    """

    metal: AttentionBackend
    portable: AttentionBackend
    on_portable: frozenset[AttentionKind]
    name: str = "metal"

    def for_step(self, rows: StepRows) -> FallbackStep:
        return FallbackStep(self.metal.for_step(rows), self.portable.for_step(rows), self.on_portable)
