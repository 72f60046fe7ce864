"""Installs our caches in a model's recurrent layers, in one of two ways.

By function: a module runs once over all packed rows, so its weights are read once. Only its convolutions and
recurrences process segments. This requires that each array of the module's cache belongs to a convolution or to a
recurrence, according to the recorded run of the model:

- An array belongs to a convolution if it was equal to the end of the convolution's input.
- An array belongs to a recurrence if a recurrence in :mod:`metal_engine.models.recurrent.recurrences` received it
  unchanged as its state.

By module, if an array belongs to neither: the whole module runs once for each group of segments
(:mod:`metal_engine.kv_cache.segments`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_engine.kv_cache.segments import SegmentGroup
from metal_engine.models.recurrent.recording import CallTrace, RecordingState
from metal_engine.models.recurrent.state_cache import GroupStates, StateCache, packed_convolution

logger = logging.getLogger(__name__)


def install_states(
    pairs: list[tuple[RecordingState, StateCache]], trace: CallTrace, *, whole_modules: bool = False
) -> None:
    """Change the classes of the recorded modules, or of their convolutions, so that they use our caches.

    Evaluates the recorded arrays.

    Args:
        pairs: recorder of each recurrent layer's cache, and the cache that replaces it.
        trace: module calls of the recorded run.
        whole_modules: True to run each module once per group of segments, even if its arrays belong to convolutions and
            recurrences. This is slower. Tests use it as a reference.
    """
    entries: dict[int, dict[int, set[int]]] = {}  # id of a module that runs by groups -> id of a cache -> indices
    modules: dict[int, nn.Module] = {}
    for recorded, cache in pairs:
        kept = {} if whole_modules else recorded.kept_by_convolutions(trace)
        if not whole_modules and kept.keys() | recorded.recurrent == set(range(len(recorded.cache))):
            for index, conv in kept.items():
                packed_convolution(conv, cache, str(index))
            continue
        for key, user in recorded.users.items():
            modules[key] = user
            entries.setdefault(key, {})[id(cache)] = recorded.puts.get(key, set())
    for key, module in modules.items():
        logger.debug("%s runs once for each group of segments", type(module).__name__)
        _run_in_groups(module, entries[key])


def _run_in_groups(module: nn.Module, entries: dict[int, set[int]]) -> None:
    """Make a module that uses a :class:`StateCache` run once for each group of a step's segments.

    The module's weights are read once for each group. All decodes form one group. A call raises RuntimeError if the
    module does not store exactly the arrays in ``entries``.

    Args:
        module: the module, changed in place.
        entries: id of a cache -> indices that the module writes. Modules that share a cache write different indices.
    """
    cls = type(module)
    original: Callable[..., Any] = cls.__call__

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, StateCache)), None)
        if cache is None:
            return original(self, *args, **kwargs)
        segments = cache.segments
        mine = entries[id(cache)]
        states = {index: cache.take(str(index)) for index in mine}
        results = []
        for number, group in enumerate(segments.groups):
            view = GroupStates([states[i][number] if i in mine else None for i in range(len(cache))])
            given = [_of_group(a, group, segments.num_rows, cache, view) for a in args]
            named = {name: _of_group(a, group, segments.num_rows, cache, view) for name, a in kwargs.items()}
            results.append(original(self, *given, **named))
            if view.written.keys() != mine:
                raise RuntimeError(f"{cls.__name__} left {sorted(view.written)} of its states {sorted(mine)}")
            for index, value in view.written.items():
                cache.put(str(index), group, value)
        if isinstance(results[0], tuple):
            return tuple(segments.join(parts) for parts in zip(*results, strict=True))
        return segments.join(results)

    module.__class__ = type(cls.__name__, (cls,), {"__call__": run, "runs_in_groups": True})


def _of_group(argument: Any, group: SegmentGroup, num_rows: int, cache: StateCache, view: GroupStates) -> Any:
    """Convert an argument of a module's call for one group, which has b segments with s rows each.

    Packed rows, [N, 1, ...], become [b, s, ...]. The cache becomes ``view``. Offsets of the rows, [N], become the
    offsets of the segments' first rows, [b]. Other arguments are returned unchanged.
    """
    if argument is cache:
        return view
    if isinstance(argument, mx.array) and argument.ndim >= 2 and argument.shape[:2] == (num_rows, 1):
        return group.take(argument)
    if isinstance(argument, mx.array) and argument.ndim == 1 and argument.size == num_rows:  # offsets
        rows = mx.array(argument)[group.rows]
        return rows if group.length == 1 else rows[:1]
    return argument
