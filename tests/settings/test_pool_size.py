"""Tests the memory for blocks of the KV cache and slots of recurrent states, and ``--kv-cache-dtype`` end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.cli.banner import startup_rows
from metal_engine.errors import ConfigError
from metal_engine.llm import LLM
from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.config import IN_FLIGHT_STATES, DeviceInfo, EngineConfig, ModelInfo
from metal_engine.settings.resolve import resolve_config
from tests.support.checkpoint_files import write_checkpoint

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


def test_larger_recurrent_states_reduce_max_num_seqs() -> None:
    """Larger recurrent states reduce ``max_num_seqs``: 49 MiB, as in Qwen3.5-4B, 147 MiB, and 1/16 MiB."""
    assert 10 < resolved(state_bytes=49 * MIB).scheduler.max_num_seqs < 30
    assert resolved(state_bytes=147 * MIB).scheduler.max_num_seqs < 10
    assert resolved(state_bytes=MIB // 16).scheduler.max_num_seqs == 256


@pytest.mark.parametrize("state_bytes", [MIB, 18 * MIB, 147 * MIB])
@pytest.mark.parametrize("kv_bytes", [0, 1024, 128 << 10])
def test_recurrent_states_and_kv_cache_fit_into_gpu_memory(state_bytes: int, kv_bytes: int) -> None:
    config = resolved(state_bytes=state_bytes, kv_bytes=kv_bytes)
    assert config.peak_bytes <= 16 * GIB * 0.9
    num_slots = config.cache.num_state_slots
    assert num_slots > 3 * config.scheduler.max_num_seqs
    assert config.state_bytes == (num_slots + 1 + IN_FLIGHT_STATES * config.scheduler.max_num_seqs) * state_bytes
    assert config.cache.num_tokens >= config.scheduler.max_model_len


def test_without_prefix_caching_there_are_no_checkpoints() -> None:
    assert resolved(state_bytes=18 * MIB, enable_prefix_caching=False, max_num_seqs=8).cache.num_state_slots == 8


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


def test_the_padding_block_comes_out_of_kv_cache_memory() -> None:
    given: dict[str, Any] = {"state_bytes": 0, "kv_bytes": 128 << 10, "kv_cache_memory_bytes": 512 * MIB}
    built, replayed = (resolved(**given, replay_decodes=choice) for choice in ("never", "auto"))
    assert (built.replay, built.cache.num_padding_blocks) == ("off", 0)
    assert (replayed.replay, replayed.cache.num_padding_blocks) == ("on", 1)
    assert replayed.cache.num_blocks == built.cache.num_blocks - 1
    assert replayed.kv_bytes == built.kv_bytes <= 512 * MIB


def test_num_gpu_blocks_override_excludes_the_padding_block() -> None:
    config = resolved(state_bytes=0, num_gpu_blocks_override=600)
    assert config.cache.num_blocks == 600
    assert config.kv_bytes == 601 * config.cache.block_size * 1024


def test_one_block_is_too_few_if_replay_needs_a_padding_block() -> None:
    given: dict[str, Any] = {"state_bytes": 0, "kv_bytes": MIB, "kv_cache_memory_bytes": 17 * MIB}
    assert resolved(**given, replay_decodes="never").cache.num_blocks == 1
    with pytest.raises(ConfigError, match=r"no memory for the KV cache: one block .* \(and one is for padding\)"):
        resolved(**given)


@pytest.mark.parametrize(("args", "replay"), [
    ({"tensor_parallel_size": 2, "replay_decodes": "always"}, "off: several ranks share the model"),
    ({"replay_decodes": "never"}, "off"),
])  # fmt: skip
def test_replay_is_off_with_ranks_or_replay_decodes_never(args: dict[str, Any], replay: str) -> None:
    config = resolved(state_bytes=0, **args)
    assert (config.replay, config.cache.num_padding_blocks) == (replay, 0)


@pytest.mark.parametrize("state_bytes", [0, MIB], ids=["attention", "recurrent"])
def test_replay_reserves_one_padding_block(state_bytes: int) -> None:
    config = resolved(state_bytes=state_bytes)
    assert (config.replay, config.cache.num_padding_blocks) == ("on", 1)


def test_cpu_steps_are_replayed_only_with_replay_decodes_always() -> None:
    auto, never, always = (
        resolved(state_bytes=0, kind="cpu", replay_decodes=choice) for choice in ("auto", "never", "always")
    )
    assert auto == never and (auto.replay, auto.cache.num_padding_blocks) == ("off", 0)
    assert (always.replay, always.cache.num_padding_blocks) == ("on", 1)


SMALL: dict[str, object] = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 256, "max_num_batched_tokens": 64}


@pytest.mark.parametrize(("kv_cache_dtype", "bytes_of_64"), [("auto", 256), ("int8", 72), ("int4", 40)])
def test_a_quantized_kv_cache_holds_more_tokens(tmp_path: Path, kv_cache_dtype: str, bytes_of_64: int) -> None:
    model = write_checkpoint(tmp_path / "model", config={"head_dim": 64})
    with LLM(str(model), kv_cache_dtype=kv_cache_dtype, **SMALL) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        assert len(output.token_ids) == 4
        config = llm.config
    num_heads = config.model.num_layers * 2 * 2  # two of K and two of V in each
    assert config.model.kv_bytes_per_token == num_heads * bytes_of_64
    assert config.cache.num_tokens == (1 << 20) // (16 * num_heads * bytes_of_64) * 16
    assert config.model.kv_dtype == ("float32" if kv_cache_dtype == "auto" else kv_cache_dtype)
    shown = startup_rows(config, "", ("m",))["KV cache"]
    if kv_cache_dtype == "auto":
        assert config.num_tokens_unquantized is None and "unquantized" not in shown
    else:
        more = config.cache.num_tokens - (1 << 20) // (16 * num_heads * 256) * 16
        assert f"in {kv_cache_dtype} ({more:,} more than unquantized)" in shown


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_num_tokens_unquantized_equals_the_tokens_of_an_unquantized_cache(tmp_path: Path, kv_cache_dtype: str) -> None:
    """Also if the rest after the quantized blocks would complete one more unquantized block."""
    model = write_checkpoint(tmp_path / "model", config={"head_dim": 64})
    block_bytes = 16 * 2 * 2 * 2 * 256  # tokens, layers, K and V, heads
    numbers = {}
    for dtype in ("auto", kv_cache_dtype):
        engine = build_engine(
            EngineArgs(model=str(model), kv_cache_dtype=dtype, **{**SMALL, "kv_cache_memory_bytes": 37 * block_bytes})
        )
        config = engine.core.config
        numbers[dtype] = config.cache.num_tokens
        unquantized, rest = config.num_tokens_unquantized, 37 * block_bytes - config.kv_bytes
        engine.close()
    assert rest > 0
    assert unquantized == numbers["auto"] == 37 * 16


def test_heads_that_no_group_divides_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path / "model", config={"head_dim": 24})
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype int8 .* \(head_dim 24\); choose auto") as refused:
        build_engine(EngineArgs(model=str(model), kv_cache_dtype="int8"))
    assert refused.value.flag == "--kv-cache-dtype"


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        EngineArgs(model="m", kv_cache_dtype="fp8")
