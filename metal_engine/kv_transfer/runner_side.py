"""Runner half of the KV connector: copies blocks between the KV cache and host memory, in the engine thread.

Both directions copy whole blocks as part of a step. Loaded blocks are written into the cache before the step is
dispatched. Saved blocks are gathered after the step's forward pass, together with its results.
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
    """Return the parts of a block for layers with these specs; an empty list if no layer stores tokens."""
    parts = []
    for index, spec in enumerate(specs):
        for name, array in spec.token_arrays.items():
            dtype = str(array.dtype).removeprefix("mlx.core.")
            shape = (block_size, *array.shape)
            parts.append(KVPart(_part_name(index, name), dtype, shape, block_size * array.nbytes))
    return parts


def state_parts(specs: Sequence[StateSpec]) -> list[KVPart]:
    """Return the parts of a recurrent state for layers with these specs; an empty list if no layer is recurrent."""
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
    """Blocks and recurrent states that a step loads into the cache.

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
    """Blocks and recurrent states that a step saves, gathered as lazy arrays.

    Attributes:
        hashes: hashes of the blocks.
        state_hashes: for each state, the hash of the last block before it.
        arrays: part name -> [number of blocks or of states, bytes of the part] uint8, evaluated with the step.
    """

    hashes: list[bytes]
    state_hashes: list[bytes] = field(default_factory=list)
    arrays: dict[str, mx.array] = field(default_factory=dict)


class KVConnectorRunner:
    """Connector half that the model runner calls before and after each forward pass.

    Args:
        transfer: receives the blocks to save.
        layout: layout of a block.
        state_layout: layout of a recurrent state; None for models without recurrent states.
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
        """Set the loads and saves of the step that is about to be built, and count the loads.

        Args:
            meta: loads and saves. None: the step loads and saves nothing.
        """
        meta = meta or KVConnectorMetadata()
        self._loads = StepLoads(dict(meta.loads), dict(meta.state_loads))
        self._save_ids = mx.array([block_id for _, block_id in meta.saves]) if meta.saves else None
        self._save_slots = [slot for _, slot in meta.state_saves]
        self._saves = StepSaves([h for h, _ in meta.saves], [h for h, _ in meta.state_saves])
        num_bytes = len(meta.loads) * self._layout.nbytes
        self._transfer.stats.add(blocks_loaded=len(meta.loads), bytes_loaded=num_bytes)
        self._transfer.stats.add(states_loaded=len(meta.state_loads))

    def take_loads(self) -> StepLoads:
        """Return the loads of the step, for :meth:`write_loaded`, and clear them here."""
        loads, self._loads = self._loads, StepLoads()
        return loads

    def write_loaded(self, layer_index: int, arrays: dict[str, mx.array], loads: StepLoads) -> None:
        """Write loaded blocks and states into a layer's arrays, given by name as [slots, ...], before the step runs.

        Called after the device has finished the previous step and before this step is dispatched. The host can
        therefore write to the arrays' memory directly. A scatter, with its host arrays, indices and copies, would cost
        five times as much.
        """
        for name, array in arrays.items():
            part = _part_name(layer_index, name)
            # An array is indexed by blocks if it has rows for tokens, or by slots if it has rows for requests.
            is_block = part in self._layout.offsets
            layout = self._layout if is_block else self._state_layout
            rows = loads.blocks if is_block else loads.states
            if layout is None or not rows:
                continue
            start, stop = layout.offsets[part]
            memory = np.array(array.view(mx.uint8), copy=False)  # a view of the array's memory
            by_row = memory.reshape(-1, stop - start)  # [num_blocks or 1 + num_slots, bytes]
            for row, data in rows.items():
                by_row[row] = data[start:stop]

    def save_kv_layer(self, layer_index: int, layer: LayerState) -> None:
        """Gather a layer's part of the blocks and states to save, with their contents after the forward pass.

        Called for each layer once the forward pass is built. The gathered arrays are lazy. :meth:`take_saves` returns
        them.
        """
        if self._save_ids is not None:
            for name, array in layer.block_arrays().items():
                blocks = array[self._save_ids].reshape(len(self._saves.hashes), -1)
                self._saves.arrays[_part_name(layer_index, name)] = blocks.view(mx.uint8)
        if self._save_slots and isinstance(layer, RecurrentState):
            for name in layer.arrays:
                states = layer.read(name, self._save_slots).reshape(len(self._save_slots), -1)
                self._saves.arrays[_part_name(layer_index, name)] = states.view(mx.uint8)

    def take_saves(self) -> StepSaves:
        """Return the saves of the step, to be evaluated with it, and clear them here."""
        self._save_ids, self._save_slots = None, []
        saves, self._saves = self._saves, StepSaves([])
        return saves

    def hand_over_saves(self, saves: StepSaves) -> None:
        """Pass a step's evaluated saves to the thread that writes them, without waiting. Errors are logged."""
        num_unsaved = len(saves.hashes) + len(saves.state_hashes)
        try:
            if saves.hashes:
                self._transfer.save(saves.hashes, _joined(saves, len(saves.hashes), self._layout))
                num_unsaved -= len(saves.hashes)
            if saves.state_hashes and self._state_layout is not None:
                states = _joined(saves, len(saves.state_hashes), self._state_layout)
                self._transfer.save_states(saves.state_hashes, states)
        except Exception:  # such as a lack of memory: the step succeeded, so its tokens must be kept
            logger.exception("%d blocks and states are not saved", num_unsaved)
            self._transfer.stats.add(blocks_failed=num_unsaved)

    def close(self) -> None:
        """Write the queued saves within the configured time, then stop the threads."""
        self._transfer.close()


def _joined(saves: StepSaves, count: int, layout: BlockLayout) -> np.ndarray:
    """Concatenate the parts of the saved blocks or states: uint8 [count, bytes of one block or state]."""
    data = np.empty((count, layout.nbytes), np.uint8)
    for part, (start, stop) in layout.offsets.items():
        data[:, start:stop] = np.array(saves.arrays[part], copy=False)
    return data
