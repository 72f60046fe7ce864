"""Blocks of a small layout, with contents from a seed, for tests of KV stores and transfers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from metal_engine.kv_transfer.layout import BlockLayout, KVPart
from metal_engine.kv_transfer.stores.base import KVStore
from metal_engine.kv_transfer.transfer import KVTransfer, LoadTicket
from tests.support.serving import wait_until

FINGERPRINT = "0123456789abcdef" * 2
ANOTHER_MODEL = "f" * 32
DEADLINE = 60.0


def make_layout(fingerprint: str = FINGERPRINT) -> BlockLayout:
    parts = [
        KVPart(f"layers.{i:04d}.{name}", dtype, (4, 2, 8), 64 * size)
        for i, (dtype, size) in enumerate([("float32", 4), ("bfloat16", 2)])
        for name in ("keys", "values")
    ]
    return BlockLayout(parts, fingerprint)


LAYOUT = make_layout()


def block(seed: int) -> tuple[bytes, np.ndarray]:
    """Return a hash and the data of its block."""
    return seed.to_bytes(32, "big"), np.random.default_rng(seed).integers(0, 256, LAYOUT.nbytes, np.uint8)


def stored(*seeds: int) -> list[tuple[bytes, bytes]]:
    return [(h, LAYOUT.encode(h, data)) for h, data in map(block, seeds)]


def hashes(*seeds: int) -> list[bytes]:
    return [block(seed)[0] for seed in seeds]


def check_get_ends_at_the_first_missing_block(open_store: Callable[[str], KVStore]) -> None:
    """Check a kind of store. ``open_store`` opens it for a fingerprint."""
    store = open_store(FINGERPRINT)
    store.put(stored(1, 2, 4))
    assert store.contains(hashes(1, 2, 3, 4)) == [True, True, False, True]
    assert store.get(hashes(1, 2, 3, 4)) == [data for _, data in stored(1, 2)]
    assert len(open_store(FINGERPRINT).get(hashes(4))) == 1
    assert open_store(ANOTHER_MODEL).get(hashes(4)) == []
    store.discard(hashes(1)[0])
    store.discard(hashes(1)[0])
    assert store.get(hashes(1, 2)) == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def load(transfer: KVTransfer, *seeds: int) -> LoadTicket:
    """Load blocks, and return the ticket when the load is done."""
    ticket = transfer.start_load("r", hashes(*seeds), follow=False)
    wait_until(lambda: ticket.is_done, "the load")
    return ticket
