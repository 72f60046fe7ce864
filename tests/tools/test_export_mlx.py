"""`tools/fixtures/export_mlx.py` writes a model that mlx-lm and the engine load as the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

from metal_engine import LLM, SamplingParams
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids
from metal_engine.text.tokenizer import Tokenizer
from tools.compare.equal_outputs import compare_outputs
from tools.compare.servers import SCENARIOS
from tools.fixtures.export_mlx import export

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo-mlx")
    export(folder)
    return folder


@pytest.mark.full
def test_mlx_lm_and_the_engine_generate_the_same_tokens(
    folder: Path, reference_model: Any, demo_tokenizer: Tokenizer
) -> None:
    prompt = demo_tokenizer.encode(PROMPT)
    expected = [int(t) for t, _ in generate_step(mx.array(prompt), reference_model, max_tokens=8)]
    model, tokenizer = load(str(folder))
    assert tokenizer.encode(PROMPT) == prompt
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True) == demo_tokenizer.apply_chat_template(chat)
    assert [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=8)] == expected
    with LLM(
        str(folder), num_gpu_blocks_override=64, max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (result,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert compare_outputs(reference_model, prompt, result.token_ids, expected).equal


@pytest.fixture(scope="module")
def one_layer(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-layer")
    export(folder, never_stops=True, drop_layers=range(1, 32))  # the model has 30 layers
    return folder


def test_never_stops(one_layer: Path, demo_path: Path) -> None:
    config = json.loads((one_layer / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config["eos_token_id"] not in gguf_eos_token_ids(read_gguf_header(demo_path))
    assert {a.dtype for a in mx.load(str(one_layer / "model.safetensors")).values()} == {mx.float32}


@pytest.mark.full
def test_synthetic_pairs(folder: Path, demo_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Idle layers do not change outputs. Dropped layers do."""
    export(tmp_path / "slow", idle_layers=5)
    export(tmp_path / "small", drop_layers=[6, 14])
    prompt = mx.array(demo_tokenizer.encode(PROMPT))[None]
    models = [load(str(path))[0] for path in (folder, tmp_path / "slow", tmp_path / "small")]
    assert [len(model.layers) for model in models] == [30, 35, 28]
    usual, slow, small = (model(prompt) for model in models)
    assert mx.array_equal(usual, slow) and not mx.allclose(usual, small, atol=0.1)
    models[0].model.layers = [layer for i, layer in enumerate(models[0].model.layers) if i not in (6, 14)]
    assert mx.array_equal(models[0](prompt), small)


@pytest.mark.full
def test_a_random_draft_model_predicts_other_tokens_than_the_usual_model(
    folder: Path, demo_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The draft model has the usual model's vocabulary but predicts other tokens."""
    export(tmp_path, drop_layers=range(1, 30), random_weights=True)
    prompt = mx.array(demo_tokenizer.encode(PROMPT))[None]
    usual, random = (load(str(path))[0](prompt) for path in (folder, tmp_path))
    assert random.shape == usual.shape and mx.all(mx.isfinite(random))
    assert not mx.any(mx.argmax(usual, axis=-1) == mx.argmax(random, axis=-1))


def test_every_benchmark_scenario_makes_prompts_of_the_stated_lengths(one_layer: Path) -> None:
    """Prompts have the lengths in the scenario's title, and rounds differ."""
    from metal_engine.bench.tokens import load_prompt_tokenizer

    tokenizer = load_prompt_tokenizer(str(one_layer))
    again, other = ([*SCENARIOS["5"].phases(tokenizer, seed)] for seed in (0, 1))
    assert [*SCENARIOS["5"].phases(tokenizer, 0)] == again != other
    for scenario in SCENARIOS.values():
        first = [*scenario.phases(tokenizer, 0)]
        groups = {group.name: group for phase in first for group in phase}
        for group in groups.values():
            assert len(group.requests) == len(group.due)
            assert all(len(tokenizer.encode(r.prompt)) == r.prompt_len for r in group.requests)
        assert {goal.group for goal in scenario.goals} <= groups.keys()
    (short,) = SCENARIOS["5"].phases(tokenizer, 0)[0][1].requests
    assert short.prompt_len == 5
    cold, warm = (phase[0].requests for phase in SCENARIOS["4"].phases(tokenizer, 0))
    prefixes = {tuple(tokenizer.encode(r.prompt)[:990]) for r in cold + warm}
    assert len(prefixes) == 1 and {r.prompt_len for r in cold + warm} == {1050}
