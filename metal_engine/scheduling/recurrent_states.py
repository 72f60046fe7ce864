"""Assigns slots for recurrent states to running requests, and decides which states become state checkpoints.

State checkpoints are taken at block boundaries, where prefixes are cached:

- at the end of a prompt, before the generation prompt: for the next turn of the conversation, and for a repeated
  request;
- after long instructions, for other conversations with the same instructions;
- where the prompt diverges from a prefix that is cached without a checkpoint: other prompts may diverge there, too;
- where the prompt of a waiting request diverges from this prompt, if that request waits for the common prefix;
- every ``CHECKPOINT_INTERVAL`` tokens of a long prompt, or less often if the prompt would exceed its limit of slots;
- at block boundaries of the output. Each new checkpoint in the output replaces the previous one, because the end of the
  output is unknown.

Chunks are cut at these positions (:meth:`RecurrentStates.max_chunk_tokens`): only the end of a chunk writes a state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import Request
from metal_engine.scheduling.state_slots import StateSlots
from metal_engine.settings.config import CacheConfig
from metal_engine.step import SchedulerOutput

# Tokens. A request that reuses a prefix of another prompt recomputes at most this many cached tokens, or more if a
# very long prompt has fewer checkpoints (`_thin`).
CHECKPOINT_INTERVAL = 1024
# Tokens. A step with drafts can run past a block boundary, and then writes no checkpoint there. If the last checkpoint
# of an output is this far back, drafts are limited so that a step ends at a boundary.
DRAFTS_INTERVAL = 64
# Tokens. Shorter instructions get no checkpoint: a checkpoint costs each new prompt an additional step, which takes
# longer than recomputing the instructions.
MIN_INSTRUCTIONS = 256


@dataclass(slots=True)
class _Held:
    """State slots of a running request.

    Attributes:
        slot: slot that the next step writes the request's state to.
        stops: prompt positions where a state checkpoint is needed, in addition to the multiples of ``interval``.
        unpublished: (number of blocks, slot) of written states whose block hashes are not known yet.
        interval: number of tokens between the periodic checkpoints of the prompt.
        spaced: prompt position -> hash of the periodic checkpoint at that position.
        is_prompt_scheduled_whole: True if a single step was planned to compute the prompt up to its last checkpoint.
        latest: hash of the last checkpoint that was added at one of ``stops``; empty before the first.
        rolling: hash of the last checkpoint that was added in the output; None before the first.
        is_written: True if ``slot`` holds a state, which a planned step writes or which was loaded from a store.
        loaded_blocks: number of blocks before the state that was loaded from a store; 0 if none was loaded.
        source: slot with the initial state of the last planned step; None if the request does not hold that slot.
        before: slot of the state before the drafts, held while the request may have to resume from it.
        has_drafts: True while a step in flight writes a state with unverified drafts to ``slot``.
        is_rejected: True if a draft was rejected: the state in ``slot`` is void, and the next step starts from
            ``before``.
        is_recomputing: True if the last planned step recomputes all or some of the accepted drafts.
        kept_at: number of tokens that precede the last state that stayed in its slot to become a checkpoint; 0 before
            the first.
    """

    slot: int
    interval: int
    is_written: bool = False
    is_prompt_scheduled_whole: bool = False
    stops: set[int] = field(default_factory=set)
    unpublished: list[tuple[int, int]] = field(default_factory=list)
    spaced: dict[int, bytes] = field(default_factory=dict)
    latest: bytes = b""
    rolling: bytes | None = None
    loaded_blocks: int = 0
    source: int | None = None
    before: int | None = None
    has_drafts: bool = False
    is_rejected: bool = False
    is_recomputing: bool = False
    kept_at: int = 0

    @property
    def slots(self) -> list[int]:
        """All slots that the request holds, each once."""
        unpublished = [slot for _, slot in self.unpublished]
        before = [] if self.before is None or self.before in unpublished else [self.before]
        return [self.slot, *unpublished, *before]


class RecurrentStates:
    """Recurrent states of running requests. Does nothing for models without recurrent layers.

    Args:
        slots: state slots: at least ``max_num_seqs``, so that every running request gets a slot. 0 slots for models
            without recurrent layers.
        config: tokens per block, and whether prefix caching is enabled.
        max_num_seqs: maximum number of running requests.
        connector: saves states to a store and loads them; None without KV transfer.

    Attributes:
        interval: ``CHECKPOINT_INTERVAL`` rounded down to full blocks, at least one block, in tokens.
        is_used: True for models with recurrent layers.
    """

    def __init__(
        self, slots: StateSlots, config: CacheConfig, max_num_seqs: int, connector: KVConnectorScheduler | None = None
    ) -> None:
        self.slots = slots
        self._connector = connector
        # States to save with the next plan: slot -> hash. If a slot is overwritten before that, its state is not saved.
        self._saves: dict[int, bytes] = {}
        # Slots of the checkpoints from which the requests admitted to the step being planned resume.
        self._read: set[int] = set()
        self._max_num_seqs = max_num_seqs
        self.is_used = slots.num_slots > 0
        self._block_size = config.block_size
        self._keeps_checkpoints = config.enable_prefix_caching and self.is_used
        self.interval = max(1, CHECKPOINT_INTERVAL // config.block_size) * config.block_size
        # Maximum number of periodic checkpoints per prompt, so that one prompt cannot evict the checkpoints
        # of all other conversations.
        self._max_spaced = max(1, (slots.num_slots - max_num_seqs) // 4)
        self._held: dict[str, _Held] = {}

    def begin_step(self) -> None:
        """Prepare for the planning of a step."""
        self._read.clear()

    def can_admit(self, request: Request, num_cached: int) -> bool:
        """Return True if a request with ``num_cached`` cached tokens can get a slot in the step being planned.

        A step writes states from a store to their slots before it reads any state. A request whose state comes from a
        store must therefore not get a slot from which another request resumes in the same step. The request gets the
        slot in the next step instead.
        """
        block_hash = self._last_hash(request, num_cached)
        is_loaded = self.is_used and block_hash and not self.slots.has_checkpoint(block_hash)
        return not is_loaded or self.slots.next_slot not in self._read

    def _last_hash(self, request: Request, num_tokens: int) -> bytes:
        num_blocks = num_tokens // self._block_size
        return request.block_hashes[num_blocks - 1] if num_blocks else b""

    def admit(self, request: Request, num_cached: int, num_shared: int) -> tuple[int, int]:
        """Assign a state slot to an admitted request.

        Args:
            num_cached: number of tokens that need not be computed. The state after them is a state checkpoint, or comes
                from a store.
            num_shared: result of :meth:`PrefixCache.num_shared`. A state checkpoint is planned after these tokens.

        Returns:
            The slots that the first step reads from (0: zero state) and writes to. (0, 0) for models without recurrent
            layers.
        """
        if not self.is_used:
            return 0, 0
        num_blocks = num_cached // self._block_size
        block_hash = self._last_hash(request, num_cached)
        is_here = self.slots.has_checkpoint(block_hash)
        # Mark the hit before taking a slot, so that another checkpoint is evicted if possible. ``read`` and
        # ``slot`` may be the same slot: a step reads before it writes.
        read = self.slots.resume_from(block_hash) if is_here else 0
        self._read.add(read)
        if is_here and request.options.do_remote_decode:
            self._save(read, block_hash)  # another engine waits for the state
        slot = self._take()
        held = self._held[request.request_id] = _Held(slot, self.interval, stops=self._stops(request, num_shared))
        if num_blocks and not is_here:  # the state comes from a store, and stays as a checkpoint
            assert self._connector is not None
            self._connector.load_state(request, slot)
            read, held.is_written, held.loaded_blocks = slot, True, num_blocks
            held.stops.add(num_cached)
        return read, slot

    def _take(self) -> int:
        slot = self.slots.take()
        self._saves.pop(slot, None)
        return slot

    def _stops(self, request: Request, num_shared: int) -> set[int]:
        if not self._keeps_checkpoints:
            return set()
        # At least one token must be left to compute, also for a repeated request.
        ends = [min(request.num_lasting_tokens, request.num_tokens - 1), num_shared]
        if request.num_instruction_tokens >= MIN_INSTRUCTIONS:
            ends.append(min(request.num_instruction_tokens, request.num_tokens - 1))
        return {end - end % self._block_size for end in ends}

    def request_checkpoint(self, request: Request, position: int) -> None:
        """Request a state checkpoint at ``position``, because another request waits for the prefix that ends there.

        No effect after :meth:`plan_whole_prompt`.
        """
        held = self._held.get(request.request_id)
        if held is not None and self._keeps_checkpoints and not held.is_prompt_scheduled_whole:
            held.stops.add(position)
            held.spaced.pop(position, None)

    def writes_state_at(self, request: Request, position: int) -> bool:
        """Return True if a checkpoint is planned at ``position``, or if the request has no recurrent state."""
        held = self._held.get(request.request_id)
        return held is None or position in held.stops or position % held.interval == 0

    def max_chunk_tokens(self, request: Request, num_computed: int) -> int:
        """Return how many tokens the chunk after ``num_computed`` tokens may have: up to the next checkpoint position.

        Without checkpoints, the result is ``request.num_tokens``, which limits nothing.
        """
        if not self._keeps_checkpoints:
            return request.num_tokens
        held = self._held.get(request.request_id)
        stops, interval = (held.stops, held.interval) if held is not None else ((), self.interval)
        interval_end = num_computed - num_computed % interval + interval
        return min([interval_end, *(stop for stop in stops if stop > num_computed)]) - num_computed

    def plan_whole_prompt(self, request: Request, num_computed: int) -> int:
        """Plan a whole prompt, because no prefill slot is free. Return how many tokens to compute in this step.

        The step computes the tokens up to the last checkpoint position of the prompt, or all remaining tokens if that
        position is computed already. The few tokens after the position follow in the next step, and do not occupy a
        prefill slot. Later calls of :meth:`request_checkpoint` have no effect on the prompt.
        """
        held = self._held.get(request.request_id)
        if held is None or not self._keeps_checkpoints:
            return request.num_tokens - num_computed
        held.is_prompt_scheduled_whole = True
        last = max(held.stops, default=0)
        return (last if num_computed < last < request.num_tokens else request.num_tokens) - num_computed

    def is_prompt_scheduled_whole(self, request: Request) -> bool:
        """Return True if :meth:`plan_whole_prompt` has planned the prompt, which then occupies no prefill slot."""
        held = self._held.get(request.request_id)
        return held is not None and held.is_prompt_scheduled_whole

    def plan(self, plan: SchedulerOutput, request: Request) -> None:
        """Prepare a request's states for its next step. Called before the step's tokens count as computed.

        If the current state is to become a checkpoint, it stays in its slot, and ``plan.new_state_slots`` gets another
        slot for the request. If no spare slot is available, the step overwrites the state, and no checkpoint remains.
        """
        held = self._held.get(request.request_id)
        if held is None:
            return
        assert not held.has_drafts, f"{request.request_id} is planned again before the result of its drafts is recorded"
        held.is_recomputing = (
            held.is_rejected or held.is_recomputing
        ) and request.num_tokens > request.num_computed_tokens + 1
        if held.is_rejected:  # resume from the state before the drafts, and write to the other slot
            held.is_rejected, held.source = False, held.before
            return
        self._release_before(held)
        held.source = held.slot if held.is_written else None
        if not self._is_kept(held, request):
            held.is_written = True
            return
        num_blocks = request.num_computed_tokens // self._block_size
        if not self._has_spare:  # remaining slots are reserved for requests: overwrite the state in place
            self.slots.drop_checkpoint_in(held.slot)
            self._saves.pop(held.slot, None)
            return
        new_slot = self._take()
        held.unpublished.append((num_blocks, held.slot))
        held.kept_at = request.num_computed_tokens
        held.slot = plan.new_state_slots[request.request_id] = new_slot

    @property
    def _has_spare(self) -> bool:
        """True if :attr:`num_spare` is at least 1."""
        return self.num_spare > 0

    # --- drafts ---

    def keep_for_drafts(self, plan: SchedulerOutput, request: Request) -> bool:
        """Keep the initial state of a planned step, because drafts will be added to the step.

        Changes ``plan.new_state_slots`` if the state needs another slot. Returns False if the state cannot be kept: no
        spare slot is available, or the request does not hold the slot of the initial state.
        """
        held = self._held.get(request.request_id)
        if held is None:
            return True
        if held.source is None or (held.source == held.slot and not self._has_spare):
            return False
        if held.source == held.slot:
            held.slot = plan.new_state_slots[request.request_id] = self._take()
        held.before, held.has_drafts = held.source, True
        return True

    @property
    def num_spare(self) -> int:
        """Number of available slots beyond those reserved for requests that may still be admitted."""
        return self.slots.num_available - (self._max_num_seqs - len(self._held))

    def may_keep_for_drafts(self, request: Request, num_spare: int) -> bool:
        """Return True if the next step of a running request may have drafts, given ``num_spare`` spare slots."""
        held = self._held.get(request.request_id)
        if held is None or held.is_rejected:
            return True
        return held.is_written and (num_spare > 0 or held.before not in (None, *(slot for _, slot in held.unpublished)))

    def record_draft_result(self, request: Request, *, is_rejected: bool) -> None:
        """Record the result of a running request's drafts.

        Args:
            is_rejected: True if at least one draft was rejected. The next step then starts from the kept state.
        """
        held = self._held.get(request.request_id)
        if held is not None:
            held.has_drafts, held.is_rejected = False, is_rejected
            if not is_rejected:
                self._release_before(held)

    def _release_before(self, held: _Held) -> None:
        before, held.before = held.before, None
        if before is not None and before not in held.slots:
            self.slots.give_back(before)

    def may_go_back(self, request: Request) -> bool:
        """Return True if the request has drafts in flight, so that it may have to recompute tokens."""
        held = self._held.get(request.request_id)
        return held is not None and held.has_drafts

    def is_rejected(self, request: Request) -> bool:
        """Return True if a draft was rejected, or if the last planned step recomputes accepted drafts.

        If such a request has several tokens left to compute, it recomputes accepted drafts, and is not a prefill.
        """
        held = self._held.get(request.request_id)
        return held is not None and (held.is_rejected or held.is_recomputing)

    def recomputes_drafts(self, request: Request) -> bool:
        """Return True if the step just planned starts from the state before drafts, to recompute accepted drafts."""
        held = self._held.get(request.request_id)
        return held is not None and held.before is not None

    def max_drafts(self, request: Request, num_computed: int) -> int:
        """Return how many drafts may follow the first ``num_computed`` tokens, which are planned.

        If the request's last checkpoint is ``DRAFTS_INTERVAL`` tokens back, the drafts may only fill the current block,
        so that the step ends at a block boundary. Otherwise the result is ``request.max_tokens``, which limits nothing.
        """
        held = self._held.get(request.request_id)
        if held is None or not self._keeps_checkpoints:
            return request.max_tokens
        is_far = num_computed - max(held.kept_at, request.num_prompt_tokens) >= DRAFTS_INTERVAL
        return -num_computed % self._block_size if is_far else request.max_tokens

    # --- checkpoints ---

    def _is_kept(self, held: _Held, request: Request) -> bool:
        """Return True if the state that the last planned step of the request writes is to become a state checkpoint."""
        computed = request.num_computed_tokens
        if not (self._keeps_checkpoints and held.is_written) or computed % self._block_size:
            return False
        if held.has_drafts or held.is_rejected:
            return False  # the state includes, or may include, rejected drafts
        is_stop = computed in held.stops or computed % held.interval == 0
        return is_stop or computed > request.num_prompt_tokens

    def publish(self, request: Request) -> None:
        """Add state checkpoints for the request's states at block boundaries, as far as its blocks are registered."""
        held = self._held.get(request.request_id)
        if held is None:
            return
        known = request.num_registered_blocks
        while held.unpublished and held.unpublished[0][0] <= known:
            num_blocks, slot = held.unpublished[0]
            self._add(held, request, num_blocks, slot)
            if slot == held.before:
                break  # the request may have to resume from it
            del held.unpublished[0]
            self.slots.give_back(slot)
        num_blocks = request.num_computed_tokens // self._block_size
        if num_blocks <= known and self._is_kept(held, request):
            self._add(held, request, num_blocks, held.slot)

    def _add(self, held: _Held, request: Request, num_blocks: int, slot: int) -> None:
        block_hash = request.block_hashes[num_blocks - 1]
        is_new = not self.slots.has_checkpoint(block_hash)
        if not self.slots.add_checkpoint(block_hash, slot):
            return
        position = num_blocks * self._block_size
        if position <= request.num_prompt_tokens:
            if is_new and num_blocks != held.loaded_blocks:
                self._save(slot, block_hash)
            if position in held.stops:
                held.latest = block_hash
            elif is_new:
                held.spaced[position] = block_hash
                self._thin(held)
            return
        if held.rolling not in (None, block_hash):
            assert held.rolling is not None
            self.slots.drop_checkpoint(held.rolling, unless_hit=True)
        held.rolling = block_hash
        # The prompt's checkpoint must outlive `rolling`: the next turn may lack the reasoning, and so match only the
        # prompt.
        self.slots.touch(held.latest)

    def _thin(self, held: _Held) -> None:
        """Drop every second periodic checkpoint if a prompt has too many. Checkpoints that had a hit stay."""
        while len(held.spaced) > self._max_spaced:
            held.interval *= 2
            for position in [position for position in held.spaced if position % held.interval]:
                self.slots.drop_checkpoint(held.spaced.pop(position), unless_hit=True)

    def release(self, request: Request) -> None:
        """Release a request's slots, but keep its state checkpoints.

        With KV transfer, the last checkpoint in the request's output will be saved to the store.
        """
        held = self._held.pop(request.request_id, None)
        if held is not None:
            if held.rolling is not None and self.slots.has_checkpoint(held.rolling):
                self._save(self.slots.slot_of(held.rolling), held.rolling)
            for slot in held.slots:
                self.slots.give_back(slot)

    def _save(self, slot: int, block_hash: bytes) -> None:
        if self._connector is not None:
            self._saves[slot] = block_hash

    def take_saves(self) -> list[tuple[bytes, int]]:
        """Return the states that the plan just made has to save to the store. Each state is returned once.

        Returns:
            (hash of the last block of the state's prefix, slot) for each state.
        """
        saves, self._saves = self._saves, {}
        # Excludes checkpoints that were dropped since, for example after a failed step.
        return [
            (h, slot) for slot, h in saves.items() if self.slots.has_checkpoint(h) and self.slots.slot_of(h) == slot
        ]

    def check_integrity(self, running: set[str]) -> None:
        """Assert the invariants that hold between steps; for tests and debugging."""
        assert not self.is_used or self._held.keys() == running
        self.slots.check_integrity([slot for held in self._held.values() for slot in held.slots])
