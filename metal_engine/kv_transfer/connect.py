"""Makes both halves of a KV connector for a loaded model."""

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
    """Open the store, and make both halves of the connector; with them comes the fingerprint of the KV.

    Args:
        block_size: tokens of a block.
        name: the model's, for the error.
        parameters: the model's weights, which the fingerprint names.
        config: the model's ``config.json``.
        specs: what each layer keeps.
        tuned: choices of attention tuning that differ from the default. They change the bits of KV.

    Raises:
        ConfigError: the model keeps nothing that a block could have.
    """
    parts, of_states = block_parts(specs, block_size), state_parts(specs)
    if not parts:
        raise ConfigError(transfer.flag, f"{name} keeps no KV, only states: there are no blocks to save to a store")
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(parameters))
    fingerprint = kv_fingerprint(weights, config, block_size, [*parts, *of_states], tuned)
    if tuned:
        logger.info(
            "stored KV is shared only with engines that have the same attention tuning; --attention-tuning never turns "
            "tuning off"
        )
    layout = BlockLayout(parts, fingerprint)
    state_layout = BlockLayout(of_states, fingerprint) if of_states else None
    stats = KVTransferStats()
    larger = max((layout, state_layout or layout), key=lambda one: one.max_stored_bytes)
    mover = KVTransfer(open_store(transfer, larger), layout, transfer, stats, state_layout=state_layout)
    return KVConnectorScheduler(mover, transfer, stats), KVConnectorRunner(mover, layout, state_layout), fingerprint
