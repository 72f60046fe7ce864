"""--speculative-config with a draft head from files: loading, memory, and refusals."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from metal_engine import LLM, SamplingParams
from metal_engine.errors import ConfigError, ModelLoadError
from tests.checkpoints.draft_heads.test_families import FAMILIES, published
from tests.support.checkpoint_files import CONFIG, VOCAB_SIZE, write_checkpoint, write_weights
from tests.support.draft_heads import random_head
from tools.fixtures.tiny_models import tiny_model

WIDE = {"head_dim": 64}  # quantized KV needs groups of 64 or 32 numbers
SIZES: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", config=WIDE)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    flat: Any = tree_flatten(random_head(tiny_model(**CONFIG, **WIDE)).parameters())
    mx.save_safetensors(str(folder / "mtp.safetensors"), {f"mtp.{name}": array for name, array in flat})
    return folder


def speculative(**fields: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", **fields}}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_outputs_equal_outputs_without_a_draft_head(target: Path, sidecar: Path, kv_cache_dtype: str) -> None:
    answers = []
    for options in ({}, speculative(model=str(sidecar))):
        with LLM(str(target), kv_cache_dtype=kv_cache_dtype, **SIZES, **options) as llm:
            params = [SamplingParams(seed=i, max_tokens=30, ignore_eos=True) for i in range(3)]
            found = llm.generate(["one", "two two", "three"], params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in found])
            config, metrics = llm.config, llm._core.metrics
        assert bool(metrics.num_draft_tokens) == (config.draft is not None)
    assert answers[0] == answers[1]
    head, model = config.draft, config.model
    assert config.speculation == f"mtp: {sidecar}"
    assert head is not None and head.num_layers == 1 and head.weight_bytes == 4 * head.num_params
    assert head.kv_bytes_per_token * model.num_layers == model.kv_bytes_per_token
    assert config.kv_bytes == config.cache.num_tokens * (model.kv_bytes_per_token + head.kv_bytes_per_token)
    assert config.scheduler.speculative is not None and config.scheduler.speculative.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({}, {}, ModelLoadError, "the draft head .*has no weights of a draft head"),
        ({"model": "/nowhere"}, {}, ModelLoadError, "the draft head .*: /nowhere is not a file or a folder"),
        ({"method": "auto", "model": "/nowhere"}, {}, ModelLoadError, "/nowhere is not a file or a folder"),
        ({}, {"tensor_parallel_size": 2}, ConfigError, "does not work with --tensor-parallel-size"),
        ({"num_speculative_tokens": 0}, {}, ConfigError, "at least 1"),
        ({"revision": "main"}, {}, ConfigError, "has a revision, which needs 'model'"),
    ],
)
def test_refusals(
    target: Path, fields: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(target), **SIZES, **options, **speculative(**fields))


def test_a_missing_head_is_found_before_the_weights_are_read(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("metal_engine.checkpoints.loader.load_model", fail)
    with pytest.raises(ModelLoadError, match="has no weights of a draft head"):
        LLM(str(target), **SIZES, **speculative())


def test_a_head_without_memory_is_refused_before_the_weights_are_read(
    target: Path, sidecar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the method auto, drafts are then by prompt lookup only."""
    with LLM(str(target), **SIZES, **speculative(model=str(sidecar))) as llm:
        config = llm.config
    model_bytes, head_bytes = config.model.weight_bytes, config.draft.weight_bytes

    def has_memory(num_bytes: int) -> None:
        device = replace(config.device, memory_bytes=num_bytes)
        monkeypatch.setattr("metal_engine.device.info.device_info", lambda blas: device)

    has_memory(model_bytes + head_bytes // 2)
    few_blocks = {**SIZES, "num_gpu_blocks_override": 1}
    with LLM(str(target), **few_blocks, **speculative(method="auto", model=str(sidecar))) as llm:
        assert llm.config.draft is None and llm.config.speculation is not None
        assert llm.config.speculation.startswith("ngram: the draft head (--speculative-config): its weights take 3")
    monkeypatch.setattr("metal_engine.checkpoints.loader.load_model", None)
    with pytest.raises(
        ModelLoadError, match=r"the draft head \(--spec.*: its weights take .* remain beside the model's"
    ):
        LLM(str(target), **few_blocks, **speculative(model=str(sidecar)))
    has_memory(model_bytes + head_bytes + (1 << 20))
    given = {"kv_cache_memory_bytes": (1 << 20) + head_bytes // 2}
    with pytest.raises(ModelLoadError, match=r"its weights take .* leaves too little memory: a KV cache"):
        LLM(str(target), **given, **speculative(model=str(sidecar)))


OTHER = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}


def test_a_head_of_another_model_is_refused(sidecar: Path, tmp_path: Path) -> None:
    """With the method auto, drafts are then by prompt lookup only."""
    other = write_checkpoint(tmp_path / "other", config=OTHER)
    with pytest.raises(ModelLoadError, match=r"the draft head .*its weights do not fit the model"):
        LLM(str(other), **SIZES, **speculative(model=str(sidecar)))
    assert method_of(other, model=str(sidecar)) == "ngram"


def method_of(target: Path, **fields: Any) -> str:
    """Return the method that an engine with the method auto has chosen."""
    with LLM(str(target), **SIZES, **speculative(method="auto", **fields)) as llm:
        config = llm.config.scheduler.speculative
        assert config is not None and (llm.config.draft is not None) == (config.method == "mtp")
        assert len(llm.generate(["one"], SamplingParams(max_tokens=4), use_tqdm=False)) == 1
        return config.method


def test_auto_uses_a_head_beside_the_weights(sidecar: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", config=WIDE)
    assert method_of(model) == "ngram"
    shutil.copy(sidecar / "mtp.safetensors", model)
    assert method_of(model) == "mtp"


def test_auto_uses_a_head_within_a_published_checkpoint(tmp_path: Path) -> None:
    """GLM's head is one more layer among the model's weights, with copies of the embedding table and the LM head."""
    config = {**FAMILIES["glm4_moe"].config, "vocab_size": VOCAB_SIZE}
    model = write_checkpoint(tmp_path / "model", config=config, single_experts=True)
    weights: Any = mx.load(str(model / "model.safetensors"))
    place = FAMILIES["glm4_moe"].blocks[0]
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    weights |= {f"{place}.{copy}.weight": weights[f"{name}.weight"] for copy, name in copies.items()}
    write_weights(model, weights | published("glm4_moe").weights, num_shards=2)
    (model / "model.safetensors").unlink()
    assert method_of(model) == "mtp"
