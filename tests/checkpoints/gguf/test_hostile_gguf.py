"""GGUF files that no converter would write: each is refused in one line, with work and memory limited by its bytes.

The bytes are assembled here from the description of the format, because PyPI's ``gguf`` cannot write such files.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from metal_engine.checkpoints import files
from metal_engine.checkpoints.gguf import header, tokenizer
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer
from metal_engine.checkpoints.loader import load
from metal_engine.errors import ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo

DEVICE = DeviceInfo(kind="cpu", name="test", compute="test", memory_bytes=1 << 30)
UINT8, UINT32, INT32, FLOAT32, STRING, ARRAY = 0, 4, 5, 6, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return entry(key, UINT32, struct.pack("<I", value))


def word(key: str, value: str) -> bytes:
    return entry(key, STRING, text(value))


def array(key: str, kind: int, length: int, elements: bytes) -> bytes:
    return entry(key, ARRAY, struct.pack("<IQ", kind, length) + elements)


def words(key: str, values: Sequence[str]) -> bytes:
    return array(key, STRING, len(values), b"".join(map(text, values)))


def tensor(name: str, dims: Sequence[int], offset: int = 0, num_dims: int | None = None) -> bytes:
    count = struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return text(name) + count + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 0, offset)


def file(
    tensors: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    *,
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(256)


def vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> list[bytes]:
    return [
        word("tokenizer.ggml.model", "llama"),
        words("tokenizer.ggml.tokens", tokens),
        array("tokenizer.ggml.token_type", INT32, len(kinds), struct.pack(f"<{len(kinds)}i", *kinds)),
        array("tokenizer.ggml.scores", FLOAT32, len(tokens), bytes(4 * len(tokens))),
    ]


MODEL = {
    "general.architecture": word("general.architecture", "llama"),
    "layers": number("llama.block_count", 1),
    "heads": number("llama.attention.head_count", 2),
    "size": number("llama.embedding_length", 8),
    "ffn": number("llama.feed_forward_length", 8),
    "context": number("llama.context_length", 64),
    "epsilon": entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
}
EMBEDDING = [tensor("token_embd.weight", (8, 4))]


def model(*more: bytes, **changes: bytes) -> bytes:
    return file(EMBEDDING, [*({**MODEL, **changes}).values(), *more])


NESTED = array("a", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 100_000)
CASES: dict[str, tuple[bytes, str]] = {
    "2^60 tensors": (file(num_tensors=1 << 60), "corrupted"),
    "2^60 entries": (file(num_entries=1 << 60), "corrupted"),
    "a string of 2^60 bytes": (file([], [struct.pack("<Q", 1 << 60)]), "corrupted"),
    "a string of 2^64 - 1 bytes": (file([], [struct.pack("<Q", (1 << 64) - 1)]), "corrupted"),
    "an array of 2^60 numbers": (file([], [array("a", UINT32, 1 << 60, b"")]), "corrupted"),
    "an array of 2^60 strings": (file([], [array("a", STRING, 1 << 60, b"")]), "corrupted"),
    "arrays in arrays": (file([], [NESTED]), "corrupted"),
    "20,000 huge dimensions": (file([tensor("a", [1 << 63] * 20_000)]), "corrupted"),
    "2^32 - 1 dimensions": (file([tensor("a", [8], num_dims=(1 << 32) - 1)]), "corrupted"),
    "no dimensions": (file([tensor("a", [])]), "corrupted"),
    "a dimension of -1": (file([tensor("a", [(1 << 64) - 1])]), "corrupted"),
    "huge and empty": (file([tensor("a", [0, 1 << 63])]), "corrupted"),
    "beyond the file": (file([tensor("a", [8], offset=1 << 62)]), "corrupted"),
    "overlapping": (file([tensor("a", [8]), tensor("b", [8], offset=16)]), "corrupted"),
    "a tensor twice": (file([tensor("a", [8]), tensor("a", [8], offset=32)]), "corrupted"),
    "a key twice": (file([], [number("a", 1), number("a", 1)]), "corrupted"),
    "huge alignment": (file([tensor("a", [8])], [number("general.alignment", 1 << 31)]), "corrupted"),
    "more layers than tensors": (model(layers=number("llama.block_count", 1 << 31)), "layers but has 1 tensors"),
    "layers in words": (model(layers=word("llama.block_count", "one")), "not a valid model (TypeError"),
    "no heads": (model(heads=number("llama.attention.head_count", 0)), "not a valid model (ZeroDivisionError"),
    "half a scaling": (model(word("llama.rope.scaling.type", "yarn")), "not a valid model (KeyError"),
    "architecture is a list": (
        model(**{"general.architecture": words("general.architecture", ["x"] * 1000)}),
        "is not supported",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, expected = CASES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        load(EngineArgs(model=str(path)), DEVICE)
    message = str(caught.value)
    assert expected in message and "\n" not in message and len(message) < 400


def values_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many values the reader parses in a file that it refuses."""
    count = 0
    scalar = header._Cursor.scalar

    def counted(self: header._Cursor, code: str) -> object:
        nonlocal count
        count += 1
        return scalar(self, code)

    monkeypatch.setattr(header._Cursor, "scalar", counted)
    with pytest.raises(ModelLoadError, match="corrupted"):
        read_gguf_header(path)
    return count


@pytest.mark.parametrize(
    "content",
    [
        # With 2 million, reading it took 240 s: the products have thousands of digits.
        file([tensor("a", [1 << 63] * 20_000)]),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 16) + bytes(1 << 20),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 16, 0) + bytes(1 << 20),
    ],
    ids=["dimensions", "entries of zeros", "tensors of zeros"],
)
def test_refused_before_much_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert values_read(path, monkeypatch) < 20


@pytest.mark.full
def test_two_million_dimensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file([tensor("a", [1 << 63] * 2_000_000)]))
    assert values_read(path, monkeypatch) < 20


@pytest.mark.parametrize("kind", [UINT8, STRING])
def test_arrays_take_no_more_than_vocabularies_do(tmp_path: Path, kind: int) -> None:
    """As lists, these bytes would take 8 and 14 times as much memory."""
    length = header._MAX_ELEMENTS + 1
    path = tmp_path / "m.gguf"
    path.write_bytes(file([], [array("a", kind, length, bytes(length if kind == UINT8 else 8 * length))]))
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match="corrupted"):
            read_gguf_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_all_arrays_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "_MAX_ELEMENTS", 10)
    path = tmp_path / "m.gguf"
    arrays = [array(key, UINT8, 5, bytes(5)) for key in "abc"]
    path.write_bytes(file([], arrays[:2]))
    read_gguf_header(path)
    path.write_bytes(file([], arrays))
    with pytest.raises(ModelLoadError, match="corrupted"):
        read_gguf_header(path)


def test_the_header_ends_where_headers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1000)
    path = tmp_path / "m.gguf"
    path.write_bytes(file([], [word("a", "x" * 900)]))
    read_gguf_header(path)
    path.write_bytes(file([], [word("a", "x" * 1000)]))
    with pytest.raises(ModelLoadError, match="corrupted"):
        read_gguf_header(path)
    assert files.MAX_HEADER_BYTES == 100_000_000


def test_long_tokens_are_not_cut_everywhere(tmp_path: Path) -> None:
    """Otherwise each token would be split at every position, with a copy for each split."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model(*vocabulary(["x" * 40_000], [1])))
    with pytest.raises(ModelLoadError, match="tokens with too many characters"):
        load_gguf_tokenizer(path)


def test_control_tokens_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_MAX_UNSPLIT", 2)
    path = tmp_path / "m.gguf"
    path.write_bytes(model(*vocabulary(["a", "b", "c"], [3, 3, 3])))
    with pytest.raises(ModelLoadError, match="more control and user-defined tokens"):
        load_gguf_tokenizer(path)
    path.write_bytes(model(*vocabulary(["a", "b", "c"], [3, 3, 1])))
    load_gguf_tokenizer(path)
