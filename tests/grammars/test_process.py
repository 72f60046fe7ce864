"""Limits of a grammar's process on CPU time and memory, as measured by the kernel."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from typing import Any

import llguidance
import pytest

from metal_engine.forks.channel import framed, receive
from metal_engine.grammars import process
from metal_engine.grammars.messages import (
    ERROR,
    MASK,
    MASK_ALONE,
    pack_masks,
    pack_step,
    unpack_compiled,
    unpack_masks,
    unpack_step,
)
from tests.grammars.hostile import NESTED_REPEATS, PATTERNS, cubic
from tools.fixtures.fake_engine import byte_ids, tiny_tokenizer

_UNIT = 1 if sys.platform == "darwin" else 1024


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tiny_tokenizer().serialized.decode())


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits for tests that do not test them: a shared machine may count waiting as CPU time."""
    for name in ("MASK_CPU_SECONDS", "BURST_CPU_SECONDS", "DRAFTS_BURST_CPU_SECONDS"):
        monkeypatch.setattr(process, name, 5.0)


def run_forked(
    tokenizer: llguidance.LLTokenizer, wanted: dict[str, Any], *messages: bytes
) -> tuple[list[bytes], int, resource.struct_rusage]:
    """Serve a grammar in a fork. Return its answers, its exit status, and its resource usage."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            process.serve_grammar(theirs, tokenizer)
        finally:
            os._exit(0)
    theirs.close()
    answers = []
    with ours:
        try:
            for message in (json.dumps(wanted).encode(), *messages):
                ours.sendall(framed(message))
                answers.append(receive(ours))
        except (EOFError, OSError):
            pass
    _, status, usage = os.wait4(pid, 0)
    return answers, status, usage


@pytest.mark.parametrize("wanted", [PATTERNS, NESTED_REPEATS], ids=["patterns", "repeats"])
def test_a_grammar_that_explodes_in_compilation_is_ended_within_limits(
    tokenizer: llguidance.LLTokenizer, wanted: dict[str, Any]
) -> None:
    _, _, simple = run_forked(tokenizer, {"regex": "a"})
    answers, _, usage = run_forked(tokenizer, wanted)
    assert answers == []
    assert usage.ru_utime + usage.ru_stime < process.COMPILE_CPU_SECONDS + 0.5
    # The process checks its growth every few milliseconds, and later on a busy machine.
    assert (usage.ru_maxrss - simple.ru_maxrss) * _UNIT < 3 * process.MAX_GROWTH


def test_a_mask_over_the_cpu_limit_ends_the_grammar_process(tokenizer: llguidance.LLTokenizer) -> None:
    messages = [pack_step(0, byte_ids(text)) for text in ("", "a", "b", "a", "a")]
    answers, status, usage = run_forked(tokenizer, {"grammar": cubic(400)}, *messages)
    assert answers[0][:1] == b"+" and {answer[:1] for answer in answers[1:]} == {MASK}
    assert len(answers) < 1 + len(messages)
    assert os.WTERMSIG(status) == signal.SIGPROF
    assert usage.ru_utime + usage.ru_stime < process.COMPILE_CPU_SECONDS


def test_masks_that_take_long_on_average_end_their_output(
    tokenizer: llguidance.LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MEAN_MASK_CPU_SECONDS", 1e-9)
    monkeypatch.setattr(process, "BURST_CPU_SECONDS", 5e-3)
    steps = [pack_step(0, byte_ids("a")) for _ in range(1000)]
    for _ in range(5):
        answers, status, _ = run_forked(tokenizer, {"regex": "a{2000}"}, *steps)
        if len(answers) > 1 and answers[1][:1] == MASK:
            break  # otherwise, the first mask after forking off a large process has taken too long
    assert answers[1][:1] == MASK and answers[-1][:1] == ERROR and b"too much time" in answers[-1]
    assert status == 0


def test_steps_are_packed_and_unpacked() -> None:
    assert unpack_step(pack_step(7, [1, 2**31, 3])) == (7, [1, 2**31, 3], [], False)
    assert unpack_step(pack_step(7, [1, 2], [2**31, 3])) == (7, [1, 2], [2**31, 3], False)
    assert unpack_step(pack_step(7, [], [5])) == (7, [], [5], False)
    assert unpack_step(pack_step(2**32 - 1, (), ends=True)) == (2**32 - 1, [], [], True)


@pytest.mark.usefixtures("unhurried")
def test_masks_for_drafts_do_not_advance_the_output(tokenizer: llguidance.LLTokenizer) -> None:
    """Masks for drafts up to and beyond the grammar's end. The output then continues with other tokens."""
    regex = {"regex": "ab?c|xy"}
    steps = [pack_step(0, byte_ids("ab")), pack_step(0, byte_ids("c"))]
    _, _, before, after_ab, after_abc = run_forked(
        tokenizer, regex, pack_step(0, []), pack_step(1, byte_ids("a")), *steps
    )[0][:5]
    del before
    (_, answer, then), status, _ = run_forked(
        tokenizer, regex, pack_step(0, byte_ids("a"), byte_ids("bcz")), pack_step(0, byte_ids("b"))
    )
    assert status == 0 and answer[:1] == MASK
    num_masks, masks = unpack_masks(answer)
    size = len(masks) // num_masks
    assert num_masks == 4
    masks_of = [bytes(masks[i * size : (i + 1) * size]) for i in range(4)]
    assert [pack_masks(MASK, [mask]) for mask in masks_of[1:3]] == [after_ab, after_abc] and masks_of[3] == bytes(size)
    assert then == after_ab


def test_a_draft_that_explodes_ends_no_output(tokenizer: llguidance.LLTokenizer) -> None:
    """A draft that explodes ends only the masks after drafts, for all outputs. One answer reports that."""
    grammar = {"grammar": cubic(400)}
    wrong = byte_ids("abaaa")
    steps = [(0, [], wrong), (1, byte_ids("ab"), byte_ids("a")), (0, byte_ids("a"), byte_ids("b")), (0, byte_ids("b"))]
    answers, status, _ = run_forked(tokenizer, grammar, *(pack_step(*step) for step in steps))
    plain, _, _ = run_forked(tokenizer, grammar, *(pack_step(*step[:2]) for step in steps))
    assert status == 0 and len(answers) == len(plain) == 5
    assert answers[1][:1] == MASK_ALONE and all(unpack_masks(answer)[0] == 1 for answer in answers[1:])
    assert [MASK + answers[1][1:], *answers[2:]] == plain[1:]


def test_masks_for_drafts_have_a_separate_cpu_limit(
    tokenizer: llguidance.LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks after drafts soon exhaust their own limit. The output continues without them."""
    monkeypatch.setattr(process, "MEAN_MASK_CPU_SECONDS", 1e-9)
    monkeypatch.setattr(process, "DRAFTS_BURST_CPU_SECONDS", 1e-2)
    drafts = byte_ids("a" * 60)
    steps = [pack_step(0, byte_ids("a"), drafts) for _ in range(100)]
    for _ in range(5):
        answers, status, _ = run_forked(tokenizer, {"regex": "a{2000}"}, *steps)
        num_masks = [unpack_masks(answer)[0] for answer in answers[1:]]
        if num_masks[0] > 1:
            break  # otherwise, the first masks after forking off a large process have taken too long
    assert status == 0 and len(answers) == 101 and {answer[:1] for answer in answers[1:]} <= {MASK, MASK_ALONE}
    assert num_masks[0] > 1 and num_masks[-1] == 1


@pytest.mark.usefixtures("unhurried")
def test_masks_for_drafts_are_correct_after_steps_without_drafts(tokenizer: llguidance.LLTokenizer) -> None:
    """Masks after drafts are right after tokens without drafts, and for an output that started later."""
    regex = {"regex": "ab?c|xyz"}
    _, of_a, of_ab = run_forked(tokenizer, regex, pack_step(0, byte_ids("a")), pack_step(0, byte_ids("b")))[0]
    first, second = pack_step(0, [], byte_ids("a")), pack_step(1, byte_ids("a"), byte_ids("b"))
    steps = [first, pack_step(0, byte_ids("x")), pack_step(0, byte_ids("y"), byte_ids("z")), second]
    (_, *answers), _, _ = run_forked(tokenizer, regex, *steps)
    masks = [unpack_masks(answer) for answer in answers]
    assert [num for num, _ in masks] == [2, 1, 2, 2]
    size = len(masks[0][1]) // 2
    assert pack_masks(MASK, [bytes(masks[0][1][size:])]) == of_a
    assert any(masks[2][1][:size]) and pack_masks(MASK, [bytes(masks[3][1][size:])]) == of_ab


def test_the_grammar_process_imports_no_heavy_modules() -> None:
    code = (
        "import sys, metal_engine.grammars.process;"
        "print({'mlx', 'numpy', 'transformers', 'torch', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("wanted", [
    {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    {"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    {"grammar": "start: /a/\n%import /etc/passwd"},
    {"grammar": '%import "/etc/passwd"\nstart: passwd'},
    {"grammar": "%import .passwd.root\nstart: root"},
    {"grammar": 'start: %json {"$ref": "file:///etc/passwd"}'},
    {"grammar": 'start: %json {"$ref": "/etc/passwd"}'},
    {"grammar": 'start: %regex {"substring_file": "/etc/passwd"}'},
    {"grammar": "start: @passwd"},
    {"json": {"$ref": "file:///etc/passwd"}},
    {"regex": "\ud800"},
    {"whitespace_pattern": "(" * 60_000, "json": {}},
], ids=range(12))  # fmt: skip
def test_grammars_that_nest_too_deep_or_read_files_are_refused(
    tokenizer: llguidance.LLTokenizer, wanted: dict[str, Any]
) -> None:
    answers, _, _ = run_forked(tokenizer, wanted)
    assert not (answers and answers[0][:1] == b"+")
    assert b"root:" not in b"".join(answers)


def test_regex_json_and_common_directives_work(tokenizer: llguidance.LLTokenizer) -> None:
    grammar = 'start: INT " " words obj\n%import common.INT\nwords: %regex {"substring_words": "a b c"}\nobj: %json {}'
    answers, status, _ = run_forked(tokenizer, {"grammar": grammar})
    assert [answer[:1] for answer in answers] == [b"+"] and status == 0


@pytest.mark.parametrize(("wanted", "problem"), [
    ({"regex": "ab/\n(cd"}, "character 5, '(cd': unclosed group"),
    ({"regex": r"\d{3}-(a)\1"}, r"character 10, '\\1': backreferences are not supported"),
    ({"regex": "x" * 700 + "["}, "character 701, '[': unclosed character class"),
    ({"json": {"type": "string", "pattern": "^a(b"}}, "character 3, '(b': unclosed group"),
    ({"grammar": "start: A\nA: /x/ /a(b/"}, "character 2, '(b': unclosed group"),
])  # fmt: skip
def test_faults_of_regular_expressions(tokenizer: llguidance.LLTokenizer, wanted: dict[str, Any], problem: str) -> None:
    """The error is one line with the place and the problem."""
    ((answer,), _, _) = run_forked(tokenizer, wanted)
    assert unpack_compiled(answer)[1] == f"cannot be compiled: the regular expression has a fault at {problem}"
