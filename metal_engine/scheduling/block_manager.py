"""Tracks the KV cache's blocks: free blocks, block tables of requests, and cached prefixes. O(1) per block.

Pure bookkeeping of block ids. The runner owns the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """One block of the KV cache.

    Attributes:
        ref_cnt: number of block tables that contain the block.
        block_hash: hash under which the prefix cache finds the block's contents; None if the block is not cached. A
            block that no table contains keeps its hash until the block is reused.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None


class BlockManager:
    """Block tables of all running requests, and the prefix cache. Both use the blocks of one pool.

    :meth:`register` makes a full block available under its hash, so that several tables may share it. When the last
    table releases the block, the block enters the free queue. Its contents remain available until the block is reused.

    Args:
        num_blocks: number of blocks in the pool.
        block_size: tokens per block.

    Attributes:
        num_free_blocks: number of blocks in no block table, including blocks that still hold a cached prefix.
        peak_used_blocks: largest number of blocks that were in block tables at the same time.
        num_forgets: number of calls of :meth:`forget_cached`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block(i) for i in range(num_blocks)]
        # Unreferenced blocks in order of reuse. Every operation is O(1), including removal from the middle.
        self._free = OrderedDict.fromkeys(self._blocks)
        self._tables: dict[str, list[Block]] = {}
        self._cached: dict[bytes, Block] = {}
        self.peak_used_blocks = 0
        self.num_forgets = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def num_held_tokens(self, request_id: str) -> int:
        """Return the token capacity of the request's blocks; 0 for an unknown id."""
        return len(self._tables.get(request_id, ())) * self.block_size

    def block_ids(self, request_id: str) -> list[int]:
        """Return the request's block table: physical block ids in logical order; empty if it has no blocks."""
        return [block.block_id for block in self._tables.get(request_id, ())]

    def allocate(
        self, request_id: str, num_tokens: int, *, reserve: int = 0, cached: Sequence[Block | None] = ()
    ) -> list[int] | None:
        """Extend the request's table to hold ``num_tokens`` tokens.

        Args:
            reserve: number of blocks that must remain free afterwards.
            cached: result of :meth:`find_cached`, only for a request without blocks. Its table starts with these
                blocks. Each None becomes a new block.

        Returns:
            The ids of the added blocks, including the cached blocks; empty if the table is long enough already. None,
            without any change, if there are too few free blocks.
        """
        table = self._tables.get(request_id)
        assert table is None or not cached, f"{request_id} has blocks already"
        num_new = self.blocks_for(num_tokens) - (len(table) if table is not None else len(cached))
        if num_new <= 0 and not cached:
            return []
        num_taken = num_new + sum(block is None or block.ref_cnt == 0 for block in cached)
        if num_taken + reserve > len(self._free):
            return None
        for block in cached:
            if block is None:
                continue
            if block.ref_cnt == 0:
                del self._free[block]
            block.ref_cnt += 1
        wanted = (*cached, *[None] * num_new)
        # Requests free their last block first, so contiguous blocks are in the free queue in reverse order. Sort them.
        taken = iter(sorted((self._take() for _ in range(wanted.count(None))), key=lambda b: b.block_id))
        new_blocks = [block or next(taken) for block in wanted]
        if table is None:
            table = self._tables[request_id] = []
        table += new_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)
        return [block.block_id for block in new_blocks]

    def _take(self) -> Block:
        """Remove the next block to reuse from the free queue, and return it. Its cached contents are dropped."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        block.ref_cnt = 1
        return block

    def free(self, request_id: str) -> None:
        """Release all blocks of the request. Unknown ids are ignored.

        Blocks without a cached prefix are reused first. Of the request's blocks with a cached prefix, later blocks are
        reused before earlier blocks: a block is useless without the blocks before it.
        """
        for block in reversed(self._tables.pop(request_id, ())):
            self._release(block)

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks that the request's first ``num_tokens`` tokens do not occupy."""
        table = self._tables[request_id]
        for _ in range(len(table) - self.blocks_for(num_tokens)):
            self._release(table.pop())

    def _release(self, block: Block) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt:
            return
        assert block not in self._free, f"{block} is free already"
        self._free[block] = None
        if self._cached and block.block_hash is None:
            self._free.move_to_end(block, last=False)

    # --- cached prefixes ------------------------------------------------------------------------------------

    def is_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._cached

    def is_known(self, block_id: int) -> bool:
        """Return True if the block holds a cached prefix, whether or not a request uses the block."""
        return self._blocks[block_id].block_hash is not None

    def known_blocks(self, start: int, stop: int) -> list[int]:
        """Return the ids in ``range(start, stop)`` whose blocks hold cached prefixes."""
        return [block.block_id for block in self._blocks[start:stop] if block.block_hash is not None]

    def find_cached(
        self, block_hashes: Sequence[bytes], max_blocks: int, also: Container[bytes] = ()
    ) -> list[Block | None]:
        """Return the blocks of the longest cached prefix of a hash chain, at most ``max_blocks``.

        A hash in ``also`` counts as a hit, because its block is available outside the pool. The result contains None
        for such a block.
        """
        found: list[Block | None] = []
        for block_hash in block_hashes[:max_blocks]:
            block = self._cached.get(block_hash)
            if block is None and block_hash not in also:
                break
            found.append(block)
        return found

    def register(self, request_id: str, block_hashes: Sequence[bytes], start: int, stop: int) -> None:
        """Register the full blocks ``table[start:stop]`` of the request's block table under their hashes.

        If a block with the same hash is cached already, the request's copy is not registered.
        """
        table = self._tables[request_id]
        for index in range(start, stop):
            block, block_hash = table[index], block_hashes[index]
            if block.block_hash is None and block_hash not in self._cached:
                block.block_hash = block_hash
                self._cached[block_hash] = block

    def forget_cached(self) -> None:
        """Drop all cached prefixes. Block tables do not change."""
        self.num_forgets += 1
        for block in list(self._cached.values()):
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None

    def check_integrity(self) -> None:
        """Assert every invariant; O(num_blocks), for tests and debugging."""
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            ids = [block.block_id for block in table]
            assert ids and len(set(ids)) == len(ids), f"{request_id}: block table {ids}"
            for block_id in ids:
                references[block_id] += 1
        for block, count in zip(self._blocks, references, strict=True):
            assert block.ref_cnt == count, f"{block} is in {count} tables"
            assert (count == 0) == (block in self._free), f"{block} is free and used, or neither"
        cached = {block.block_id: block.block_hash for block in self._blocks if block.block_hash is not None}
        assert cached == {block.block_id: block_hash for block_hash, block in self._cached.items()}
