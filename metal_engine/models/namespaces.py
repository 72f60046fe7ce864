"""Replacements for functions that a model file calls as attributes of a library, such as ``mx.arange``.

``mlx_lm_patch`` replaces functions in the globals of model files. The globals do not hold functions such as
``mx.arange``, only the library: ``mlx.core`` or NumPy. A file therefore gets a copy of the library with these
replacements:

- ``arange(offset, offset + L)`` returns the positions of a step's rows if ``offset`` is the offset of a layer cache,
  [N]. ``arange(0, offset + L)``, which is used only for a mask that chunked layer caches ignore, returns [0].
- ``mx.tile`` of stored keys returns :class:`metal_engine.models.layer_cache.TiledKeys`.
- ``mx.fast.scaled_dot_product_attention`` over stored keys requests attention from their cache.

With any other arguments, the library's functions are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from metal_engine.models.layer_cache import AttentionCall, OwnedKeys, TiledKeys


def _arange(original: Callable[..., Any], num_axes: int) -> Callable[..., Any]:
    """Return a replacement for ``arange``. Its positions of rows have ``num_axes`` axes: [N, 1] or [N, 1, 1]."""

    def arange(start: Any, stop: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(stop, mx.array) and stop.ndim == 1:
            if isinstance(start, mx.array):
                return start.reshape(-1, *[1] * (num_axes - 1))
            return mx.zeros((1,), mx.int32)  # the positions of all keys, for a mask that a chunked cache ignores
        return original(start, *args, **kwargs) if stop is None else original(start, stop, *args, **kwargs)

    return arange


def _tile(array: mx.array, reps: int | Sequence[int], **options: Any) -> mx.array:
    tiled = mx.tile(array, reps, **options)
    is_over_heads = isinstance(reps, Sequence) and len(reps) == 4 and reps[0] == reps[2] == reps[3] == 1
    return TiledKeys(tiled, array.owner) if isinstance(array, OwnedKeys) and is_over_heads else tiled


def _attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, **options: Any) -> mx.array:
    if not isinstance(keys, OwnedKeys):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, **options)
    call = AttentionCall(queries, keys, values, scale, options.get("mask"), options.get("sinks"))
    return keys.owner.attend(call, scaled_dot_product_attention)


def _copy(module: ModuleType, **replacements: Any) -> ModuleType:
    copied = ModuleType(module.__name__)
    vars(copied).update(vars(module) | replacements)
    return copied


# Attention layers call mx.arange, for activations [N, heads, 1, head_dim]. Trunks call np.arange, for activations
# [N, 1, hidden_size].
_FAST = _copy(mx.fast, scaled_dot_product_attention=_attention)
_COPIES = [
    (mx, _copy(mx, arange=_arange(mx.arange, 3), tile=_tile, fast=_FAST)),
    (np, _copy(np, arange=_arange(np.arange, 2))),
]
_REPLACED = {"arange", "tile", "scaled_dot_product_attention"}


def replace_namespaces(model: nn.Module) -> None:
    """Replace MLX and NumPy in the globals of the model's files, if a method of the file calls a replaced function."""
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        if cls.__module__.split(".")[0] in ("mlx", "metal_engine"):
            continue
        for method in vars(cls).values():
            code: CodeType | None = getattr(method, "__code__", None)
            if code is None:
                continue
            names: dict[str, Any] = method.__globals__
            if _REPLACED & set(code.co_names) - names.keys():  # a global name is not an attribute
                for name, value in list(names.items()):
                    names[name] = next((copied for library, copied in _COPIES if value is library), value)
