"""Selects the output format of a model, from its tokenizer or from the settings.

mlx-lm provides most of the parsers. The engine's own parsers and checks preserve text that mlx-lm's would lose.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from mlx_lm import tokenizer_utils
from transformers import PreTrainedTokenizerFast

from metal_engine.answers import harmony
from metal_engine.answers.answer_format import AnswerFormat, BareOpening, ReasoningMarks, ToolParser
from metal_engine.answers.call_syntaxes.gemma import FUNCTION_GEMMA, GEMMA4
from metal_engine.answers.call_syntaxes.json_formats import DEEPSEEK_V3, DEEPSEEK_V31, HERMES, KIMI_K2, LLAMA3, MISTRAL
from metal_engine.answers.call_syntaxes.pythonic import LLAMA4, OLMO3, PYTHONIC
from metal_engine.answers.call_syntaxes.syntax import CallSyntax, ExactParser
from metal_engine.answers.call_syntaxes.tag_formats import (
    GLM,
    KIMI_K3,
    LONGCAT,
    MINICPM5,
    MINIMAX_M2,
    MUSE_SPARK,
    QWEN3_CODER,
    dsml,
)
from metal_engine.answers.tool_parsers.deepseek import DeepSeekCalls, DSMLCalls
from metal_engine.answers.tool_parsers.json_calls import JSON_CALL_HEAD, JSON_CALLS
from metal_engine.answers.tool_parsers.llama3 import Llama3Calls
from metal_engine.answers.tool_parsers.mistral import MISTRAL_CALL_HEAD, MistralCalls
from metal_engine.answers.tool_parsers.pythonic import PythonicCalls
from metal_engine.answers.tool_parsers.qwen3_coder import Qwen3CoderCalls
from metal_engine.answers.tool_parsers.whole_calls import checked
from metal_engine.errors import ConfigError, short
from metal_engine.settings.format_names import (
    HARMONY_PARSERS,
    REASONING_MARKS,
    REASONING_PARSER_ALIASES,
    REASONING_PARSER_CHOICES,
    TOOL_PARSER_ALIASES,
    TOOL_PARSER_CHOICES,
)

# Name of a format -> parser that replaces mlx-lm's, or that mlx-lm lacks.
_OWN_PARSERS: dict[str, ToolParser] = {
    "deepseek_v3": DeepSeekCalls(),
    "deepseek_v31": DeepSeekCalls(),
    "deepseek_v32": DSMLCalls("function_calls"),
    "deepseek_v4": DSMLCalls("tool_calls"),
    "json_tools": JSON_CALLS,
    "llama3_json": Llama3Calls(),
    "llama4_pythonic": PythonicCalls(LLAMA4.mark, LLAMA4.end),
    "mistral": MistralCalls(),
    "olmo3": PythonicCalls(OLMO3.mark, OLMO3.end, has_lines=True),
    "pythonic": PythonicCalls(PYTHONIC.mark, PYTHONIC.end),
    "qwen3_coder": Qwen3CoderCalls(),
}
# Patterns for the start of a call up to its arguments, for formats whose arguments are one JSON object.
_CALL_HEADS = {
    "deepseek_v3": DEEPSEEK_V3.head,
    "deepseek_v31": DEEPSEEK_V31.head,
    "json_tools": JSON_CALL_HEAD,
    "llama3_json": JSON_CALL_HEAD,
    "mistral": MISTRAL_CALL_HEAD,
}
# Name of a format -> exact form of the calls, for which there is a grammar.
CALL_SYNTAXES: dict[str, CallSyntax] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "function_gemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
    "glm47": GLM,
    "json_tools": HERMES,
    "kimi_k2": KIMI_K2,
    "kimi_k3": KIMI_K3,
    "laguna": GLM,
    "llama3_json": LLAMA3,
    "llama4_pythonic": LLAMA4,
    "longcat": LONGCAT,
    "minicpm5": MINICPM5,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "muse_spark": MUSE_SPARK,
    "olmo3": OLMO3,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
}
# Starts of calls for models that sometimes omit the opening mark.
_BARE_OPENINGS = {
    "gemma4": BareOpening("call:", "{", only_first=True),
    "kimi_k2": BareOpening("<|tool_call_begin|>functions.", ":"),
    "llama3_json": BareOpening('{"name": "', '"', only_first=True),
    "llama4_pythonic": BareOpening("[", "(", only_first=True),
    "pythonic": BareOpening("[", "(", only_first=True),
    "qwen3_coder": BareOpening("<function=", ">"),
}
# Mark before a model's reasoning -> marks that are dropped from its content: the marks around Kimi K3's responses, and
# the closing mark that Gemma 4 sometimes writes once more.
_DROPPED_MARKS = {
    "<|channel>thought": ("<channel|>",),
    "<|open|>think<|sep|>": ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
}

# Start of a model's type -> text before the end of its reasoning if the budget ends it. Qwen's documentation has it in
# the section about the thinking budget, and the technical report of Qwen3 in the section about post-training.
_BUDGET_TEXTS = {
    "qwen3": "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly "
    "now.\n"
}


def find_answer_format(
    tokenizer: PreTrainedTokenizerFast,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    *,
    model_type: str = "",
) -> AnswerFormat:
    """Return the output format of a model.

    Args:
        tokenizer: tokenizer of the model.
        tool_call_parser: name of a format of tool calls; ``auto`` to derive the format from the tokenizer; ``none`` to
            leave tool calls in the text.
        reasoning_parser: name of a format of reasoning; ``auto`` to derive the format from the tokenizer; ``none`` to
            leave the reasoning in the text.
        model_type: type of the model, as in its ``config.json``.

    Raises:
        ConfigError: there is no format with one of these names, the tokenizer names an invalid parser, or mlx-lm lacks
            the parser of the tool calls.
    """
    if tool_call_parser not in TOOL_PARSER_CHOICES:
        raise ConfigError("--tool-call-parser", f"{tool_call_parser}: there is no such format")
    if reasoning_parser not in REASONING_PARSER_CHOICES:
        raise ConfigError("--reasoning-parser", f"{reasoning_parser}: there is no such format")
    if reasoning_parser in HARMONY_PARSERS or (
        reasoning_parser == "auto" and set(tokenizer.get_vocab()).issuperset(harmony.TOKENS)
    ):
        return harmony.harmony_format(calls=tool_call_parser != "none")
    name = _tool_parser_name(tokenizer, tool_call_parser)
    tool = None if name is None else _tool_parser(name)
    marks = _reasoning_marks(tokenizer, reasoning_parser)
    texts = [*(marks or ()), *((tool.tool_call_start, tool.tool_call_end) if tool else ())]
    return AnswerFormat(
        tool=tool,
        call_head=None if name is None else _CALL_HEADS.get(name),
        syntax=None if name is None else CALL_SYNTAXES.get(name),
        bare=None if name is None else _BARE_OPENINGS.get(name),
        reasoning=None if marks is None else _reasoning(*marks, model_type),
        special=_any_special(tokenizer, texts),
        finds_calls=tool_call_parser != "none",
    )


def _reasoning(start: str, end: str, model_type: str) -> ReasoningMarks:
    return ReasoningMarks(start, end, _budget_text(model_type), _DROPPED_MARKS.get(start, ()))


def _budget_text(model_type: str) -> str:
    """Return the text that is forced before the closing mark if the reasoning has used up its token budget.

    The text is the recommendation of the model's authors; "" if there is none.
    """
    found = (text for start, text in _BUDGET_TEXTS.items() if model_type.startswith(start))
    return next(found, "")


def _tool_parser(name: str) -> ToolParser:
    """Return the parser of a format of tool calls, by mlx-lm's name of the format.

    Raises:
        ConfigError: mlx-lm has no such parser.
    """
    parser = _OWN_PARSERS.get(name)
    if parser is None:
        try:
            module: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        except ModuleNotFoundError as error:
            raise _no_parser(name) from error
        parser = checked(name, module)
    return ExactParser(CALL_SYNTAXES[name], parser) if name in CALL_SYNTAXES else parser


def _no_parser(name: Any) -> ConfigError:
    missing = f"mlx-lm does not have the tool parser {short(name)}, which the tokenizer or --tool-call-parser names"
    return ConfigError("--tool-call-parser", f"{missing}: choose another --tool-call-parser")


def _tool_parser_name(tokenizer: PreTrainedTokenizerFast, wanted: str) -> str | None:
    """Return the name of a tool parser; None if tool calls stay in the text, or if their format is unknown.

    Args:
        wanted: value of ``--tool-call-parser``. ``auto``: the parser that the tokenizer names or fits.

    Raises:
        ConfigError: the tokenizer names an invalid parser.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        return TOOL_PARSER_ALIASES.get(wanted, wanted)
    asked_for = tokenizer.init_kwargs.get("tool_parser_type")
    if asked_for and not (isinstance(asked_for, str) and asked_for.isidentifier()):  # used as the name of a module
        raise _no_parser(asked_for)
    return asked_for or tokenizer_utils._infer_tool_parser(tokenizer) or _own_parser_name(tokenizer)


def _own_parser_name(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the name of the engine's own tool parser that the tokenizer fits; None if it fits no own parser.

    The distilled models of DeepSeek have the chat template of R1 without the tokens of tool calls, so they get None.
    """
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    vocabulary = tokenizer.get_vocab()
    if "<｜tool▁calls▁begin｜>" in template and "<｜tool▁calls▁begin｜>" in vocabulary:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if '{"name": function name, "parameters":' in template:
        return "llama3_json"
    if vocabulary.keys() >= {"<|python_start|>", "<|header_start|>"}:
        return "llama4_pythonic"
    if "<function_calls>" in template and "<invoke" not in template:
        return "olmo3"
    if "｜DSML｜" in vocabulary:
        return "deepseek_v4" if "tool_calls>" in template else "deepseek_v32"
    return None


def _reasoning_marks(tokenizer: PreTrainedTokenizerFast, wanted: str) -> tuple[str, str] | None:
    """Return the opening and the closing mark of reasoning; None if there is none.

    Args:
        wanted: value of ``--reasoning-parser``. ``auto``: the marks that the tokenizer's chat template or vocabulary
            has. ``none``: no marks.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        return REASONING_MARKS[REASONING_PARSER_ALIASES.get(wanted, wanted)]
    wrapper = tokenizer_utils.TokenizerWrapper(tokenizer)
    if wrapper.has_thinking:
        return wrapper.think_start, wrapper.think_end
    vocabulary = tokenizer.get_vocab()
    known = (marks for marks in REASONING_MARKS.values() if all(mark in vocabulary for mark in marks))
    return next(known, None)


def _any_special(tokenizer: PreTrainedTokenizerFast, marks: Iterable[str]) -> bool:
    """Return True if a mark contains a special token, so that decoding without special tokens would damage the mark."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(text in mark for mark in marks for text in special)
