"""The connector as the runner sees it: blocks go between the KV cache and host memory here, in the engine's thread.

Both ways are by whole blocks and part of the step's own work: loaded blocks are written into the cache before the step
is given to the device, and saved ones are gathered after its forward, with the step's results.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_engine.kv_cache.spec import StateSpec
from metal_engine.kv_cache.state import LayerState
from metal_engine.kv_transfer.layout import BlockLayout, KVPart
from metal_engine.kv_transfer.transfer import KVTransfer
from metal_engine.step import KVConnectorMetadata

logger = logging.getLogger(__name__)


def block_parts(specs: Sequence[StateSpec], block_size: int) -> list[KVPart]:
    """Returns the parts that a block of layers with these specs is made of."""
    parts = []
    for index, spec in enumerate(specs):
        for name, array in spec.token_arrays.items():
            dtype = str(array.dtype).removeprefix("mlx.core.")
            shape = (block_size, *array.shape)
            parts.append(KVPart(_part_name(index, name), dtype, shape, block_size * array.nbytes))
    return parts


def _part_name(layer_index: int, name: str) -> str:
    return f"layers.{layer_index:04d}.{name}"


StepLoads = dict[int, np.ndarray]
"""Blocks on their way into the cache: block id -> contents, uint8 [bytes of a block]."""


@dataclass
class StepSaves:
    """Blocks on their way out of the cache: gathered by the step, not yet computed.

    Attributes:
        hashes: of the blocks.
        arrays: part name -> [S, bytes of the part] uint8; evaluated with the step.
    """

    hashes: list[bytes]
    arrays: dict[str, mx.array] = field(default_factory=dict)


class KVConnectorRunner:
    """Called by the model runner before and after each forward.

    Args:
        transfer: takes blocks to be saved.
        layout: what a block is.
    """

    def __init__(self, transfer: KVTransfer, layout: BlockLayout) -> None:
        self._transfer = transfer
        self._layout = layout
        self._loads: StepLoads = {}
        self._save_ids: mx.array | None = None  # [S]
        self._saves = StepSaves([])

    def bind_connector_metadata(self, meta: KVConnectorMetadata | None) -> None:
        """Note what the step that is about to be built loads and saves; None: nothing."""
        meta = meta or KVConnectorMetadata()
        self._loads = dict(meta.loads)
        self._save_ids = mx.array([block_id for _, block_id in meta.saves]) if meta.saves else None
        self._saves = StepSaves([block_hash for block_hash, _ in meta.saves])
        num_bytes = len(self._loads) * self._layout.nbytes
        self._transfer.stats.add(blocks_loaded=len(self._loads), bytes_loaded=num_bytes)

    def take_loads(self) -> StepLoads:
        """Returns what the step loads, for :meth:`write_loaded_blocks`, and keeps nothing of it."""
        loads, self._loads = self._loads, {}
        return loads

    def write_loaded_blocks(self, layer_index: int, arrays: dict[str, mx.array], loads: StepLoads) -> None:
        """Write loaded blocks into a layer's arrays, given by name as [slots, ...], before the step runs.

        Called when the device is done with the step before and has not been given this one. So the host can write to
        the arrays' memory directly, which costs a fifth of a scatter with its host arrays, indices and copies.
        """
        for name, array in arrays.items():
            part = _part_name(layer_index, name)
            if part not in self._layout.offsets:
                continue  # kept of requests, not of tokens: in no block
            start, stop = self._layout.offsets[part]
            memory = np.array(array.view(mx.uint8), copy=False)  # the array's own
            by_block = memory.reshape(-1, stop - start)  # [num_blocks, bytes]
            for block_id, block in loads.items():
                by_block[block_id] = block[start:stop]

    def save_kv_layer(self, layer_index: int, layer: LayerState) -> None:
        """Begin to save a layer: gather its part of the blocks to be saved, as the forward leaves them."""
        if self._save_ids is None:
            return
        for name, array in layer.block_arrays().items():
            blocks = array[self._save_ids].reshape(len(self._saves.hashes), -1)
            self._saves.arrays[_part_name(layer_index, name)] = blocks.view(mx.uint8)

    def take_saves(self) -> StepSaves:
        """Returns what the step saves, to be evaluated with it, and keeps nothing of it."""
        self._save_ids = None
        saves, self._saves = self._saves, StepSaves([])
        return saves

    def hand_over_saves(self, saves: StepSaves) -> None:
        """Give what a step saved to the threads that write it, after it has been evaluated; does not wait for them."""
        if not saves.hashes:
            return
        try:
            data = np.empty((len(saves.hashes), self._layout.nbytes), np.uint8)
            for part, (start, stop) in self._layout.offsets.items():
                data[:, start:stop] = np.array(saves.arrays[part], copy=False)
        except Exception:  # no memory, say: the step itself is well, and its tokens are not to be lost
            logger.exception("KV of %d blocks is not saved", len(saves.hashes))
            self._transfer.stats.add(blocks_failed=len(saves.hashes))
            return
        self._transfer.save(saves.hashes, data)

    def close(self) -> None:
        """Write the saves that wait, within the configured time, and stop the threads."""
        self._transfer.close()
