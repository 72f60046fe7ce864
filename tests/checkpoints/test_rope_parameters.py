"""Configurations that transformers 5 has saved have the same rotary embedding as the older configurations."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from metal_engine.checkpoints.loader import load
from metal_engine.checkpoints.metadata import context_length
from metal_engine.checkpoints.model_classes import model_classes
from metal_engine.settings.args import EngineArgs
from tests.checkpoints.damage import CPU
from tests.support.checkpoint_files import CONFIG, write_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3}),
        ("llama", {"rope_theta": 100_000.0}),
        ("qwen2", {"rope_theta": 1e6}),
        ("qwen3", {"rope_theta": 1e6, "rope_scaling": YARN}),
        ("mistral", {"rope_theta": 1e6}),
        ("phi3", {"rope_theta": 20_000.0, "rope_scaling": LONG}),
        ("glm4", {"rope_theta": 20_000.0, "partial_rotary_factor": 0.25}),
        (
            "gemma3_text",
            {
                "rope_theta": 2e6,
                "rope_local_base_freq": 20_000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
@pytest.mark.parametrize("section", [None, "text_config"])
def test_fields_are_filled_in(model_type: str, fields: dict[str, Any], section: str | None) -> None:
    saved = AutoConfig.for_model(model_type, **fields).to_dict()
    assert "rope_parameters" in saved and not fields.keys() & saved.keys()
    config = saved if section is None else {"model_type": "a model with images", section: saved}
    model_classes(config)
    text = config if section is None else config[section]
    for name, value in fields.items():
        expected = value | {"type": value["rope_type"]} if name == "rope_scaling" else value
        found = {key: text[name][key] for key in expected} if name == "rope_scaling" else text[name]
        assert found == expected
    if "rope_scaling" not in fields:
        assert text["rope_scaling"] is None


def test_older_fields_and_other_values_stay() -> None:
    for parameters in ({"rope_theta": 5.0, "rope_type": "linear"}, [1], {"full_attention": 3}, None):
        config = {
            "model_type": "llama",
            "rope_theta": 7.0,
            "rope_scaling": {"factor": 2},
            "rope_parameters": parameters,
        }
        given = deepcopy(config)
        model_classes(config)
        assert config == given


def test_the_loaded_model_has_the_fields(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500_000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded: Any = load(EngineArgs(model=str(tmp_path)), CPU)
    assert loaded.model.args.rope_theta == loaded.config["rope_theta"] == 500_000.0


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_scaling": YARN}, 131_072),
        ({"rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}}, 131_072),
        ({"rope_parameters": YARN | {"rope_theta": 1e6}}, 131_072),
        ({"rope_scaling": LLAMA3 | {"factor": 32.0}}, 40_960),
        *(({"rope_scaling": YARN | {"factor": value}}, 40_960) for value in (None, "4", 0.5, float("nan"), 1e300)),
        ({"rope_scaling": "yarn"}, 40_960),
    ],
    ids=str,
)
def test_yarn_extends_the_context(scaling: dict[str, Any], length: int) -> None:
    assert context_length({"max_position_embeddings": 40_960, **scaling}) == length
