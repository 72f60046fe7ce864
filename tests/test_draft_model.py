"""--speculative-config with a draft model from files: loading, and errors raised before weights are read."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_engine import LLM, SamplingParams
from metal_engine.checkpoints import loader
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.loading.build import build_engine
from metal_engine.settings.args import EngineArgs
from tests.support.checkpoint_files import CONFIG, write_checkpoint
from tools.fixtures.architectures import configuration

SIZES: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "large")


def speculative(draft: Path | str, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, **more}


def test_outputs_equal_outputs_without_a_draft_model(target: Path, tmp_path: Path) -> None:
    """The draft model has one layer and other widths, so its KV has another shape."""
    draft = write_checkpoint(
        tmp_path / "small", config={"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    )
    answers = []
    for options in ({}, {"speculative_config": speculative(target)}, {"speculative_config": speculative(draft)}):
        llm = LLM(str(target), **SIZES, **options)
        params = [SamplingParams(seed=i, max_tokens=30, ignore_eos=True) for i in range(3)]
        answers.append([o.outputs[0].token_ids for o in llm.generate(["one", "two two", "three"], params)])
        config, metrics = llm.config, llm._core.metrics
        llm.close()
        assert bool(metrics.num_draft_tokens) == (config.draft is not None)
        if config.draft is not None:
            assert config.weight_bytes == config.model.weight_bytes + config.draft.weight_bytes
            per_token = config.model.kv_bytes_per_token + config.draft.kv_bytes_per_token
            assert config.kv_bytes == config.cache.num_tokens * per_token
    assert answers[0] == answers[1] == answers[2]


def test_draft_model_kv_uses_the_kv_dtype_of_the_target(tmp_path: Path) -> None:
    """The models have quantization groups of 64 and 32. A draft model with the target's weights is always right."""
    target = write_checkpoint(tmp_path / "large", config={"head_dim": 64})
    small = write_checkpoint(tmp_path / "small", config={"head_dim": 32, "num_hidden_layers": 1})
    answers = []
    for draft in (None, target, small):
        options = {} if draft is None else {"speculative_config": speculative(draft)}
        with LLM(str(target), kv_cache_dtype="int8", **SIZES, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            found = llm.generate(["one", "two two", "three"], params, use_tqdm=False)
            answers.append([output.token_ids for output in found])
            config, metrics = llm.config, llm._core.metrics
        if config.draft is None:
            continue
        assert config.model.kv_dtype == config.draft.kv_dtype == "int8"
        # layers, K and V, heads, head_dim with scale and bias
        of_draft = {target: 2 * 2 * 2 * 72, small: 2 * 2 * 40}[draft]
        assert config.draft.kv_bytes_per_token == of_draft
        assert config.kv_bytes == config.cache.num_tokens * (2 * 2 * 2 * 72 + of_draft)
        assert config.num_tokens_unquantized is not None and config.num_tokens_unquantized < config.cache.num_tokens
        assert draft == small or 0 < metrics.num_draft_tokens == sum(metrics.num_accepted_tokens)
    assert answers[0] == answers[1] == answers[2]


def test_closing_the_engine_frees_draft_model_memory(target: Path) -> None:
    args = EngineArgs(model=str(target), speculative_config=json.dumps(speculative(target)), **SIZES)
    mx.synchronize()
    gc.collect()  # collects the garbage of other tests before measuring
    before = mx.get_active_memory()
    engine = build_engine(args)
    core = engine.core
    pools = core.config.kv_bytes
    # A small array of another test can be freed in the meantime.
    assert mx.get_active_memory() - before > 0.99 * (core.config.weight_bytes + pools)
    engine.close()
    assert mx.get_active_memory() - before < core.config.weight_bytes + pools / 4
    del core, engine
    assert mx.get_active_memory() - before < args.block_size * 4096


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of models whose weights are read."""
    names: list[str] = []
    monkeypatch.setattr(loader, "_announce", lambda found, facts: names.append(Path(found.name).name))
    return names


def _other_tokens(folder: Path) -> None:
    """Exchange two tokens without changing the vocabulary size."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _recurrent(folder: Path) -> None:
    config = {**CONFIG, **configuration("lfm2"), "vocab_size": CONFIG["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(config))


def _unknown(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "nothing_like_it"}))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_other_tokens, ConfigError, "whose vocabulary differs from that of .*. Differing tokens: 2"),
        (_recurrent, ConfigError, "recurrent states cannot be reset after rejected drafts"),
        (_unknown, ModelLoadError, "the draft model .--speculative-config.: .*nothing_like_it"),
    ],
)
def test_incompatible_draft_models_are_refused_before_weights_are_read(
    spoil: Any, error: type[Exception], message: str, target: Path, tmp_path: Path, announced: list[str]
) -> None:
    draft = write_checkpoint(tmp_path / "small")
    spoil(draft)
    args = EngineArgs(model=str(target), speculative_config=json.dumps(speculative(draft)), **SIZES)
    with pytest.raises(error, match=message) as caught:
        build_engine(args)
    assert "--speculative-config" in str(caught.value) and "\n" not in str(caught.value)
    assert announced == ["large"]


def test_heads_that_no_group_divides_are_refused(target: Path, tmp_path: Path, announced: list[str]) -> None:
    """The target model can be quantized. The error says that the draft model cannot."""
    large = write_checkpoint(tmp_path / "large", config={"head_dim": 64})
    draft = write_checkpoint(tmp_path / "small", config={"head_dim": 24})
    given = {"kv_cache_dtype": "int8", "speculative_config": json.dumps(speculative(draft))}
    with pytest.raises(ConfigError, match=r"^the draft model \(--speculative-config\): .*24\); choose auto$") as caught:
        build_engine(EngineArgs(model=str(large), **given, **SIZES))
    assert caught.value.flag == "--kv-cache-dtype" and announced == ["large"]


def test_a_draft_model_that_is_not_there(target: Path, tmp_path: Path) -> None:
    args = EngineArgs(model=str(target), speculative_config=json.dumps(speculative(tmp_path / "none")), **SIZES)
    with pytest.raises(ModelLoadError, match=r"the draft model .--speculative-config.: .* is neither a directory nor"):
        build_engine(args)
