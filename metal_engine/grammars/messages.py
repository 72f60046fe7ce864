"""What the engine and a grammar's process say to each other, over a stream socket. Little-endian throughout.

A message is its length and its bytes. The engine's first is the grammar, as JSON; the answer says how long it took to
compile, or why it is refused (:func:`unpack_compiled`). After that the engine sends one for each output that goes on
(:func:`pack_step`), and the answers come in the same order: a state byte, then the masks (:func:`pack_masks`) or the
error.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

# Of a socket: room for a dozen masks, so that a process rarely waits for the engine to read one.
BUFFER_BYTES = 1 << 18
LENGTH = struct.Struct("<I")
# Which output; whether that ends it; how many of the tokens that follow are drafts, the last ones.
_STEP = struct.Struct("<I?I")

# The first byte of an answer: masks follow, an error follows, or (with masks) the process has grown much and should be
# given no new outputs, or (with masks) from now on there are none after drafts. The masks are as many as there are
# drafts, and one more; fewer if some cannot be computed.
MASK, ERROR, MASK_LAST, MASK_ALONE = b"m", b"e", b"l", b"a"


def framed(message: bytes) -> bytes:
    """A message as it goes over the socket."""
    return LENGTH.pack(len(message)) + message


def pack_compiled(seconds: float) -> bytes:
    """A grammar has been compiled in so much CPU time."""
    return b"+%f" % seconds


def unpack_compiled(answer: bytes | None) -> tuple[float, str]:
    """Returns the seconds of CPU time that compiling took, and why it failed (empty if not); None is no answer."""
    if answer is None:
        return 0.0, "takes more time or memory to compile than a grammar may"
    return (float(answer), "") if answer[:1] == b"+" else (0.0, answer.decode())


def pack_step(output_id: int, token_ids: Sequence[int], drafts: Sequence[int] = (), *, ends: bool = False) -> bytes:
    """An output has been given tokens; its next mask is wanted, and those after each draft if they come next.

    Where that ``ends`` it, there is no answer at all.
    """
    return _STEP.pack(output_id, ends, len(drafts)) + array("I", [*token_ids, *drafts]).tobytes()


def unpack_step(message: bytes) -> tuple[int, list[int], list[int], bool]:
    """Returns the output's id, the tokens, the drafts, and whether it ends, as :func:`pack_step` was given them."""
    output_id, ends, num_drafts = _STEP.unpack_from(message)
    packed = array("I")
    packed.frombytes(message[_STEP.size :])
    token_ids = packed.tolist()
    first_draft = len(token_ids) - num_drafts
    return output_id, token_ids[:first_draft], token_ids[first_draft:], ends


def pack_masks(state: bytes, masks: Sequence[bytes]) -> bytes:
    """An answer with masks of one size, 255 at most; ``state`` is any but ``ERROR``."""
    return state + bytes([len(masks)]) + b"".join(masks)


def unpack_masks(answer: bytes) -> tuple[int, memoryview]:
    """Returns how many masks there are, and all of them one after the other."""
    return answer[1], memoryview(answer)[2:]
