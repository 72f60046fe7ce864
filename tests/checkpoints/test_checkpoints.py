"""Checkpoints in the forms in which they are published, and the loaded models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.loader import LoadedModel, load
from metal_engine.checkpoints.requirements import CheckpointRequirements
from metal_engine.errors import ModelLoadError
from metal_engine.llm import LLM
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.text.tokenizer import Tokenizer
from tests.checkpoints.damage import CPU
from tests.support.checkpoint_files import (
    CHAT_TEMPLATE,
    CONFIG,
    EOS,
    EXPERTS,
    VOCAB_SIZE,
    write_checkpoint,
    write_tokenizer,
)
from tests.support.memory import settled_memory
from tools.fixtures.architectures import configuration
from tools.fixtures.tiny_models import tiny_model

# Clearing a KV cache of the default size would take most of a test's time.
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 1024}
METAL = replace(CPU, kind="metal")
# Size in bytes of the arrays that models have besides weights.
SMALL_ARRAYS = 1 << 14
# Floating-point formats: weights of a few bits with one scale for each group.
FLOAT_MODES = ({"bits": 4, "mode": "mxfp4"}, {"bits": 8, "mode": "mxfp8"}, {"bits": 4, "mode": "nvfp4"})
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20)


def load_args(folder: Path, device: DeviceInfo = CPU, **args: Any) -> LoadedModel:
    """Load a checkpoint. The size of its weights equals the size that was reported before."""
    found: list[CheckpointRequirements] = []
    loaded = load(EngineArgs(model=str(folder), **args), device, claim=found.append)
    assert found[0].weight_bytes == sum(array.nbytes for array in _arrays(loaded.model))
    return loaded


def logits_of(model: Any) -> np.ndarray:
    return np.array(model(mx.array(TOKENS)[None], cache=make_prompt_cache(model))[0].astype(mx.float32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_shards": 3},
        {"config": {"tie_word_embeddings": False}},
        {"bits": 4},
        {"bits": 6},
        {"bits": 8},
        {"bits": 4, "mixed_bits": True},
        {"bits": 4, "num_shards": 2, "config": {"tie_word_embeddings": False}},
        {"dtype": mx.bfloat16},
        *({**mode, "dtype": mx.bfloat16} for mode in FLOAT_MODES),
        {"bits": 4, "mode": "nvfp4", "config": EXPERTS},
    ],
    ids=lambda options: "-".join(str(value) for name, value in options.items() if name != "config") or "plain",
)
def test_loads_as_mlx_lm_does(tmp_path: Path, options: dict[str, Any]) -> None:
    """On a CPU, everything is float32 and dequantized. The logits equal those of mlx-lm's own loading."""
    folder = write_checkpoint(tmp_path, **options)
    loaded = load_args(folder)
    assert {a.dtype for a in _arrays(loaded.model) if mx.issubdtype(a.dtype, mx.floating)} == {mx.float32}
    assert not any(a.dtype == mx.uint32 for a in _arrays(loaded.model))
    own = load_model(folder)[0]
    own.set_dtype(mx.float32)
    expected, got = logits_of(own), logits_of(loaded.model)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    check_paged_model(PagedModel(loaded.model), PortableBackend(), VOCAB_SIZE)


def test_a_folder_whose_name_is_a_pattern_for_mlx_lm(tmp_path: Path) -> None:
    load_args(write_checkpoint(tmp_path / "models [old] *?"))


def test_size_of_quantized_weights_in_another_dtype_is_known_before_loading(tmp_path: Path) -> None:
    load_args(write_checkpoint(tmp_path, bits=6), dtype="bfloat16")


def test_half_precision_keeps_the_weights_that_mlx_lm_needs_in_float32(tmp_path: Path) -> None:
    config = configuration("glm4_moe") | {"vocab_size": VOCAB_SIZE, "eos_token_id": VOCAB_SIZE - 1}
    folder = write_checkpoint(tmp_path / "routers", config=config)
    for dtype, kept in (("bfloat16", mx.float32), ("float16", mx.float32), ("float32", mx.float32)):
        arrays = tree_flatten(load(EngineArgs(model=str(folder), dtype=dtype), CPU).model.parameters())
        biases = {array.dtype for name, array in arrays if name.endswith("e_score_correction_bias")}
        others = {array.dtype for name, array in arrays if not name.endswith("e_score_correction_bias")}
        assert (biases, others) == ({kept}, {getattr(mx, dtype)})
    options: dict[str, Any] = {"bits": 4, "mode": "nvfp4", "global_scale": True, "config": EXPERTS}
    folder = write_checkpoint(tmp_path / "scales", **options)
    arrays = tree_flatten(load(EngineArgs(model=str(folder), dtype="bfloat16"), METAL).model.parameters())
    assert {array.dtype for name, array in arrays if name.endswith("global_scale")} == {mx.float32}


def test_nvfp4_s_scale_of_each_expert_is_kept(tmp_path: Path) -> None:
    """mlx-lm's own dequantization ignores these scales, and its quantized products with them need a GPU."""
    folder = write_checkpoint(tmp_path, bits=4, mode="nvfp4", global_scale=True, config=EXPERTS)
    loaded, original = load_args(folder).model, tiny_model(**(CONFIG | EXPERTS))
    for name in ("gate_proj", "up_proj", "down_proj"):
        own, expected = (getattr(m.model.layers[0].mlp.switch_mlp, name).weight for m in (loaded, original))
        assert mx.linalg.norm(own - expected) < 0.15 * mx.linalg.norm(expected)
    check_paged_model(PagedModel(loaded), PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": 4, "mixed_bits": True}, *FLOAT_MODES], ids=str)
def test_on_metal_quantized_weights_stay_quantized(tmp_path: Path, options: dict[str, Any]) -> None:
    loaded = load_args(write_checkpoint(tmp_path, dtype=mx.float16, **options), METAL)
    types = {a.dtype for a in _arrays(loaded.model)}
    assert types == {mx.uint32, mx.float16} | ({mx.uint8} if "mode" in options else set())
    expected = logits_of(load_model(tmp_path)[0])
    np.testing.assert_allclose(logits_of(loaded.model), expected, rtol=0, atol=1e-6)
    check_paged_model(PagedModel(loaded.model), PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_memory_for_stacking_experts_is_known_before_loading(tmp_path: Path, dtype: mx.Dtype) -> None:
    """Separately stored experts need memory besides the matrix that they are stacked to, one matrix at a time."""
    config = {**EXPERTS, "num_hidden_layers": 6, "num_experts": 16, "moe_intermediate_size": 256}
    write_checkpoint(tmp_path, config=config, dtype=dtype, single_experts=True)
    found: list[CheckpointRequirements] = []
    held = settled_memory()
    loaded = load(EngineArgs(model=str(tmp_path)), CPU, claim=found.append)
    (facts,) = found
    weights = sum(array.nbytes for array in _arrays(loaded.model))
    assert facts.weight_bytes == weights
    stack = 16 * 256 * 64 * dtype.size
    assert facts.reading_bytes == (stack if dtype == mx.float32 else weights // 2)
    taken = mx.get_peak_memory() - held
    assert weights < taken <= weights + facts.reading_bytes + SMALL_ARRAYS, (taken, weights, facts)


def _arrays(model: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(model.parameters())]


# --- generation_config.json ---


def test_every_eos_id_ends_generation(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config={"eos_token_id": [5, 6]})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    loaded = load_args(folder)
    assert Tokenizer(loaded.tokenizer, loaded.eos_token_ids).eos_token_ids == {5, 6, 7, 8, VOCAB_SIZE - 1}


def test_eos_ids_stop_a_generation(tmp_path: Path) -> None:
    """A token of an unlimited generation is made an end-of-sequence id, and then ends the generation."""
    folder = write_checkpoint(tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), **SMALL) as llm:
        free = llm.generate("hello", greedy, use_tqdm=False)[0].token_ids
    stop_at = free[3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE - 2, stop_at]}))
    with LLM(str(folder), **SMALL) as llm:
        result = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)[0]
    assert result.finish_reason == "stop" and result.token_ids == free[: free.index(stop_at) + 1]


def test_default_sampling_is_the_checkpoints(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert load_args(folder).default_sampling == expected
    assert load_args(folder, generation_config="vllm").default_sampling == {}
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"min_p": 0.1}))
    assert load_args(folder, generation_config=str(other)).default_sampling == {"min_p": 0.1}
    # All end-of-sequence ids count, with any sampling defaults.
    assert 1 in load_args(folder, generation_config="vllm").eos_token_ids
    with LLM(str(folder), **SMALL) as llm:
        assert llm.default_sampling_params == SamplingParams(**expected)  # type: ignore[arg-type]


def test_senseless_defaults_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path)
    senseless = {"temperature": -1, "top_p": "high", "top_k": 5, "repetition_penalty": 0}
    (folder / "generation_config.json").write_text(json.dumps(senseless))
    assert load_args(folder).default_sampling == {"top_k": 5}
    for name in ("temperature", "top_p", "repetition_penalty"):
        assert name in caplog.text


# --- tokenizers and chat templates ---

MESSAGES = [{"role": "user", "content": "hi"}]
OTHER_TEMPLATE = "other: {{ messages[0].content }}"


# Place of a chat template in a checkpoint -> entries of tokenizer_config.json (None: the file is not rewritten), and
# other files.
TEMPLATES: dict[str, tuple[dict[str, Any] | None, dict[str, str]]] = {
    "tokenizer_config": ({"chat_template": CHAT_TEMPLATE}, {}),
    "named, with a default": (
        {
            "chat_template": [
                {"name": "tool_use", "template": OTHER_TEMPLATE},
                {"name": "default", "template": CHAT_TEMPLATE},
            ]
        },
        {},
    ),
    "named, no default": ({"chat_template": [{"name": "chat", "template": CHAT_TEMPLATE}]}, {}),
    "chat_template.jinja": (None, {"chat_template.jinja": CHAT_TEMPLATE}),
    "chat_template.jinja beside tokenizer_config": (
        {"chat_template": OTHER_TEMPLATE},
        {"chat_template.jinja": CHAT_TEMPLATE},
    ),
    "chat_template.json": (None, {"chat_template.json": json.dumps({"chat_template": CHAT_TEMPLATE})}),
    "unknown tokenizer class": ({"tokenizer_class": "NoSuchTokenizer", "chat_template": CHAT_TEMPLATE}, {}),
    "a class that needs remote code": (
        {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
            "chat_template": CHAT_TEMPLATE,
        },
        {},
    ),
    "none": (None, {}),
}


@pytest.mark.parametrize("where", TEMPLATES)
def test_chat_template_is_found(tmp_path: Path, where: str) -> None:
    entries, other_files = TEMPLATES[where]
    folder = write_checkpoint(tmp_path)
    if entries is not None:
        write_tokenizer(folder, **entries)
    for name, content in other_files.items():
        (folder / name).write_text(content)
    loaded = load_args(tmp_path)
    tokenizer = Tokenizer(loaded.tokenizer, loaded.eos_token_ids)
    assert bool(tokenizer.hf_tokenizer.chat_template) == (where != "none")
    if where != "none":
        assert tokenizer.decode(tokenizer.apply_chat_template(MESSAGES)) == "<|user|>hi<|assistant|>"
    assert tokenizer.encode(f"a{EOS}") == [loaded.tokenizer.convert_tokens_to_ids("a"), VOCAB_SIZE - 1]


@pytest.mark.parametrize(
    "quirk",
    [
        {"extra_special_tokens": ["<|x|>"]},
        {"extra_special_tokens": {"x_token": "<|x|>"}},
        {"additional_special_tokens": [EOS]},
        {"eos_token": {"__type": "AddedToken", "content": EOS, "lstrip": False, "normalized": False}},
        {"bos_token": None, "add_bos_token": False, "model_max_length": 1e30},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizer"},
        {"tokenizer_class": None},
        {"tokenizer_class": "TokenizersBackend"},
    ],
    ids=str,
)
def test_tokenizer_config_quirks(tmp_path: Path, quirk: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path)
    write_tokenizer(folder, **quirk)
    tokenizer = load_args(folder).tokenizer
    assert tokenizer.eos_token_id == VOCAB_SIZE - 1
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界", add_special_tokens=False)) == "Grüße, 世界"


def test_the_tokenizer_setting_replaces_the_checkpoint_tokenizer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, chat_template=OTHER_TEMPLATE)
    assert load_args(folder, tokenizer=str(other)).tokenizer.chat_template == OTHER_TEMPLATE


def test_code_of_a_checkpoint_runs_only_if_trusted(tmp_path: Path) -> None:
    """A model_file with its own architecture, which uses the seam like mlx-lm's architectures."""
    folder = write_checkpoint(tmp_path, config={"model_file": "own.py"})
    llama = Path(load_model.__code__.co_filename).parent / "models" / "llama.py"
    own = llama.read_text().replace("from .", "from mlx_lm.models.")
    (folder / "own.py").write_text(own + '\nprint("own code runs")\n')
    with pytest.raises(ModelLoadError, match=r"own\.py.*--trust-remote-code"):
        load_args(folder)
    loaded = load_args(folder, trust_remote_code=True)
    assert type(loaded.model).__module__ == "custom_model"
    check_paged_model(PagedModel(loaded.model), PortableBackend(), VOCAB_SIZE)
