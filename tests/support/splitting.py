"""Cuts texts into pieces and joins the parsed results, for tests of answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from metal_engine.answers.answer_format import AnswerFormat, ReasoningMarks
from metal_engine.answers.deltas import AnswerDelta, ArgumentsDelta, CallStart, TextDelta
from metal_engine.answers.splitter import Splitter
from metal_engine.checkpoints.answer_formats import find_answer_format
from tools.fixtures.fake_engine import tiny_tokenizer

THINK = ReasoningMarks("<think>", "</think>")


@cache
def answer_format(name: str) -> AnswerFormat:
    """Return the tool call format of this name, with reasoning between ``<think>`` and ``</think>``."""
    return find_answer_format(tiny_tokenizer().hf_tokenizer, name, "think")


def run(splitter: Splitter, parts: Iterable[str], truncated: bool = False) -> tuple[str, str, list, list[str]]:
    """Return the content, reasoning, calls and call ids parsed from the parts."""
    deltas = [delta for part in parts for delta in splitter.add(part)]
    deltas += splitter.finish(truncated=truncated)
    texts = {"content": "", "reasoning": ""}
    names, ids, arguments = [], [], []
    for delta in deltas:
        match delta:
            case TextDelta(kind, text):
                assert text
                texts[kind] += text
            case CallStart(index, call_id, name):
                assert index == len(names)
                names.append(name)
                ids.append(call_id)
                arguments.append("")
            case ArgumentsDelta(index, text):
                arguments[index] += text
    calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    assert len(set(ids)) == len(ids) and all(ids)
    return texts["content"], texts["reasoning"], calls, ids


def cuts(text: str, every: int = 1) -> Iterator[list[str]]:
    """Yield the text whole, in single characters, in groups of three, and in two pieces for each ``every``-th cut."""
    yield [text]
    yield list(text)
    yield [text[i : i + 3] for i in range(0, len(text), 3)]
    for i in range(1, len(text), every):
        yield [text[:i], text[i:]]


def deltas(splitter: Splitter, text: str, truncated: bool = False) -> list[AnswerDelta]:
    """Return the deltas of a text that arrives in single characters. Adjacent deltas of one kind are joined."""
    joined: list[AnswerDelta] = []
    for delta in [*(p for ch in text for p in splitter.add(ch)), *splitter.finish(truncated=truncated)]:
        if joined and not isinstance(delta, CallStart) and type(delta) is type(joined[-1]):
            joined[-1] = replace(joined[-1], text=joined[-1].text + delta.text)  # type: ignore[union-attr]
        else:
            joined.append(delta)
    return joined
