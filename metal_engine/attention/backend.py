"""Interface of an attention backend. A backend plans a step's attention from the step's rows, once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx

from metal_engine.attention.indexed import Common, IndexQueries, KeySelection, SelectionPlan
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import AttentionSpec
from metal_engine.kv_cache.state import IndexState, KVState


@dataclass(frozen=True)
class AttentionKind:
    """Properties of a layer's attention for which kernels are compiled separately.

    Attributes:
        spec: spec of the layer's state.
        num_heads: number of query heads.
        dtype: type of the queries.
        has_window: True if the layer has a sliding window, of any size.
        has_softcap: True if the layer has a softcap.
        sinks: type of the attention sinks; None if the layer has no sinks.
    """

    spec: AttentionSpec
    num_heads: int
    dtype: mx.Dtype
    has_window: bool = False
    has_softcap: bool = False
    sinks: mx.Dtype | None = None

    @classmethod
    def of(
        cls, q: mx.array, state: KVState, window: int | None, softcap: float | None, sinks: mx.array | None
    ) -> AttentionKind:
        """Return the kind of a call of :meth:`StepAttention.attend`."""
        sinks_dtype = None if sinks is None else sinks.dtype
        return cls(state.spec, q.shape[1], q.dtype, window is not None, bool(softcap), sinks_dtype)

    @property
    def head_dims(self) -> str:
        """Head dimensions and storage format, for messages."""
        return str(self.spec)

    def __str__(self) -> str:
        extras = {"a window": self.has_window, "softcap": self.has_softcap, "sinks": self.sinks is not None}
        names = [
            f"{self.num_heads} query heads",
            f"{self.spec.num_kv_heads} KV heads",
            self.head_dims,
            *(name for name, has in extras.items() if has),
            str(self.dtype).removeprefix("mlx.core."),
        ]
        return ", ".join(names)


class StepAttention(Protocol):
    """Attention of one step: planned once, used by every layer.

    Row r of a request, counted from the request's first row in the step, attends to key j if j <= context_len + r. With
    a window w, the row attends only to keys with j > context_len + r - w. A row of an image whose tokens attend to each
    other in this layer (:meth:`metal_engine.kv_cache.rows.StepRows.spans_of_layer`) also attends to the later rows of
    the image.
    """

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
    ) -> mx.array:  # [N, num_heads, v_head_dim], dtype of q
        """Compute attention of every packed row over its request's K and V, including the rows of this step.

        Args:
            q: queries, [N, num_heads, head_dim].
            state: keys and values of the layer.
            scale: factor of the scores.
            window: size w of the sliding window. The query at position p sees keys p - w + 1 ... p.
            softcap: number c. Scores become c * tanh(scores / c).
            sinks: one logit per head, [num_heads], which takes part in the softmax and adds no value.
            chunk: number c. The query at position p sees no key before the largest multiple of c that is at most p.
            selection: keys to which rows attend, in layers without the four options above. None: all keys.

        Returns:
            Outputs, [N, num_heads, v_head_dim] in q's dtype. For latents, only the first ``latent_dim`` columns are
            the output. The caller drops the others.
        """
        ...

    def select_keys(self, plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common) -> KeySelection:
        """Select keys for :meth:`attend`. See :func:`metal_engine.attention.portable.indexed.select_keys`."""
        ...


@dataclass(frozen=True)
class StepTables:
    """Arrays that determine the attention of a step. Steps with the same key differ only in these arrays.

    Attributes:
        key: sizes of the arrays and of the kernel launches.
        arrays: the arrays of this step.
        attention: creates the attention from the arrays of any step with the same key.
    """

    key: Hashable
    arrays: list[mx.array]
    attention: Callable[[list[mx.array]], StepAttention]


def size_class(n: int) -> int:
    """Return the smallest number, at least ``n``, that is 1, 1.25, 1.5 or 1.75 times a power of two.

    Rounding sizes in this way leaves few different sizes. A size grows by at most a quarter.
    """
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step


class AttentionBackend(Protocol):
    """Creates each step's attention."""

    name: str

    def for_step(self, rows: StepRows) -> StepAttention:
        """Plan a step's attention on the host."""
        ...


@runtime_checkable
class ReplayableAttention(StepAttention, Protocol):
    """Attention of a step by a :class:`ReplayableBackend`. It records how its layers attend, for later steps."""

    @property
    def work_keys(self) -> Hashable:
        """Parameters of the work plans that the step's layers have requested, such as their windows.

        :meth:`ReplayableBackend.tables` takes them as an argument. They are complete after the calls of all layers. All
        steps of a model have equal keys.
        """
        ...


@runtime_checkable
class ReplayableBackend(Protocol):
    """A backend whose attention can be part of a trace (:mod:`metal_engine.runner.replay`)."""

    def for_step(self, rows: StepRows) -> ReplayableAttention: ...

    def tables(self, rows: StepRows, work_keys: Hashable) -> StepTables | None:
        """Plan a step's attention as arrays whose sizes are rounded up, so that many steps have the same sizes.

        Args:
            rows: rows of the step.
            work_keys: :attr:`ReplayableAttention.work_keys` of an earlier step.

        Returns:
            The arrays; None if the step's attention needs too much memory.
        """
        ...
