"""How a block of KV becomes bytes: what is in it, in which order, and the form in which it is stored.

A stored block is a safetensors file of its layers' K and V. Its metadata says whose it is and carries a checksum
of everything, so that a block that is cut short, altered, misplaced or of another model is told from a good one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from safetensors import TensorSpec, serialize

FORMAT_VERSION = "1"


def state_key(block_hash: bytes) -> bytes:
    """The hash under which a store has the recurrent state after a block."""
    return sha256(b"state after " + block_hash).digest()


class CorruptBlockError(Exception):
    """Stored bytes are not the block they should be; the message says in which way."""


@dataclass(frozen=True)
class KVPart:
    """One named array of one layer in a block, ``shape`` is [block_size, ...]; or in a state, [1, ...].

    ``dtype`` is NumPy's name of the type, or ``bfloat16``; ``nbytes`` counts the whole part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class BlockLayout:
    """Where the parts of a block lie in its bytes, and its form in a store.

    Args:
        parts: of every layer; names are unique.
        fingerprint: names what the contents of a block depend on besides the tokens, as hex digits.

    Attributes:
        nbytes: length of a block's data.
        offsets: part name -> (first byte, one past the last) in the data.
        parts: in that order.
        max_stored_bytes: no stored block of this layout is longer.
    """

    def __init__(self, parts: Sequence[KVPart], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.nbytes = sum(part.nbytes for part in parts)
        # The library decides on the order and the header; a block of zeros shows them.
        header, start = _read_header(_serialize_zeros(parts))
        header.pop("__metadata__", None)
        self.offsets = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        self._tensors = header
        self._tensors_json = json.dumps(header, separators=(",", ":"))
        self.parts = tuple(sorted(parts, key=lambda part: self.offsets[part.name]))
        self.max_stored_bytes = start + self.nbytes + 1024

    def encode(self, block_hash: bytes, data: np.ndarray) -> bytes:
        """The stored form of a block whose data is uint8 [nbytes]."""
        assert data.dtype == np.uint8 and data.shape == (self.nbytes,) and data.flags.c_contiguous
        metadata = {
            "format": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "block_hash": block_hash.hex(),
            "checksum": self._checksum(block_hash, data),
        }
        # Put together here: the library would copy the data twice, with Python's lock.
        text = '{"__metadata__":' + json.dumps(metadata, separators=(",", ":")) + "," + self._tensors_json[1:]
        header = text.encode()
        header += b" " * (-len(header) % 8)  # so that the data is aligned
        return b"".join((len(header).to_bytes(8, "little"), header, data.data))

    def decode(self, block_hash: bytes, stored: bytes) -> np.ndarray:
        """The data of a stored block, uint8 [nbytes], read-only.

        Raises:
            CorruptBlockError: it is not, or no longer, that block.
        """
        header, start = _read_header(stored)
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict):
            raise CorruptBlockError("it has no metadata")
        for key, wanted in (
            ("format", FORMAT_VERSION),
            ("fingerprint", self.fingerprint),
            ("block_hash", block_hash.hex()),
        ):
            if metadata.get(key) != wanted:
                raise CorruptBlockError(f"its {key} is {metadata.get(key)!r}, not {wanted!r}")
        if header != self._tensors:
            raise CorruptBlockError("its tensors are not those of this model")
        if len(stored) - start != self.nbytes:
            raise CorruptBlockError(f"it has {len(stored) - start} bytes of data, not {self.nbytes}")
        data = np.frombuffer(stored, np.uint8, offset=start)
        if metadata.get("checksum") != self._checksum(block_hash, data):
            raise CorruptBlockError("its checksum is wrong")
        return data

    def _checksum(self, block_hash: bytes, data: np.ndarray) -> str:
        digest = sha256(self.fingerprint.encode() + block_hash)
        digest.update(data.data)
        return digest.hexdigest()


def _serialize_zeros(parts: Sequence[KVPart]) -> bytes:
    zeros = np.zeros(max(part.nbytes for part in parts), np.uint8)
    specs = {
        part.name: TensorSpec(dtype=part.dtype, shape=part.shape, data_ptr=zeros.ctypes.data, data_len=part.nbytes)
        for part in parts
    }
    return bytes(serialize(specs))


def _read_header(stored: bytes) -> tuple[dict, int]:
    """A safetensors header and where the data after it begins. Raises CorruptBlockError."""
    length = int.from_bytes(stored[:8], "little")
    if len(stored) < 8 or length > len(stored) - 8:
        raise CorruptBlockError(f"it is cut short, at {len(stored)} bytes")
    try:
        header = json.loads(stored[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptBlockError("its header is not JSON") from error
    if not isinstance(header, dict):
        raise CorruptBlockError("its header is no table")
    return header, 8 + length
