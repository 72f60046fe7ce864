"""Random engines and traffic with images: tokens equal mlx-vlm's; aborts, failed steps, preemptions, few features."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from metal_engine.request import RequestOutput
from metal_engine.runner.features import FeatureCache
from metal_engine.step import SchedulerOutput
from tests.models.multimodal.test_draft_head import Model as HeadedModel
from tests.models.multimodal.test_generation import PARTS, TOLERANCE, WHOLE
from tests.support.vision import (
    Golden,
    VisionPrompt,
    gap,
    golden,
    make_engine,
    merged,
    prepared,
    tiny_vision,
    vision_prompt,
)
from tools.fixtures.stepped_engine import SteppedEngine

NUM_TOKENS = 8
# The last prompt shares its beginning with the first, its image included.
FUZZ_PARTS = (*PARTS, ((8, 4, 5), 6), (2, (2, 4, 6), 1, (2, 4, 7), 1, (2, 4, 6), 4))


def cases(name: str) -> list[tuple[VisionPrompt, Golden]]:
    tiny = tiny_vision(name)
    prompts = [vision_prompt(tiny, parts, seed) for seed, parts in enumerate(FUZZ_PARTS)]
    prompts.append(vision_prompt(tiny, (*FUZZ_PARTS[0][:2], 4)))
    return [(prompt, golden(tiny, prompt, NUM_TOKENS)) for prompt in prompts]


class StepFailure(RuntimeError):
    pass


@contextmanager
def failing(chance: float, rng: random.Random) -> Iterator[None]:
    """Let some plans fail, half of them after their images were encoded."""
    own = FeatureCache.update

    def update(self: FeatureCache, plan: SchedulerOutput) -> None:
        fails = rng.random() < chance
        if fails and rng.random() < 0.5:
            raise StepFailure
        own(self, plan)
        if fails:
            raise StepFailure

    FeatureCache.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        FeatureCache.update = own  # type: ignore[method-assign]


def run_one(
    name: str, seed: int, given: list[tuple[VisionPrompt, Golden]], make: Callable[..., SteppedEngine] | None = None
) -> None:
    """Run random requests on a random engine.

    Args:
        make: creates the engine with some options. Default: an engine on the tiny model ``name``.
    """
    rng = random.Random(seed)
    block_size = rng.choice([4, 8])
    engine = (make or partial(make_engine, tiny_vision(name)))(
        budget=rng.choice([3, 9, 17, 40, 128] if name in WHOLE else [40, 56, 128]),
        block_size=block_size,
        num_blocks=rng.choice([112, 160, 400]) // block_size,
        max_num_seqs=rng.choice([2, 4, 8]),
        ahead=rng.random() < 0.5,
        caching=rng.random() < 0.6,
        replay=rng.random() < 0.3,
        encoder_tokens=rng.choice([32, 40, 1000]),
        image_cache_tokens=rng.choice([48, 70, 1000] if name not in WHOLE else [32, 48, 70, 1000]),
        num_partial_prefills=rng.choice([1, 1, 3]),
    )
    left, parts, which = rng.randint(3, 9), dict[str, list[RequestOutput]](), dict[str, int]()
    step = 0
    with failing(rng.choice([0.0, 0.0, 0.05]), rng):
        while left or engine.has_requests:
            if left and rng.random() < 0.4:
                left -= 1
                request_id, index = str(left), rng.randrange(len(given))
                parts[request_id], which[request_id] = [], index
                engine.add_request(request_id, prepared(engine, given[index][0], NUM_TOKENS))
            if rng.random() < 0.03 and engine.request_ids:
                victim = rng.choice(sorted(engine.request_ids))
                engine.abort_request(victim)
                del parts[victim]
            for output in engine.step():
                if output.finish_reason == "error":
                    assert "StepFailure" in (output.error or "")
                    parts.pop(output.request_id, None)
                elif output.request_id in parts:
                    parts[output.request_id].append(output)
            engine.scheduler.images.check_integrity(engine.scheduler.running)
            step += 1
            assert step < 3000, "requests wait forever"
    kept = engine.core.runner._features._features.keys()
    assert kept <= engine.scheduler.images._kept.keys() | set(engine.scheduler.images._to_drop), "features leaked"
    for request_id, outputs in parts.items():
        assert gap(merged(outputs), given[which[request_id]][1]) < TOLERANCE, f"{name}, seed {seed}: {request_id}"


def test_random_traffic() -> None:
    given = cases("qwen3_vl")
    for seed in range(6):
        run_one("qwen3_vl", seed, given)


def test_random_traffic_with_a_draft_head() -> None:
    given, model = cases("qwen3_5"), HeadedModel()
    for seed in range(3):
        run_one("qwen3_5", seed, given, model.engine)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_much_random_traffic_with_a_draft_head() -> None:
    given, model = cases("qwen3_5"), HeadedModel()
    for seed in range(3, 60):
        run_one("qwen3_5", seed, given, model.engine)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", (*WHOLE, "gemma3", "gemma4"))
def test_much_random_traffic(name: str) -> None:
    given = cases(name)
    for seed in range(6, 100):
        run_one(name, seed, given)
