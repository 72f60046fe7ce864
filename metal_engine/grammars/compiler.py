"""Compiles structured output constraints of requests (schemas, regular expressions, grammars) for one tokenizer.

Compiling and masking run in separate processes (:mod:`metal_engine.grammars.process`) with limits on time and
memory. Grammars that exceed a limit are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import socket
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from metal_engine.cancellation import Cancelled, check_cancelled
from metal_engine.errors import OverloadedError, ParameterError
from metal_engine.forks.channel import framed
from metal_engine.forks.forking_process import ForkError, ForkingProcess, receive_patiently
from metal_engine.grammars.call_grammar import CallGrammar, faulty_arguments
from metal_engine.grammars.grammar_client import CompiledGrammar
from metal_engine.grammars.messages import unpack_compiled
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Maximum number of concurrent compilations. Each takes one core for at most a second.
_MAX_COMPILING = 2
# Maximum number of grammars in compilation or waiting for it. The last grammar waits for ten seconds in the worst case.
_MAX_WAITING = 16
# Maximum number of compiled grammars kept for further requests. Each has a process of a few MiB, in the worst case some
# tens of MiB, and a second process if masks after drafts are needed.
_MAX_KEPT = 16
# Maximum number of processes. Beyond it, processes of grammars without outputs are suspended.
_MAX_PROCESSES = 512
# Interval at which a waiting request checks for cancellation.
_POLL_SECONDS = 0.02


class GrammarRefusedError(ParameterError):
    """Raised if llguidance refuses a grammar, or if its compilation exceeds a limit on time or memory.

    Attributes:
        seconds: CPU time of the compilation; infinite if a limit was exceeded.
    """

    def __init__(self, problem: str, seconds: float) -> None:
        super().__init__("structured_outputs", problem)
        self.seconds = seconds


class GrammarTask:
    """Grammar that is compiled, or being compiled in the background."""

    def __init__(self, compiled: CompiledGrammar | Future[CompiledGrammar]) -> None:
        self._compiled = compiled

    def result(self, deadline: float) -> CompiledGrammar | None:
        """Wait for the compilation. Return the grammar; None if the compilation has not ended by ``deadline``.

        Args:
            deadline: time of ``time.monotonic`` in seconds.

        Raises:
            ValueError: the grammar cannot be compiled, or too many other grammars wait to be compiled.
        """
        if isinstance(self._compiled, CompiledGrammar):
            return self._compiled
        try:
            seconds = max(deadline - time.monotonic(), 0.0)
            self._compiled = self._compiled.result(None if seconds == math.inf else seconds)
        except TimeoutError:
            return None
        except (Cancelled, CancelledError, OverloadedError, ParameterError) as error:
            raise ValueError(str(error)) from error
        return self._compiled


class GrammarCompiler:
    """Compiler of grammars for one tokenizer. Caches grammars that outputs use, and recent grammars. Thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of logits, which may exceed the number of the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        eos_token_ids = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        options = json.dumps({"n_vocab": vocab_size, "eos_token": eos_token_ids}).encode()
        self._process = ForkingProcess("metal_engine.grammars.process", [options, tokenizer.serialized])
        self._vocab_size = vocab_size
        self._permits = threading.Semaphore(_MAX_COMPILING)
        self._background = ThreadPoolExecutor(_MAX_COMPILING, thread_name_prefix="call-grammars")
        self._lock = threading.Lock()
        self._compiling: set[socket.socket] = set()
        self._waiting: Counter[bytes] = Counter()  # number of requests that wait for or run each compilation
        self._is_closed = False
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # the least recently requested first
        self._in_use: weakref.WeakValueDictionary[bytes, CompiledGrammar] = weakref.WeakValueDictionary()

    def compile(self, params: StructuredOutputsParams, **place: Any) -> CompiledGrammar:
        """Return the grammar of a structured output, from the cache or newly compiled.

        Takes milliseconds for most grammars and at most a second, plus the wait for earlier compilations. The first
        call also waits for the process that loads the tokenizer, about a second for a large vocabulary.

        Args:
            params: parameters of the structured output.
            place: ``tail`` and the fields that may accompany it, as in :mod:`metal_engine.grammars.source`. They
                describe the text around a structured output that follows a mark. Empty if the structured output is the
                whole output.

        Raises:
            ParameterError: the grammar is invalid, too large, or has constraints that cannot be enforced.
            OverloadedError: too many other grammars wait to be compiled, too many processes of other grammars run, or
                no process can be started.
            Cancelled: the request was cancelled.
        """
        try:
            wanted = json.dumps(_wanted(params) | place).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError("structured_outputs", f"cannot be read: {error}") from error
        return self._once(hashlib.sha256(wanted).digest(), partial(self._compile, wanted))

    def compile_call(self, grammar: CallGrammar) -> GrammarTask:
        """Start compiling the grammar of a tool call in the background, unless the cache has it. Return the task.

        If the grammar cannot be compiled, the arguments of some tools are left open. The task then logs a warning, and
        stores the indices of the rules for these arguments in ``grammar.opened``.
        """
        known = self._known(grammar.key)
        if known is not None:
            return GrammarTask(known)
        return GrammarTask(self._background.submit(self._once, grammar.key, partial(self._compile_call, grammar)))

    def _once(self, key: bytes, compile_: Callable[[], CompiledGrammar]) -> CompiledGrammar:
        compiled = self._known(key)
        if compiled is None:
            with self._permit(key):
                compiled = self._known(key)
                if compiled is None:
                    compiled = compile_()
                    self._keep(key, compiled)
        return compiled

    def _compile_call(self, grammar: CallGrammar) -> CompiledGrammar:
        try:
            return self._compile(grammar.wanted(grammar.opened))
        except GrammarRefusedError as error:
            if not grammar.num_arguments:
                raise
            problem = error.message

        def check(opened: frozenset[int]) -> tuple[str, float]:
            try:
                return "", self._compile(grammar.wanted(opened)).compile_seconds
            except GrammarRefusedError as error:
                return error.message, error.seconds

        found = faulty_arguments(grammar.num_arguments, problem, check)
        try:
            compiled = self._compile(grammar.wanted(found))
        except GrammarRefusedError as error:
            found = dict.fromkeys(range(grammar.num_arguments), error.message)
            compiled = self._compile(grammar.wanted(found))
        grammar.opened = frozenset(found)
        listed = "; ".join(f"{grammar.tool(i)}: {problem}" for i, problem in found.items())
        logger.warning("the arguments of %d tools are not constrained by their schemas: %.500s", len(found), listed)
        return compiled

    def close(self) -> None:
        """Clear the cache, abort compilations, and end the process that has loaded the tokenizer."""
        with self._lock:
            self._is_closed = True
            self._kept.clear()
            for channel in self._compiling:
                with contextlib.suppress(OSError):  # raised on macOS if the process has ended
                    channel.shutdown(socket.SHUT_RDWR)
        self._background.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    def _known(self, key: bytes) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._in_use.get(key)
            if compiled is None or compiled.needs_replacement:
                self._kept.pop(key, None)
                return None
            self._kept[key] = compiled
            self._kept.move_to_end(key)
            self._drop_oldest(_MAX_KEPT)
            return compiled

    def _keep(self, key: bytes, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._in_use[key] = self._kept[key] = compiled
            self._drop_oldest(_MAX_KEPT)

    def _drop_oldest(self, num_kept: int) -> None:
        while len(self._kept) > num_kept:
            self._kept.popitem(last=False)

    @contextmanager
    def _permit(self, key: bytes) -> Iterator[None]:
        with self._lock:
            if key not in self._waiting and len(self._waiting) >= _MAX_WAITING:
                raise OverloadedError(f"{len(self._waiting)} other grammars wait to be compiled")
            self._waiting[key] += 1
        try:
            while not self._permits.acquire(timeout=_POLL_SECONDS):
                self._check_wanted()
            try:
                self._check_wanted()
                yield
            finally:
                self._permits.release()
        finally:
            with self._lock:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]

    def _free_process(self) -> None:
        if self._num_processes >= _MAX_PROCESSES:
            self._drop_oldest(0)
            for one in list(self._in_use.values()):
                one.suspend()

    @property
    def _num_processes(self) -> int:
        return sum(not one.is_suspended for one in list(self._in_use.values()))

    def _reopened(self, wanted: bytes) -> socket.socket:
        """Send a grammar to a new process, which compiles it again. Return the socket to the process.

        Raises:
            ForkError: no process can be started.
        """
        with self._lock:
            self._free_process()
        channel = self._process.connect()
        with contextlib.suppress(OSError):  # if the process has ended, reading the answer fails
            channel.sendall(framed(wanted))
        return channel

    def _compile(self, wanted: bytes) -> CompiledGrammar:
        with self._lock:
            self._free_process()
            if self._num_processes >= _MAX_PROCESSES:
                raise OverloadedError(f"{_MAX_PROCESSES} requests with other grammars are waiting or running")
        try:
            channel = self._process.connect()
        except ForkError as error:
            self._check_wanted()
            logger.error("structured output is refused: the process for it cannot be started: %s", error)
            raise OverloadedError(f"the process that compiles grammars cannot be started: {error}") from error
        with self._lock:
            self._compiling.add(channel)
        try:
            seconds, problem = _ask(channel, wanted)
        except (Cancelled, OverloadedError):
            channel.close()
            raise
        finally:
            with self._lock:
                self._compiling.remove(channel)
        if problem == "":
            return CompiledGrammar(channel, self._vocab_size, seconds, partial(self._reopened, wanted))
        channel.close()
        self._check_wanted()
        raise GrammarRefusedError(problem, seconds)

    def _check_wanted(self) -> None:
        check_cancelled()
        if self._is_closed:
            raise Cancelled


def _ask(channel: socket.socket, wanted: bytes) -> tuple[float, str]:
    """Compile a grammar in the process at the other end of ``channel``.

    Returns:
        CPU time of the compilation in seconds, and the error message, which is empty on success
        (:func:`unpack_compiled`).

    Raises:
        OverloadedError: the process could not fork.
        Cancelled: the request was cancelled. The process runs until the caller closes the socket.
    """
    with contextlib.suppress(OSError):  # if the process has ended, the answer below is None
        channel.sendall(framed(wanted))
    answer = receive_patiently(channel)
    if answer is not None and answer[:1] not in b"+-":
        raise OverloadedError(f"structured outputs {answer.decode()}")
    return unpack_compiled(answer)


def _wanted(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return the fields of a wanted grammar (:mod:`metal_engine.grammars.source`) that the parameters define."""
    if params.json_object:
        fields: dict[str, Any] = {"json": {"type": "object"}}
    elif params.json is not None:
        fields = {"json": params.json if isinstance(params.json, str | bool) else dict(params.json)}
    else:
        return {"regex": params.regex, "choice": params.choice, "grammar": params.grammar}
    return fields | {
        "strict": params.strict and not params.json_object,
        "whitespace_pattern": params.whitespace_pattern,
        "disable_any_whitespace": params.disable_any_whitespace,
    }
