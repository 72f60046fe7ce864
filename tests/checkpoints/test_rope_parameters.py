"""Configurations that transformers 5 has saved have the same rotary embedding as the older configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from metal_engine.checkpoints.metadata import read_config

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
def test_fields_are_filled_in(model_type: str, fields: dict[str, Any], section: str | None, tmp_path: Path) -> None:
    saved = AutoConfig.for_model(model_type, **fields).to_dict()
    assert "rope_parameters" in saved and not fields.keys() & saved.keys()
    config = saved if section is None else {"model_type": "a model with images", section: saved}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    text = read if section is None else read[section]
    for name, value in fields.items():
        expected = value | {"type": value["rope_type"]} if name == "rope_scaling" else value
        found = {key: text[name][key] for key in expected} if name == "rope_scaling" else text[name]
        assert found == expected
    if "rope_scaling" not in fields:
        assert text.get("rope_scaling") is None


def test_older_fields_and_other_values_stay(tmp_path: Path) -> None:
    for parameters in ({"rope_theta": 5.0, "rope_type": "linear"}, [1], {"full_attention": 3}, None):
        config = {
            "model_type": "llama",
            "rope_theta": 7.0,
            "rope_scaling": {"factor": 2},
            "rope_parameters": parameters,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path) == config
