"""Tests that prompts have the requested lengths, and that the same seed gives the same prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metal_engine.bench.args import WorkloadArgs
from metal_engine.bench.datasets import BenchRequest, make_requests
from metal_engine.bench.tokens import PromptTokenizer, load_prompt_tokenizer
from metal_engine.errors import ConfigError
from tests.support.sweeps import sweep
from tools.fixtures.fake_engine import tiny_tokenizer


@pytest.fixture(scope="module")
def tiny() -> PromptTokenizer:
    return PromptTokenizer(tiny_tokenizer().hf_tokenizer.backend_tokenizer)


@pytest.fixture(scope="module")
def real(demo_path: Path) -> PromptTokenizer:
    return load_prompt_tokenizer(str(demo_path))


def requests(tokenizer: PromptTokenizer, seed: int = 0, **settings: object) -> list[BenchRequest]:
    return make_requests(WorkloadArgs(**settings), seed, lambda: tokenizer)


@pytest.mark.parametrize("which", ["tiny", "real"])
@pytest.mark.parametrize("input_len", sweep([1, 2, 5, 150, 701], lambda length: length in (1, 5, 150)))
def test_random_prompts_have_exactly_the_length(which: str, input_len: int, request: pytest.FixtureRequest) -> None:
    tokenizer: PromptTokenizer = request.getfixturevalue(which)
    made = requests(tokenizer, num_prompts=8, input_len=input_len, output_len=7)
    lengths = {len(tokenizer.encode(one.prompt)) for one in made}
    assert lengths == {input_len}
    assert {one.prompt_len for one in made} == lengths
    assert {one.output_len for one in made} == {7}
    assert len({one.prompt for one in made}) > 1 or input_len == 1


def test_seeds(real: PromptTokenizer) -> None:
    a, b, c = (requests(real, seed, num_prompts=4, input_len=30) for seed in (1, 1, 2))
    assert a == b != c


def test_a_range_of_lengths(real: PromptTokenizer) -> None:
    made = requests(real, num_prompts=200, input_len=20, output_len=10, range_ratio=0.5)
    assert {one.prompt_len for one in made} == set(range(10, 31))
    assert {one.output_len for one in made} == set(range(5, 16))


def test_a_common_prefix(real: PromptTokenizer) -> None:
    made = requests(real, dataset_name="prefix", num_prompts=6, prefix_len=200, input_len=20)
    assert {one.prompt_len for one in made} == {220}
    assert len({tuple(real.encode(one.prompt)[:200]) for one in made}) == 1
    assert len({one.prompt for one in made}) == 6


def test_verses_need_room_for_their_instruction(real: PromptTokenizer) -> None:
    for prefix_len in (0, 50):
        with pytest.raises(ConfigError, match=r"--input-len is 1[345] tokens too short"):
            requests(real, dataset_name="sonnet", num_prompts=2, input_len=6, prefix_len=prefix_len)


def test_mixed_lengths(real: PromptTokenizer) -> None:
    settings = {"input_len": 16, "long_input_len": 300, "long_ratio": 0.25, "num_prompts": 40}
    lengths = [one.prompt_len for one in requests(real, dataset_name="mixed", **settings)]
    assert sorted(lengths) == [16] * 30 + [300] * 10
    assert lengths != sorted(lengths)


def test_verse(real: PromptTokenizer) -> None:
    made = requests(real, dataset_name="sonnet", num_prompts=8, input_len=256)
    assert all(256 - 24 < one.prompt_len <= 256 for one in made)  # whole lines
    assert len({one.prompt for one in made}) == 8
    first, *lines = made[0].prompt.splitlines()
    assert "verses" in first and all(line[0].isupper() for line in lines)


def test_custom(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hello"}]
    path.write_text('{"prompt": "One"}\n\n' + json.dumps({"messages": messages, "output_len": 3}) + "\n")
    settings = {"dataset_name": "custom", "dataset_path": str(path), "output_len": 9}
    made = make_requests(WorkloadArgs(num_prompts=2, **settings), 0, lambda: pytest.fail("not needed"))
    assert {(one.prompt, one.output_len) for one in made} == {("One", 9), ("Hello", 3)}
    assert [one.chat_messages for one in made if one.messages] == [messages]
    with pytest.raises(ConfigError, match="2 usable prompts"):
        make_requests(WorkloadArgs(num_prompts=3, **settings), 0, lambda: pytest.fail("not needed"))


def test_sharegpt(tmp_path: Path, tiny: PromptTokenizer) -> None:
    path = tmp_path / "talk.json"
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A fish, I am sure."}]
    short = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    path.write_text(json.dumps([{"conversations": c} for c in (turns, short, turns[:1])]))
    (made,) = requests(tiny, dataset_name="sharegpt", dataset_path=str(path), num_prompts=1)
    assert made == BenchRequest("What is it?", len(tiny.encode("A fish, I am sure.")), len(tiny.encode("What is it?")))


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"text": "a"}', '{"prompt": 1}', '{"prompt": "a", "output_len": -3}', '["a"]']
)
def test_files_that_are_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not a valid custom file"):
        requests(None, dataset_name="custom", dataset_path=str(path), num_prompts=1)  # type: ignore[arg-type]


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot read --dataset-path"):
        requests(None, dataset_name="custom", dataset_path="/nowhere.jsonl")  # type: ignore[arg-type]
