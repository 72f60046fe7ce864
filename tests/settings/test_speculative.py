"""Tests --speculative-config: accepted values, rejected values, and the flags in errors."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from typing import Any

import pytest

from metal_engine.cli.banner import startup_rows
from metal_engine.errors import ConfigError
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.config import MARGIN_BYTES, EngineConfig, SchedulerConfig, SpeculativeConfig
from metal_engine.settings.fields import settings_of
from metal_engine.settings.resolve import resolve_config
from metal_engine.settings.sources import read_settings
from metal_engine.settings.speculative import check_draft_model, check_draft_vocabulary, speculative_config
from tests.support import speculation
from tools.fixtures.fake_engine import fake_config

GIVEN = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFT_MODEL = {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}


def read(config: Any, **args: Any) -> SpeculativeConfig | None:
    text = config if isinstance(config, str | None) else json.dumps(config)
    return speculative_config(EngineArgs(model="m", speculative_config=text, **args))


def test_values() -> None:
    assert read(None) is None
    assert read(GIVEN) == SpeculativeConfig(**GIVEN)
    config = read({**DRAFT_MODEL, "revision": "v2"})
    assert config is not None and (config.method, config.model, config.revision) == ("draft_model", "small", "v2")
    assert config.num_speculative_tokens == 3
    assert EngineArgs(model="m", speculative_config=GIVEN) == EngineArgs(  # type: ignore[arg-type]
        model="m", speculative_config=json.dumps(GIVEN)
    )


def test_a_draft_head_has_defaults() -> None:
    config = read({"method": "mtp"})
    assert config is not None and (config.num_speculative_tokens, config.prompt_lookup_min, config.model) == (
        3,
        5,
        None,
    )
    assert read({"method": "mtp", "num_speculative_tokens": 1, "prompt_lookup_max": 4, "model": "head"}) == (
        SpeculativeConfig(
            method="mtp", num_speculative_tokens=1, prompt_lookup_max=4, prompt_lookup_min=4, model="head"
        )
    )


@pytest.mark.parametrize(
    ("given", "longest", "shortest"), [({}, 5, 5), ({"prompt_lookup_max": 3}, 3, 3), ({"prompt_lookup_min": 2}, 2, 2)]
)
def test_one_prompt_lookup_length_sets_both_lengths(given: dict[str, int], longest: int, shortest: int) -> None:
    config = read({"method": "ngram", "num_speculative_tokens": 1, **given})
    assert config is not None and (config.prompt_lookup_max, config.prompt_lookup_min) == (longest, shortest)


def test_a_file_may_have_an_object(tmp_path: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    config = speculative_config(EngineArgs(model="m", **read_settings(settings_of(EngineArgs), {}, {}, file, known=[])))
    assert config is not None and config.num_speculative_tokens == 3


FLAG = "--speculative-config"


@pytest.mark.parametrize(("given", "flag", "message"), [
    ("{", FLAG, "is not JSON"),
    ("[" * 100_000, FLAG, "is not JSON"),
    ([], FLAG, "must be a JSON object"),
    ({"method": "ngram"}, FLAG, "needs 'num_speculative_tokens'"),
    ({"num_speculative_tokens": 3}, FLAG, "needs 'method'"),
    ({**GIVEN, "method": "eagle"}, FLAG, "'eagle'; the methods are ngram, draft_model, mtp"),
    ({**GIVEN, "method": ["ngram"]}, FLAG, "the methods are ngram, draft_model, mtp"),
    ({**GIVEN, "method": "draft_model", "model": "m"}, FLAG, "has the unknown key 'prompt_lookup_max'"),
    ({"method": "draft_model", "num_speculative_tokens": 3}, FLAG, "needs 'model'"),
    ({**DRAFT_MODEL, "model": ""}, FLAG, "needs 'model'"),
    ({**DRAFT_MODEL, "num_speculative_tokens": 0}, None, "at least 1"),
    ({**DRAFT_MODEL, "draft_tensor_parallel_size": 2}, FLAG, "has the unknown key 'draft_tensor_parallel_size'"),
    ({**GIVEN, "model": "m"}, FLAG, "has the unknown key 'model'"),
    ({**GIVEN, "num_speculative_tokens": 0}, None, "at least 1"),
    ({**GIVEN, "num_speculative_tokens": 65}, None, "at most 64"),
    ({**GIVEN, "prompt_lookup_min": 5}, FLAG, "prompt_lookup_min 5 is more than"),
    ({**GIVEN, "prompt_lookup_max": "x"}, None, "whole number"),
])  # fmt: skip
def test_refusals_name_the_flag(given: Any, flag: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(given)
    assert FLAG in str(caught.value)
    assert flag is None or caught.value.flag == flag


def test_steps_may_be_planned_ahead() -> None:
    assert read(GIVEN, async_scheduling=True) == SpeculativeConfig(**GIVEN)


def test_the_largest_step_has_the_rows_of_drafts() -> None:
    config = fake_config()
    model = dataclasses.replace(config.model, num_params=1000)
    measured = []
    args = EngineArgs(
        model="m", speculative_config=json.dumps(GIVEN), num_gpu_blocks_override=64, max_num_seqs=8, block_size=8
    )
    resolved = resolve_config(args, model, config.device, "mlx", lambda *size: measured.append(size) or 0)
    assert resolved.scheduler.speculative == SpeculativeConfig(**GIVEN)
    assert measured == [(resolved.scheduler.max_num_batched_tokens, 40)]


@pytest.mark.parametrize(
    ("max_num_seqs", "num_drafts", "budget", "rows"),
    [(1, 4, 512, 5), (16, 4, 512, 64), (64, 4, 512, 64), (256, 4, 2048, 256), (4, 4, 12, 12), (256, 0, 2048, 256)],
)
def test_rows_that_sample(max_num_seqs: int, num_drafts: int, budget: int, rows: int) -> None:
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=100,
        speculative=speculation.speculative_config(num_drafts) if num_drafts else None,
    )
    assert config.max_sample_rows == rows


def test_the_banner_counts_states_before_drafts() -> None:
    config = fake_config(speculative=SpeculativeConfig(**GIVEN), max_num_seqs=3)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, state_bytes_per_request=1024),
        cache=dataclasses.replace(config.cache, num_state_slots=20),
    )
    assert startup_rows(config, "http://127.0.0.1:1", ("fake",))["states"].endswith(
        "20 slots: 3 for requests, 3 for their states before drafts, the others for checkpoints"
    )


def test_the_banner_shows_the_speculative_method() -> None:
    rows = startup_rows(fake_config(speculative=SpeculativeConfig(**GIVEN)), "http://127.0.0.1:1", ("fake",))
    assert rows["speculation"].startswith("ngram: up to 4 tokens")
    rows = startup_rows(with_draft(fake_config(speculative=read(DRAFT_MODEL))), "http://127.0.0.1:1", ("fake",))
    assert rows["speculation"].startswith("draft_model: up to 3 tokens a request and step, of small (3 M parameters")
    assert "weights 5 MiB, KV cache 14 KiB" in rows["memory"]


def with_draft(config: EngineConfig) -> EngineConfig:
    model = dataclasses.replace(config.model, weight_bytes=3 << 20)
    draft = dataclasses.replace(model, name="small", num_params=3_000_000, weight_bytes=2 << 20, kv_bytes_per_token=6)
    return dataclasses.replace(config, model=model, draft=draft)


def test_a_draft_model_is_in_the_pool_s_size() -> None:
    """Its weights and KV count. On Metal, the memory beside weights and adapters is divided among both models' KV."""
    config = fake_config()
    model = dataclasses.replace(config.model, num_params=1000, weight_bytes=GIB, kv_bytes_per_token=3000)
    model = dataclasses.replace(model, adapter_bytes=GIB // 4)
    draft = dataclasses.replace(
        model, adapter_bytes=0, weight_bytes=GIB // 2, kv_bytes_per_token=1000, max_position_embeddings=77
    )
    device = dataclasses.replace(config.device, kind="metal", memory_bytes=4 * GIB)
    args = EngineArgs(model="m", speculative_config=json.dumps(DRAFT_MODEL), gpu_memory_utilization=1.0, block_size=16)
    resolved = resolve_config(args, model, device, "mlx", draft=draft)
    assert resolved.cache.num_blocks == (4 * GIB - 7 * GIB // 4 - MARGIN_BYTES) // (16 * 4000)
    assert resolved.kv_bytes == resolved.cache.num_tokens * 4000
    assert resolved.peak_bytes == 7 * GIB // 4 + resolved.kv_bytes
    assert resolved.scheduler.speculative is not None and resolved.scheduler.speculative.max_draft_len == 77


@pytest.mark.parametrize(("draft", "message"), [
    ({"a": 0, "b": 1, "c": 2}, None),
    ({"a": 0, "b": 1}, None),  # tokens of only one model
    ({"a": 0, "b": 1, "c": 2, "<pad>": 3, "<pad2>": 4}, None),
    ({"a": 0, "c": 1, "b": 2}, "token 1 is 'c', not 'b'. Differing tokens: 2"),
    ({"a": 0, "b": 1, "<tool>": 2}, "token 2 is '<tool>', not 'c'. Differing tokens: 1"),
])  # fmt: skip
def test_vocabularies_are_compared_by_token(draft: dict[str, int], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message) as caught:
        check_draft_vocabulary("small", draft, "large", {"a": 0, "b": 1, "c": 2})
    assert message is None or caught.value.flag == "--speculative-config"


def test_no_recurrent_draft_models() -> None:
    draft = dataclasses.replace(fake_config().model, name="small", state_bytes_per_request=1024)
    with pytest.raises(ConfigError, match="has the model small, whose recurrent states") as caught:
        check_draft_model(draft)
    assert caught.value.flag == "--speculative-config"
