"""What ``--kv-transfer-config`` and ``--kv-cache-dir`` may say, checked before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.fields import parse_size

CONNECTORS = ("disk", "valkey")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOAD_FAILURE_POLICIES = ("recompute", "fail")

_FLAG = "--kv-transfer-config"


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """Where KV goes and comes from, and what that may cost. Names of the first four are vLLM's.

    Attributes:
        kv_connector: the kind of store.
        kv_role: a producer saves, a consumer loads.
        kv_load_failure_policy: what becomes of a request whose load fails: its missing KV is computed, or it
            ends with an error. A block that is not in the store is no failure.
        options: of the store alone: ``path`` and ``max_size``, or ``url``, ``ttl`` and so on.
        load_timeout: seconds that loading a request's KV may take; then the rest is computed.
        handover_timeout: seconds without a new block after which a producer that is still computing is given up.
        max_load_bytes: host memory for KV that has been loaded and waits for its request to be admitted.
        max_save_bytes: host memory for KV that waits to be written; more than that is dropped.
        io_threads: threads that read from the store.
        save_on_close: seconds that writing what waits may take at the end.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "recompute"
    options: dict[str, Any] = field(default_factory=dict)
    load_timeout: float = 10.0
    handover_timeout: float = 30.0
    max_load_bytes: int = GIB
    max_save_bytes: int = GIB // 4
    io_threads: int = 4
    save_on_close: float = 5.0

    @property
    def loads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def saves(self) -> bool:
        return self.kv_role != "kv_consumer"


# Key of kv_connector_extra_config -> kind, for every connector and for each.
_COMMON_KEYS = {
    "load_timeout": "seconds",
    "handover_timeout": "seconds",
    "max_load_bytes": "size",
    "max_save_bytes": "size",
    "io_threads": "count",
    "save_on_close": "seconds",
}
_STORE_KEYS = {
    "disk": {"path": "text", "max_size": "size"},
    "valkey": {"url": "text", "ttl": "count", "max_block_bytes": "size", "socket_timeout": "seconds"},
}
_REQUIRED_KEY = {"disk": "path", "valkey": "url"}


def kv_transfer_config(args: EngineArgs) -> KVTransferConfig | None:
    """The configuration that the settings ask for; None if they ask for no transfer.

    Raises:
        ConfigError: they contradict each other, or the JSON is not right; the message names the key.
    """
    if args.kv_cache_dir is not None and args.kv_transfer_config is not None:
        raise ConfigError("--kv-cache-dir", f"is short for a {_FLAG}: give one of them")
    if args.kv_cache_dir is not None:
        options = {"path": args.kv_cache_dir, "max_size": args.kv_cache_dir_size}
        config = KVTransferConfig(kv_connector="disk", options=options)
    elif args.kv_transfer_config is not None:
        config = _parse(args.kv_transfer_config)
    else:
        return None
    if not args.enable_prefix_caching:
        raise ConfigError(None, "KV transfer finds KV by the hashes of prefix caching: leave it enabled")
    return config


def _parse(text: str) -> KVTransferConfig:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(_FLAG, f"is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(_FLAG, "must be a JSON object")
    known = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy")
    _check_keys(_FLAG, given, known)
    values: dict[str, Any] = {
        "kv_connector": _choice(given, "kv_connector", CONNECTORS),
        "kv_role": _choice(given, "kv_role", ROLES),
        "kv_load_failure_policy": _choice(given, "kv_load_failure_policy", LOAD_FAILURE_POLICIES, "recompute"),
    }
    extra = given.get("kv_connector_extra_config", {})
    where = f"kv_connector_extra_config in {_FLAG}"
    if not isinstance(extra, dict):
        raise ConfigError(_FLAG, f"{where} must be a JSON object")
    store_keys = _STORE_KEYS[values["kv_connector"]]
    kinds = _COMMON_KEYS | store_keys
    _check_keys(where, extra, tuple(kinds))
    parsed = {key: _value(f"{key} of {where}", kinds[key], value) for key, value in extra.items()}
    required = _REQUIRED_KEY[values["kv_connector"]]
    if required not in parsed:
        raise ConfigError(_FLAG, f"{where} needs {required!r} for the {values['kv_connector']} connector")
    options = {key: parsed.pop(key) for key in store_keys if key in parsed}
    return KVTransferConfig(**values, options=options, **parsed)


def _check_keys(where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(_FLAG, f"{where} has no {key!r}; it may have {', '.join(known)}")


def _choice(given: dict[str, Any], key: str, choices: tuple[str, ...], default: str | None = None) -> str:
    value = given.get(key, default)
    if value not in choices:
        raise ConfigError(_FLAG, f"{key} in {_FLAG} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _value(name: str, kind: str, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "text" and isinstance(value, str) and value:
        return value
    if kind == "seconds" and is_number and 0 < value < float("inf"):
        return float(value)
    if kind == "count" and is_number and value == int(value) and value >= 1:
        return int(value)
    if kind == "size":
        try:
            size = parse_size(str(value))
        except ValueError:
            size = 0
        if size >= 1:
            return size
    wanted = {
        "text": "a text",
        "seconds": "a number of seconds above 0",
        "count": "a whole number of at least 1",
        "size": "a size such as 2GiB",
    }[kind]
    raise ConfigError(_FLAG, f"{name} must be {wanted}, got {value!r}")
