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

from metal_engine.kv_cache.recurrent import RecurrentState
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


def state_parts(specs: Sequence[StateSpec]) -> list[KVPart]:
    """Returns the parts that a recurrent state of layers with these specs is made of; none for models without."""
    parts = []
    for index, spec in enumerate(specs):
        for name, array in spec.request_arrays.items():
            dtype = str(array.dtype).removeprefix("mlx.core.")
            parts.append(KVPart(_part_name(index, name), dtype, (1, *array.shape), array.nbytes))
    return parts


def _part_name(layer_index: int, name: str) -> str:
    return f"layers.{layer_index:04d}.{name}"


@dataclass
class StepLoads:
    """What is on its way into the cache.

    Attributes:
        blocks: block id -> contents, uint8 [bytes of a block].
        states: slot -> recurrent state, uint8 [bytes of a state].
    """

    blocks: dict[int, np.ndarray] = field(default_factory=dict)
    states: dict[int, np.ndarray] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.blocks or self.states)


@dataclass
class StepSaves:
    """Blocks and states on their way out of the cache: gathered by the step, not yet computed.

    Attributes:
        hashes: of the blocks.
        state_hashes: of the blocks that states follow.
        arrays: part name -> [S, bytes of the part] uint8; evaluated with the step.
    """

    hashes: list[bytes]
    state_hashes: list[bytes] = field(default_factory=list)
    arrays: dict[str, mx.array] = field(default_factory=dict)


class KVConnectorRunner:
    """Called by the model runner before and after each forward.

    Args:
        transfer: takes blocks to be saved.
        layout: what a block is.
        state_layout: what a recurrent state is; None for models without.
    """

    def __init__(self, transfer: KVTransfer, layout: BlockLayout, state_layout: BlockLayout | None = None) -> None:
        self._transfer = transfer
        self._layout = layout
        self._state_layout = state_layout
        self._loads = StepLoads()
        self._save_ids: mx.array | None = None  # [S]
        self._save_slots: list[int] = []
        self._saves = StepSaves([])

    def bind_connector_metadata(self, meta: KVConnectorMetadata | None) -> None:
        """Note what the step that is about to be built loads and saves; None: nothing."""
        meta = meta or KVConnectorMetadata()
        self._loads = StepLoads(dict(meta.loads), dict(meta.state_loads))
        self._save_ids = mx.array([block_id for _, block_id in meta.saves]) if meta.saves else None
        self._save_slots = [slot for _, slot in meta.state_saves]
        self._saves = StepSaves([h for h, _ in meta.saves], [h for h, _ in meta.state_saves])
        num_bytes = len(meta.loads) * self._layout.nbytes
        self._transfer.stats.add(blocks_loaded=len(meta.loads), bytes_loaded=num_bytes)
        self._transfer.stats.add(states_loaded=len(meta.state_loads))

    def take_loads(self) -> StepLoads:
        """Returns what the step loads, for :meth:`write_loaded_blocks`, and keeps nothing of it."""
        loads, self._loads = self._loads, StepLoads()
        return loads

    def write_loaded(self, layer_index: int, arrays: dict[str, mx.array], loads: StepLoads) -> None:
        """Write what was loaded into a layer's arrays, given by name as [slots, ...], before the step runs.

        Called when the device is done with the step before and has not been given this one. So the host can write to
        the arrays' memory directly, which costs a fifth of a scatter with its host arrays, indices and copies.
        """
        for name, array in arrays.items():
            part = _part_name(layer_index, name)
            # An array is of tokens, by blocks, or of requests, by slots.
            is_block = part in self._layout.offsets
            layout = self._layout if is_block else self._state_layout
            rows = loads.blocks if is_block else loads.states
            if layout is None or not rows:
                continue
            start, stop = layout.offsets[part]
            memory = np.array(array.view(mx.uint8), copy=False)  # the array's own
            by_row = memory.reshape(-1, stop - start)  # [num_blocks or 1 + num_slots, bytes]
            for row, data in rows.items():
                by_row[row] = data[start:stop]

    def save_kv_layer(self, layer_index: int, layer: LayerState) -> None:
        """Begin to save a layer: gather its part of what is to be saved, as the forward leaves it."""
        if self._save_ids is not None:
            for name, array in layer.block_arrays().items():
                blocks = array[self._save_ids].reshape(len(self._saves.hashes), -1)
                self._saves.arrays[_part_name(layer_index, name)] = blocks.view(mx.uint8)
        if self._save_slots and isinstance(layer, RecurrentState):
            for name in layer.arrays:
                states = layer.read(name, self._save_slots).reshape(len(self._save_slots), -1)
                self._saves.arrays[_part_name(layer_index, name)] = states.view(mx.uint8)

    def take_saves(self) -> StepSaves:
        """Returns what the step saves, to be evaluated with it, and keeps nothing of it."""
        self._save_ids, self._save_slots = None, []
        saves, self._saves = self._saves, StepSaves([])
        return saves

    def hand_over_saves(self, saves: StepSaves) -> None:
        """Give what a step saved to the threads that write it, after it has been evaluated; does not wait for them."""
        try:
            if saves.hashes:
                self._transfer.save(saves.hashes, _joined(saves, len(saves.hashes), self._layout))
            if saves.state_hashes and self._state_layout is not None:
                states = _joined(saves, len(saves.state_hashes), self._state_layout)
                self._transfer.save_states(saves.state_hashes, states)
        except Exception:  # no memory, say: the step itself is well, and its tokens are not to be lost
            logger.exception("KV of %d blocks is not saved", len(saves.hashes))
            self._transfer.stats.add(blocks_failed=len(saves.hashes))

    def close(self) -> None:
        """Write the saves that wait, within the configured time, and stop the threads."""
        self._transfer.close()


def _joined(saves: StepSaves, count: int, layout: BlockLayout) -> np.ndarray:
    """The parts of what is saved put together, uint8 [count, bytes of one]."""
    data = np.empty((count, layout.nbytes), np.uint8)
    for part, (start, stop) in layout.offsets.items():
        data[:, start:stop] = np.array(saves.arrays[part], copy=False)
    return data
