"""A KV store that replicas share: what it holds, and how long its links take to carry it.

The scheduler's side of KV transfer is the project's own; :class:`SimulatedTransfer` stands in for the threads that
move blocks, over simulated time. The store has one link out and one link in, which all replicas share, first come
first served.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stores.base import StoreRest
from metal_engine.kv_transfer.transfer import LoadTicket

_NOTHING = np.empty(0, np.uint8)  # in place of a block: nobody looks inside
_CLOCK_TICK = 1e-3  # after a deadline, so that it has certainly passed


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Bytes a second of each link, bytes that a block takes, seconds to the first byte, and bytes that fit in."""

    bandwidth: float
    block_bytes: int
    latency: float = 1e-3
    capacity: float = math.inf


class _Link:
    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._free_at = 0.0

    def carry(self, now: float, num_bytes: int, deadline: float = math.inf) -> tuple[float, float]:
        """Send bytes after all that are under way, until a deadline.

        Returns when the first one starts, and when the last one is there if there were no deadline.
        """
        start = max(now, self._free_at)
        end = start + num_bytes / self._bandwidth
        self._free_at = max(self._free_at, min(end, deadline))
        return start, end


class SharedStore:
    """Blocks by hash, the longest unused ones forgotten first. A block is there once it has been carried in."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.num_bytes_read = 0
        self.num_bytes_written = 0
        self._there_from: OrderedDict[bytes, float] = OrderedDict()
        self._reads = _Link(config.bandwidth)
        self._writes = _Link(config.bandwidth)

    def read(self, hashes: Sequence[bytes], now: float, deadline: float = math.inf) -> tuple[int, float, float]:
        """Read the leading blocks that are there; returns how many, and when the first and the last byte arrive.

        What would arrive after the deadline is not sent: who reads has given up by then.
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
        """Write blocks, those left out that are there or on their way; returns when the last one is there."""
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
    """One replica's transfer: what :class:`KVConnectorScheduler` asks of a ``KVTransfer``, over simulated time.

    Args:
        store: shared with other replicas.
        config: limits and deadlines, as of a real transfer.
        clock: the simulation's, in seconds.
    """

    def __init__(self, store: SharedStore, config: KVTransferConfig, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._store = store
        self._config = config
        self._rest = StoreRest(clock)
        self._under_way: dict[LoadTicket, tuple[float, float]] = {}  # when the first byte arrives, and the last
        self._writing: list[tuple[float, int]] = []  # until when, and how many bytes

    # --- what the scheduler's side asks for -----------------------------------------------------------------

    def start_load(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        follow: bool,
        prefix: Sequence[bytes] = (),
        min_state_blocks: int = 0,
    ) -> LoadTicket:
        """Begin to load the leading blocks that the store has; none while the store is let rest."""
        now = self.clock()
        ticket = LoadTicket(request_id, list(hashes), follow, has_answered=True, started=now, last_arrival=now)
        length, start, end = 0, now, now
        if self._rest.is_over:
            length, start, end = self._store.read(hashes, now, now + self._config.load_timeout)
        ticket.hashes = ticket.hashes[:length]
        self._under_way[ticket] = start, end
        self._advance(ticket, now)
        return ticket

    def end_load(self, ticket: LoadTicket) -> dict[bytes, np.ndarray]:
        """Stop loading; returns what has arrived."""
        if ticket in self._under_way:
            self._advance(ticket, self.clock())
            self._under_way.pop(ticket, None)
        return dict(ticket.blocks)

    def release(self, ticket: LoadTicket) -> None:
        """Host memory is not simulated."""

    def load_timed_out(self, ticket: LoadTicket) -> None:
        """A store that gave nothing in time is let rest, as a real one is."""
        self._advance(ticket, self.clock())
        if not ticket.blocks:
            self._rest.failed()

    def wait(self, timeout: float) -> None:
        raise AssertionError("every ticket is answered at once")

    def grant_saves(self, num_blocks: int) -> int:
        """Returns how many blocks there is host memory for while others are being written."""
        now = self.clock()
        self._writing = [(end, num_bytes) for end, num_bytes in self._writing if end > now]
        taken = sum(num_bytes for _, num_bytes in self._writing)
        return max(0, min(num_blocks, (self._config.max_save_bytes - taken) // self._store.config.block_bytes))

    def grant_state_saves(self, num_states: int) -> int:
        return 0  # no recurrent states here

    # --- what the replica asks for --------------------------------------------------------------------------

    def save(self, hashes: Sequence[bytes]) -> None:
        """Write blocks that a step has completed."""
        end = self._store.write(hashes, self.clock())
        self._writing.append((end, len(hashes) * self._store.config.block_bytes))

    def advance(self) -> None:
        """Bring all loads to the present."""
        for ticket in list(self._under_way):
            self._advance(ticket, self.clock())

    def next_change(self) -> float | None:
        """Returns when the next load ends or is too late; None if none is under way."""
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
            self._rest.succeeded()
        else:
            count = max(0, int(count * (now - start) / (end - start)))
        ticket.blocks = dict.fromkeys(ticket.hashes[:count], _NOTHING)
