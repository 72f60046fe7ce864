"""Outputs with phases: marks in free text, reasoning within a budget, structured output after it, tool calls."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from metal_engine.answers.format_phases import call_phase
from metal_engine.answers.harmony import harmony_format
from metal_engine.engine.token_rules_maker import TokenRulesMaker
from metal_engine.output_phases import CallPhase, CallTrigger, OutputPhases, ReasoningPhase, ToolArguments
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.token_rules import Matcher
from tests.support.splitting import answer_format
from tests.support.sweeps import diagonal
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import EOS, VOCAB_SIZE, byte_ids, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine

CALL = 'call: /[a-c]{1,3}/ "=" /[0-9]{1,4}/ ")"'
DIGITS = StructuredOutputsParams(regex="[0-9]{1,5}")


def calls(*marks: str, parallel: bool = True) -> CallPhase:
    return CallPhase(tuple(CallTrigger(mark, CALL) for mark in marks), parallel)


WHOLE = CallPhase(
    (
        CallTrigger("<call>", CALL),
        CallTrigger(
            "[",
            'call: "a(" r1 | "bc(" r2\nr1: /[0-9]{1,3}/ ")]"\nr2: /[x-z]{1,2}/ ")]"',
            heads=(("a(", "r1"), ("bc(", "r2")),
            is_whole=True,
        ),
    )
)


def thinking(**fields: Any) -> ReasoningPhase:
    return ReasoningPhase(**{"start": "<r>", "end": "</r>", **fields})


@pytest.fixture(scope="module")
def maker() -> Iterator[TokenRulesMaker]:
    made = TokenRulesMaker(tiny_tokenizer(), VOCAB_SIZE)
    yield made
    made.close()


Following = Callable[..., Matcher]


@pytest.fixture
def following(maker: TokenRulesMaker) -> Following:
    """Return a function that makes the matcher of an output with some rules."""

    def matcher(structured: StructuredOutputsParams | None = None, **phases: Any) -> Matcher:
        grammar = maker.rules_for(SamplingParams(structured_outputs=structured, phases=OutputPhases(**phases))).grammar
        assert grammar is not None
        return grammar.matcher()

    return matcher


def allowed(matcher: Matcher, text: str = "", num_drafts: int = 0) -> str:
    """Return the printable characters that may follow after some more text."""
    matcher.consume(byte_ids(text))
    mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    assert matcher.fill_mask(mask, math.inf, num_drafts)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return "".join(ch for ch in map(chr, range(32, 127)) if bits[byte_ids(ch)[0]])


def can_end(matcher: Matcher) -> bool:
    """Return True if the output may end here."""
    mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    assert matcher.fill_mask(mask, math.inf)
    return bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[EOS])


ALL = "".join(map(chr, range(32, 127)))


class TestCalls:
    def test_free_text_has_no_masks(self, following: Following) -> None:
        matcher = following(calls=calls("<call>"))
        assert matcher.is_free
        matcher.observe(byte_ids("text, <cal and (more"))
        assert matcher.is_free and matcher.is_free_after(byte_ids("text <ca"))
        assert not matcher.is_free_after(byte_ids("text <call>"))

    def test_plain_tokens_may_be_observed_late(self, following: Following) -> None:
        matcher = following(calls=calls("<call>"), reasoning=thinking(begins_inside=True, budget=50))
        matcher.observe(byte_ids("think"))
        assert not matcher.plain_tokens  # each token counts
        matcher.observe(byte_ids("</r>answer <"))
        assert not matcher.plain_tokens  # the mark has begun
        matcher.observe(byte_ids("a text"))
        assert matcher.plain_tokens >= set(byte_ids("answer ")) and not matcher.plain_tokens & set(byte_ids("<"))
        assert allowed(matcher, "answer<call>") == "abc" and not matcher.plain_tokens

    def test_a_call_follows_its_grammar_and_then_the_text_is_free(self, following: Following) -> None:
        matcher = following(calls=calls("<call>"))
        assert allowed(matcher, "so <call>") == "abc"
        assert not matcher.is_free
        assert allowed(matcher, "abc") == "="
        assert allowed(matcher, "=123") == ")0123456789"
        assert allowed(matcher, ")") == ALL and matcher.is_free
        assert allowed(matcher, " and <call>") == "abc"

    def test_tokens_after_the_end_are_free_in_one_piece_too(self, following: Following) -> None:
        matcher = following(calls=calls("<call>"))
        assert allowed(matcher, "<call>a=1) text <call>b=2)<call>c") == "=abc"
        assert allowed(matcher, "=3) more") == ALL and matcher.is_free

    def test_an_incomplete_call_mark_can_continue_as_free_text(self, following: Following) -> None:
        matcher = following(calls=calls("<call>"))
        assert allowed(matcher, "<call") == ALL and not matcher.is_free
        matcher.observe(byte_ids("er>"))
        assert matcher.is_free
        assert allowed(matcher, "<call") == ALL
        assert allowed(matcher, ">") == "abc"

    def test_several_marks(self, following: Following) -> None:
        matcher = following(calls=calls("<call>", "[calls]"))
        assert allowed(matcher, "<call>a=1)[call") == ALL
        assert allowed(matcher, "s]") == "abc"

    def test_one_call_only(self, following: Following) -> None:
        matcher = following(calls=calls("<call>", parallel=False))
        assert allowed(matcher, "<call>a=1)") == "" and not matcher.is_free
        mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
        assert matcher.fill_mask(mask, math.inf)
        bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert bits.tolist() == sorted(tiny_tokenizer().eos_token_ids)

    def test_a_call_that_is_the_whole_content(self, following: Following) -> None:
        for before in ("", " \n", " " * 40, "<r>[a(no</r>", "\n<r>hm</r>\n"):
            for head, first in (("[a(", "0123456789"), ("[bc(", "xyz")):
                matcher = following(calls=WHOLE, reasoning=thinking())
                assert allowed(matcher, before + head) == first and not matcher.is_free
        assert allowed(following(calls=WHOLE), "[a(1") == ")0123456789"
        matcher = following(calls=WHOLE)
        assert not matcher.is_free_after(byte_ids("[bc("))
        assert allowed(matcher, "[a(12)]") == "" and not matcher.is_free
        assert allowed(matcher, "[a(1)] and more") == ""

    def test_other_content_is_free(self, following: Following) -> None:
        for text in ("[", "[x](bc(", "[b(", "text [a(", "x<r>hm</r>[a(", " " * 40 + "x" + " " * 40 + "[a(", "[[a("):
            matcher = following(calls=WHOLE, reasoning=thinking())
            for ch in text:
                assert allowed(matcher, ch) == ALL, text
            assert matcher.is_free
            assert allowed(matcher, "<call>") == "abc"
        matcher = following(calls=WHOLE)
        assert allowed(matcher, "<call>a=1)[a(") == ALL and matcher.is_free

    def test_an_incomplete_call_head_can_continue_as_free_text(self, following: Following) -> None:
        matcher = following(calls=WHOLE)
        assert allowed(matcher, "[bc") == ALL and not matcher.is_free
        assert allowed(matcher, "d") == ALL and matcher.is_free
        assert allowed(matcher, " [bc(") == ALL and matcher.is_free

    @pytest.mark.parametrize("text", ['[get_weather(city="Rome", days=3)', '\n[find_trains(city="x")'])
    def test_a_bare_list_of_calls(self, following: Following, text: str) -> None:
        matcher = following(calls=call_phase(answer_format("pythonic"), TOOLS, parallel=True))
        assert set(allowed(matcher, text)) == set(" ,]")
        assert set(allowed(matcher, ", ")) == set(" gf")
        assert allowed(matcher, 'find_trains(city="Oslo")]') == "" and not matcher.is_free
        matcher = following(calls=call_phase(answer_format("pythonic"), TOOLS, parallel=False))
        assert set(allowed(matcher, text)) == set(" ]")

    def test_a_bare_object(self, following: Following) -> None:
        matcher = following(calls=call_phase(answer_format("llama3_json"), TOOLS, parallel=True))
        assert allowed(matcher, '{"name": "get_me') == ALL and matcher.is_free
        matcher = following(calls=call_phase(answer_format("llama3_json"), TOOLS, parallel=True))
        assert set(allowed(matcher, '{"name": "get_weather"')) == set(" ,")
        assert allowed(matcher, ', "parameters": {"city": "Rome"}}') == "" and not matcher.is_free

    def test_the_recipient_of_a_message_that_the_prompt_begins(self, following: Following) -> None:
        matcher = following(calls=call_phase(harmony_format(), TOOLS, parallel=True))
        assert allowed(matcher, " to=") == "f"
        assert allowed(matcher, "functions.") == "fg"
        assert set(allowed(matcher, "find_trains<|channel|>commentary json<|message|>{")) == set(' "')

    def test_calls_within_reasoning_are_text(self, following: Following) -> None:
        matcher = following(calls=calls("<call>"), reasoning=thinking(begins_inside=True))
        matcher.observe(byte_ids("<call>no"))
        assert matcher.is_free
        assert allowed(matcher, "</r><call>") == "abc"

    def test_a_grammar_that_fails_leaves_the_call_free(
        self, following: Following, caplog: pytest.LogCaptureFixture
    ) -> None:
        matcher = following(calls=CallPhase((CallTrigger("<call>", "call: missing"),)))
        assert allowed(matcher, "<call>") == ALL
        assert matcher.num_unconstrained_calls == 1 and "not constrained" in caplog.text
        assert matcher.is_free

    def test_drafts(self, following: Following) -> None:
        """Masks after drafts end where another phase begins."""
        matcher = following(calls=calls("<call>"))
        mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
        matcher.consume(byte_ids("<call>"))
        assert matcher.fill_mask(mask, math.inf)  # waits until the grammar of the call is compiled
        matcher.consume(byte_ids("a"), byte_ids("b=1)x"))
        for num_drafts, expected in ((0, "=abc"), (1, "=abc"), (2, "0123456789"), (3, ")0123456789")):
            assert matcher.fill_mask(mask, math.inf, num_drafts)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            assert "".join(ch for ch in ALL if bits[byte_ids(ch)[0]]) == expected
        with pytest.raises(ValueError, match="draft"):
            matcher.fill_mask(mask, math.inf, 4)
        matcher.consume(byte_ids("=1)"), byte_ids("ab<call>a"))
        assert matcher.fill_mask(mask, math.inf, 0) and matcher.fill_mask(mask, math.inf, 2)
        with pytest.raises(ValueError, match="another phase"):
            matcher.fill_mask(mask, math.inf, 8)


class TestReasoning:
    def test_structured_output_applies_after_reasoning_ends(self, following: Following) -> None:
        matcher = following(DIGITS, reasoning=thinking(begins_inside=True))
        matcher.observe(byte_ids("what 12 </r"))
        assert not matcher.is_free  # the mark's end and the output may share a token
        assert allowed(matcher, "ing> 12") == ALL and matcher.is_free
        assert set(allowed(matcher, "</r>")) == set(" 0123456789")
        assert allowed(matcher, "\n1234") == "0123456789"
        assert allowed(matcher, "5") == "" and not matcher.is_free

    def test_the_model_can_start_reasoning_before_structured_output(self, following: Following) -> None:
        matcher = following(DIGITS, reasoning=thinking())
        assert set(allowed(matcher)) == set(" <0123456789")
        assert allowed(matcher, "<") == "r"
        assert allowed(matcher, "r>") == ALL and matcher.is_free
        assert set(allowed(matcher, "1, no: 2</r>")) == set(" 0123456789")

    def test_reasoning_before_structured_output_cannot_end_the_output(self, following: Following) -> None:
        matcher = following(DIGITS, reasoning=thinking(begins_inside=True))
        assert matcher.must_go_on
        matcher.observe(byte_ids("text</r>"))
        assert not matcher.must_go_on
        assert not following(reasoning=thinking(begins_inside=True, budget=9)).must_go_on

    def test_or_not(self, following: Following) -> None:
        matcher = following(DIGITS, reasoning=thinking())
        assert allowed(matcher, "12") == "0123456789"
        assert allowed(matcher, "345") == ""

    def test_calls_in_place_of_a_structured_output(self, following: Following) -> None:
        for phases, before in (
            ({}, ""),
            ({"reasoning": thinking()}, ""),
            ({"reasoning": thinking()}, "<r>1 <call></r>"),
            ({"reasoning": thinking(begins_inside=True)}, "<call></r>"),
        ):
            matcher = following(DIGITS, calls=calls("<call>"), **phases)
            assert set(allowed(matcher, before)) == set(" <0123456789")
            assert allowed(matcher, " <") in ("c", "rc", "cr")
            assert allowed(matcher, "call>") == "abc"
            assert set(allowed(matcher, "a=1)")) == set(" <") and can_end(matcher)
            assert allowed(matcher, "<call>") == "abc"
            matcher = following(DIGITS, calls=calls("<call>", parallel=False), **phases)
            assert allowed(matcher, f"{before}1") == "0123456789"
            matcher = following(DIGITS, calls=calls("<call>", parallel=False), **phases)
            assert allowed(matcher, f"{before}<call>a=1)") == " " and can_end(matcher)

    def test_calls_that_cannot_be_compiled_beside_a_structured_output(
        self, following: Following, caplog: pytest.LogCaptureFixture
    ) -> None:
        matcher = following(DIGITS, calls=CallPhase((CallTrigger("<call>", "call: missing"),)))
        assert set(allowed(matcher)) == set(" 0123456789")
        rules = "call: args\nargs: missing\nopen: /[xy]/\n"
        trigger = CallTrigger("<call>", rules, (ToolArguments("f", "args", "open"),))
        matcher = following(DIGITS, calls=CallPhase((trigger,)))
        assert allowed(matcher, "<call>") == "xy"
        assert len([message for message in caplog.messages if "not constrained" in message]) == 2

    def test_drafts_at_the_start(self, following: Following) -> None:
        """The mask after a draft that may begin reasoning is unknown."""
        matcher = following(DIGITS, reasoning=thinking())
        matcher.consume([], byte_ids("<r"))
        assert set(allowed(matcher)) == set(" <0123456789")
        with pytest.raises(ValueError, match="draft"):
            allowed(matcher, num_drafts=1)
        matcher.consume(byte_ids("1"), byte_ids("23"))
        assert allowed(matcher, num_drafts=2) == "0123456789"

    def test_calls_are_recognized_after_a_repeated_reasoning_end_mark(self, following: Following) -> None:
        """It is no content. The beginning of the content follows it."""
        for fields, is_call in (({"budget": 9}, True), ({"is_past": True}, True), ({}, False)):
            matcher = following(calls=WHOLE, reasoning=thinking(**fields))
            text = "</r>\n[a(" if "is_past" in fields else "<r>hm</r>\n</r> [a("
            assert allowed(matcher, text) == ("0123456789" if is_call else ALL)

    @pytest.mark.parametrize("budget", [0, 1, 5])
    def test_budget(self, following: Following, budget: int) -> None:
        matcher = following(reasoning=thinking(begins_inside=True, budget=budget, end_text=" So:"))
        for ch in "think"[:budget]:
            assert matcher.is_free
            matcher.observe(byte_ids(ch))
        for ch in " So:</r>":
            assert allowed(matcher) == ch and not matcher.is_free
            matcher.observe(byte_ids(ch))
        assert matcher.is_free and allowed(matcher, "content" * 5) == ALL
        assert matcher.is_free

    def test_budget_of_reasoning_that_the_model_opens(self, following: Following) -> None:
        matcher = following(DIGITS, reasoning=thinking(budget=3))
        matcher.consume(byte_ids("<r>abc"))
        assert [allowed(matcher, ch) for ch in ["", *"</r"]] == list("</r>")
        assert set(allowed(matcher, ">")) == set(" 0123456789")

    def test_reasoning_that_ends_by_itself_has_no_forced_end(self, following: Following) -> None:
        matcher = following(reasoning=thinking(begins_inside=True, budget=30))
        matcher.observe(byte_ids("short</r>" + "content" * 10))
        assert matcher.is_free

    def test_drafts_up_to_the_budget(self, following: Following) -> None:
        matcher = following(reasoning=thinking(begins_inside=True, budget=3))
        assert matcher.is_free_after(byte_ids("ab")) and not matcher.is_free_after(byte_ids("abc"))
        matcher.consume(byte_ids("abc"), byte_ids("</r"))
        assert allowed(matcher, num_drafts=0) == "<"


# --- in the engine -------------------------------------------------------------------------------------------------

MARKS = "klpquvwyz!?"  # so many that a random model often writes one of them; none is part of a longer token
PROMPTS = ["a prompt of some length", "b", "sixteen tokens..", "a prompt of some length, and on and on"]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Requests with all kinds of phases."""
    every = [
        {"phases": OutputPhases(calls=calls(*MARKS))},
        {"phases": OutputPhases(calls=calls(*MARKS, "ab"), reasoning=thinking(begins_inside=True, end="d", budget=9))},
        {"phases": OutputPhases(reasoning=thinking(begins_inside=True, budget=7)), "structured_outputs": DIGITS},
        {"phases": OutputPhases(thinking(start="0", end="5"), calls("k")), "structured_outputs": DIGITS},
        {"phases": OutputPhases(calls=calls(*MARKS, parallel=False)), "min_tokens": 30},
        {"phases": OutputPhases(calls=calls(*MARKS)), "repetition_penalty": 1.1},
        {},
    ]
    return [
        (
            byte_ids(PROMPTS[i % len(PROMPTS)]),
            SamplingParams(max_tokens=40 if i % 7 else 60, temperature=0.9, seed=i, **fields),
        )
        for i, fields in enumerate(every * 2)
    ]


def check_calls(text: str, marks: str) -> int:
    """Check that each call in a text follows its grammar. Return the number of complete calls."""
    num_calls = at = 0
    while found := re.compile(f"[{marks}]").search(text, at):
        whole = re.compile(r"[a-c]{1,3}=[0-9]{1,4}\)").match(text, found.end())
        if whole is None:  # cut off by the limit of tokens
            assert re.fullmatch(r"(?:[a-c]{0,3}|[a-c]{1,3}=[0-9]{0,4})", text[found.end() :]), text
            break
        num_calls, at = num_calls + 1, whole.end()
    return num_calls


def text_of(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs)


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], str]]:
    """Tokens and text of each request that runs alone, without planning ahead."""
    engine = tiny_engine(enable_prefix_caching=False)
    outputs = [run_all(engine, [request])[0] for request in requests()]
    return [(token_ids(one), text_of(one)) for one in outputs]


def test_outputs_keep_to_the_rules(alone: list[tuple[list[int], str]]) -> None:
    assert sum(check_calls(text, MARKS) for _, text in alone[::7]) > 1
    for _, text in alone[1::7]:
        assert "d" in text[:9] or text[9:].startswith("d")
    for _, text in alone[2::7]:
        assert re.fullmatch(r"(?s).*</r>\s{0,20}[0-9]{1,5}", text), text
    some_calls = r"(?:k[a-c]{0,3}(?:=[0-9]{0,4}\)?)?\s{0,20})+"  # the last one may be cut off
    for _, text in alone[3::7]:
        after = rf"(?:5\s{{0,20}}(?:[0-9]{{0,5}}|{some_calls}))?"
        assert re.fullmatch(rf"(?s)\s{{0,20}}(?:[1-9][0-9]{{0,4}}|{some_calls}|0[^5]*{after})", text), text
    for _, text in alone[4::7]:
        assert check_calls(text, MARKS) <= 1


SPECULATIVE = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)


@pytest.mark.parametrize("make", [
    pytest.param(lambda: tiny_engine(), id="together", marks=pytest.mark.full),
    pytest.param(lambda: tiny_engine(max_num_batched_tokens=16), id="chunked"),
    pytest.param(lambda: tiny_engine(ahead=True), id="ahead"),
    pytest.param(lambda: tiny_engine(behind=True), id="behind", marks=pytest.mark.full),
    pytest.param(lambda: tiny_engine(behind=True, replay=True), id="replayed"),
    pytest.param(lambda: tiny_engine(ahead=True, block_size=4, num_blocks=90), id="preempted"),
    pytest.param(lambda: tiny_engine(speculative=SPECULATIVE), id="drafts"),
    pytest.param(lambda: tiny_engine(ahead=True, speculative=SPECULATIVE), id="drafts ahead"),
])  # fmt: skip
def test_phased_outputs_do_not_depend_on_the_batch_or_dispatch_mode(
    make: Callable[[], SteppedEngine], alone: list[tuple[list[int], str]]
) -> None:
    engine = make()
    assert [token_ids(one) for one in run_all(engine, requests())] == [tokens for tokens, _ in alone]
    assert engine.metrics.num_unconstrained_calls == 0
    assert engine.stats.num_used_blocks == 0


def recurrent_engine(architecture: str, **config: Any) -> SteppedEngine:
    made = {"architecture": architecture, "num_state_slots": 24, "num_blocks": 100, "block_size": 4, "max_num_seqs": 8}
    return tiny_engine(**made | config)


@cache
def recurrent_outputs(architecture: str) -> list[list[int]]:
    """Return the tokens of each request that runs alone, without planning ahead."""
    engine = recurrent_engine(architecture, enable_prefix_caching=False)
    return [token_ids(run_all(engine, [request])[0]) for request in requests()[:7]]


def test_an_output_does_not_end_within_the_reasoning_before_a_structured_output() -> None:
    phases = OutputPhases(reasoning=thinking(begins_inside=True))
    params = SamplingParams(max_tokens=20, temperature=0.0, structured_outputs=DIGITS, phases=phases)
    (outputs,) = run_all(tiny_engine(), [(byte_ids("a"), replace(params, logit_bias={EOS: 100.0}))])
    assert len(token_ids(outputs)) == 20 and EOS not in token_ids(outputs)


RECURRENT_WAYS: dict[str, dict[str, Any]] = {
    "ahead": {"ahead": True},
    "behind, preempted": {"behind": True, "num_blocks": 40},
    "replayed": {"ahead": True, "replay": True},
    "drafts": {"speculative": SPECULATIVE},
}


@pytest.mark.parametrize(("way", "architecture"), diagonal(RECURRENT_WAYS, ["qwen3_5", "mamba"]))
def test_recurrent_models(architecture: str, way: str) -> None:
    """A state that has advanced past a token that is taken back starts again from a checkpoint."""
    engine = recurrent_engine(architecture, **RECURRENT_WAYS[way])
    assert [token_ids(one) for one in run_all(engine, requests()[:7])] == recurrent_outputs(architecture)
    assert engine.stats.num_used_blocks == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_the_last_block_of_an_output_is_cached(ahead: bool) -> None:
    """The token before the end of sequence fills a block. Its KV is final when the output ends."""
    engine, prompt = tiny_engine(ahead=ahead), byte_ids("x" * 34)
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[e-g]{6}"))
    output = token_ids(run_all(engine, [(prompt, params)])[0])
    assert len(prompt + output) == 41
    (following,) = run_all(engine, [([*prompt, *output, *byte_ids("more")], SamplingParams(max_tokens=1))])
    assert following[-1].num_cached_tokens == 40
