"""Cache through which mlx-lm's models use a layer's recurrent state.

A module of mlx-lm reads an array from its cache, computes the new array over its rows, and stores it. Over a paged
pool, the array that the module reads is a placeholder, and the array that it stores is ignored. Instead, the replaced
convolution or recurrence reads and writes the states of the step's segments with the methods of :class:`StateCache`.
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
    """Placeholder for an array of a state cache. A replaced recurrence reads ``owner``, the cache, and ``name``."""

    def __init__(self, dtype: mx.Dtype, owner: StateCache, name: str) -> None:
        super().__init__(mx.zeros((1,), dtype))
        self.owner = owner
        self.name = name


class StateCache:
    """Replacement for mlx-lm's ``ArraysCache`` over one layer's states.

    Attributes:
        convolved: names of the arrays that :meth:`convolve` reads and writes, e.g. ``"0"`` for the array with index 0.
            A module that reads such an array gets an array without rows.
    """

    # mlx-lm reads these two attributes. Packed rows have no padding.
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
        """Launcher of kernels for all segments at once; None to use MLX's own operations."""
        return self._step.recurrence

    @property
    def is_running(self) -> bool:
        """True while a packed step runs, False during mlx-lm's own forward pass over its own caches."""
        return self._step.rows is not None

    @property
    def segments(self) -> Segments:
        rows = self._step.rows
        assert rows is not None and rows.segments is not None
        return rows.segments

    @property
    def num_writes(self) -> int:
        """Number of steps that have written all states of the layer. Read by the check at load."""
        return min(self._num_puts.values())

    @property
    def num_reads(self) -> int:
        return self.num_writes

    # --- cache interface of mlx-lm's models ---

    @property
    def keys(self) -> mx.array:
        """Placeholder for a pipeline's ranks, see :attr:`metal_engine.models.layer_cache.LayerCache.keys`."""
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
        if name in self.convolved:  # an empty array: mlx-lm's concatenation leaves the rows unchanged
            return mx.zeros((self.segments.num_rows, 0, *spec.shape[1:]), spec.dtype)
        return OwnedState(spec.dtype, self, name)

    def __setitem__(self, index: int, value: mx.array) -> None:
        pass  # the convolution or recurrence that computed the state has stored it

    # --- states, by segments ---

    def take(self, name: str) -> list[mx.array | None]:
        """Return, for each group, the initial states of its segments, [b, ...]. None for a group that starts requests.

        For each array and step, call either this method or :meth:`take_all`, once. Then store all new states.
        """
        groups = self.segments.groups
        return self._state.take(name, reads_of(groups), [group.writes for group in groups])

    def put(self, name: str, group: SegmentGroup, values: mx.array) -> None:
        """Store the new states of a group of the step, [b, ...]."""
        self._put(name, group.writes, values)

    def _put(self, name: str, slots: tuple[int, ...], values: mx.array) -> None:
        self._state.put(name, slots, values)
        if self._put_in[name] is not self._step.rows:
            self._put_in[name] = self._step.rows
            self._num_puts[name] += 1

    def take_all(self, name: str) -> mx.array:
        """Return the initial state of each segment of the step, [B, ...]; zeros for a segment that starts a request."""
        (states,) = self._state.take(name, [self.segments.reads], [self.segments.writes])
        assert states is not None
        return states

    def put_all(self, name: str, values: mx.array) -> None:
        """Store the new state of each segment of the step, [B, ...]."""
        self._put(name, self.segments.writes, values)

    def rows_before(self, name: str, rows: mx.array) -> mx.array:
        """Return, for each packed row, the row before it in its request. Store the last row of each segment.

        Args:
            name: name of the array that stores the last row of each request.
            rows: packed rows, [N, ...].

        Returns:
            The rows before, [N, ...]; zeros for the first row of a request.
        """
        before = self.take_all(name)
        if self.segments.is_decode:
            self.put_all(name, rows)
            return before
        plan = self.segments.convolution_plan(1)
        inputs = mx.concatenate([before, rows])[plan.source]
        self.put_all(name, inputs[plan.last[:, 0]])
        return inputs[plan.outputs]

    def dtype(self, name: str) -> mx.Dtype:
        return self._state.spec.request_arrays[name].dtype

    def convolve(self, name: str, conv: nn.Conv1d, call: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """Run a causal depthwise convolution over packed rows. Store each segment's last inputs as its new state.

        Args:
            name: name of the array that stores the last K-1 inputs of each request, [K-1, C].
            conv: the convolution.
            call: mlx-lm's call of the convolution, without padding: [b, s + K-1, C] -> [b, s, C].
            x: packed rows, [N, 1, C].

        Returns:
            Outputs, [N, 1, C].
        """
        rows, weight = x.squeeze(1), conv.weight.squeeze(-1)
        if self.metal is not None and self.metal.supports_convolution(rows, weight) and self.dtype(name) == x.dtype:
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
    """mlx-lm's cache of arrays, for a call of a whole module over one group of segments.

    Args:
        states: initial state of each array. None for an array that the module does not write. All None if the group's
            segments start requests.

    Attributes:
        written: index -> array that the module has stored.
    """

    def __init__(self, states: list[mx.array | None]) -> None:
        super().__init__(len(states))
        self.cache = states
        self.written: dict[int, mx.array] = {}

    def __setitem__(self, index: int, value: mx.array) -> None:
        super().__setitem__(index, value)
        self.written[index] = value


def packed_convolution(conv: nn.Conv1d, cache: StateCache, name: str) -> None:
    """Change the class of a convolution, so that one call processes all segments of a step.

    The array ``name`` of ``cache`` stores the convolution's last inputs. Outside packed steps, calls run as before.
    """
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
