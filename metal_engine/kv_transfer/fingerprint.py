"""Fingerprint of everything that determines KV, except the tokens. Engines with equal fingerprints can share KV."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.kv_transfer.layout import FORMAT_VERSION, KVPart

# Keys of a model's config.json that describe its origin and do not affect its computation.
_IRRELEVANT = ("_name_or_path", "transformers_version", "torch_dtype", "architectures", "use_cache")
_SAMPLES = 4096


def kv_fingerprint(
    weights: Iterable[tuple[str, mx.array]],
    model_config: Mapping[str, Any],
    block_size: int,
    parts: Sequence[KVPart],
    tuned: Sequence[str] = (),
) -> str:
    """Return a fingerprint of 32 hex digits. Engines that differ in any of the arguments get different fingerprints.

    Args:
        weights: the model's parameters by name, as loaded. The fingerprint covers their names, types and shapes, the
            sum of the bits of each row, and a sample of the elements. Other changes are not noticed.
        model_config: ``config.json`` of the checkpoint. Keys that do not affect the computation are ignored.
        block_size: tokens per block.
        parts: arrays of a block, and of a recurrent state, with their layers, shapes and dtypes.
        tuned: choices of attention tuning that differ from the default.
    """
    digest = sha256(f"kv format {FORMAT_VERSION}".encode())
    for name, array in sorted(weights, key=lambda named: named[0]):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(_contents(array))
    config = {key: value for key, value in model_config.items() if key not in _IRRELEVANT}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr((block_size, [(p.name, p.dtype, p.shape) for p in parts])).encode())
    if tuned:
        digest.update(json.dumps(list(tuned)).encode())
    return digest.hexdigest()[:32]


def _contents(array: mx.array) -> bytes:
    if array.size == 0:
        return b""
    kind = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    bits = array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(1, -1)
    bits = bits.view(kind)
    sums = bits.sum(axis=-1)
    flat = bits.reshape(-1)
    samples = flat[:: max(1, flat.size // _SAMPLES)]
    return np.array(sums).tobytes() + np.array(samples).tobytes()
