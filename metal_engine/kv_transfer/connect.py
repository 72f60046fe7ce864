"""Creates both halves of a KV connector for a loaded model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from mlx.utils import tree_flatten

from metal_engine.errors import ConfigError
from metal_engine.kv_cache.spec import StateSpec
from metal_engine.kv_transfer.fingerprint import kv_fingerprint
from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.runner_side import KVConnectorRunner, block_parts, state_parts
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.choice import open_store
from metal_engine.kv_transfer.transfer import KVTransfer

if TYPE_CHECKING:
    import mlx.core as mx

logger = logging.getLogger(__name__)


def connect_kv(
    transfer: KVTransferConfig,
    block_size: int,
    name: str,
    parameters: dict[str, Any],
    config: dict[str, Any],
    specs: Sequence[StateSpec],
    tuned: Sequence[str] = (),
) -> tuple[KVConnectorScheduler, KVConnectorRunner, str]:
    """Open the store and create both halves of the connector. Return them with the fingerprint of the KV.

    Args:
        transfer: settings of KV transfer.
        block_size: tokens of a block.
        name: name of the model, for the error message.
        parameters: the model's weights, which the fingerprint covers.
        config: the model's ``config.json``.
        specs: spec of each layer's state.
        tuned: choices of attention tuning that differ from the default. They change the bits of KV.

    Raises:
        ConfigError: the model has no KV that can be stored in blocks, or the store cannot be used.
    """
    parts, of_states = block_parts(specs, block_size), state_parts(specs)
    if not parts:
        raise ConfigError(transfer.flag, f"{name} has no KV, only recurrent state: there are no blocks to save")
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(parameters))
    fingerprint = kv_fingerprint(weights, config, block_size, [*parts, *of_states], tuned)
    if tuned:
        logger.info(
            "stored KV is shared only with engines that have the same attention tuning; use --attention-tuning never "
            "to turn tuning off"
        )
    layout = BlockLayout(parts, fingerprint)
    state_layout = BlockLayout(of_states, fingerprint) if of_states else None
    stats = KVTransferStats()
    larger = max((layout, state_layout or layout), key=lambda one: one.max_stored_bytes)
    mover = KVTransfer(open_store(transfer, larger), layout, transfer, stats, state_layout=state_layout)
    return KVConnectorScheduler(mover, transfer, stats), KVConnectorRunner(mover, layout, state_layout), fingerprint
