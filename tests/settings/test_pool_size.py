"""Tests the memory for blocks of the KV cache and slots of recurrent states."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.errors import ConfigError
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.config import IN_FLIGHT_STATES, DeviceInfo, EngineConfig, ModelInfo
from metal_engine.settings.resolve import resolve_config

MIB = 1 << 20


def resolved(
    *, state_bytes: int, kv_bytes: int = 1024, memory: int = 16 * GIB, kind: str = "metal", **args: Any
) -> EngineConfig:
    model = ModelInfo(
        name="model",
        model_type="qwen3_5",
        dtype="bfloat16",
        vocab_size=1000,
        num_layers=24,
        num_params=10**9,
        weight_bytes=2 * GIB,
        kv_bytes_per_token=kv_bytes,
        state_bytes_per_request=state_bytes,
        max_position_embeddings=8192,
    )
    device = DeviceInfo(kind=kind, name="GPU", compute="GPU", memory_bytes=memory)
    return resolve_config(EngineArgs(model="model", **args), model, device, "mlx" if kind == "cpu" else "metal")


def test_without_states_there_are_no_slots() -> None:
    config = resolved(state_bytes=0)
    assert config.cache.num_state_slots == 0 and config.state_bytes == 0
    assert config.scheduler.max_num_seqs == 256


def test_what_runs_at_once_comes_out_of_memory() -> None:
    """Larger recurrent states reduce ``max_num_seqs``: 49 MiB, as in Qwen3.5-4B, 147 MiB, and 1/16 MiB."""
    config = resolved(state_bytes=49 * MIB)
    assert 10 < config.scheduler.max_num_seqs < 30
    assert resolved(state_bytes=147 * MIB).scheduler.max_num_seqs < 10
    assert resolved(state_bytes=MIB // 16).scheduler.max_num_seqs == 256


@pytest.mark.parametrize("state_bytes", [MIB, 18 * MIB, 147 * MIB])
@pytest.mark.parametrize("kv_bytes", [0, 1024, 128 << 10])
def test_all_of_it_fits(state_bytes: int, kv_bytes: int) -> None:
    config = resolved(state_bytes=state_bytes, kv_bytes=kv_bytes)
    assert config.peak_bytes <= 16 * GIB * 0.9
    num_slots = config.cache.num_state_slots
    assert num_slots > 3 * config.scheduler.max_num_seqs
    running = num_slots + 1 + IN_FLIGHT_STATES * config.scheduler.max_num_seqs
    assert config.state_bytes == running * state_bytes
    assert config.cache.num_tokens >= config.scheduler.max_model_len


def test_without_prefix_caching_there_are_no_checkpoints() -> None:
    config = resolved(state_bytes=18 * MIB, enable_prefix_caching=False, max_num_seqs=8)
    assert config.cache.num_state_slots == 8


@pytest.mark.parametrize(("caching", "num_slots"), [(False, 2), (True, 4)])
def test_drafts_have_a_slot_more_for_each_request(caching: bool, num_slots: int) -> None:
    speculative = '{"method": "ngram", "num_speculative_tokens": 4}'
    given = {"state_bytes": 18 * MIB, "enable_prefix_caching": caching, "memory": 8 * GIB, "max_num_seqs": 8}
    plain, drafting = resolved(**given), resolved(**given, speculative_config=speculative)
    assert drafting.cache.num_state_slots - plain.cache.num_state_slots == 8
    assert drafting.cache.num_state_slots >= 8 * num_slots
    assert drafting.peak_bytes <= 8 * GIB * 0.9
    # If --max-num-seqs is not given, fewer requests run, because the states before drafts take memory.
    many = {"state_bytes": 49 * MIB, "enable_prefix_caching": caching}
    assert (
        resolved(**many, speculative_config=speculative).scheduler.max_num_seqs
        < resolved(**many).scheduler.max_num_seqs
    )


def test_a_model_without_kv_has_blocks_for_all_that_run() -> None:
    config = resolved(state_bytes=5 * MIB, kv_bytes=0, max_num_seqs=4)
    assert config.kv_bytes == 0
    assert config.scheduler.max_model_len == 8192
    assert config.cache.num_tokens >= 4 * 8192


def test_too_many_requests_are_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"64 concurrent requests take 55\.3 GiB") as refusal:
        resolved(state_bytes=147 * MIB, max_num_seqs=64)
    assert refusal.value.flag == "--max-num-seqs"
    assert "147 MiB each" in str(refusal.value) and "lower --max-num-seqs" in str(refusal.value)


# --- the block that replayed steps pad into ---


def test_padding_has_a_block_of_the_same_memory() -> None:
    given: dict[str, Any] = {"state_bytes": 0, "kv_bytes": 128 << 10, "kv_cache_memory_bytes": 512 * MIB}
    built, replayed = (resolved(**given, replay_decodes=choice) for choice in ("never", "auto"))
    assert (built.replay, built.cache.num_padding_blocks) == ("off", 0)
    assert (replayed.replay, replayed.cache.num_padding_blocks) == ("on", 1)
    assert replayed.cache.num_blocks == built.cache.num_blocks - 1
    assert replayed.kv_bytes == built.kv_bytes <= 512 * MIB


def test_a_number_of_blocks_that_is_given_is_of_requests() -> None:
    config = resolved(state_bytes=0, num_gpu_blocks_override=600)
    assert config.cache.num_blocks == 600
    assert config.kv_bytes == 601 * config.cache.block_size * 1024


def test_one_block_is_too_little_where_one_is_for_padding() -> None:
    given: dict[str, Any] = {"state_bytes": 0, "kv_bytes": MIB, "kv_cache_memory_bytes": 17 * MIB}
    assert resolved(**given, replay_decodes="never").cache.num_blocks == 1
    with pytest.raises(ConfigError, match=r"no memory for the KV cache: one block .* \(and one is for padding\)"):
        resolved(**given)


@pytest.mark.parametrize(
    ("args", "replay"),
    [
        ({"tensor_parallel_size": 2, "replay_decodes": "always"}, "off: several ranks share the model"),
        ({"replay_decodes": "never"}, "off"),
    ],
)
def test_where_nothing_is_replayed(args: dict[str, Any], replay: str) -> None:
    config = resolved(state_bytes=0, **args)
    assert (config.replay, config.cache.num_padding_blocks) == (replay, 0)


@pytest.mark.parametrize("state_bytes", [0, MIB], ids=["attention", "recurrent"])
def test_where_steps_are_replayed_one_block_is_for_padding(state_bytes: int) -> None:
    config = resolved(state_bytes=state_bytes)
    assert (config.replay, config.cache.num_padding_blocks) == ("on", 1)


def test_on_a_cpu_nothing_is_replayed_unless_asked_for() -> None:
    auto, never, always = (
        resolved(state_bytes=0, kind="cpu", replay_decodes=choice) for choice in ("auto", "never", "always")
    )
    assert auto == never and (auto.replay, auto.cache.num_padding_blocks) == ("off", 0)
    assert (always.replay, always.cache.num_padding_blocks) == ("on", 1)
