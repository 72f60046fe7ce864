"""The processes that run llguidance: one that has loaded the tokenizer, and a fork of it for each grammar.

llguidance runs nowhere else. Neither its effort nor its memory is bounded by counts alone (one row of its parser may
take time that grows with the third power of the grammar), most of its calls hold Python's lock, and making its
tokenizer holds it for a second. Here it holds nobody up, and ends with its process. These are the bounds:

- Compiling a grammar takes ``COMPILE_CPU_SECONDS``, its first mask included.
- A process grows by ``MAX_GROWTH`` bytes over the tokenizer.
- A token's mask takes ``MASK_CPU_SECONDS``; the masks of a grammar ``MEAN_MASK_CPU_SECONDS`` each on average, beyond
  ``BURST_CPU_SECONDS`` for states met first.
- So do masks after drafts, beyond ``DRAFTS_BURST_CPU_SECONDS``. They are computed in a fork of the grammar's process,
  which is bounded like it: a wrong draft may lead where its output never goes, and takes nothing of what that may take.

The kernel ends a process that goes beyond the first or the third (``ITIMER_PROF`` counts CPU time, so a busy machine
ends none). Growth is watched by a thread, since macOS enforces no limit on it. A process ends with its socket.

Run as a module: ``python -m metal_engine.grammars.process FD``. Loads no MLX, NumPy or transformers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time

import llguidance

from metal_engine.grammars.channel import Fork, receive, serve
from metal_engine.grammars.messages import (
    ERROR,
    MASK,
    MASK_ALONE,
    MASK_LAST,
    framed,
    pack_compiled,
    pack_masks,
    pack_step,
    unpack_masks,
    unpack_step,
)
from metal_engine.grammars.source import grammar_source

COMPILE_CPU_SECONDS = 1.0
MAX_GROWTH = 64 << 20
MASK_CPU_SECONDS = 0.02
MEAN_MASK_CPU_SECONDS = 0.002
BURST_CPU_SECONDS = 0.1
DRAFTS_BURST_CPU_SECONDS = 0.02
# New outputs go to a new process once one has grown by that.
_MUCH_GROWTH = MAX_GROWTH // 2
_WATCH_SECONDS = 0.005
# llguidance's own units: 20,000 of the first two and some 1,000 of the third take about a millisecond at worst. They
# end a single output with a message where the clock would end the process.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class EffortError(Exception):
    """The masks of a grammar have taken more time than they may."""


class Growth:
    """How much this process has grown since it was forked.

    On Linux by the memory of its own that is resident: pages of libraries, which the system may take away from an idle
    process and bring back, are no growth. Elsewhere by its peak.
    """

    def __init__(self) -> None:
        self._before = self._size()

    def _size(self) -> int:
        if sys.platform != "linux":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with open("/proc/self/statm", "rb") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
        return (resident - of_files) * resource.getpagesize()

    @property
    def num_bytes(self) -> int:
        return self._size() - self._before


class _Watch(threading.Thread):
    """Ends the process if it grows too much, or if nobody is at the other end of its socket any more."""

    def __init__(self, channel: socket.socket, growth: Growth) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self._growth = growth
        self.done = threading.Event()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._channel, 0)  # hang-ups and errors are always reported
        while not self.done.wait(_WATCH_SECONDS):
            if self._growth.num_bytes > MAX_GROWTH or poll.poll(0):
                os._exit(1)


class GrammarServer:
    """Serves the outputs that follow one grammar, from a compiled matcher.

    Masks after drafts come from a fork, which is made when the first are wanted, with the matchers as they are then. It
    is told further tokens with the drafts that follow them. Where it has ended, which is said once, there are no masks
    after drafts.

    Args:
        channel: the socket of the messages that are answered.
    """

    def __init__(self, compiled: llguidance.LLMatcher, growth: Growth, channel: socket.socket) -> None:
        self._compiled = compiled
        self._growth = growth
        self._channel = channel
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        self._credit = BURST_CPU_SECONDS
        self._mask_size = 0
        self._fork: Fork | None = None
        self._end_reported = False  # of the fork
        self._untold: dict[int, list[int]] = {}  # by output, tokens that the fork has not been told
        self._drafts_credit = DRAFTS_BURST_CPU_SECONDS  # the fork's

    def answer(self, message: bytes) -> bytes | None:
        """Take in an output's tokens; returns its next masks, or why it cannot go on, or nothing where it ends."""
        output_id, token_ids, drafts, ends = unpack_step(message)
        if ends:
            self._matchers.pop(output_id, None)
            self._untold.pop(output_id, None)
            if self._fork is not None:
                self._fork.tell(message)
            return None
        try:
            masks = [self._next_mask(self._matcher(output_id), token_ids)]
        except (ValueError, EffortError) as error:
            return ERROR + str(error).encode()
        if self._fork is not None and not self._fork.has_ended:
            self._untold.setdefault(output_id, []).extend(token_ids)
        if drafts:
            masks += self._masks_after(output_id, drafts)
        if self._fork is not None and self._fork.has_ended and not self._end_reported:
            self._end_reported = True
            return pack_masks(MASK_ALONE, masks)
        return pack_masks(MASK_LAST if self._growth.num_bytes > _MUCH_GROWTH else MASK, masks)

    def _matcher(self, output_id: int) -> llguidance.LLMatcher:
        matcher = self._matchers.get(output_id)
        if matcher is None:
            matcher = self._matchers[output_id] = self._compiled.deep_copy()
        return matcher

    def _next_mask(self, matcher: llguidance.LLMatcher, token_ids: list[int]) -> bytes:
        started = time.process_time()
        mask = mask_after(matcher, token_ids)
        earned = MEAN_MASK_CPU_SECONDS * max(len(token_ids), 1)
        self._credit = min(self._credit + earned - (time.process_time() - started), BURST_CPU_SECONDS)
        if self._credit < 0:
            raise EffortError("its grammar takes too much time for each token")
        self._check_growth()
        self._mask_size = len(mask)
        return mask

    def _check_growth(self) -> None:
        if self._growth.num_bytes > MAX_GROWTH:
            os._exit(1)

    def _masks_after(self, output_id: int, drafts: list[int]) -> list[bytes]:
        """Returns the masks after each draft of an output, as far as they can be had; its matcher stays where it is."""
        if self._fork is None:
            self._fork = Fork(self._draft_masks, self._channel)
        answer = self._fork.ask(pack_step(output_id, self._untold.pop(output_id, ()), drafts))
        if answer is None:
            self._untold.clear()
            return []
        num_masks, masks = unpack_masks(answer)
        return [bytes(masks[i * self._mask_size : (i + 1) * self._mask_size]) for i in range(num_masks)]

    # --- in the fork ---

    def _draft_masks(self, message: bytes) -> bytes | None:
        """Take in an output's tokens; returns the masks after each draft that follows them.

        They end where one cannot be computed. After a draft that is not allowed they are empty: nobody asks for them.
        """
        output_id, token_ids, drafts, ends = unpack_step(message)
        if ends:
            self._matchers.pop(output_id, None)
            return None
        started, matcher = time.process_time(), self._matcher(output_id)
        consume(matcher, token_ids)
        ahead = matcher.deep_copy()  # not to be rolled back: a draft may lead to a state that is too complex
        signal.setitimer(signal.ITIMER_PROF, MASK_CPU_SECONDS)
        num_allowed = ahead.validate_tokens(drafts)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._drafts_credit += MEAN_MASK_CPU_SECONDS * len(drafts)
        self._drafts_credit = min(self._drafts_credit, DRAFTS_BURST_CPU_SECONDS)
        masks: list[bytes] = []
        for draft in drafts[:num_allowed]:
            now = time.process_time()
            self._drafts_credit -= now - started
            started = now
            if self._drafts_credit < 0:
                return pack_masks(MASK, masks)
            try:
                masks.append(mask_after(ahead, [draft]))
            except ValueError:
                break
            self._check_growth()
        else:
            masks += [bytes(self._mask_size)] * (len(drafts) - num_allowed)
        self._drafts_credit -= time.process_time() - started
        return pack_masks(MASK, masks)


def consume(matcher: llguidance.LLMatcher, token_ids: list[int]) -> None:
    """Go on past tokens, in a bounded time for each. Raises ValueError if one is not allowed, or is too complex."""
    for token_id in token_ids:
        signal.setitimer(signal.ITIMER_PROF, MASK_CPU_SECONDS)
        is_allowed = matcher.consume_token(token_id)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not is_allowed:
            raise ValueError(first_line(matcher.get_error()) or f"token {token_id} does not match")


def mask_after(matcher: llguidance.LLMatcher, token_ids: list[int]) -> bytes:
    """Go on past tokens; returns which may come next. Raises ValueError as :func:`consume` does."""
    consume(matcher, token_ids)
    signal.setitimer(signal.ITIMER_PROF, MASK_CPU_SECONDS)
    mask = bytes(matcher.compute_bitmask())
    signal.setitimer(signal.ITIMER_PROF, 0)
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))
    return mask


def first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:500]


def compile_grammar(tokenizer: llguidance.LLTokenizer, wanted: bytes) -> llguidance.LLMatcher:
    """Compile what a request asks for, and see that something matches it. Leaves the clock running.

    Raises:
        ValueError: it is no grammar, or too large, or asks for what cannot be enforced.
    """
    try:
        source = grammar_source(json.loads(wanted))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    compiled = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if compiled.is_error():
        raise ValueError(f"cannot be compiled: {first_line(compiled.get_error())}")
    matcher = compiled.deep_copy()
    signal.setitimer(signal.ITIMER_PROF, MASK_CPU_SECONDS)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"cannot be met: {first_line(matcher.get_error())}")
    if not any(mask):
        raise ValueError("cannot be met: nothing matches")
    return compiled


def serve_grammar(channel: socket.socket, tokenizer: llguidance.LLTokenizer) -> None:
    """Compile the grammar that comes over a socket, then serve its outputs until the socket closes."""
    gc.freeze()  # a collection would write to the pages of what this was forked off: CPU time, and memory
    growth = Growth()
    watch = _Watch(channel, growth)
    wanted = receive(channel)
    watch.start()
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_SECONDS)
    try:
        compiled = compile_grammar(tokenizer, wanted)
    except ValueError as error:
        channel.sendall(framed(str(error).encode()))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - started
    watch.done.set()
    watch.join()
    server = GrammarServer(compiled, growth, channel)
    channel.sendall(framed(pack_compiled(seconds)))
    serve(channel, server.answer)


def main(control: socket.socket) -> None:
    """Load the tokenizer that comes over ``control``, then fork for every socket that comes after it.

    The first message has the number of logits and the end-of-sequence ids, the second the tokenizer's JSON; an answer
    says that it is loaded (empty), or why not.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave nothing to wait for
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = json.loads(receive(control))
    try:
        tokenizer = llguidance.LLTokenizer(receive(control).decode(), **options)
    except (ValueError, TypeError) as error:
        control.sendall(framed(str(error).encode() or b"unknown"))
        return
    control.sendall(framed(b""))
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # nobody reads it any more
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as channel:
            try:
                is_fork = os.fork() == 0
            except OSError as error:
                channel.sendall(framed(f"cannot be served: no process can be started for it: {error}".encode()))
                continue
            if is_fork:
                try:
                    control.close()
                    serve_grammar(channel, tokenizer)
                finally:
                    os._exit(0)  # whatever ended it: the closed socket tells the engine


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        main(socket.socket(fileno=int(sys.argv[1])))
