"""Which way a model's recurrent layers go: by function where their functions can be told apart, else by module.

By function, a module runs once over all packed rows, so that its weights are read once; only its convolutions and its
recurrences see segments. That takes that each array is kept by one of them: by the convolution whose input it was the
end of while the model was watched, or by a recurrence known by name that got it as its state, as it was.
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
    """Make the modules that were seen use our caches.

    Args:
        pairs: what was recorded of each cache, and the cache that takes its place.
        trace: of the run that was recorded.
        whole_modules: run every module by groups, as if no function of it were known: the slower way, and the oracle
            of the other in tests.
    """
    entries: dict[int, dict[int, set[int]]] = {}  # of the modules that run by groups: id -> cache -> indices
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
        logger.debug("%s runs group by group", type(module).__name__)
        run_in_groups(module, entries[key])
