"""A bad checkpoint is refused with one line that names the problem, before gigabytes are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.checkpoints import checkpoint
from metal_engine.checkpoints.loader import load
from metal_engine.errors import ModelLoadError, UnsupportedModelError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.checkpoints.damage import Damage, configure, write
from tests.support.checkpoint_files import CONFIG, EXPERTS, write_checkpoint, write_tokenizer
from tools.fixtures.architectures import configuration


def device(kind: str = "cpu", memory_bytes: int = 1 << 30) -> DeviceInfo:
    return DeviceInfo(kind=kind, name="test", compute="test", memory_bytes=memory_bytes)


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


def check_refused(words: list[str], **args: Any) -> None:
    """Check that a model is refused with one line that contains the words."""
    with pytest.raises(ModelLoadError) as caught:
        load(EngineArgs(**args), device())
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    damage, words = CASES[case]
    damage(write_checkpoint(tmp_path))
    check_refused(words, model=str(tmp_path))


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
    check_refused(words, model=str(tmp_path))


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
    check_refused(words, **{"model": str(write_checkpoint(tmp_path)), **args})


def test_a_directory_with_a_gguf_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"name the file itself: .*model\.gguf"):
        load(EngineArgs(model=str(tmp_path)), device())


def test_a_tokenizer_that_needs_its_own_code(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("a\n")
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        load(EngineArgs(model=str(tmp_path)), device())


# --- memory ---


@pytest.mark.parametrize(
    ("options", "kind", "dtype"),
    [
        ({}, "cpu", "auto"),
        ({"num_shards": 3}, "cpu", "auto"),
        ({"dtype": mx.bfloat16}, "cpu", "auto"),
        ({"bits": 4}, "cpu", "auto"),
        ({"bits": 6}, "cpu", "bfloat16"),
        ({"bits": 4, "mixed_bits": True}, "cpu", "auto"),
        ({"bits": 4, "mixed_bits": True}, "metal", "auto"),
        ({"dtype": mx.float16}, "metal", "auto"),
        ({"bits": 4, "mode": "nvfp4", "dtype": mx.bfloat16}, "cpu", "auto"),
        ({"bits": 4, "mode": "nvfp4", "global_scale": True, "config": EXPERTS}, "cpu", "auto"),
        ({"bits": 8, "mode": "mxfp8", "dtype": mx.bfloat16}, "metal", "auto"),
    ],
    ids=str,
)
def test_the_estimate_is_what_the_weights_take(tmp_path: Path, options: dict[str, Any], kind: str, dtype: str) -> None:
    from mlx.utils import tree_flatten

    folder = write_checkpoint(tmp_path, **options)
    loaded = load(EngineArgs(model=str(folder), dtype=dtype), device(kind))
    taken = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    float_bytes = None if kind == "metal" else 2 if dtype == "bfloat16" else 4
    tensors = checkpoint.stored_tensors(checkpoint.weight_files(folder))
    assert checkpoint.weight_bytes(tensors, checkpoint.read_config(folder), float_bytes) == taken


def test_what_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    args = EngineArgs(model=str(folder))
    with pytest.raises(ModelLoadError, match=r"not enough memory .* --dtype bfloat16"):
        load(args, device("cpu", size // 2))
    load(args, device("cpu", size))
    with pytest.raises(ModelLoadError, match=r"not enough memory .* --gpu-memory-utilization"):
        load(args, device("metal", int(size / 0.95)))
    load(args, device("metal", int(size / 0.85)))


def test_a_gguf_file_that_does_not_fit(demo_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="not enough memory"):
        load(EngineArgs(model=str(demo_path)), device("cpu", 500_000_000))  # 135 M float32 parameters


def test_a_refused_architecture_is_named(tmp_path: Path) -> None:
    """An architecture that mlx-lm supports, but not the paged cache, in the same way as `serve` loads it."""
    from metal_engine.build import build_engine

    folder = write_checkpoint(tmp_path, config=configuration("phi3small"))
    with pytest.raises(UnsupportedModelError, match=r"architecture phi3small\) cannot run here: "):
        build_engine(EngineArgs(model=str(folder)))
