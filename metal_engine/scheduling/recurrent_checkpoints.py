"""Which state each running request goes on from and leaves, and which of them are kept as checkpoints.

Checkpoints are taken at the ends of whole blocks, where prefixes are cached:

- before the last tokens of a prompt, for the next turn of a conversation and for a request that comes again;
- after long instructions, for other conversations with the same;
- where the prompt leaves a prefix that is cached already, without a checkpoint: others will leave it there, too;
- where a request that waits for this one's beginning leaves it;
- every ``CHECKPOINT_INTERVAL`` tokens of a long prompt, and farther apart where that would be more than its share;
- while an answer is decoded, after its last whole block: the one before is given up for it, as the end is not known.

Chunks are cut at these places (:meth:`RequestStates.room`), since only the end of a chunk leaves a state behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import Request
from metal_engine.scheduling.state_slots import StateSlots
from metal_engine.settings.config import CacheConfig
from metal_engine.step import SchedulerOutput

# Tokens. A request that shares less than this with one before computes at most so many of them again.
CHECKPOINT_INTERVAL = 1024
# Tokens. Steps with drafts go past the ends of blocks. So far after the last checkpoint of an answer, one stops there.
DRAFTS_INTERVAL = 64
# Tokens. Shorter instructions are computed again by the second conversation that has them: a step more for each new
# prompt would take longer.
MIN_INSTRUCTIONS = 256


@dataclass(slots=True)
class _Held:
    """What a running request holds.

    Attributes:
        slot: of its state, from the next step on.
        stops: prompt positions at which a checkpoint is wanted, beside those of the interval.
        left: (blocks, slot) of states that it has left behind and whose blocks' hashes are not known yet.
        interval: tokens between the checkpoints of its prompt that nobody has asked for.
        spaced: those: position -> hash.
        is_prompt_scheduled_whole: whether all of its prompt but what follows its last checkpoint was planned at once.
        latest: hash of the checkpoint that its prompt has left at the last place wanted.
        rolling: hash of the checkpoint in its answer.
        is_written: whether there is a state in the slot: one that a planned step leaves, or a loaded one.
        loaded_blocks: after how many blocks the state that came from a store follows; 0 for none.
        source: slot that the step planned last goes on from, if the request holds it.
        before: slot of the state from before drafts; held as long as the request may go on from there again.
        has_drafts: whether a step is under way that leaves in ``slot`` a state in which drafts may be rejected.
        is_rejected: whether drafts were: what is in ``slot`` is void, and the next step goes on from ``before``.
        is_again: whether the step planned last computes accepted drafts again; all of them, or as many as fit into it.
        kept_at: tokens after which the request has last left a state behind.
    """

    slot: int
    interval: int
    is_written: bool = False
    is_prompt_scheduled_whole: bool = False
    stops: tuple[int, ...] = ()
    left: list[tuple[int, int]] = field(default_factory=list)
    spaced: dict[int, bytes] = field(default_factory=dict)
    latest: bytes = b""
    rolling: bytes | None = None
    loaded_blocks: int = 0
    source: int | None = None
    before: int | None = None
    has_drafts: bool = False
    is_rejected: bool = False
    is_again: bool = False
    kept_at: int = 0

    @property
    def slots(self) -> list[int]:
        """All slots that the request holds."""
        left = [slot for _, slot in self.left]
        before = [] if self.before is None or self.before in left else [self.before]
        return [self.slot, *left, *before]


class RequestStates:
    """Recurrent states of running requests; does nothing for models without.

    Args:
        slots: the pool's, one for each of ``max_num_seqs`` at least: a request is never refused for lack of one.
        config: tokens per block, and whether prefixes are cached.
        max_num_seqs: requests that may run at once.
        connector: takes states to a store, and has some from there; None without KV transfer.

    Attributes:
        interval: ``CHECKPOINT_INTERVAL`` in whole blocks, in tokens.
    """

    def __init__(
        self, slots: StateSlots, config: CacheConfig, max_num_seqs: int, connector: KVConnectorScheduler | None = None
    ) -> None:
        self.slots = slots
        self._connector = connector
        # States to save with the next plan: slot -> hash. One whose slot is written again before is not saved.
        self._saves: dict[int, bytes] = {}
        # Checkpoints that requests admitted to the step being planned go on from: their slots.
        self._read: set[int] = set()
        self._max_num_seqs = max_num_seqs
        self.is_used = slots.num_slots > 0
        self._block_size = config.block_size
        self._keeps_checkpoints = config.enable_prefix_caching and self.is_used
        self.interval = max(1, CHECKPOINT_INTERVAL // config.block_size) * config.block_size
        # Of one prompt, beside those with a purpose: it must not push out all other conversations'.
        self._max_spaced = max(1, (slots.num_slots - max_num_seqs) // 4)
        self._held: dict[str, _Held] = {}

    def begin_step(self) -> None:
        """A step is being planned."""
        self._read.clear()

    def can_admit(self, request: Request, num_cached: int) -> bool:
        """Whether a request with so many cached tokens can have a slot in the step being planned.

        It cannot if its state comes from a store, and the only slot is that of a checkpoint which another request goes
        on from: states are loaded before a step reads any. The next step can have it.
        """
        block_hash = self._last_hash(request, num_cached)
        is_loaded = self.is_used and block_hash and not self.slots.has_checkpoint(block_hash)
        return not is_loaded or self.slots.next_slot not in self._read

    def _last_hash(self, request: Request, num_tokens: int) -> bytes:
        num_blocks = num_tokens // self._block_size
        return request.block_hashes[num_blocks - 1] if num_blocks else b""

    def admit(self, request: Request, num_cached: int, num_shared: int) -> tuple[int, int]:
        """Give a request that is admitted a slot.

        Args:
            num_cached: tokens that it need not compute: up to a checkpoint.
            num_shared: tokens of it that are cached, with a checkpoint or without.

        Returns:
            The slots that its first step reads from (0: it begins with nothing) and writes to.
        """
        if not self.is_used:
            return 0, 0
        num_blocks = num_cached // self._block_size
        block_hash = self._last_hash(request, num_cached)
        is_here = self.slots.has_checkpoint(block_hash)
        # First, so that taking a slot does not evict it, if there is another. It may be the same: a step reads first.
        read = self.slots.hit(block_hash) if is_here else 0
        self._read.add(read)
        if is_here and request.options.do_remote_decode:
            self._save(read, block_hash)  # somebody waits for it
        slot = self._take()
        held = self._held[request.request_id] = _Held(slot, self.interval, stops=self._stops(request, num_shared))
        if num_blocks and not is_here:  # it came from a store, and stays as a checkpoint
            assert self._connector is not None
            self._connector.load_state(request, slot)
            read, held.is_written, held.loaded_blocks = slot, True, num_blocks
            held.stops = (*held.stops, num_cached)
        return read, slot

    def _take(self) -> int:
        slot = self.slots.take()
        self._saves.pop(slot, None)
        return slot

    def _stops(self, request: Request, num_shared: int) -> tuple[int, ...]:
        if not self._keeps_checkpoints:
            return ()
        # One token at least is left to compute, and to a request that comes again.
        ends = [min(request.num_lasting_tokens, request.num_tokens - 1), num_shared]
        if request.num_instruction_tokens >= MIN_INSTRUCTIONS:
            ends.append(min(request.num_instruction_tokens, request.num_tokens - 1))
        return tuple({end - end % self._block_size for end in ends})

    def want(self, request: Request, position: int) -> None:
        """Have a running request leave a checkpoint on its way: another waits for the prefix that both have."""
        held = self._held.get(request.request_id)
        if held is not None and self._keeps_checkpoints and not held.is_prompt_scheduled_whole:
            held.stops = (*held.stops, position)
            held.spaced.pop(position, None)

    def leaves_state_at(self, request: Request, position: int) -> bool:
        """Whether a running request leaves a checkpoint there on its way, or none is needed."""
        held = self._held.get(request.request_id)
        return held is None or position in held.stops or position % held.interval == 0

    def room(self, request: Request, num_computed: int) -> int:
        """Tokens that may follow ``num_computed`` in one chunk: up to the next place of a checkpoint."""
        if not self._keeps_checkpoints:
            return request.num_tokens
        held = self._held.get(request.request_id)
        stops, interval = (held.stops, held.interval) if held is not None else ((), self.interval)
        interval_end = num_computed - num_computed % interval + interval
        return min([interval_end, *(stop for stop in stops if stop > num_computed)]) - num_computed

    def take_at_once(self, request: Request, num_computed: int) -> int:
        """Have a prompt planned at once, for want of a slot; returns the tokens up to its last checkpoint.

        What comes after it is as good as nothing, and takes no slot in the next step. Nobody may want another
        checkpoint there.
        """
        held = self._held.get(request.request_id)
        if held is None or not self._keeps_checkpoints:
            return request.num_tokens - num_computed
        held.is_prompt_scheduled_whole = True
        last = max(held.stops, default=0)
        return (last if num_computed < last < request.num_tokens else request.num_tokens) - num_computed

    def is_prompt_scheduled_whole(self, request: Request) -> bool:
        """Whether a running request was planned at once, so that its prompt takes no slot."""
        held = self._held.get(request.request_id)
        return held is not None and held.is_prompt_scheduled_whole

    def plan(self, plan: SchedulerOutput, request: Request) -> None:
        """Called when a step is to go on with a request, before its tokens are counted as computed."""
        held = self._held.get(request.request_id)
        if held is None:
            return
        assert not held.has_drafts, f"{request.request_id} goes on before its drafts are settled"
        held.is_again = (held.is_rejected or held.is_again) and request.num_tokens > request.num_computed_tokens + 1
        if held.is_rejected:  # back to where its drafts began, and on from there into the other slot
            held.is_rejected, held.source = False, held.before
            return
        self._let_go_of_before(held)
        held.source = held.slot if held.is_written else None
        if not self._is_kept(held, request):
            held.is_written = True
            return
        num_blocks = request.num_computed_tokens // self._block_size
        if not self._has_spare:  # left for requests: it goes on in place
            self.slots.drop_checkpoint_in(held.slot)
            self._saves.pop(held.slot, None)
            return
        new_slot = self._take()
        held.left.append((num_blocks, held.slot))
        held.kept_at = request.num_computed_tokens
        held.slot = plan.new_state_slots[request.request_id] = new_slot

    @property
    def _has_spare(self) -> bool:
        """Whether a slot can be had that no request needs to run."""
        return self.num_spare > 0

    # --- drafts ---

    def keep_for_drafts(self, plan: SchedulerOutput, request: Request) -> bool:
        """Keep the state that a planned step goes on from, since drafts are to be added to it.

        Returns False if that cannot be: no slot is to be had, or the request does not hold the one that it reads.
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
        """Slots that can be had and that no request needs to run."""
        return self.slots.num_available - (self._max_num_seqs - len(self._held))

    def may_keep_for_drafts(self, request: Request, num_spare: int) -> bool:
        """Whether a running request's next step may have drafts, as it stands, with so many slots to spare."""
        held = self._held.get(request.request_id)
        if held is None or held.is_rejected:
            return True
        return held.is_written and (num_spare > 0 or held.before not in (None, *(slot for _, slot in held.left)))

    def settle_drafts(self, request: Request, *, is_rejected: bool) -> None:
        """Called when the drafts of a running request are settled: whether one of them at least was rejected."""
        held = self._held.get(request.request_id)
        if held is not None:
            held.has_drafts, held.is_rejected = False, is_rejected
            if not is_rejected:
                self._let_go_of_before(held)

    def _let_go_of_before(self, held: _Held) -> None:
        before, held.before = held.before, None
        if before is not None and before not in held.slots:
            self.slots.give_back(before)

    def may_go_back(self, request: Request) -> bool:
        """Whether drafts of a request are under way, so that what it has computed since may have to be again."""
        held = self._held.get(request.request_id)
        return held is not None and held.has_drafts

    def is_rejected(self, request: Request) -> bool:
        """Whether a request's next step computes accepted drafts again, from the state before them, or the rest."""
        held = self._held.get(request.request_id)
        return held is not None and (held.is_rejected or held.is_again)

    def recomputes_drafts(self, request: Request) -> bool:
        """Whether the step just planned does so."""
        held = self._held.get(request.request_id)
        return held is not None and held.before is not None

    def draft_room(self, request: Request, num_computed: int) -> int:
        """Returns how many drafts may follow so many tokens of a request, which are planned, or are with them.

        Fewer than any where the last state that it has left is far behind: the step is to end where a block does.
        """
        held = self._held.get(request.request_id)
        if held is None or not self._keeps_checkpoints:
            return request.max_tokens
        is_far = num_computed - max(held.kept_at, request.num_prompt_tokens) >= DRAFTS_INTERVAL
        return -num_computed % self._block_size if is_far else request.max_tokens

    # --- checkpoints ---

    def _is_kept(self, held: _Held, request: Request) -> bool:
        """Whether a request's state, as the last step has left it, is to be a checkpoint."""
        computed = request.num_computed_tokens
        if not (self._keeps_checkpoints and held.is_written) or computed % self._block_size:
            return False
        if held.has_drafts or held.is_rejected:
            return False  # the state is not, or may not be, that of the request's tokens
        is_stop = computed in held.stops or computed % held.interval == 0
        return is_stop or computed > request.num_prompt_tokens

    def publish(self, request: Request) -> None:
        """Make checkpoints of what a request has left behind at ends of blocks whose hashes are known by now."""
        held = self._held.get(request.request_id)
        if held is None:
            return
        known = request.num_registered_blocks
        while held.left and held.left[0][0] <= known:
            num_blocks, slot = held.left[0]
            self._add(held, request, num_blocks, slot)
            if slot == held.before:
                break  # it may go on from there again
            del held.left[0]
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
        self.slots.touch(held.latest)  # it outlives this one: with the reasoning stripped, only the prompt's hits

    def _thin(self, held: _Held) -> None:
        """Give up every second checkpoint of a prompt that has more than its share, unless somebody has used it."""
        while len(held.spaced) > self._max_spaced:
            held.interval *= 2
            for position in [position for position in held.spaced if position % held.interval]:
                self.slots.drop_checkpoint(held.spaced.pop(position), unless_hit=True)

    def release(self, request: Request) -> None:
        """Let go of a request's states; its checkpoints stay. The last one in its answer is saved."""
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
        """Returns the states to save with the plan just made: hashes of the blocks that they follow, and slots."""
        saves, self._saves = self._saves, {}
        # Not those that were forgotten since, after a step that failed.
        return [
            (h, slot) for slot, h in saves.items() if self.slots.has_checkpoint(h) and self.slots.slot_of(h) == slot
        ]

    def check_integrity(self, running: set[str]) -> None:
        """Assert every invariant between steps; for tests and debugging."""
        assert not self.is_used or self._held.keys() == running
        self.slots.check_integrity([slot for held in self._held.values() for slot in held.slots])
