"""EngineCore with a runner that computes nothing."""

from __future__ import annotations

from copy import deepcopy

import pytest

from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import KVCacheLostError, ModelOutput, SchedulerOutput
from tools.fixtures.fake_engine import (
    EOS,
    FakeRunner,
    FakeStep,
    NextToken,
    byte_ids,
    echo,
    fake_config,
    generated,
    hash_chain,
    tiny_tokenizer,
)
from tools.fixtures.stepped_engine import SteppedEngine


def seeds_of(params: list[SamplingParams]) -> list[int]:
    config = fake_config()
    runner = FakeRunner(config.cache.block_size)
    engine = SteppedEngine(config, runner, tiny_tokenizer())
    for i, one in enumerate(params):
        engine.add_request(str(i), engine.prepare([5, 6], one))
    while engine.has_requests:
        engine.step()
    return runner.seen_seeds


def test_requests_without_a_seed_get_one_each_and_the_same_ones_every_time() -> None:
    drawn = seeds_of([SamplingParams(max_tokens=1)] * 5)
    assert len(set(drawn)) == 5
    assert drawn == seeds_of([SamplingParams(max_tokens=1)] * 5)


def test_a_given_seed_stays_and_greedy_requests_need_none() -> None:
    given = [SamplingParams(seed=3, max_tokens=1), SamplingParams(temperature=0, max_tokens=1)]
    assert seeds_of(given) == [3, 0]


def test_outputs_of_a_request_share_it_and_have_seeds_of_their_own() -> None:
    config = fake_config()
    runner = FakeRunner(config.cache.block_size)
    engine = SteppedEngine(config, runner, tiny_tokenizer())
    params = SamplingParams(n=3, seed=7, max_tokens=1, allowed_token_ids=range(100))
    prepared = engine.prepare([5, 6], params)
    for i in range(3):
        engine.add_request(str(i), prepared, index=i)
    while engine.has_requests:
        engine.step()
    assert runner.seen_seeds == [7, 8, 9]
    assert all(seen is params for seen in runner.seen_params)


# --- one step ahead -----------------------------------------------------------------------------------------


class FailingStep:
    """Step that fails when its result is requested. Later steps never run, and their results are lost."""

    def __init__(self, runner: FailingRunner, error: Exception) -> None:
        self.runner, self.error = runner, error
        self.before = deepcopy(runner.held)

    def result(self) -> ModelOutput:
        for request_id, held in self.runner.held.items():
            before = self.before.get(request_id)
            held.num_computed = -1 if before is None else before.num_computed
            if before is not None:
                held.tokens = before.tokens
        raise self.error


class FailingRunner(FakeRunner):
    """Runner that fails the steps with given numbers when their results are requested."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.fail_on_device: dict[int, Exception] = {}

    def execute(self, plan: SchedulerOutput) -> FakeStep | FailingStep:  # type: ignore[override]
        error = self.fail_on_device.pop(self.num_steps, None)
        step = super().execute(plan)
        return step if error is None else FailingStep(self, error)


def make_core(*, ahead: bool, next_token: NextToken = hash_chain, **config: int) -> SteppedEngine:
    resolved = fake_config(async_scheduling=ahead, **config)
    runner = FailingRunner(resolved.cache.block_size)
    runner.next_token = next_token
    return SteppedEngine(resolved, runner, tiny_tokenizer())


def runner_of(engine: SteppedEngine) -> FailingRunner:
    runner = engine.runner
    assert isinstance(runner, FailingRunner)
    return runner


def drain(
    engine: SteppedEngine, outputs: dict[str, list[RequestOutput]] | None = None
) -> dict[str, list[RequestOutput]]:
    """Step until all requests are finished. Return each request's outputs, including the given ones."""
    outputs = {} if outputs is None else outputs
    for _ in range(1000):
        if not engine.has_requests:
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    assert not engine.has_requests and not engine.request_ids
    assert engine.stats.num_used_blocks == 0
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.parametrize("next_token", [hash_chain, echo])
@pytest.mark.parametrize("config", [{}, {"num_blocks": 10, "max_num_batched_tokens": 7, "max_num_seqs": 3}])
def test_a_step_ahead_gives_the_same_outputs(next_token: NextToken, config: dict[str, int]) -> None:
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
        outputs = drain(engine)
        for request_id, (prompt, _) in prompts.items():
            tokens = tokens_of(outputs[request_id])
            assert tokens == generated(prompt, len(tokens), next_token)
        seen.append(
            {
                r: (tokens_of(o), text_of(o), o[-1].finish_reason, o[-1].stop_reason, o[-1].num_output_tokens)
                for r, o in outputs.items()
            }
        )
        if config and next_token is hash_chain:  # the echo model ends earlier
            assert engine.stats.num_preemptions > 0
    assert seen[0] == seen[1]
    assert {o[2] for o in seen[0].values()} == {"stop", "length"}


def test_no_step_is_run_for_a_token_beyond_max_tokens() -> None:
    engine = make_core(ahead=True)
    engine.add_request("a", engine.prepare(byte_ids("prompt"), SamplingParams(max_tokens=5)))
    drain(engine)
    assert engine.num_steps == runner_of(engine).num_steps == 5


def test_a_stop_is_noticed_one_step_late_and_its_token_dropped() -> None:
    engine = make_core(ahead=True, next_token=echo)
    engine.add_request("a", engine.prepare(byte_ids("ab"), SamplingParams(max_tokens=50)))
    outputs = drain(engine)
    assert tokens_of(outputs["a"]) == [*byte_ids("ab"), EOS]
    assert engine.num_steps == 4  # a, b, end of sequence, and one extra step


def test_an_id_used_again_right_after_an_abort_gets_no_token_of_the_old_request() -> None:
    engine = make_core(ahead=True)
    engine.add_request("a", engine.prepare(byte_ids("old"), SamplingParams(max_tokens=20)))
    engine.add_request("b", engine.prepare(byte_ids("other"), SamplingParams(max_tokens=8)))
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(3):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.abort_request("a")
    outputs.pop("a")
    engine.add_request("a", engine.prepare(byte_ids("new"), SamplingParams(max_tokens=6)))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("a", engine.prepare(byte_ids("third"), SamplingParams(max_tokens=6)))
    drain(engine, outputs)
    assert tokens_of(outputs["a"]) == generated(byte_ids("new"), 6)
    assert tokens_of(outputs["b"]) == generated(byte_ids("other"), 8)


def test_a_step_under_way_is_finished_when_its_requests_have_gone() -> None:
    engine = make_core(ahead=True)
    engine.add_request("a", engine.prepare(byte_ids("x"), SamplingParams(max_tokens=9)))
    assert engine.step() == []
    engine.abort_request("a")
    assert engine.has_requests and not engine.request_ids
    assert engine.step() == []
    assert not engine.has_requests
    engine.abort_request("a")  # unknown by now, so ignored


PROMPTS = {"first": "one", "second": "another prompt", "third": "and a last, somewhat longer one"}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("at_step", range(9))
@pytest.mark.parametrize(
    "error", [RuntimeError("failed"), KVCacheLostError("lost"), None], ids=["failed", "lost", "refused"]
)
def test_the_requests_of_a_failed_step_are_computed_again(ahead: bool, at_step: int, error: Exception | None) -> None:
    """Each step omits a request, because the budget is too small. All requests get the usual tokens."""
    engine = make_core(ahead=ahead, max_num_batched_tokens=2, max_num_seqs=3)
    runner = runner_of(engine)
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, engine.prepare(byte_ids(prompt), SamplingParams(max_tokens=7)))
    if error is not None:
        runner.fail_on_device[at_step] = error
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_requests:
        if error is None and runner.num_steps == at_step:
            runner.raise_next = RuntimeError("refused")
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    assert engine.metrics.num_failed_steps == 1 and 1 <= engine.metrics.num_retried_requests <= 2
    for request_id, prompt in PROMPTS.items():
        assert tokens_of(outputs[request_id]) == generated(byte_ids(prompt), 7)
        assert outputs[request_id][-1].finish_reason == "length"


def test_a_scheduler_that_raises_waits_for_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_core(ahead=True)
    engine.add_request("a", engine.prepare(byte_ids("x"), SamplingParams(max_tokens=9)))
    assert engine.step() == []
    runner_of(engine).fail_on_device[1] = RuntimeError("failed, too")
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
        (output,) = engine.step()
    assert output.request_id == "a" and "ZeroDivisionError" in (output.error or "")
    assert not engine.has_requests
    engine.add_request("a", engine.prepare(byte_ids("y"), SamplingParams(max_tokens=3)))
    runner_of(engine).fail_on_device.clear()
    assert tokens_of(drain(engine)["a"]) == generated(byte_ids("y"), 3)
