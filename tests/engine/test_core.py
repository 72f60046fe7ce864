"""EngineCore with a runner that computes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.request import merge_outputs
from metal_engine.sampling_params import SamplingParams
from tests.support.running import add_all, drain
from tests.support.tiny_engine import token_ids
from tools.fixtures.fake_engine import (
    EOS,
    FakeRunner,
    NextToken,
    byte_ids,
    echo,
    fake_config,
    generated,
    hash_chain,
    tiny_tokenizer,
)
from tools.fixtures.stepped_engine import SteppedEngine


def make_core(*, ahead: bool, next_token: NextToken = hash_chain, **config: int) -> SteppedEngine:
    resolved = fake_config(async_scheduling=ahead, **config)
    return SteppedEngine(resolved, FakeRunner(resolved.cache.block_size, next_token), tiny_tokenizer())


def seeds_of(params: list[SamplingParams]) -> list[int]:
    engine = make_core(ahead=False)
    add_all(engine, [([5, 6], one) for one in params])
    drain(engine)
    return engine.runner.seen_seeds  # type: ignore[attr-defined]


def test_requests_without_a_seed_get_distinct_reproducible_seeds() -> None:
    drawn = seeds_of([SamplingParams(max_tokens=1)] * 5)
    assert len(set(drawn)) == 5
    assert drawn == seeds_of([SamplingParams(max_tokens=1)] * 5)


def test_a_given_seed_is_kept_and_greedy_requests_get_seed_0() -> None:
    given = [SamplingParams(seed=3, max_tokens=1), SamplingParams(temperature=0, max_tokens=1)]
    assert seeds_of(given) == [3, 0]


def test_outputs_of_a_request_share_parameters_and_have_distinct_seeds() -> None:
    engine = make_core(ahead=False)
    runner: Any = engine.runner
    params = SamplingParams(n=3, seed=7, max_tokens=1, allowed_token_ids=range(100))
    prepared = engine.prepare([5, 6], params)
    for i in range(3):
        engine.add_request(str(i), prepared, index=i)
    drain(engine)
    assert runner.seen_seeds == [7, 8, 9]
    assert all(seen is params for seen in runner.seen_params)


@pytest.mark.parametrize("next_token", [hash_chain, echo])
@pytest.mark.parametrize("config", [{}, {"num_blocks": 10, "max_num_batched_tokens": 7, "max_num_seqs": 3}])
def test_async_scheduling_gives_the_same_outputs(next_token: NextToken, config: dict[str, int]) -> None:
    """Covers stops by end of sequence, token, string and length, in mixed steps and with preemption."""
    sentence = generated(byte_ids("a stop string"), 12)
    prompts = {
        "grows": (byte_ids("grows"), SamplingParams(max_tokens=50, ignore_eos=True)),
        "long": (byte_ids("a longer prompt, in chunks " * 2), SamplingParams(max_tokens=25)),
        "length": (byte_ids("some words"), SamplingParams(max_tokens=9)),
        "eos": (byte_ids("echo"), SamplingParams(max_tokens=30)),
        "token": (byte_ids("stop"), SamplingParams(max_tokens=30, stop_token_ids=tuple(byte_ids("op3")))),
        "string": (
            byte_ids("a stop string"),
            SamplingParams(max_tokens=30, stop=(bytes(sentence[4:6]).decode(), "string")),
        ),
        "one": (byte_ids("a single token comes out of this one"), SamplingParams(max_tokens=1)),
    }
    seen = []
    for ahead in (False, True):
        engine = make_core(ahead=ahead, next_token=next_token, **config)
        for request_id, (prompt, params) in prompts.items():
            engine.add_request(request_id, engine.prepare(prompt, params))
        outputs = {request_id: merge_outputs(found) for request_id, found in drain(engine).items()}
        for request_id, (prompt, _) in prompts.items():
            tokens = outputs[request_id].token_ids
            assert tokens == generated(prompt, len(tokens), next_token)
        seen.append(outputs)
        if config and next_token is hash_chain:  # the echo model ends earlier
            assert engine.stats.num_preemptions > 0
    assert seen[0] == seen[1]
    assert {output.finish_reason for output in seen[0].values()} == {"stop", "length"}


def test_no_step_is_run_for_a_token_beyond_max_tokens() -> None:
    engine = make_core(ahead=True)
    engine.add_request("a", engine.prepare(byte_ids("prompt"), SamplingParams(max_tokens=5)))
    drain(engine)
    assert engine.num_steps == engine.runner.num_steps == 5  # type: ignore[attr-defined]


def test_a_stop_is_noticed_one_step_late_and_its_token_dropped() -> None:
    engine = make_core(ahead=True, next_token=echo)
    engine.add_request("a", engine.prepare(byte_ids("ab"), SamplingParams(max_tokens=50)))
    assert token_ids(drain(engine)["a"]) == [*byte_ids("ab"), EOS]
    assert engine.num_steps == 4  # a, b, end of sequence, and one extra step


def test_an_id_used_again_right_after_an_abort_gets_no_token_of_the_old_request() -> None:
    engine = make_core(ahead=True)
    engine.add_request("a", engine.prepare(byte_ids("old"), SamplingParams(max_tokens=20)))
    engine.add_request("b", engine.prepare(byte_ids("other"), SamplingParams(max_tokens=8)))
    other = [output for _ in range(3) for output in engine.step() if output.request_id == "b"]
    engine.abort_request("a")
    engine.add_request("a", engine.prepare(byte_ids("new"), SamplingParams(max_tokens=6)))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("a", engine.prepare(byte_ids("third"), SamplingParams(max_tokens=6)))
    outputs = drain(engine)
    assert token_ids(outputs["a"]) == generated(byte_ids("new"), 6)
    assert token_ids(other + outputs["b"]) == generated(byte_ids("other"), 8)


def test_a_step_in_flight_finishes_after_all_requests_are_aborted() -> None:
    engine = make_core(ahead=True)
    engine.add_request("a", engine.prepare(byte_ids("x"), SamplingParams(max_tokens=9)))
    assert engine.step() == []
    engine.abort_request("a")
    assert engine.has_requests and not engine.request_ids
    assert engine.step() == [] and not engine.has_requests
    engine.abort_request("a")  # unknown by now, so ignored


def test_a_preempted_request_has_been_queued_once() -> None:
    engine = make_core(ahead=False)
    add_all(engine, [(byte_ids("x"), SamplingParams(max_tokens=6))])
    engine.step()
    engine.scheduler.preempt_all()
    drain(engine)
    assert engine.stats.num_preemptions == 1 and sum(engine.metrics.queue.counts) == 1


@pytest.mark.parametrize(("part", "function"), [("prefix_cache", "publish"), ("images", "plan")])
def test_an_error_while_a_step_is_planned_affects_no_later_request(
    part: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_core(ahead=False)
    runner: Any = engine.runner
    engine.add_request("ended", engine.prepare(byte_ids("x"), SamplingParams(max_tokens=1)))
    drain(engine)
    engine.add_request("lost", engine.prepare(byte_ids("more than a block"), SamplingParams(max_tokens=1)))
    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine.scheduler, part), function, lambda *args: 1 / 0)
        assert [output.finish_reason for output in engine.step()] == ["error"]
    engine.add_request("next", engine.prepare(byte_ids("next"), SamplingParams(max_tokens=3)))
    assert token_ids(drain(engine)["next"]) == generated(byte_ids("next"), 3)
    assert list(runner.held) == ["next#2"]
