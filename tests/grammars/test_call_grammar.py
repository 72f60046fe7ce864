"""Grammars of tool calls with tools whose schemas cannot be compiled: the other tools keep their rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from metal_engine.answers.format_phases import call_phase
from metal_engine.engine.phase_rules_maker import PhaseRulesMaker
from metal_engine.grammars.call_grammar import _MAX_COMPILATIONS, CallGrammar, faulty_arguments
from metal_engine.grammars.compiler import GrammarCompiler
from metal_engine.grammars.grammar_client import CompiledGrammar, SegmentEnd
from metal_engine.output_phases import CallTrigger
from tests.grammars.hostile import PATTERNS
from tests.support.splitting import answer_format
from tools.fixtures.fake_engine import VOCAB_SIZE, byte_ids, tiny_tokenizer

GOOD = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
BAD = [
    {"type": "object", "properties": {"x": {"type": "any"}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?=a)b"}}},
    {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}},
]


class Check:
    """Compilation of a grammar whose arguments at some indices are faulty."""

    def __init__(self, faulty: set[int], most: int = 10**9, seconds: float = 0.001) -> None:
        self.num_compilations = 0
        self._seconds = seconds
        self._faulty = faulty
        self._most = most

    def found(self, num_arguments: int) -> dict[int, str]:
        def check(opened: frozenset[int]) -> tuple[str, float]:
            self.num_compilations += 1
            kept = set(range(num_arguments)) - opened
            problem = "too large" if len(kept) > self._most else "bad" if kept & self._faulty else ""
            return problem, self._seconds if problem else 0.001

        return faulty_arguments(num_arguments, "bad", check)


@pytest.mark.parametrize("faulty", [{0}, {49}, {0, 1}, {3, 17, 40}])
def test_faulty_arguments_are_found(faulty: set[int]) -> None:
    check = Check(faulty)
    assert check.found(50) == dict.fromkeys(faulty, "bad")
    assert check.num_compilations <= 12 * len(faulty)


def test_a_single_tool() -> None:
    check = Check({0})
    assert check.found(1) == {0: "bad"} and not check.num_compilations


def test_arguments_that_are_too_large_together() -> None:
    """As many as fit keep their rules."""
    assert set(Check(set(), most=4).found(8)) == set(range(4, 8))


def test_the_search_is_limited() -> None:
    check = Check(set(range(200)))
    assert set(check.found(200)) == set(range(200))
    assert check.num_compilations <= _MAX_COMPILATIONS


def test_the_cpu_time_of_the_search_is_limited() -> None:
    """Arguments that were found to be correct keep their rules."""
    check = Check({0}, seconds=math.inf)
    found = check.found(64)
    assert 0 in found and len(found) <= 8 and check.num_compilations <= 10


# --- with the processes of grammars --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE)
    yield made
    made.close()


def trigger(*schemas: Any) -> CallTrigger:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": one}} for i, one in enumerate(schemas)]
    phase = call_phase(answer_format("json_tools"), tools, parallel=True)
    assert phase is not None
    return phase.triggers[0]


def grammar(*schemas: Any) -> CallGrammar:
    return CallGrammar(trigger(*schemas), {})


def accepts(compiled: CompiledGrammar, name: str, arguments: str) -> bool:
    """Return True if a grammar allows a call."""
    matcher = compiled.matcher()
    matcher.consume(byte_ids(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'))
    try:
        matcher.fill_mask(np.zeros(-(-VOCAB_SIZE // 32), np.int32), math.inf)
    except SegmentEnd:
        return True
    except ValueError:
        return False
    raise AssertionError("the call has not ended")


@pytest.mark.parametrize("bad", [*BAD, PATTERNS["json"]], ids=["type", "pattern", "reference", "effort"])
def test_only_the_arguments_of_a_faulty_tool_are_open(
    compiler: GrammarCompiler, bad: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if "allOf" in bad:
        bad = {"type": "object", "properties": {"x": bad}}
    schemas = GOOD, bad, GOOD | {"title": "other"}
    made = grammar(*schemas)
    compiled = compiler.compile_call(made).result(math.inf)
    assert compiled is not None
    assert made.opened == {1}
    # The next request compiles nothing.
    assert compiler.compile_call(grammar(*schemas)).result(0.0) is compiled
    assert accepts(compiled, "f1", '{"x": "1", "y": [{}]}') and accepts(compiled, "f1", "{}")
    assert not accepts(compiled, "f1", "[1]")
    for name in ("f0", "f2"):
        assert accepts(compiled, name, '{"x": 1}')
        assert not accepts(compiled, name, '{"x": "1"}') and not accepts(compiled, name, "{}")
    assert not accepts(compiled, "f3", '{"x": 1}')
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the arguments of 1 tools are not constrained by their schemas: f1: ")


def test_many_faulty_tools(compiler: GrammarCompiler) -> None:
    """The names are constrained in any case."""
    compiled = compiler.compile_call(grammar(*[{**BAD[0], "title": str(i)} for i in range(200)])).result(math.inf)
    assert compiled is not None
    assert accepts(compiled, "f199", '{"x": []}') and not accepts(compiled, "f200", "{}")


def test_a_grammar_without_tools_is_refused(compiler: GrammarCompiler) -> None:
    task = compiler.compile_call(CallGrammar(CallTrigger("<call>", "call: missing"), {}))
    with pytest.raises(ValueError, match="cannot be compiled"):
        task.result(math.inf)


def test_requests_with_the_same_tools_share_a_grammar(compiler: GrammarCompiler) -> None:
    maker = PhaseRulesMaker(tiny_tokenizer(), compiler)
    made = maker._call_grammar(trigger(GOOD))
    assert maker._call_grammar(trigger(GOOD)) is made
    assert maker._call_grammar(trigger({"type": "object"})) is not made
