"""The engine's own rules, over a runner that computes nothing."""

from __future__ import annotations

from metal_engine.engine.core import EngineCore
from metal_engine.request import SamplingParams
from tests.fakes import FakeRunner, fake_config, tiny_tokenizer


def seeds_of(params: list[SamplingParams]) -> list[int | None]:
    config = fake_config()
    runner = FakeRunner(config.cache.block_size)
    engine = EngineCore(config, runner, tiny_tokenizer())
    for i, one in enumerate(params):
        engine.add_request(str(i), [5, 6], one)
    while engine.has_requests:
        engine.step()
    return [seen.seed for seen in runner.seen_params]


def test_requests_without_a_seed_get_one_each_and_the_same_ones_every_time() -> None:
    drawn = seeds_of([SamplingParams(max_tokens=1)] * 5)
    assert None not in drawn
    assert len(set(drawn)) == 5
    assert drawn == seeds_of([SamplingParams(max_tokens=1)] * 5)


def test_a_given_seed_stays_and_greedy_requests_need_none() -> None:
    given = [SamplingParams(seed=3, max_tokens=1), SamplingParams(temperature=0, max_tokens=1)]
    assert seeds_of(given) == [3, None]
