"""Runner without a model whose tokens reveal errors in a plan.

Each slot of its KV cache holds a number that depends on the token written there, on the token's position, and on the
*contents* of all earlier slots, read through the plan's block table. A sampled token is a digest of all slots of its
sequence. A wrong block, slot, position, order, count or token therefore changes the next tokens of the request. Correct
tokens have a closed form: :func:`expected_tokens`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metal_engine.kv_transfer.layout import state_key
from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import PromptImages
from metal_engine.request import MAX_FAILURES, Request, RequestOptions, RequestOutput, RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.token_allotment import check_fits
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import (
    UNKNOWN_DRAFT,
    Drafting,
    KVConnectorMetadata,
    ModelOutput,
    RunnerLostError,
    SchedulerOutput,
)
from metal_engine.token_rules import NO_RULES, TokenRules
from tests.support.fake_kv_transfer import FakeTransfer
from tests.support.scheduling_checks import (
    check_drafts,
    check_fcfs,
    check_plan,
    demand_of,
    is_plain,
    max_steps,
    was_passed_over,
    without_drafts,
)
from tests.support.speculation import Drafter, FreeDrafts, KnownAheadTimes, KnownTimes, speculate

# Large, so that a wrong token hardly ever equals the right token by chance.
VOCAB_SIZE = 1 << 30

_MASK64 = (1 << 64) - 1
_MAX_LEN = 1 << 15
# Contents of a slot that is not written, or is being written by a step in flight.
_POISON = 0xDEAD_BEEF_DEAD_BEEF


def _mix(z: int) -> int:
    """Return SplitMix64's output function: 64 bits in, 64 well-mixed bits out."""
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


# A digest is the sum of weight[position] * value over positions, modulo 2**64. NumPy computes it in one expression, and
# a token extends it easily. Odd weights preserve every bit of a value.
_WEIGHTS = [_mix(position + 1) | 1 for position in range(_MAX_LEN)]
_WEIGHTS_ARRAY = np.array(_WEIGHTS, np.uint64)


def _kv(token_id: int, position: int, context_digest: int) -> int:
    return _mix(token_id * 0x9E3779B97F4A7C15 + position + _mix(context_digest))


def _sampled(digest: int) -> int:
    return _mix(digest) % VOCAB_SIZE


def make_prompt(seed: int, length: int) -> list[int]:
    """Return a prompt. Two prompts with the same seed share a prefix of the shorter length."""
    return [_mix(seed * 1_000_003 + position) % VOCAB_SIZE for position in range(length)]


def fake_feature(content_hash: bytes, index: int) -> int:
    """Return the token id that stands for a feature of an image."""
    return _mix(int.from_bytes(content_hash[:8]) + index) % VOCAB_SIZE


def seen_prompt(prompt: list[int], images: PromptImages | None) -> list[int]:
    """Return a prompt with the features of its images in the place of their tokens."""
    seen = list(prompt)
    for image in () if images is None else images.images:
        for index, position in enumerate(image.positions.tolist()):
            seen[position] = fake_feature(image.content_hash, index)
    return seen


def expected_tokens(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """Return the tokens that a request generates when it runs alone, by the closed form."""
    digest = position = 0
    for token_id in prompt:
        digest = (digest + _WEIGHTS[position] * _kv(token_id, position, digest)) & _MASK64
        position += 1
    outputs = []
    for _ in range(num_tokens):
        token_id = _sampled(digest)
        outputs.append(token_id)
        digest = (digest + _WEIGHTS[position] * _kv(token_id, position, digest)) & _MASK64
        position += 1
    return outputs


@dataclass
class _Held:
    """State that the runner stores for a request."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    has_grammar: bool
    pooling_params: PoolingParams | None
    state_slots: tuple[int, int] = (0, 0)  # slot read by the next step, slot written by it
    drafts: list[int] = field(default_factory=list)  # drafts of the step in flight
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [blocks * block_size]
    features: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # image and index of the feature, by position
    inseparable: list[tuple[int, int]] = field(default_factory=list)  # positions of images that no chunk may cut


@dataclass
class FakeStep:
    """Step in flight. Its work is already done: steps execute in the order of dispatch, as on a device."""

    output: ModelOutput

    def result(self) -> ModelOutput:
        return self.output


class FakeKVRunner:
    """Executes plans and asserts that they keep the promises of ``step.py``.

    A sampled token joins the runner's own copy of the sequence immediately, so that the next plan can use it as a
    placeholder before the scheduler receives it.

    Attributes:
        draft_model: produces the drafts that plans leave to a draft model.
        num_late: number of samples of requests with grammars that the next steps skip, because their masks are late.
    """

    def __init__(
        self, cache_config: CacheConfig, max_num_seqs: int, save: Callable[[bytes, np.ndarray], None] | None = None
    ) -> None:
        self.save = save  # receives the blocks that a plan saves
        self.block_size = cache_config.block_size
        self.num_blocks = cache_config.num_blocks
        self.max_num_seqs = max_num_seqs
        self.kv = np.full(cache_config.num_tokens, _POISON, np.uint64)  # [slots]
        # Digests of all earlier tokens. A new request reads slot 0.
        self.states = [0] + [_POISON] * cache_config.num_state_slots
        self.held: dict[str, _Held] = {}
        # block id -> number of stored requests whose table contains the block
        self.num_holders: Counter[int] = Counter()
        self.num_steps = 0
        self.last_step_id = -1
        self.num_late = 0
        self.draft_model: SomeRightDraftModel | None = None
        self.features: dict[bytes, list[int]] = {}  # kept features by content hash

    @property
    def replay_refusal(self) -> None:
        """Reason why decode steps cannot be replayed: always None."""

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Ignore the callback, because the engine has one rank."""

    def close(self) -> None:
        """Do nothing: this runner holds no resources."""

    def dispatch_second_part(self) -> None:
        """Do nothing: a step is dispatched whole."""

    def release_cache(self) -> bool:
        """Return False: there is no cache."""
        return False

    def execute(self, plan: SchedulerOutput) -> FakeStep:
        drafting = None if self.draft_model is None else self.draft_model.draft(plan)
        if drafting is not None:
            plan = plan.with_drafts(drafting)
        self._update_requests(plan)
        for content_hash in plan.images_to_drop:
            self.features.pop(content_hash, None)
        for image in plan.images_to_encode:
            assert image.content_hash not in self.features, "an image is encoded twice"
            features = [fake_feature(image.content_hash, i) for i in range(image.num_features)]
            self.features[image.content_hash] = features
        meta = plan.kv_connector_metadata or KVConnectorMetadata()
        for block_id, data in meta.loads.items():
            assert self.num_holders[block_id] == 1, f"block {block_id} is loaded into, and shared or free"
            self.kv[self._slots_of(block_id)] = data.view(np.uint64)
        for slot, data in meta.state_loads.items():
            self.states[slot] = int(data.view(np.uint64)[0])
        ranges, reads = {}, {}
        for request_id, share in plan.num_scheduled_tokens.items():
            held = self.held[request_id]
            start, stop = held.num_computed_tokens, held.num_computed_tokens + share
            for edge in (start, stop):
                assert not any(a < edge < b for a, b in held.inseparable), (
                    "a chunk cuts an image with bidirectional attention"
                )
            num_known = len(held.token_ids) + len(held.drafts)
            assert share >= 1, f"{request_id}: share {share}"
            assert stop <= num_known, f"{request_id}: tokens up to {stop} of {num_known}"
            assert stop == num_known or not held.drafts, f"{request_id}: drafts that are not computed"
            assert stop <= len(held.slots), f"{request_id}: tokens up to {stop}, slots for {len(held.slots)}"
            ranges[request_id], reads[request_id] = (start, stop), held.state_slots[0]
            for block_id in held.block_ids[start // self.block_size : -(-stop // self.block_size)]:
                assert self.num_holders[block_id] == 1, f"{request_id} writes to block {block_id}, which is shared"
                assert block_id not in meta.loads, f"block {block_id} is loaded and computed"
        done = [r for r, (_, stop) in ranges.items() if stop >= len(self.held[r].token_ids)]
        to_pool = {r for r in done if self.held[r].pooling_params is not None}
        assert plan.sampled_req_ids == [r for r in done if r not in to_pool], (
            "sampled_req_ids are not the requests whose last token is in the step, in packing order"
        )
        assert plan.pooled_req_ids == [r for r in done if r in to_pool], (
            "pooled_req_ids are not the requests to pool whose last token is in the step, in packing order"
        )

        # As in a layer, all writes of the step come before its reads. Slots to be written are poisoned first, so that a
        # request that reads another request's slot sees neither old nor new contents.
        written = [self.held[r].slots[start:stop] for r, (start, stop) in ranges.items()]
        all_written = np.concatenate(written) if written else np.zeros(0, np.int64)
        assert len(np.unique(all_written)) == len(all_written), "two tokens of a step share a slot"
        self.kv[all_written] = _POISON
        self._check_state_slots(ranges)
        digests = {r: self._digest(self.held[r], start) for r, (start, _) in ranges.items()}
        values = [self._forward(self.held[r], *ranges[r], digest) for r, digest in digests.items()]
        for slots, value in zip(written, values, strict=True):
            self.kv[slots] = value
        if len(self.states) > 1:
            after = {r: self._kv_digest(self.held[r], stop) for r, (_, stop) in ranges.items()}
            for request_id, digest in after.items():
                slot = self.held[request_id].state_slots[1]
                self.states[slot] = digest
                self.held[request_id].state_slots = (slot, slot)

        for block_hash, block_id in meta.saves:
            self.save(block_hash, self.kv[self._slots_of(block_id)].view(np.uint8).copy())
        for block_hash, slot in meta.state_saves:
            self.save(state_key(block_hash), np.array([self.states[slot]], np.uint64).view(np.uint8))

        output = ModelOutput([], drafting=drafting)
        for request_id, (start, stop) in ranges.items():
            held = self.held[request_id]
            held.num_computed_tokens = stop
            if stop < len(held.token_ids):
                continue
            if held.pooling_params is not None:
                output.pooled[request_id] = np.array([_sampled(self._digest(held, stop))])
                continue
            is_late = held.has_grammar and self.num_late > 0
            if held.drafts or (drafting is not None and request_id in drafting.token_ids):
                output.num_accepted_tokens[request_id] = self._verify_drafts(request_id, none=is_late)
            # Digest of all rows that are not void, as this step has written them.
            output.sampled_token_ids.append(_sampled(self._kv_digest(held, len(held.token_ids))))
            if len(self.states) > 1 and len(held.token_ids) < stop:  # the state has advanced too far
                held.num_computed_tokens, held.state_slots = start, (reads[request_id], held.state_slots[1])
            if is_late:
                self.num_late -= 1
                held.num_computed_tokens -= 1
                output.late_req_ids.add(request_id)
            else:
                held.token_ids.append(output.sampled_token_ids[-1])
        self.num_steps += 1
        return FakeStep(output)

    def _verify_drafts(self, request_id: str, *, none: bool) -> int:
        """Turn the drafts that equal the sampled tokens into tokens of the request. Return their number."""
        held = self.held[request_id]
        drafts, held.drafts = held.drafts, []
        num_known, num_accepted = len(held.token_ids), 0
        while not none and num_accepted < len(drafts):
            if _sampled(self._kv_digest(held, num_known + num_accepted)) != drafts[num_accepted]:
                break
            num_accepted += 1
        held.token_ids += drafts[:num_accepted]
        held.num_computed_tokens = len(held.token_ids)
        num_blocks = -(-len(held.token_ids) // self.block_size)
        self.num_holders.subtract(held.block_ids[num_blocks:])
        del held.block_ids[num_blocks:]
        self._append_blocks(request_id, [])
        return num_accepted

    def _check_state_slots(self, ranges: dict[str, tuple[int, int]]) -> None:
        if len(self.states) == 1:
            return
        written = [self.held[r].state_slots[1] for r in ranges]
        assert len(set(written)) == len(written) and min(written, default=1) > 0, f"states are written to {written}"
        for request_id, (start, _) in ranges.items():
            read = self.held[request_id].state_slots[0]
            assert (read == 0) == (start == 0), f"{request_id} goes on at {start} from slot {read}"

    def _slots_of(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _update_requests(self, plan: SchedulerOutput) -> None:
        assert plan.step_id > self.last_step_id
        self.last_step_id = plan.step_id
        for request_id in plan.dropped_req_ids:
            assert request_id in self.held, f"told to drop {request_id}, which is not held"
            self.num_holders.subtract(self.held.pop(request_id).block_ids)
        for new in plan.new_requests:
            assert new.request_id not in self.held, f"{new.request_id} is new, but was never dropped"
            assert new.request_id in plan.num_scheduled_tokens, f"{new.request_id} is new, but has no share"
            assert 0 < new.num_prompt_tokens <= len(new.token_ids)
            assert 0 <= new.num_computed_tokens < len(new.token_ids), "at least one token must be computed"
            pooling = new.pooling_params
            if pooling is not None and pooling.needs_every_token:
                assert not new.num_computed_tokens, "a prompt of which every token counts begins with a cached prefix"
            has_grammar = new.rules.grammar is not None
            token_ids, num_computed = list(new.token_ids), new.num_computed_tokens
            held = _Held(token_ids, [], num_computed, has_grammar, pooling, new.state_slots)
            for image in () if new.images is None else new.images.images:
                held.features |= {p: (image.content_hash, i) for i, p in enumerate(image.positions.tolist())}
                if image.bidirectional_layers:
                    held.inseparable.append((image.start, image.stop))
            self.held[new.request_id] = held
            self._append_blocks(new.request_id, new.block_ids)
        for request_id, block_ids in plan.new_block_ids.items():
            assert block_ids and request_id in plan.num_scheduled_tokens
            self._append_blocks(request_id, block_ids)
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            assert drafts and request_id in plan.sampled_req_ids
            self.held[request_id].drafts = list(drafts)
        for request_id, slot in plan.new_state_slots.items():
            assert request_id in plan.num_scheduled_tokens
            self.held[request_id].state_slots = (self.held[request_id].state_slots[0], slot)
        assert len(self.held) <= self.max_num_seqs, f"{len(self.held)} requests held"

    def _append_blocks(self, request_id: str, block_ids: list[int]) -> None:
        held = self.held[request_id]
        assert all(0 <= block_id < self.num_blocks for block_id in block_ids), f"{request_id}: {block_ids}"
        held.block_ids += block_ids
        self.num_holders.update(block_ids)
        blocks = np.array(held.block_ids, np.int64)
        held.slots = (blocks[:, None] * self.block_size + np.arange(self.block_size)).ravel()

    def _digest(self, held: _Held, num_tokens: int) -> int:
        """Return the digest of all earlier tokens, from the recurrent state if there is one, or from the blocks."""
        return self.states[held.state_slots[0]] if len(self.states) > 1 else self._kv_digest(held, num_tokens)

    def _kv_digest(self, held: _Held, num_tokens: int) -> int:
        return int((self.kv[held.slots[:num_tokens]] * _WEIGHTS_ARRAY[:num_tokens]).sum(dtype=np.uint64))

    def _forward(self, held: _Held, start: int, stop: int, digest: int) -> list[int]:
        values = []
        token_ids = held.token_ids + held.drafts if held.drafts else held.token_ids
        for position in range(start, stop):
            token_id = token_ids[position]
            if position in held.features:
                content_hash, index = held.features[position]
                token_id = self.features[content_hash][index]
            value = _kv(token_id, position, digest)
            digest = (digest + _WEIGHTS[position] * value) & _MASK64
            values.append(value)
        return values


class HostSampled(SamplingParams):
    """Parameters of a request whose next token can be sampled only after the previous token is known on the host."""

    needs_token_on_host = True  # type: ignore[assignment]


class _AnyText:
    """Placeholder for a grammar."""

    begins_free = False

    def matcher(self) -> Any:
        raise NotImplementedError


_GRAMMAR = TokenRules(grammar=_AnyText())


@dataclass
class Tracked:
    """Request under test with its expected and actual output."""

    request: Request
    expected: list[int]
    expected_reason: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None


class SomeRightDrafts(Drafter):
    """Drafter that proposes the right tokens up to a random position and wrong tokens after it."""

    def __init__(self, tracked: Mapping[str, Tracked], seed: int) -> None:
        super().__init__()
        self._tracked = tracked
        self._random = random.Random(seed)
        self.known: set[str] = set()  # requests with stored state
        self.num_right = self.num_wrong = 0

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        self.known.add(request.request_id)
        return self.drafts(request, num_tokens)

    def drafts(self, request: Request, num_tokens: int) -> list[int]:
        assert num_tokens > 0
        right = self._tracked[request.request_id].expected[request.num_output_tokens :]
        right = right[: self._random.randint(0, num_tokens)]
        num_wrong = self._random.randint(0, num_tokens - len(right))
        self.num_right += len(right)
        self.num_wrong += num_wrong
        return right + [self._random.randrange(VOCAB_SIZE) for _ in range(num_wrong)]

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)


class SomeRightDraftModel:
    """Draft model that returns right tokens up to a random position.

    Sometimes returns fewer drafts than planned, or none.
    """

    def __init__(self, tracked: Mapping[str, Tracked], seed: int) -> None:
        super().__init__()
        self._tracked = tracked
        self._drafts = SomeRightDrafts(tracked, seed)
        self._random = random.Random(seed)

    def draft(self, plan: SchedulerOutput) -> Drafting:
        drafts_of, follows = plan.scheduled_spec_decode_tokens, plan.draft_model_req_ids
        assert not drafts_of.keys() & set(follows) and plan.num_scheduled_tokens.keys() >= set(follows)
        assert len(set(follows)) == len(follows)
        drafting = Drafting()
        for request_id, planned in drafts_of.items():
            assert planned == [UNKNOWN_DRAFT] * len(planned), "a draft model has nothing to go by but tokens"
            request = self._tracked[request_id].request
            drafts = self._drafts.drafts(request, self._random.randint(1, len(planned)))
            ends = [i for i, token_id in enumerate(drafts) if token_id in request.stop_token_id_set]
            drafting.token_ids[request_id] = drafts[: min(ends, default=len(drafts))]
        return drafting


class SchedulerHarness:
    """Real scheduler on the fake runner, with checks of every invariant at every step and of every token.

    Args:
        depth: maximum number of steps in flight. 1 is the plain loop, 2 schedules step k+1 before the update for step
            k.
        transfer: KV transfer that loads and saves blocks; None for an engine without a KV store.
        drafts: random seed of drafts, some of them right; None for an engine without speculation.
        has_draft_model: True if a draft model makes the drafts, as ``config.speculative`` specifies.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        depth: int = 1,
        transfer: FakeTransfer | None = None,
        drafts: int | None = None,
        has_draft_model: bool = False,
    ) -> None:
        self.config = config
        self.cache_config = cache_config
        self.depth = depth
        self.transfer = transfer
        self.tracked: dict[str, Tracked] = {}
        is_known = drafts is not None and not has_draft_model
        self.proposer = SomeRightDrafts(self.tracked, drafts) if is_known and drafts is not None else None
        self.scheduler = Scheduler(config, cache_config, transfer.connector() if transfer else None)
        save = transfer.store.__setitem__ if transfer else None
        self.runner = FakeKVRunner(cache_config, config.max_num_seqs, save)
        if drafts is not None:
            times = KnownTimes(row_seconds=(0.0, 0.02, 0.2)[drafts % 3])
            proposer = self.proposer or make_proposer(config.speculative)
            costs = FreeDrafts(may_probe=drafts % 2 == 0) if has_draft_model else None
            ahead = KnownAheadTimes((0.3, 0.6, 2.0)[drafts // 3 % 3])
            speculate(self.scheduler, proposer, times, costs, async_planning=ahead)
            self.runner.draft_model = SomeRightDraftModel(self.tracked, drafts) if has_draft_model else None
        self._live: dict[str, None] = {}
        self.in_flight: deque[tuple[SchedulerOutput, FakeStep]] = deque()
        self.plans: list[SchedulerOutput] = []
        # True if later requests may have overtaken waiting suspects. Reset when all requests have ended.
        self._was_overtaken = False
        self._has_images = False  # features may make a request wait, so its allotments are not foreseen
        self._steps_passed_over = 0  # consecutive steps in which a request was passed over

    # --- requests -------------------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        stop_after: int | None = None,
        ignore_eos: bool = False,
        options: RequestOptions | None = None,
        cache_salt: str = "",
        needs_prompt_rows: bool = False,
        needs_token_on_host: bool = False,
        pooling_type: str | None = None,
        images: PromptImages | None = None,
    ) -> Request:
        """Queue a request. ``stop_after=n`` turns the n-th generated token into an end of sequence.

        A request with a ``pooling_type`` ends with its prompt. Its result is the token that would be sampled there.
        """
        if pooling_type is not None:
            max_tokens, stop_after, needs_token_on_host = 1, None, False
        make_params = HostSampled if needs_token_on_host else SamplingParams
        self._has_images |= images is not None
        expected = expected_tokens(seen_prompt(prompt, images), max_tokens)
        eos: frozenset[int] = frozenset()
        reason = "length"
        if stop_after is not None and stop_after <= max_tokens:
            eos = frozenset({expected[stop_after - 1]})
            if not ignore_eos:
                # Not `stop_after`: the token can occur earlier.
                expected = expected[: expected.index(expected[stop_after - 1]) + 1]
                reason = "stop"
        request = Request(
            request_id,
            prompt,
            make_params(max_tokens=max_tokens, ignore_eos=ignore_eos),
            max_tokens=max_tokens,
            rules=_GRAMMAR if needs_token_on_host else NO_RULES,
            eos_token_ids=eos,
            options=options or RequestOptions(),
            cache_salt=cache_salt,
            needs_prompt_rows=needs_prompt_rows,
            pooling_params=None if pooling_type is None else PoolingParams(pooling_type=pooling_type),
            images=images,
        )
        if pooling_type is not None:
            reason = "stop"
        # The engine makes this check before it queues a request.
        num_tokens = 0 if pooling_type is not None else request.max_tokens
        check_fits(request.num_prompt_tokens, num_tokens, self.config, self.cache_config)
        self.scheduler.add_request(request)
        self.tracked[request_id] = Tracked(request, expected, reason)
        self._was_overtaken &= bool(self._live)
        self._live[request_id] = None
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ABORTED)
        tracked = self.tracked[request_id]
        if tracked.is_live:
            tracked.finish_reason = "abort"
            del self._live[request_id]
        assert not self.scheduler.blocks.block_ids(request_id)
        self.scheduler.check_integrity()

    def fail_oldest(self, *, cache_is_lost: bool = False) -> None:
        """Fail the oldest step in flight and cancel the steps after it."""
        plan, _ = self.in_flight.popleft()
        self._fail(plan)
        for void, _ in self.in_flight:
            self.scheduler.cancel(void)
        self.in_flight.clear()
        if cache_is_lost:
            self.scheduler.preempt_all()
        self.scheduler.check_integrity()

    def refuse_newest(self) -> None:
        """Refuse the step planned last, as the runner can do. Earlier steps are finished."""
        plan, _ = self.in_flight.pop()
        while self.in_flight:
            self.update()
        self._fail(plan)
        self.scheduler.check_integrity()

    def _fail(self, plan: SchedulerOutput) -> None:
        """Cancel a failed plan. End the requests with ``MAX_FAILURES`` failures, as the engine does."""
        self.scheduler.cancel(plan)
        for request_id in plan.num_scheduled_tokens:
            request = self.scheduler.requests.get(request_id)
            if request is None:
                continue
            request.num_failures += 1
            self._was_overtaken |= request.is_suspect
            if request.num_failures == MAX_FAILURES:
                self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ERROR)
                del self._live[request_id]
                self.tracked[request_id].finish_reason = "error"

    @property
    def live(self) -> list[Tracked]:
        """Unfinished requests in order of arrival."""
        return [self.tracked[request_id] for request_id in self._live]

    # --- steps ----------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan and start a step, without the update."""
        assert len(self.in_flight) < self.depth
        before = {t.request.request_id: demand_of(t.request) for t in self.live}
        context_lens = {request_id: r.num_computed_tokens for request_id, r in self.scheduler.running.items()}
        again = {request_id for request_id, r in self.scheduler.running.items() if self.scheduler.states.is_rejected(r)}
        num_preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_limits(plan)
        num_preemptions = self.scheduler.num_preemptions - num_preemptions
        # The scheduler can delay a step until all tokens are known, to add drafts to it.
        if not self._has_images and (plan.num_scheduled_tokens or not self.in_flight or not self.config.speculative):
            self._check_plan(plan, before, context_lens, again, num_preemptions)
        is_idle = not plan.num_scheduled_tokens and not self.in_flight and not num_preemptions
        if is_idle and not self.scheduler.admissions.loading:
            assert not self.live, "nothing is under way, and nothing is planned"
        self.plans.append(plan)
        if plan.num_scheduled_tokens:
            self.in_flight.append((plan, self.runner.execute(plan)))
        else:
            assert not (plan.dropped_req_ids or plan.new_requests or plan.new_block_ids), "lost on the runner"
        return plan

    def _check_plan(
        self,
        plan: SchedulerOutput,
        demand: dict[str, int],
        context_lens: dict[str, int],
        again: set[str],
        num_preemptions: int,
    ) -> None:
        check_drafts(self.scheduler, plan, demand, context_lens)
        # Drafts do not change the allotments of other tokens.
        undrafted = without_drafts(plan)
        check_plan(self.scheduler, undrafted, demand, context_lens, again)
        if self._was_overtaken:
            return
        passed_over = not num_preemptions and was_passed_over(self.scheduler, undrafted, demand, context_lens, again)
        self._steps_passed_over = self._steps_passed_over + 1 if passed_over else 0
        assert self._steps_passed_over <= self.config.max_num_partial_prefills, "a free slot stays free"
        if is_plain(self.config, self.cache_config) and not self.cache_config.num_state_slots:
            check_fcfs(self.scheduler, undrafted, demand, context_lens, num_preemptions, self.depth)

    def update(self) -> list[RequestOutput]:
        """Process the output of the oldest step in flight."""
        plan, handle = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, handle.result())
        for output in outputs:
            self._check_output(output)
        self.scheduler.check_integrity()
        return outputs

    def step(self) -> SchedulerOutput:
        """Run one iteration of the loop: start a step, then process the oldest if ``depth`` steps are in flight."""
        plan = self.schedule()
        if len(self.in_flight) == self.depth or (self.in_flight and not plan.num_scheduled_tokens):
            self.update()
        return plan

    def run(self, until: Callable[[], bool] | None = None) -> int:
        """Step until all requests are done, within a bound. Return the number of steps.

        The first request in order advances in every step, except while it waits for a step in flight or for its place
        in the rotation. The bound is therefore the sum of the steps of each request alone. With images, it is twice the
        sum.
        """
        # Chunks are cut at state checkpoints: twice in a prompt, and at intervals.
        num_cuts = 3 if self.cache_config.num_state_slots else 0
        interval = self.scheduler.states.interval
        alone = sum(
            max_steps(t.request.num_tokens, self.config, self.cache_config.block_size)
            + (num_cuts and num_cuts + t.request.num_tokens // interval)
            + len(t.expected)
            - len(t.token_ids)
            for t in self.live
        )
        # After a late mask, a request with recurrent states may compute all its rows again, one in each step.
        longest = max((t.request.num_tokens for t in self.live), default=0) if self.cache_config.num_state_slots else 0
        num_again = self.runner.num_late * (1 + longest)
        bound = (alone + num_again) * self.depth + self.depth + 4
        if any(t.request.images is not None for t in self.live):
            bound *= 2  # the first request may wait for the features of a request that is then preempted
        # Decodes are planned before a prompt that waits for features, and before all prompts if the budget is small. If
        # blocks run out later, these decodes are preempted and compute their tokens again. A tenfold bound then only
        # detects endless runs.
        is_small = (
            self.config.max_num_partial_prefills > 1 and self.config.max_num_batched_tokens < self.config.max_num_seqs
        )
        if self._has_images or is_small:
            bound *= 10
        steps = num_waits = 0
        while self.live and not (until is not None and until()):
            if not self.step().num_scheduled_tokens and self.scheduler.admissions.loading:
                num_waits += 1  # waits for KV
                assert num_waits <= 1000
                continue
            steps += 1
            assert steps <= bound, f"{len(self.live)} requests unfinished after {steps} steps"
        return steps

    def drain(self) -> None:
        """Run until all requests are done, then check that runner and scheduler are empty."""
        if self.transfer is not None:
            self.transfer.answer_at_once()
        self.run()
        while self.in_flight:
            self.update()
        assert not self.scheduler.has_requests
        if self.transfer is not None:
            assert not self.transfer.tickets, "loads leaked"
            assert not self.transfer.held, "host memory leaked"
        assert self.scheduler.blocks.num_used_blocks == 0, "blocks leaked"
        assert self.proposer is None or not self.proposer.known, "what drafts are made of leaked"
        for tracked in self.tracked.values():
            if tracked.finish_reason not in ("abort", "error"):
                assert tracked.token_ids == tracked.expected
                assert tracked.finish_reason == tracked.expected_reason
        # The next step carries the drops of the last step.
        self.submit("sentinel", [1], 1)
        self.run()
        assert self.runner.held.keys() == {"sentinel"}, "the runner was not told to drop"

    # --- checks ---------------------------------------------------------------------------------------------

    def _check_output(self, output: RequestOutput) -> None:
        tracked = self.tracked[output.request_id]
        assert tracked.is_live, f"{output.request_id} has finished, and got {output}"
        is_pooled = tracked.request.pooling_params is not None
        assert (output.pooled is not None) == is_pooled == (not output.token_ids)
        new = output.token_ids if output.pooled is None else output.pooled.tolist()
        tracked.token_ids += new
        n = len(tracked.token_ids)
        assert new == tracked.expected[n - len(new) : n], f"{output.request_id}: wrong token {n} of {tracked.expected}"
        assert output.finish_reason == (tracked.expected_reason if n == len(tracked.expected) else None)
        tracked.finish_reason = output.finish_reason
        if not tracked.is_live:
            del self._live[output.request_id]

    def check_limits(self, plan: SchedulerOutput) -> None:
        """Check that the step exceeds no limit."""
        assert sum(plan.num_scheduled_tokens.values()) <= self.config.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= len(self.scheduler.running) <= self.config.max_num_seqs
        for request_id in plan.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            assert request.num_computed_tokens <= self.config.max_model_len
            assert request.num_output_tokens + request.num_output_placeholders <= request.max_tokens
