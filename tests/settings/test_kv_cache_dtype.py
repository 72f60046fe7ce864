"""Tests ``--kv-cache-dtype`` from end to end: the cache, the start-up block, and errors before weights are read."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from metal_engine.cli.banner import startup_rows
from metal_engine.errors import ConfigError
from metal_engine.llm import LLM
from metal_engine.loading.build import build_engine
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from tests.support.checkpoint_files import write_checkpoint

SMALL: dict[str, object] = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 256, "max_num_batched_tokens": 64}


@pytest.mark.parametrize(("kv_cache_dtype", "bytes_of_64"), [("auto", 256), ("int8", 72), ("int4", 40)])
def test_the_pool_holds_more(tmp_path: Path, kv_cache_dtype: str, bytes_of_64: int) -> None:
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
def test_tokens_more_are_those_of_the_same_memory(tmp_path: Path, kv_cache_dtype: str) -> None:
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
