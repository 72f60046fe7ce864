"""The header of a GGUF file: metadata and the type, shape and place of every tensor.

The format is llama.cpp's (``docs/gguf.md`` of ggml). PyPI's ``gguf`` has a reader too, which makes two NumPy
arrays for every string of the vocabulary: 2 s for 49k tokens, 6 s for 150k. This one takes 0.1 s, checks
every length against the file, and is tested against that reader. Enumerations and block sizes are ``gguf``'s.

Anyone may have written the file. Counts, lengths and sizes are checked before anything is done as often or made as
large as they say, and a file of zeros that claims to be a header of terabytes ends at its second entry.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from metal_engine.checkpoints.files import MAX_HEADER_BYTES, check_readable
from metal_engine.errors import ModelLoadError, short

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Tensors, and entries of metadata: dense models have hundreds of either.
_MAX_ENTRIES = 1 << 16
# Of all arrays together: a vocabulary of 262k tokens has 1.3 million, its merges, scores and types included.
_MAX_ELEMENTS = 1 << 22
_MAX_DIMS = 4  # ggml's
# struct codes of the scalar value types.
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored.

    Attributes:
        name: as in the file, e.g. ``blk.0.attn_q.weight``.
        type: ggml's storage type.
        shape: elements, outermost first as in NumPy (the file lists them innermost first).
        offset: of its first byte, from the start of the file.
        nbytes: its size in the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (numbers, strings, lists of them) and tensors of one GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        """``general.architecture``, e.g. "llama"."""
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """A metadata value that the file must have.

        Raises:
            ModelLoadError: it has not.
        """
        try:
            return self.metadata[key]
        except KeyError:
            raise ModelLoadError(f"{self.path.name} has no {key}: not a complete model") from None

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value of the architecture, e.g. ``context_length`` for ``llama.context_length``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require_value(self, key: str) -> Any:
        """As :meth:`value`, of one that the file must have.

        Raises:
            ModelLoadError: it has not.
        """
        return self.require(f"{self.architecture}.{key}")

    @property
    def num_layers(self) -> int:
        layers: int = self.require_value("block_count")
        return layers

    @property
    def head_dim(self) -> int:
        """Of queries and keys; where the file does not say, heads share the hidden size."""
        shared = self.require_value("embedding_length") // self.require_value("attention.head_count")
        size: int = self.value("attention.key_length", shared)
        return size

    @property
    def rope_theta(self) -> float:
        return float(self.value("rope.freq_base", 10000.0))

    def rows(self, name: str) -> np.ndarray:
        """The bytes of a tensor, not copied: uint8 [rows, bytes_per_row] (one row for a vector)."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        data = self._file[tensor.offset : tensor.offset + tensor.nbytes]
        return data.reshape(rows, tensor.nbytes // rows)

    @functools.cached_property
    def _file(self) -> np.ndarray:
        return np.memmap(self.path, dtype=np.uint8, mode="r")


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read everything of a GGUF file but the weights.

    Raises:
        ModelLoadError: not a GGUF file, a version or tensor type unknown here, or cut short.
    """
    path = Path(path)
    check_readable(path)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r").data
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if bytes(data[:4]) != _MAGIC:
        raise ModelLoadError(f"{path.name} is not a GGUF file")
    try:
        return _parse(path, data)
    except (struct.error, _Damaged) as error:
        raise ModelLoadError(f"{path.name} is cut short or corrupted: load it anew") from error


class _Damaged(Exception):
    """A length that points past the file's end, or a value that makes no sense."""


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: memoryview, offset: int) -> None:
        self.data = data
        self.offset = offset
        self.elements_left = _MAX_ELEMENTS

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.offset + length
        if end > len(self.data) or end > MAX_HEADER_BYTES:
            raise _Damaged
        # Tokens of a byte-level vocabulary may be cut inside a character.
        value = str(self.data[self.offset : end], encoding="utf-8", errors="replace")
        self.offset = end
        return value

    def value(self, value_type: int) -> Any:
        if value_type == GGUFValueType.STRING:
            return self.string()
        if value_type == GGUFValueType.ARRAY:
            return self._array()
        try:
            return self.scalar(_SCALARS[GGUFValueType(value_type)])
        except ValueError:
            raise _Damaged from None  # no such value type: the file is damaged

    def _array(self) -> list[Any]:
        element_type, length = self.scalar("I"), self.scalar("Q")
        # Checked before a loop or an allocation of that length. The format has arrays in arrays, but no model has.
        if length > self.elements_left or element_type == GGUFValueType.ARRAY:
            raise _Damaged
        self.elements_left -= length
        code = _SCALARS.get(element_type)
        if code is None:
            return [self.value(element_type) for _ in range(length)]
        packed = f"<{length}{code}"
        values = struct.unpack_from(packed, self.data, self.offset)
        self.offset += struct.calcsize(packed)
        return list(values)


def _parse(path: Path, data: memoryview) -> GgufHeader:
    cursor = _Cursor(data, len(_MAGIC))
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        # Version 1 is long gone; a huge number is a big-endian file.
        raise ModelLoadError(f"{path.name}: GGUF version {version} cannot be read (2 and 3 can, little-endian)")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    if max(num_tensors, num_values) > _MAX_ENTRIES:
        raise _Damaged
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise _Damaged
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = {}
    for _ in range(num_tensors):
        name = cursor.string()
        num_dims = cursor.scalar("I")
        if name in infos or num_dims > _MAX_DIMS:
            raise _Damaged
        dims = tuple(cursor.scalar("Q") for _ in range(num_dims))
        infos[name] = (dims, cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged
    start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: _tensor(path, name, dims, raw_type, start + offset) for name, (dims, raw_type, offset) in infos.items()
    }
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:  # two in one place: small files could claim any size of memory
            raise _Damaged
        end = tensor.offset + tensor.nbytes
    if end > len(data):
        raise _Damaged
    return GgufHeader(path, metadata, tensors)


def _tensor(path: Path, name: str, dims: tuple[int, ...], raw_type: int, offset: int) -> GgufTensor:
    try:
        tensor_type = GGMLQuantizationType(raw_type)
    except ValueError:
        raise ModelLoadError(f"{path.name}: tensor {short(name)} has the unknown type {raw_type}") from None
    block, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if not dims or 0 in dims or dims[0] % block:
        raise _Damaged
    nbytes = math.prod(dims) // block * block_bytes
    return GgufTensor(name, tensor_type, dims[::-1], offset, nbytes)
