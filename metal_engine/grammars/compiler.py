"""Structured output: user's schemas, regular expressions and grammars, compiled for one tokenizer.

Compiling and masking run in processes of their own (:mod:`metal_engine.grammars.process`), whose time and
memory are bounded; what goes beyond is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from metal_engine.cancellation import Cancelled, check_cancelled
from metal_engine.errors import OverloadedError, ParameterError
from metal_engine.grammars.compiled import CompiledGrammar
from metal_engine.grammars.messages import framed, unpack_compiled
from metal_engine.grammars.tokenizer_process import GrammarProcessError, TokenizerProcess, receive_patiently
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Each takes a core for a second at most.
_MAX_COMPILING = 2
# Grammars that wait for that: the last of them waits ten seconds at worst.
_MAX_WAITING = 16
# Compiled grammars kept for further requests. Each is a process of a few MiB, some tens at worst, and where outputs
# have had drafts another one.
_MAX_KEPT = 16
# Where there would be more, those of grammars that no output follows are put to rest.
_MAX_PROCESSES = 512
# How often somebody who waits for his turn looks whether his asker has left.
_POLL_SECONDS = 0.02


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each once. Thread-safe.

    Args:
        vocab_size: number of logits, which may be more than the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        eos_token_ids = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._process = TokenizerProcess(tokenizer.serialized, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._turns = threading.Semaphore(_MAX_COMPILING)
        self._lock = threading.Lock()
        self._compiling: set[socket.socket] = set()
        self._waiting: Counter[bytes] = Counter()  # who waits for each grammar to be compiled, or compiles it
        self._is_closed = False
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # the least recently asked for first
        self._in_use: weakref.WeakValueDictionary[bytes, CompiledGrammar] = weakref.WeakValueDictionary()

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile what a request asks for, unless it has been compiled before.

        Takes milliseconds for most; a second at most, and as long as others do who came first. The first one waits for
        the process that loads the tokenizer, for about a second where the vocabulary is large.

        Raises:
            ParameterError: it is no grammar, or too large, or asks for what cannot be enforced.
            OverloadedError: too many other grammars wait to be compiled.
            Cancelled: whoever asked for it has left.
        """
        try:
            wanted = json.dumps(_wanted(params)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError("structured_outputs", f"cannot be read: {error}") from error
        key = hashlib.sha256(wanted).digest()
        compiled = self._known(key)
        if compiled is None:
            with self._turn(key):
                compiled = self._known(key)
                if compiled is None:
                    compiled = self._compile(wanted)
                    self._keep(key, compiled)
        return compiled

    def close(self) -> None:
        """Let go of what is kept, end the process that has the tokenizer, and end what is being compiled."""
        with self._lock:
            self._is_closed = True
            self._kept.clear()
            for channel in self._compiling:
                channel.shutdown(socket.SHUT_RDWR)
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
    def _turn(self, key: bytes) -> Iterator[None]:
        with self._lock:
            if key not in self._waiting and len(self._waiting) >= _MAX_WAITING:
                raise OverloadedError(f"{len(self._waiting)} other grammars wait to be compiled")
            self._waiting[key] += 1
        try:
            while not self._turns.acquire(timeout=_POLL_SECONDS):
                self._check_wanted()
            try:
                self._check_wanted()
                yield
            finally:
                self._turns.release()
        finally:
            with self._lock:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]

    def _make_room(self) -> None:
        if self._num_processes >= _MAX_PROCESSES:
            self._drop_oldest(0)
            for one in list(self._in_use.values()):
                one.suspend()

    @property
    def _num_processes(self) -> int:
        return sum(not one.is_resting for one in list(self._in_use.values()))

    def _reopened(self, wanted: bytes) -> socket.socket:
        """A socket to a new process, which compiles a grammar that has been compiled before."""
        with self._lock:
            self._make_room()
        channel = self._process.connect()
        with contextlib.suppress(OSError):  # if it has ended, that will be seen
            channel.sendall(framed(wanted))
        return channel

    def _compile(self, wanted: bytes) -> CompiledGrammar:
        with self._lock:
            self._make_room()
            if self._num_processes >= _MAX_PROCESSES:
                message = f"cannot be served now: {_MAX_PROCESSES} requests with other grammars are waiting or running"
                raise ParameterError("structured_outputs", message)
        try:
            channel = self._process.connect()
        except GrammarProcessError as error:
            self._check_wanted()
            logger.error("structured output is refused: the process for it cannot be started: %s", error)
            message = f"cannot be served: the process that compiles grammars cannot be started: {error}"
            raise ParameterError("structured_outputs", message) from error
        with self._lock:
            self._compiling.add(channel)
        try:
            seconds, problem = _ask(channel, wanted)
        except Cancelled:
            channel.close()
            raise
        finally:
            with self._lock:
                self._compiling.remove(channel)
        if problem == "":
            return CompiledGrammar(channel, self._vocab_size, seconds, partial(self._reopened, wanted))
        channel.close()
        self._check_wanted()
        raise ParameterError("structured_outputs", problem)

    def _check_wanted(self) -> None:
        check_cancelled()
        if self._is_closed:
            raise Cancelled


def _ask(channel: socket.socket, wanted: bytes) -> tuple[float, str]:
    """Have a process compile a grammar; closing the socket ends it. Returns what :func:`unpack_compiled` does."""
    with contextlib.suppress(OSError):  # if it has ended, there is no answer either
        channel.sendall(framed(wanted))
    return unpack_compiled(receive_patiently(channel))


def _wanted(params: StructuredOutputsParams) -> dict[str, Any]:
    """The fields that make a grammar of them."""
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
