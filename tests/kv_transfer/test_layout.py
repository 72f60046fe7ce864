"""Format of stored blocks, and what is refused when they are read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from metal_engine.kv_transfer.layout import BlockLayout, CorruptBlockError, KVPart
from tests.support.kv_blocks import FINGERPRINT, LAYOUT, block, make_layout


def test_a_stored_block_is_a_safetensors_file(tmp_path: Path) -> None:
    layout = BlockLayout([KVPart("a", "float32", (2, 1, 3), 24), KVPart("b", "float16", (2, 1, 3), 12)], "f")
    values = {"a": np.arange(6, dtype=np.float32), "b": np.arange(6, dtype=np.float16) / 3}
    data = np.empty(layout.nbytes, np.uint8)
    for name, array in values.items():
        start, stop = layout.offsets[name]
        data[start:stop] = array.view(np.uint8)
    path = tmp_path / "block.safetensors"
    path.write_bytes(layout.encode(b"h" * 32, data))
    loaded = load_file(path)
    assert loaded.keys() == values.keys()
    for name, array in values.items():
        assert (loaded[name] == array.reshape(2, 1, 3)).all()
    assert path.stat().st_size <= layout.max_stored_bytes


def test_every_flipped_bit_and_every_length_is_noticed() -> None:
    block_hash, data = block(1)
    good = LAYOUT.encode(block_hash, data)
    assert (LAYOUT.decode(block_hash, good) == data).all()
    rng = random.Random(0)
    header = range(8 + int.from_bytes(good[:8], "little"))
    for position in [*header, *rng.sample(range(len(header), len(good)), 200)]:
        bad = bytearray(good)
        bad[position] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptBlockError):
            LAYOUT.decode(block_hash, bytes(bad))
    for length in [*range(0, len(good), 7), len(good) - 1]:
        with pytest.raises(CorruptBlockError):
            LAYOUT.decode(block_hash, good[:length])
    with pytest.raises(CorruptBlockError):
        LAYOUT.decode(block_hash, good + b"\0")


def test_a_header_that_is_nested_deep_is_refused() -> None:
    header = b"[" * 100_000
    with pytest.raises(CorruptBlockError, match="not JSON"):
        LAYOUT.decode(block(1)[0], len(header).to_bytes(8, "little") + header)


def test_a_block_of_another_hash_model_or_layout_is_refused() -> None:
    block_hash, data = block(1)
    good = LAYOUT.encode(block_hash, data)
    with pytest.raises(CorruptBlockError, match="block_hash"):
        LAYOUT.decode(block(2)[0], good)
    with pytest.raises(CorruptBlockError, match="fingerprint"):
        make_layout("another").decode(block_hash, good)
    with pytest.raises(CorruptBlockError, match="tensors"):
        BlockLayout([KVPart("a", "uint8", (4, 1, LAYOUT.nbytes // 4), LAYOUT.nbytes)], FINGERPRINT).decode(
            block_hash, good
        )
