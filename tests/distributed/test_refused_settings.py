"""Settings that several ranks do not support are refused by name, before the model is read."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from metal_engine.cli.main import app

MODEL = "a-model/that-is-nowhere"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'


@pytest.mark.parametrize("size", ["--tensor-parallel-size", "--pipeline-parallel-size"])
@pytest.mark.parametrize(
    "setting",
    [
        ["--speculative-config", NGRAM],
        ["--kv-cache-dir", "somewhere"],
        ["--kv-transfer-config", '{"kv_connector": "valkey", "kv_role": "kv_both"}'],
        ["--lora-modules", "a=b"],
        ["--enable-lora"],
        ["--lora-dir", "somewhere"],
    ],
    ids=lambda setting: setting[0],
)
def test_settings_for_one_rank(setting: list[str], size: str) -> None:
    found = CliRunner().invoke(app, ["serve", MODEL, "--port", "0", size, "2", *setting])
    assert found.exit_code not in (0, None)
    said = " ".join(re.sub(r"[│╭╰╮╯─]", " ", found.output + str(found.exception or "")).split())
    assert f"{setting[0]} does not work with {size}: remove one of the two flags" in said, said


def test_several_models() -> None:
    arguments = ["serve", MODEL, f"{MODEL}-too", "--port", "0", "--tensor-parallel-size", "2"]
    found = CliRunner().invoke(app, arguments)
    said = found.output + str(found.exception or "")
    assert "--tensor-parallel-size is for one model that stays" in said, said


def test_tensor_and_pipeline_parallelism_cannot_be_combined() -> None:
    both = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    found = CliRunner().invoke(app, ["serve", MODEL, *both])
    said = found.output + str(found.exception or "")
    assert "--pipeline-parallel-size 2 does not work with --tensor-parallel-size" in said, said
