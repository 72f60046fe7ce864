"""Replaces mlx-lm's functions in a model: attention uses our caches, and the trunk returns selected rows.

Does not use names of architectures. The model runs one or two tokens over caches that record how its layers use them. A
model that cannot be supported is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from metal_engine.device.info import computes_on_cpu
from metal_engine.errors import UnknownCacheError, UnsupportedModelError
from metal_engine.kv_cache.spec import StateSpec
from metal_engine.models import cpu_ops
from metal_engine.models.cache_tree import CacheGroup, CacheTree, leaves, map_caches
from metal_engine.models.current_step import CurrentStep
from metal_engine.models.indexer import patch_indexers
from metal_engine.models.layer_cache import Attention, AttentionCall, AttentionOwner, OwnedKeys, RecordingCache
from metal_engine.models.namespaces import replace_namespaces
from metal_engine.models.recurrent.convolved_keys import patch_convolved_keys
from metal_engine.models.recurrent.ngrams import patch_ngrams
from metal_engine.models.recurrent.recording import CallTrace, RecordingState
from metal_engine.models.recurrent.recurrences import REPLACEMENTS as RECURRENCES
from metal_engine.models.softcap import patch_softcapped_layers
from metal_engine.models.trunk import Trunk, hidden_problem, select_rows_before_head

Recorder = RecordingCache | RecordingState


@dataclass(frozen=True)
class PatchedModel:
    """Observations from running a model over recording caches.

    Attributes:
        caches: recorder of each cache of the model.
        trace: recorded module calls of the second run; empty if no layer is recurrent.
        windows: sizes of the sliding windows that layers requested, in tokens.
        outputs: logits of each run, [2, 1, vocab_size] each, not computed yet. A second run exists only if a layer is
            recurrent.
        trunk: module whose output is the LM head's input; None until it is found.
    """

    caches: CacheTree
    trace: CallTrace
    windows: frozenset[int]
    outputs: list[mx.array]
    trunk: Trunk | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits of a row."""
        return self.outputs[-1].shape[-1]

    @property
    def recorders(self) -> list[Recorder]:
        """Recorders of all caches, in order."""
        return list(leaves(self.caches))

    @property
    def specs(self) -> list[StateSpec]:
        """Specs of the state of each cache, in order."""
        return [_spec(recorder) for recorder in self.recorders]

    @property
    def chunks(self) -> list[int | None]:
        """Sizes in tokens of the chunks within which layers attend, for each cache in order; None for no chunks."""
        return [recorder.chunk if isinstance(recorder, RecordingCache) else None for recorder in self.recorders]


def _spec(recorder: Recorder) -> StateSpec:
    assert recorder.spec is not None
    return recorder.spec


def patch_model(model: nn.Module, step: CurrentStep) -> PatchedModel:
    """Replace mlx-lm's functions in a model, which is changed in place, and record its layers' states.

    Args:
        model: a loaded mlx-lm model.
        step: the running step, from which the trunk reads the indices of the rows to return.

    Raises:
        UnknownCacheError: a layer has an unsupported kind of cache. The model is unchanged.
        UnsupportedModelError: the forward pass does not run over recording caches, or the model has no separate trunk
            and LM head. Or a layer has an unsupported kind of state, does not use its cache, or computes attention
            without mlx-lm's shared function.
    """
    _recorders(model, CallTrace())
    _replace_functions(model, [(mlx_lm_base.scaled_dot_product_attention, _patched_attention)])
    if computes_on_cpu():
        _replace_functions(model, cpu_ops.REPLACEMENTS)
        cpu_ops.use_faster_layers(model)
    _replace_functions(model, RECURRENCES)
    _patch_modules(model)
    patched = _record(model)
    if not all(map(_is_used, patched.recorders)) and patch_softcapped_layers(model):
        patched = _record(model)
    for layer, recorder in enumerate(patched.recorders):
        if recorder.spec is None:
            raise UnsupportedModelError(f"layer {layer} never uses its KV cache")
        if any(array.nbytes == 0 for array in recorder.spec.token_arrays.values()):
            raise UnsupportedModelError(f"layer {layer} caches vectors without numbers")
        if not _is_used(recorder):
            raise UnsupportedModelError(
                f"layer {layer} computes attention in a way of its own, not with mlx-lm's shared function"
            )
    trunk = select_rows_before_head(model, step, lambda: _recorders(model, CallTrace()))
    return replace(patched, trunk=trunk)


def hidden_states_problem(model: nn.Module, patched: PatchedModel) -> str | None:
    """Return the reason to refuse the hidden states of a patched model, or None if they are usable.

    Calls :func:`metal_engine.models.trunk.hidden_problem`, which computes the LM head for three rows. ``patched`` is
    the result of :func:`patch_model`.
    """
    assert patched.trunk is not None
    return hidden_problem(model, patched.trunk, patched.vocab_size, lambda: _recorders(model, CallTrace()))


def recorded(model: nn.Module) -> list[Recorder]:
    """Run the model over recording caches, and return the recorder of each cache. The model stays patched.

    Builds graphs without evaluating them, so weights that have not been read stay on disk.

    Raises:
        UnknownCacheError: a layer has an unsupported kind of cache.
        UnsupportedModelError: the forward pass does not run over recording caches.
    """
    _recorders(model, CallTrace())
    _replace_functions(model, [(mlx_lm_base.scaled_dot_product_attention, _patched_attention)])
    _patch_modules(model)
    return _record(model).recorders


def _patch_modules(model: nn.Module) -> None:
    """Apply the patches that only some architectures need: namespaces, indexes, n-grams and convolved keys."""
    replace_namespaces(model)
    patch_indexers(model)
    patch_ngrams(model)
    patch_convolved_keys(model)


def _is_used(recorder: Recorder) -> bool:
    """Return True if the layer attended over its cache. Always True for recurrent state."""
    return isinstance(recorder, RecordingState) or recorder.num_reads > 0


def _recorders(model: nn.Module, trace: CallTrace) -> CacheTree:
    """Return new recording caches for a model. Raises UnknownCacheError for an unsupported kind of cache."""

    def recorder(cache: Any) -> Recorder:
        if type(cache) is ArraysCache:
            return RecordingState(len(cache.cache), trace)
        if type(cache) in (KVCache, RotatingKVCache):
            return RecordingCache()
        if type(cache) is ChunkedKVCache:
            return RecordingCache(cache.chunk_size)
        raise UnknownCacheError(f"its state is not a plain KV cache ({type(cache).__name__})")

    return map_caches(recorder, make_prompt_cache(model))


# --- attention ---


def _patch_attention(original: Attention) -> Attention:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        # A layer may attend over the keys of another layer, with its own cache or without a cache.
        owner = keys.owner if isinstance(keys, OwnedKeys) else cache
        if isinstance(owner, CacheGroup):
            owner = next((one for one in owner.caches if isinstance(one, AttentionOwner)), owner)
        if isinstance(owner, AttentionOwner):
            return owner.attend(AttentionCall(queries, keys, values, scale, mask, sinks), original)
        return original(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention


_patched_attention = _patch_attention(mlx_lm_base.scaled_dot_product_attention)


def _replace_functions(model: nn.Module, replacements: list[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Replace mlx-lm's functions, under any name, in the globals of the files that define the model's classes.

    A layer calls a function through the globals of the file of its class, or of a base class. All models of the process
    that use these files call the replacements. Files of the checkpoint's own code are not in ``sys.modules``, so the
    globals are taken from the methods.

    Args:
        replacements: pairs of mlx-lm's function and its replacement.
    """
    homes = [vars(module) for module in (mlx_lm_base, activations, cpu_ops)]  # modules that must keep the originals
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        for method in vars(cls).values():
            names: dict[str, Any] = getattr(method, "__globals__", {})
            if any(names is home for home in homes):
                continue
            for name, value in list(names.items()):
                for original, ours in replacements:
                    if value is original:
                        names[name] = ours


def _record(model: nn.Module) -> PatchedModel:
    """Run two sequences of one token over recording caches, and a second token of each if the model is recurrent.

    Raises:
        UnknownCacheError: a layer has an unsupported kind of cache.
        UnsupportedModelError: the forward pass fails.
    """
    trace = CallTrace()
    caches = _recorders(model, trace)
    try:
        outputs = [model(mx.array([[0], [1]]), cache=caches)]
        if any(isinstance(recorder, RecordingState) for recorder in leaves(caches)):
            with trace.watch(model):
                # Different tokens, so that states cannot be equal by accident.
                outputs.append(model(mx.array([[2], [3]]), cache=caches))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedModelError(f"its forward does not run over a KV cache ({problem})") from error
    windows = (recorder.windows for recorder in leaves(caches) if isinstance(recorder, RecordingCache))
    return PatchedModel(caches, trace, frozenset().union(*windows), outputs)
