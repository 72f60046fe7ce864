"""KV transfer without threads. Tests choose which blocks arrive, when, and which errors occur."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from metal_engine.kv_transfer.layout import state_key
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.transfer import LoadTicket


class FakeTransfer:
    """Fake of :class:`metal_engine.kv_transfer.transfer.KVTransfer` for the scheduler's half, with a dict as the store.

    Attributes:
        store: hash -> block. The fake runner saves blocks into it.
        tickets: loads that have not ended.
        held: ended loads whose blocks still take host memory.
        capacity: maximum number of blocks, and of states, that one request to save is granted.
        now: current time of the fake clock.
    """

    def __init__(self, config: KVTransferConfig | None = None) -> None:
        self.config = config or KVTransferConfig(kv_connector="fake")
        self.store: dict[bytes, np.ndarray] = {}
        self.tickets: list[LoadTicket] = []
        self.held: list[LoadTicket] = []
        self.capacity = 1 << 30
        self.now = 0.0
        self.stats = KVTransferStats()
        self._at_once = False

    def connector(self) -> KVConnectorScheduler:
        return KVConnectorScheduler(self, self.config, self.stats)  # type: ignore[arg-type]

    # --- interface of the connector ---

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self.now

    def start_load(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        follow: bool,
        prefix: Sequence[bytes] = (),
        min_state_blocks: int = 0,
    ) -> LoadTicket:
        ticket = LoadTicket(request_id, list(hashes), follow, has_answered=True, started=self.now)
        ticket.prefix, ticket.min_state_blocks = list(prefix), min_state_blocks
        ticket.last_arrival = self.now
        self.tickets.append(ticket)
        if self._at_once:
            self.deliver(ticket)
            ticket.is_done = True
        return ticket

    def end_load(self, ticket: LoadTicket) -> dict[bytes, np.ndarray]:
        self.tickets.remove(ticket)
        self.held.append(ticket)
        return dict(ticket.blocks)

    def release(self, ticket: LoadTicket) -> None:
        self.held.remove(ticket)

    def load_timed_out(self, ticket: LoadTicket) -> None:
        self.stats.add(loads_timed_out=1)

    def wait(self, timeout: float) -> None:
        pass

    def grant_saves(self, num_blocks: int) -> int:
        granted = min(num_blocks, self.capacity)
        self.stats.add(blocks_dropped=num_blocks - granted)
        return granted

    def grant_state_saves(self, num_states: int) -> int:
        return min(num_states, self.capacity)

    # --- for tests ---

    @property
    def open_tickets(self) -> list[LoadTicket]:
        return [ticket for ticket in self.tickets if not ticket.is_done]

    def deliver(self, ticket: LoadTicket, most: int = 1 << 30) -> None:
        """Deliver the next blocks of a load, at most ``most``, up to the first block that the store lacks."""
        for block_hash in ticket.hashes[len(ticket.blocks) :][:most]:
            if block_hash not in self.store:
                ticket.is_done = not ticket.follow
                break
            ticket.blocks[block_hash] = self.store[block_hash]
            ticket.last_arrival = self.now
        ticket.is_done |= len(ticket.blocks) == len(ticket.hashes)
        if ticket.is_done:
            self._deliver_state(ticket)

    def _deliver_state(self, ticket: LoadTicket) -> None:
        for block_hash in reversed([*ticket.prefix, *ticket.hashes[: len(ticket.blocks)]]):
            state = self.store.get(state_key(block_hash))
            if state is not None:
                ticket.state = block_hash, state
                return

    def fail(self, ticket: LoadTicket, message: str = "the store is gone") -> None:
        ticket.error = message
        ticket.is_done = True

    def answer_at_once(self) -> None:
        """Complete all open loads, and complete every later load as soon as it starts."""
        self._at_once = True
        for ticket in self.open_tickets:
            self.deliver(ticket)
            ticket.is_done = True
