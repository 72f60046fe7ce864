"""Byte layout of a block of KV: its parts, their order, and the format of a stored block.

A stored block is a safetensors file with the K and V of all layers. Its metadata identifies the block and contains a
checksum of everything. A block that is truncated, altered, misplaced or from another model is thereby detected.
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
    """Return the store key of the recurrent state after a block."""
    return sha256(b"state after " + block_hash).digest()


class CorruptBlockError(Exception):
    """Stored bytes are not the expected block. The message gives the reason."""


@dataclass(frozen=True)
class KVPart:
    """One named array of one layer. Its ``shape`` is [block_size, ...] in a block and [1, ...] in a recurrent state.

    ``dtype`` is NumPy's name of the type, or ``bfloat16``. ``nbytes`` is the size of the whole array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class BlockLayout:
    """Positions of the parts in a block's bytes, and the stored format of the block.

    Args:
        parts: parts of all layers, with unique names.
        fingerprint: fingerprint, in hex digits, of everything that determines a block's contents, except the tokens.

    Attributes:
        nbytes: length of a block's data.
        offsets: part name -> (first byte, one past the last byte) in the data.
        parts: the parts in the order of their data.
        max_stored_bytes: upper limit on the result of :meth:`encode`, in bytes.
    """

    def __init__(self, parts: Sequence[KVPart], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.nbytes = sum(part.nbytes for part in parts)
        # The safetensors library chooses the order and the header. Serializing a block of zeros reveals them.
        header, start = _read_header(_serialize_zeros(parts))
        header.pop("__metadata__", None)
        self.offsets = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        self._tensors = header
        self._tensors_json = json.dumps(header, separators=(",", ":"))
        self.parts = tuple(sorted(parts, key=lambda part: self.offsets[part.name]))
        self.max_stored_bytes = start + self.nbytes + 1024

    def encode(self, block_hash: bytes, data: np.ndarray) -> bytes:
        """Return the stored format of a block whose data is uint8 [nbytes]."""
        assert data.dtype == np.uint8 and data.shape == (self.nbytes,) and data.flags.c_contiguous
        metadata = {
            "format": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "block_hash": block_hash.hex(),
            "checksum": self._checksum(block_hash, data),
        }
        # Assembled here: the library would copy the data twice while it holds the GIL.
        text = '{"__metadata__":' + json.dumps(metadata, separators=(",", ":")) + "," + self._tensors_json[1:]
        header = text.encode()
        header += b" " * (-len(header) % 8)  # so that the data is aligned
        return b"".join((len(header).to_bytes(8, "little"), header, data.data))

    def decode(self, block_hash: bytes, stored: bytes) -> np.ndarray:
        """Return the data of a stored block, uint8 [nbytes], read-only.

        Raises:
            CorruptBlockError: the bytes are not the block with ``block_hash``, or are damaged.
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
            raise CorruptBlockError("its tensors do not match this model's")
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
    """Return a safetensors header and the position where its data begins. Raises CorruptBlockError."""
    length = int.from_bytes(stored[:8], "little")
    if len(stored) < 8 or length > len(stored) - 8:
        raise CorruptBlockError(f"it is truncated at {len(stored)} bytes")
    try:
        header = json.loads(stored[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptBlockError("its header is not JSON") from error
    if not isinstance(header, dict):
        raise CorruptBlockError("its header is not a JSON object")
    return header, 8 + length
