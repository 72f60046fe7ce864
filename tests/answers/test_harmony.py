"""gpt-oss's format as in its published description, cut anywhere. Golden answers have more of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tokenizers import AddedToken

from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.deltas import ArgumentsDelta, CallStart, TextDelta, joined
from metal_engine.answers.harmony import TOKENS, HarmonySplitter, harmony_format
from metal_engine.answers.tool_plan import NO_TOOLS
from metal_engine.checkpoints.answer_formats import find_answer_format
from tests.support.splitting import cuts, deltas, run
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import tiny_tokenizer

ANALYSIS = "<|channel|>analysis<|message|>2 < 3, so.\n\nSay so.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>It is: 2 <| 3. "
THOUGHT = "2 < 3, so.\n\nSay so."


def test_no_markup_of_an_answer_that_is_cut_off() -> None:
    text, content, reasoning = ANALYSIS + NEXT + FINAL, "It is: 2 <| 3. ", THOUGHT
    for end in range(len(text)):
        for parts in ([text[:end]], list(text[:end])):
            shown = run(HarmonySplitter(harmony_format(), TOOLS), parts, truncated=True)
            assert content.startswith(shown[0].removesuffix("<").removesuffix("<|"))
            assert reasoning.startswith(shown[1].partition("<|")[0].removesuffix("<"))


def test_call_arguments_are_streamed_without_delay() -> None:
    splitter = HarmonySplitter(harmony_format(), TOOLS, incremental=True)
    head = "<|channel|>commentary to=functions.find_trains <|constrain|>json<|message|>{"
    assert [type(delta) for ch in head for delta in splitter.add(ch)] == [CallStart, ArgumentsDelta]
    for ch in '"city": "Rome"':
        assert splitter.add(ch) == [ArgumentsDelta(0, ch)]
    assert splitter.add("}") == []
    assert splitter.finish(truncated=False) == [ArgumentsDelta(0, "}")]


@pytest.mark.parametrize("text", [
    "<|channel|>commentary to=functions.no_such_tool<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.get_weather<|message|>[1]<|call|>",
    "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
    "<|channel|>commentary to=tools.get_weather<|message|>{}<|call|>",
    "<|channel|>commentary to=python<|message|>print(1)<|call|>",
])  # fmt: skip
def test_malformed_calls_are_text(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for incremental in (False, True):
        splitter = HarmonySplitter(harmony_format(), TOOLS, incremental=incremental)
        (delta,) = deltas(splitter, text)
        assert delta.text == text and splitter.num_calls == 0  # type: ignore[union-attr]
    assert len(caplog.records) == 2


def test_harmony_format_is_detected_and_reasoning_tokens_are_counted() -> None:
    hf: Any = tiny_tokenizer().hf_tokenizer
    assert find_answer_format(hf, reasoning_parser="openai_gptoss").harmony
    hf.add_tokens([AddedToken(token, special=True) for token in TOKENS], special_tokens=True)
    known = find_answer_format(hf)
    assert known.harmony and known.special
    assert not find_answer_format(hf, reasoning_parser="none").harmony
    # One token for each character. All of the first message counts, except the mark before its last character.
    text = ANALYSIS + NEXT + FINAL
    reader = ChatAnswers(known, NO_TOOLS).reader(incremental=False)
    reader.add(text, list(range(1, len(text) + 1)), "stop")
    assert reader.num_reasoning_tokens == len(ANALYSIS) + 1 - len("<|channel|>analysis<|message|>")


def test_text_that_is_not_a_header_is_kept_as_content() -> None:
    for parts in cuts(FINAL + "<|end|>and more"):
        assert run(HarmonySplitter(harmony_format()), parts)[0] == "It is: 2 <| 3. and more"
    garbage = "<|channel|>" + "to=" * 2000
    for parts in ([garbage], list(garbage)):
        assert run(HarmonySplitter(harmony_format()), parts)[0] == garbage
    for parts in cuts("to=5 and more"):
        assert run(HarmonySplitter(harmony_format()), parts)[0] == "to=5 and more"
        assert run(HarmonySplitter(harmony_format()), parts, truncated=True)[0] == ""


def test_a_continued_message_has_no_header() -> None:
    answers = ChatAnswers.for_prompt(harmony_format(), NO_TOOLS, [], lambda ids: "<|message|>Add ", continued="")
    for parts in cuts("to=5"):
        reader = answers.reader(incremental=False)
        assert joined([delta for part in parts for delta in reader.add(part, ())]) == [TextDelta("content", "to=5")]
