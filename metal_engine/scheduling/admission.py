"""Holds the requests that wait for admission: queued, or loading KV from a store. Selects the next request to admit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.block_manager import Block
from metal_engine.scheduling.prefix_cache import PrefixCache
from metal_engine.scheduling.recurrent_states import RecurrentStates
from metal_engine.scheduling.token_allotment import PrefillAllocator, is_long
from metal_engine.scheduling.waiting_queue import WaitingQueue
from metal_engine.settings.config import SchedulerConfig

# Maximum number of waiting requests to skip in one admission. The remaining requests are considered next time.
_MAX_PASSED_OVER = 32


@dataclass(slots=True)
class Candidate:
    """Waiting request that may be admitted next.

    Attributes:
        cached: blocks of the request's longest usable prefix. A None in the list is a block whose KV has arrived
            from a store, but is not in the pool yet.
        num_shared_tokens: number of leading tokens whose KV is in the pool, including tokens after the last state
            checkpoint. Always 0 for models without recurrent layers.
    """

    request: Request
    cached: list[Block | None]
    block_size: int
    num_shared_tokens: int = 0

    @property
    def num_cached_tokens(self) -> int:
        return len(self.cached) * self.block_size

    @property
    def num_remaining_tokens(self) -> int:
        return self.request.num_tokens - self.num_cached_tokens

    @property
    def extent(self) -> tuple[int, int]:
        """Number of tokens that need not be computed, and number of tokens that must be computed."""
        return self.num_cached_tokens, self.num_remaining_tokens


class Admissions:
    """Requests that are not running: requests that load KV from a store, and requests queued for admission.

    Args:
        config: limits on long prompts.
        prefix_cache: finds cached prefixes of requests.
        block_size: tokens per block.
        states: recurrent states of the running requests.
        connector: loads KV from a store; None without KV transfer.

    Attributes:
        loading: requests in state WAITING_FOR_REMOTE_KVS, by id.
        waiting: all other requests that are not running, in order of service.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefix_cache: PrefixCache,
        block_size: int,
        states: RecurrentStates,
        connector: KVConnectorScheduler | None,
    ) -> None:
        self.loading: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self._config = config
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._states = states
        self._connector = connector

    # --- requests come and go -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a new or preempted request. Start loading its KV if a store may have it; otherwise queue the request."""
        connector = self._connector
        if connector is not None and connector.start_load(request, self._prefix_cache.missing(request)):
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loading[request.request_id] = request
        else:
            self._enqueue(request)

    def enqueue_loaded(self) -> None:
        """Queue the requests whose KV loads have ended, even if KV is missing. Each keeps its place in the order."""
        if self._connector is None or not self.loading:
            return
        for request_id in self._connector.take_ended_loads():
            request = self.loading.pop(request_id)
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        num_cached_tokens = len(self._find_cached(request)) * self._block_size
        self.waiting.push(request, is_long=is_long(request.num_tokens - num_cached_tokens, self._config))

    def remove(self, request_id: str) -> None:
        """Remove a request that is admitted or has ended. Unknown ids are ignored."""
        self.waiting.remove(request_id)
        self.loading.pop(request_id, None)

    # --- selection ------------------------------------------------------------------------------------------

    def next(self, prefills: PrefillAllocator, running: Mapping[str, Request]) -> Candidate | None:
        """Return the request to admit next, or None if no request can be admitted now.

        The request stays in the queue until the caller calls :meth:`remove`. These requests are skipped, at most
        ``_MAX_PASSED_OVER`` in one call:

        - long prompts while ``max_long_partial_prefills`` long prompts are in progress;
        - requests with a prefix that a running prefill is about to compute (:meth:`PrefixCache.find_owner`). They are
          parked until the prefix is computed;
        - suspects (:attr:`Request.is_suspect`) while another suspect runs. They are parked until the running suspect
          has ended or has computed another token. Each step has at most one suspect, so a failed step shows which
          request is the cause.
        """
        may_be_long = prefills.num_long < self._config.max_long_partial_prefills
        for _ in range(_MAX_PASSED_OVER):
            request = self.waiting.head(include_long=may_be_long)
            if request is None or request.num_output_placeholders:
                return None  # preempted while a step is in flight: its placeholder token must be filled in first
            candidate = Candidate(request, self._find_cached(request), self._block_size)
            if not may_be_long and is_long(candidate.num_remaining_tokens, self._config):
                self.waiting.push(request, is_long=True)  # its cached blocks have been evicted since it was queued
            elif request.is_suspect and (suspect := next((r for r in running.values() if r.is_suspect), None)):
                self.waiting.park(request, suspect, suspect.num_tokens + 1)
            elif owner := self._find_owner(candidate, prefills):
                self.waiting.park(request, *owner)
                self._states.request_checkpoint(*owner)
            elif not self._states.can_admit(request, candidate.num_cached_tokens):
                return None
            else:
                candidate.num_shared_tokens = self._prefix_cache.num_shared(request)
                return candidate
        return None

    def _find_owner(self, candidate: Candidate, prefills: PrefillAllocator) -> tuple[Request, int] | None:
        """Return the running prefill that a candidate waits for, and how many tokens the prefill must have computed.

        None if the candidate need not wait.
        """
        found = self._prefix_cache.find_owner(candidate.request, candidate.num_cached_tokens, prefills.in_progress)
        if found is None:
            return None
        owner, num_common = found
        is_past = owner.num_computed_tokens + prefills.allotments.get(owner, 0) > num_common
        return None if is_past and not self._states.writes_state_at(owner, num_common) else found

    def _find_cached(self, request: Request) -> list[Block | None]:
        """Return the blocks that need not be computed. A None in the list is a block that has arrived from a store."""
        if self._connector is None:
            return self._prefix_cache.find(request)
        arrived = self._connector.arrived(request.request_id)
        return self._prefix_cache.find(request, arrived, self._connector.arrived_state(request.request_id))

    # --- requests that wait until another request has computed their common prefix ---------------------------

    def prefixes_computed(self, running: Mapping[str, Request]) -> None:
        """Requeue the parked requests whose owners, running requests, have computed the awaited tokens."""
        for owner_id in self.waiting.owners:
            self.waiting.unpark(owner_id, running[owner_id].num_computed_tokens)

    def release_waiters(self, request_id: str) -> None:
        """Requeue the requests that are parked because of this request, which has stopped running."""
        self.waiting.unpark(request_id)

    # --- tests and debugging --------------------------------------------------------------------------------

    def check_integrity(self, running: Mapping[str, Request]) -> None:
        """Assert the invariants that hold between steps; for tests and debugging."""
        self.waiting.check_integrity({r: request.num_computed_tokens for r, request in running.items()})
        waiting = {request.request_id for request in self.waiting}
        assert not waiting & self.loading.keys()
        assert not (waiting | self.loading.keys()) & running.keys()
        for request in (*self.waiting, *self.loading.values()):
            assert request.num_computed_tokens == 0 and request.num_registered_blocks == 0
        if self._connector is not None:
            self._connector.check_integrity(set(self.loading), waiting, set(running))
