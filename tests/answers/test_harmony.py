"""gpt-oss's format as in its published description: cut anywhere, and over HTTP."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tokenizers import AddedToken

from metal_engine.answers.deltas import ArgumentsDelta, CallStart
from metal_engine.answers.harmony import TOKENS, HarmonySplitter, harmony_format
from metal_engine.checkpoints.answer_formats import find_answer_format
from metal_engine.text.tokenizer import Tokenizer
from tests.support.serving import MODEL, serve
from tests.support.splitting import cuts, deltas, run
from tests.support.tool_formats import TOOLS, WEATHER
from tools.fixtures.fake_engine import TOOL_TEMPLATE, fake_config, tiny_tokenizer

ANALYSIS = "<|channel|>analysis<|message|>2 < 3, so.\n\nSay so.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>It is: 2 <| 3. "
ARGUMENTS = json.dumps(WEATHER[1], ensure_ascii=False)
THOUGHT = "2 < 3, so.\n\nSay so."


def test_no_markup_of_an_answer_that_is_cut_off() -> None:
    text, content, reasoning = ANALYSIS + NEXT + FINAL, "It is: 2 <| 3. ", THOUGHT
    for end in range(len(text)):
        for parts in ([text[:end]], list(text[:end])):
            shown = run(HarmonySplitter(harmony_format(), TOOLS), parts, truncated=True)
            assert content.startswith(shown[0].removesuffix("<").removesuffix("<|"))
            assert reasoning.startswith(shown[1].partition("<|")[0].removesuffix("<"))


def test_arguments_come_as_they_are_written() -> None:
    splitter = HarmonySplitter(harmony_format(), TOOLS, incremental=True)
    head = "<|channel|>commentary to=functions.find_trains <|constrain|>json<|message|>{"
    assert [type(delta) for ch in head for delta in splitter.add(ch)] == [CallStart, ArgumentsDelta]
    for ch in '"city": "Rome"':
        assert splitter.add(ch) == [ArgumentsDelta(0, ch)]
    assert splitter.add("}") == []
    assert splitter.finish(truncated=False) == [ArgumentsDelta(0, "}")]


MALFORMED = [
    "<|channel|>commentary to=functions.no_such_tool<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.get_weather<|message|>[1]<|call|>",
    "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
    "<|channel|>commentary to=tools.get_weather<|message|>{}<|call|>",
    "<|channel|>commentary to=python<|message|>print(1)<|call|>",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_calls_are_text(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for incremental in (False, True):
        splitter = HarmonySplitter(harmony_format(), TOOLS, incremental=incremental)
        (delta,) = deltas(splitter, text)
        assert delta.text == text and splitter.num_calls == 0  # type: ignore[union-attr]
    assert len(caplog.records) == 2


def test_over_http() -> None:
    """The marks are special tokens, and two of them end the generation, as in the model's configuration."""
    hf: Any = tiny_tokenizer(TOOL_TEMPLATE).hf_tokenizer
    hf.add_tokens([AddedToken(token, special=True) for token in TOKENS], special_tokens=True)
    tokenizer = Tokenizer(hf, hf.convert_tokens_to_ids(["<|call|>", "<|return|>"]))
    known = find_answer_format(hf)
    assert known.harmony and known.special
    assert not find_answer_format(hf, reasoning_parser="none").harmony
    plain = tiny_tokenizer().hf_tokenizer
    assert find_answer_format(plain, reasoning_parser="openai_gptoss").harmony

    answer = f"{ANALYSIS}{NEXT}<|channel|>commentary to=functions.get_weather json<|message|>{ARGUMENTS}<|call|>"
    tokens = tokenizer.encode(answer)
    messages: Any = [{"role": "user", "content": "hi"}]
    config = fake_config(max_model_len=4096, num_blocks=2048, vocab_size=len(hf))
    with serve(lambda so_far, n: tokens[len(so_far) - n], config=config, tokenizer=tokenizer, answer_format=known) as s:
        client = s.client()
        request: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS}
        whole = client.chat.completions.create(**request)
        with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion()
        for completion in (whole, streamed):
            (choice,) = completion.choices
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == WEATHER
            assert choice.message.reasoning == THOUGHT  # type: ignore[union-attr]
            assert completion.usage is not None and completion.usage.completion_tokens_details is not None
            # All of the first message except the word before its mark.
            count = len(tokenizer.encode(ANALYSIS)) - len(tokenizer.encode("<|channel|>analysis"))
            assert completion.usage.completion_tokens_details.reasoning_tokens == count
        tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        response = client.responses.create(model=MODEL, input="hi", tools=tools)
        assert [item.type for item in response.output] == ["reasoning", "function_call"]


def test_what_is_no_header_is_not_lost() -> None:
    for parts in cuts(FINAL + "<|end|>and more"):
        assert run(HarmonySplitter(harmony_format()), parts)[0] == "It is: 2 <| 3. and more"
    garbage = "<|channel|>" + "to=" * 2000
    for parts in ([garbage], list(garbage)):
        assert run(HarmonySplitter(harmony_format()), parts)[0] == garbage
