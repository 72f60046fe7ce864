"""Requests on their way to run: which of them are loading KV from a store, who is next, and what it can begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.block_manager import Block
from metal_engine.scheduling.limits import PrefillAllocator, is_long
from metal_engine.scheduling.prefix_cache import PrefixCache
from metal_engine.scheduling.recurrent_checkpoints import RequestStates
from metal_engine.scheduling.waiting_queue import WaitingQueue
from metal_engine.settings.config import SchedulerConfig

# Waiting requests that one admission looks past, at most: the others' turn is the next one.
_MAX_PASSED_OVER = 32


@dataclass(slots=True)
class Candidate:
    """A waiting request, and the blocks it can begin with; None stands for one that arrived from a store.

    ``num_shared_tokens`` counts what is cached of it, without a recurrent state to begin with as well.
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
        """Tokens that need not be computed, and tokens that must be."""
        return self.num_cached_tokens, self.num_remaining_tokens


class Admissions:
    """Requests that do not run: first those whose KV is loading from a store, then those that wait for their turn.

    Args:
        config: limits on long prompts.
        prefix_cache: finds what a request can begin with.
        block_size: tokens per block.
        states: recurrent states of the running requests.
        connector: loads KV from a store; None without KV transfer.

    Attributes:
        loading: by id, in state WAITING_FOR_REMOTE_KVS.
        waiting: the others, in order of service.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefix_cache: PrefixCache,
        block_size: int,
        states: RequestStates,
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
        """Take a request in, new or preempted: begin to load its KV where a store may have it, else let it wait."""
        connector = self._connector
        if connector is not None and connector.start_load(request, self._prefix_cache.missing(request)):
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loading[request.request_id] = request
        else:
            self._wait_for_turn(request)

    def take_in_loaded(self) -> None:
        """Let the requests whose loads have ended, whole or not, wait for their turn: each at its place in order."""
        if self._connector is None or not self.loading:
            return
        for request_id in self._connector.take_ended_loads():
            request = self.loading.pop(request_id)
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            self._wait_for_turn(request)

    def _wait_for_turn(self, request: Request) -> None:
        num_cached_tokens = len(self._find_cached(request)) * self._block_size
        self.waiting.push(request, is_long=is_long(request.num_tokens - num_cached_tokens, self._config))

    def remove(self, request_id: str) -> None:
        """Take a request out: it runs, or has ended. One that is not there is ignored."""
        self.waiting.remove(request_id)
        self.loading.pop(request_id, None)

    # --- who is next ----------------------------------------------------------------------------------------

    def next(self, prefills: PrefillAllocator) -> Candidate | None:
        """Returns the request to admit next, which stays here until it is removed; None if none may be now.

        Long prompts are passed over while as many as may be are in progress, and so are requests that would
        compute what a running prefill is about to.
        """
        may_be_long = prefills.num_long < self._config.max_long_partial_prefills
        for _ in range(_MAX_PASSED_OVER):
            request = self.waiting.head(include_long=may_be_long)
            if request is None or request.num_output_placeholders:
                return None  # the latter: preempted while a step was under way, its token must land first
            candidate = Candidate(request, self._find_cached(request), self._block_size)
            if not may_be_long and is_long(candidate.num_remaining_tokens, self._config):
                self.waiting.push(request, is_long=True)  # what was cached when it came is so no longer
            elif owner := self._find_owner(candidate, prefills):
                self.waiting.park(request, *owner)
                self._states.want(*owner)
            elif not self._states.can_admit(request, candidate.num_cached_tokens):
                return None
            else:
                candidate.num_shared_tokens = self._prefix_cache.num_shared(request)
                return candidate
        return None

    def _find_owner(self, candidate: Candidate, prefills: PrefillAllocator) -> tuple[Request, int] | None:
        """The running prefill to wait for, and up to which token; None if there is none, or if it would be in vain."""
        found = self._prefix_cache.find_owner(candidate.request, candidate.num_cached_tokens, prefills.in_progress)
        if found is None:
            return None
        owner, num_common = found
        is_past = owner.num_computed_tokens + prefills.shares.get(owner, 0) > num_common
        return None if is_past and not self._states.leaves_state_at(owner, num_common) else found

    def _find_cached(self, request: Request) -> list[Block | None]:
        """Returns the blocks that need not be computed: cached here, or (None) arrived from a store."""
        if self._connector is None:
            return self._prefix_cache.find(request)
        arrived = self._connector.arrived(request.request_id)
        return self._prefix_cache.find(request, arrived, self._connector.arrived_state(request.request_id))

    # --- requests that wait for another to compute what both have -------------------------------------------

    def prefixes_computed(self, running: Mapping[str, Request]) -> None:
        """Let requests go on that waited for a prefix which a running request has computed by now."""
        for owner_id in self.waiting.owners:
            self.waiting.unpark(owner_id, running[owner_id].num_computed_tokens)

    def release_waiters(self, request_id: str) -> None:
        """Let requests go on that waited for this one, which computes nothing any more."""
        self.waiting.unpark(request_id)

    # --- tests and debugging --------------------------------------------------------------------------------

    def check_integrity(self, running: Mapping[str, Request]) -> None:
        """Assert every invariant between steps; for tests and debugging."""
        self.waiting.check_integrity({r: request.num_computed_tokens for r, request in running.items()})
        waiting = {request.request_id for request in self.waiting}
        assert not waiting & self.loading.keys()
        assert not (waiting | self.loading.keys()) & running.keys()
        for request in (*self.waiting, *self.loading.values()):
            assert request.num_computed_tokens == 0 and request.num_registered_blocks == 0
        if self._connector is not None:
            self._connector.check_integrity(set(self.loading), waiting, set(running))
