"""Compiling grammars in other processes: turns, cancellation, ends, caching, and no leftover processes."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from metal_engine import python_process
from metal_engine.cancellation import Cancelled, caller_disconnected
from metal_engine.errors import OverloadedError
from metal_engine.forks.channel import framed, receive
from metal_engine.forks.forking_process import ForkError
from metal_engine.grammars import compiler as compiler_module
from metal_engine.grammars import grammar_client as compiled_module
from metal_engine.grammars.compiler import GrammarCompiler
from metal_engine.grammars.grammar_client import CompiledGrammar, SegmentEnd
from metal_engine.grammars.messages import MASK, pack_compiled, pack_end, pack_masks, unpack_step
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.grammars.hostile import PATTERNS, cubic, descendants
from tests.support.serving import wait_until
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.fixtures.fake_engine import VOCAB_SIZE, byte_ids, tiny_tokenizer

HOG = StructuredOutputsParams(**PATTERNS)
WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE)
    yield made
    made.close()


class Asker(threading.Thread):
    """Thread that compiles a grammar for a client that may disconnect."""

    def __init__(self, compiler: GrammarCompiler, params: StructuredOutputsParams = HOG) -> None:
        super().__init__()
        self._compiler, self._params = compiler, params
        self.left = threading.Event()
        self.outcome: BaseException | CompiledGrammar | None = None
        self.start()

    def run(self) -> None:
        caller_disconnected.set(self.left)
        try:
            self.outcome = self._compiler.compile(self._params)
        except BaseException as error:  # noqa: BLE001  (looked at by the test)
            self.outcome = error


def test_leaving_ends_compiling(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputsParams(regex="a"))
    before = descendants()
    asker = Asker(compiler)
    wait_until(lambda: bool(descendants() - before), "the process of the grammar")
    asker.left.set()
    asker.join(60)
    assert isinstance(asker.outcome, Cancelled)
    wait_until(lambda: not descendants() - before, "the end of its process")
    compiler.compile(StructuredOutputsParams(regex="b"))


def test_two_grammars_compile_at_once_and_waiting_callers_can_cancel(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(StructuredOutputsParams(regex="a"))
    at_once, most, lock, go_on = [0], [0], threading.Lock(), threading.Event()

    def ask(channel: socket.socket, wanted: bytes) -> tuple[float, str]:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        go_on.wait(60)
        with lock:
            at_once[0] -= 1
        return 0.0, "refused"

    monkeypatch.setattr(compiler_module, "_ask", ask)
    askers = [Asker(compiler, StructuredOutputsParams(regex="a" * i)) for i in range(2, 7)]
    wait_until(lambda: at_once[0] == 2, "two that compile")
    for asker in askers:
        asker.left.set()
    wait_until(lambda: sum(not asker.is_alive() for asker in askers) == 3, "the end of those who wait")
    go_on.set()
    for asker in askers:
        asker.join(60)
    assert most == [2]
    assert all(isinstance(asker.outcome, Cancelled) for asker in askers)


def test_closing_ends_compiling_and_every_process() -> None:
    before = descendants()
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE)
    compiler.compile(StructuredOutputsParams(regex="a"))
    asker = Asker(compiler)
    wait_until(lambda: len(descendants() - before) == 3, "the tokenizer's process and two grammars'")
    with socket.socket() as ended:  # unconnected, as on macOS after the end of a process
        compiler._compiling.add(ended)
        compiler.close()
    asker.join(60)
    assert isinstance(asker.outcome, Cancelled)
    wait_until(lambda: not descendants() - before, "the end of the processes")
    with pytest.raises(Cancelled):
        compiler.compile(StructuredOutputsParams(regex="b"))


def test_no_process_outlives_a_killed_parent() -> None:
    """A killed server leaves no process. The script also lacks a guard against being imported by its children."""
    script = (
        "from metal_engine.grammars.compiler import GrammarCompiler\n"
        "from metal_engine.sampling_params import StructuredOutputsParams\n"
        "from tools.fixtures.fake_engine import VOCAB_SIZE, tiny_tokenizer\n"
        "compiler = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE)\n"
        "kept = compiler.compile(StructuredOutputsParams(regex='a'))\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        below = descendants(parent.pid)
        assert len(below) == 2
        parent.send_signal(signal.SIGKILL)
    alive = set(below)

    def are_gone() -> bool:
        for pid in list(alive):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                alive.remove(pid)
        return not alive

    wait_until(are_gone, "the end of the processes")


def test_without_processes_only_structured_output_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine()
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(python_process, "PYTHON", ("/nowhere/python",))
        with pytest.raises(OverloadedError, match=r"^the process that .* cannot be started: .*nowhere"):
            engine.prepare(byte_ids("a"), structured)
        assert "structured output is refused" in caplog.text
        patch.setattr(python_process, "PYTHON", ("/bin/false",))
        with pytest.raises(OverloadedError, match=r"cannot be started: it ended with status 1$"):
            engine.prepare(byte_ids("a"), structured)
        patch.setattr(socket, "socketpair", Mock(side_effect=OSError("too many open files")))
        with pytest.raises(OverloadedError, match=r"cannot be started: too many open files$"):
            engine.prepare(byte_ids("a"), structured)
        engine.prepare(byte_ids("a"), SamplingParams())
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "receive_patiently", lambda channel: b"cannot be served, because of X")
        with pytest.raises(OverloadedError, match=r"^structured outputs cannot be served, because of X$"):
            engine.prepare(byte_ids("a"), structured)
    engine.prepare(byte_ids("a"), structured)


def test_a_full_compile_queue_refuses_new_grammars_as_overloaded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(StructuredOutputsParams(regex="known"))
    go_on = threading.Event()
    monkeypatch.setattr(compiler_module, "_ask", lambda *_: (go_on.wait(60), (0.0, "refused"))[1])
    monkeypatch.setattr(compiler_module, "_MAX_WAITING", 3)
    askers = [Asker(compiler, StructuredOutputsParams(regex=letter)) for letter in "abcaaa"]
    wait_until(lambda: compiler._waiting.total() == 6, "six who wait for three")
    with pytest.raises(OverloadedError, match="3 other grammars"):
        compiler.compile(StructuredOutputsParams(regex="d"))
    compiler.compile(StructuredOutputsParams(regex="known"))
    go_on.set()
    for asker in askers:
        asker.join(60)
    assert not compiler._waiting


def test_the_number_of_cached_grammar_processes_is_limited(compiler: GrammarCompiler) -> None:
    before = descendants()
    held = compiler.compile(StructuredOutputsParams(regex="x"))
    for i in range(20):
        compiler.compile(StructuredOutputsParams(regex="a" * i))
    gc.collect()
    wait_until(lambda: len(descendants() - before) == 1 + 16 + 1, "the end of processes that are not kept")
    assert compiler.compile(StructuredOutputsParams(regex="x")) is held  # still cached, because it is in use


def test_processes_in_use_are_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_PROCESSES", 3)
    held = [compiler.compile(StructuredOutputsParams(regex="x" * i)) for i in range(1, 4)]
    outputs = [one.matcher() for one in held]
    with pytest.raises(OverloadedError, match="3 requests with other grammars"):
        compiler.compile(StructuredOutputsParams(regex="y"))
    outputs.pop()
    compiler.compile(StructuredOutputsParams(regex="y"))


def test_processes_of_idle_grammars_are_suspended(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile(StructuredOutputsParams(regex="first"))  # starts the process that loads the tokenizer
    before = descendants()
    monkeypatch.setattr(compiler_module, "_MAX_PROCESSES", 4)
    monkeypatch.setattr(compiled_module, "_SUSPENDABLE_SECONDS", 10.0)
    letters = "abcdefghijkl"
    held = [compiler.compile(StructuredOutputsParams(regex=letter * 3)) for letter in letters]
    wait_until(lambda: len(descendants() - before) <= 4, "the end of processes that rest")
    mask = np.zeros(-(-compiler._vocab_size // 32), np.int32)
    for _ in range(2):
        for letter, grammar in zip(letters, held, strict=True):
            output = grammar.matcher()
            for _ in range(3):
                assert output.fill_mask(mask, math.inf)
                assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == byte_ids(
                    letter
                )
                output.consume(byte_ids(letter))
            del output
    wait_until(lambda: len(descendants() - before) <= 4, "the end of processes that rest again")


def test_a_grammar_that_took_long_to_compile_is_not_suspended(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_PROCESSES", 2)
    monkeypatch.setattr(compiled_module, "_SUSPENDABLE_SECONDS", 0.0)
    held = [compiler.compile(StructuredOutputsParams(regex=letter)) for letter in "ab"]
    with pytest.raises(OverloadedError, match="2 requests with other grammars"):
        compiler.compile(StructuredOutputsParams(regex="c"))
    assert not any(one.is_suspended for one in held)


def test_a_too_complex_grammar_fails_only_the_request_with_that_grammar() -> None:
    """The CPU timer ends the grammar's process. Other requests continue, and the next request gets a new process."""
    engine = tiny_engine()
    hostile = StructuredOutputsParams(grammar=cubic(400))
    others = SamplingParams(max_tokens=30, temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-z]{40}"))
    alone = run_all(engine, [(byte_ids("b"), others)])[0]
    params = SamplingParams(max_tokens=30, structured_outputs=hostile)
    for _ in range(2):
        outputs, *beside = run_all(
            engine, [(byte_ids("a"), params), (byte_ids("b"), others), (byte_ids("c"), SamplingParams(max_tokens=5))]
        )
        assert outputs[-1].finish_reason == "error"
        assert "structured output failed" in (outputs[-1].error or "")
        assert [o.token_ids for o in beside[0]] == [o.token_ids for o in alone]
        assert beside[1][-1].finish_reason in ("stop", "length")


def test_many_outputs_and_long_replays_do_not_block_each_other() -> None:
    """The process writes masks while the engine is still writing tokens, more than the sockets' buffers hold."""
    ours, theirs = socket.socketpair()
    num_words = 5000

    def serve() -> None:
        try:
            while True:
                output_id, token_ids, _, ends = unpack_step(receive(theirs))
                if not ends:
                    value = np.full(num_words, output_id + len(token_ids), np.int32)
                    theirs.sendall(framed(pack_masks(MASK, [value.tobytes()])))
        except EOFError:
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    reopen = Mock(side_effect=ForkError("no process"))
    grammar = CompiledGrammar(ours, num_words * 32, 0.0, reopen)
    matchers = [grammar.matcher() for _ in range(128)]
    mask = np.zeros(num_words, np.int32)
    for matcher in matchers:
        matcher.consume([1] * 20_000)
    for i, matcher in reversed(list(enumerate(matchers))):
        assert matcher.fill_mask(mask, math.inf)
        assert (mask == i + 20_000).all()
    kept = matchers[5]
    del matchers, matcher
    kept.consume([1])
    assert kept.fill_mask(mask, math.inf)
    assert (mask == 5 + 1).all() and grammar._live == {5} and not grammar._answers
    assert kept.fill_mask(np.zeros_like(mask), math.inf)  # the step is computed again
    theirs.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    kept.consume([1])
    with pytest.raises(ValueError, match=r"^its grammar cannot continue: no process can be started: no process$"):
        assert kept.fill_mask(mask, math.inf)
    assert grammar.needs_replacement and reopen.call_count == 1
    theirs.close()


class Processes:
    """Processes of a grammar that the test serves. The mask after some tokens has their number in each word."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[int, list[int], list[int]]]] = []  # messages to each process
        self.grammar = CompiledGrammar(self._connect(), 32, 0.0, self._connect)

    def _connect(self) -> socket.socket:
        ours, self.theirs = socket.socketpair()
        if self.sent:
            self.theirs.sendall(framed(pack_compiled(0.0)))
        self.sent.append([])
        return ours

    def serve(self, *answers: bytes) -> None:
        """Receive a message for each answer, and answer it; with the number of its tokens if the answer is empty."""
        for answer in answers:
            output_id, token_ids, drafts, _ = unpack_step(receive(self.theirs))
            self.sent[-1].append((output_id, token_ids, drafts))
            mask = np.full(1, len(token_ids), np.int32).tobytes()
            self.theirs.sendall(framed(answer or pack_masks(MASK, [mask] * (1 + len(drafts)))))


def test_outputs_continue_in_a_new_process(caplog: pytest.LogCaptureFixture) -> None:
    processes, mask = Processes(), np.zeros(1, np.int32)
    asked, idle, late = (processes.grammar.matcher() for _ in range(3))
    for matcher in (asked, idle, late):
        matcher.consume([5, 6])
    processes.serve(b"", b"", b"")
    assert all(matcher.fill_mask(mask, math.inf) for matcher in (asked, idle, late))
    asked.consume([7], [8])
    late.consume([9])
    processes.theirs.close()
    assert not asked.fill_mask(mask, 0.0) and not late.fill_mask(mask, 0.0)
    processes.serve(b"", b"")
    assert asked.fill_mask(mask, math.inf, 1) and mask[0] == 3
    assert late.fill_mask(mask, math.inf) and mask[0] == 3
    idle.consume([1, 2, 3])
    asked.consume([8])
    processes.serve(b"", b"")
    assert idle.fill_mask(mask, math.inf) and mask[0] == 5
    assert processes.sent[1] == [(0, [5, 6, 7], [8]), (2, [5, 6, 9], []), (1, [5, 6, 1, 2, 3], []), (0, [8], [])]
    assert [record.getMessage() for record in caplog.records] == [
        "the process of a grammar has ended under 3 outputs; a new one continues them"
    ]
    assert processes.grammar.needs_replacement  # for new outputs
    processes.theirs.close()
    for matcher in (late, idle):
        matcher.consume([1])
        with pytest.raises(ValueError, match="too complex"):
            matcher.fill_mask(mask, math.inf)
    assert len(processes.sent) == 2


def test_the_end_of_a_segment_counts_the_last_tokens(caplog: pytest.LogCaptureFixture) -> None:
    processes, mask = Processes(), np.zeros(1, np.int32)
    matcher = processes.grammar.matcher()
    matcher.consume([1, 2, 3])
    processes.serve(b"")
    assert matcher.fill_mask(mask, math.inf)
    matcher.consume([4, 5])
    processes.theirs.close()
    assert not matcher.fill_mask(mask, 0.0)
    processes.serve(pack_end(4))  # of five tokens
    with pytest.raises(SegmentEnd) as info:
        matcher.fill_mask(mask, math.inf)
    assert info.value.num_tokens == 1


def test_killed_processes_change_no_output() -> None:
    requests = [
        (byte_ids("a"), SamplingParams(max_tokens=30, seed=i, structured_outputs=StructuredOutputsParams(regex=regex)))
        for i, regex in enumerate(["[a-z]{40}", "[0-9]{3}x*", "[a-z]{40}"])
    ]
    before, engine = descendants(), tiny_engine()
    expected = run_all(engine, requests)
    steps, num_killed = iter(range(1000)), list[int]()
    step = engine.core.step

    def killing_step() -> list[Any]:
        if next(steps) == 12:
            killed = descendants() - before
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            num_killed.append(len(killed))
        return step()

    engine.core.step = killing_step  # type: ignore[method-assign]
    assert [token_ids(o) for o in run_all(engine, requests)] == [token_ids(o) for o in expected]
    assert num_killed == [3], "the tokenizer's process and two grammars'"
