"""Keeps book of the KV cache's blocks: free ones, those of each request, and what they hold; O(1) per block.

Pure bookkeeping over block ids; the memory itself belongs to the runner.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence


class Block:
    """One block of the KV cache.

    ``ref_cnt`` counts the block tables it stands in. ``block_hash`` is the key under which the prefix cache
    knows its contents, None if it does not; it outlives the last reference, until the block is reused. The two
    links are the free queue's.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt})"


class FreeBlockQueue:
    """Unreferenced blocks, the next to be reused first: a doubly linked list through the blocks themselves.

    Every operation is O(1), removal from the middle included (a cached block that is used again).
    """

    def __init__(self, blocks: list[Block]) -> None:
        self.num_free_blocks = 0
        # Sentinels at both ends spare every operation its special cases.
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        last = self._tail.prev_free
        assert last is not None and block.next_free is None, f"{block} is in the free queue already"
        last.next_free = block
        block.prev_free = last
        block.next_free = self._tail
        self._tail.prev_free = block
        self.num_free_blocks += 1

    def prepend(self, block: Block) -> None:
        first = self._head.next_free
        assert first is not None and block.next_free is None, f"{block} is in the free queue already"
        first.prev_free = block
        block.next_free = first
        block.prev_free = self._head
        self._head.next_free = block
        self.num_free_blocks += 1

    def remove(self, block: Block) -> None:
        prev_free, next_free = block.prev_free, block.next_free
        assert prev_free is not None and next_free is not None, f"{block} is not in the free queue"
        prev_free.next_free = next_free
        next_free.prev_free = prev_free
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def popleft(self) -> Block:
        block = self._head.next_free
        assert block is not None and block is not self._tail, "no free block"
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next_free


class BlockManager:
    """Block tables of all running requests over one pool, and the cache of prefixes in the same blocks.

    A full block is known by its hash from :meth:`register` on, and tables may share it. When the last table lets it
    go, it waits in the free queue with its contents, and can be found there until it is reused for something else.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeBlockQueue(self._blocks)
        self._tables: dict[str, list[Block]] = {}
        self._cached: dict[bytes, Block] = {}
        self.peak_used_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self._free.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table: logical -> physical."""
        return [block.block_id for block in self._tables.get(request_id, ())]

    def allocate(
        self, request_id: str, num_tokens: int, *, reserve: int = 0, cached: Sequence[Block | None] = ()
    ) -> list[int] | None:
        """Extend the request's table so that it holds ``num_tokens`` tokens.

        Args:
            reserve: blocks that must stay free beyond that.
            cached: from :meth:`find_cached`; a new table begins with them, and with new blocks for None.

        Returns:
            The ids of the blocks added, or None, with nothing changed, if there are too few.
        """
        table = self._tables.get(request_id)
        assert table is None or not cached, f"{request_id} has blocks already"
        num_new = self.blocks_for(num_tokens) - (len(table) if table is not None else len(cached))
        if num_new <= 0 and not cached:
            return []
        num_taken = num_new + sum(block is None or block.ref_cnt == 0 for block in cached)
        if num_taken + reserve > self._free.num_free_blocks:
            return None
        for block in cached:
            if block is None:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1
        wanted = (*cached, *[None] * num_new)
        # Requests give back their last block first, so a run of blocks is free in reverse: sorted, it is a run again.
        taken = iter(sorted((self._take() for _ in range(wanted.count(None))), key=lambda b: b.block_id))
        new_blocks = [block or next(taken) for block in wanted]
        if table is None:
            table = self._tables[request_id] = []
        table += new_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)
        return [block.block_id for block in new_blocks]

    def _take(self) -> Block:
        """Returns the next block to reuse; forgets what it held."""
        block = self._free.popleft()
        self._forget(block)
        block.ref_cnt = 1
        return block

    def free(self, request_id: str) -> None:
        """Give the request's blocks back, its last block first, so that tails are reused before heads.

        Those that hold no cached prefix are reused before all others.
        """
        for block in reversed(self._tables.pop(request_id, ())):
            block.ref_cnt -= 1
            if block.ref_cnt:
                continue
            if self._cached and block.block_hash is None:
                self._free.prepend(block)
            else:
                self._free.append(block)

    # --- cached prefixes ------------------------------------------------------------------------------------

    def is_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._cached

    def find_cached(
        self, block_hashes: Sequence[bytes], max_blocks: int, also: Container[bytes] = ()
    ) -> list[Block | None]:
        """Returns the longest run of cached blocks that a chain of hashes begins with, ``max_blocks`` at most.

        Hashes in ``also`` belong to the run too; where they are not cached here, None stands for the block.
        """
        found: list[Block | None] = []
        for block_hash in block_hashes[:max_blocks]:
            block = self._cached.get(block_hash)
            if block is None and block_hash not in also:
                break
            found.append(block)
        return found

    def register(self, request_id: str, block_hashes: Sequence[bytes], start: int, stop: int) -> None:
        """Make blocks ``start`` to ``stop`` of the request's table, which are full, known by their hashes.

        Where the same contents are cached already, the request's own copy stays unknown.
        """
        table = self._tables[request_id]
        for index in range(start, stop):
            block, block_hash = table[index], block_hashes[index]
            if block.block_hash is None and block_hash not in self._cached:
                block.block_hash = block_hash
                self._cached[block_hash] = block

    def forget_cached(self) -> None:
        """Forget all cached prefixes; block tables stay as they are."""
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
        free_ids = [block.block_id for block in self._free]
        assert len(free_ids) == len(set(free_ids)) == self._free.num_free_blocks
        free_set = set(free_ids)
        for block, count in zip(self._blocks, references, strict=True):
            assert block.ref_cnt == count, f"{block} stands in {count} tables"
            assert (count == 0) == (block.block_id in free_set), f"{block} is free and used, or neither"
        cached = {block.block_id: block.block_hash for block in self._blocks if block.block_hash is not None}
        assert cached == {block.block_id: block_hash for block_hash, block in self._cached.items()}
