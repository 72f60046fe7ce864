"""Finds the module whose output is the LM head's input, and makes it return only the rows that a step needs.

Does not use names of architectures. Finds the module by recording the calls of one forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_engine.errors import UnsupportedModelError
from metal_engine.models.cache_tree import CacheTree
from metal_engine.models.current_step import CurrentStep

logger = logging.getLogger(__name__)

MakeCaches = Callable[[], CacheTree]

# Divisor for a test of the LM head, which receives a row and the same row divided by this number. If the head is
# linear, its logits are divided, too. A norm in the head would undo the division.
_SHRINKING = 16

# Layers whose output has only one rank's columns, such as a divided LM head. Their output is not a hidden state.
_DIVIDED = nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear


@dataclass(frozen=True)
class Trunk:
    """Last module before the LM head.

    Attributes:
        module: the module. Its output has one row per token, [N, 1, width].
        width: number of values in a row of its output.
        dtype: type of its output.
    """

    module: nn.Module
    width: int
    dtype: mx.Dtype


def select_rows_before_head(model: nn.Module, step: CurrentStep, make_caches: MakeCaches) -> Trunk:
    """Make the trunk return only the rows whose logits are needed, so that the head skips all other rows.

    Returns the trunk.

    Changes the class of the trunk's module. In each later call, the module reads ``logits_indices``,
    ``hidden_indices`` and ``given`` of ``step``, and sets ``hidden``.

    Args:
        model: patched mlx-lm model.
        step: running step of the model.
        make_caches: returns new caches over which ``model`` can run.

    Raises:
        UnsupportedModelError: no module's output can be reduced to some of its rows.
    """
    for trunk in _candidates(model, make_caches()):
        module, original_class = trunk.module, type(trunk.module)
        module.__class__ = _selecting(original_class, step)
        step.logits_indices = mx.array([1])
        try:
            if model(mx.zeros((2, 1), mx.int32), cache=make_caches()).shape[0] == 1:
                return trunk
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            # A later operation needs all rows.
            logger.debug("%s is not a trunk: %s", original_class.__name__, error)
        finally:
            step.logits_indices = None
        module.__class__ = original_class
    raise UnsupportedModelError("it has no separate trunk and LM head")


def hidden_problem(model: nn.Module, trunk: Trunk, vocab_size: int, make_caches: MakeCaches) -> str | None:
    """Return the reason why the trunk's output is not usable as hidden states, or None if it is usable.

    The output is refused if it may be the logits, or if the LM head normalizes its input. Computes only the LM head,
    for three rows.
    """
    name = type(trunk.module).__name__
    if trunk.width == vocab_size:
        return f"the output of its {name} is as wide as its logits and may be the logits"
    row = mx.random.normal((1, 1, trunk.width), key=mx.random.key(0))
    output = [mx.concatenate([row, row / _SHRINKING, mx.zeros_like(row)]).astype(trunk.dtype)]
    with _class_of(trunk.module, lambda cls: _returning(cls, output)):
        logits = model(mx.zeros((3, 1), mx.int32), cache=make_caches())
    output.clear()  # the temporary class refers to this list until the garbage collector runs
    whole, shrunk, bias = np.array(logits.reshape(3, -1).astype(mx.float32))
    # Written so that NaN is refused. Softcapped logits reduce large scores, so the bound is wide.
    if not np.abs(shrunk - bias).max() < 0.5 * np.abs(whole - bias).max():
        return f"the output of its {name} is normalized once more before its LM head"
    return None


def _candidates(model: nn.Module, caches: CacheTree) -> Iterator[Trunk]:
    """Yield modules that are called once and return one row per token. The module whose call ends last comes first.

    Modules with rows as wide as the logits come after all other modules, because they are the LM head or contain it.
    """
    ended: list[tuple[nn.Module, Any]] = []
    with _record_outputs(model, ended):
        logits = model(mx.array([[0], [1]]), cache=caches)
    times: dict[int, int] = {}
    for module, _ in ended:
        times[id(module)] = times.get(id(module), 0) + 1
    found = [
        Trunk(module, output.shape[-1], output.dtype)
        for module, output in reversed(ended)
        if times[id(module)] == 1 and not isinstance(module, _DIVIDED)
        if isinstance(output, mx.array) and output.ndim == 3 and output.shape[:2] == (2, 1)
    ]
    ended.clear()  # the recording classes hold this list, and therefore the weights
    yield from sorted(found, key=lambda trunk: trunk.width == logits.shape[-1])


@contextmanager
def _record_outputs(model: nn.Module, ended: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Append (module, output) to ``ended`` whenever a call of a module inside ``model`` ends."""
    modules = list({id(module): module for module in model.modules() if module is not model}.values())
    classes = [type(module) for module in modules]
    recording = {cls: _recording_class(cls, ended) for cls in set(classes)}
    for module, cls in zip(modules, classes, strict=True):
        module.__class__ = recording[cls]
    try:
        yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls


def _recording_class(cls: type[nn.Module], ended: list[tuple[nn.Module, Any]]) -> type[nn.Module]:
    call: Callable[..., Any] = cls.__call__

    def recorded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        ended.append((self, output))
        return output

    return type(cls.__name__, (cls,), {"__call__": recorded})


@contextmanager
def _class_of(module: nn.Module, derive: Callable[[type[nn.Module]], type[nn.Module]]) -> Iterator[None]:
    """Change the class of a module to ``derive(class)`` within a ``with`` block."""
    original_class = type(module)
    module.__class__ = derive(original_class)
    try:
        yield
    finally:
        module.__class__ = original_class


def _returning(cls: type[nn.Module], output: list[mx.array]) -> type[nn.Module]:
    return type(cls.__name__, (cls,), {"__call__": lambda self, *args, **kwargs: output[0]})


def _selecting(cls: type[nn.Module], step: CurrentStep) -> type[nn.Module]:
    call: Callable[..., mx.array] = cls.__call__

    def select(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        if step.given is not None:
            return step.given
        hidden = call(self, *args, **kwargs)  # [N, 1, hidden_size]
        if step.hidden_indices is not None:
            step.hidden = hidden[step.hidden_indices]
        return hidden if step.logits_indices is None else hidden[step.logits_indices]  # [R, 1, hidden_size]

    return type(cls.__name__, (cls,), {"__call__": select})
