"""Structured outputs of gpt-oss: only reasoning, a call, or the message with the structured output may begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from metal_engine.answers.format_phases import call_phase, reasoning_phase
from metal_engine.answers.harmony import TOKENS, harmony_format
from metal_engine.engine.token_rules_maker import TokenRulesMaker
from metal_engine.output_phases import OutputPhases
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.text.tokenizer import Tokenizer
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import byte_ids, tiny_tokenizer

DIGITS = StructuredOutputsParams(regex="[0-9]{1,5}")
END, START, FINAL = "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"

Following = Callable[..., list[set[str]]]


@pytest.fixture(scope="module")
def messages() -> Iterator[tuple[Tokenizer, TokenRulesMaker]]:
    hf: Any = tiny_tokenizer().hf_tokenizer
    hf.add_tokens([AddedToken(token, special=True) for token in (*TOKENS, "<|constrain|>")], special_tokens=True)
    tokenizer = Tokenizer(hf, hf.convert_tokens_to_ids(["<|call|>", "<|return|>"]))
    made = TokenRulesMaker(tokenizer, len(hf))
    yield tokenizer, made
    made.close()


@pytest.fixture
def allowed_after(messages: tuple[Tokenizer, TokenRulesMaker]) -> Following:
    tokenizer, maker = messages
    names = {**{chr(i): byte_ids(chr(i))[0] for i in range(32, 127)}, **tokenizer.special_token_texts}
    names |= {"in": tokenizer.encode("in", add_special_tokens=False)[0]}

    def allowed_after(*texts: str, tools: bool = False, **options: Any) -> list[set[str]]:
        """Return the names of the tokens allowed after each text, which extends the text before it. ``*``: all."""
        fields = {"begins_inside": False, "is_structured": True, "budget": None, **options}
        calls = call_phase(harmony_format(), TOOLS, parallel=True) if tools else None
        phases = OutputPhases(reasoning_phase(harmony_format(), **fields), calls)
        grammar = maker.rules_for(SamplingParams(structured_outputs=DIGITS, phases=phases)).grammar
        assert grammar is not None
        matcher = grammar.matcher()
        found = []
        for text in texts:
            matcher.consume(tokenizer.encode(text, add_special_tokens=False))
            mask = np.full(-(-len(tokenizer.hf_tokenizer) // 32), -1, np.int32)
            assert matcher.fill_mask(mask, math.inf)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            found.append({"*"} if matcher.is_free else {name for name, i in names.items() if bits[i]})
        return found

    return allowed_after


def test_headers(allowed_after: Following) -> None:
    assert allowed_after("", "<|channel|>", "analysis<|message|>") == [{"<|channel|>", "<|start|>"}, {"a", "f"}, {"*"}]
    assert allowed_after("<|start|>", "assistant") == [{"a"}, {"<|channel|>"}]
    thought = f"{ANALYSIS}hm {FINAL}1"
    found = allowed_after(thought, END, START, "<|channel|>")
    assert found == [{"*"}, {"<|channel|>", "<|start|>"}, {"<|channel|>"}, {"a", "f"}]
    assert allowed_after((thought + END + START) * 2 + FINAL) == [set("0123456789")]
    assert allowed_after(f"{FINAL}12345") == [{"<|call|>", "<|return|>", "<|im_end|>"}]


def test_calls(allowed_after: Following) -> None:
    head = "<|channel|>commentary to=functions.find_trains<|message|>"
    assert allowed_after("<|channel|>", "c", "ommentary", tools=True) == [{"a", "c", "f"}, {"o"}, {" "}]
    assert allowed_after(head + "{", tools=True) == [{" ", '"'}]
    (found,) = allowed_after(f'{ANALYSIS}hm{END}{START}{head}{{"city": "Rome"', tools=True)
    assert found == set(" ,}")
    assert allowed_after(f'{head}{{"city": "Rome"}}', tools=True) == [{"<|call|>"}]  # also an end-of-sequence token
    assert allowed_after("<|channel|>") == [{"a", "f"}]


def test_a_message_without_an_end(allowed_after: Following) -> None:
    assert allowed_after("hm", "<|start|>", "assistant", begins_inside=True) == [{"*"}, {"a"}, {"<|channel|>"}]
    assert allowed_after(f"hm{START}{FINAL}", begins_inside=True) == [set("0123456789")]


@pytest.mark.parametrize("text", ["12345", f"12{END}{START}{ANALYSIS}12"])
def test_the_budget(allowed_after: Following, text: str) -> None:
    """All messages of reasoning share it. The message with the structured output follows."""
    forced = ["<|end|>", "<|start|>", *"assistant", "<|channel|>", "f", "in", "a", "l", "<|message|>"]
    assert allowed_after(text, *forced, begins_inside=True, budget=5) == [*({one} for one in forced), set("0123456789")]
