"""What the routes about the server answer with."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A name of a model, or an adapter. ``root`` is an adapter's path, and ``parent`` the model of the adapter.

    ``memory_bytes`` is the most memory that the model takes. An adapter has none of its own.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "metal-engine"
    root: str
    parent: str | None = None
    max_model_len: int
    memory_bytes: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class RegistryCard(ModelCard):
    """One of several models. ``max_model_len`` is known once it has been loaded; ``requests`` use it now."""

    max_model_len: int | None  # type: ignore[assignment]
    loaded: bool
    state: str
    requests: int
    idle_seconds: float | None
    error: str | None


class RegistryList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RegistryCard]


class Health(BaseModel):
    """``/health``: counts are of requests, ``kv_cache_usage`` is a share of the pool (0 to 1).

    ``num_unknown_parameters`` counts request parameters that the server did not know and ignored, and
    ``unknown_parameters`` counts them by name: for those who send the server's key or, where it has none, for clients
    on the same machine. Others get no names.
    ``kv_cache_dtype`` says in what K and V are kept, as ``bfloat16`` or ``int8``.
    ``attention`` says what computes attention: a backend, and the layers that it leaves to MLX's operations.
    ``dispatch`` says, with ``--async-scheduling``, when the device is given a step.
    ``command_buffers`` says what limits those of Metal: null where it is MLX's own limits, or there is no Metal.
    ``replay`` says whether steps that only decode are replayed: ``on``, or ``off``, with why where they cannot be.
    ``kv_transfer`` has the counts of :class:`metal_engine.kv_transfer.stats.KVTransferStats`, where KV is transferred.
    """

    status: Literal["ok", "draining", "error"]
    running: int
    waiting: int
    kv_cache_usage: float
    kv_cache_dtype: str
    attention: str
    dispatch: str | None = None
    command_buffers: str | None = None
    replay: str
    preemptions: int
    failed_steps: int
    num_unknown_parameters: int
    unknown_parameters: dict[str, int]
    kv_transfer: dict[str, int] | None = None
    error: str | None = None


class ModelHealth(BaseModel):
    """One of several models: ``memory_bytes`` it has of the device's, ``requests`` use it, ``loads`` it took so far.

    ``attention`` and ``kv_cache_dtype`` are as in :class:`Health`, and known while it is loaded.
    ``error`` says why it could not be loaded the last time, or why its engine has stopped.
    """

    name: str
    state: str
    memory_bytes: int
    requests: int
    loads: int
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    attention: str | None = None
    kv_cache_dtype: str | None = None
    preemptions: int = 0
    failed_steps: int = 0
    error: str | None = None


class RegistryHealth(BaseModel):
    """``/health`` where there are several models: what :class:`Health` has, for all of them, and each by itself.

    ``kv_cache_usage`` is that of the fullest cache; ``used_bytes`` of ``memory_bytes`` are taken.
    ``models`` is empty for who has not sent the server's key.
    """

    status: Literal["ok", "draining"]
    running: int
    waiting: int
    kv_cache_usage: float
    preemptions: int
    failed_steps: int
    num_unknown_parameters: int
    unknown_parameters: dict[str, int]
    memory_bytes: int
    used_bytes: int
    models: list[ModelHealth]


class Ready(BaseModel):
    ready: bool


class Version(BaseModel):
    version: str


class ServerInfo(BaseModel):
    """What one server with one model can take, for gateways; names are those that SGLang's and vLLM's servers use.

    ``max_num_seqs`` requests run at once (``max_running_requests`` is the same), on a KV cache of ``max_total_tokens``.
    ``disaggregation_mode``: ``prefill`` for who only saves KV to a store, ``decode`` for who only loads it.
    """

    model: str
    model_path: str
    served_model_name: str
    version: str
    context_length: int
    max_total_tokens: int
    block_size: int
    max_num_seqs: int
    max_running_requests: int
    max_num_batched_tokens: int
    disaggregation_mode: Literal["null", "prefill", "decode"]
