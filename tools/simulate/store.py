"""KV store shared by replicas: its contents, and the transfer times of its links.

The scheduler half of KV transfer is the project's own. :class:`SimulatedTransfer` replaces the threads that move
blocks, in simulated time. The store has one outgoing and one incoming link, shared by all replicas in FIFO order.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stores.base import StorePause
from metal_engine.kv_transfer.transfer import LoadTicket

_NOTHING = np.empty(0, np.uint8)  # placeholder for a block, whose contents are never read
_CLOCK_TICK = 1e-3  # added to a deadline, so that it has passed for certain


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Settings of a store.

    Attributes:
        bandwidth: bytes per second of each link.
        block_bytes: size of a block in bytes.
        latency: seconds to the first byte.
        capacity: size of the store in bytes.
    """

    bandwidth: float
    block_bytes: int
    latency: float = 1e-3
    capacity: float = math.inf


class _Link:
    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._free_at = 0.0

    def carry(self, now: float, num_bytes: int, deadline: float = math.inf) -> tuple[float, float]:
        """Add a transfer, which starts when all earlier ones have ended. It is cut off at the deadline.

        Returns:
            Start of the transfer in seconds, and its end without the deadline.
        """
        start = max(now, self._free_at)
        end = start + num_bytes / self._bandwidth
        self._free_at = max(self._free_at, min(end, deadline))
        return start, end


class SharedStore:
    """Blocks by hash, evicted in LRU order. A block is stored once its transfer has ended."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.num_bytes_read = 0
        self.num_bytes_written = 0
        self._there_from: OrderedDict[bytes, float] = OrderedDict()
        self._reads = _Link(config.bandwidth)
        self._writes = _Link(config.bandwidth)

    def read(self, hashes: Sequence[bytes], now: float, deadline: float = math.inf) -> tuple[int, float, float]:
        """Read the leading blocks that are stored.

        Bytes that would arrive after the deadline are not sent, because the reader has given up by then.

        Returns:
            Number of blocks, arrival time of the first byte, and arrival time of the last byte without the deadline. If
            the number is 0, both times are ``now``.
        """
        length = 0
        while length < len(hashes) and self._there_from.get(hashes[length], math.inf) <= now:
            self._there_from.move_to_end(hashes[length])
            length += 1
        if not length:
            return 0, now, now
        start, end = self._reads.carry(now, length * self.config.block_bytes, deadline)
        self.num_bytes_read += round((min(end, max(start, deadline)) - start) * self.config.bandwidth)
        return length, start + self.config.latency, end + self.config.latency

    def write(self, hashes: Sequence[bytes], now: float) -> float:
        """Write the blocks that are neither stored nor in transfer. Evicts old blocks beyond the capacity.

        Return the time when the link has carried these blocks. They are stored ``latency`` seconds later.
        """
        end = now
        for block_hash in hashes:
            if block_hash in self._there_from:
                continue
            self.num_bytes_written += self.config.block_bytes
            _, end = self._writes.carry(now, self.config.block_bytes)
            self._there_from[block_hash] = end + self.config.latency
            if len(self._there_from) * self.config.block_bytes > self.config.capacity:
                self._there_from.popitem(last=False)
        return end


class SimulatedTransfer:
    """Transfer of one replica in simulated time, with the ``KVTransfer`` interface for :class:`KVConnectorScheduler`.

    Args:
        store: store shared with other replicas.
        config: limits and deadlines, as for a real transfer.
        clock: clock of the simulation in seconds.
    """

    def __init__(self, store: SharedStore, config: KVTransferConfig, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._store = store
        self._config = config
        self._pause = StorePause(clock)
        self._under_way: dict[LoadTicket, tuple[float, float]] = {}  # arrival times of the first and last byte
        self._writing: list[tuple[float, int]] = []  # end time and number of bytes of each write

    # --- interface of the scheduler half --------------------------------------------------------------------

    def start_load(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        follow: bool,
        prefix: Sequence[bytes] = (),
        min_state_blocks: int = 0,
    ) -> LoadTicket:
        """Begin to load the leading blocks that the store has. Return the ticket of the load.

        Loads nothing while the store is paused after a failure. ``prefix`` and ``min_state_blocks`` are ignored.
        """
        now = self.clock()
        ticket = LoadTicket(request_id, list(hashes), follow, has_answered=True, started=now, last_arrival=now)
        length, start, end = 0, now, now
        if self._pause.is_over:
            length, start, end = self._store.read(hashes, now, now + self._config.load_timeout)
        ticket.hashes = ticket.hashes[:length]
        self._under_way[ticket] = start, end
        self._advance(ticket, now)
        return ticket

    def end_load(self, ticket: LoadTicket) -> dict[bytes, np.ndarray]:
        """Stop a load. Return the blocks that have arrived, by hash. Their contents are empty placeholders."""
        if ticket in self._under_way:
            self._advance(ticket, self.clock())
            self._under_way.pop(ticket, None)
        return dict(ticket.blocks)

    def release(self, ticket: LoadTicket) -> None:
        """Do nothing: host memory is not simulated."""

    def load_timed_out(self, ticket: LoadTicket) -> None:
        """Record that a load's deadline has passed. Pauses the store if no block has arrived, as in a real transfer."""
        self._advance(ticket, self.clock())
        if not ticket.blocks:
            self._pause.failed()

    def wait(self, timeout: float) -> None:
        raise AssertionError("every ticket is answered at once")

    def grant_saves(self, num_blocks: int) -> int:
        """Return how many of ``num_blocks`` blocks fit into ``max_save_bytes`` of host memory beside pending writes."""
        now = self.clock()
        self._writing = [(end, num_bytes) for end, num_bytes in self._writing if end > now]
        taken = sum(num_bytes for _, num_bytes in self._writing)
        return max(0, min(num_blocks, (self._config.max_save_bytes - taken) // self._store.config.block_bytes))

    def grant_state_saves(self, num_states: int) -> int:
        return 0  # recurrent states are not simulated

    # --- interface of the replica ---------------------------------------------------------------------------

    def save(self, hashes: Sequence[bytes]) -> None:
        """Write blocks that a step has completed."""
        end = self._store.write(hashes, self.clock())
        self._writing.append((end, len(hashes) * self._store.config.block_bytes))

    def advance(self) -> None:
        """Advance all loads to the current time."""
        for ticket in list(self._under_way):
            self._advance(ticket, self.clock())

    def next_change(self) -> float | None:
        """Return the time of the next end or timeout of a load; None without loads in flight."""
        deadlines = [
            min(end, start_of.started + self._config.load_timeout + _CLOCK_TICK)
            for start_of, (_, end) in self._under_way.items()
            if start_of.started is not None
        ]
        return min(deadlines, default=None)

    def _advance(self, ticket: LoadTicket, now: float) -> None:
        start, end = self._under_way[ticket]
        count = len(ticket.hashes)
        if now >= end:
            del self._under_way[ticket]
            ticket.is_done = True
            self._pause.succeeded()
        else:
            count = max(0, int(count * (now - start) / (end - start)))
        ticket.blocks = dict.fromkeys(ticket.hashes[:count], _NOTHING)
