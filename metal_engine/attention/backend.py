"""What an attention backend is: it turns a step's rows into that step's attention, which every layer then uses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx

from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import AttentionSpec
from metal_engine.kv_cache.state import KVState


@dataclass(frozen=True)
class AttentionKind:
    """What sets a layer's attention apart from other layers': as far as kernels are compiled for it.

    Attributes:
        spec: what the layer keeps of a token.
        num_heads: query heads.
        dtype: of the queries.
        has_window: whether it has a sliding window, of whatever size; ``has_softcap`` likewise.
        sinks: dtype of its sinks; None where it has none.
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
        """The kind of a call of :meth:`StepAttention.attend`."""
        sinks_dtype = None if sinks is None else sinks.dtype
        return cls(state.spec, q.shape[1], q.dtype, window is not None, bool(softcap), sinks_dtype)

    @property
    def head_dims(self) -> str:
        """Its head dimensions, and how they are kept, for people to read."""
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
    """The attention of one step: planned once, used by every layer.

    Row r of a request, counted within its segment, sees key j if j <= context_len + r, and, with a window w, if
    j > context_len + r - w.
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
    ) -> mx.array:  # [N, num_heads, v_head_dim], dtype of q
        """Attention of every packed row over its request's K and V, this step's included (written already).

        ``window`` w: the query at position p sees keys p - w + 1 ... p. ``softcap`` c: scores become
        c * tanh(scores / c). ``sinks``: one logit per head that takes part in the softmax and adds no value. Over
        latents the output begins with their latent_dim columns; a backend may compute more, which nobody reads.
        """
        ...


@dataclass(frozen=True)
class StepTables:
    """What the attention of a step follows from, as arrays: steps with the same key differ in nothing else.

    Attributes:
        key: sizes, of arrays and of launches.
        attention: the attention over such arrays, of this or any other step with the key.
    """

    key: Hashable
    arrays: list[mx.array]
    attention: Callable[[list[mx.array]], StepAttention]


def size_class(n: int) -> int:
    """The next of 1, 1.25, 1.5 and 1.75 times a power of two: few sizes, and at most a quarter too large."""
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step


class AttentionBackend(Protocol):
    """Makes each step's attention."""

    name: str

    def for_step(self, rows: StepRows) -> StepAttention:
        """Plan a step's attention, on the host."""
        ...


@runtime_checkable
class ReplayableAttention(StepAttention, Protocol):
    """Attention of a step after which others can be replayed."""

    @property
    def asked(self) -> Hashable:
        """What a model's layers have asked for; the same in each of its steps."""
        ...


@runtime_checkable
class ReplayableBackend(Protocol):
    """A backend whose attention can be part of a trace."""

    def for_step(self, rows: StepRows) -> ReplayableAttention: ...

    def tables(self, rows: StepRows, asked: Hashable) -> StepTables | None:
        """Plan a step's attention as arrays, of sizes that other steps share.

        Args:
            asked: what the layers ask for, as an earlier step has told.

        Returns:
            None where the step takes too much.
        """
        ...
