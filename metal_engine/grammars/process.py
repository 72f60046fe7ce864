"""Processes that run llguidance: one that has loaded the tokenizer, and a fork of it for each grammar.

llguidance runs only in these processes, for three reasons:

- Limits on counts do not bound its time or memory: the time for one row of its parser can grow with the third power
  of the grammar's size.
- Most of its calls hold the GIL.
- Creating its tokenizer holds the GIL for a second.

In a separate process, llguidance delays no other request, and its memory is freed with the process. The limits are:

- Compiling a grammar takes at most ``COMPILE_CPU_SECONDS``. Its first mask has the limit of all masks.
- A process grows by at most ``MAX_GROWTH`` bytes over the tokenizer's process.
- A token's mask takes at most ``MASK_CPU_SECONDS``. The masks of a grammar take at most ``MEAN_MASK_CPU_SECONDS`` on
  average, beyond an allowance of ``BURST_CPU_SECONDS`` for states reached for the first time.
- Masks after drafts have the same limits, with an allowance of ``DRAFTS_BURST_CPU_SECONDS``. They are computed in a
  fork of the grammar's process with its own limits, because a wrong draft can lead to states that the output never
  reaches. Such states must not use up the output's limits.

The kernel ends a process that exceeds the first or third limit (``ITIMER_PROF`` counts CPU time, so a busy machine
ends no process). The process itself checks its growth, because macOS enforces no limit on it: in a thread during the
compilation, and after each mask. A process ends when its socket is closed.

Run as a module: ``python -m metal_engine.grammars.process FD``. Loads no MLX, NumPy or transformers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import time

import llguidance

from metal_engine.forks.channel import Fork, framed, receive, serve
from metal_engine.forks.limits import Growth, Monitor
from metal_engine.forks.serving import serve_forks
from metal_engine.grammars.error_lines import compile_problem, first_line
from metal_engine.grammars.messages import (
    ERROR,
    MASK,
    MASK_ALONE,
    MASK_LAST,
    pack_compiled,
    pack_end,
    pack_masks,
    pack_refused,
    pack_step,
    unpack_masks,
    unpack_step,
)
from metal_engine.grammars.next_mask import next_mask
from metal_engine.grammars.source import grammar_source, is_segment
from metal_engine.python_process import channel_to_parent

COMPILE_CPU_SECONDS = 1.0
MAX_GROWTH = 64 << 20
# Far more than any usual grammar needs: cores differ in speed, and a virtual machine may count waiting as CPU time.
MASK_CPU_SECONDS = 0.1
MEAN_MASK_CPU_SECONDS = 0.002
BURST_CPU_SECONDS = 0.3
DRAFTS_BURST_CPU_SECONDS = 0.02
# Growth of a process in bytes from which new outputs use a new process.
_MUCH_GROWTH = MAX_GROWTH // 2
# Limits in llguidance's own units. 20,000 units of the first two, or some 1,000 of the third, take about a millisecond
# at worst. Exceeding them ends a single output with a message. Exceeding a CPU time limit ends the process.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class EffortError(Exception):
    """Raised if the masks of a grammar exceed the limit on their mean CPU time."""


class GrammarServer:
    """Server for the outputs of one grammar, with a matcher for each output.

    Masks after drafts come from a fork of this process. The fork is created when masks after drafts are first
    requested, and has the matchers of that time. It receives later tokens together with the drafts after them. If the
    fork ends, one answer reports its end, and later answers have only the mask for the next token.

    Args:
        compiled: matcher of the compiled grammar.
        tokenizer: tokenizer of the grammar.
        growth: measures the memory growth of this process, which is limited.
        channel: socket of this process, which the fork closes.
        is_segment: True for the grammar of a segment, which other text may follow. An answer then reports the end of
            the segment.
    """

    def __init__(
        self,
        compiled: llguidance.LLMatcher,
        tokenizer: llguidance.LLTokenizer,
        growth: Growth,
        channel: socket.socket,
        *,
        is_segment: bool = False,
    ) -> None:
        self._compiled = compiled
        self._tokenizer = tokenizer
        self._is_segment = is_segment
        self._growth = growth
        self._channel = channel
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        self._credit = BURST_CPU_SECONDS
        self._mask_size = 0
        self._fork: Fork | None = None
        self._end_reported = False  # True after an answer has reported the end of the fork
        self._unsent: dict[int, list[int]] = {}  # tokens not yet sent to the fork, by output id
        self._drafts_credit = DRAFTS_BURST_CPU_SECONDS  # remaining allowance, used in the fork

    def answer(self, message: bytes) -> bytes | None:
        """Process a message of :func:`pack_step`.

        Return the answer: masks, an error, or the end of the segment. Return None if the message ends the output.
        """
        output_id, token_ids, drafts, ends = unpack_step(message)
        if ends:
            self._matchers.pop(output_id, None)
            self._unsent.pop(output_id, None)
            if self._fork is not None:
                self._fork.send(message)
            return None
        try:
            matcher = self._matcher(output_id)
            if self._is_segment and (num_tokens := _consume_to_end(matcher, token_ids)) is not None:
                return pack_end(num_tokens)
            masks = [self._next_mask(matcher, [] if self._is_segment else token_ids, len(token_ids))]
        except (ValueError, EffortError) as error:
            return ERROR + str(error).encode()
        if self._fork is not None and not self._fork.has_ended:
            self._unsent.setdefault(output_id, []).extend(token_ids)
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

    def _next_mask(self, matcher: llguidance.LLMatcher, token_ids: list[int], num_new: int) -> bytes:
        """Advance the matcher by ``token_ids``. Return the next mask.

        Args:
            num_new: number of tokens since the previous mask. Each token earns ``MEAN_MASK_CPU_SECONDS``.

        Raises:
            ValueError: a token is not allowed, or the grammar is too complex.
            EffortError: the masks take too much CPU time on average.
        """
        started = time.process_time()
        mask = mask_after(matcher, self._tokenizer, token_ids)
        earned = MEAN_MASK_CPU_SECONDS * max(num_new, 1)
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
        """Return the masks after each draft of an output. The output's matcher does not change.

        The list ends before the first mask that cannot be computed. If the fork has ended, the list is empty.
        """
        if self._fork is None:
            self._fork = Fork(self._draft_masks, self._channel)
        answer = self._fork.ask(pack_step(output_id, self._unsent.pop(output_id, ()), drafts))
        if answer is None:
            self._unsent.clear()
            return []
        num_masks, masks = unpack_masks(answer)
        return [bytes(masks[i * self._mask_size : (i + 1) * self._mask_size]) for i in range(num_masks)]

    # --- in the fork ---

    def _draft_masks(self, message: bytes) -> bytes | None:
        """Process a message of :func:`pack_step`. Return the answer with the masks after each draft.

        Return None if the message ends the output. The masks end before the first mask that cannot be computed. If the
        grammar refuses a draft, the masks after this draft and all later drafts are zeros, because they are unused.
        """
        output_id, token_ids, drafts, ends = unpack_step(message)
        if ends:
            self._matchers.pop(output_id, None)
            return None
        started, matcher = time.process_time(), self._matcher(output_id)
        consume(matcher, token_ids)
        ahead = matcher.deep_copy()  # a copy, because rolling back fails after a state that is too complex
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
                mask = mask_after(ahead, self._tokenizer, [draft])
            except ValueError:
                break
            if self._is_segment and ahead.is_stopped():
                break  # the text after the segment is not known here
            masks.append(mask)
            self._check_growth()
        else:
            masks += [bytes(self._mask_size)] * (len(drafts) - num_allowed)
        self._drafts_credit -= time.process_time() - started
        return pack_masks(MASK, masks)


def consume(matcher: llguidance.LLMatcher, token_ids: list[int]) -> None:
    """Advance a matcher by tokens. A token that takes more than ``MASK_CPU_SECONDS`` ends this process.

    Raises ValueError if a token is not allowed, or if llguidance finds it too complex.
    """
    for token_id in token_ids:
        signal.setitimer(signal.ITIMER_PROF, MASK_CPU_SECONDS)
        is_allowed = matcher.consume_token(token_id)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not is_allowed:
            raise ValueError(first_line(matcher.get_error()) or f"token {token_id} does not match")


def _consume_to_end(matcher: llguidance.LLMatcher, token_ids: list[int]) -> int | None:
    """Advance a segment's matcher by tokens, up to the end of the segment.

    Return the number of leading tokens that belong to the segment; None if the segment has not ended. Raises ValueError
    as :func:`consume` does.
    """
    for i, token_id in enumerate(token_ids):
        if matcher.is_stopped():
            return i
        consume(matcher, [token_id])
    return len(token_ids) if matcher.is_stopped() else None


def mask_after(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, token_ids: list[int]) -> bytes:
    """Advance a matcher by tokens. Return the mask of the next token. Raises ValueError as :func:`consume` does."""
    consume(matcher, token_ids)
    signal.setitimer(signal.ITIMER_PROF, MASK_CPU_SECONDS)
    mask = next_mask(matcher, tokenizer)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))
    return mask


def compile_grammar(tokenizer: llguidance.LLTokenizer, wanted: bytes) -> llguidance.LLMatcher:
    """Compile a request's grammar, and check that some token may begin it.

    Leaves a CPU timer of ``MASK_CPU_SECONDS`` running, which ends this process. The caller must stop the timer.

    Args:
        tokenizer: tokenizer of the grammar.
        wanted: wanted grammar as JSON (:mod:`metal_engine.grammars.source`).

    Raises:
        ValueError: the grammar is invalid, too large, or has constraints that cannot be enforced.
    """
    fields = json.loads(wanted)
    try:
        source = grammar_source(fields)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    compiled = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if compiled.is_error():
        raise ValueError(f"cannot be compiled: {compile_problem(compiled.get_error(), fields.get('regex'))}")
    matcher = compiled.deep_copy()
    signal.setitimer(signal.ITIMER_PROF, MASK_CPU_SECONDS)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"cannot be met: {first_line(matcher.get_error())}")
    if not any(mask):
        raise ValueError("cannot be met: nothing matches")
    return compiled


def serve_grammar(channel: socket.socket, tokenizer: llguidance.LLTokenizer) -> None:
    """Compile the grammar received from a socket, then serve its outputs until the socket closes."""
    gc.freeze()  # a garbage collection would copy the parent's pages, which costs CPU time and memory
    growth = Growth()
    monitor = Monitor(channel, growth, MAX_GROWTH)
    wanted = receive(channel)
    monitor.start()
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_SECONDS)
    try:
        compiled = compile_grammar(tokenizer, wanted)
    except ValueError as error:
        channel.sendall(framed(pack_refused(time.process_time() - started, str(error))))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - started
    monitor.done.set()
    monitor.join()
    server = GrammarServer(compiled, tokenizer, growth, channel, is_segment=is_segment(wanted))
    channel.sendall(framed(pack_compiled(seconds)))
    serve(channel, server.answer)


def main(control: socket.socket) -> None:
    """Load the tokenizer received from ``control``, then fork for every socket received after it.

    The first message has the number of logits and the end-of-sequence ids. The second message is the tokenizer's JSON.
    The answer is empty if the tokenizer was loaded. Otherwise, the answer is the error message, and this process ends.
    """
    options = json.loads(receive(control))
    try:
        tokenizer = llguidance.LLTokenizer(receive(control).decode(), **options)
    except (ValueError, TypeError) as error:
        control.sendall(framed(str(error).encode() or b"unknown"))
        return
    serve_forks(control, lambda channel: serve_grammar(channel, tokenizer))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        main(channel_to_parent())
