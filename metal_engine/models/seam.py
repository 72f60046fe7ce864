"""How an mlx-lm model is opened: its attention calls come to our caches, and its trunk returns selected rows.

Nothing here knows an architecture by name. A model is looked at while it runs two tokens over caches that
record what its layers do with them; what does not fit is refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from metal_engine.device.info import computes_on_cpu
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.spec import StateSpec
from metal_engine.models import cpu_ops
from metal_engine.models.layer_cache import (
    AttendingCache,
    Attention,
    AttentionCall,
    CurrentStep,
    OwnedKeys,
    RecordingCache,
)
from metal_engine.models.softcap import open_softcapped_layers

logger = logging.getLogger(__name__)

# mlx-lm's caches that are not keys and values of every token, in words. Others are refused too.
_OTHER_STATE = {
    "ArraysCache": "it keeps recurrent state, which is not a KV cache",
    "CacheList": "its layers keep several caches each",
    "ChunkedKVCache": "it attends in chunks of the context",
}


@dataclass(frozen=True)
class OpenedModel:
    """What was seen of a model.

    Attributes:
        specs: what each layer keeps, one for each cache of the model.
        windows: sizes of the sliding windows in use, in tokens.
        vocab_size: number of logits of a row.
    """

    specs: list[StateSpec]
    windows: frozenset[int]
    vocab_size: int


def open_model(model: nn.Module, step: CurrentStep) -> OpenedModel:
    """Install the seam in a model, which is changed in place.

    Args:
        model: a loaded mlx-lm model.
        step: where the trunk finds the rows that are wanted.

    Raises:
        UnsupportedModelError: the model keeps state other than plain K and V, or computes attention in a way of
            its own.
    """
    caches = make_prompt_cache(model)
    for cache in caches:
        if type(cache) not in (KVCache, RotatingKVCache):
            kind = type(cache).__name__
            what = _OTHER_STATE.get(kind, "its state is not a plain KV cache")
            raise UnsupportedModelError(f"{what} ({kind})")
    _replace_functions(model, [(mlx_lm_base.scaled_dot_product_attention, _seam)])
    if computes_on_cpu():
        _replace_functions(model, cpu_ops.REPLACEMENTS)
        cpu_ops.use_faster_layers(model)
    recorders, vocab_size = _record(model, len(caches))
    if not all(r.num_reads for r in recorders) and open_softcapped_layers(model):
        recorders, _ = _record(model, len(caches))
    for layer, recorder in enumerate(recorders):
        if recorder.spec is None:
            raise UnsupportedModelError(f"layer {layer} never uses its KV cache")
        if recorder.num_reads == 0:
            raise UnsupportedModelError(
                f"layer {layer} computes attention in a way of its own, not with mlx-lm's shared function"
            )
    _select_rows_before_head(model, len(caches), step)
    windows = frozenset().union(*(recorder.windows for recorder in recorders))
    return OpenedModel([r.spec for r in recorders if r.spec is not None], windows, vocab_size)


# --- attention ---


def _attention_seam(original: Attention) -> Attention:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        owner = keys.owner if cache is None and isinstance(keys, OwnedKeys) else cache
        if isinstance(owner, AttendingCache):
            return owner.attend(AttentionCall(queries, keys, values, scale, mask, sinks), original)
        return original(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention


_seam = _attention_seam(mlx_lm_base.scaled_dot_product_attention)


def _replace_functions(model: nn.Module, replacements: list[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Put our functions in the place of mlx-lm's, whatever their names there, wherever the model's layers call them.

    A layer calls one through the globals of its module, or of the module of a class it inherits from.
    Classes of a checkpoint's own code belong to no module in ``sys.modules``, so the methods are asked for
    their globals.
    """
    homes = [vars(module) for module in (mlx_lm_base, activations, cpu_ops)]  # where the originals are called
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        for method in vars(cls).values():
            names: dict[str, Any] = getattr(method, "__globals__", {})
            if any(names is home for home in homes):
                continue
            for name, value in list(names.items()):
                for original, ours in replacements:
                    if value is original:
                        names[name] = ours


def _record(model: nn.Module, num_caches: int) -> tuple[list[RecordingCache], int]:
    """Run two sequences of one token over recording caches; these, and the number of logits of a row."""
    recorders = [RecordingCache() for _ in range(num_caches)]
    try:
        logits = model(mx.zeros((2, 1), mx.int32), cache=recorders)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedModelError(f"its forward does not run over a KV cache ({problem})") from error
    return recorders, logits.shape[-1]


# --- the rows that go through the LM head ---


def _select_rows_before_head(model: nn.Module, num_caches: int, step: CurrentStep) -> None:
    """Make the trunk return only the rows whose logits are needed, so that only they go through the head.

    The trunk is the innermost module around the layers that is called as a whole: found by trying.
    """
    for module in _modules_around(model, model.layers[0]):
        original_class = type(module)
        module.__class__ = _selecting(original_class, step)
        step.logits_indices = mx.array([1])
        try:
            recorders = [RecordingCache() for _ in range(num_caches)]
            if model(mx.zeros((2, 1), mx.int32), cache=recorders).shape[0] == 1:
                return
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            # Its output is no array, or whatever follows needs all rows.
            logger.debug("%s is no trunk: %s", original_class.__name__, error)
        finally:
            step.logits_indices = None
        module.__class__ = original_class
    raise UnsupportedModelError("it has no separate trunk and LM head")


def _modules_around(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """The modules that contain ``layer``, innermost first; neither the model nor the layer itself."""
    path = next(name for name, module in model.named_modules() if module is layer)
    by_name = dict(model.named_modules())
    parts = path.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
    return [by_name[name] for name in names if name in by_name]


def _selecting(cls: type[nn.Module], step: CurrentStep) -> type[nn.Module]:
    call: Callable[..., mx.array] = cls.__call__

    def select(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        hidden = call(self, *args, **kwargs)  # [N, 1, hidden_size]
        if step.hidden_indices is not None:
            step.hidden = hidden[step.hidden_indices]
        return hidden if step.logits_indices is None else hidden[step.logits_indices]  # [R, 1, hidden_size]

    return type(cls.__name__, (cls,), {"__call__": select})
