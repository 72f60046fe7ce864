"""Text from tokens: whole characters and stop strings, for all ways to cut the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from metal_engine.answers.call_end import CallEnd
from metal_engine.answers.call_syntaxes.syntax import JSON_QUOTES
from metal_engine.output_phases import CallText, ReasoningPhase
from metal_engine.request import PreparedRequest, RequestOutput, TokenLogprobs, merge_outputs
from metal_engine.sampling_params import SamplingParams
from metal_engine.text.detokenizer import Detokenizer
from metal_engine.text.output_text import OutputText
from metal_engine.text.stop_strings import StopStrings, StopStringsOutsideReasoning, stop_automaton
from metal_engine.text.tokenizer import Tokenizer
from metal_engine.token_rules import NO_RULES
from tests.support.tokenizers import chat_tokenizer
from tools.fixtures.fake_engine import EOS, byte_ids, byte_tokens, tiny_tokenizer

tokenizer = cache(tiny_tokenizer)


# --- StopStrings --------------------------------------------------------------------------------------------


def truth(text: str, stops: tuple[str, ...], num_ignored: int) -> tuple[str, str | None]:
    """Return the result by definition: the text is cut at the first position at which a stop string is complete.

    Ignores the stop strings that end in the first ``num_ignored`` characters.
    """
    for end in range(1 + num_ignored, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed(stops: tuple[str, ...], pieces: list[str], num_inactive: int) -> tuple[list[str], str | None]:
    finder = StopStrings(stop_automaton(stops))
    shown = []
    for i, piece in enumerate(pieces):
        text, found = finder.add(piece, is_active=i >= num_inactive)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, finder.flush()], None


def cut(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(c % (len(text) + 1) for c in cuts), len(text)])]


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 1000), max_size=10),
    num_inactive=st.integers(0, 3),
)
@example(text="abc", stops=("abc", "b"), cuts=[2], num_inactive=0)
@example(text="aabaab", stops=("aabaac", "ab"), cuts=[], num_inactive=0)
@example(text="abab", stops=("ab",), cuts=[3], num_inactive=1)
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: tuple[str, ...], cuts: list[int], num_inactive: int
) -> None:
    pieces = cut(text, cuts)
    shown, found = feed(stops, pieces, num_inactive)
    assert ("".join(shown), found) == truth(text, stops, len("".join(pieces[:num_inactive])))


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopStrings(stop_automaton(("STOP",)))
    assert finder.add("go ST") == ("go ", None)
    assert finder.add("AR") == ("STAR", None)
    assert finder.add("S") == ("", None)
    assert finder.flush() == "S" and finder.flush() == ""


def test_long_stop_strings_cost_no_more_than_their_length() -> None:
    """A text that always looks like the start of a stop string.

    Without constant time per character, this takes minutes.
    """
    stop = "a" * 16_000 + "b"
    finder = StopStrings(stop_automaton((stop, "a" * 300 + "c")))
    shown = [finder.add("a") for _ in range(50_000)]
    assert sum(len(text) for text, _ in shown) == 50_000 - 16_000 and not any(found for _, found in shown)
    assert finder.add("b") == ("", stop)


# --- Detokenizer --------------------------------------------------------------------------------------------


readable = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=30)


@given(prompt=readable, text=readable)
def test_pieces_of_the_tokenizers_own_tokens(prompt: str, text: str) -> None:
    detokenizer = tokenizer().detokenizer(tokenizer().encode(prompt), True)
    pieces = [detokenizer.add(token) for token in tokenizer().encode(text)]
    assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)


def tokens_of(*spellings: bytes) -> tuple[Tokenizer, list[int]]:
    """Return a byte-level tokenizer with a token for each spelling, and the ids of the tokens."""
    tokens = byte_tokens()
    own = ["".join(tokens[byte] for byte in spelling) for spelling in spellings]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *own]))}
    backend = BackendTokenizer(BPE(vocab=vocab, merges=[]))
    backend.decoder = ByteLevelDecoder()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)), [vocab[token] for token in own]


def test_whole_characters_do_not_wait_for_half_a_one() -> None:
    made, (half, rest) = tokens_of(b" Gr\xc3", b"\xb6n")
    detokenizer = made.detokenizer([65], True)
    assert [detokenizer.add(token) for token in [half] * 3] == [" Gr", "\ufffd Gr", "\ufffd Gr"]
    assert [detokenizer.add(token) for token in (rest, half, rest)] == ["ön", " Gr", "ön"]


@given(
    cuts=st.lists(st.integers(1, 60), max_size=12),
    at=st.integers(0, 100),
    text=st.text("aé日😀 ", min_size=1, max_size=15) | readable.filter(bool),
)
@example(cuts=[3, 5], at=1, text="Grön")
@example(cuts=[4, 8, 12], at=3, text="日日日日")
@example(cuts=[1, 2, 3, 4, 5, 6], at=6, text="aé😀")
def test_a_prompt_ends_within_any_token(cuts: list[int], at: int, text: str) -> None:
    """Tokens of several bytes, cut anywhere: each character appears once, as soon as it is whole."""
    raw = text.encode()
    pieces = [raw[a:b] for a, b in pairwise(sorted({0, len(raw), *(c for c in cuts if c < len(raw))}))]
    made, ids = tokens_of(*pieces)
    at %= len(ids)
    detokenizer, before = made.detokenizer(ids[:at], True), b"".join(pieces[:at])
    for i in range(at, len(ids)):
        whole = len(before.decode(errors="ignore"))
        before += pieces[i]
        assert detokenizer.add(ids[i]) == before.decode(errors="ignore")[whole:]


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_first", "prepending", "unigram"])
def test_whole_characters_of_several_kinds_of_decoders(kind: str) -> None:
    made = Tokenizer(chat_tokenizer(kind, ""))
    ids = made.encode("the é日<|im_end|> 😀😀the日ab é")
    for start in range(len(ids)):
        detokenizer = made.detokenizer(ids[:start], True)
        shown = wholes(made, ids[:start])
        for end in range(start, len(ids)):
            shown += detokenizer.add(ids[end])
            assert shown == wholes(made, ids[: end + 1])


def wholes(made: Tokenizer, ids: list[int]) -> str:
    """Return the text of the tokens up to the last whole character."""
    texts = (made.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids), -1, -1))
    return next(text for text in texts if not text.endswith("\ufffd"))


@given(prompt=st.lists(st.integers(0, 255), max_size=8), ids=st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_are_survived(prompt: list[int], ids: list[int]) -> None:
    detokenizer = tokenizer().detokenizer(prompt, True)
    assert "".join(detokenizer.add(token) for token in [*ids, *byte_ids(" end of text")]).endswith(" end of text")


@pytest.mark.parametrize(("token_id", "text"), [(EOS, ""), (0x80, "\ufffd")])
def test_tokens_without_a_character_are_decoded_a_few_times(
    token_id: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, num_decoded = Detokenizer._decode, 0

    def counted(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(detokenizer, token_ids)

    monkeypatch.setattr(Detokenizer, "_decode", counted)
    detokenizer = tokenizer().detokenizer([65], True)
    ids = [*[token_id] * 2000, *byte_ids("é")]
    assert "".join(map(detokenizer.add, ids)) == text * 2000 + "é"
    assert num_decoded < 40 * len(ids)


def test_half_characters_without_an_end_are_not_shown() -> None:
    made, (half, rest) = tokens_of(b"\xe6\x97", b"\xa5\xe6\x97")
    assert "".join(map(made.detokenizer([65], True).add, [half, *[rest] * 100])) == "日" * 100


# --- OutputText ----------------------------------------------------------------------------------------


def start(params: SamplingParams, prompt: str = "p") -> OutputText:
    stops = stop_automaton(params.stop) if params.stop else None
    return OutputText(PreparedRequest(byte_ids(prompt), params, 100, NO_RULES, stop_automaton=stops), tokenizer())


def run(text: OutputText, steps: list[RequestOutput]) -> list[RequestOutput]:
    outputs = []
    for step in steps:
        text.add(step)
        outputs.append(step)
        if step.finished:
            break
    return outputs


def test_several_tokens_in_one_step() -> None:
    first, output = (RequestOutput("r", token_ids=byte_ids(text)) for text in ("é日", "abc"))
    run(start(SamplingParams(stop=("b",))), [first, output])
    assert first.text == "é日"
    assert (output.text, output.finish_reason) == ("a", "stop")
    assert output.token_ids == byte_ids("ab"), "tokens after a stop string are dropped"
    assert output.num_output_tokens == len(byte_ids("é日ab"))


# --- where tokens end ---


def grouped_steps(ids: list[int], sizes: list[int], finish_reason: str) -> list[RequestOutput]:
    """Return steps with the given numbers of tokens. The last step ends the output, with EOS if it is a stop.

    The id of log probabilities is the place of their token.
    """
    ids = [*ids, EOS] if finish_reason == "stop" else ids
    steps = []
    at = 0
    for size in [*sizes, len(ids)]:
        if at < len(ids):
            places = range(at, min(at + size, len(ids)))
            logprobs = [TokenLogprobs(place, -1.0, 1, ()) for place in places]
            steps.append(RequestOutput("r", token_ids=[ids[place] for place in places], logprobs=logprobs))
            at += size
    steps[-1].finish_reason = finish_reason
    return steps


token_ids = st.lists(
    st.sampled_from([*b"abST", *"é😀".encode(), 0xFF, 261, 262, EOS, EOS - 1]), min_size=1, max_size=30
)


@settings(max_examples=150, deadline=None)
@given(
    ids=token_ids,
    sizes=st.lists(st.integers(1, 4), max_size=30),
    stop=st.sampled_from([(), ("ST",), ("ab", "STOP"), ("bb", "é"), ("aaab",), ("<|im_end|>a",)]),
    include=st.booleans(),
    skip_special=st.booleans(),
    min_tokens=st.integers(0, 4),
    finish_reason=st.sampled_from(["stop", "length"]),
    merges=st.lists(st.booleans(), min_size=40, max_size=40),
)
@example([*b"aab"], [1, 1, 1], ("ab",), False, True, 0, "length", [False] * 40)
@example([*b"aaab", 261, *b"a"], [2, 4], ("bST",), False, True, 0, "length", [True] * 40)
@example([*b"aab", EOS, *b"ab"], [6], ("ab",), True, False, 0, "stop", [False] * 40)
@example([*b"abab"], [1, 1, 1, 1], ("ab",), False, True, 2, "stop", [True] * 40)
def test_token_ends_are_right_for_any_step_size_and_merging(
    ids: list[int],
    sizes: list[int],
    stop: tuple[str, ...],
    include: bool,
    skip_special: bool,
    min_tokens: int,
    finish_reason: str,
    merges: list[bool],
) -> None:
    """Token ends are right for any number of tokens per step, and for outputs merged for a slow reader."""
    params = SamplingParams(
        stop=stop,
        include_stop_str_in_output=include,
        skip_special_tokens=skip_special,
        min_tokens=min_tokens,
        ignore_eos=True,
        logprobs=0,
    )
    outputs = run(start(params), grouped_steps(ids, sizes, finish_reason))
    text = "".join(output.text for output in outputs)
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert num_tokens == outputs[-1].num_output_tokens
    # The hidden token is EOS, if it was reached.
    is_hidden = finish_reason == "stop" and num_tokens == len(ids) + 1 and not include
    seen = [*ids, EOS][: num_tokens - is_hidden]
    stop_reason = outputs[-1].stop_reason
    # End of the searched text, including a hidden stop string.
    limit = None if stop_reason is None else len(text) + (0 if include else len(str(stop_reason)))
    detokenizer = tokenizer().detokenizer(byte_ids("p"), skip_special)
    ends = [0]
    for token_id in seen:
        ends.append(ends[-1] + len(detokenizer.add(token_id)))
        if limit is not None and ends[-1] >= limit:
            break
    expected = [min(end, len(text)) for end in ends[1:]]
    expected += [len(text)] * (len(seen) - len(expected))
    assert [end for output in outputs for end in output.token_ends] == expected

    # Each entry comes with the output that shows the token's end.
    shown = num_ended = 0
    for output in outputs:
        shown += len(output.text)
        num_ended += len(output.token_ends)
        if not output.finished:
            assert num_ended == sum(end <= shown for end in ends[1 : output.num_output_tokens + 1])
    told = [entry.token_id for output in outputs for entry in output.text_logprobs or ()]
    assert told == [place for place, (begin, end) in enumerate(pairwise(ends)) if begin < len(text) or end <= len(text)]

    merged = [outputs[0]]
    for output, merge in zip(outputs[1:], merges, strict=False):
        if merge:
            merged[-1] = merge_outputs([merged[-1], output])
        else:
            merged.append(output)
    assert [end for output in merged for end in output.token_ends] == expected
    assert [entry.token_id for output in merged for entry in output.text_logprobs or ()] == told


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(("text", "begins_inside", "shown", "found"), [
    ("STOP</r>a STOP b", True, "STOP</r>a ", "STOP"),
    ("a<r>STOP</r> STO<r>P</r>", False, None, None),
    ("a<r>STOP</r>STOP", False, "a<r>STOP</r>", "STOP"),
    ("ST<r>OP</r>OP", False, None, None),
    ("STOP<r>", False, "", "STOP"),
    ("no end STOP", True, None, None),
    ("a</r>\n\nb\n\nc", True, "a</r>\n\nb", "\n\n"),
    ("a\n\nb", False, "a", "\n\n"),
    ("<r>a\n\n</r>\n\n<r>\n\nb</r>\n\n", False, None, None),
])  # fmt: skip
def test_stop_strings_have_no_effect_within_reasoning(
    text: str, begins_inside: bool, shown: str | None, found: str | None, step: int
) -> None:
    check_stop_strings(ReasoningPhase("<r>", "</r>", begins_inside), text, shown, found, step)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(("text", "more", "shown"), [
    ("so <call>a<r>b</call> STOP", {}, "so <call>a<r>b</call> "),
    ("<call>a<r>bSTOP", {}, "<call>a<r>b"),
    ("<call></call><r>STOP</r>STOP", {}, "<call></call><r>STOP</r>"),
    ("<call>a<r>STOP", {"calls": CallText(("<call>",))}, "<call>a<r>"),
    ('<call>{"a": "</call><r>"}STOP', {}, '<call>{"a": "</call><r>"}'),
    ('<call>["</call><r>", 1]</call>STOP', {}, '<call>["</call><r>", 1]</call>'),
    ('<call>["</call><r>"]</call><r>STOP</r>STOP', {}, '<call>["</call><r>"]</call><r>STOP</r>'),
    ('<call>["a</call>\n<r>STOP</r>STOP', {}, '<call>["a</call>\n<r>STOP</r>'),  # the quote has no end
    ("<bare>a<r>STOP", {}, "<bare>a<r>"),
    ("a<r>STOP</call>", {}, None),
    # A call that may begin only as the first text of the content
    (" {f <r>STOP", {}, " {f <r>"),
    ("<r>STOP</r>\n{f <r>STOP", {}, "<r>STOP</r>\n{f <r>"),
    ("{f <r></call><r>STOP</r>STOP", {}, "{f <r></call><r>STOP</r>"),
    ("{f <r>STOP", {"calls": CallText(("<call>",), first_starts=("{f ",))}, "{f <r>"),
    ("a{f <r>STOP", {}, None),
    ("{g {f <r>STOP", {}, None),
    ("<call></call>{f <r>STOP</r>STOP", {}, "<call></call>{f <r>STOP</r>"),
    # Within a structured output
    ('{"a": "<r>"} STOP', {"is_structured": True}, '{"a": "<r>"} '),
    (' \n<r>STOP</r> "<r>STOP', {"is_structured": True}, ' \n<r>STOP</r> "<r>'),
    ("STOP<r>x</r>", {"is_structured": True, "begins_inside": True}, None),
    ("<n>STOP<r>STOP</r>STOP<f>{<r>STOP", {"is_structured": True, "content_start": "<f>"},
     "<n>STOP<r>STOP</r>STOP<f>{<r>"),
])  # fmt: skip
def test_marks_of_reasoning_in_calls_and_structured_outputs_are_text(
    text: str, more: dict[str, Any], shown: str | None, step: int
) -> None:
    is_structured = more.get("is_structured", False)
    calls = CallText(("<call>", "<bare>"), lambda: CallEnd(JSON_QUOTES, ("</call>",)), first_starts=("{f ",))
    fields = {"calls": calls, **more}
    fields.pop("is_structured", None)
    found = None if shown is None else "STOP"
    check_stop_strings(ReasoningPhase("<r>", "</r>", **fields), text, shown, found, step, is_structured=is_structured)


def check_stop_strings(
    reasoning: ReasoningPhase,
    text: str,
    shown: str | None,
    found: str | None,
    step: int,
    *,
    is_structured: bool = False,
) -> None:
    stops = StopStringsOutsideReasoning(stop_automaton(("STOP", "\n\n")), reasoning, is_structured=is_structured)
    result = ""
    for i in range(0, len(text), step):
        more, stop = stops.add(text[i : i + step])
        result += more
        if stop is not None:
            break
    assert stop == found
    assert result + (stops.flush() if stop is None else "") == (text if shown is None else shown)
