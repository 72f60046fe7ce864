"""A bad checkpoint is refused with one line that names the problem, before gigabytes are read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from metal_engine.checkpoints.loader import load
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.checkpoints.damage import CPU, Damage, configure, refused, write
from tests.support.checkpoint_files import CONFIG, write_checkpoint, write_tokenizer


def remove(*patterns: str) -> Damage:
    def damage(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return damage


def cut(name: str, size: int | None = None) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) - 1000 if size is None else size])

    return damage


def drop_config(name: str) -> Damage:
    return write("config.json", json.dumps({key: value for key, value in CONFIG.items() if key != name}))


def without_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    del weights["model.norm.weight"]
    mx.save_safetensors(str(path), weights)


def of_another_size(folder: Path) -> None:
    write_checkpoint(folder, config={"intermediate_size": 96})
    configure()(folder)


SHARD = "model-00002-of-00003.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123456789\n"

CASES: dict[str, tuple[Damage, list[str]]] = {
    "no config": (remove("config.json"), ["has no config.json", "not a model directory"]),
    "broken config": (write("config.json", '{"model_type": "llama",'), ["config.json is not valid JSON"]),
    "config is a list": (write("config.json", "[]"), ["config.json is not a JSON object"]),
    "config is binary": (write("config.json", b"\xff\xfe\x00"), ["not valid JSON"]),
    "config without a type": (drop_config("model_type"), ["names no model_type"]),
    "config without a size": (drop_config("hidden_size"), ["do not fit llama", "hidden_size"]),
    "unknown architecture": (configure(model_type="nosuch"), ["no architecture 'nosuch'"]),
    "architecture that ends the process": (configure(model_type="olmo"), ["'olmo'"]),
    "hostile type": (configure(model_type="../../etc"), ["no architecture '../../etc'"]),
    "no weights": (remove("*.safetensors"), ["has no weights", "model*.safetensors"]),
    "weights of another kind": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ["has no weights", "pytorch_model.bin"],
    ),
    "no tokenizer": (remove("tokenizer*"), ["has no tokenizer", "--tokenizer"]),
    "broken tokenizer": (write("tokenizer.json", "{"), ["cannot load the tokenizer"]),
    "broken tokenizer_config": (write("tokenizer_config.json", "{"), ["tokenizer_config.json is not valid JSON"]),
    "broken generation_config": (write("generation_config.json", "{"), ["generation_config.json is not valid"]),
    "truncated": (cut("model.safetensors"), ["model.safetensors is truncated", "half-downloaded"]),
    "truncated in its header": (cut("model.safetensors", 100), ["truncated or is not a safetensors"]),
    "empty": (cut("model.safetensors", 0), ["truncated or is not a safetensors"]),
    "not safetensors": (write("model.safetensors", "x" * 5000), ["truncated or is not a safetensors"]),
    "broken header": (
        write("model.safetensors", (64).to_bytes(8, "little") + b"{" * 500),
        ["not a safetensors file (", "invalid JSON in header"],
    ),
    "LFS pointer": (write("model.safetensors", POINTER), ["Git LFS pointer", "git lfs pull"]),
    "tensor missing": (without_a_tensor, ["do not fit llama", "model.norm.weight"]),
    "tensors of another shape": (of_another_size, ["do not fit llama", "shape"]),
    "quantized in an unknown way": (
        configure(quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"}),
        ["do not fit llama", "float-quantized"],
    ),
}


def check(words: list[str], message: str) -> None:
    assert all(word in message for word in words), message


@pytest.mark.parametrize("case", CASES)
def test_the_error_for_a_bad_checkpoint_names_the_problem(tmp_path: Path, case: str) -> None:
    damage, words = CASES[case]
    damage(write_checkpoint(tmp_path))
    check(words, refused(tmp_path))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove(SHARD), ["half-downloaded: 1 of 3", SHARD]),
        (remove("*-0000[23]-of*"), ["half-downloaded: 2 of 3", SHARD]),
        (cut(SHARD), [f"{SHARD} is truncated"]),
        (write("model.safetensors.index.json", "{}"), ["has no weight_map"]),
    ],
    ids=["missing", "two missing", "cut short", "index without a map"],
)
def test_shards(tmp_path: Path, damage: Damage, words: list[str]) -> None:
    damage(write_checkpoint(tmp_path, num_shards=3))
    check(words, refused(tmp_path))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"model": "/nowhere/model"}, ["neither a directory nor a .gguf file"]),
        ({"model": "./nothing"}, ["neither a directory nor a .gguf file"]),
        ({"model": "nothing.gguf"}, ["no such file"]),
        ({"tokenizer": "/nowhere"}, ["--tokenizer"]),
        ({"generation_config": "/nowhere"}, ["--generation-config"]),
    ],
    ids=str,
)
def test_names_that_lead_nowhere(tmp_path: Path, args: dict[str, str], words: list[str]) -> None:
    check(words, refused(**{"model": write_checkpoint(tmp_path), **args}))


def test_the_error_for_a_directory_with_a_gguf_file_names_the_file(tmp_path: Path) -> None:
    for name in ("._model.gguf", "model.gguf"):
        (tmp_path / name).touch()
    assert re.search(r"name the file itself: .*/model\.gguf", refused(tmp_path))


def test_the_error_for_a_tokenizer_with_custom_code_names_the_flag(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("a\n")
    assert "--trust-remote-code" in refused(tmp_path)


def test_a_model_that_exceeds_memory_is_refused_before_loading(tmp_path: Path, demo_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    args = EngineArgs(model=str(folder))

    def with_memory(kind: str, memory_bytes: float) -> DeviceInfo:
        return replace(CPU, kind=kind, memory_bytes=int(memory_bytes))

    assert re.search("not enough memory .* --dtype bfloat16", refused(folder, with_memory("cpu", size // 2)))
    load(args, with_memory("cpu", size))
    assert re.search("not enough memory .* --gpu-memory-util", refused(folder, with_memory("metal", size / 0.95)))
    load(args, with_memory("metal", size / 0.85))
    # 135 M float32 parameters
    assert "not enough memory" in refused(demo_path, with_memory("cpu", 500_000_000))
