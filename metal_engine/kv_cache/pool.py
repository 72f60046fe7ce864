"""States of all layers, stored in one block pool: allocated, rolled back and released together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NoReturn

import mlx.core as mx

from metal_engine.device.streams import synchronize
from metal_engine.kv_cache.own_caches import OwnCachesState
from metal_engine.kv_cache.quantized import QuantizedKVState
from metal_engine.kv_cache.recurrent import PendingByArray, RecurrentState
from metal_engine.kv_cache.segments import Slots
from metal_engine.kv_cache.spec import (
    IndexSpec,
    KVSpec,
    LatentSpec,
    OwnCachesSpec,
    QuantizedKVSpec,
    RecurrentSpec,
    StateSpec,
    unquantized,
)
from metal_engine.kv_cache.state import IndexState, KVState, LatentState, LayerState, StateSnapshot
from metal_engine.step import KVCacheLostError

logger = logging.getLogger(__name__)

PoolSnapshot = list[StateSnapshot]
"""Snapshot of each layer's state."""


def make_state(spec: StateSpec) -> LayerState:
    """Create the state that a spec describes, with nothing allocated. Raises TypeError for an unknown kind of spec."""
    match spec:
        case KVSpec():
            return KVState(spec)
        case LatentSpec():
            return LatentState(spec)
        case IndexSpec():
            return IndexState(spec)
        case QuantizedKVSpec():
            return QuantizedKVState(spec)
        case OwnCachesSpec():
            return OwnCachesState(spec)
        case RecurrentSpec():
            return RecurrentState(spec)
        case _:
            raise TypeError(f"there is no state for {type(spec).__name__}")


def marker_after(arrays: Iterable[mx.array]) -> mx.array:
    """Return an array that is computed after all of ``arrays``."""
    return mx.depends([mx.zeros((1,))], list(arrays))[0]


class StatePool:
    """States of all layers. Belongs to the thread that runs the steps.

    Args:
        states: one state for each cache of the model, in the model's order.

    Attributes:
        is_recurrent: True if a layer carries a state from token to token, or requests have mlx-lm's own caches.
        has_index: True if a layer attends only to the keys that an index selects.
        own_caches: state that holds mlx-lm's own caches of each request; None for models that packed steps support.
    """

    def __init__(self, states: Iterable[LayerState]) -> None:
        self.states = list(states)
        # State and name of each array with rows for tokens, and of each array with rows for requests. Looked up once,
        # because every step needs them.
        self._of_tokens = [(state, name) for state in self.states for name in state.spec.token_arrays]
        self._recurrent = [state for state in self.states if isinstance(state, RecurrentState)]
        self._of_requests = [(state, name) for state in self._recurrent for name in state.spec.request_arrays]
        self._size = (0, 1, 0)  # number of blocks, tokens of a block, number of state slots
        self.is_recurrent = self.bytes_per_request > 0
        self.has_index = any(isinstance(state, IndexState) for state in self.states)
        self.own_caches = next((state for state in self.states if isinstance(state, OwnCachesState)), None)

    @classmethod
    def of(cls, specs: Iterable[StateSpec]) -> StatePool:
        """Create a pool with the states that the specs describe."""
        return cls(make_state(spec) for spec in specs)

    def unquantized(self) -> StatePool:
        """Create a pool for the same layers in which unquantized states replace the quantized states.

        The new states are not allocated. All other states are shared with this pool.
        """
        return StatePool(
            make_state(state.spec.full) if isinstance(state.spec, QuantizedKVSpec) else state for state in self.states
        )

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes per token that all layers store together."""
        return sum(state.spec.bytes_per_token for state in self.states)

    @property
    def unquantized_bytes_per_token(self) -> int | None:
        """Return the bytes per token without quantization of keys and values; None if no layer is quantized."""
        specs = [state.spec for state in self.states]
        if not any(isinstance(spec, QuantizedKVSpec) for spec in specs):
            return None
        return sum(unquantized(spec).bytes_per_token for spec in specs)

    @property
    def kv_dtype(self) -> str:
        """Return the type of the first layer's stored keys and values, such as ``"int8"`` or ``"bfloat16"``.

        Return ``"none"`` if no layer stores data for each token.
        """
        specs = (state.spec for state in self.states if state.spec.bytes_per_token)
        spec = next(specs, None)
        if isinstance(spec, QuantizedKVSpec):
            return f"int{spec.bits}"
        return "none" if spec is None else str(spec.dtype).removeprefix("mlx.core.")

    @property
    def bytes_per_request(self) -> int:
        """Return the bytes that all layers together store for each request, whatever the request's length."""
        return sum(state.spec.bytes_per_request for state in self.states)

    @property
    def smallest_array_bytes(self) -> int:
        """Return the size in bytes of the smallest array with rows for tokens; 0 if there is no such array."""
        return min((state.arrays[name].nbytes for state, name in self._of_tokens), default=0)

    @property
    def is_allocated(self) -> bool:
        return any(state.arrays for state in self.states)

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int = 0) -> None:
        """Allocate all arrays, filled with zeros, and drop earlier arrays. Raises MLX's error if memory is short.

        Args:
            num_blocks: number of blocks.
            block_size: tokens of a block.
            num_state_slots: number of recurrent states held at once, for requests and for state checkpoints.
        """
        self._size = (num_blocks, block_size, num_state_slots)
        for state in self.states:
            state.allocate(num_blocks, block_size, num_state_slots)
        self.evaluate()

    def reallocate(self) -> None:
        """Allocate all arrays with the sizes of the last :meth:`allocate`, unless they are allocated."""
        if not self.is_allocated:
            self.allocate(*self._size)

    def release(self) -> None:
        """Drop all arrays."""
        for state in self.states:
            state.release()

    @property
    def has_tokens(self) -> bool:
        """True if a layer stores data for each token."""
        return bool(self._of_tokens)

    def detach_arrays(self, reads: Slots, writes: Slots) -> list[mx.array]:
        """Return the arrays that a decode step reads and writes. :meth:`attach_arrays` stores them after the step.

        Removes the arrays with rows for tokens from the pool. Pending recurrent states that the step does not replace
        are written to the pool.

        Args:
            reads: slots of the recurrent states from which the requests start. Padding rows have ``PADDING_SLOT``.
            writes: slots for the requests' new recurrent states.

        Returns:
            The arrays of all layers in a fixed order. Arrays with rows for tokens come first. Then come the initial
            states, [len(reads), ...] for each array with rows for requests.
        """
        states = [state.detach_arrays(name, reads, writes) for state, name in self._of_requests]
        return [state.arrays.pop(name) for state, name in self._of_tokens] + states

    def attach_arrays(self, arrays: list[mx.array], slots: Slots) -> None:
        """Store a step's resulting arrays, in the order of :meth:`detach_arrays`.

        The new recurrent states become the pending states of ``slots``.
        """
        num_of_tokens = len(self._of_tokens)
        for (state, name), array in zip(self._of_tokens, arrays[:num_of_tokens], strict=True):
            state.arrays[name] = array
        for (recurrent, name), values in zip(self._of_requests, arrays[num_of_tokens:], strict=True):
            recurrent.attach_arrays(name, slots, values)

    def evaluate(self) -> None:
        """Execute all writes that have been built, and wait for them. Raises MLX's error if one fails."""
        mx.eval(list(self._arrays()))

    def writes_done_marker(self) -> mx.array:
        """Return an array that is computed after all writes, for asynchronous evaluation.

        Evaluating the pool's own arrays asynchronously would prevent later writes in place. The returned array holds
        references to all arrays of the pool until the device has computed it.
        """
        return marker_after(self._arrays())

    def begin_step(self) -> None:
        """Reset :attr:`has_moved_states`. Call it before each step is built."""
        for state in self._recurrent:
            state.has_moved = False

    @property
    def has_moved_states(self) -> bool:
        """True if the step built last has copied recurrent states, to slots or into another order."""
        return any(state.has_moved for state in self._recurrent)

    def states_done_marker(self) -> mx.array:
        """Return an array that is computed after the new recurrent states of the step built last.

        If :attr:`has_moved_states` is False, the result does not hold arrays that steps write to, unlike the result of
        :meth:`writes_done_marker`.
        """
        return marker_after(array for state in self._recurrent for array in state.pending())

    def half_done_marker(self) -> mx.array:
        """Return an array that is computed after the writes to the middle layer, and thus to all layers before it.

        The device cannot write in place to arrays that a pending computation depends on. This array depends only on the
        middle layer, so the device can again write to all other layers in place.
        """
        return marker_after(self.states[(len(self.states) - 1) // 2].writes_done_marker())

    def _arrays(self) -> Iterator[mx.array]:
        for state in self.states:
            yield from state.writes_done_marker()

    def pending_states(self) -> list[PendingByArray]:
        """Return the new recurrent states of the step built last.

        :meth:`restore_pending_states` restores them if the next step is built and then discarded.
        """
        return [state.pending_states() for state in self._recurrent]

    def restore_pending_states(self, states: list[PendingByArray]) -> None:
        """Restore states from :meth:`pending_states`."""
        for state, pending in zip(self._recurrent, states, strict=True):
            state.restore_pending_states(pending)

    def read_states(self, slots: Slots) -> list[mx.array]:
        """Return the recurrent states of some slots after the steps built so far, [len(slots), ...] for each array."""
        return [state.read(name, slots) for state, name in self._of_requests]

    def put_states(self, slots: Slots, states: list[mx.array]) -> None:
        """Store states from :meth:`read_states` in some slots, as pending states. Drops all other pending states."""
        for (state, name), values in zip(self._of_requests, states, strict=True):
            state.attach_arrays(name, slots, values)

    def forget_states(self, slots: set[int]) -> None:
        """Discard the pending states of ``slots``.

        Call it if a store provides the states of these slots, or if no request needs them.
        """
        for state in self._recurrent:
            state.forget(slots)

    def snapshot(self) -> PoolSnapshot:
        """Return the current arrays of each layer. While the snapshot exists, evaluating a step copies the arrays."""
        return [state.snapshot() for state in self.states]

    def restore(self, snapshot: PoolSnapshot) -> None:
        """Discard all unevaluated work that has been built since a snapshot."""
        for state, arrays in zip(self.states, snapshot, strict=True):
            state.restore(arrays)

    def recover_state(self, state: LayerState) -> bool:
        """Make one layer's arrays usable after failed work on that layer alone.

        Returns False if the arrays cannot be evaluated. They are then replaced by zeros, and the layer's rows of all
        requests are lost.
        """
        try:
            mx.eval(state.writes_done_marker())
        except Exception:
            logger.exception("a layer's state is lost: MLX cannot evaluate it")
            state.allocate(*self._size)
            return False
        return True

    def recover(self, error: Exception) -> None:
        """Make the arrays usable for the next step, after a step that failed with ``error``.

        Layers before the failure have pending writes for tokens that will not be read. These writes are executed. If
        they fail too, the old arrays are lost, because writes are in place. All arrays are then allocated again
        (:meth:`renew`).

        Raises:
            KVCacheLostError: the pool had to be reallocated.
        """
        try:
            self.evaluate()
        except Exception:
            logger.exception("the KV cache cannot be evaluated any more")
            self.renew(error)

    def renew(self, error: Exception) -> NoReturn:
        """Release all arrays and allocate them again, because of an error that has made their contents useless.

        If the allocation fails, the pool stays unallocated or incomplete. The failure is only logged.

        Raises:
            KVCacheLostError: always.
        """
        logger.warning("reallocating the KV cache")
        for state in self.states:
            state.release()
        try:
            synchronize()
        except Exception:
            logger.exception("work that was still running on the device failed, too")
        try:
            self.allocate(*self._size)
        except Exception:  # such as a lack of memory: all KV is lost anyway, and the next step needs the new arrays
            logger.exception("the new KV cache could not be allocated yet")
        raise KVCacheLostError(f"{type(error).__name__}: {error}") from error
