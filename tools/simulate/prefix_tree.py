"""Router's record of the prefixes that it has sent to each replica. It does not see a replica's evictions.

A prefix is a chain of block hashes. Each hash represents its block and all blocks before it. A tree of prefixes is
therefore a flat table: it contains a prefix if it contains the prefix's last hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixTree:
    """Prefixes sent to each replica, evicted in LRU order.

    Args:
        num_replicas: number of replicas.
        max_blocks: capacity in blocks for all replicas together. A block sent to several replicas counts for each.
    """

    def __init__(self, num_replicas: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Hash -> replicas that got its prefix, the most recent last.
        self._replicas: dict[bytes, dict[int, None]] = {}
        # (replica, hash) in order of use. The end of a prefix counts as used before its start, see `insert`.
        self._held: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._num_blocks = [0] * num_replicas

    def match(self, hashes: Sequence[bytes]) -> tuple[int, int | None]:
        """Return the number of leading blocks in the tree, and the replica that most recently got all of these blocks.

        Returns (0, None) if the tree lacks the first block.
        """
        length, last = 0, None
        for block_hash in hashes:
            replicas = self._replicas.get(block_hash)
            if replicas is None:
                break
            length, last = length + 1, next(reversed(replicas))
        return length, last

    def insert(self, hashes: Sequence[bytes], replica: int) -> None:
        """Record that a prompt with these blocks went to a replica."""
        # In reverse order, so that the start counts as most recently used: more prompts share the start.
        for block_hash in reversed(hashes):
            self._held[replica, block_hash] = None
            self._held.move_to_end((replica, block_hash))
            replicas = self._replicas.setdefault(block_hash, {})
            self._num_blocks[replica] += replica not in replicas
            replicas.pop(replica, None)
            replicas[replica] = None
        while len(self._held) > self._max_blocks:
            (of, oldest), _ = self._held.popitem(last=False)
            replicas = self._replicas[oldest]
            del replicas[of]
            self._num_blocks[of] -= 1
            if not replicas:
                del self._replicas[oldest]

    def num_blocks(self, replica: int) -> int:
        """Return the number of blocks recorded for a replica."""
        return self._num_blocks[replica]

    def check_integrity(self) -> None:
        """Assert that all tables agree and that the capacity is not exceeded."""
        pairs = {(replica, block_hash) for block_hash, of in self._replicas.items() for replica in of}
        assert pairs == set(self._held)
        assert self._num_blocks == [sum(of == replica for of, _ in pairs) for replica in range(len(self._num_blocks))]
        assert all(self._replicas.values()), "a prefix that went nowhere"
        assert len(self._held) <= self._max_blocks
