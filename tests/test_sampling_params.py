"""Sampling parameters are validated on construction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_engine.errors import ParameterError
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams

BAD: list[dict[str, Any]] = [
    {"seed": 1.5}, {"seed": "1"}, {"seed": True}, {"seed": 2**63}, {"seed": 10**5000},
    {"stop": [5]}, {"stop": 5}, {"stop": [""]}, {"stop": {"a": 1}}, {"stop": b"x"}, {"stop": ["x" * 20_000]},
    {"stop_token_ids": [1.5]}, {"stop_token_ids": ["1"]}, {"stop_token_ids": "12"}, {"stop_token_ids": [-1]},
    {"stop_token_ids": [-(10**5000)]}, {"stop_token_ids": 5}, {"stop_token_ids": [0] * 20_000},
    {"n": 0}, {"n": 1.0}, {"n": 129}, {"n": None},
    {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": "16"}, {"max_tokens": True},
    {"min_tokens": -1}, {"min_tokens": 17}, {"min_tokens": 2.5},
    {"temperature": "hot"}, {"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")},
    {"temperature": None}, {"temperature": True},
    {"top_p": 0}, {"top_p": 1.1}, {"top_p": "1"}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": 2}, {"min_p": [0.5]},
    {"repetition_penalty": 0}, {"repetition_penalty": float("nan")}, {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1}, {"frequency_penalty": "0"},
    {"logit_bias": [1]}, {"logit_bias": {"a": 1}}, {"logit_bias": {1: "b"}}, {"logit_bias": {1: 101}},
    {"logit_bias": {-1: 1}}, {"logit_bias": {1.5: 1}}, {"logit_bias": {1: float("nan")}},
    {"allowed_token_ids": []}, {"allowed_token_ids": [1.5]}, {"allowed_token_ids": 3},
    {"bad_words": "word"}, {"bad_words": [""]}, {"bad_words": [" "]}, {"bad_words": [1]},
    {"logprobs": 21}, {"logprobs": -1}, {"logprobs": 1.5}, {"prompt_logprobs": 21}, {"prompt_logprobs": "all"},
    {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": 1.5},
    {"ignore_eos": 1}, {"skip_special_tokens": "no"}, {"include_stop_str_in_output": None},
    {"structured_outputs": {"regex": "a"}},
    {"structured_outputs": StructuredOutputsParams(regex="a"), "ignore_eos": True},
    {"structured_outputs": StructuredOutputsParams(regex="a"), "allowed_token_ids": [1]},
    {"structured_outputs": StructuredOutputsParams(regex="a"), "bad_words": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize("params", BAD, ids=lambda params: next(iter(params)))
def test_bad_values_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**params)
    assert caught.value.name in params
    assert str(caught.value) == f"{caught.value.name} {caught.value.message}"


BAD_STRUCTURES: list[dict[str, Any]] = [
    {}, {"json_object": False}, {"regex": "a", "choice": ["b"]}, {"regex": 5}, {"grammar": ["a"]}, {"choice": "ab"},
    {"choice": []}, {"choice": [1]}, {"choice": ["a"] * 2_000}, {"json": 5}, {"json": {"a": {1, 2}}},
    {"regex": "a" * 200_000}, {"json": {"a": "b" * 200_000}}, {"json_object": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("params", BAD_STRUCTURES, ids=lambda params: str(params)[:60])
def test_bad_structures_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        StructuredOutputsParams(**params)
    assert caught.value.name.partition(".")[0] == "structured_outputs"


def test_values_of_other_types_become_plain_ones() -> None:
    params = SamplingParams(
        n=np.int64(2),
        max_tokens=np.int32(5),
        temperature=np.float32(0.5),
        seed=np.uint64(7),
        top_k=np.int8(3),
        stop="x",
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=range(3),
        logit_bias={"5": 1, 6: np.float64(0.5)},
        bad_words=["a"],
    )  # type: ignore[arg-type]
    assert params == SamplingParams(
        n=2,
        max_tokens=5,
        temperature=0.5,
        seed=7,
        top_k=3,
        stop=("x",),
        stop_token_ids=(1, 2),
        allowed_token_ids=(0, 1, 2),
        logit_bias={5: 1.0, 6: 0.5},
        bad_words=("a",),
    )
    assert type(params.seed) is int and type(params.stop_token_ids[0]) is int
    assert hash(params) == hash(params)


def test_each_choice_has_a_seed_of_its_own() -> None:
    params = SamplingParams(n=4, seed=2**63 - 2)
    seeds = [params.seed_of(i) for i in range(4)]
    assert seeds[:2] == [2**63 - 2, 2**63 - 1] and len(set(seeds)) == 4
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert SamplingParams(n=2).seed_of(1) is SamplingParams(seed=-1).seed_of(0) is None
    assert SamplingParams(seed=3).seed_of(0) == 3


def test_a_changed_copy_shares_validated_fields() -> None:
    params = SamplingParams(n=3, logit_bias={5: 1.0}, stop_token_ids=range(100))
    schema = StructuredOutputsParams(json_object=True)
    changed = params.changed(structured_outputs=schema, skip_special_tokens=False)
    assert (changed.structured_outputs, changed.skip_special_tokens) == (schema, False)
    assert params.structured_outputs is None and params.skip_special_tokens
    assert changed.stop_token_ids is params.stop_token_ids and changed.logit_bias is params.logit_bias
    with pytest.raises(ParameterError, match="exclude each other"):
        SamplingParams(bad_words=["a"]).changed(structured_outputs=schema)


def test_penalties_bad_words_and_grammars_need_the_token_on_the_host() -> None:
    assert not SamplingParams(temperature=0.5, top_p=0.9, min_tokens=3, logit_bias={1: 2}).needs_token_on_host
    for params in (
        SamplingParams(presence_penalty=1),
        SamplingParams(bad_words=["a"]),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
    ):
        assert params.needs_token_on_host
