"""Scheduler half of the KV connector: decides which KV a request loads from the store, and which KV it saves.

Roles and method names come from vLLM. Unlike in vLLM, KV is first loaded into host memory, and blocks are allocated
after the KV has arrived. A request that waits for KV therefore holds no blocks, and can be aborted without cleanup in
the pool. The step that computes the rest of the prompt first writes the loaded KV into the cache, even if only a part
has arrived.
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

# Planning a step waits up to this many seconds for the store's first response about new requests. The store has no KV
# of most requests. These requests can join the step at once after the response.
ANSWER_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Missing:
    """Part of a request's KV that is missing from the local cache.

    Attributes:
        prefix: hashes of the local blocks before the first missing block; empty for models without recurrent layers.
        blocks: hashes of the missing blocks that the request could use, in order.
        state: True if a recurrent state is missing: no local state checkpoint covers ``min_state_blocks`` blocks.
        min_state_blocks: number of prompt blocks after which a producer of the same prompt saves a state.
    """

    prefix: Sequence[bytes]
    blocks: Sequence[bytes]
    state: bool = False
    min_state_blocks: int = 0


@dataclass(slots=True)
class _Arrived:
    """KV from the store for a request that waits to be admitted. It occupies host memory until admission."""

    ticket: LoadTicket
    blocks: dict[bytes, np.ndarray]  # block hash -> block
    state: tuple[bytes, np.ndarray] | None  # hash of the block that the state follows, and the state


class KVConnectorScheduler:
    """Connector half that the scheduler calls in the engine thread.

    Two methods wait for the store: :meth:`take_ended_loads`, for at most ``ANSWER_SECONDS``, and :meth:`wait`.

    Args:
        transfer: moves blocks between the store and host memory.
        config: role, policy and deadlines.
        stats: counters to update.

    Attributes:
        failed_loads: request id -> reason for a failed load, if the policy is ``fail``. The engine ends these requests,
            and :meth:`forget_request` removes their entries.
    """

    def __init__(self, transfer: KVTransfer, config: KVTransferConfig, stats: KVTransferStats) -> None:
        self.config = config
        self.stats = stats
        self.failed_loads: dict[str, str] = {}
        self._transfer = transfer
        self._tickets: dict[str, LoadTicket] = {}
        self._unanswered: list[LoadTicket] = []
        self._arrived: dict[str, _Arrived] = {}  # request id -> KV of a request that waits to be admitted
        # Hashes of running requests' blocks that came from the store.
        self._from_store: dict[str, set[bytes]] = {}
        # Loads and saves of the next plan.
        self._loads: dict[str, dict[int, np.ndarray]] = {}  # request id -> block id -> block
        self._state_loads: dict[str, tuple[int, np.ndarray]] = {}  # request id -> (slot, state)
        self._saves: list[tuple[str, bytes, int]] = []

    # --- loads ----------------------------------------------------------------------------------------------

    def start_load(self, request: Request, missing: Missing) -> bool:
        """Start to load a request's KV from the store. Return True if the request must wait for the load.

        :meth:`take_ended_loads` then returns the request's id after its load has ended. Returns False if nothing is
        missing, or if the engine's role is to save only.
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
        """Return the ids of requests whose loads have ended since the last call, complete or not, oldest load first.

        Ends the loads whose deadline has passed. Waits up to ``ANSWER_SECONDS`` for the store's first response about
        new loads.
        """
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
            return False  # the load waits for host memory
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
        """Wait until a load has made progress, for at most ``timeout`` seconds."""
        self._transfer.wait(timeout)

    def arrived(self, request_id: str) -> Mapping[bytes, np.ndarray]:
        """Return the blocks, by hash, that have arrived for a request that waits to be admitted."""
        arrived = self._arrived.get(request_id)
        return {} if arrived is None else arrived.blocks

    def arrived_state(self, request_id: str) -> bytes | None:
        """Return the hash of the last block before the recurrent state that has arrived for a waiting request.

        None if no state has arrived.
        """
        arrived = self._arrived.get(request_id)
        return None if arrived is None or arrived.state is None else arrived.state[0]

    def load_state(self, request: Request, slot: int) -> None:
        """Have the next plan write the arrived recurrent state of a request to a slot.

        A state must have arrived (:meth:`arrived_state`). Call it before :meth:`update_state_after_alloc`.
        """
        arrived = self._arrived[request.request_id]
        assert arrived.state is not None
        self._state_loads[request.request_id] = slot, arrived.state[1]

    def _take_arrived(self, request_id: str) -> dict[bytes, np.ndarray]:
        """Remove and return the arrived blocks of a request that waits no longer, and release their host memory."""
        arrived = self._arrived.pop(request_id, None)
        if arrived is None:
            return {}
        self._transfer.release(arrived.ticket)
        return arrived.blocks

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], from_store: Sequence[int], num_cached_blocks: int
    ) -> None:
        """Record the admission of a request. Have the next plan write the arrived blocks to the request's blocks.

        If another engine waits for the prompt's KV, the plan also saves the cached blocks.

        Args:
            request: the admitted request.
            block_ids: block table of the request.
            from_store: indices of the request's blocks that receive arrived blocks.
            num_cached_blocks: number of leading blocks that need not be computed, including those in ``from_store``.
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
        """Have the next plan save blocks, except blocks that came from the store. No effect if the engine only loads.

        The blocks must be complete after the step of that plan.
        """
        if not self.config.saves:
            return
        from_store = self._from_store.get(request.request_id, ())
        self._saves += [
            (request.request_id, block_hash, block_id)
            for block_hash, block_id in zip(hashes, block_ids, strict=True)
            if block_hash not in from_store
        ]

    def build_connector_meta(self, states: Sequence[tuple[bytes, int]] = ()) -> KVConnectorMetadata | None:
        """Return the loads and saves of the plan just made, and clear them; None if there are none.

        Saves that do not fit into the queue are dropped.

        Args:
            states: recurrent states to save, as the hash of the block that the state follows, and the state's slot.
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

    # --- loads and saves ----------------------------------------------------------------------------------

    def forget_request(self, request: Request) -> None:
        """Drop the pending loads and saves of a request that has ended or lost its blocks.

        Loads and saves of earlier plans are not affected.
        """
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
        """Add a request's prompt tokens to the counts by source of KV. Called at the request's first admission."""
        num_cached = max(0, request.num_cached_tokens)
        self.stats.add(
            prompt_tokens_local=num_cached - request.num_external_tokens,
            prompt_tokens_store=request.num_external_tokens,
            prompt_tokens_computed=request.num_prompt_tokens - num_cached,
        )

    def check_integrity(self, loading: set[str], waiting: set[str], running: set[str]) -> None:
        """Assert that this object has data only of requests that still use the data. Call it between steps."""
        assert self._tickets.keys() == loading
        assert self._arrived.keys() <= waiting
        assert self._from_store.keys() <= running
        assert not (self._loads or self._state_loads), (
            "blocks to load were left out of the plan that admitted their request"
        )
        assert {request_id for request_id, _, _ in self._saves} <= running
