"""Compares the engine's greedy outputs on the demo model with mlx-lm's logits for the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.sampling_params import SamplingParams
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import MakeEngine
from tests.support.running import run
from tools.compare.equal_outputs import Comparison

AssertGolden = Callable[..., None]

PROSE = (
    "The harbour was quiet in the early morning. Gulls stood on the wall and looked at the water, and the "
    "first boats came in slowly with their lamps still lit. A woman in a yellow coat counted crates, wrote "
    "numbers in a book, and now and then looked up at the clouds over the island. "
)
CODE = (
    "def merge(left: list[int], right: list[int]) -> list[int]:\n"
    "    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n"
)
RAW = [
    "A",
    "\n",
    "Once upon a time",
    "The capital of France is",
    "1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    CODE,
    "SELECT name, count(*) FROM visits WHERE",
    "Grüße aus München! Das Wetter ist heute",
    "東京は日本の首都で、",
    "Привет, как дела? Сегодня мы",
    "مرحبا، كيف حالك اليوم؟",
    "🎉🎊 Emoji party: 👩‍👩‍👧‍👦 family,",
    "   leading spaces\t\tand tabs   ",
    "<|im_start|>user\nraw special tokens<|im_end|>\n",
    "naïve café — “quotes” … ½ × ²",
    PROSE,
    PROSE * 4 + "Then",
]
CHATS = [
    "Hello!",
    "What is the capital of Norway?",
    "Write a haiku about the sea.",
    "Summarize: " + PROSE * 2,
    "Explain recursion to a child, with an example.",
    "Translate to French: I would like a cup of coffee, please.",
]


@dataclass(frozen=True)
class Workload:
    """Prompts for an engine, and the number of tokens to generate for each."""

    raw: list[str]
    chats: list[str]
    # lengths of prose prompts in tokens
    long: tuple[int, ...]
    max_tokens: int
    # most requests in the engine
    at_once: int

    @property
    def greedy(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)


EVERYTHING = Workload(RAW, CHATS, long=(700, 1500), max_tokens=24, at_once=16)
# One prompt of each kind, and more prompts than `at_once`. Their first tokens together exceed the budgets.
SOME = Workload(RAW[:2] + RAW[3:4] + RAW[5:7] + RAW[8:13], CHATS[:1], long=(160,), max_tokens=8, at_once=8)


@pytest.fixture(scope="module", params=[SOME, pytest.param(EVERYTHING, marks=pytest.mark.full)], ids=["some", "all"])
def workload(request: pytest.FixtureRequest) -> Workload:
    return request.param


@pytest.fixture(scope="module")
def prompts(workload: Workload, demo_tokenizer: Tokenizer) -> list[list[int]]:
    """12 prompts of 1 to 160 tokens; 26 of 1 to 1,500 in the long run."""
    raw = [demo_tokenizer.encode(text) for text in workload.raw]
    chats = [demo_tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in workload.chats]
    long_text = demo_tokenizer.encode(PROSE * 40)
    prompts = raw + [long_text[:length] for length in workload.long] + chats
    assert len(prompts) == (12 if workload is SOME else 26)
    assert min(map(len, prompts)) == 1
    assert max(map(len, prompts)) == max(workload.long)
    # One prompt, or the prompts that start together, exceed the largest step.
    assert max(*map(len, prompts), sum(map(len, prompts[: workload.at_once]))) > (128 if workload is SOME else 512)
    return prompts


def compare(model: Any, prompt: list[int], output: list[int]) -> Comparison:
    """Compare each token of a greedy output with the model's choice after the tokens before it."""
    logits = model(mx.array([[*prompt, *output[:-1]]]))[0, len(prompt) - 1 :].astype(mx.float32)
    gaps = logits.max(axis=-1) - mx.take_along_axis(logits, mx.array(output)[:, None], axis=-1)[:, 0]
    first_difference = next((i for i, gap in enumerate(gaps.tolist()) if gap > 0), None)
    return Comparison(first_difference, gaps.max().item())


@pytest.fixture(scope="module")
def assert_golden(workload: Workload, prompts: list[list[int]], reference_model: Any) -> AssertGolden:
    """Return a function that checks the outputs of all prompts, or of the given ones, with mlx-lm's model."""
    # Most tests give the same outputs.
    known: dict[tuple[tuple[int, ...], ...], Comparison] = {}

    def check(outputs: list[list[int]], prompts: list[list[int]] = prompts) -> None:
        bad, num_ties = {}, 0
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            assert len(output) == workload.max_tokens
            key = tuple(prompt), tuple(output)
            if key not in known:
                known[key] = compare(reference_model, prompt, output)
            num_ties += not known[key].same
            if not known[key].equal:
                bad[i] = known[key]
        assert not bad, f"mlx-lm chooses other tokens: {bad}"
        # Near ties are rare. Many differences would point to a bug.
        assert num_ties <= 2

    return check


def test_chunked_and_replayed_one_ahead(
    make_engine: MakeEngine, workload: Workload, prompts: list[list[int]], assert_golden: AssertGolden
) -> None:
    engine = make_engine(budget=61, ahead=True, replay=True)
    assert_golden(run(engine, prompts, workload.greedy, at_once=workload.at_once))
    assert engine.metrics.num_decode_forwards["replayed"] > 0 and engine.metrics.replay_refusal is None


@pytest.mark.full
@pytest.mark.parametrize("workload", [EVERYTHING], ids=["all"], indirect=True)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("budget", [16, 61, 512])
@pytest.mark.parametrize("at_once", [1, 16, None])
def test_every_combination(
    make_engine: MakeEngine,
    workload: Workload,
    prompts: list[list[int]],
    assert_golden: AssertGolden,
    budget: int,
    block_size: int,
    at_once: int | None,
) -> None:
    engine = make_engine(budget=budget, block_size=block_size, num_blocks=8192 // block_size)
    assert_golden(run(engine, prompts, workload.greedy, at_once=at_once))


@pytest.mark.parametrize(
    ("budget", "block_size"),
    [(512, 16), pytest.param(512, 8, marks=pytest.mark.full), pytest.param(512, 32, marks=pytest.mark.full)],
)
def test_forced_preemption(
    make_engine: MakeEngine,
    workload: Workload,
    prompts: list[list[int]],
    assert_golden: AssertGolden,
    budget: int,
    block_size: int,
) -> None:
    """The longest prompt and its output just fit. All other requests compete for the remaining blocks."""
    num_blocks = -(-(max(workload.long) + workload.max_tokens - 1) // block_size)
    engine = make_engine(budget=budget, block_size=block_size, num_blocks=num_blocks)
    outputs = run(engine, prompts, workload.greedy)
    assert engine.stats.num_preemptions > 0
    assert_golden(outputs)
