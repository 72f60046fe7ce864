"""Runner without a model whose tokens reveal errors in a plan.

Each slot of its KV cache holds a number that depends on the token written there, on the token's position, and on the
*contents* of all earlier slots, read through the plan's block table. A sampled token is a digest of all slots of its
sequence. A wrong block, slot, position, order, count or token therefore changes the next tokens of the request. Correct
tokens have a closed form: :func:`expected_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from metal_engine.kv_transfer.layout import state_key
from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import PromptImages
from metal_engine.settings.config import CacheConfig
from metal_engine.step import Drafting, KVConnectorMetadata, ModelOutput, RunnerLostError, SchedulerOutput

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
        make_drafts: returns the drafts that a plan leaves to a draft model; None without such a model.
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
        self.make_drafts: Callable[[SchedulerOutput], Drafting] | None = None
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
        drafting = None if self.make_drafts is None else self.make_drafts(plan)
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
