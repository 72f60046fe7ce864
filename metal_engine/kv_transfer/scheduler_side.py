"""The connector as the scheduler sees it: which KV a request gets from the store, and which it gives.

The roles are vLLM's, and so are the names where they mean the same. One thing differs: KV is loaded into host memory
first, and blocks are allocated when it is there. So a request that waits for KV holds no blocks and is aborted by
forgetting it. Its KV, whole or partial, goes into the cache at the beginning of the step that computes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.transfer import KVTransfer, LoadTicket
from metal_engine.request import Request
from metal_engine.step import KVConnectorMetadata

# Planning a step waits up to so many seconds for the store's first answer about requests that have just come. The
# store knows nothing of most of them, and those then need not miss the step.
ANSWER_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Missing:
    """What of a request's beginning is not here.

    Attributes:
        prefix: hashes of the blocks that are, before the first one that is not.
        blocks: hashes of the others that it could begin with, in order.
        state: whether it lacks a recurrent state for the end of them.
        min_state_blocks: a producer of the same prompt leaves a state after so many blocks.
    """

    prefix: Sequence[bytes]
    blocks: Sequence[bytes]
    state: bool = False
    min_state_blocks: int = 0


@dataclass(slots=True)
class _Arrived:
    """What the store gave for a request that waits to be admitted; it takes host memory until then."""

    ticket: LoadTicket
    blocks: dict[bytes, np.ndarray]  # by hash
    state: tuple[bytes, np.ndarray] | None  # of the block it follows the hash, and the state itself


class KVConnectorScheduler:
    """Called by the scheduler, in the engine's thread; never waits for the store beyond ``ANSWER_SECONDS``.

    Args:
        transfer: moves blocks between the store and host memory.
        config: role, policy and deadlines.
        stats: counted in here.

    Attributes:
        failed_loads: request id -> why its load failed, under the policy ``fail``. The engine ends these requests;
            :meth:`forget_request` takes them out.
    """

    def __init__(self, transfer: KVTransfer, config: KVTransferConfig, stats: KVTransferStats) -> None:
        self.config = config
        self.stats = stats
        self.failed_loads: dict[str, str] = {}
        self._transfer = transfer
        self._tickets: dict[str, LoadTicket] = {}
        self._unanswered: list[LoadTicket] = []
        self._arrived: dict[str, _Arrived] = {}  # of requests that wait to be admitted
        # Hashes of running requests' blocks that came from the store.
        self._from_store: dict[str, set[bytes]] = {}
        # For the next plan.
        self._loads: dict[str, dict[int, np.ndarray]] = {}  # request id -> block id -> block
        self._state_loads: dict[str, tuple[int, np.ndarray]] = {}  # request id -> slot and state
        self._saves: list[tuple[str, bytes, int]] = []

    # --- loads ----------------------------------------------------------------------------------------------

    def start_load(self, request: Request, missing: Missing) -> bool:
        """Begin to load a request's KV from the store; whether the request must wait for that.

        If so, :meth:`take_ended_loads` names it when the load has ended. False where there is nothing to load.
        """
        if not (self.config.loads and (missing.blocks or missing.state)):
            return False
        follow = request.options.do_remote_prefill and request.num_preemptions == 0
        ticket = self._transfer.start_load(
            request.request_id,
            missing.blocks,
            follow=follow,
            prefix=missing.prefix,
            min_state_blocks=missing.min_state_blocks,
        )
        self._tickets[request.request_id] = ticket
        self._unanswered.append(ticket)
        return True

    def take_ended_loads(self) -> list[str]:
        """Returns the requests whose loads have ended since the last call, whole or not, in the order they began."""
        self._await_answers()
        ended = []
        for request_id, ticket in list(self._tickets.items()):
            error = ticket.error
            if not ticket.is_done:
                if not self._is_late(ticket):
                    continue
                error = "its KV did not arrive in time"
                self._transfer.load_timed_out(ticket)
            del self._tickets[request_id]
            self._arrived[request_id] = _Arrived(ticket, self._transfer.end_load(ticket), ticket.state)
            if error is not None and self.config.kv_load_failure_policy == "fail":
                self.failed_loads[request_id] = f"loading its KV failed: {error}"
            ended.append(request_id)
        return ended

    def _is_late(self, ticket: LoadTicket) -> bool:
        if ticket.started is None:
            return False  # its turn has not come yet
        if ticket.follow:
            return self._transfer.clock() - ticket.last_arrival > self.config.handover_timeout
        return self._transfer.clock() - ticket.started > self.config.load_timeout

    def _await_answers(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while any(not ticket.has_answered for ticket in self._unanswered):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self._transfer.wait(remaining)
        self._unanswered.clear()

    def wait(self, timeout: float) -> None:
        """Wait until something has arrived, for ``timeout`` seconds at most."""
        self._transfer.wait(timeout)

    def arrived(self, request_id: str) -> Mapping[bytes, np.ndarray]:
        """Blocks that have arrived for a request that waits to be admitted, by hash."""
        arrived = self._arrived.get(request_id)
        return {} if arrived is None else arrived.blocks

    def arrived_state(self, request_id: str) -> bytes | None:
        """Hash of the block that a recurrent state which has arrived for a waiting request follows."""
        arrived = self._arrived.get(request_id)
        return None if arrived is None or arrived.state is None else arrived.state[0]

    def load_state(self, request: Request, slot: int) -> None:
        """Load the recurrent state that has arrived into a slot, with the next plan. Its blocks are taken out later."""
        arrived = self._arrived[request.request_id]
        assert arrived.state is not None
        self._state_loads[request.request_id] = slot, arrived.state[1]

    def _take_arrived(self, request_id: str) -> dict[bytes, np.ndarray]:
        """Takes out what has arrived for a request that waits no more, and frees its host memory for others."""
        arrived = self._arrived.pop(request_id, None)
        if arrived is None:
            return {}
        self._transfer.release(arrived.ticket)
        return arrived.blocks

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], from_store: Sequence[int], num_cached_blocks: int
    ) -> None:
        """Note that a request has been admitted, and load what has arrived for it into its blocks with the next plan.

        Args:
            block_ids: its block table.
            from_store: which of its blocks are to be filled with what has arrived.
            num_cached_blocks: its leading blocks that need not be computed, those included.
        """
        arrived = self._take_arrived(request.request_id)
        hashes = request.block_hashes
        if from_store:
            self._loads[request.request_id] = {block_ids[i]: arrived[hashes[i]] for i in from_store}
        self.stats.add(blocks_unused=len(arrived) - len(from_store))
        self._from_store[request.request_id] = {hashes[index] for index in from_store}
        if request.options.do_remote_decode and self.config.saves:
            self.queue_saves(request, hashes[:num_cached_blocks], block_ids[:num_cached_blocks])

    # --- saves ----------------------------------------------------------------------------------------------

    def queue_saves(self, request: Request, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Save these blocks with the next plan: they are complete when its step and those before it have ended."""
        if not self.config.saves:
            return
        from_store = self._from_store.get(request.request_id, ())
        self._saves += [
            (request.request_id, block_hash, block_id)
            for block_hash, block_id in zip(hashes, block_ids, strict=True)
            if block_hash not in from_store
        ]

    def build_connector_meta(self, states: Sequence[tuple[bytes, int]] = ()) -> KVConnectorMetadata | None:
        """Returns what the runner is to load and save with the plan just made; None if that is nothing.

        Args:
            states: recurrent states to save, each with the hash of the block that it follows, and its slot.
        """
        if not self.config.saves:
            states = ()
        if not (self._loads or self._saves or self._state_loads or states):
            return None
        saves = self._saves[: self._transfer.grant_saves(len(self._saves))]
        meta = KVConnectorMetadata(saves=[(block_hash, block_id) for _, block_hash, block_id in saves])
        meta.state_saves = list(states[: self._transfer.grant_state_saves(len(states))]) if states else []
        for blocks in self._loads.values():
            meta.loads |= blocks
        meta.state_loads = dict(self._state_loads.values())
        self._loads, self._saves, self._state_loads = {}, [], {}
        return meta

    # --- both -----------------------------------------------------------------------------------------------

    def forget_request(self, request: Request) -> None:
        """Drop all loads and saves of a request, which has ended or lost its blocks."""
        request_id = request.request_id
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self.stats.add(blocks_unused=len(self._transfer.end_load(ticket)))
            self._transfer.release(ticket)
        self.stats.add(blocks_unused=len(self._take_arrived(request_id)))
        self._from_store.pop(request_id, None)
        self._loads.pop(request_id, None)
        self._state_loads.pop(request_id, None)
        self.failed_loads.pop(request_id, None)
        self._saves = [save for save in self._saves if save[0] != request_id]

    def count_prompt(self, request: Request) -> None:
        """Count where the KV of a request's prompt comes from, at its first admission."""
        num_cached = max(0, request.num_cached_tokens)
        self.stats.add(
            prompt_tokens_local=num_cached - request.num_external_tokens,
            prompt_tokens_store=request.num_external_tokens,
            prompt_tokens_computed=request.num_prompt_tokens - num_cached,
        )

    def check_integrity(self, loading: set[str], waiting: set[str], running: set[str]) -> None:
        """Assert, between steps, that nothing is kept for a request that has no use for it."""
        assert self._tickets.keys() == loading
        assert self._arrived.keys() <= waiting
        assert self._from_store.keys() <= running
        assert not (self._loads or self._state_loads), (
            "blocks to load were left out of the plan that admitted their request"
        )
        assert {request_id for request_id, _, _ in self._saves} <= running
