"""GGUF files that are damaged, or that no converter would write: refused in one line, with work limited by the bytes.

PyPI's ``gguf`` cannot write most of these files: their bytes follow the description of the format.
"""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from metal_engine.checkpoints import file_checks
from metal_engine.checkpoints.gguf import header, tokenizer
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer
from metal_engine.checkpoints.loader import load
from metal_engine.errors import ModelLoadError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tools.fixtures.gguf_checkpoints import write_gguf
from tools.fixtures.hf_checkpoints import CONFIGS

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
    tensors: Sequence[bytes] = (), entries: Sequence[bytes] = (), *, num_tensors: int = 0, num_entries: int = 0
) -> bytes:
    """Return a file. Claims more tensors or entries than it has if their numbers are given."""
    counts = num_tensors or len(tensors), num_entries or len(entries)
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
    "no heads": (model(heads=number("llama.attention.head_count", 0)), "attention.head_count is 0"),
    "half a scaling": (model(word("llama.rope.scaling.type", "yarn")), "has no llama.rope.scaling.factor"),
    "linear scaling of nothing": (model(word("llama.rope.scaling.type", "linear")), "no llama.rope.scaling.factor"),
    "architecture is a list": (
        model(**{"general.architecture": words("general.architecture", ["x"] * 1000)}),
        "is not supported",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, expected = CASES[case]
    path = tmp_path / ("m.GGUF" if case == "no heads" else "m.gguf")
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        load(EngineArgs(model=str(path)), DEVICE)
    message = str(caught.value)
    assert expected in message and "\n" not in message and len(message) < 400


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
    """Count the values that the reader parses."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    parsed: list[str] = []
    scalar = header._Cursor.scalar
    monkeypatch.setattr(header._Cursor, "scalar", lambda self, code: (parsed.append(code), scalar(self, code))[1])
    with pytest.raises(ModelLoadError, match="corrupted"):
        read_gguf_header(path)
    assert len(parsed) < 20


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


def test_a_header_over_the_size_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1000)
    path = tmp_path / "m.gguf"
    path.write_bytes(file([], [word("a", "x" * 900)]))
    read_gguf_header(path)
    path.write_bytes(file([], [word("a", "x" * 1000)]))
    with pytest.raises(ModelLoadError, match="corrupted"):
        read_gguf_header(path)
    assert file_checks.MAX_HEADER_BYTES == 100_000_000


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


# --- damaged files ---


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """Return the bytes of a model's file, and the size of its header."""

    def prepare(writer: GGUFWriter) -> None:
        writer.add_token_list(["a", "b"])
        writer.add_token_types([1, 1])

    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", CONFIGS["llama"], prepare=prepare)
    return path.read_bytes(), min(tensor.offset for tensor in read_gguf_header(path).tensors.values())


def test_any_truncation_is_noticed(tmp_path: Path, small_file: tuple[bytes, int]) -> None:
    content, size = small_file
    path = tmp_path / "cut.gguf"
    # Every 7th length within the header, and some within the weights. The end of the file is padding.
    for length in [*range(0, size, 7), *np.linspace(size, len(content) - 64, 20, dtype=int)]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError):
            read_gguf_header(path)


def test_damaged_headers_raise_only_model_load_errors(tmp_path: Path, small_file: tuple[bytes, int]) -> None:
    content, size = small_file
    generator = np.random.default_rng(11)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        data = bytearray(content)
        for offset in generator.integers(0, size, 2):
            data[offset] = generator.integers(0, 256)
        path.write_bytes(data)
        try:
            found = read_gguf_header(path)
            # All tensors lie within the file.
            assert all(math.prod(found.rows(name).shape) == t.nbytes for name, t in found.tensors.items())
        except ModelLoadError:
            refused += 1
    assert 0 < refused < 400


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"not a model at all", None])
def test_not_gguf(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"x\.gguf"):
        read_gguf_header(path)
