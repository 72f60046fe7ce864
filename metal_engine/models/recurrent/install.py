"""Installs our caches in a model's recurrent layers: by function if their functions are known, else by module.

By function, a module runs once over all packed rows, so its weights are read once. Only its convolutions and
recurrences process segments. This requires that one of them stores each array. A convolution stores an array if the
array was the end of its input while the model was recorded. A recurrence, known by name, stores an array that it
received unchanged as its state.
"""

from __future__ import annotations

import logging

import mlx.nn as nn

from metal_engine.models.recurrent.grouped import run_in_groups
from metal_engine.models.recurrent.recording import CallTrace, RecordingState
from metal_engine.models.recurrent.state_cache import StateCache, packed_convolution

logger = logging.getLogger(__name__)


def install_states(
    pairs: list[tuple[RecordingState, StateCache]], trace: CallTrace, *, whole_modules: bool = False
) -> None:
    """Make the recorded modules use our caches.

    Args:
        pairs: recorder of each cache, and the cache that replaces it.
        trace: calls of the recorded run.
        whole_modules: True to run every module by groups, even if its functions are known. This is slower, and serves
            tests as a reference.
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
        run_in_groups(module, entries[key])
