"""Grammars of tool calls for one vocabulary, and the search for tools whose schemas cannot be compiled."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

from metal_engine.grammars.marks import token_ranges, without_marks
from metal_engine.output_phases import CallTrigger

# Limits of the search. Most compilations take milliseconds of CPU time. A compilation that exceeds its own limits takes
# at most a second, and counts as _EXCESSIVE_SECONDS.
_MAX_COMPILATIONS = 64
_MAX_CPU_SECONDS = 4.0
_EXCESSIVE_SECONDS = 1.0
_NOT_CHECKED = "too many schemas cannot be compiled"


class CallGrammar:
    """Grammar of the calls that a mark begins.

    If the schema of a tool cannot be compiled, the arguments of the tool are left open: the grammar allows arguments of
    any kind.

    Args:
        trigger: mark and grammar.
        special: ids of the vocabulary's special tokens, by their texts.

    Attributes:
        marks: pairs of a mark that begins a call, and its tail. The tail is the part of the mark after its last special
            token. The grammar begins with the tail.
        opened: indices of the rules for arguments that are left open.
    """

    def __init__(self, trigger: CallTrigger, special: Mapping[str, int]) -> None:
        heads = trigger.heads or (("", "call"),)
        end = tail(trigger.mark, special)
        self.marks = tuple((trigger.mark + head, end + head) for head, _ in heads)
        self._tails = {end + head: rule for head, rule in heads}
        self.opened: frozenset[int] = frozenset()
        self._special = token_ranges(special.values())
        self._rules = without_marks(trigger.grammar, special)
        self._arguments = trigger.arguments

    @property
    def num_arguments(self) -> int:
        """Number of rules for arguments, of all tools together."""
        return len(self._arguments)

    def tool(self, index: int) -> str:
        """Return the name of the tool to which a rule for arguments belongs."""
        return self._arguments[index].tool

    @cached_property
    def key(self) -> bytes:
        """Hash of the grammar without open arguments."""
        return hashlib.sha256(self.wanted(())).digest()

    def wanted(self, opened: Collection[int]) -> bytes:
        """Return these calls as a *wanted grammar* in JSON (defined in :mod:`metal_engine.grammars.source`).

        Args:
            opened: indices of the rules for arguments that are left open.
        """
        open_rules = {self._arguments[i].rule: self._arguments[i].open_rule for i in opened}
        rules = self._rules
        if open_rules:
            lines = re.compile(rf"^({'|'.join(open_rules)}): .*$", re.MULTILINE)
            rules = lines.sub(lambda found: f"{found[1]}: {open_rules[found[1]]}", rules)
        return json.dumps({"call": rules, "tails": self._tails, "special": self._special}).encode()


def tail(mark: str, special: Mapping[str, int]) -> str:
    """Return the part of a mark after its last special token."""
    return mark[max((mark.rfind(text) + len(text) for text in special if text in mark), default=0) :]


# Function that compiles a grammar with open arguments at some indices. Returns the problem, which is empty if there is
# none, and the CPU time in seconds, which is infinite if a limit was exceeded.
Check = Callable[[frozenset[int]], tuple[str, float]]


def faulty_arguments(num_arguments: int, problem: str, check: Check) -> dict[int, str]:
    """Return the indices of the arguments that make a grammar fail, each with the error message.

    The search halves the arguments repeatedly. Arguments that the search could not check, because it has reached its
    limits, count as faulty. If both halves compile and only their union fails, the second half counts as faulty.

    Args:
        num_arguments: number of rules for arguments, at least 1.
        problem: error message of the grammar in which no arguments are open.
        check: compiles the grammar with open arguments at the given indices (see ``Check``).
    """
    return _Search(num_arguments, check).among(range(num_arguments), problem)


class _Search:
    def __init__(self, num_arguments: int, check: Check) -> None:
        self._all = frozenset(range(num_arguments))
        self._check = check
        self._num_left = _MAX_COMPILATIONS
        self._seconds_left = _MAX_CPU_SECONDS

    def among(self, suspects: Sequence[int], problem: str) -> dict[int, str]:
        """Return the faulty arguments among ``suspects``, each with the error message.

        Args:
            suspects: indices of arguments. The grammar fails even if all other arguments are open.
            problem: error message of that grammar.
        """
        if len(suspects) == 1:
            return {suspects[0]: problem}
        middle = len(suspects) // 2
        halves = suspects[:middle], suspects[middle:]
        problems = [self._problem_within(half) for half in halves]
        if not any(problems):  # both halves may be too large together
            return dict.fromkeys(halves[1], problem)
        found: dict[int, str] = {}
        for half, inner in zip(halves, problems, strict=True):
            if inner == _NOT_CHECKED:
                found |= dict.fromkeys(half, inner)
            elif inner:
                found |= self.among(half, inner)
        return found

    def _problem_within(self, suspects: Sequence[int]) -> str:
        """Compile the grammar with all arguments open except ``suspects``. Return the error message; empty on success.

        Return ``_NOT_CHECKED`` without compiling if the search has reached its limits.
        """
        if not self._num_left or self._seconds_left <= 0:
            return _NOT_CHECKED
        problem, seconds = self._check(self._all.difference(suspects))
        self._num_left -= 1
        self._seconds_left -= min(seconds, _EXCESSIVE_SECONDS)
        return problem
