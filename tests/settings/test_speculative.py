"""--speculative-config: what it takes, what it refuses, and which flag it names."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from metal_engine.cli.banner import startup_facts
from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import SchedulerConfig, SpeculativeConfig
from metal_engine.settings.fields import settings_of
from metal_engine.settings.resolve import resolve_config
from metal_engine.settings.sources import read_settings
from metal_engine.settings.speculative import speculative_config
from tests.support import speculation
from tools.fixtures.fake_engine import fake_config

GIVEN = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def read(config: Any, **args: Any) -> SpeculativeConfig | None:
    text = config if isinstance(config, str | None) else json.dumps(config)
    return speculative_config(EngineArgs(model="m", speculative_config=text, **args))


def test_values() -> None:
    assert read(None) is None
    assert read(GIVEN) == SpeculativeConfig(**GIVEN)
    assert EngineArgs(model="m", speculative_config=GIVEN) == EngineArgs(  # type: ignore[arg-type]
        model="m", speculative_config=json.dumps(GIVEN)
    )


@pytest.mark.parametrize(
    ("given", "longest", "shortest"), [({}, 5, 5), ({"prompt_lookup_max": 3}, 3, 3), ({"prompt_lookup_min": 2}, 2, 2)]
)
def test_one_length_alone_stands_for_both(given: dict[str, int], longest: int, shortest: int) -> None:
    config = read({"method": "ngram", "num_speculative_tokens": 1, **given})
    assert config is not None and (config.prompt_lookup_max, config.prompt_lookup_min) == (longest, shortest)


def test_a_file_may_have_an_object(tmp_path: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    values = read_settings(settings_of(EngineArgs), {}, {}, file, known=[])
    config = speculative_config(EngineArgs(model="m", **values))
    assert config is not None and config.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("given", "flag", "message"),
    [
        ("{", "--speculative-config", "is not JSON"),
        ("[" * 100_000, "--speculative-config", "is not JSON"),
        ([], "--speculative-config", "must be a JSON object"),
        ({"method": "ngram"}, "--speculative-config", "needs 'num_speculative_tokens'"),
        ({"num_speculative_tokens": 3}, "--speculative-config", "needs 'method'"),
        ({**GIVEN, "method": "eagle"}, "--speculative-config", "'eagle', but the only one is ngram"),
        ({**GIVEN, "method": "draft_model", "model": "m"}, "--speculative-config", "'draft_model', but the only one"),
        ({**GIVEN, "model": "m"}, "--speculative-config", "has no 'model'"),
        ({**GIVEN, "num_speculative_tokens": 0}, None, "at least 1"),
        ({**GIVEN, "num_speculative_tokens": 65}, None, "at most 64"),
        ({**GIVEN, "prompt_lookup_min": 5}, "--speculative-config", "prompt_lookup_min 5 is more than"),
        ({**GIVEN, "prompt_lookup_max": "x"}, None, "whole number"),
    ],
)
def test_refusals_name_the_flag(given: Any, flag: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(given)
    assert "--speculative-config" in str(caught.value)
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
    facts = startup_facts(config, "http://127.0.0.1:1", ("fake",))
    assert facts["states"].endswith(
        "20 slots: 3 for requests, 3 for their states before drafts, the others for checkpoints"
    )


def test_the_banner_says_so() -> None:
    facts = startup_facts(fake_config(speculative=SpeculativeConfig(**GIVEN)), "http://127.0.0.1:1", ("fake",))
    assert facts["speculation"].startswith("ngram: up to 4 tokens")
