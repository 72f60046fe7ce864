"""A layer's recurrent state in the form in which mlx-lm's models use a cache of arrays.

A module of mlx-lm takes an array out of its cache, computes over its rows, and puts the new one back. Over a paged pool
neither happens as it stands: what is taken out is a placeholder, what is put back is passed over, and the function that
needs the state (a convolution, a recurrence) gets it here, by segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from metal_engine.kv_cache.recurrent import RecurrentState, reads_of
from metal_engine.kv_cache.rows import StepRows, TracedRows
from metal_engine.kv_cache.segments import SegmentGroup, Segments
from metal_engine.models.current_step import CurrentStep
from metal_engine.recurrence.convolution import convolve_by_shifts, may_shift
from metal_engine.recurrence.metal import MetalRecurrence


class OwnedState(mx.array):
    """Stands for an array of a state cache in a call of a recurrence, which finds the cache by it."""

    def __init__(self, dtype: mx.Dtype, owner: StateCache, name: str) -> None:
        super().__init__(mx.zeros((1,), dtype))
        self.owner = owner
        self.name = name


class StateCache:
    """Stands for mlx-lm's ``ArraysCache`` over one layer's states.

    Attributes:
        convolved: names of the arrays that convolutions keep (:meth:`convolve`).
    """

    # Nothing is padded here.
    lengths = None
    left_padding = None

    def __init__(self, step: CurrentStep, state: RecurrentState) -> None:
        self._step = step
        self._state = state
        self._names = list(state.spec.request_arrays)
        self._put_in: dict[str, StepRows | TracedRows | None] = dict.fromkeys(self._names)
        self._num_puts = dict.fromkeys(self._names, 0)
        self.convolved: set[str] = set()

    @property
    def metal(self) -> MetalRecurrence | None:
        """Launches kernels for all segments at once; None where MLX's own operations do."""
        return self._step.recurrence

    @property
    def is_running(self) -> bool:
        """Whether a packed step is being run, and not mlx-lm's own forward."""
        return self._step.rows is not None

    @property
    def segments(self) -> Segments:
        rows = self._step.rows
        assert rows is not None and rows.segments is not None
        return rows.segments

    @property
    def num_writes(self) -> int:
        """In how many steps the layer has left states, all of them; for the check at load."""
        return min(self._num_puts.values())

    @property
    def num_reads(self) -> int:
        return self.num_writes

    # --- what mlx-lm's models ask of a cache ---

    @property
    def keys(self) -> mx.array:
        """For a rank of a pipeline, as :attr:`metal_engine.models.layer_cache.LayerCache.keys` is."""
        return mx.zeros((0,))

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        del tied

    def make_mask(self, N: int = 1, **_: Any) -> None:
        return None

    def advance(self, N: int) -> None:
        pass

    def __len__(self) -> int:
        return len(self._names)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[mx.array]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> mx.array:
        name = self._names[index]
        spec = self._state.spec.request_arrays[name]
        if name in self.convolved:  # the rows themselves go through mlx-lm's concatenation untouched
            return mx.zeros((self.segments.num_rows, 0, *spec.shape[1:]), spec.dtype)
        return OwnedState(spec.dtype, self, name)

    def __setitem__(self, index: int, value: mx.array) -> None:
        pass  # kept by the convolution or the recurrence that has computed it

    # --- states, by segments ---

    def take(self, name: str) -> list[mx.array | None]:
        """What each group of the step goes on from, [b, ...]; None for one that begins."""
        groups = self.segments.groups
        return self._state.take(name, reads_of(groups), [group.writes for group in groups])

    def put(self, name: str, group: SegmentGroup, values: mx.array) -> None:
        """Keep what a group of the step leaves, [b, ...]."""
        self._put(name, group.writes, values)

    def _put(self, name: str, slots: tuple[int, ...], values: mx.array) -> None:
        self._state.put(name, slots, values)
        if self._put_in[name] is not self._step.rows:
            self._put_in[name] = self._step.rows
            self._num_puts[name] += 1

    def take_all(self, name: str) -> mx.array:
        """What each segment of the step goes on from, [B, ...]; zeros for one that begins."""
        (states,) = self._state.take(name, [self.segments.reads], [self.segments.writes])
        assert states is not None
        return states

    def put_all(self, name: str, values: mx.array) -> None:
        """Keep what each segment of the step leaves, [B, ...]."""
        self._put(name, self.segments.writes, values)

    def dtype(self, name: str) -> mx.Dtype:
        return self._state.spec.request_arrays[name].dtype

    def convolve(self, name: str, conv: nn.Conv1d, call: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """A causal depthwise convolution over packed rows.

        Args:
            name: of the array with what a segment keeps of its inputs, [K-1, C].
            conv: the convolution.
            call: mlx-lm's call of it, without padding: [b, s + K-1, C] -> [b, s, C].
            x: [N, 1, C].

        Returns:
            [N, 1, C].
        """
        rows, weight = x.squeeze(1), conv.weight.squeeze(-1)
        if self.metal is not None and self.metal.does_convolution(rows, weight) and self.dtype(name) == x.dtype:
            tables = self.segments.tables
            out, kept = self.metal.convolve(rows, weight, conv.get("bias"), self.take_all(name), *tables, silu=False)
            self.put_all(name, kept)
            return mx.expand_dims(out, 1)
        keep = self._state.spec.request_arrays[name].shape[0]
        before = self.take_all(name)
        if self.segments.is_decode:
            inputs = mx.concatenate([before, x], axis=1)
            self.put_all(name, inputs[:, -keep:])
            return call(inputs)
        plan = self.segments.convolution_plan(keep)
        inputs = mx.concatenate([before.reshape(-1, before.shape[-1]), rows])[plan.source]
        self.put_all(name, inputs[plan.last])
        return mx.expand_dims(call(inputs[None])[0][plan.outputs], 1)


class GroupStates(ArraysCache):
    """mlx-lm's cache of arrays, for a call of a whole module over one group.

    Attributes:
        written: what the module has put back, by index.
    """

    def __init__(self, states: list[mx.array | None]) -> None:
        super().__init__(len(states))
        self.cache = states
        self.written: dict[int, mx.array] = {}

    def __setitem__(self, index: int, value: mx.array) -> None:
        super().__setitem__(index, value)
        self.written[index] = value


def packed_convolution(conv: nn.Conv1d, cache: StateCache, name: str) -> None:
    """Make a module's convolution, which keeps an array of a cache, run over all segments of a step at once."""
    cls = type(conv)
    original: Callable[[nn.Conv1d, mx.array], mx.array] = cls.__call__

    def convolve(self: nn.Conv1d, x: mx.array) -> mx.array:
        if not cache.is_running:
            return original(self, x)
        return cache.convolve(name, self, lambda inputs: _convolved(self, inputs), x)

    def _convolved(self: nn.Conv1d, inputs: mx.array) -> mx.array:
        if may_shift(self):
            return convolve_by_shifts(inputs, self.weight.squeeze(-1), self.get("bias"))
        return original(self, inputs)

    conv.__class__ = type(cls.__name__, (cls,), {"__call__": convolve})
    cache.convolved.add(name)
