"""Parses and checks ``--kv-transfer-config`` and ``--kv-cache-dir`` before a model is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import inf
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.fields import Setting, read_object, setting, settings_of

_FLAG = "--kv-transfer-config"
_SHORT_FLAG = "--kv-cache-dir"


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """Settings of KV transfer: the store, the engine's role, and limits. The first three names come from vLLM.

    Attributes:
        options: options of the store, such as ``path`` and ``max_size``, or ``url`` and ``ttl``.
        flag: command-line flag that enabled KV transfer.
    """

    kv_connector: str = setting(None, "Kind of store.", choices=("disk", "valkey"))
    kv_role: str = setting(
        "kv_both", "A producer saves, a consumer loads.", choices=("kv_producer", "kv_consumer", "kv_both")
    )
    kv_load_failure_policy: str = setting(
        "recompute",
        "Policy for a request whose load fails: compute its missing KV, or end the request with an error. A block that "
        "is missing from the store is not a failure.",
        choices=("recompute", "fail"),
    )
    options: dict[str, Any] = field(default_factory=dict)
    flag: str = _FLAG
    load_timeout: float = setting(
        10.0, "Time limit in seconds for loading a request's KV. A load that takes longer has failed.", gt=0, lt=inf
    )
    handover_timeout: float = setting(
        30.0, "Time limit in seconds for each next block from a producer that is still computing.", gt=0, lt=inf
    )
    max_load_bytes: int = setting(
        GIB, "Host memory for loaded KV whose request has not been admitted yet.", kind="size", ge=1
    )
    max_save_bytes: int = setting(
        GIB // 4, "Host memory for KV that waits to be written. Further KV is dropped.", kind="size", ge=1
    )
    io_threads: int = setting(4, "Threads that read from the store.", ge=1)
    save_on_close: float = setting(5.0, "Time limit in seconds for writing queued KV at shutdown.", gt=0, lt=inf)

    @property
    def loads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def saves(self) -> bool:
        return self.kv_role != "kv_consumer"


_OWN_KEYS = ("kv_connector", "kv_role", "kv_load_failure_policy")
_SETTINGS = {one.name: one for one in settings_of(KVTransferConfig)}
_OWN = [_SETTINGS[name] for name in _OWN_KEYS]
# Options in kv_connector_extra_config that all connectors share, and options of each connector.
_COMMON = [one for name, one in _SETTINGS.items() if name not in _OWN_KEYS]
_OF_STORE = {
    "disk": [Setting("path", "str"), Setting("max_size", "size", bounds={"ge": 1})],
    "valkey": [
        Setting("url", "str"),
        Setting("ttl", "int", bounds={"ge": 1}),
        Setting("max_block_bytes", "size", bounds={"ge": 1}),
        Setting("socket_timeout", "float", bounds={"gt": 0, "lt": inf}),
    ],
}


def kv_transfer_config(args: EngineArgs) -> KVTransferConfig | None:
    """Return the configuration for KV transfer; None if the arguments do not enable it.

    Raises:
        ConfigError: the arguments contradict each other, or the JSON is invalid. The message names the key.
    """
    if args.kv_cache_dir is not None and args.kv_transfer_config is not None:
        raise ConfigError(_SHORT_FLAG, f"is short for a {_FLAG}: give only one of them")
    if args.kv_cache_dir is not None:
        options = {"path": args.kv_cache_dir, "max_size": args.kv_cache_dir_size}
        config = KVTransferConfig(kv_connector="disk", options=options, flag=_SHORT_FLAG)
    elif args.kv_transfer_config is not None:
        config = _parse(args.kv_transfer_config)
    else:
        return None
    if not args.enable_prefix_caching:
        raise ConfigError(None, "KV transfer finds KV by the hashes of prefix caching: leave prefix caching enabled")
    return config


def _parse(text: str) -> KVTransferConfig:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(_FLAG, f"is not JSON: {error}") from error
    extra = given.pop("kv_connector_extra_config", {}) if isinstance(given, dict) else {}
    own = read_object(_FLAG, _FLAG, given, _OWN, required=("kv_connector", "kv_role"))
    of_store = _OF_STORE[own["kv_connector"]]
    where = f"kv_connector_extra_config in {_FLAG}"
    parsed = read_object(_FLAG, where, extra, [*_COMMON, *of_store], required=(of_store[0].name,))
    options = {one.name: parsed.pop(one.name) for one in of_store if one.name in parsed}
    return KVTransferConfig(**own, options=options, **parsed)
