"""What a layer keeps, in arrays: plain keys and values, and latents (MLA); ``quantized`` has them in fewer bits.

A kind of state owns its arrays, knows how a step's rows are written to them, and hands them out by name. Outside this
package only attention backends, which read a state, know what it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from metal_engine.kv_cache.spec import AttentionSpec, LatentSpec, StateSpec
from metal_engine.kv_cache.writes import HasWrites


@dataclass(frozen=True)
class StateSnapshot:
    """What a layer keeps at some time; :meth:`LayerState.restore` goes back to it.

    Attributes:
        arrays: by name.
        pending: what its kind of state has beside that.
    """

    arrays: dict[str, mx.array]
    pending: dict[str, Any] = field(default_factory=dict)


class LayerState(Protocol):
    """What one layer keeps of all requests.

    Attributes:
        spec: its arrays by name, with the bytes of a token and of a request.
        arrays: the arrays themselves, [num_slots, ...] for those of tokens, [1 + num_state_slots, ...] for those of
            requests; empty while nothing is allocated.
    """

    @property
    def spec(self) -> StateSpec: ...

    @property
    def arrays(self) -> dict[str, mx.array]: ...

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int) -> None:
        """Make the arrays, all zeros, in place of those there are."""
        ...

    def release(self) -> None:
        """Drop the arrays."""
        ...

    def snapshot(self) -> StateSnapshot:
        """The arrays as they are now. While it is held, a step that is evaluated copies them."""
        ...

    def restore(self, snapshot: StateSnapshot) -> None:
        """Go back to a snapshot, which nothing has been written to since."""
        ...

    def block_arrays(self) -> dict[str, mx.array]:
        """The arrays of tokens by block, each [num_blocks, block_size, ...], not copied."""
        ...

    def writes_done_marker(self) -> list[mx.array]:
        """Arrays that are there when all that steps have written is."""
        ...


class TokenState:
    """Arrays that have a row for each token: the pool's blocks one after the other, so that a slot is a row."""

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.arrays: dict[str, mx.array] = {}
        self._block_size = 1

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
        """Write what a step has computed, [N, ...] for each array by name, to where the step says."""
        # A write is in place when nothing else holds the old array, which MLX sees when the step runs. So the array
        # is taken out first: it has one owner at a time.
        for name, values in self.encode(rows).items():
            array = self.arrays.pop(name)
            # Assignment to elements changes what an object stands for, and snapshots have this one: so to another
            # object, over the same memory.
            self.arrays[name] = step.writes.write(array.reshape(array.shape), values)

    def encode(self, rows: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """What is kept of computed rows, [N, ...] for each array by name."""
        return {name: values.astype(self.arrays[name].dtype) for name, values in rows.items()}


class KVState(TokenState):
    """Keys and values of one layer: ``keys`` [num_slots, num_kv_heads, head_dim], ``values`` with ``v_head_dim``.

    Attention backends read them through the methods here, in float32 where they compute in it.
    """

    spec: AttentionSpec

    @property
    def keys(self) -> mx.array:
        return self.arrays["keys"]

    @property
    def values(self) -> mx.array:
        return self.arrays["values"]

    @property
    def block_size(self) -> int:
        return self._block_size

    def read_heads(self, head_rows: mx.array) -> tuple[mx.array, mx.array]:
        """Gather single heads of single tokens.

        Args:
            head_rows: int32 of any shape, ``slot * num_kv_heads + head``.

        Returns:
            Keys [*head_rows.shape, head_dim] and values [..., v_head_dim], float32.
        """
        return _gather_heads(self.keys, head_rows), _gather_heads(self.values, head_rows)

    def read_tokens(self, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        """All heads of tokens as one row each; a slice of slots is read where it is.

        Returns:
            Keys [*slots.shape, num_kv_heads * head_dim] and values [..., num_kv_heads * v_head_dim], float32.
        """
        return _token_rows(self.keys, slots), _token_rows(self.values, slots)


class LatentState(KVState):
    """Latents of one layer: a key is the latent and its position part, and the value is all of the key.

    Attention's output over such values begins with the one over the latents; its reader cuts off the rest.
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


def _gather_heads(array: mx.array, head_rows: mx.array) -> mx.array:
    return array.reshape(-1, array.shape[-1])[head_rows].astype(mx.float32)


def _token_rows(array: mx.array, slots: mx.array | slice) -> mx.array:
    return array.reshape(array.shape[0], -1)[slots].astype(mx.float32)
