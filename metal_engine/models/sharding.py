"""Divides a model between ranks with mlx-lm's ``shard`` or ``pipeline``, and checks the layers before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from metal_engine.errors import UnsupportedModelError, one_line
from metal_engine.kv_cache.spec import IndexSpec, KVSpec, LatentSpec, RecurrentSpec
from metal_engine.models.indexer import indexers
from metal_engine.models.layer_cache import RecordingCache
from metal_engine.models.mlx_lm_patch import Recorder, recorded
from metal_engine.models.recurrent.recording import RecordingState

# Exceptions that mlx-lm raises for a model that cannot be divided.
_CANNOT = (ValueError, TypeError, AttributeError, AssertionError, IndexError)


@dataclass(frozen=True)
class Sharding:
    """Sharding of a model between ranks.

    Attributes:
        communication: group of the ranks.
        is_pipeline: True if each rank has some of the layers. False if each rank has some of the heads of every layer.
    """

    communication: mx.distributed.Group
    is_pipeline: bool

    def divide(self, model: nn.Module) -> UnshardedModelInfo:
        """Reduce a model to this rank's shard. Return facts about the whole model. Does not read weights from disk.

        Raises:
            UnsupportedModelError: the architecture cannot be divided, or not evenly between this number of ranks.
        """
        return divide_layers(model, self.communication) if self.is_pipeline else divide_heads(model, self.communication)


@dataclass(frozen=True)
class UnshardedModelInfo:
    """Facts about a model before its division.

    Attributes:
        num_layers: number of layers.
        num_params: number of parameters.
    """

    num_layers: int
    num_params: int


def evaluate_one_by_one(model: nn.Module) -> None:
    """Read the weights of a model from disk, one tensor at a time.

    If this rank uses only a slice of a tensor, the whole tensor is in memory only until the slice is computed.
    """
    for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        mx.eval(array)


def divide_heads(model: nn.Module, group: mx.distributed.Group) -> UnshardedModelInfo:
    """Reduce each layer of a model to this rank's heads. Return and raise as :meth:`Sharding.divide`."""
    size = group.size()
    if not hasattr(model, "shard"):
        raise UnsupportedModelError("mlx-lm cannot share its layers between ranks (it has no shard())")
    before = recorded(model)
    whole = UnshardedModelInfo(len(before), get_total_parameters(model))
    try:
        model.shard(group)
        for indexer in indexers(model):
            indexer.ranks = group if indexer.can_share else None
        after = recorded(model)
    except (*_CANNOT, UnsupportedModelError) as error:
        # Name the layer if its heads are the cause. Another cause is a matrix whose columns do not divide evenly.
        for layer, one in enumerate(before):
            if not _has_even_heads(one, size):
                raise UnsupportedModelError(f"{_uneven(layer, one, size)} ({one_line(error)})") from error
        raise UnsupportedModelError(f"{size} machines cannot share its layers ({one_line(error)})") from error
    for layer, (one, shard) in enumerate(zip(before, after, strict=True)):
        if not _is_shard(one, shard, size):
            raise UnsupportedModelError(_uneven(layer, one, size))
    return whole


def _is_shard(whole: Recorder, shard: Recorder, size: int) -> bool:
    """Return True if a layer's shard has the state and heads of one of ``size`` ranks.

    A rank has 1 / ``size`` of the query heads, the KV heads and the recurrent state. Latents, index keys and stored
    token ids are not divided: each rank has all of them.
    """
    match whole.spec, shard.spec:
        case RecurrentSpec(), RecurrentSpec():
            if not mx.issubdtype(whole.spec.dtype, mx.floating):  # earlier token ids, which all ranks store
                return shard.spec == whole.spec
            return shard.spec.bytes_per_request * size == whole.spec.bytes_per_request
        case (LatentSpec(), LatentSpec()) | (IndexSpec(), IndexSpec()):  # all heads share the latents and the index
            kept = shard.spec == whole.spec
        case KVSpec(), KVSpec():
            widths = (shard.spec.head_dim, shard.spec.v_head_dim)
            kept = widths == (whole.spec.head_dim, whole.spec.v_head_dim)
            kept = kept and shard.spec.num_kv_heads * size == whole.spec.num_kv_heads
        case _:
            return False
    assert isinstance(whole, RecordingCache) and isinstance(shard, RecordingCache)
    return kept and shard.num_heads * size == whole.num_heads


def _has_even_heads(recorder: Recorder, size: int) -> bool:
    """Return True if a layer's heads and KV heads divide evenly. Always True for recurrent layers."""
    if not isinstance(recorder, RecordingCache):
        return True
    num_kv_heads = recorder.spec.num_kv_heads if isinstance(recorder.spec, KVSpec) else 0
    return recorder.num_heads % size == 0 and num_kv_heads % size == 0


def _uneven(layer: int, recorder: Recorder, size: int) -> str:
    return f"its layer {layer} has {_heads(recorder)}, which {size} machines cannot share evenly"


def _heads(recorder: Recorder) -> str:
    """Describe the heads of a layer for a message."""
    if not isinstance(recorder, RecordingCache):
        return "a recurrent state"
    if isinstance(recorder.spec, LatentSpec):
        return f"{recorder.num_heads} heads over shared latents"
    if isinstance(recorder.spec, IndexSpec):
        return "an index"
    if recorder.spec is None:
        return "a KV cache that it never uses"
    assert isinstance(recorder.spec, KVSpec)
    spec = recorder.spec
    return f"{recorder.num_heads} heads and {spec.num_kv_heads} KV heads of {spec.head_dim}"


def divide_layers(model: nn.Module, group: mx.distributed.Group) -> UnshardedModelInfo:
    """Reduce a model to this rank's layers. Return and raise as :meth:`Sharding.divide`."""
    trunk: Any = getattr(model, "model", None)
    if not hasattr(trunk, "pipeline"):
        raise UnsupportedModelError("mlx-lm cannot give its layers to several ranks (its trunk has no pipeline())")
    whole = UnshardedModelInfo(len(model.layers), get_total_parameters(model))
    if whole.num_layers < group.size():
        raise UnsupportedModelError(f"it has {whole.num_layers} layers, which are too few for {group.size()} machines")
    is_recurrent = _is_recurrent(model)
    try:
        trunk.pipeline(group)
    except _CANNOT as error:
        problem = f"{group.size()} machines cannot share its layers ({one_line(error)})"
        raise UnsupportedModelError(problem) from error
    if is_recurrent and not _is_recurrent(model):
        # The rules for planning steps depend on recurrent layers, and must be the same on all ranks.
        problem = f"rank {group.rank()} of {group.size()} machines would have none of its recurrent layers"
        raise UnsupportedModelError(problem)
    return whole


def _is_recurrent(model: nn.Module) -> bool:
    return any(isinstance(one, RecordingState) for one in recorded(model))
