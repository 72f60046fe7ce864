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
        max_blocks: blocks remembered of each replica, at most.
    """

    def __init__(self, num_replicas: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Hash -> the replicas that its prefix went to, the last one last.
        self._replicas: dict[bytes, dict[int, None]] = {}
        # Of each replica, hashes in order of use. Ends of prefixes are used before their beginnings, see `insert`.
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_replicas)]

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
        held = self._held[replica]
        # From the end, so that the beginning, which more prompts share, is the most recently used.
        for block_hash in reversed(hashes):
            held[block_hash] = None
            held.move_to_end(block_hash)
            replicas = self._replicas.setdefault(block_hash, {})
            replicas.pop(replica, None)
            replicas[replica] = None
        while len(held) > self._max_blocks:
            oldest, _ = held.popitem(last=False)
            replicas = self._replicas[oldest]
            del replicas[replica]
            if not replicas:
                del self._replicas[oldest]

    def num_blocks(self, replica: int) -> int:
        """Returns how many blocks are remembered of a replica."""
        return len(self._held[replica])

    def check_integrity(self) -> None:
        """Assert that both tables say the same, and that no replica has more than it may."""
        pairs = {(block_hash, replica) for block_hash, of in self._replicas.items() for replica in of}
        assert pairs == {(block_hash, replica) for replica, held in enumerate(self._held) for block_hash in held}
        assert all(self._replicas.values()), "a prefix that went nowhere"
        assert all(len(held) <= self._max_blocks for held in self._held)
