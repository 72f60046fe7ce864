"""Compares the outputs of the model with the responses that the agents received, turn by turn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.agents.formats import Call
from tools.agents.recorder import Exchange
from tools.agents.responses import Received, is_generation, received
from tools.agents.script import done
from tools.agents.scripted_model import LoggedRequest

# Number of known tokens that the cache may lack at the end of a prefix, because only full blocks are cached.
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Turn:
    """One run of an agent.

    Attributes:
        number: number of the turn, from 1 on.
        start: time before the run, in seconds since the epoch.
        end: time after the run, in seconds since the epoch.
        printed: standard output of the agent.
        problem: reason why the run failed; None if it ended with status 0.
    """

    number: int
    start: float
    end: float
    printed: str
    problem: str | None = None

    def holds(self, time: float) -> bool:
        return self.start <= time <= self.end


@dataclass
class TurnReport:
    """Figures of one turn. Token counts exclude requests without a task, for example for titles.

    Attributes:
        number: number of the turn.
        num_requests: number of requests that generated text, requests for titles included.
        num_prompt_tokens: tokens of the prompts.
        longest_prompt: tokens of the longest prompt.
        num_known_tokens: prompt tokens in the longest common prefix with the prompt and output of an earlier request.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_missed_tokens: known tokens that were not found in the cache. A request that lacks at most one block adds 0.
        num_changed_tokens: tokens of these earlier requests that the prompts do not repeat; 0 in the first turn.
        num_calls: calls that the model wrote.
        lost_calls: calls that the agent did not receive as written.
        leaks: texts with marks of the format, or texts that differ from the script.
        errors: responses with errors, and problems of the agent.
        changes: for each changed prefix, the texts of the earlier request and of the prompt after their common part.
    """

    number: int
    num_requests: int = 0
    num_prompt_tokens: int = 0
    longest_prompt: int = 0
    num_known_tokens: int = 0
    num_cached_tokens: int = 0
    num_missed_tokens: int = 0
    num_changed_tokens: int = 0
    num_calls: int = 0
    lost_calls: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    changes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        missed = [f"{self.num_missed_tokens} known tokens were not cached"] * (self.num_missed_tokens > 0)
        return [*self.errors, *(f"lost call: {call}" for call in self.lost_calls), *self.leaks, *missed]


def read_log(path: Path) -> list[LoggedRequest]:
    """Read the log of the scripted model. Return an empty list if the file is missing."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [LoggedRequest(**{**line, "calls": tuple((name, given) for name, given in line["calls"])}) for line in lines]


def report(
    turn: Turn, logged: Iterable[LoggedRequest], exchanges: Iterable[Exchange], marks: Sequence[str]
) -> TurnReport:
    """Return the figures of a turn.

    Args:
        turn: the turn.
        logged: log of the scripted model. Requests of other turns are skipped.
        exchanges: recorded exchanges. Exchanges of other turns are skipped.
        marks: marks of the format. No text for the user may contain them.
    """
    found = TurnReport(turn.number)
    if turn.problem is not None:
        found.errors.append(turn.problem)
    if done(turn.number) not in turn.printed:
        found.errors.append(f"the agent did not print {done(turn.number)!r}: {turn.printed.strip()[-300:]!r}")
    logged = [one for one in logged if turn.holds(one.time)]
    exchanges = [one for one in exchanges if turn.holds(one.time)]
    for one in logged:
        found.num_calls += len(one.calls)
        if one.turn is not None:
            _add_tokens(found, one)
    failed = [one for one in exchanges if not is_generation(one) and not 200 <= one.status < 400]
    found.errors += [f"{one.method} {one.path}: status {one.status}: {one.response[:200]}" for one in failed]
    responses = [received(one) for one in exchanges if is_generation(one)]
    found.num_requests = len(responses)
    found.errors += [one.error for one in responses if one.error is not None]
    found.lost_calls = _lost_calls(logged, responses)
    found.leaks = _leaks(logged, responses, marks)
    return found


def _add_tokens(found: TurnReport, one: LoggedRequest) -> None:
    found.num_prompt_tokens += one.num_prompt_tokens
    found.longest_prompt = max(found.longest_prompt, one.num_prompt_tokens)
    found.num_known_tokens += one.num_known_tokens
    found.num_cached_tokens += one.num_cached_tokens
    missed = one.num_known_tokens - one.num_cached_tokens
    found.num_missed_tokens += missed if missed > _BLOCK_SIZE else 0
    if one.was and found.number > 1:  # the first turn begins a conversation
        found.num_changed_tokens += one.num_earlier_tokens - one.num_known_tokens
        found.changes.append((one.was, one.now))


def _lost_calls(logged: Sequence[LoggedRequest], responses: Sequence[Received]) -> list[str]:
    """Return a text for each call that differs between the model's outputs and the responses.

    The list has calls of the model that are missing in the responses or changed there, received calls that the model
    did not write, and received calls whose arguments are not JSON.
    """
    written = Counter(_as_text(call) for one in logged for call in one.calls)
    parsed: Counter[str] = Counter()
    broken = []
    for name, arguments in (call for one in responses for call in one.calls):
        try:
            parsed[_as_text((name, json.loads(arguments)))] += 1
        except ValueError:
            broken.append(f"{name}: {arguments[:200]}")
    return [
        *broken,
        *(written - parsed).elements(),
        *(f"not written: {call}" for call in (parsed - written).elements()),
    ]


def _as_text(call: Call) -> str:
    return json.dumps(call, sort_keys=True, ensure_ascii=False)


def _leaks(logged: Sequence[LoggedRequest], responses: Sequence[Received], marks: Sequence[str]) -> list[str]:
    texts = [text for one in responses for text in (one.text, one.reasoning)]
    marked = [f"leak: {text[:200]!r}" for text in texts if any(mark in text for mark in marks)]
    written = Counter(text.strip() for one in logged for text in (one.content, one.reasoning))
    shown = Counter(text.strip() for one in responses if one.error is None for text in (one.text, one.reasoning))
    return marked + [f"text differs: {text[:200]!r}" for text in (shown - written).elements() if text]


HEADER = """\
| turn | requests | prompt tokens | known | cached | missed | changed | calls | lost | leaks | errors |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def row(one: TurnReport) -> str:
    """Return a turn as a row of a Markdown table."""
    tokens = one.num_prompt_tokens, one.num_known_tokens, one.num_cached_tokens, one.num_missed_tokens
    counts = one.num_calls, len(one.lost_calls), len(one.leaks), len(one.errors)
    cells = [one.number, one.num_requests, *(f"{n:,}" for n in (*tokens, one.num_changed_tokens)), *counts]
    return f"| {' | '.join(map(str, cells))} |"


SUMMARY_HEADER = """\
| agent | version | turns | requests | prompt tokens, first and last turn | cached, of tokens sent before | \
cached, of all | calls | calls lost | marks leaked | errors |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def summary(title: str, version: str, reports: Sequence[TurnReport]) -> str:
    """Return an agent's figures as a row of a Markdown table."""
    prompts, known, cached = (
        sum(getattr(one, f"num_{name}_tokens") for one in reports) for name in ("prompt", "known", "cached")
    )
    counts = [sum(len(getattr(one, name)) for one in reports) for name in ("lost_calls", "leaks", "errors")]
    shares = [f"{cached / of:.1%}" if of else "-" for of in (known, prompts)]
    requests, calls = sum(one.num_requests for one in reports), sum(one.num_calls for one in reports)
    tokens = " to ".join(f"{one:,}" for one in (reports[0].longest_prompt, reports[-1].longest_prompt))
    cells = [title, version, len(reports), requests, tokens, *shares, calls, *counts]
    return f"| {' | '.join(map(str, cells))} |"
