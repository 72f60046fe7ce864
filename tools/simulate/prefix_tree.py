"""What a router remembers: which prefixes it has sent where. It does not know what a replica has evicted since.

A prefix is a chain of block hashes, each of which stands for its block and all before it. So a tree of prefixes is a
flat table: a prefix is in it if its last hash is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixTree:
    """The prefixes sent to each replica, the longest unused ones forgotten first.

    Args:
        num_replicas: how many there are.
        max_blocks: blocks remembered at most, of all replicas together. One that went to several counts for each.
    """

    def __init__(self, num_replicas: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Hash -> the replicas that its prefix went to, the last one last.
        self._replicas: dict[bytes, dict[int, None]] = {}
        # Replicas and hashes in order of use. Ends of prefixes are used before their beginnings, see `insert`.
        self._held: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._num_blocks = [0] * num_replicas

    def match(self, hashes: Sequence[bytes]) -> tuple[int, int | None]:
        """Returns how many leading blocks went to some replica before, and to which one last; (0, None) if none."""
        length, last = 0, None
        for block_hash in hashes:
            replicas = self._replicas.get(block_hash)
            if replicas is None:
                break
            length, last = length + 1, next(reversed(replicas))
        return length, last

    def insert(self, hashes: Sequence[bytes], replica: int) -> None:
        """Remember that a prompt with these blocks went to a replica."""
        # From the end, so that the beginning, which more prompts share, is the most recently used.
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
        """Returns how many blocks are remembered of a replica."""
        return self._num_blocks[replica]

    def check_integrity(self) -> None:
        """Assert that all tables say the same, and that there are no more blocks than there may be."""
        pairs = {(replica, block_hash) for block_hash, of in self._replicas.items() for replica in of}
        assert pairs == set(self._held)
        assert self._num_blocks == [sum(of == replica for of, _ in pairs) for replica in range(len(self._num_blocks))]
        assert all(self._replicas.values()), "a prefix that went nowhere"
        assert len(self._held) <= self._max_blocks
