"""Reading LoRA adapters in both formats, and refusing unsupported ones with the reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.errors import AdapterError
from metal_engine.lora.files import open_adapter
from metal_engine.lora_adapter import AdapterTargets
from tests.support.adapters import write_mlx_lm
from tools.fixtures.lora_adapters import write_peft

RANK = 3
TARGETS = AdapterTargets(
    {"language_model.model.layers.0.q_proj": (8, 4), "language_model.model.layers.0.mlp.up_proj": (8, 16)},
    {"language_model.lm_head": "adapters of heads are not supported"},
)


def made(rank: int = RANK) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        f"model.layers.0.{name}": (
            rng.normal(size=(8, rank)).astype(np.float32),
            rng.normal(size=(rank, outputs)).astype(np.float32),
        )
        for name, outputs in (("q_proj", 4), ("mlp.up_proj", 16))
    }


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_peft(tmp_path: Path, dtype: mx.Dtype) -> None:
    """Names are matched from the layer on, because PEFT's and the model's names differ in their prefix."""
    file = open_adapter(write_peft(tmp_path, made(), alpha=6.0, dtype=dtype), TARGETS)
    assert file.modules == sorted(TARGETS.shapes) and file.rank == RANK
    for name, (a, b) in made().items():
        found_a, found_b = file.weights(f"language_model.{name}")
        exact_a, exact_b = (np.array(mx.array(one).astype(dtype).astype(mx.float32)) for one in (a, b))
        np.testing.assert_array_equal(found_a, exact_a)
        np.testing.assert_allclose(found_b, exact_b * 2.0)  # 6 / 3


def test_mlx_lm(tmp_path: Path) -> None:
    file = open_adapter(write_mlx_lm(tmp_path, made(), scale=0.5), TARGETS)
    for name, (a, b) in made().items():
        found_a, found_b = file.weights(f"language_model.{name}")
        np.testing.assert_array_equal(found_a, a)
        np.testing.assert_allclose(found_b, b * 0.5)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern {'q_proj': 2} is not supported"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens [5, 6] is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16' is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' is not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"r": 0}, "r is 0, which is not a rank"),
        ({"r": True}, "r is True, which is not a rank"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', which is not a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf, which is not a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, which is not a number"),
        ({"lora_alpha": -(10**400)}, "lora_alpha is -1000"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e+300, which is larger than any weight"),
        ({"use_rslora": "false"}, "use_rslora is 'false', which is neither true nor false"),
        ({"use_rslora": 0}, "use_rslora is 0, which is neither true nor false"),
        ({"r": 4}, "has shape [3, 8], but language_model.model.layers.0"),
    ],
)
def test_a_configuration_that_is_not_supported(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(AdapterError) as raised:
        open_adapter(write_peft(tmp_path, made(), **config), TARGETS)
    assert problem in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_adapter_settings_without_effect_on_inference_are_accepted(tmp_path: Path, init: bool | str) -> None:
    harmless = {"use_dora": False, "modules_to_save": None, "rank_pattern": {}, "lora_dropout": 0.1, "bias": "none"}
    harmless |= {"init_lora_weights": init, "alora_invocation_tokens": None}
    assert open_adapter(write_peft(tmp_path, made(), **harmless), TARGETS).rank == RANK


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type 'dora' is not supported"),
        ({"fine_tune_type": "full"}, "fine_tune_type 'full' is not supported"),
        ({"lora_parameters": None}, "neither PEFT's peft_type nor mlx-lm's lora_parameters"),
        ({"lora_parameters": {"rank": 3}}, "lora_parameters.scale is None"),
        ({"lora_parameters": {"rank": 3, "scale": 10**400}}, "lora_parameters.scale is 1000"),
        ({"lora_parameters": {"rank": 3, "scale": -1e300}}, "lora_parameters.scale is -1e.300, which is larger"),
    ],
)
def test_mlx_lms_that_are_not_supported(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(AdapterError, match=problem):
        open_adapter(write_mlx_lm(tmp_path, made(), **config), TARGETS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"base_model.model.model.layers.0.q_proj.lora_magnitude_vector": (4,)}, "not a LoRA product's tensor"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (3, 9)}, "not a LoRA product's tensor"),
        ({"base_model.model.lm_head.lora_A.weight": (3, 8)}, "adds to 'lm_head': the model has no such linear layer"),
        ({"base_model.model.language_model.lm_head.lora_A.weight": (3, 8)}, "adapters of heads are not supported"),
        ({"base_model.model.model.layers.7.q_proj.lora_A.weight": (3, 8)}, "the model has no such linear layer"),
        (  # the text model has a layer of this number and name
            {"base_model.model.model.vision_tower.encoder.layers.0.q_proj.lora_A.weight": (3, 8)},
            "adapters of image encoders are not supported",
        ),
        ({"base_model.model.model.layers.0.q_proj.lora_A.default.weight": (3, 8)}, "has language_model.* twice"),
        ({"base_model.model.model.layers.0.q_proj.lora_A.weight": None}, "has only one of the two tensors of"),
        ({"base_model.model.model.layers.0.q_proj.lora_A.weight": (3, 9)}, "has shape .3, 9., but .* needs .3, 8."),
        ({"base_model.model.model.layers.0.q_proj.lora_A.weight": "int32"}, "is of type I32"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    folder = write_peft(tmp_path, made())
    path = str(folder / "adapter_model.safetensors")
    arrays: dict[str, mx.array] = dict(mx.load(path))  # type: ignore[arg-type]
    for name, shape in change.items():
        if shape is None:
            del arrays[name]
        else:
            arrays[name] = arrays[name].astype(mx.int32) if shape == "int32" else mx.zeros(shape)
    mx.eval(arrays)
    mx.save_safetensors(path, arrays)
    with pytest.raises(AdapterError, match=problem):
        open_adapter(folder, TARGETS)


def test_folders_that_are_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not a directory"):
        open_adapter(tmp_path / "nothing", TARGETS)
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        open_adapter(tmp_path, TARGETS)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="is not valid JSON"):
        open_adapter(tmp_path, TARGETS)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors"):
        open_adapter(tmp_path, TARGETS)
    offset = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [Infinity, 4]}}'
    for broken in (
        len(offset).to_bytes(8, "little") + offset,
        b"",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{}",
    ):
        (tmp_path / "adapter_model.safetensors").write_bytes(broken)
        with pytest.raises(AdapterError):
            open_adapter(tmp_path, TARGETS)
    with pytest.raises(AdapterError):
        open_adapter(Path("a\0b"), TARGETS, within=tmp_path)
    with pytest.raises(AdapterError):
        open_adapter(tmp_path / ("x" * 5000), TARGETS)


def test_an_adapter_file_truncated_during_reading_raises_an_error(tmp_path: Path) -> None:
    file = open_adapter(write_peft(tmp_path, made()), TARGETS)
    path = tmp_path / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(AdapterError, match="was truncated"):
        for module in file.modules:
            file.weights(module)


@pytest.mark.parametrize(
    ("value", "scale", "largest", "is_refused"),
    [
        (float("nan"), 1.0, None, True),
        (float("inf"), 1.0, None, True),
        (-float("inf"), 1.0, None, True),
        (3e38, 2.0, None, True),
        (-3e38, 1.0, None, False),
        (-6e4, -2.0, 65504.0, True),  # the largest float16
        (6e4, 1.0, 65504.0, False),
    ],
)
@pytest.mark.parametrize("part", [0, 1])
def test_weights_that_no_type_has(
    tmp_path: Path, part: int, value: float, scale: float, largest: float | None, is_refused: bool
) -> None:
    """The second tensor is multiplied by the scale."""
    weights = made()
    weights["model.layers.0.q_proj"][part][1, 1] = value
    targets = TARGETS if largest is None else replace(TARGETS, largest=largest)
    file = open_adapter(write_mlx_lm(tmp_path, weights, scale=scale), targets)
    module, other = "language_model.model.layers.0.q_proj", "language_model.model.layers.0.mlp.up_proj"
    file.weights(other)
    if is_refused and (part == 1 or scale == 1.0):
        with pytest.raises(AdapterError, match=rf"adapters.safetensors: .*q_proj.lora_{'ab'[part]} has weights that"):
            file.weights(module)
    else:
        file.weights(module)


def test_files_outside_the_folder_are_refused(tmp_path: Path) -> None:
    """A path may leave the folder by names such as ``..``, and by links of folders and files."""
    root, outside = tmp_path / "root", write_peft(tmp_path / "outside", made())
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "files" / name).symlink_to(outside / name)
    half = write_peft(root / "half", made())
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for folder in (root / ".." / "outside", outside, root / "link", root / "files", half, root / "../root2"):
        with pytest.raises(AdapterError, match="is outside"):
            open_adapter(folder, TARGETS, within=root)
    assert open_adapter(write_peft(root / "in" / "here", made()), TARGETS, within=root).rank == RANK


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    """Links of the folder and of each file to themselves. Python's exception for them depends on its version."""
    (tmp_path / "loop").symlink_to("loop")
    folders = [tmp_path / "loop", tmp_path / "loop" / "below"]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folders.append(folder := write_peft(tmp_path / f"with {name}", made()))
        (folder / name).unlink()
        (folder / name).symlink_to(name)
    for folder in folders:
        for within in (tmp_path, None):
            with pytest.raises(AdapterError):
                open_adapter(folder, TARGETS, within=within)
