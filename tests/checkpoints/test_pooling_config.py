"""Settings of embedding checkpoints: sentence-transformers' files, bidirectional models, weights without a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal_engine.checkpoints.gguf.header import GgufHeader
from metal_engine.checkpoints.pooling_config import check_causal, find_reranker, gguf_pooler, read_pooler
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.errors import ModelLoadError, ParameterError, PromptError, UnsupportedModelError
from metal_engine.loading.build import build_engine
from metal_engine.pooling_params import PoolingParams
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import PoolerConfig
from tests.support.checkpoint_files import CONFIG, write_checkpoint, write_modules, write_weights
from tests.support.tiny_engine import run_pooling
from tools.fixtures.tiny_models import tiny_model

NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
# Published forms: older versions write flags, later ones a name, and types have moved to other modules.
OLD_LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
NEW_CLS = {"embedding_dimension": 64, "pooling_mode": "cls", "include_prompt": True}


@pytest.mark.parametrize(
    ("pooling", "others", "expected"),
    [
        (OLD_LAST, [NORMALIZE], PoolerConfig(is_embedder=True)),
        (MEAN, [], PoolerConfig(pooling_type="MEAN", normalize=False, is_embedder=True)),
        (NEW_CLS, [NORMALIZE], PoolerConfig(pooling_type="CLS", is_embedder=True)),
    ],
)
def test_pooling_is_as_the_files_say(
    tmp_path: Path, pooling: dict[str, Any], others: list[dict[str, Any]], expected: PoolerConfig
) -> None:
    assert read_pooler(write_modules(tmp_path, pooling, *others), {}) == expected


def test_a_chat_model_is_pooled_as_vllm_does(tmp_path: Path) -> None:
    assert read_pooler(tmp_path, {}) == PoolerConfig(pooling_type="LAST", normalize=True, is_embedder=False)
    assert read_pooler(write_modules(tmp_path, None), {}) == PoolerConfig()


@pytest.mark.parametrize(
    ("pooling", "others", "reason"),
    [
        (OLD_LAST, [DENSE], "Dense"),
        ({"pooling_mode": "weightedmean"}, [], "weightedmean"),
        ({"pooling_mode_max_tokens": True}, [], "max_tokens"),
        (OLD_LAST | {"pooling_mode_mean_tokens": True}, [], "mean and lasttoken"),
        ({}, [], "none"),
    ],
)
def test_an_unsupported_pooling_config_is_reported_with_the_reason(
    tmp_path: Path, pooling: dict[str, Any], others: list[dict[str, Any]], reason: str
) -> None:
    pooler = read_pooler(write_modules(tmp_path, pooling, *others), {})
    assert pooler.is_embedder and reason in (pooler.problem or "")


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"a": 1}', '[{"type": 1, "path": ""}]', '[{"type": "a.Pooling", "path": "../.."}]', "[" * 9999],
)
def test_broken_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelLoadError):
        read_pooler(tmp_path, {})


@pytest.mark.parametrize(
    "config",
    [
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"text_config": {"use_bidirectional_attention": "all"}},
        {"model_type": "bert"},
    ],
)
def test_bidirectional_models_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        check_causal(config, "a model")
    folder = write_checkpoint(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(ModelLoadError, match="bidirectional"):
        build_engine(EngineArgs(model=str(folder)))


@pytest.mark.parametrize(
    "config",
    [{}, {"is_causal": True}, {"use_bidirectional_attention": False}, {"use_bidirectional_attention": "vision"}],
)
def test_causal_models_are_not(config: dict[str, Any]) -> None:
    check_causal(config, "a model")


def built(folder: Path) -> BuiltEngine:
    sizes = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return build_engine(EngineArgs(model=str(folder), **sizes))


def test_embeddings_use_the_pooling_and_dimensions_of_the_checkpoint(tmp_path: Path) -> None:
    folder = write_modules(write_checkpoint(tmp_path / "m"), {"pooling_mode_mean_tokens": True})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 32]}))
    engine = built(folder)
    try:
        model_info = engine.core.config.model
        assert model_info.hidden_size == 64 and model_info.can_generate
        tokens = list(range(40, 70))
        model = tiny_model(**CONFIG)
        hidden = np.array(model.model(mx.array(tokens)[None])[0]).astype(np.float64)
        whole, cut = run_pooling(engine, [(tokens, PoolingParams()), (tokens, PoolingParams(dimensions=32))])
        np.testing.assert_allclose(whole, hidden.mean(axis=0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(cut, hidden.mean(axis=0)[:32], rtol=1e-3, atol=1e-4)
        for dimensions, reason in ((33, "16, 32"), (65, "more than the 64")):
            with pytest.raises(ParameterError, match=reason):
                engine.preparer.prepare_pooling([tokens], PoolingParams(dimensions=dimensions))
    finally:
        engine.close()


@pytest.mark.parametrize("has_head", [True, False])
def test_weights_under_short_names_and_without_a_head(tmp_path: Path, has_head: bool) -> None:
    """Weights as in Qwen3-Embedding: the 8B model is untied by its configuration, but has no head."""
    config = CONFIG | {"tie_word_embeddings": has_head}
    folder = write_modules(write_checkpoint(tmp_path / "m", config=config), OLD_LAST, NORMALIZE)
    model = tiny_model(**config)
    weights = dict(tree_flatten(model.parameters()))
    short = {k.removeprefix("model."): v for k, v in weights.items() if not k.startswith("lm_head.")}
    write_weights(folder, short, 1)
    engine = built(folder)
    try:
        tokens = list(range(80, 99))
        (vector,) = run_pooling(engine, [(tokens, PoolingParams())])
        hidden = np.array(model.model(mx.array(tokens)[None])[0, -1]).astype(np.float64)
        np.testing.assert_allclose(vector, hidden / np.linalg.norm(hidden), atol=1e-4)
        if has_head:
            assert run_pooling(engine, [(tokens, SamplingParams(max_tokens=3, ignore_eos=True))])
        else:
            with pytest.raises(PromptError, match="no LM head"):
                engine.preparer.prepare(tokens, SamplingParams())
    finally:
        engine.close()


def test_weights_that_lack_a_head_are_no_chat_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", config={"tie_word_embeddings": False})
    weights = dict(tree_flatten(tiny_model(**CONFIG | {"tie_word_embeddings": False}).parameters()))
    write_weights(folder, {k: v for k, v in weights.items() if not k.startswith("lm_head.")}, 1)
    with pytest.raises(ModelLoadError, match="lm_head"):
        built(folder)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, PoolerConfig()),
        ({"qwen3.pooling_type": 0}, PoolerConfig()),
        ({"qwen3.pooling_type": 1}, PoolerConfig(pooling_type="MEAN", is_embedder=True)),
        ({"qwen3.pooling_type": 3, "qwen3.attention.causal": True}, PoolerConfig(is_embedder=True)),
        ({"llama.pooling_type": 1}, PoolerConfig()),
    ],
)
def test_pooling_settings_are_read_from_gguf_metadata(metadata: dict[str, Any], expected: PoolerConfig) -> None:
    assert gguf_pooler(GgufHeader(Path("m.gguf"), {"general.architecture": "qwen3", **metadata}, {})) == expected


def test_gguf_files_that_cannot_be_pooled() -> None:
    def header(**metadata: Any) -> GgufHeader:
        named = {f"qwen3.{name}": value for name, value in metadata.items()}
        return GgufHeader(Path("m.gguf"), {"general.architecture": "qwen3", **named}, {})

    assert "4" in (gguf_pooler(header(pooling_type=4)).problem or "")
    assert gguf_pooler(header(pooling_type="mean")).problem
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        gguf_pooler(header(**{"attention.causal": False}))


class _Vocabulary:
    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: 10 + i for i, word in enumerate(self._words)}


CARD = "---\nlicense: apache-2.0\npipeline_tag: {}\n---\n# Highlights\nQwen3-Reranker and Qwen3-Embedding\n"


@pytest.mark.parametrize(
    ("name", "card", "model_type", "is_reranker"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", None, "qwen3", True),
        ("mlx-community/qwen3-reranker-4b-4bit", None, "qwen3", True),
        ("/models/mine", CARD.format("text-ranking"), "qwen3", True),
        ("/models/mine", CARD.format("feature-extraction"), "qwen3", False),
        ("/models/mine", None, "qwen3", False),
        ("Qwen/Qwen3-Reranker-0.6B", None, "llama", False),
    ],
)
def test_a_qwen3_reranker_is_detected_by_name_or_model_card(
    tmp_path: Path, name: str, card: str | None, model_type: str, is_reranker: bool
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    found = find_reranker(tmp_path, {"model_type": model_type}, name, _Vocabulary("no", "yes"))
    assert (found is not None) == is_reranker
    if found is not None:
        assert (found.false_token_id, found.true_token_id) == (10, 11)
        assert find_reranker(tmp_path, {"model_type": model_type}, name, _Vocabulary("no")) is None  # type: ignore[arg-type]
