"""Shortens the chunks within which layers attend (Llama 4), so that the short requests of a check cross their edges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from metal_engine.errors import UnsupportedModelError
from metal_engine.models.layer_cache import ChunkedLayerCache
from metal_engine.models.paged_model import PagedModel

_CHUNK = 7  # tokens; not a divisor of a block, and less than a half of each request of the check
# Attributes of mlx-lm's modules -> largest value in the check. In layers without chunks, the scale of a query grows
# with its position, in steps of ``floor_scale`` tokens.
_CHUNK_SIZE = "attention_chunk_size"
_LARGEST = {_CHUNK_SIZE: _CHUNK, "floor_scale": 5}


@contextmanager
def small_chunks(paged: PagedModel) -> Iterator[None]:
    """Shorten the chunks of a model within a ``with`` block, in mlx-lm's modules and in our caches.

    Also reduces the ``floor_scale`` of modules. Does nothing if no cache has chunks.

    Raises:
        UnsupportedModelError: the modules have other chunk sizes than the caches, or there are several chunk sizes.
    """
    caches = [cache for cache in paged.layer_caches if isinstance(cache, ChunkedLayerCache)]
    if not caches:
        yield
        return
    sizes = [
        (module, name, getattr(module, name))
        for module in paged.model.modules()
        for name in _LARGEST
        if hasattr(module, name)
    ]
    own = {cache.chunk for cache in caches}
    if len(own) > 1 or own != {size for _, name, size in sizes if name == _CHUNK_SIZE}:
        raise UnsupportedModelError(f"its chunks of the context ({sorted(own)} tokens) cannot be shortened for a check")
    (chunk,) = own
    try:
        for cache in caches:
            cache.chunk = min(chunk, _CHUNK)
        for module, name, size in sizes:
            setattr(module, name, min(size, _LARGEST[name]))
        yield
    finally:
        for cache in caches:
            cache.chunk = chunk
        for module, name, size in sizes:
            setattr(module, name, size)
