"""Client side of a compiled grammar: requests the masks of its outputs from the grammar's process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set

import numpy as np

from metal_engine.forks.channel import BUFFER_BYTES, LENGTH, framed
from metal_engine.forks.forking_process import ForkError
from metal_engine.grammars.messages import (
    END,
    ERROR,
    MASK_ALONE,
    MASK_LAST,
    pack_step,
    unpack_compiled,
    unpack_end,
    unpack_masks,
)

logger = logging.getLogger(__name__)

# Mask computation has a CPU time limit. A process that does not respond within this time is considered broken.
_ANSWER_SECONDS = 120.0
# Limit on the compile time of grammars that may be suspended. The next step has to wait for the compilation.
_SUSPENDABLE_SECONDS = 0.02
# Entry for a compilation in the queue of expected answers, instead of an output id.
_COMPILING = -1
_TOO_COMPLEX = "its grammar has become too complex to continue"
# Maximum number of new processes for a grammar whose process ends while outputs use it. A busy machine may delay a
# process beyond its limits, and the system may end a process if memory runs out. A grammar that is too complex ends
# each of its processes.
_MAX_RESTARTS = 1


class _ProcessEndedError(Exception):
    """Raised if a grammar's process ends before it answers."""


class SegmentEnd(Exception):
    """Raised if the grammar of a :class:`metal_engine.grammars.mark_scanner.Segment` is complete.

    No further text belongs to the segment.

    Args:
        num_tokens: number of leading tokens of the output's last message to the process that belong to the segment.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class CompiledGrammar:
    """Compiled grammar in a separate process. Implements :class:`metal_engine.token_rules.Grammar`.

    All outputs with the same grammar share the process. The process ends when neither an output nor the compiler
    references the grammar. While no output uses the grammar, the grammar can be suspended: its process ends, and the
    next output starts a new process, which compiles the grammar again.

    Args:
        channel: socket to the process.
        vocab_size: number of logits.
        compile_seconds: CPU time that compilation took.
        reopen: returns a socket to a new process, to which the grammar has been sent.

    Attributes:
        compile_seconds: CPU time that compilation took.
        needs_replacement: True if the process has ended, failed or grown much. New outputs should use another process.
        num_restarts: number of processes that were started because the previous process ended while outputs used it.
    """

    def __init__(
        self, channel: socket.socket, vocab_size: int, compile_seconds: float, reopen: Callable[[], socket.socket]
    ) -> None:
        self._reopen = reopen
        self.compile_seconds = compile_seconds
        self._can_be_suspended = compile_seconds <= _SUSPENDABLE_SECONDS
        self._lock = threading.Lock()  # held to suspend the process, or to prevent that
        self._is_suspended = False
        self._set_channel(channel)
        self._num_words = -(-vocab_size // 32)
        self._ids = itertools.count()
        self._asked: deque[int] = deque()  # output ids in the order of the expected answers
        self._answers: dict[int, bytes] = {}
        self._live: set[int] = set()
        self._ended: deque[int] = deque()
        self._unsent = bytearray()
        self._received = bytearray()
        self._has_logged = False  # True after the log message about missing masks for drafts
        self.needs_replacement = False
        self.num_restarts = 0
        self._problem = _TOO_COMPLEX  # error message of outputs if the process ends again

    def _set_channel(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._is_open = True
        self._heard_at = time.monotonic()  # time of the last answer, or of the first message to the idle process
        self._close = weakref.finalize(self, channel.close)

    @property
    def begins_free(self) -> bool:
        return False

    @property
    def is_suspended(self) -> bool:
        return self._is_suspended

    def suspend(self) -> None:
        """Suspend the process if no output uses it and the grammar compiles quickly."""
        with self._lock:
            if not self._can_be_suspended or self._is_suspended or self._num_live:
                return
            self._live.clear()
            self._ended.clear()
            self._drop_messages()
            self._is_suspended = True

    def _drop_messages(self) -> None:
        """Drop all messages from and to the process, and close the socket. The process then ends."""
        for left in (self._asked, self._answers, self._unsent, self._received):
            left.clear()
        self._close()

    def _wake(self) -> None:
        """Start a new process, which compiles the grammar again. The first answer is the result of the compilation."""
        try:
            self._set_channel(self._reopen())
        except ForkError as error:
            self._is_open = False
            self._problem = f"its grammar cannot continue: no process can be started: {error}"
            return
        self._problem = _TOO_COMPLEX
        self._asked.appendleft(_COMPILING)

    def restart(self, num_restarts: int) -> None:
        """Replace a process that has ended by a new process. Each output must then send all of its tokens again.

        Does nothing if another output has already replaced the process.

        Args:
            num_restarts: value of :attr:`num_restarts` when the calling output last sent a message.

        Raises:
            ValueError: the number of new processes has reached its limit.
        """
        if num_restarts < self.num_restarts:
            return
        self.needs_replacement = True
        if num_restarts >= _MAX_RESTARTS:
            raise ValueError(self._problem)
        logger.warning("the process of a grammar has ended under %d outputs; a new one continues them", self._num_live)
        self.num_restarts += 1
        self._drop_messages()
        self._wake()

    @property
    def _num_live(self) -> int:
        return len(self._live) - len(self._ended)

    def matcher(self) -> GrammarMatcher:
        matcher = GrammarMatcher(self, next(self._ids))
        with self._lock:
            self._live.add(matcher.output_id)
            wakes, self._is_suspended = self._is_suspended, False
        if wakes:
            self._wake()
        # Deletion may happen in any thread, so the process is notified with the next message.
        weakref.finalize(matcher, self._ended.append, matcher.output_id)
        return matcher

    def ask(self, output_id: int, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Send an output's new tokens, and request its next mask and the masks after each draft. Does not wait."""
        messages = []
        while self._ended:
            ended = self._ended.popleft()
            self._live.remove(ended)
            self._answers.pop(ended, None)
            messages.append(pack_step(ended, (), ends=True))
        messages.append(pack_step(output_id, token_ids, drafts))
        if not self._asked:
            self._heard_at = time.monotonic()
        self._asked.append(output_id)
        self._unsent += b"".join(map(framed, messages))
        self._exchange(0.0)

    def answer(self, output_id: int, deadline: float) -> np.ndarray | None:
        """Return the masks that :meth:`ask` has requested; None if they have not arrived by ``deadline``.

        Args:
            output_id: id of the output.
            deadline: time of ``time.monotonic`` in seconds.

        Returns:
            [1 + number of drafts, ceil(vocabulary / 32)] int32: the mask of the next token, and a mask after each
            draft. Fewer rows if some masks after drafts could not be computed.

        Raises:
            ValueError: a token is not allowed, the grammar is too complex, or the process has not answered for
                ``_ANSWER_SECONDS``.
            SegmentEnd: the segment has ended. Only for grammars of segments.
            _ProcessEndedError: the process has ended.
        """
        while output_id not in self._answers:
            now = time.monotonic()
            if not self._is_open:
                raise _ProcessEndedError
            if self._exchange(max(deadline - now, 0.0)):
                continue  # an answer counts however late it is read: a step may take minutes
            if time.monotonic() - self._heard_at > _ANSWER_SECONDS:
                self.needs_replacement = True
                raise ValueError(_TOO_COMPLEX)
            if now >= deadline:
                return None
        answer = self._answers.pop(output_id)
        if answer[:1] == ERROR:
            self.needs_replacement = True  # the process keeps every grammar state that an output has reached
            raise ValueError(answer[1:].decode())
        if answer[:1] == END:
            raise SegmentEnd(unpack_end(answer))
        self.needs_replacement |= answer[:1] == MASK_LAST
        if answer[:1] == MASK_ALONE and not self._has_logged:
            self._has_logged = True
            logger.warning(
                "speculation: outputs of a grammar keep no drafts from now on, because masks after drafts exceeded "
                "their limit of time or memory, or their process could not be started"
            )
        num_masks, masks = unpack_masks(answer)
        # A mask may cover more tokens than there are logits.
        return np.frombuffer(masks, np.int32).reshape(num_masks, -1)[:, : self._num_words]

    def _exchange(self, seconds: float) -> bool:
        """Send and receive pending data. Wait up to ``seconds`` for the socket. Return True if it was ready."""
        if not self._is_open:
            return False
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = poll.poll(math.ceil(min(seconds, _ANSWER_SECONDS) * 1e3))
        try:
            for _, event in events:
                if event & select.POLLOUT:
                    with contextlib.suppress(BlockingIOError):
                        del self._unsent[: self._channel.send(self._unsent)]
                if event & ~select.POLLOUT:
                    self._receive()
        except OSError:
            self._is_open = False
        return bool(events)

    def _receive(self) -> None:
        data = self._channel.recv(BUFFER_BYTES)
        self._heard_at = time.monotonic()
        self._received += data
        self._is_open = bool(data)
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            output_id = self._asked.popleft()
            if output_id == _COMPILING:
                if unpack_compiled(bytes(self._received[LENGTH.size : end]))[1]:
                    self._is_open = False
            elif output_id in self._live:
                self._answers[output_id] = bytes(self._received[LENGTH.size : end])
            del self._received[:end]


class GrammarMatcher:
    """Matcher of one output of a :class:`CompiledGrammar`. Implements :class:`metal_engine.token_rules.Matcher`."""

    def __init__(self, grammar: CompiledGrammar, output_id: int) -> None:
        self._grammar = grammar
        self.output_id = output_id
        self._is_asked = False
        self._masks: np.ndarray | None = None  # [1 + k, W]
        self._token_ids: list[int] = []  # all tokens
        # About the last message to the process: number of new tokens, number of tokens that earlier messages had sent,
        # drafts, and number of restarts when it was sent.
        self._num_new = 0
        self._num_before = 0
        self._drafts: Sequence[int] = ()
        self._num_restarts = grammar.num_restarts
        self.num_unconstrained_calls = 0

    @property
    def is_free(self) -> bool:
        return False

    @property
    def must_go_on(self) -> bool:
        return False

    @property
    def plain_tokens(self) -> Set[int]:
        return frozenset()

    def is_free_after(self, drafts: Sequence[int]) -> bool:
        return False

    def observe(self, token_ids: Sequence[int]) -> None:
        self.consume(token_ids)

    def consume(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        assert not (drafts and self._is_asked), "drafts, but the answer to the previous request is missing"
        if token_ids or drafts or not (self._is_asked or self._masks is not None):
            self._token_ids += token_ids
            self._num_new, self._drafts = len(token_ids), drafts
            self._ask(token_ids)
            self._is_asked, self._masks = True, None

    def _ask(self, token_ids: Sequence[int]) -> None:
        """Send ``token_ids`` and the current drafts to the process. If the process is new, send all tokens instead."""
        is_new = self._num_restarts < self._grammar.num_restarts
        self._num_restarts = self._grammar.num_restarts
        self._grammar.ask(self.output_id, self._token_ids if is_new else token_ids, self._drafts)
        self._num_before = len(self._token_ids) - self._num_new if is_new else 0

    def _answer(self, deadline: float) -> np.ndarray | None:
        """Return the requested masks, as :meth:`CompiledGrammar.answer` does.

        If the process has ended, a new process computes the masks.

        Raises:
            ValueError: the errors of :meth:`CompiledGrammar.answer`, or too many processes of the grammar have ended.
            SegmentEnd: the segment has ended.
        """
        while True:
            if self._num_restarts < self._grammar.num_restarts:
                self._ask(())
            try:
                return self._grammar.answer(self.output_id, deadline)
            except SegmentEnd as end:
                raise SegmentEnd(end.num_tokens - self._num_before) from None
            except _ProcessEndedError:
                self._grammar.restart(self._num_restarts)

    def fill_mask(self, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        self.consume(())
        if self._masks is None:
            try:
                self._masks = self._answer(deadline)
            except SegmentEnd:
                self._is_asked = False
                raise
        if self._masks is None:
            return False
        self._is_asked = False
        if num_drafts >= len(self._masks):
            raise ValueError("the mask after a draft is too complex to be computed")
        mask[:] = self._masks[num_drafts]
        return True
