"""Loads and saves of blocks in the arrays of a layer, including a layer with other data than blocks."""

from __future__ import annotations

from unittest.mock import MagicMock

import mlx.core as mx
import numpy as np

from metal_engine.kv_cache.spec import ArraySpec
from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.runner_side import KVConnectorRunner, StepSaves, block_parts, state_parts
from metal_engine.step import KVConnectorMetadata

BLOCK_SIZE = 4


class _Spec:
    """Spec of a layer with two arrays for tokens and one for requests."""

    token_arrays = {"keys": ArraySpec((3,), mx.float16), "scales": ArraySpec((), mx.float32)}  # noqa: RUF012
    request_arrays = {"sum": ArraySpec((7,), mx.float32)}  # noqa: RUF012


def test_saved_blocks_load_at_other_ids_and_request_state_is_not_changed() -> None:
    layout = BlockLayout(block_parts([_Spec()], BLOCK_SIZE), "00")  # type: ignore[list-item]
    connector = KVConnectorRunner(MagicMock(), layout)
    random = np.random.default_rng(0)
    keys = mx.array(random.normal(size=(8 * BLOCK_SIZE, 3)).astype(np.float16))
    scales = mx.array(random.normal(size=8 * BLOCK_SIZE).astype(np.float32))
    sums = mx.array(random.normal(size=(2, 7)).astype(np.float32))

    layer = MagicMock()
    layer.block_arrays.return_value = {"keys": keys.reshape(8, BLOCK_SIZE, 3), "scales": scales.reshape(8, BLOCK_SIZE)}
    connector.bind_connector_metadata(KVConnectorMetadata(saves=[(b"a", 5), (b"b", 2)]))
    connector.save_kv_layer(0, layer)
    saves = connector.take_saves()
    assert saves.hashes == [b"a", b"b"]
    blocks = np.empty((2, layout.nbytes), np.uint8)
    for part, (start, stop) in layout.offsets.items():
        blocks[:, start:stop] = np.array(saves.arrays[part])

    arrays = {"keys": mx.zeros_like(keys), "scales": mx.zeros_like(scales), "sum": mx.array(sums)}
    mx.eval(arrays)
    connector.bind_connector_metadata(KVConnectorMetadata(loads={1: blocks[0], 6: blocks[1]}))
    connector.write_loaded(0, arrays, connector.take_loads())
    assert mx.array_equal(arrays["sum"], sums).item()
    for name, saved in (("keys", keys), ("scales", scales)):
        by_block = np.array(saved).reshape(8, BLOCK_SIZE, *saved.shape[1:])
        expected = np.zeros_like(by_block)
        expected[1], expected[6] = by_block[5], by_block[2]
        np.testing.assert_array_equal(np.array(arrays[name]).reshape(by_block.shape), expected)


def test_states_that_cannot_be_saved_are_counted_without_the_blocks_that_are_queued() -> None:
    layout = BlockLayout(block_parts([_Spec()], BLOCK_SIZE), "00")  # type: ignore[list-item]
    state_layout = BlockLayout(state_parts([_Spec()]), "00")  # type: ignore[list-item]
    transfer = MagicMock()
    transfer.save_states.side_effect = MemoryError
    parts = {**layout.offsets, **state_layout.offsets}
    arrays = {part: mx.zeros((3, stop - start), mx.uint8) for part, (start, stop) in parts.items()}
    arrays |= {part: arrays[part][:2] for part in state_layout.offsets}
    KVConnectorRunner(transfer, layout, state_layout).hand_over_saves(
        StepSaves([b"a", b"b", b"c"], [b"a", b"c"], arrays)
    )
    transfer.save.assert_called_once()
    transfer.stats.add.assert_called_once_with(blocks_failed=2)
