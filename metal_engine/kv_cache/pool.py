"""The states of all layers, over one pool of blocks: allocated, rolled back and given up together."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import NoReturn

import mlx.core as mx

from metal_engine.device.streams import synchronize
from metal_engine.kv_cache.quantized import QuantizedKVState
from metal_engine.kv_cache.recurrent import PendingByArray, RecurrentState
from metal_engine.kv_cache.segments import Slots
from metal_engine.kv_cache.spec import KVSpec, LatentSpec, QuantizedKVSpec, RecurrentSpec, StateSpec, unquantized
from metal_engine.kv_cache.state import KVState, LatentState, LayerState, StateSnapshot
from metal_engine.step import KVCacheLostError

logger = logging.getLogger(__name__)

PoolSnapshot = list[StateSnapshot]
"""What each layer keeps at some time."""


def make_state(spec: StateSpec) -> LayerState:
    """The kind of state that a spec describes, with nothing allocated."""
    match spec:
        case KVSpec():
            return KVState(spec)
        case LatentSpec():
            return LatentState(spec)
        case QuantizedKVSpec():
            return QuantizedKVState(spec)
        case RecurrentSpec():
            return RecurrentState(spec)
        case _:
            raise TypeError(f"there is no state for {type(spec).__name__}")


def _after(arrays: Iterable[mx.array]) -> mx.array:
    """An array that is computed when all of some others are."""
    return mx.depends([mx.zeros((1,))], list(arrays))[0]


class StatePool:
    """What all layers keep. Belongs to the thread that runs the steps.

    Args:
        states: one for each cache of the model, in its order.

    Attributes:
        is_recurrent: whether some layer carries a state from token to token.
    """

    def __init__(self, states: Iterable[LayerState]) -> None:
        self.states = list(states)
        # Each array of tokens: whose it is, and its name there. Looked up in every step.
        self._of_tokens = [(state, name) for state in self.states for name in state.spec.token_arrays]
        # And each array of requests.
        self._recurrent = [state for state in self.states if isinstance(state, RecurrentState)]
        self._of_requests = [(state, name) for state in self._recurrent for name in state.spec.request_arrays]
        self._size = (0, 1, 0)  # blocks, tokens of a block, slots of requests
        self.is_recurrent = self.bytes_per_request > 0

    @classmethod
    def of(cls, specs: Iterable[StateSpec]) -> StatePool:
        """A pool of the kinds of state that specs describe."""
        return cls(make_state(spec) for spec in specs)

    def unquantized(self) -> StatePool:
        """A pool for the same layers, none of them quantized; states that are not here are the same objects there."""
        return StatePool(
            make_state(state.spec.full) if isinstance(state.spec, QuantizedKVSpec) else state for state in self.states
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that all layers together keep of a token."""
        return sum(state.spec.bytes_per_token for state in self.states)

    @property
    def unquantized_bytes_per_token(self) -> int | None:
        """What that would be if no keys and values were quantized; None where none are."""
        specs = [state.spec for state in self.states]
        if not any(isinstance(spec, QuantizedKVSpec) for spec in specs):
            return None
        return sum(unquantized(spec).bytes_per_token for spec in specs)

    @property
    def kv_dtype(self) -> str:
        """In what keys and values are kept, as ``int8`` or ``bfloat16``; ``none`` where there are none."""
        specs = (state.spec for state in self.states if state.spec.bytes_per_token)
        spec = next(specs, None)
        if isinstance(spec, QuantizedKVSpec):
            return f"int{spec.bits}"
        return "none" if spec is None else str(spec.dtype).removeprefix("mlx.core.")

    @property
    def bytes_per_request(self) -> int:
        """Bytes that all layers together keep of a request, however long it is."""
        return sum(state.spec.bytes_per_request for state in self.states)

    @property
    def smallest_array_bytes(self) -> int:
        """Bytes of the smallest array of tokens; 0 where there is none."""
        return min((state.arrays[name].nbytes for state, name in self._of_tokens), default=0)

    @property
    def is_allocated(self) -> bool:
        return any(state.arrays for state in self.states)

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int = 0) -> None:
        """Make all arrays, dropping earlier ones.

        Args:
            num_state_slots: requests, and checkpoints, whose recurrent states are held at once.
        """
        self._size = (num_blocks, block_size, num_state_slots)
        for state in self.states:
            state.allocate(num_blocks, block_size, num_state_slots)
        self.evaluate()

    def release(self) -> None:
        """Drop all arrays, layer by layer: freeing gigabytes holds Python's lock, and other threads want it, too."""
        for state in reversed(self.states):
            state.release()
            time.sleep(0.001)

    @property
    def has_tokens(self) -> bool:
        """Whether some layer keeps anything of each token."""
        return bool(self._of_tokens)

    def detach_arrays(self, reads: Slots, writes: Slots) -> list[mx.array]:
        """Give away what a step of decodes reads and writes, of all layers in one order, until :meth:`attach_arrays`.

        Args:
            reads: slots of the recurrent states that its requests go on from; padded rows have ``PADDING_SLOT``.
            writes: slots of those that they will leave.

        Returns:
            The arrays of tokens, and for each array of requests the states to go on from, [len(reads), ...].
        """
        states = [state.detach_arrays(name, reads, writes) for state, name in self._of_requests]
        return [state.arrays.pop(name) for state, name in self._of_tokens] + states

    def attach_arrays(self, arrays: list[mx.array], slots: Slots) -> None:
        """Take back the arrays of :meth:`detach_arrays`, in its order, with the recurrent states of some slots."""
        num_of_tokens = len(self._of_tokens)
        for (state, name), array in zip(self._of_tokens, arrays[:num_of_tokens], strict=True):
            state.arrays[name] = array
        for (recurrent, name), values in zip(self._of_requests, arrays[num_of_tokens:], strict=True):
            recurrent.attach_arrays(name, slots, values)

    def evaluate(self) -> None:
        """Wait until every write has happened."""
        mx.eval(list(self._arrays()))

    def writes_done_marker(self) -> mx.array:
        """An array that is computed when every write has happened.

        It can be evaluated asynchronously. The pool's arrays cannot: they would not be written in place again. It holds
        them all until the device has computed it.
        """
        return _after(self._arrays())

    def begin_step(self) -> None:
        """Called before a step is built."""
        for state in self._recurrent:
            state.has_moved = False

    @property
    def has_moved_states(self) -> bool:
        """Whether the step built last has copied recurrent states, to slots or into another order."""
        return any(state.has_moved for state in self._recurrent)

    def states_done_marker(self) -> mx.array:
        """An array that is computed when the recurrent states are that the step built last has computed.

        As :meth:`writes_done_marker`, but it holds no array that steps write to, unless :attr:`has_moved_states`.
        """
        return _after(array for state in self._recurrent for array in state.pending())

    def half_done_marker(self) -> mx.array:
        """An array that is computed when a layer in the middle has been written to, and so those before it have.

        What depends on arrays holds them until the device has computed it; of all others, this leaves the device free
        to write to them again.
        """
        return _after(self.states[(len(self.states) - 1) // 2].writes_done_marker())

    def _arrays(self) -> Iterator[mx.array]:
        for state in self.states:
            yield from state.writes_done_marker()

    def pending_states(self) -> list[PendingByArray]:
        """The recurrent states that the step built last leaves, to go back to if one on top of it is built in vain."""
        return [state.pending_states() for state in self._recurrent]

    def restore_pending_states(self, states: list[PendingByArray]) -> None:
        """Go back to what :meth:`pending_states` has given."""
        for state, pending in zip(self._recurrent, states, strict=True):
            state.restore_pending_states(pending)

    def read_states(self, slots: Slots) -> list[mx.array]:
        """Recurrent states, [len(slots), ...] of each array, as the steps built so far leave them."""
        return [state.read(name, slots) for state, name in self._of_requests]

    def put_states(self, slots: Slots, states: list[mx.array]) -> None:
        """Have states that :meth:`read_states` gave in some slots; only where no others are pending."""
        for (state, name), values in zip(self._of_requests, states, strict=True):
            state.attach_arrays(name, slots, values)

    def forget_states(self, slots: set[int]) -> None:
        """Give up what is pending for some slots of recurrent states, which are about to be loaded."""
        for state in self._recurrent:
            state.forget(slots)

    def snapshot(self) -> PoolSnapshot:
        """All arrays as they are now. While it is held, a step that is evaluated copies them."""
        return [state.snapshot() for state in self.states]

    def restore(self, snapshot: PoolSnapshot) -> None:
        """Forget what has been built, and not evaluated, since a snapshot."""
        for state, arrays in zip(self.states, snapshot, strict=True):
            state.restore(arrays)

    def recover(self, error: Exception) -> None:
        """Make sure, after a step that failed, that the next one finds arrays it can use.

        Layers before the failure have writes pending, of tokens that nobody will read; they are carried out. Where
        that fails too, the old arrays are gone (writes are in place), so the pool is made anew, and empty.

        Raises:
            KVCacheLostError: the pool had to be made anew.
        """
        try:
            self.evaluate()
        except Exception:
            logger.exception("the KV cache cannot be evaluated any more")
            self.renew(error)

    def renew(self, error: Exception) -> NoReturn:
        """Give up all arrays for empty ones because of an error.

        Raises:
            KVCacheLostError: always.
        """
        logger.warning("making the KV cache anew")
        for state in self.states:
            state.release()
        try:
            synchronize()
        except Exception:
            logger.exception("what was still running failed, too")
        try:
            self.allocate(*self._size)
        except Exception:  # no memory, say: whatever it is, all KV is gone, and the next step needs the new arrays
            logger.exception("the new KV cache is not there yet")
        raise KVCacheLostError(f"{type(error).__name__}: {error}") from error
