"""What the routes about the server answer with."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "metal-engine"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """``/health``: counts are of requests, ``kv_cache_usage`` is a share of the pool (0 to 1).

    ``num_unknown_parameters`` counts request parameters that the server did not know and ignored, and
    ``unknown_parameters`` counts them by name: for those who send the server's key or, where it has none, for clients
    on the same machine. Others get no names.
    ``kv_cache_dtype`` says in what K and V are kept, as ``bfloat16`` or ``int8``.
    ``attention`` says what computes attention: a backend, and the layers that it leaves to MLX's operations.
    ``kv_transfer`` has the counts of :class:`metal_engine.kv_transfer.stats.KVTransferStats`, where KV is transferred.
    """

    status: Literal["ok", "draining", "error"]
    running: int
    waiting: int
    kv_cache_usage: float
    kv_cache_dtype: str
    attention: str
    preemptions: int
    failed_steps: int
    num_unknown_parameters: int
    unknown_parameters: dict[str, int]
    kv_transfer: dict[str, int] | None = None
    error: str | None = None


class Ready(BaseModel):
    ready: bool


class Version(BaseModel):
    version: str
