"""Parsing of outputs while they arrive: the parts of the text, and the reasoning tokens, for all ways to cut them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.answers.answer_format import AnswerFormat, ReasoningMarks, begins_in_reasoning
from metal_engine.answers.chat_answers import AnswerReader, ChatAnswers
from metal_engine.answers.deltas import AnswerDelta, CallStart, TextDelta, assemble
from metal_engine.answers.harmony import harmony_format
from metal_engine.answers.tool_plan import NO_TOOLS, ToolPlan, plan_tools
from metal_engine.errors import ParameterError
from metal_engine.sampling_params import StructuredOutputsParams
from tests.support.splitting import THINK, answer_format, cuts
from tests.support.tool_formats import TOOLS

PARSED = ToolPlan(shown=TOOLS, parsed=TOOLS)
CALL = '<tool_call>{"name": "find_trains", "arguments": {"city": "Rome"}}</tool_call>'
FRAGMENTS = ["<think>", "</think>", "<thi", "nk>", "</", "think>", "hm ", "\n", "é", "x", CALL, "<tool_call>", "{}"]
CHANNELS = [
    "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", "<|end|>", "<|call|>",
    "<|channel|>commentary to=functions.find_trains<|message|>", '{"city": "Rome"}', "hm ", "\n", "<|", "to=", "x",
]  # fmt: skip


# A text, the ends of its tokens, and two ways to cut it into outputs, each as numbers of tokens.
Cut = tuple[str, list[int], list[int], list[int]]


@st.composite
def outputs(draw: st.DrawFn, fragments: list[str]) -> Cut:
    text = "".join(draw(st.lists(st.sampled_from(fragments), max_size=12)))
    ends = [*sorted(draw(st.lists(st.integers(0, len(text)), max_size=40))), len(text)]
    sizes = st.lists(st.integers(1, 6), max_size=12)
    return text, ends, draw(sizes), draw(sizes)


def read(
    reader: AnswerReader, text: str, ends: list[int], sizes: list[int], reason: str
) -> tuple[list[AnswerDelta], list[int]]:
    """Parse a text in outputs of the given sizes.

    Return the deltas, and the count of reasoning tokens after each output.
    """
    deltas: list[AnswerDelta] = []
    counts = [0] * (len(ends) + 1)
    at = shown = 0
    for size in [*sizes, len(ends)]:
        if at < len(ends):
            some = ends[at : at + size]
            at += len(some)
            deltas += reader.add(text[shown : some[-1]], some, reason if at == len(ends) else None)
            shown = some[-1]
            counts[at] = reader.num_reasoning_tokens
    return deltas, counts


TAGS = [
    "<tool_call>", "</tool_call>", "<function=find_trains>", "<function=", "other>", "</function>", "<parameter=city>",
    "<parameter=days>", "</parameter>", "Rome", "3", "\n", "<", "<think>", "</think>", "x",
]  # fmt: skip
LISTS = [
    '[find_trains(city="Rome")]', "[find_trains(", "[find_", "days=3", ")]", "[", ", ", "\n", "x", "<think>",
    "</think>", "<|tool_call_start|>", "<|tool_call_end|>",
]  # fmt: skip
HEADERS = [
    "[TOOL_CALLS]", "find_trains", "[CALL_ID]", "abc", "[ARGS]", '{"city": "Rome"}', '{"city": ', " ", "\n", "[", "x",
    '[{"name": "find_trains", "arguments": {}}]', "<think>", "</think>",
]  # fmt: skip
FORMATS = {
    "marks": (answer_format("json_tools"), FRAGMENTS),
    "harmony": (harmony_format(), CHANNELS),
    "qwen3_coder": (answer_format("qwen3_coder"), TAGS),
    "pythonic": (answer_format("pythonic"), LISTS),
    "mistral": (answer_format("mistral"), HEADERS),
}


@pytest.mark.parametrize(("known", "fragments"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("plan", [NO_TOOLS, PARSED], ids=["plain", "tools"])
@settings(max_examples=300, deadline=None)
@given(
    data=st.data(), incremental=st.booleans(), in_reasoning=st.booleans(), reason=st.sampled_from(["stop", "length"])
)
def test_cuts_make_no_difference(
    known: AnswerFormat,
    fragments: list[str],
    plan: ToolPlan,
    data: st.DataObject,
    incremental: bool,
    in_reasoning: bool,
    reason: str,
) -> None:
    text, ends, one, other = data.draw(outputs(fragments))
    answers = ChatAnswers(known, plan, in_reasoning and not known.harmony)
    whole, counts = read(answers.reader(incremental=incremental), text, ends, one, reason)
    again, counts_again = read(answers.reader(incremental=incremental), text, ends, other, reason)
    # Call ids are random. Streamed parts of a malformed call depend on the cuts.
    if not incremental:
        a, b = assemble(whole), assemble(again)
        assert (a.content, a.reasoning) == (b.content, b.reasoning)
        assert [(c.name, c.arguments) for c in a.tool_calls] == [(c.name, c.arguments) for c in b.tool_calls]
    assert counts[-1] == counts_again[-1]
    assert all(x == y for x, y in zip(counts, counts_again, strict=True) if x and y)


def in_reasoning_after(text: str, begun: bool) -> list[bool]:
    """Return for each position in the text whether the next character is reasoning, by definition."""
    states = [begun]
    since = 0
    for end in range(1, len(text) + 1):
        mark = THINK.end if states[-1] else THINK.start
        crossed = text[since:end].endswith(mark)
        since = end if crossed else since
        states.append(states[-1] != crossed)
    return states


@settings(max_examples=300, deadline=None)
@given(given_outputs=outputs(FRAGMENTS), begun=st.booleans())
def test_tokens_of_reasoning(given_outputs: Cut, begun: bool) -> None:
    """A token counts if there is reasoning directly before it, in it, or directly after it."""
    text, ends, sizes, _ = given_outputs
    _, counts = read(
        ChatAnswers(AnswerFormat(reasoning=THINK), NO_TOOLS, begun).reader(incremental=False),
        text, ends, sizes, "stop",
    )  # fmt: skip
    states = in_reasoning_after(text, begun)
    tokens = [any(states[begin : end + 1]) for begin, end in pairwise([0, *ends])]
    for place, count in enumerate(counts):
        assert count in (0, sum(tokens[:place]))
    assert counts[-1] == sum(tokens)


def test_a_header_may_be_so_long_wherever_it_is_cut() -> None:
    """A longer header is text."""
    for length in range(990, 1010):
        header = "<|channel|>analysis".ljust(length)
        text = f"{header}<|message|>hm<|end|>"
        reader = ChatAnswers(harmony_format(), NO_TOOLS).reader
        whole = assemble(reader(incremental=False).add(text, (), "stop"))
        one = reader(incremental=False)
        cut = [delta for ch in text for delta in one.add(ch, ())]
        assert assemble(cut + one.add("", (), "stop")) == whole
        assert whole.reasoning == ("hm" if length <= 1000 else None)


def test_what_needs_special_tokens() -> None:
    marks = ReasoningMarks("[THINK]", "[/THINK]")
    known = AnswerFormat(tool=answer_format("json_tools").tool, special=True)
    forced = ToolPlan(shown=TOOLS, forced=True)
    for each, plan, needs in [
        (known, NO_TOOLS, False),
        (known, PARSED, True),
        (known, forced, False),
        (AnswerFormat(reasoning=marks, special=True), NO_TOOLS, True),
        (AnswerFormat(reasoning=marks), PARSED, False),
    ]:
        assert ChatAnswers(each, plan).needs_special_tokens == needs


def test_a_forced_answer_has_no_reasoning() -> None:
    forced = ToolPlan(shown=TOOLS, forced=True, name="find_trains")
    reader = ChatAnswers(AnswerFormat(reasoning=THINK), forced, in_reasoning=True).reader(incremental=True)
    assert isinstance(reader.add('{"city": "<think>"}', [3, 18], "stop")[0], CallStart)
    assert reader.num_reasoning_tokens == 0 and reader.num_calls == 1


@pytest.mark.parametrize(
    ("given", "text", "content", "reasoning"),
    [
        ({"json": {"type": "object"}}, '{"a": "<think>"}', '{"a": "<think>"}', None),
        ({"json_object": True}, "{}", "{}", None),
        ({"choice": ("yes", "no")}, "yes", "yes", None),
        ({"regex": "[ab]+"}, "abba", "abba", None),
        ({"grammar": 'start: "a"+'}, "aa", "aa", None),
        # The grammar spells out the mark that ends reasoning.
        ({"regex": r"[a-z ]+</think>\d+"}, "hm hm</think>7", "7", "hm hm"),
    ],
)
def test_answers_under_a_grammar_are_never_empty(
    given: dict[str, Any], text: str, content: str, reasoning: str | None
) -> None:
    """The prompt opens the reasoning section, and most of these grammars forbid the mark that closes the section."""
    known = answer_format("json_tools")
    answers = ChatAnswers.for_prompt(known, PARSED, [], lambda ids: "assistant\n<think>\n")
    assert answers.in_reasoning and answers.under(None) is answers
    for incremental in (False, True):
        for parts in cuts(text):
            reader = answers.under(StructuredOutputsParams(**given)).reader(incremental=incremental)
            deltas = [delta for part in parts for delta in reader.add(part, ())]
            answer = assemble(deltas + reader.add("", (), "stop"))
            assert (answer.content, answer.reasoning, answer.tool_calls) == (content, reasoning, ())


def test_a_forced_answer_has_a_grammar_of_its_own() -> None:
    forced = ChatAnswers(AnswerFormat(reasoning=THINK), ToolPlan(shown=TOOLS, forced=True), in_reasoning=True)
    assert forced.under(StructuredOutputsParams(json_object=True)) is forced


def test_tools_without_marks_to_look_for() -> None:
    """If the format of calls is not known, all text is content."""
    reader = ChatAnswers(AnswerFormat(), PARSED).reader(incremental=True)
    assert reader.add("<tool_call>", (), "stop") == [TextDelta("content", "<tool_call>")]


def test_choices_that_do_not_fit() -> None:
    known = answer_format("json_tools")
    twice = [*TOOLS, TOOLS[0]]
    for tools, choice, more, name in [
        ([], "required", {}, "tool_choice"),
        (twice, "auto", {}, "tools"),
        (TOOLS, "required", {"name": "other"}, "tool_choice"),
        (TOOLS, "auto", {"auto_tool_choice": False}, "tool_choice"),
    ]:
        given_settings = {"template_takes_tools": True, "auto_tool_choice": True, **more}
        with pytest.raises(ParameterError) as caught:
            plan_tools(tools, choice, known, **given_settings)  # type: ignore[arg-type]
        assert caught.value.name == name
    assert plan_tools(TOOLS, "none", known, template_takes_tools=True, auto_tool_choice=True) == NO_TOOLS
    left_as_text = AnswerFormat(finds_calls=False)
    with pytest.raises(ParameterError, match="--tool-call-parser"):
        plan_tools(TOOLS, "auto", left_as_text, template_takes_tools=False, auto_tool_choice=True)


def test_where_a_prompt_ends() -> None:
    assert begins_in_reasoning(THINK, "assistant\n<think>\n", continues=False)
    assert not begins_in_reasoning(THINK, "assistant\n<think>\n\n</think>\n\n", continues=False)
    assert not begins_in_reasoning(THINK, "say <think> please. assistant\n", continues=False)
    assert begins_in_reasoning(THINK, "assistant\n<think>Well", continues=True)
    assert not begins_in_reasoning(THINK, "assistant\n<think>Well</think>So", continues=True)
