"""Response bodies of the routes about the server."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A model under one of its names, or a LoRA adapter.

    For an adapter, ``root`` is its path and ``parent`` is its model. ``memory_bytes`` is the maximum amount of memory
    that the model takes, and absent for adapters.
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
    """One of several models.

    ``max_model_len`` is null until the first load. ``memory_bytes`` is the memory reserved for the model at present.
    ``requests`` counts current requests. ``idle_seconds`` is the time since a request last started or ended, and null
    while the model is not loaded. ``error`` is the reason why the last load failed, or null.
    """

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
    """Response of ``/health``. ``running`` and ``waiting`` are numbers of requests. Fields without a value are absent.

    - ``kv_cache_usage``: used share of the block pool, from 0 to 1.
    - ``num_unknown_parameters``: number of request parameters that the server ignored because it does not know them.
    - ``unknown_parameters``: the same by name. Empty for clients without the server's key or, if there is no key,
      for clients on other machines and clients of a Unix socket.
    - ``kv_cache_dtype``: type in which K and V are stored, such as ``bfloat16`` or ``int8``.
    - ``attention``: backend that computes attention, and the layers for which MLX's operations are used instead.
    - ``requests``: ``packed`` if the requests of a step run together. Otherwise, a text that they run one after
      another, with the reason.
    - ``dispatch``: with ``--async-scheduling``, a description of the time at which steps are dispatched.
    - ``command_buffers``: limits of Metal's command buffers. Absent if they are MLX's own, or without Metal.
    - ``replay``: ``on`` if decode-only steps are replayed, otherwise ``off``, with the reason if replay is impossible.
    - ``speculation``: source of drafts, with the reason if a draft head is not used. Absent without speculation.
    - ``images``: ``accepted`` if prompts may have images, otherwise ``refused``, with the reason.
    - ``kv_transfer``: counts of ``metal_engine.kv_transfer.stats.KVTransferStats``, if KV transfer is used.
    - ``error``: present if the engine has stopped. Clients that may not see the engine's own error get no details.
    """

    status: Literal["ok", "draining", "restarting", "error"]
    running: int
    waiting: int
    kv_cache_usage: float
    kv_cache_dtype: str
    attention: str
    requests: str
    dispatch: str | None = None
    command_buffers: str | None = None
    replay: str
    speculation: str | None = None
    images: str
    preemptions: int
    failed_steps: int
    unconstrained_calls: int
    num_unknown_parameters: int
    unknown_parameters: dict[str, int]
    kv_transfer: dict[str, int] | None = None
    error: str | None = None


class ModelHealth(BaseModel):
    """Health of one of several models.

    ``memory_bytes`` is the memory reserved for the model. ``requests`` counts current requests. ``loads`` counts loads
    so far. ``attention``, ``kv_cache_dtype`` and ``images`` are as in ``Health``, and absent while the model is
    not loaded. ``restarting`` is true while requests wait for a new engine. ``error`` is the reason why the last load
    failed, or why the engine has stopped.
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
    images: str | None = None
    preemptions: int = 0
    failed_steps: int = 0
    unconstrained_calls: int = 0
    restarting: bool = False
    error: str | None = None


class RegistryHealth(BaseModel):
    """Response of ``/health`` with several models: counts for all models together, and the health of each model.

    ``kv_cache_usage`` is the usage of the fullest cache. ``used_bytes`` is the used part of ``memory_bytes``.
    If the server has a key, ``models`` is empty for clients that have not sent the key.
    """

    status: Literal["ok", "draining"]
    running: int
    waiting: int
    kv_cache_usage: float
    preemptions: int
    failed_steps: int
    unconstrained_calls: int
    num_unknown_parameters: int
    unknown_parameters: dict[str, int]
    memory_bytes: int
    used_bytes: int
    models: list[ModelHealth]


class ReadyResponse(BaseModel):
    ready: bool


class Version(BaseModel):
    version: str


class ServerInfo(BaseModel):
    """Capacity of a server with one model, for gateways. Field names are those of SGLang's and vLLM's servers.

    ``max_num_seqs`` and ``max_running_requests`` are the maximum number of concurrent requests. ``max_total_tokens`` is
    the size of the KV cache in tokens. ``disaggregation_mode`` is ``prefill`` if the engine only saves KV to a store,
    and ``decode`` if it only loads KV.
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
