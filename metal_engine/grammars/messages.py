"""Message format between the engine and a grammar's process, over a stream socket. Little-endian throughout.

Messages are framed (:mod:`metal_engine.forks.channel`). The engine's first message is the grammar as JSON. The answer
is the compile time, or the reason of a refusal (:func:`unpack_compiled`). After that, the engine sends a message for
each output that continues (:func:`pack_step`). The answers arrive in the same order: a state byte, then the masks
(:func:`pack_masks`) or the error.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence

from metal_engine.forks.channel import LENGTH

# Output id; True if the output ends; number of drafts, which are the last of the following tokens.
_STEP = struct.Struct("<I?I")

# First byte of an answer:
#
# - ``MASK``: masks follow, one for the next token and one after each draft; fewer if some cannot be computed.
# - ``ERROR``: an error follows.
# - ``MASK_LAST``: masks follow. The process has grown much and should get no new outputs.
# - ``MASK_ALONE``: masks follow. Later answers have no masks after drafts.
# - ``END``: the grammar of a segment is complete. The number of tokens that belong to it follows (:func:`pack_end`).
MASK, ERROR, MASK_LAST, MASK_ALONE, END = b"m", b"e", b"l", b"a", b"."


def pack_compiled(seconds: float) -> bytes:
    """Return the answer for a grammar that was compiled in ``seconds`` of CPU time."""
    return b"+%f" % seconds


def pack_refused(seconds: float, problem: str) -> bytes:
    """Return the answer for a grammar that was refused after ``seconds`` of CPU time."""
    return b"-%f %s" % (seconds, problem.encode())


def unpack_compiled(answer: bytes | bytearray | None) -> tuple[float, str]:
    """Parse the answer to a grammar.

    Args:
        answer: answer of the process; None if the process has ended without an answer, because it exceeded a limit.

    Returns:
        CPU time of the compilation in seconds, which is infinite without an answer, and the error message, which is
        empty on success.
    """
    if answer is None:
        return math.inf, "takes more time or memory to compile than a grammar may"
    if answer[:1] == b"+":
        return float(answer), ""
    if answer[:1] == b"-":
        seconds, _, problem = answer[1:].partition(b" ")
        return float(seconds), problem.decode()
    return 0.0, answer.decode()


def pack_step(output_id: int, token_ids: Sequence[int], drafts: Sequence[int] = (), *, ends: bool = False) -> bytes:
    """Return the message that sends an output's new tokens, and requests its next mask and the masks after each draft.

    Args:
        output_id: id of the output.
        token_ids: new tokens of the output.
        drafts: draft tokens after ``token_ids``.
        ends: True to end the output instead. The process does not answer such a message.
    """
    return _STEP.pack(output_id, ends, len(drafts)) + array("I", [*token_ids, *drafts]).tobytes()


def unpack_step(message: bytes) -> tuple[int, list[int], list[int], bool]:
    """Parse a message of :func:`pack_step`. Return the output's id, the tokens, the drafts, and the flag ``ends``."""
    output_id, ends, num_drafts = _STEP.unpack_from(message)
    packed = array("I")
    packed.frombytes(message[_STEP.size :])
    token_ids = packed.tolist()
    first_draft = len(token_ids) - num_drafts
    return output_id, token_ids[:first_draft], token_ids[first_draft:], ends


def pack_end(num_tokens: int) -> bytes:
    """Return the answer for a segment that has ended. Inverse: :func:`unpack_end`.

    Args:
        num_tokens: number of leading tokens of the :func:`pack_step` message that belong to the segment.
    """
    return END + LENGTH.pack(num_tokens)


def unpack_end(answer: bytes) -> int:
    """Parse the result of :func:`pack_end`."""
    (num_tokens,) = LENGTH.unpack_from(answer, len(END))
    return int(num_tokens)


def pack_masks(state: bytes, masks: Sequence[bytes]) -> bytes:
    """Return an answer with up to 255 masks of equal size. ``state`` is any state byte except ``ERROR``."""
    return state + bytes([len(masks)]) + b"".join(masks)


def unpack_masks(answer: bytes) -> tuple[int, memoryview]:
    """Return the number of masks in an answer, and the concatenated masks."""
    return answer[1], memoryview(answer)[2:]
