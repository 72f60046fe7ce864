"""Records how a model's modules use recurrent state, while the model runs over recording caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.spec import ArraySpec, RecurrentSpec


@dataclass(frozen=True)
class WatchedConvolution:
    """A recorded call of a convolution.

    Attributes:
        module: the convolution.
        inputs: input of the call, [b, s, C].
        within: ids of ``module`` and of all modules that enclose the call.
    """

    module: nn.Conv1d
    inputs: mx.array
    within: frozenset[int]


def _is_floating(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


class CallTrace:
    """Record of a model's calls while :meth:`watch` is active.

    Attributes:
        running: modules whose calls have not returned, the innermost last.
        convolutions: calls of convolutions so far.
    """

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.convolutions: list[WatchedConvolution] = []

    @property
    def is_tied_by_trunk(self) -> bool:
        """True if the running module is a pipeline's trunk, and not a layer.

        On ranks that send data to another rank, mlx-lm's trunk itself accesses a cache, to make it depend on the data.
        Recorders ignore these accesses, because the logits depend on the data, too.
        """
        return bool(self.running) and hasattr(self.running[-1], "pipeline")

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Record every call of a module of ``model`` within a ``with`` block."""
        modules = list({id(module): module for module in model.modules()}.values())
        classes = {cls: self._watched(cls) for cls in {type(module) for module in modules}}
        for module in modules:
            module.__class__ = classes[type(module)]
        try:
            yield
        finally:
            originals = {watched: cls for cls, watched in classes.items()}
            for module in modules:
                module.__class__ = originals[type(module)]

    def _watched(self, cls: type[nn.Module]) -> type[nn.Module]:
        call: Callable[..., Any] = cls.__call__

        def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.running.append(module)
            if isinstance(module, nn.Conv1d):
                self.convolutions.append(WatchedConvolution(module, args[0], frozenset(map(id, self.running))))
            try:
                return call(module, *args, **kwargs)
            finally:
                self.running.pop()

        return type(cls.__name__, (cls,), {"__call__": recorded})


def _is_depthwise(conv: nn.Conv1d) -> bool:
    """Return True if each channel is convolved by itself, without stride, dilation or padding.

    :meth:`metal_engine.models.recurrent.state_cache.StateCache.convolve` supports only this kind.
    """
    is_plain = conv.stride == 1 and conv.dilation == 1 and conv.padding == 0
    return bool(is_plain and conv.groups == conv.weight.shape[0] and conv.weight.shape[-1] == 1)


class WatchedState(mx.array):
    """An array of a recorded cache.

    A replaced recurrence that receives it as its state calls :meth:`record_recurrence`. An array that a module computes
    from it is an ordinary array, so only unchanged states are recorded.
    """

    def __init__(self, array: mx.array, owner: RecordingState, index: int) -> None:
        super().__init__(array)
        self._owner = owner
        self._index = index

    def record_recurrence(self) -> None:
        self._owner.recurrent.add(self._index)


class RecordingState(ArraysCache):
    """mlx-lm's cache of recurrent state, which records the modules that use it while a :class:`CallTrace` watches.

    Attributes:
        users: id of a module -> the module, for each module that itself reads from or writes to the cache. Modules that
            enclose it are not included.
        puts: id of a module -> indices of the arrays that it writes.
        recurrent: indices of the arrays that known recurrences received unchanged as their states.
        may_hold_tokens: True if the state may be earlier token ids, in a fixed number.
    """

    def __init__(self, size: int, trace: CallTrace) -> None:
        super().__init__(size)
        self._trace = trace
        self.users: dict[int, nn.Module] = {}
        self.puts: dict[int, set[int]] = {}
        self.recurrent: set[int] = set()
        self.may_hold_tokens = False

    def __getitem__(self, index: int) -> mx.array | None:
        self._record_user()
        array: mx.array | None = super().__getitem__(index)
        return None if array is None else WatchedState(array, self, index)

    def __setitem__(self, index: int, value: mx.array) -> None:
        if self._trace.is_tied_by_trunk:
            return
        if (user := self._record_user()) is not None:
            self.puts.setdefault(id(user), set()).add(index)
        super().__setitem__(index, value)

    def _record_user(self) -> nn.Module | None:
        if not self._trace.running or self._trace.is_tied_by_trunk:
            return None
        user = self._trace.running[-1]
        self.users[id(user)] = user
        return user

    @property
    def spec(self) -> RecurrentSpec:
        """Spec of the state that the layer stores for a request.

        Raises:
            UnsupportedModelError: an array was never stored, is empty, or holds integers although
                :attr:`may_hold_tokens` is False.
        """
        if any(entry is None or entry.size == 0 for entry in self.cache):
            raise UnsupportedModelError("a layer leaves some of its recurrent state empty")
        kinds = {str(entry.dtype).removeprefix("mlx.core.") for entry in self.cache if not _is_floating(entry)}
        if kinds and not self.may_hold_tokens:
            raise UnsupportedModelError(
                f"a layer keeps earlier tokens ({', '.join(sorted(kinds))}), not a state of them"
            )
        return RecurrentSpec(tuple(ArraySpec(tuple(entry.shape[1:]), entry.dtype) for entry in self.cache))

    def kept_by_convolutions(self, trace: CallTrace) -> dict[int, nn.Conv1d]:
        """Return the convolutions whose last inputs this cache stores, by the index of the array.

        An array, [b, K-1, C], belongs to a convolution if it equals the convolution's recorded input without the first
        row. A convolution that matches several arrays is left out. Evaluates the arrays.
        """
        kept: dict[int, nn.Conv1d] = {}
        for conv in trace.convolutions:
            if conv.within.isdisjoint(self.users) or not _is_depthwise(conv.module):
                continue
            end = conv.inputs[:, 1:]
            found = [i for i, entry in enumerate(self.cache) if entry.shape == end.shape]
            found = [i for i in found if mx.array_equal(self.cache[i], end).item()]
            if len(found) == 1:
                kept[found[0]] = conv.module
        return kept
