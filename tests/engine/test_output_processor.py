"""Text out of tokens: whole characters, stop strings, wherever the pieces are cut."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metal_engine.engine.output_processor import OutputProcessor, StopStrings
from metal_engine.request import Request, RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import TokenOutput
from tools.fixtures.fake_engine import EOS, byte_ids, tiny_tokenizer

tokenizer = cache(tiny_tokenizer)


# --- StopStrings --------------------------------------------------------------------------------------------


def truth(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: cut at the first position where some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    finder = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, found = finder.add(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, finder.flush()], None


def cut(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 1000), max_size=10),
)
@example(text="abc", stops=("abc", "b"), cuts=[2])
@example(text="aabaab", stops=("aabaac", "ab"), cuts=[])
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    shown, found = feed(stops, cut(text, cuts))
    assert ("".join(shown), found) == truth(text, stops)


@pytest.mark.parametrize("stop", ["STOP", "aab", "\n\n", "日本語"])
def test_nothing_of_a_stop_string_is_shown_for_any_pair_of_cuts(stop: str) -> None:
    text = f"before {stop} after"
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            shown, found = feed((stop,), cut(text, [i, j]))
            assert ("".join(shown), found) == ("before ", stop)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopStrings(("STOP",))
    assert finder.add("go ST") == ("go ", None)
    assert finder.add("AR") == ("STAR", None)
    assert finder.add("S") == ("", None)
    assert finder.flush() == "S" and finder.flush() == ""


def test_long_stop_strings_cost_no_more_than_their_length() -> None:
    """Text that is always about to become one; with anything but constant time a character, this takes minutes."""
    stop = "a" * 16_000 + "b"
    finder = StopStrings((stop, "a" * 300 + "c"))
    shown = [finder.add("a") for _ in range(50_000)]
    assert sum(len(text) for text, _ in shown) == 50_000 - 16_000 and not any(found for _, found in shown)
    assert finder.add("b") == ("", stop)


def test_without_stop_strings_text_passes_through() -> None:
    assert StopStrings(()).add("any text") == ("any text", None)


# --- Detokenizer --------------------------------------------------------------------------------------------


def check_pieces(pieces: list[str], text: str) -> None:
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


readable = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=30)


@given(prompt=readable, text=readable)
def test_pieces_make_the_text_and_never_half_a_character(prompt: str, text: str) -> None:
    detokenizer = tokenizer().detokenizer(byte_ids(prompt), True)
    check_pieces([detokenizer.add(token) for token in byte_ids(text)], text)


@given(prompt=readable, text=readable)
def test_pieces_of_the_tokenizers_own_tokens(prompt: str, text: str) -> None:
    detokenizer = tokenizer().detokenizer(tokenizer().encode(prompt), True)
    check_pieces([detokenizer.add(token) for token in tokenizer().encode(text)], text)


@given(text=readable, at=st.integers(0, 1000))
@example(text="wordé", at=5)
@example(text="aé😀", at=6)
def test_a_prompt_that_ends_within_a_character_is_not_repeated(text: str, at: int) -> None:
    ids = byte_ids(text)
    at %= len(ids) + 1
    detokenizer = tokenizer().detokenizer(ids[:at], True)
    pieces = [detokenizer.add(token) for token in ids[at:]]
    whole = len(bytes(ids[:at]).decode(errors="ignore"))  # characters that the prompt has in full
    check_pieces(pieces, text[whole:])


@given(prompt=st.lists(st.integers(0, 255), max_size=8), ids=st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_are_survived(prompt: list[int], ids: list[int]) -> None:
    detokenizer = tokenizer().detokenizer(prompt, True)
    text = "".join(detokenizer.add(token) for token in [*ids, *byte_ids(" end of text")])
    assert text.endswith(" end of text")


def test_special_tokens() -> None:
    assert tokenizer().detokenizer([65], True).add(EOS) == ""
    assert tokenizer().detokenizer([65], False).add(EOS) == "<|im_end|>"


# --- OutputProcessor ----------------------------------------------------------------------------------------


def start(params: SamplingParams, prompt: str = "p") -> OutputProcessor:
    processor = OutputProcessor(tokenizer())
    processor.add_request(Request("r", byte_ids(prompt), params, max_tokens=100))
    return processor


def run(processor: OutputProcessor, steps: list[TokenOutput]) -> list[RequestOutput]:
    outputs = []
    for step in steps:
        outputs.append(processor.process(step))
        if outputs[-1].finished:
            assert not processor._states
            break
    return outputs


def steps_of(text: str, finish_reason: str | None = None) -> list[TokenOutput]:
    steps = [TokenOutput("r", [token]) for token in byte_ids(text)]
    if finish_reason == "stop":
        steps.append(TokenOutput("r", [EOS]))
    steps[-1].finish_reason = finish_reason
    return steps


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_request_to_its_end(finish_reason: str) -> None:
    outputs = run(start(SamplingParams(), "prompt"), steps_of("héllo", finish_reason))
    assert "".join(output.text for output in outputs) == "héllo"
    assert [output.num_output_tokens for output in outputs] == list(range(1, len(outputs) + 1))
    assert {output.num_prompt_tokens for output in outputs} == {6}
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (finish_reason, None)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_stop_string_ends_the_request() -> None:
    outputs = run(start(SamplingParams(stop=("STOP",))), steps_of("a STar STOP now"))
    assert "".join(output.text for output in outputs) == "a STar "
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "STOP")
    assert len(outputs) == len("a STar STOP")


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_text_held_back_is_shown_when_generation_ends_otherwise(finish_reason: str) -> None:
    outputs = run(start(SamplingParams(stop=("STOP",))), steps_of("a STO", finish_reason))
    assert "".join(output.text for output in outputs) == "a STO"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (finish_reason, None)


def test_a_stop_string_wins_over_the_length_it_is_completed_at() -> None:
    outputs = run(start(SamplingParams(stop=("STOP",))), steps_of("a STOP", "length"))
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "STOP")


def test_a_stop_token_is_no_text_but_is_named() -> None:
    processor = start(SamplingParams(stop_token_ids=(ord("x"),)))
    output = processor.process(TokenOutput("r", [ord("x")], finish_reason="stop", stop_reason=ord("x")))
    assert (output.text, output.stop_reason, output.num_output_tokens) == ("", ord("x"), 1)


def test_several_tokens_in_one_step() -> None:
    processor = start(SamplingParams(stop=("b",)))
    assert processor.process(TokenOutput("r", byte_ids("é日"))).text == "é日"
    output = processor.process(TokenOutput("r", byte_ids("abc")))
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_requests_do_not_mix() -> None:
    processor = OutputProcessor(tokenizer())
    texts = {"a": "日本", "b": "😀😀", "c": "plain!"}
    shown = dict.fromkeys(texts, "")
    for request_id in texts:
        processor.add_request(Request(request_id, [65], SamplingParams(), max_tokens=100))
    for i in range(8):
        for request_id, text in texts.items():
            for token in byte_ids(text)[i : i + 1]:
                shown[request_id] += processor.process(TokenOutput(request_id, [token])).text
    assert shown == texts
