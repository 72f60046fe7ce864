"""Planning of images: the features that steps need, their limits, and block hashes. Random traffic with images."""

from __future__ import annotations

import random
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from metal_engine.prompt_images import BidirectionalLayers, PromptImage, PromptImages
from metal_engine.scheduling.image_planner import largest_step, last_cut, next_cut
from metal_engine.scheduling.prefix_cache import prompt_block_hashes
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import SchedulerOutput
from tests.scheduling.test_scheduler_stateful import SchedulerMachine
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness

PLACEHOLDER = 7


def image_at(positions: list[int], name: str, bidirectional_layers: BidirectionalLayers = "") -> PromptImage:
    content_hash = sha256(f"{name} {len(positions)}".encode()).digest()
    return PromptImage(np.array(positions, np.int32), content_hash, {}, bidirectional_layers)


def prompt_with(*images: PromptImage, seed: int = 0, length: int) -> list[int]:
    prompt = make_prompt(seed, length)
    for image in images:
        for position in image.positions.tolist():
            prompt[position] = PLACEHOLDER
    return prompt


def harness(
    *, limit: int = 16, capacity: int = 32, budget: int = 12, num_seqs: int = 4, caching: bool = False, depth: int = 1
) -> SchedulerHarness:
    return SchedulerHarness(
        SchedulerConfig(
            max_num_batched_tokens=budget, max_num_seqs=num_seqs, max_model_len=400, max_num_partial_prefills=2,
            max_num_encoder_tokens=limit, image_cache_tokens=capacity, async_scheduling=depth > 1,
        ),
        CacheConfig(block_size=4, num_blocks=100, enable_prefix_caching=caching),
        depth=depth,
    )  # fmt: skip


def encoded(plan: SchedulerOutput) -> list[bytes]:
    return [image.content_hash for image in plan.images_to_encode]


def test_an_image_split_between_chunks_is_encoded_once_when_reached() -> None:
    h = harness(budget=6)
    image = image_at(list(range(8, 22)), "a")
    h.submit("r", prompt_with(image, length=30), 3, images=PromptImages((image,)))
    assert encoded(h.step()) == []  # tokens 0 to 6
    assert encoded(h.step()) == [image.content_hash]  # up to 12, in the image
    h.drain()
    # A claim that is released before the last token of the image would be a hit in the next step.
    assert (h.scheduler.stats.images_encoded, h.scheduler.stats.image_cache_hits) == (1, 0)


def test_least_recently_used_image_features_are_evicted_for_capacity() -> None:
    h = harness(limit=16, capacity=24, budget=64)
    a, b, c = (image_at(list(range(2, 12)), name) for name in "abc")
    plans = []
    for i, image in enumerate((a, b, a, c, b)):  # c evicts b, which was used less recently than a
        h.submit(f"r{i}", prompt_with(image, length=20), 1, images=PromptImages((image,)))
        plans.append(h.step())
    assert [encoded(plan) for plan in plans] == [
        [a.content_hash],
        [b.content_hash],
        [],
        [c.content_hash],
        [b.content_hash],
    ]
    assert plans[3].images_to_drop == [b.content_hash] and plans[4].images_to_drop == [a.content_hash]
    assert h.scheduler.stats.image_cache_hits == 1 and h.scheduler.stats.image_cache_tokens == 20
    h.drain()


def test_a_request_waits_if_other_requests_hold_the_image_cache_capacity() -> None:
    """The waiting request starts when the other has computed its image. Meanwhile it takes no tokens of the budget."""
    h = harness(limit=16, capacity=16, budget=8)
    a, b = (image_at(list(range(16)), name) for name in "ab")
    for name, image in (("r", a), ("s", b)):
        h.submit(name, prompt_with(image, length=24, seed=ord(name)), 2, images=PromptImages((image,)))
    plans = [h.step() for _ in range(3)]
    assert [dict(plan.num_scheduled_tokens) for plan in plans[:2]] == [{"r": 8}, {"r": 8}]
    assert plans[2].images_to_drop == [a.content_hash] and encoded(plans[2]) == [b.content_hash]
    h.drain()


def test_requests_that_need_different_images_do_not_deadlock() -> None:
    """A block spans two images of a request. Two requests have each computed a part of their first image."""
    config = SchedulerConfig(
        max_num_batched_tokens=4,
        max_num_seqs=2,
        max_model_len=100,
        max_num_partial_prefills=2,
        page_aligned_scheduling=True,
        max_num_encoder_tokens=8,
        image_cache_tokens=20,  # the least that a block with two images needs
    )
    h = SchedulerHarness(config, CacheConfig(block_size=4, num_blocks=50, enable_prefix_caching=False))
    for name in "ab":
        images = tuple(image_at(list(range(start, start + 8)), f"{name} {start}") for start in (2, 10))
        h.submit(name, prompt_with(*images, length=24, seed=ord(name)), 2, images=PromptImages(images))
    plans = [h.step() for _ in range(4)]
    assert sorted(request_id for plan in plans for request_id in plan.num_scheduled_tokens) == ["a", "a", "b", "b"]
    h.drain()


def test_drops_of_a_refused_plan_are_repeated() -> None:
    """The runner may have raised before it dropped the features."""
    h = harness(limit=16, capacity=16, budget=64)
    a, b = (image_at(list(range(2, 12)), name) for name in "ab")
    h.submit("r", prompt_with(a, length=20), 1, images=PromptImages((a,)))
    h.step()
    h.submit("s", prompt_with(b, length=20), 1, images=PromptImages((b,)))
    plan = h.scheduler.schedule()
    assert plan.images_to_drop == [a.content_hash] and encoded(plan) == [b.content_hash]
    h.scheduler.refused(plan)
    h.scheduler.cancel(plan)
    assert h.scheduler.schedule().images_to_drop == [a.content_hash, b.content_hash]


def test_a_failed_step_drops_all_features() -> None:
    h = harness(budget=10)
    image = image_at(list(range(4, 16)), "a")
    h.submit("r", prompt_with(image, length=30), 2, images=PromptImages((image,)))
    h.schedule()
    h.fail_oldest()
    plan = h.step()
    assert plan.images_to_drop == [image.content_hash] and encoded(plan) == [image.content_hash]
    h.drain()


def test_block_hashes_contain_the_parts_of_images() -> None:
    config = CacheConfig(block_size=4, num_blocks=8, enable_prefix_caching=True, model_fingerprint="m")

    def hashes(*images: PromptImage) -> list[bytes]:
        prompt = prompt_with(image_at(list(range(5, 11)), "any"), length=18)  # the same tokens for all
        return prompt_block_hashes(prompt, config, "", images=PromptImages(images) if images else None)

    a, b = image_at(list(range(5, 11)), "a"), image_at(list(range(5, 11)), "b")
    shifted, gap = image_at(list(range(6, 12)), "a"), image_at([5, 6, 7, 8, 10], "a")
    found = [hashes(), hashes(a), hashes(b), hashes(shifted), hashes(gap)]
    assert len({one[0] for one in found}) == 1  # nothing of an image stands in the first block
    assert len({one[1] for one in found}) == len({one[3] for one in found}) == len(found)
    assert hashes(a) == found[1]


def test_images_are_not_mixed_up_by_prefix_caching() -> None:
    h = harness(caching=True, budget=64, limit=64, capacity=64)
    a, b = (image_at(list(range(5, 17)), name) for name in "ab")
    for i, image in enumerate((a, b, a)):
        h.submit(f"r{i}", prompt_with(image, length=30), 4, images=PromptImages((image,)))
        h.drain()
    assert [h.tracked[f"r{i}"].request.num_cached_tokens for i in range(3)] == [0, 4, 28]


def inseparable(*spans: tuple[int, int]) -> PromptImages:
    return PromptImages(tuple(image_at(list(range(a, b)), str(a), "every layer") for a, b in spans))


@pytest.mark.parametrize(
    ("start", "stop", "unit", "last", "following"),
    [
        (0, 4, 1, 4, 1),  # before the images
        (0, 9, 1, 5, 1),
        (5, 9, 1, 5, 12),
        (5, 12, 1, 12, 12),
        (12, 14, 1, 12, 18),  # directly after the first image
        (0, 16, 8, 0, 24),  # no multiple of 8 lies outside the images before 24
        (0, 24, 8, 24, 24),
        (24, 25, 8, 25, 32),  # the end of the prompt
    ],
)
def test_chunks_end_only_outside_inseparable_image_ranges(
    start: int, stop: int, unit: int, last: int, following: int
) -> None:
    images = inseparable((5, 12), (12, 18))
    assert (last_cut(images, start, stop, unit), next_cut(images, start, unit)) == (last, following)
    assert (last_cut(None, start, stop, unit), next_cut(None, start, unit)) == (stop, start + unit)


def test_the_largest_step_of_images() -> None:
    assert [largest_step(inseparable((5, 12), (12, 18)), unit) for unit in (1, 8)] == [7, 24]


@pytest.mark.parametrize("caching", [False, True])
def test_no_chunk_and_no_cached_prefix_cuts_an_image(caching: bool) -> None:
    h = harness(budget=12, caching=caching, limit=64, capacity=64)
    images = inseparable((6, 14), (15, 25))
    prompt = prompt_with(*images.images, length=34)
    h.submit("r", prompt, 2, images=images)
    assert [h.step().num_scheduled_tokens["r"] for _ in range(4)] == [6, 9, 12, 7]
    h.drain()
    other = [*prompt[:30], *make_prompt(9, 4)]  # differs after the images: blocks up to 28 are cached
    h.submit("s", other, 1, images=images)
    h.drain()
    assert h.tracked["s"].request.num_cached_tokens == (28 if caching else 0)
    shorter = inseparable((6, 14))
    h.submit("t", [*prompt[:14], *make_prompt(9, 4)], 1, images=shorter)
    h.drain()
    # The block from 12 on differs, and the block before it ends within the image, as does the block from 4 on.
    assert h.tracked["t"].request.num_cached_tokens == (4 if caching else 0)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(20, [{"r": 4, "s": 4}, {"r": 20}, {"s": 19}]), (24, [{"r": 20, "s": 4}, {"r": 4, "s": 20}])],
)
def test_prompts_with_images_share_a_step(budget: int, expected: list[dict[str, int]]) -> None:
    """An image may exceed an equal part of the budget."""
    h = harness(budget=budget, limit=64, capacity=64)
    for name in "rs":
        images = inseparable((4, 18))
        h.submit(name, prompt_with(*images.images, length=24, seed=ord(name)), 2, images=images)
    assert [{r: n for r, n in h.step().num_scheduled_tokens.items() if n > 1} for _ in expected] == expected
    h.drain()


def test_an_aligned_chunk_within_an_equal_part_below_a_block() -> None:
    """Each of two prompts of 5 tokens gets a block of 4 tokens, and 3 tokens of the budget remain.

    A last token is charged as a whole block, so neither prompt gets it.
    """
    config = SchedulerConfig(
        max_num_batched_tokens=11, max_num_seqs=2, max_model_len=100, max_num_partial_prefills=2,
        page_aligned_scheduling=True, max_num_encoder_tokens=8, image_cache_tokens=20,
    )  # fmt: skip
    h = SchedulerHarness(config, CacheConfig(block_size=4, num_blocks=20, enable_prefix_caching=False))
    for name in "rs":
        images = PromptImages((image_at([1], name, "every layer"),))
        h.submit(name, prompt_with(*images.images, length=5, seed=ord(name)), 2, images=images)
    assert h.step().num_scheduled_tokens == {"r": 4, "s": 4}
    h.drain()


class ImageMachine(SchedulerMachine):
    """Many prompts have images, which other prompts share, over few features and few KV blocks."""

    bidirectional_layers: BidirectionalLayers = ""

    @initialize(
        data=st.data(),
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_blocks=st.integers(4, 40),
        budget=st.integers(1, 8) | st.integers(1, 64),
        is_recurrent=st.booleans(),
        is_aligned=st.booleans(),
        limit=st.integers(1, 40),
    )
    def start_engine(  # type: ignore[override]
        self,
        data: st.DataObject,
        block_size: int,
        num_blocks: int,
        budget: int,
        is_recurrent: bool,
        is_aligned: bool,
        limit: int,
    ) -> None:
        depth, num_seqs = data.draw(self.depths), data.draw(st.integers(1, 6))
        least = 2 * limit + block_size if is_aligned else limit
        self.limit = limit
        is_recurrent = is_recurrent and not self.bidirectional_layers  # no model has both
        budget = max(budget, block_size if is_aligned else 1)
        if self.bidirectional_layers:
            budget = max(budget, num_seqs + limit + data.draw(st.sampled_from([0, 2 * block_size, 20])))
        self.harness = SchedulerHarness(
            SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=num_seqs,
                max_model_len=300,
                max_num_partial_prefills=data.draw(st.integers(1, 3)),
                page_aligned_scheduling=is_aligned,
                async_scheduling=depth > 1,
                max_num_encoder_tokens=limit,
                image_cache_tokens=least + data.draw(st.sampled_from([0, 0, 5, 40])),
            ),
            CacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                enable_prefix_caching=is_recurrent or data.draw(st.booleans()),
                num_state_slots=data.draw(st.integers(num_seqs, 4 * num_seqs)) if is_recurrent else 0,
            ),
            depth=depth,
        )
        self.unit = block_size if is_aligned else 1
        self.capacity = min(300, block_size * num_blocks + 1)
        self.num_requests = 0

    def submit(
        self, prompt: list[int], max_tokens: int, *, stop_after: int | None = None, ignore_eos: bool = False
    ) -> None:
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        if len(prompt) + max_tokens > self.capacity:
            return
        # Prompts of the same length have the same tokens, and one of three sets of images.
        places, contents = random.Random(prompt[0]), random.Random(self.num_requests % 3)
        images = self.images_for(places, contents, len(prompt))
        for image in images:
            for position in image.positions.tolist():
                prompt[position] = PLACEHOLDER
        self.harness.submit(
            request_id,
            prompt,
            max_tokens,
            stop_after=stop_after,
            ignore_eos=ignore_eos,
            needs_token_on_host=self.num_requests % 4 == 0,
            images=PromptImages(tuple(images)) if images else None,
        )
        self.harness.scheduler.check_integrity()

    def images_for(self, places: random.Random, contents: random.Random, length: int) -> list[PromptImage]:
        images, position = [], places.randint(0, 5)
        while position < length - 1 and len(images) < 4:
            size, gap = places.randint(1, self.limit), places.choice((1, 1, 1 if self.bidirectional_layers else 2))
            positions = list(range(position, position + size * gap, gap))
            if positions[-1] >= length - 1:
                break
            images.append(image_at(positions, str(contents.randint(0, 3)), self.bidirectional_layers))
            position = positions[-1] + places.choice((1, 2, 20))
        config = self.harness.config
        most = min(config.max_num_batched_tokens - (config.max_num_seqs - 1), config.image_cache_tokens)
        while images and self.bidirectional_layers and largest_step(PromptImages(tuple(images)), self.unit) > most:
            images.pop()
        return images

    @invariant()
    def no_step_encodes_too_much(self) -> None:
        if not hasattr(self, "harness") or not self.harness.plans:
            return
        sizes = [image.num_features for image in self.harness.plans[-1].images_to_encode]
        assert sum(sizes) <= self.limit or (self.unit > 1 and sum(sizes) <= 2 * self.limit + self.unit)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "harness"):
            images, runner = self.harness.scheduler.images, self.harness.runner
            assert sum(map(len, runner.features.values())) == images.num_kept_tokens


class SelfSeeingMachine(ImageMachine):
    """No chunk may cut an image."""

    bidirectional_layers = "every layer"


_SETTINGS = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("machine", [ImageMachine, SelfSeeingMachine])
def test_random_traffic_with_images(machine: type[ImageMachine]) -> None:
    run_state_machine_as_test(machine, settings=_SETTINGS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [ImageMachine, SelfSeeingMachine])
def test_much_random_traffic_with_images(machine: type[ImageMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=300, stateful_step_count=60))
