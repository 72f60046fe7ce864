"""Tests ``--kv-cache-dir`` end to end: checkpoints on disk, and engines that start and stop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.llm import LLM
from metal_engine.loading import build
from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from tests.support.checkpoint_files import write_checkpoint
from tests.support.serving import wait_until
from tools.fixtures.architectures import configuration

PROMPTS = [[*range(100)], [*range(50), *range(10)], [7, 8, 9]]
# Clearing a KV cache of the default size would take most of a test's time.
SMALL: dict[str, object] = {"num_gpu_blocks_override": 64, "max_model_len": 1024}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def generate(model: Path, **settings: object) -> tuple[list[list[int]], dict[str, int]]:
    """Return the tokens of each prompt and the KV transfer counts from a new engine."""
    with LLM(str(model), **SMALL, **settings) as llm:
        results = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        stats = llm._core.metrics.kv_transfer
    # The engine has been closed, so all saves are complete.
    return [result.token_ids for result in results], stats.as_dict() if stats is not None else {}


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_seen_before_a_restart_are_not_computed_after_it(tmp_path: Path, ahead: bool) -> None:
    model = write_checkpoint(tmp_path / "model")
    plain, _ = generate(model)
    kv = str(tmp_path / "kv")
    first, counts = generate(model, kv_cache_dir=kv, async_scheduling=ahead)
    assert first == plain and counts["blocks_saved"] > 0
    # The location of the checkpoint does not matter, only its content.
    second, counts = generate(model.rename(tmp_path / "elsewhere"), kv_cache_dir=kv, async_scheduling=ahead)
    assert second == plain
    # The first 48 tokens of both prompts are equal. A prompt of one block or less is not stored.
    assert counts["prompt_tokens_store"] + counts["prompt_tokens_local"] == 96 + 48
    assert counts["prompt_tokens_computed"] == 4 + 12 + 3
    other = write_checkpoint(tmp_path / "other", config={"rope_theta": 5000.0})
    _, counts = generate(other, kv_cache_dir=kv)
    assert counts["prompt_tokens_store"] == counts["blocks_loaded"] == 0


def test_settings_that_cannot_work_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not JSON"):  # raised before the model is looked up
        build_engine(EngineArgs(model="no/such-model", kv_transfer_config="{"))
    model = str(write_checkpoint(tmp_path / "model"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-cache-dir.*is not a directory"):
        LLM(model, kv_cache_dir=str(tmp_path / "file"), **SMALL)
    with pytest.raises(ConfigError, match="max_size"):
        LLM(model, kv_cache_dir=str(tmp_path / "kv"), kv_cache_dir_size=1000, **SMALL)


def test_an_engine_that_cannot_be_built_closes_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RecursionError

    monkeypatch.setattr(build, "Tokenizer", fail)
    before = set(threading.enumerate())
    with pytest.raises(ModelLoadError, match="control tokens"):
        LLM(str(write_checkpoint(tmp_path / "model")), kv_cache_dir=str(tmp_path / "kv"), **SMALL)
    wait_until(
        lambda: not any(t.name.startswith("kv-") for t in {*threading.enumerate()} - before), "its threads to end"
    )


def test_a_model_without_kv_is_refused_by_the_flag_that_was_given(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", config=configuration("mamba"))
    with pytest.raises(ConfigError, match=r"^--kv-cache-dir .* has no KV, only recurrent state"):
        LLM(str(model), kv_cache_dir=str(tmp_path / "kv"), max_num_batched_tokens=16, max_num_seqs=2)
