"""The caches that mlx-lm passes to a model's layers: one per layer, or a group if a layer has several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlx_lm.models.cache import CacheList


class CacheGroup:
    """Several caches of one layer. Replaces mlx-lm's ``CacheList``."""

    def __init__(self, caches: Iterable[Any]) -> None:
        self.caches = tuple(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def __len__(self) -> int:
        return len(self.caches)


CacheTree = list[Any]
"""A cache or a :class:`CacheGroup` for each layer with state."""


def map_caches(function: Callable[[Any], Any], tree: Iterable[Any]) -> CacheTree:
    """Return a new tree with the result of ``function`` for each cache.

    Calls ``function`` in the order of :func:`leaves`. Each ``CacheList`` and :class:`CacheGroup` becomes a new
    :class:`CacheGroup`.
    """
    made = []
    for cache in tree:
        if isinstance(cache, CacheGroup | CacheList):
            made.append(CacheGroup(map_caches(function, cache.caches)))
        else:
            made.append(function(cache))
    return made


def leaves(tree: Iterable[Any]) -> Iterator[Any]:
    """Yield the caches of a tree, layer by layer. Yields the members of a :class:`CacheGroup`, not the group."""
    for cache in tree:
        if isinstance(cache, CacheGroup):
            yield from leaves(cache.caches)
        else:
            yield cache
