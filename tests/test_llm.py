"""The offline API on a tiny model: several outputs, log probabilities, prompts of any integer type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from metal_engine import llm as llm_module
from metal_engine.llm import LLM
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import VOCAB_SIZE, byte_ids


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(llm_module, "build_engine", lambda args: tiny_engine())
    with LLM("tiny") as llm:
        yield llm


def generate(llm: LLM, prompts: Any, *params: Any) -> Any:
    return llm.generate(prompts, *params, use_tqdm=False)


def test_n_outputs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, temperature=1.5, ignore_eos=True)
    results = generate(llm, ["one", "two"], params)
    assert [[output.index for output in result.outputs] for result in results] == [[0, 1, 2]] * 2
    assert len({tuple(output.token_ids) for result in results for output in result.outputs}) == 6
    for result, prompt in zip(results, ["one", "two"], strict=True):
        assert result.text == result.outputs[0].text and result.token_ids == result.outputs[0].token_ids
        for i, output in enumerate(result.outputs):
            (alone,) = generate(
                llm, [prompt], SamplingParams(seed=5 + i, max_tokens=8, temperature=1.5, ignore_eos=True)
            )
            assert alone.token_ids == output.token_ids
    (unseeded,) = generate(llm, ["x"], SamplingParams(n=4, max_tokens=8, temperature=2, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in unseeded.outputs}) == 4


def test_logprobs(llm: LLM) -> None:
    (result,) = generate(
        llm, "abc", SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=0)
    )
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert all(entry.rank == 1 and entry.top[0][0] == entry.token_id for entry in result.logprobs)
    first, *others = result.prompt_logprobs
    assert first is None and [entry.token_id for entry in others] == result.prompt_token_ids[1:]
    (plain,) = generate(llm, "abc", SamplingParams(temperature=0, max_tokens=6))
    assert plain.logprobs is None and plain.prompt_logprobs is None and plain.token_ids == result.token_ids


@pytest.mark.parametrize(
    "prompt", [np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8), [np.int64(1), 2, np.int32(3)], (1, 2, 3)]
)
def test_prompts_of_any_integers(llm: LLM, prompt: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = generate(llm, [1, 2, 3], params)[0].token_ids
    assert generate(llm, prompt, params)[0].token_ids == expected
    assert [r.token_ids for r in generate(llm, [prompt, prompt], params)] == [expected] * 2
    (result,) = generate(llm, [prompt], params)
    assert result.prompt_token_ids == [1, 2, 3] and all(type(i) is int for i in result.prompt_token_ids)


@pytest.mark.parametrize(
    "prompt", [[1.0], ["a", 1], [None], [-1], [VOCAB_SIZE], [2**70], np.array([0.5])], ids=str
)
def test_bad_prompts_stop_everything_before_it_runs(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError):
        generate(llm, [byte_ids("fine"), prompt])
    assert llm.stats.num_running == 0 and llm._core.num_steps == 0
    assert len(generate(llm, "still fine", SamplingParams(max_tokens=2))) == 1


def test_bad_parameters_stop_everything_before_it_runs(llm: LLM) -> None:
    bad: list[Any] = [
        SamplingParams(logit_bias={VOCAB_SIZE: 1}),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")),
        SamplingParams(truncate_prompt_tokens=10**6),
        {"temperature": 1},
    ]
    for params in bad:
        with pytest.raises(ValueError):
            generate(llm, ["a", "b"], [SamplingParams(), params])
    assert llm._core.num_steps == 0
    with pytest.raises(ValueError, match="n must be 1"):
        next(llm.stream("a", SamplingParams(n=2)))


def test_truncation_and_structure(llm: LLM) -> None:
    (result,) = generate(llm, list(range(50)), SamplingParams(max_tokens=2, truncate_prompt_tokens=5))
    assert result.prompt_token_ids == list(range(45, 50))
    params = SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(choice=("left", "right")))
    assert generate(llm, "which?", params)[0].text in ("left", "right")


def test_a_request_that_cannot_be_added_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while one is added, the engine lives."""
    scheduler = llm._core.scheduler
    add = scheduler.add_request

    def broken(request: Any) -> None:
        if request.token_ids[0] == 7:
            raise ZeroDivisionError("a mistake")
        add(request)

    monkeypatch.setattr(scheduler, "add_request", broken)
    with pytest.raises(RuntimeError, match="could not be added: ZeroDivisionError: a mistake"):
        generate(llm, [7, 8])
    (result,) = generate(llm, [8, 9], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(result.token_ids) == 3
    scheduler.check_integrity()
