"""LoRA adapters of real engines: from settings, for checkpoints on disk, and through the offline API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model, load_model

from metal_engine import LLM, LoRARequest, SamplingParams
from metal_engine.checkpoints.gguf.config import interleaved_modules
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.cli.banner import startup_rows
from metal_engine.errors import ConfigError
from metal_engine.lora.files import open_adapter
from metal_engine.lora.layers import AdapterRows
from metal_engine.models.lora_targets import adapter_targets
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.lora_args import LoRAModule
from tests.support import adapters
from tests.support.checkpoint_files import write_checkpoint
from tests.support.gguf_files import last_logits, mlx_lm_model
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.gguf_checkpoints import write_gguf
from tools.fixtures.hf_checkpoints import CONFIGS, write_hf
from tools.fixtures.lora_adapters import products_for, write_peft

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = list(range(20, 50))
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def own_model(checkpoint: Path) -> nn.Module:
    model, config = load_model(checkpoint)
    return dequantize_model(model) if config.get("quantization") else model


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return adapter folders by name. "both" is a PEFT adapter in mlx-lm's format, as a reference."""
    base = tmp_path_factory.mktemp("adapters")
    model = own_model(checkpoint)
    first = adapters.products(model, adapters.ALL, 2, seed=1)
    second = adapters.products(model, adapters.ATTENTION, 3, seed=2)
    return {
        "a": adapters.write_mlx_lm(base / "a", first),
        "b": write_peft(base / "b", second, alpha=4.5),
        "both": adapters.write_mlx_lm(base / "both", second, scale=1.5),
    }


def check(checkpoint: Path, folder: Path | None, tokens: list[int]) -> None:
    model = adapters.mlx_lms(own_model(checkpoint), folder)
    assert compare_outputs(model, PROMPT, adapters.mlx_lm_answer(model, PROMPT, NUM_TOKENS), tokens).equal


@pytest.mark.parametrize("bits", [None, 4], ids=["plain", "quantized"])
def test_lora_modules(bits: int | None, folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, bits=bits)
    modules = f"a={folders['a']}", json.dumps({"name": "b", "path": str(folders["b"]), "base_model_name": "org/b"})
    with LLM(str(checkpoint), lora_modules=modules, **SMALL) as llm:
        requests = [LoRARequest("a"), None, LoRARequest("b", 2)]
        results = llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False, lora_request=requests)
        check(checkpoint, folders["a"], results[0].token_ids)
        check(checkpoint, None, results[1].token_ids)
        check(checkpoint, folders["both"], results[2].token_ids)
        (one,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=LoRARequest("a"))
        assert one.token_ids == results[0].token_ids
        # Maximum memory for adapters: the largest rank for all adapted layers.
        floats = 3 * 3 * 2 * sum(64 + n for n in (64, 32, 32, 64, 128, 128, 128))
        assert llm.config.model.adapter_bytes == 4 * floats
        assert llm.config.peak_bytes > llm.config.model.weight_bytes + 4 * floats
        assert "adapters" in startup_rows(llm.config, "", ("m",))["memory"]
        with pytest.raises(ValueError, match="no LoRA adapter 'c' is loaded"):
            llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("c"))
        with pytest.raises(ValueError, match="1 prompts but 2 lora_requests"):
            llm.generate([PROMPT], GREEDY, lora_request=[None, None])


def test_a_draft_model_beside_adapters(checkpoint: Path, folders: dict[str, Path]) -> None:
    speculative = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 2}
    with LLM(str(checkpoint), lora_modules={"a": folders["a"]}, speculative_config=speculative, **SMALL) as llm:
        results = llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False, lora_request=[LoRARequest("a"), None])
        check(checkpoint, folders["a"], results[0].token_ids)
        check(checkpoint, None, results[1].token_ids)
        config = llm.config
        assert config.draft is not None and config.draft.adapter_bytes == 0 < config.model.adapter_bytes
        weights = config.model.weight_bytes + config.draft.weight_bytes + config.model.adapter_bytes
        assert config.peak_bytes == weights + config.kv_bytes + config.step_bytes


def test_the_first_request_with_an_adapter_loads_the_adapter(checkpoint: Path, folders: dict[str, Path]) -> None:
    """As with vLLM's LLM, the first request with an adapter loads it."""
    with LLM(str(checkpoint), enable_lora=True, max_loras=1, max_lora_rank=4, **SMALL) as llm:
        for name, oracle in (("a", "a"), ("b", "both")):
            request = LoRARequest(name, 1, str(folders[name]))
            for _ in range(2):
                (result,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=request)
                check(checkpoint, folders[oracle], result.token_ids)
            assert llm.unload_lora_adapter(name) and not llm.unload_lora_adapter(name)


def test_a_kv_store_separates_the_kv_of_adapters_and_base_model(
    checkpoint: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """After a restart, an adapter finds its own KV in any slot. The base model and other adapters do not."""

    def external(names: list[str | None], modules: dict[str, Path]) -> list[int]:
        with LLM(str(checkpoint), lora_modules=modules, kv_cache_dir=str(tmp_path / "kv"), **SMALL) as llm:
            requests = [None if name is None else LoRARequest(name) for name in names]
            outputs = [list(llm.stream(PROMPT, GREEDY, lora_request=request)) for request in requests]
            return [one[0].num_external_tokens for one in outputs]

    both = {name: folders[name] for name in ("a", "b")}
    assert external(["a"], both) == [0]
    assert external(["b", None, "a"], {"b": both["b"], "a": both["a"]}) == [0, 0, 16]
    assert external(["a"], {"a": both["b"]}) == [0]  # other weights under the same name


def test_adapter_requests_are_rejected_if_lora_is_disabled(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SMALL) as llm:
        assert llm.config.model.adapter_bytes == 0
        with pytest.raises(ValueError, match="enable_lora=True or lora_modules"):
            llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("a"))


@pytest.mark.parametrize(
    ("settings", "flag", "problem"),
    [
        ({"lora_modules": ("a",)}, "--lora-modules", "must be name=path"),
        ({"lora_modules": ("=x",)}, "--lora-modules", "must be name=path"),
        ({"lora_modules": ("{",)}, "--lora-modules", "is not JSON"),
        ({"lora_modules": ('{"name": "x"}',)}, "--lora-modules", "needs 'path'"),
        ({"lora_modules": ('{"name": "x", "path": "y", "z": 1}',)}, "--lora-modules", "has the unknown key 'z'"),
        ({"lora_modules": ("a=x", "a=y")}, "--lora-modules", "contains a name twice"),
        ({"lora_modules": ("a=x", "b=y"), "max_loras": 1}, "--max-loras", "is less than the 2"),
        ({"max_loras": 0}, "--max-loras", "must be at least 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], flag: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        EngineArgs(model="demo", **settings)
    assert raised.value.flag == flag


def test_settings() -> None:
    args = EngineArgs(model="m", lora_modules=("a=x=y", '{"name": "b", "path": "p", "base_model_name": "q"}'))
    assert args.adapters == [LoRAModule("a", "x=y"), LoRAModule("b", "p", "q")]
    assert args.has_adapters and args.num_slots() == 2 and args.largest_rank([4, 64]) == 64
    args = EngineArgs(model="m", lora_modules={"a": "x"}, enable_lora=True)
    assert args.adapters == [LoRAModule("a", "x")] and args.num_slots() == 8 and args.largest_rank([4]) == 16
    assert not EngineArgs(model="m").has_adapters
    with pytest.raises(ConfigError, match="--max-lora-rank 8 is less than the rank 64"):
        EngineArgs(model="m", max_lora_rank=8).largest_rank([4, 64])


@pytest.mark.parametrize(
    ("settings", "flag", "problem"),
    [
        ({"lora_modules": ("a=/nothing",)}, "--lora-modules", "/nothing is not a directory"),
        ({"lora_modules": ("a={a}",), "max_lora_rank": 1}, "--max-lora-rank", "1 is less than the rank 2"),
    ],
)
def test_adapters_that_cannot_be_loaded(
    checkpoint: Path, folders: dict[str, Path], settings: dict[str, Any], flag: str, problem: str
) -> None:
    settings["lora_modules"] = tuple(one.format(a=folders["a"]) for one in settings["lora_modules"])
    with pytest.raises(ConfigError, match=problem) as raised:
        LLM(str(checkpoint), **settings, **SMALL)
    assert raised.value.flag == flag and "\n" not in str(raised.value)


def test_gguf_files_of_llama(tmp_path: Path) -> None:
    """The outputs of q and k are ordered differently than in the models on which adapters are trained."""
    config = CONFIGS["llama"]
    model, loaded = load_gguf_model(write_gguf(tmp_path / "m.gguf", config), mx.float32, dequantize=True)
    paged = PagedModel(model)
    targets = adapter_targets(paged, interleaved_modules(loaded))
    assert len(targets.interleaved) == 2 * config["num_hidden_layers"]
    folder = adapters.write_mlx_lm(tmp_path / "a", products_for(targets.shapes, rank=2, seed=3))
    opened = open_adapter(folder, targets)
    layers = paged.enable_lora(targets.shapes, 1, 2)
    assert sum(layers.set_weights(1, {name: opened.weights(name) for name in opened.modules}))
    # All rows in the adapter of slot 1.
    paged._step.adapters = AdapterRows(np.ones(len(PROMPT), np.int32), is_sorted=False)
    paged._step.logits_indices = None
    found = last_logits(paged.model, PROMPT)
    reference = mlx_lm_model(write_hf(tmp_path / "hf", config))
    plain = last_logits(reference, PROMPT)
    expected = last_logits(adapters.mlx_lms(reference, folder), PROMPT)
    assert np.abs(found - expected).max() < 1e-3 < np.abs(plain - expected).max()
