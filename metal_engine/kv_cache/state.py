"""State of one layer as arrays: plain keys and values, latents (MLA), or keys of an index.

The state in ``quantized.py`` stores keys and values, or latents, in fewer bits.

Each class owns its arrays, writes a step's rows to them, and returns them by name. Outside this package, only attention
backends, which read a state, depend on its contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from metal_engine.kv_cache.spec import AttentionSpec, IndexSpec, LatentSpec, StateSpec
from metal_engine.kv_cache.writes import HasWrites


@dataclass(frozen=True)
class StateSnapshot:
    """State of a layer at one time. :meth:`LayerState.restore` restores it.

    Attributes:
        arrays: arrays by name.
        pending: additional data, which depends on the kind of state, such as pending recurrent states.
    """

    arrays: dict[str, mx.array]
    pending: dict[str, Any] = field(default_factory=dict)


class LayerState(Protocol):
    """State that one layer stores for all requests.

    Attributes:
        spec: shapes and types of the arrays by name, and bytes per token and per request.
        arrays: the arrays: [num_slots, ...] with rows for tokens, or [1 + num_state_slots, ...] with rows for requests.
            Empty before allocation.
    """

    @property
    def spec(self) -> StateSpec: ...

    @property
    def arrays(self) -> dict[str, mx.array]: ...

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int) -> None:
        """Allocate the arrays, filled with zeros, and drop earlier arrays."""
        ...

    def release(self) -> None:
        """Drop the arrays."""
        ...

    def snapshot(self) -> StateSnapshot:
        """Return the current arrays. While the snapshot exists, evaluating a step copies each array it writes to."""
        ...

    def restore(self, snapshot: StateSnapshot) -> None:
        """Restore a snapshot. The snapshot's arrays must not have been written to since."""
        ...

    def block_arrays(self) -> dict[str, mx.array]:
        """Return the arrays with rows for tokens by block, each [num_blocks, block_size, ...], without copying."""
        ...

    def writes_done_marker(self) -> list[mx.array]:
        """Return arrays whose evaluation executes all writes of steps."""
        ...


class TokenState:
    """State with a row for each token. The pool's blocks are contiguous, so that a slot is the index of a row."""

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.arrays: dict[str, mx.array] = {}
        self._block_size = 1

    @property
    def block_size(self) -> int:
        return self._block_size

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int = 0) -> None:
        self._block_size = block_size
        self.arrays = {
            name: mx.zeros((num_blocks * block_size, *array.shape), array.dtype)
            for name, array in self.spec.token_arrays.items()
        }

    def release(self) -> None:
        self.arrays = {}

    def snapshot(self) -> StateSnapshot:
        return StateSnapshot(dict(self.arrays))

    def restore(self, snapshot: StateSnapshot) -> None:
        self.arrays = dict(snapshot.arrays)

    def writes_done_marker(self) -> list[mx.array]:
        return list(self.arrays.values())

    def block_arrays(self) -> dict[str, mx.array]:
        return {name: self._blocks(array) for name, array in self.arrays.items()}

    def _blocks(self, array: mx.array) -> mx.array:
        return array.reshape(-1, self._block_size, *array.shape[1:])

    def write(self, step: HasWrites, rows: Mapping[str, mx.array]) -> None:
        """Write a step's computed rows, [N, ...] for each array by name, to the slots in ``step.writes``."""
        # A write is in place if nothing else references the old array, which MLX checks when the step runs. The array
        # is therefore popped first, to have a single owner.
        for name, values in self.encode(rows).items():
            array = self.arrays.pop(name)
            # Assignment to elements changes the array object, which snapshots may hold. reshape makes a new object over
            # the same memory.
            self.arrays[name] = step.writes.write(array.reshape(array.shape), values)

    def encode(self, rows: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Convert computed rows, [N, ...] for each array by name, to their stored form."""
        return {name: values.astype(self.arrays[name].dtype) for name, values in rows.items()}


class KVState(TokenState):
    """Keys, [num_slots, num_kv_heads, head_dim], and values, [num_slots, num_kv_heads, v_head_dim], of one layer.

    Attention backends that compute in float32 read keys and values with :meth:`read_heads` and :meth:`read_tokens`.
    """

    spec: AttentionSpec

    @property
    def keys(self) -> mx.array:
        return self.arrays["keys"]

    @property
    def values(self) -> mx.array:
        return self.arrays["values"]

    def read_heads(self, head_rows: mx.array) -> tuple[mx.array, mx.array]:
        """Gather single heads of single tokens.

        Args:
            head_rows: int32 of any shape, ``slot * num_kv_heads + head``.

        Returns:
            Keys [*head_rows.shape, head_dim] and values [..., v_head_dim], float32.
        """
        return _gather_heads(self.keys, head_rows), _gather_heads(self.values, head_rows)

    def read_tokens(self, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        """Return all heads of each token as one row. A slice of slots is read without gathering.

        Returns:
            Keys [*slots.shape, num_kv_heads * head_dim] and values [..., num_kv_heads * v_head_dim], float32.
        """
        return _token_rows(self.keys, slots), _token_rows(self.values, slots)


class LatentState(KVState):
    """Latents of one layer. A key consists of the latent and its position part; the value is the whole key.

    The attention output therefore has ``head_dim`` columns. The first ``latent_dim`` columns are the output over the
    latents. The caller slices off the other columns, which have no meaning.
    """

    spec: LatentSpec

    @property
    def values(self) -> mx.array:
        return self.keys

    def read_heads(self, head_rows: mx.array) -> tuple[mx.array, mx.array]:
        keys = _gather_heads(self.keys, head_rows)
        return keys, keys

    def read_tokens(self, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        keys = _token_rows(self.keys, slots)
        return keys, keys


class IndexState(TokenState):
    """Keys of one layer's index: ``index_keys`` [num_slots, head_dim]."""

    spec: IndexSpec

    def read(self, slots: mx.array) -> mx.array:
        """Return the index keys of tokens, [*slots.shape, head_dim] float32."""
        return self.arrays["index_keys"][slots].astype(mx.float32)


def _gather_heads(array: mx.array, head_rows: mx.array) -> mx.array:
    return array.reshape(-1, array.shape[-1])[head_rows].astype(mx.float32)


def _token_rows(array: mx.array, slots: mx.array | slice) -> mx.array:
    return array.reshape(array.shape[0], -1)[slots].astype(mx.float32)
