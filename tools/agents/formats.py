"""Formats of the scripted model: a chat template, and the text in which the model writes reasoning and calls.

The templates treat messages as the published templates of these models do: reasoning of earlier turns is kept, emptied
or dropped, and calls are written as the model writes them. Unlike those, each template lists the tools as JSON, one on
each line, so that the script can read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Call = tuple[str, dict[str, Any]]

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Answer:
    """Answer of the model, before it is written in a format.

    Attributes:
        content: text for the user.
        calls: names and arguments of the calls.
        reasoning: reasoning before the content.
        num_earlier_calls: number of tool results in the prompt.
    """

    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    num_earlier_calls: int = 0


@dataclass(frozen=True)
class Format:
    """Format of the scripted model's prompts and outputs.

    Marks are strings of the format that delimit parts of a text, such as ``<tool_call>``.

    Attributes:
        name: name for the option ``--format``, and name of the template's file without ``.jinja``.
        tool_parser: argument of ``--tool-call-parser``.
        reasoning_parser: argument of ``--reasoning-parser``.
        heads: pattern for the start of a message. The name of the matching group is the role: user, assistant, tool or
            other.
        special: marks that are special tokens.
        added: marks that are added tokens of the vocabulary but not special.
        texts: marks that are not tokens.
        end: mark that ends an answer without calls.
        call_end: mark that ends an answer with calls.
        written: function that returns the text of an answer in this format, without the mark at its end.
        reasons_every: number n for which the answers of turns n, 2n, 3n, ... have reasoning; 0: no reasoning.
        is_parallel: True if an answer may have several calls.
    """

    name: str
    tool_parser: str
    reasoning_parser: str
    heads: re.Pattern[str]
    special: tuple[str, ...]
    added: tuple[str, ...]
    texts: tuple[str, ...]
    end: str
    call_end: str
    written: Callable[[Answer], str]
    reasons_every: int = 1
    is_parallel: bool = True

    @cached_property
    def template(self) -> str:
        """Source of the chat template."""
        return (_TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8").removesuffix("\n")

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that no text for the user may contain."""
        return self.special + self.added + self.texts


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes_calls(content: str, calls: Sequence[Call]) -> str:
    written = [f"<tool_call>\n{_dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls]
    return "\n".join([content] * bool(content) + written)


def _hermes(answer: Answer) -> str:
    reasoning = f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""
    return reasoning + _hermes_calls(answer.content, answer.calls)


def _qwen3(answer: Answer) -> str:
    return f"{answer.reasoning}\n</think>\n\n{_hermes_calls(answer.content, answer.calls)}"


def _qwen3_coder(answer: Answer) -> str:
    texts = [f"{answer.content}\n"] if answer.content and answer.calls else [answer.content] * bool(answer.content)
    for name, given in answer.calls:
        values = {key: _dumps(one) if isinstance(one, list | dict) else str(one) for key, one in given.items()}
        parameters = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in values.items())
        texts.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(texts)


def _glm(answer: Answer) -> str:
    texts = [f"\n<think>{answer.reasoning}</think>", *([answer.content] * bool(answer.content))]
    for name, given in answer.calls:
        values = {key: one if isinstance(one, str) else _dumps(one) for key, one in given.items()}
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>\n" for key, one in values.items())
        texts.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(texts)


def _kimi_k2(answer: Answer) -> str:
    text = f"<think>{answer.reasoning}</think>{answer.content}"
    if not answer.calls:
        return text
    calls = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_dumps(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(answer.calls, answer.num_earlier_calls)
    )
    return f"{text}<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def _mistral(answer: Answer) -> str:
    calls = (f"[TOOL_CALLS]{name}[ARGS]{_dumps(given)}" for name, given in answer.calls)
    reasoning = f"[THINK]{answer.reasoning}[/THINK]" if answer.reasoning else ""
    return f"{reasoning}{answer.content}{''.join(calls)}"


def _harmony(answer: Answer) -> str:
    messages = [f"<|channel|>analysis<|message|>{answer.reasoning}"] * bool(answer.reasoning)
    if not answer.calls:
        messages.append(f"<|channel|>final<|message|>{answer.content}")
    elif answer.content:
        messages.append(f"<|channel|>commentary<|message|>{answer.content}")
    for name, given in answer.calls:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        messages.append(header + _dumps(given))
    return "<|end|><|start|>assistant".join(messages)


def _deepseek(answer: Answer) -> str:
    if not answer.calls:
        return answer.content
    calls = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dumps(given)}<｜tool▁call▁end｜>" for name, given in answer.calls
    )
    return f"{answer.content}<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def _llama3(answer: Answer) -> str:
    if not answer.calls:
        return answer.content
    ((name, given),) = answer.calls
    call = _dumps({"name": name, "parameters": given})
    return f"{answer.content}<|python_tag|>{call}" if answer.content else call


_CHATML = re.compile(r"<\|im_start\|>(?:(?P<tool>tool\n|user\n(?=<tool_response>))|(?P<user>user\n)"
                     r"|(?P<assistant>assistant\n)|(?P<other>\w+\n))")  # fmt: skip
_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

FORMATS = {
    one.name: one
    for one in (
        Format(
            "hermes", "json_tools", "think", _CHATML, _CHATML_MARKS, _TAGS, (), "<|im_end|>", "<|im_end|>", _hermes, 5
        ),
        Format(
            "qwen3",
            "json_tools",
            "qwen3",
            _CHATML,
            _CHATML_MARKS,
            (*_TAGS, "<tool_response>", "</tool_response>"),
            (),
            "<|im_end|>",
            "<|im_end|>",
            _qwen3,
        ),
        Format(
            "qwen3_coder",
            "qwen3_coder",
            "none",
            _CHATML,
            _CHATML_MARKS,
            ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            ("<function=", "</function>", "<parameter=", "</parameter>"),
            "<|im_end|>",
            "<|im_end|>",
            _qwen3_coder,
            0,
        ),
        Format(
            "glm",
            "glm45",
            "glm45",
            re.compile(
                r"<\|(?:(?P<user>user\|>\n)|(?P<assistant>assistant\|>)|(?P<tool>observation\|>)|(?P<other>system\|>\n))"
            ),
            ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
            (),
            "<|user|>",
            "<|observation|>",
            _glm,
        ),
        Format(
            "kimi_k2",
            "kimi_k2",
            "kimi_k2",
            re.compile(
                r"<\|im_(?:(?P<user>user\|>user)|(?P<assistant>assistant\|>assistant)|(?P<tool>system\|>tool)"
                r"|(?P<other>system\|>\w+))<\|im_middle\|>"
            ),
            (
                *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
                *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            ),
            ("<think>", "</think>"),
            (),
            "<|im_end|>",
            "<|im_end|>",
            _kimi_k2,
        ),
        Format(
            "mistral",
            "mistral",
            "mistral",
            re.compile(
                r"(?P<user>\[INST\])|(?P<assistant>\[/INST\]|\[/TOOL_RESULTS\](?!\[TOOL_RESULTS\]))"
                r"|(?P<tool>\[TOOL_RESULTS\])|(?P<other>\[SYSTEM_PROMPT\]|\[AVAILABLE_TOOLS\])"
            ),
            (
                *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "</s>"),
                *("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
                *("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
            ),
            (),
            (),
            "</s>",
            "</s>",
            _mistral,
        ),
        Format(
            "harmony",
            "auto",
            "gpt_oss",
            re.compile(
                r"<\|start\|>(?:(?P<user>user)|(?P<tool>functions\.\S+ to=assistant<\|channel\|>commentary)"
                r"|(?P<assistant>assistant)|(?P<other>system|developer))(?=[< ]|\Z)"
            ),
            ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
            (),
            (),
            "<|return|>",
            "<|call|>",
            _harmony,
            is_parallel=False,
        ),
        Format(
            "deepseek",
            "deepseek_v31",
            "none",
            re.compile(
                r"(?P<user><｜User｜>)|(?P<assistant><｜Assistant｜></think>|<｜tool▁output▁end｜>(?!<｜tool▁output▁begin｜>))"
                r"|(?P<tool><｜tool▁output▁begin｜>)|(?P<other><｜begin▁of▁sentence｜>)"
            ),
            (
                *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
                *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
                *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
            ),
            ("<think>", "</think>"),
            (),
            "<｜end▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            _deepseek,
            0,
        ),
        Format(
            "llama3",
            "llama3_json",
            "none",
            re.compile(
                r"<\|start_header_id\|>(?:(?P<user>user)|(?P<assistant>assistant)|(?P<tool>ipython)|(?P<other>system))"
                r"<\|end_header_id\|>\n\n"
            ),
            (
                *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
                "<|python_tag|>",
            ),
            (),
            (),
            "<|eot_id|>",
            "<|eot_id|>",
            _llama3,
            0,
            is_parallel=False,
        ),
    )
}
