"""Directories that no converter would write: each is refused in one line, with work limited by its bytes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from metal_engine.checkpoints import file_checks, metadata
from metal_engine.checkpoints.answer_formats import find_answer_format
from metal_engine.checkpoints.file_checks import read_json
from metal_engine.checkpoints.loader import load
from metal_engine.cli.options import one_line_errors
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.loading.build import build_engine
from metal_engine.settings.args import EngineArgs
from tests.checkpoints.damage import CPU, Damage, configure, refused, write
from tests.support.checkpoint_files import EOS, VOCAB_SIZE, write_checkpoint, write_tokenizer

DEEP = "[" * 100_000 + "]" * 100_000
INDEX = "model.safetensors.index.json"


def weights(header: bytes | dict[str, Any], data: bytes = b"1234", length: int | None = None) -> Damage:
    """A safetensors file whose header claims to have ``length`` bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(encoded) if length is None else length
    return write("model.safetensors", struct.pack("<Q", claimed) + encoded + data)


def tensor(shape: tuple[Any, ...] = (1,), offsets: tuple[int, int] = (0, 4)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": list(offsets)}


def listing(name: Any) -> Damage:
    return write(INDEX, json.dumps({"weight_map": {"a": name}}))


def weights_in_a_pipe(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    # Held open with data to read, so that without the check, the test would fail with another message and not hang.
    os.write(os.open(path, os.O_RDWR), metadata._LFS_POINTER)


def weights_in_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the content of a JSON file in place."""

    def damage(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.is_file() else {}
        change(content)
        path.write_text(json.dumps(content))

    return damage


def edit_tokenizer(**entries: Any) -> Damage:
    return edit_json("tokenizer.json", lambda content: content.update(entries))


def edit_model(**words: int) -> Damage:
    """Add words to the tokenizer's vocabulary."""
    return edit_json("tokenizer.json", lambda content: content["model"]["vocab"].update(words))


def slow_tokenizer(**ids: int) -> Damage:
    """Replace tokenizer.json by ``vocab.json``, with words of these ids, and ``merges.txt``."""

    def damage(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps({"a": 0} | ids))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))

    return damage


def added_by_config(token_id: int) -> Damage:
    added = {str(token_id): {"content": "<x>"}}
    return edit_json("tokenizer_config.json", lambda content: content.update(added_tokens_decoder=added))


def added(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(text: bytes) -> dict[str, Any]:
    """A table of characters with one text and no keys."""
    table = (1024).to_bytes(4, "little") + bytes(1024) + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def metaspace(replacement: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": replacement, "prepend_scheme": "always", "split": True}


DOUBLE = replace({"String": "a"}, "aa")
PADDED = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "!", "pad_to_multiple_of": None}
# A table of characters whose trie refers to an entry beyond its end.
BROKEN_TABLE = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\4\0\0\0\0\0\0\0abc\0").decode()}


def normalizers(*rules: dict[str, Any]) -> Damage:
    return edit_tokenizer(normalizer={"type": "Sequence", "normalizers": list(rules)})


def template(**pieces: Any) -> dict[str, Any]:
    """A post-processor with one template that differs from the text alone."""
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    known = {"<a>": {"id": "<a>", "ids": [1], "tokens": ["a"]}}
    return {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": known, **pieces}


SECOND_TEXT = [{"Sequence": {"id": "B", "type_id": 0}}]
UNKNOWN_TOKEN = [{"SpecialToken": {"id": "<none>", "type_id": 0}}]

CASES: dict[str, tuple[Damage, str]] = {
    "deep config": (write("config.json", f'{{"model_type": "llama", "x": {DEEP}}}'), "nested more than 64 deep"),
    "deep generation_config": (write("generation_config.json", f'{{"x": {DEEP}}}'), "nested more than 64 deep"),
    "deep tokenizer_config": (write("tokenizer_config.json", f'{{"x": {DEEP}}}'), "nested more than 64 deep"),
    "deep tokenizer": (write("tokenizer.json", f'{{"x": {DEEP}}}'), "cannot load the tokenizer"),
    "deep index": (write(INDEX, f'{{"weight_map": {DEEP}}}'), "nested more than 64 deep"),
    "deep header": (weights(f'{{"a": {DEEP}}}'.encode()), "recursion limit"),
    "a number of 5,000 digits": (write("config.json", '{"x": ' + "9" * 5000 + "}"), "not valid JSON"),
    "header of 2^63 bytes": (weights(b"{}", length=1 << 63), "header too large"),
    "header of 2^64 - 1 bytes": (weights(b"{}", length=(1 << 64) - 1), "header too large"),
    "shape of fractions": (weights({"a": tensor((1.5,))}), "invalid type"),
    "negative shape": (weights({"a": tensor((-1,))}), "invalid value"),
    "huge shape": (weights({"a": tensor((1 << 62, 1 << 62))}), "overflow"),
    "huge and empty shape": (weights({"a": tensor((0, 1 << 62), (0, 0))}, b""), "shape that no array can have"),
    "100,000 dimensions": (weights({"a": tensor((1,) * 100_000)}), "shape that no array can have"),
    "beyond the file": (weights({"a": tensor((1 << 38,), (0, 1 << 40))}), "truncated or is not a safetensors"),
    "overlapping": (weights({"a": tensor(), "b": tensor()}), "invalid offset"),
    "a name twice": (
        weights(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2)),
        "the weights have only 1 tensors",
    ),
    "index leads out": (listing("../../../../etc/passwd"), "not the name of a file beside it"),
    "index is absolute": (listing("/etc/passwd"), "not the name of a file beside it"),
    "index lists a list": (listing(["model.safetensors"]), "not the name of a file beside it"),
    "index lists a long name": (listing("m" * 5000), "not the name of a file beside it"),
    "index lists an end of text": (listing("a\0b"), "not the name of a file beside it"),
    "weights in a pipe": (weights_in_a_pipe, "not a regular file"),
    "weights in a folder": (weights_in_a_folder, "not a regular file"),
    "more layers than tensors": (configure(num_hidden_layers=2000), "do not belong together"),
    "more layers in a section": (configure(text_config={"num_layers": 2000}), "do not belong together"),
    "a size in words": (configure(hidden_size="many"), "hidden_size is 'many', which is not a size"),
    "a negative size": (configure(max_position_embeddings=-1), "which is not a size"),
    "a size beyond MLX": (configure(vocab_size=10**15), "which is not a size"),
    "a window in words": (configure(sliding_window="wide"), "which is not a size"),
    "no selected key": (configure(index_topk=0), "index_topk is 0, which is not a number of keys"),
    "chunks without a key": (configure(text_config={"attention_chunk_size": 0}), "attention_chunk_size is 0, which"),
    "section is a list": (configure(text_config=[1]), "text_config must be a JSON object"),
    "quantization is a text": (configure(quantization_config="4 bits"), "quantization_config must be a JSON object"),
    "an id of 2^31": (edit_model(word=1 << 31), "has the token id 2147483648"),
    "an added id of 2^31": (edit_tokenizer(added_tokens=[added(1 << 31, "<x>")]), "has the token id 2147483648"),
    "padding to 2^31": (edit_tokenizer(padding={**PADDED, "strategy": {"Fixed": 1 << 31}}), "pads texts to more than"),
    "8.4 million entries": (
        write("tokenizer.json", '{"x": [' + "0," * (1 << 23) + "0,0]}"),
        "more than 8388608 entries",
    ),
    "normalizers that double": (normalizers(*[DOUBLE] * 20), "a normalizer that may make 1.05e+06 characters of one"),
    "normalizers within normalizers": (
        normalizers(*[{"type": "Sequence", "normalizers": [DOUBLE] * 3}] * 3),
        "a normalizer that may make 512 characters of one",
    ),
    "a normalizer between characters": (
        edit_tokenizer(normalizer=replace({"Regex": ""}, "b" * 100)),
        "a normalizer that may make 101 characters of one",
    ),
    "a normalizer that prepends": (edit_tokenizer(normalizer={"type": "Prepend", "prepend": "b" * 100}), "make 101"),
    "normalizers that Unicode lets grow": (
        normalizers(*[{"type": "NFKD"}, replace({"String": " "}, "\ufdfa")] * 18),
        "a normalizer that may make 3.93e+22 characters of one",
    ),
    "normalizers that lowercasing lets grow": (
        normalizers(*[{"type": "Lowercase"}, replace({"String": "i"}, "\u0130")] * 5),
        "a normalizer that may make 32 characters of one",
    ),
    "normalizers without types": (
        edit_tokenizer(normalizer={"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 5}),
        "a normalizer that may make 32 characters of one",
    ),
    "normalizers with fields of other types": (
        edit_tokenizer(
            normalizer={"type": "Prepend", "prepend": "b" * 100, "normalizers": [], "pattern": 5, "content": "c"}
        ),
        "a normalizer that may make 101 characters of one",
    ),
    "two tables of characters": (normalizers(*[charsmap(b"a" * 18)] * 2), "may make 18 characters of one"),
    "a table of long texts": (edit_tokenizer(normalizer=charsmap(b"a" * 306)), "may make 17 characters of one"),
    "pre_tokenizers that prepend": (
        edit_tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [metaspace(one) for one in "abcde"]}),
        "a pre_tokenizer that may make 32 characters of one",
    ),
    "pre_tokenizers of bytes": (
        edit_tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 2}),
        "a pre_tokenizer that may make 25 characters of one",
    ),
    "decoders that find nothing": (
        edit_tokenizer(decoder={"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 5}),
        "a decoder that may make 32 characters of one",
    ),
    "decoders that double": (
        edit_tokenizer(decoder={"type": "Sequence", "decoders": [DOUBLE] * 20}),
        "a decoder that may make 1.05e+06 characters of one",
    ),
    "vocab.json with a large id": (slow_tokenizer(b=1 << 31), "vocab.json has the token id 2147483648"),
    "tokenizer_config.json with a large id": (
        added_by_config(1 << 31),
        "tokenizer_config.json has the token id 2147483648",
    ),
    "tokenizer that panics when made": (
        edit_tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "not a valid model (PanicException",
    ),
    "tokenizer that panics when used": (edit_tokenizer(normalizer=BROKEN_TABLE), "(PanicException"),
    "a template with an unknown token": (
        edit_tokenizer(post_processor=template(single=UNKNOWN_TOKEN)),
        "a post_processor whose 'single' uses '<none>', which is not among its special_tokens",
    ),
    "a template of two texts with an unknown token": (
        edit_tokenizer(post_processor={"type": "Sequence", "processors": [template(pair=UNKNOWN_TOKEN)]}),
        "a post_processor whose 'pair' uses '<none>', which is not among its special_tokens",
    ),
    "a template of one text with a second": (
        edit_tokenizer(post_processor=template(single=SECOND_TEXT)),
        "a post_processor whose 'single' uses a second text (B)",
    ),
    "a template with an id of 2^31": (
        edit_tokenizer(
            post_processor=template(special_tokens={"<a>": {"id": "<a>", "ids": [1 << 31], "tokens": ["a"]}})
        ),
        "has the token id 2147483648",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("good"))


@pytest.fixture
def copied(good: Path, tmp_path: Path) -> Path:
    """A copy of the good checkpoint."""
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_line(copied: Path, case: str) -> None:
    damage, words = CASES[case]
    damage(copied)
    assert words in refused(copied)


@pytest.mark.parametrize("module", ["", "model.layers.0.self_attn.q_proj"])
def test_bits_that_cannot_be(tmp_path: Path, module: str) -> None:
    folder = write_checkpoint(tmp_path, bits=4)
    entry = {"bits": 0}
    edit_json("config.json", lambda config: config["quantization"].update({module: entry} if module else entry))(folder)
    assert "0 bits" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX])
def test_large_files_are_not_read(copied: Path, name: str) -> None:
    """The files are sparse, so their size takes no disk space."""
    with (copied / name).open("ab") as file:
        file.truncate(file_checks.MAX_HEADER_BYTES + 1)
    assert "more than the limit of" in refused(copied)


def test_no_more_tensors_than_models_have(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_MAX_TENSORS", 3)
    assert "tensors: more than" in refused(good)


def test_tensors_of_all_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, num_shards=3)
    num_tensors = len(list(metadata.stored_tensors(metadata.weight_files(folder))))
    monkeypatch.setattr(metadata, "_MAX_TENSORS", num_tensors)
    load(EngineArgs(model=str(folder)), CPU)
    monkeypatch.setattr(metadata, "_MAX_TENSORS", num_tensors - 1)
    assert f"have {num_tensors} tensors" in refused(folder)


PUBLISHED_RULES = [
    [{"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")],
    [replace({"String": "``"}, '"'), {"type": "NFKD"}, {"type": "Lowercase"}, replace({"Regex": " {2,}"}, " ")],
    [{"type": "NFC"}, replace({"Regex": r"\s+"}, " "), {"type": "Strip", "strip_left": True, "strip_right": True}],
    [replace({"String": "\t"}, "    "), replace({"String": "\r\n"}, "\n"), {"type": "StripAccents"}],
    [{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "NFD"}, {"type": "StripAccents"}, replace({"Regex": " +"}, " ")],
    [{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
      "lowercase": True}, {"type": "NFKD"}, replace({"String": " "}, "\u2581")],
    [{"type": "Nmt"}, charsmap("صلى الله عليه وسلم".encode()), replace({"Regex": " {2,}"}, "\u2581")],
]  # fmt: skip


@pytest.mark.parametrize("rules", PUBLISHED_RULES)
def test_normalizers_of_published_tokenizers_are_taken(copied: Path, rules: list[Any]) -> None:
    normalizers(*rules)(copied)
    assert load(EngineArgs(model=str(copied)), CPU).tokenizer.encode("ab") != []


def built(folder: Path, **settings: Any) -> str:
    """Return the error message of `build_engine` for a checkpoint that it refuses."""
    with pytest.raises((ModelLoadError, ConfigError)) as caught:
        build_engine(EngineArgs(model=str(folder), kv_cache_memory_bytes=1 << 20, **settings))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


TEMPLATES: dict[str, tuple[Any, str]] = {
    "100,000 parentheses": ("{{" + "(" * 60_000 + "1" + ")" * 60_000 + "}}", "nested too deeply"),
    "a long sum": ("{{ a" + " + a" * 5000 + " }}", "nested too deeply"),
    "14 MB": ("{{a}}" * 2_800_000, "more than 131,072 characters"),
    "many expressions": ("{{a}}" * 20_000, "20,001 expressions and statements"),
    "several large ones": (
        [{"name": name, "template": "x" * 70_000} for name in ("default", "tool_use")],
        "more than 131,072 characters",
    ),
    "no text": (5, "is not a text"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_that_cannot_be_compiled(good: Path, copied: Path, tmp_path: Path, name: str) -> None:
    template, words = TEMPLATES[name]
    write_tokenizer(copied, chat_template=template)
    problem = built(copied)
    assert words in problem and "--chat-template" in problem
    if isinstance(template, str):
        path = tmp_path / "given.jinja"
        path.write_text(template)
        assert words in built(good, chat_template=str(path))
        build_engine(EngineArgs(model=str(copied), kv_cache_memory_bytes=1 << 20, chat_template="{{ messages }}"))


def test_numbers_of_5000_digits_in_a_chat_template(copied: Path) -> None:
    """Requests get an error about the template, as for other syntax errors."""
    write_tokenizer(copied, chat_template="{{ " + "9" * 5000 + " }}")
    engine = build_engine(EngineArgs(model=str(copied), kv_cache_memory_bytes=1 << 20))
    with pytest.raises(ValueError, match="the chat template refused the messages"):
        engine.preparer.tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_control_token_of_5000_characters(copied: Path) -> None:
    edit_tokenizer(added_tokens=[added(VOCAB_SIZE - 1, EOS), added(VOCAB_SIZE, "<" + "x" * 5000 + ">")])(copied)
    assert "control tokens" in built(copied)


def test_json_as_deep_as_may_be(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"x": ' + "[" * 63 + "]" * 63 + "}")
    read_json(path)
    path.write_text('{"x": ' + "[" * 64 + "]" * 64 + "}")
    with pytest.raises(ModelLoadError, match="nested more than 64 deep"):
        read_json(path)
    path.write_text("3")
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        read_json(path)


def test_links_are_followed(good: Path, tmp_path: Path) -> None:
    """The hub's cache consists of links."""
    for path in good.iterdir():
        (tmp_path / path.name).symlink_to(path)
    load(EngineArgs(model=str(tmp_path)), CPU)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    assert "not a regular file" in refused(tmp_path)


def test_invalid_eos_token_ids_are_ignored() -> None:
    assert metadata.eos_token_ids({"eos_token_id": [2, -1, True, 1 << 40, "x", {}, 1.0]}) == {2}


@pytest.mark.parametrize("name", [["json_tools"], "a.b", "..", "a\0", "x" * 5000])
def test_a_tool_parser_that_is_no_name(tmp_path: Path, name: Any) -> None:
    write_tokenizer(write_checkpoint(tmp_path), tool_parser_type=name)
    tokenizer = load(EngineArgs(model=str(tmp_path)), CPU).tokenizer
    with pytest.raises(ConfigError, match="which the tokenizer or --tool-call-parser names"):
        find_answer_format(tokenizer)


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), one_line_errors():
        raise ModelLoadError("no place for tensor \x1b]0;title\x07\x9b2J")
    assert capsys.readouterr().err == "error: no place for tensor \ufffd]0;title\ufffd\ufffd2J\n"
