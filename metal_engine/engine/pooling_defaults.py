"""Resolves a request's pooling parameters for the model that is served."""

from __future__ import annotations

from dataclasses import replace

from metal_engine.errors import ParameterError
from metal_engine.pooling_params import PoolingParams
from metal_engine.settings.config import ModelInfo


def resolve_pooling(params: PoolingParams, model: ModelInfo) -> PoolingParams:
    """Return the parameters with the defaults of the checkpoint filled in.

    Parameters with ``token_ids``, which request logits and not an embedding, are returned unchanged.

    Raises:
        ParameterError: the model has no embeddings, or none of the requested length. The error's parameter is ``model``
            if the model has no embeddings.
    """
    pooler = model.pooler
    if params.token_ids:
        return params
    if pooler.problem is not None:
        raise ParameterError("model", f"{model.name} gives no embeddings here: {pooler.problem}")
    wanted, size = params.dimensions, model.hidden_size
    if wanted is not None and wanted != size:
        if size and wanted > size:
            raise ParameterError("dimensions", f"{wanted} is more than the {size} that the model's vectors have")
        if pooler.matryoshka_dimensions and wanted not in pooler.matryoshka_dimensions:
            allowed = ", ".join(map(str, pooler.matryoshka_dimensions))
            raise ParameterError("dimensions", f"must be one of {allowed}, the sizes that the model was trained for")
    return replace(
        params,
        pooling_type=params.pooling_type or pooler.pooling_type,
        normalize=pooler.normalize if params.normalize is None else params.normalize,
    )
