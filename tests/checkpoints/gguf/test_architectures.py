"""Every supported GGUF architecture, compared with llama.cpp's converter and logits, and with mlx-lm's models.

``tools/fixtures/llama_cpp_architectures.py`` creates the fixture: llama.cpp's converted files of tiny checkpoints, and
llama.cpp's results with them. The tests write the same files again and check that they are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter, RopeScalingType, TokenType, quants
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from metal_engine.checkpoints.gguf.architectures import ARCHITECTURES
from metal_engine.checkpoints.gguf.config import default_dtype, gguf_config
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.checkpoints.gguf.weights import loaded_bytes
from metal_engine.checkpoints.loader import load
from metal_engine.errors import ModelLoadError, UnsupportedModelError
from metal_engine.llm import LLM
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.support.gguf_files import finish, last_logits, mlx_lm_model
from tests.support.sweeps import sweep
from tools.fixtures.gguf_checkpoints import architecture, interleave, write_gguf
from tools.fixtures.hf_checkpoints import CONFIGS, Config, hf_weights, write_hf
from tools.fixtures.llama_cpp_architectures import describe, prompts

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures/llama_cpp_architectures.json").read_text())
# Both sides use float32, but add in another order. Logits are of order 1; the measured difference is 8e-6.
CLOSE = 5e-5
# ggml reads GELU from a float16 table, whose last digit is 5e-4 at 1. The measured difference is 8e-4.
GELU = {"gemma2": 3e-3, "gemma3": 3e-3}
NAMES = pytest.mark.parametrize("name", CONFIGS)
Prepare = Callable[[GGUFWriter], None]


def test_all_architectures_are_here() -> None:
    assert {architecture(config) for config in CONFIGS.values()} == set(ARCHITECTURES)
    assert set(FIXTURE["cases"]) == set(CONFIGS)


@NAMES
def test_files_are_the_converters(tmp_path: Path, name: str) -> None:
    """Therefore the other tests read the same files as llama.cpp's converter writes."""
    expected = FIXTURE["cases"][name]
    config = CONFIGS[name]
    assert architecture(config) == expected["architecture"]
    written = describe(write_gguf(tmp_path / "m.gguf", config))
    assert written["metadata"] == expected["metadata"] and written["tensors"] == expected["tensors"]


@pytest.mark.parametrize(("name", "dequantize"), [*((name, True) for name in CONFIGS), ("gpt-oss", False)])
def test_logits_are_llama_cpps(tmp_path: Path, name: str, dequantize: bool) -> None:
    """Only gpt-oss has matrices here that may stay quantized."""
    expected = FIXTURE["cases"][name]["prompts"]
    assert [case["token_ids"] for case in expected] == prompts(CONFIGS[name])
    model, _ = load_gguf_model(write_gguf(tmp_path / "m.gguf", CONFIGS[name]), mx.float32, dequantize)
    for case in expected:
        assert np.std(case["logits"]) > 0.2
        assert np.abs(last_logits(model, case["token_ids"]) - case["logits"]).max() < GELU.get(name, CLOSE)


# All types of matrices besides F32 and the K-quants. MLX stores Q4_0, Q4_1 and Q8_0 as they are.
MIXED = {"ffn_down": T.Q5_0, "attn_q": T.Q8_0, "attn_k": T.BF16, "attn_v": T.F16, "attn_output": T.Q4_1,
         "token_embd": T.Q8_0, "ffn_down_exps": T.Q5_1}  # fmt: skip
KEPT = (T.Q4_0, T.Q4_1, T.Q8_0, T.MXFP4)


def mixed_type(name: str) -> T:
    return MIXED.get(name.split(".")[-2], T.Q4_0)


def gguf_name(name: str) -> str:
    """Return the entry of ``MIXED`` for a Hugging Face tensor."""
    parts = name.split(".")
    expert = "experts" in parts
    if parts[-2] in ("down_proj", "w2") and "shared_expert" not in parts:
        return "blk.0.ffn_down_exps.weight" if expert else "blk.0.ffn_down.weight"
    known = {f"{part}_proj": f"attn_{part}" for part in "qkv"} | {"o_proj": "attn_output", "embed_tokens": "token_embd"}
    return f"blk.0.{known.get(parts[-2], 'other')}.weight"


# Architectures that change rows, stack experts, fuse matrices or have MXFP4, also in short test runs.
QUANTIZED = ["llama", "qwen3moe", "gemma3", "phi3", "gpt-oss", "granite"]


@pytest.mark.parametrize("name", sweep(CONFIGS, QUANTIZED))
def test_quantized_weights_equal_mlx_lm(tmp_path: Path, name: str) -> None:
    """mlx-lm gets the same numbers, dequantized by ``gguf``, as a Hugging Face checkpoint."""
    config = CONFIGS[name]
    path = write_gguf(tmp_path / "m.gguf", config, mixed_type)
    tensors = read_gguf_header(path).tensors.values()
    num_kept = sum(tensor.type in KEPT and len(tensor.shape) > 1 for tensor in tensors)
    weights = hf_weights(config)
    for key, array in weights.items():
        if array.ndim > 1 and key.endswith("weight"):
            kind = mixed_type(gguf_name(key))
            weights[key] = quants.dequantize(quants.quantize(array, kind), kind)
    expected = mlx_lm_model(write_hf(tmp_path / "hf", config, weights))
    for dequantize in (True, False):
        model, loaded = load_gguf_model(path, mx.float32, dequantize)
        assert len(loaded.get("quantization", ())) == (0 if dequantize else num_kept)
        for ids in prompts(config):
            assert np.abs(last_logits(model, ids) - last_logits(expected, ids)).max() < CLOSE


BIASED = {**{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}, "attn_output": "self_attn.o_proj",
          **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}}  # fmt: skip


def test_llama_with_biases(tmp_path: Path) -> None:
    config = {**CONFIGS["llama"], "attention_bias": True, "mlp_bias": True}
    weights, stored = hf_weights(config), {}
    for layer, (tensor, module) in product(range(config["num_hidden_layers"]), BIASED.items()):
        bias = weights[f"model.layers.{layer}.{module}.weight"][:, 0].copy()
        weights[f"model.layers.{layer}.{module}.bias"] = bias
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(tensor)
        stored[f"blk.{layer}.{tensor}.bias"] = bias if heads is None else interleave(bias, heads)

    def add_biases(writer: GGUFWriter) -> None:
        for name, array in stored.items():
            writer.add_tensor(name, array)

    model, _ = load_gguf_model(write_gguf(tmp_path / "m.gguf", config, prepare=add_biases), mx.float32, dequantize=True)
    expected = mlx_lm_model(write_hf(tmp_path / "hf", config, weights))
    for ids in prompts(config):
        assert np.abs(last_logits(model, ids) - last_logits(expected, ids)).max() < CLOSE


# --- the engine with such a file ---


def add_tokenizer(writer: GGUFWriter) -> None:
    """Add SentencePiece tokens for the whole vocabulary. Most of them are never used."""
    tokens = ["<unk>", "<s>", "</s>", "▁", *(chr(97 + i) for i in range(26))]
    tokens += [f"unused{i}" for i in range(96 - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.NORMAL] * 93)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


# Architectures whose forward passes differ most. Full test runs include the others.
@pytest.mark.parametrize("name", sweep(CONFIGS, ["mistral", "qwen3moe", "gemma3", "phi3-longrope", "gpt-oss"]))
def test_the_engine_generates_what_mlx_lm_does(tmp_path: Path, name: str) -> None:
    """Several requests at once, longer than the windows. mlx-lm reads the Hugging Face form of the checkpoint."""
    config = CONFIGS[name]
    path = write_gguf(tmp_path / "m.gguf", config, prepare=add_tokenizer)
    reference = mlx_lm_model(write_hf(tmp_path / "hf", config))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(path), max_model_len=128, kv_cache_memory_bytes=1 << 20) as llm:
        answers = llm.generate(prompts(config), params, use_tqdm=False)
    for prompt, answer in zip(prompts(config), answers, strict=True):
        expected = [int(token) for token, _ in generate_step(mx.array(prompt), reference, max_tokens=12)]
        assert answer.token_ids == expected


# --- memory and types ---


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize(
    ("name", "default"),
    [("llama", "float16"), ("qwen3moe", "float16"), ("gemma3", "bfloat16"), ("gpt-oss", "bfloat16")],
)
def test_types_and_memory(tmp_path: Path, name: str, default: str, dequantize: bool) -> None:
    """All floating-point parameters, and therefore the activations, have the requested type."""
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", CONFIGS[name], mixed_type))
    assert default_dtype(header) == default
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        model, _ = load_gguf_model(header, dtype, dequantize)
        arrays = [array for _, array in tree_flatten(model.parameters())]
        assert {array.dtype for array in arrays if mx.issubdtype(array.dtype, mx.floating)} == {dtype}
        assert model(mx.array([[1, 2, 3]])).dtype == dtype
        counted = sum(loaded_bytes(tensor, dtype.size, dequantize) for tensor in header.tensors.values())
        assert counted == sum(array.nbytes for array in arrays)


def test_mxfp4_weights_are_loaded_without_requantization(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["gpt-oss"])
    model, config = load_gguf_model(path, mx.float32, dequantize=False)
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert config["quantization"]["model.layers.0.mlp.experts.up_proj"] == settings
    theirs, _ = load_model(write_hf(tmp_path / "hf", CONFIGS["gpt-oss"]))
    for part in ("gate_proj", "up_proj", "down_proj"):
        ours, published = model.layers[3].mlp.experts[part], theirs.layers[3].mlp.experts[part]
        assert mx.array_equal(ours.weight, published.weight) and mx.array_equal(ours.scales, published.scales)


# --- other metadata ---


def config_of(tmp_path: Path, name: str, prepare: Prepare = lambda writer: None, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a file with other values. None removes a value."""
    config: Config = {key: value for key, value in {**CONFIGS[name], **changes}.items() if value is not None}
    return gguf_config(read_gguf_header(write_gguf(tmp_path / "m.gguf", config, prepare=prepare)))


def test_gemma3_windows(tmp_path: Path) -> None:
    assert config_of(tmp_path, "gemma3")["sliding_window_pattern"] == 6
    listed = [True, True, False, True, True, False, True]
    config = config_of(tmp_path, "gemma3", also("add_sliding_window_pattern", listed))
    assert config["sliding_window_pattern"] == 3
    assert config_of(tmp_path, "gemma3", sliding_window=None)["sliding_window_pattern"] == 1


@pytest.mark.parametrize(("name", "layers"), [("gemma3", 62), ("gemma2", 46)])
def test_the_largest_gemma_scales_queries_otherwise(tmp_path: Path, name: str, layers: int) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert config_of(tmp_path, name, num_hidden_layers=layers, **sizes)["query_pre_attn_scalar"] == 16
    assert config_of(tmp_path, name, num_hidden_layers=layers - 1, **sizes)["query_pre_attn_scalar"] == 32


def test_dimensions_of_one_may_be_missing(tmp_path: Path) -> None:
    """Older converters wrote the gate of the shared expert without them."""
    name = "blk.0.ffn_gate_inp_shexp.weight"
    gate = hf_weights(CONFIGS["qwen2moe"])["model.layers.0.mlp.shared_expert_gate.weight"]
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["qwen2moe"], prepare=instead(name, gate[0]))
    assert read_gguf_header(path).tensors[name].shape == (64,)
    model, _ = load_gguf_model(path, mx.float32, dequantize=True)
    assert np.array_equal(np.array(model.layers[0].mlp.shared_expert_gate.weight), gate)


# --- files that are refused with a one-line reason ---


def instead(tensor: str, array: np.ndarray, raw_dtype: T | None = None) -> Prepare:
    def replace(writer: GGUFWriter) -> None:
        del writer.tensors[0][tensor]
        writer.add_tensor(tensor, array, raw_dtype=raw_dtype)

    return replace


def without(name: str) -> Prepare:
    """Return a function that removes a tensor or a value."""

    def remove(writer: GGUFWriter) -> None:
        del (writer.tensors if name in writer.tensors[0] else writer.kv_data)[0][name]

    return remove


def also(method: str, *values: Any) -> Prepare:
    return lambda writer: getattr(writer, method)(*values)


MISSING = [
    ("gpt-oss", "blk.1.attn_sinks.weight"), ("gpt-oss", "output.weight"), ("gpt-oss", "blk.0.ffn_up_exps.bias"),
    ("gpt-oss", "gpt-oss.attention.sliding_window"), ("qwen3", "blk.1.attn_q_norm.weight"),
    ("qwen3moe", "blk.1.ffn_gate_inp.weight"), ("qwen3moe", "qwen3moe.expert_used_count"),
    ("mixtral", "blk.0.ffn_down_exps.weight"), ("gemma3", "blk.2.post_ffw_norm.weight"),
    ("phi3-longrope", "rope_factors_short.weight"), ("phi3-longrope", "phi3.rope.scaling.original_context_length"),
    ("granite", "granite.logit_scale"),
]  # fmt: skip
IRREGULAR = [True, False, False] * 2 + [True]
UNSUPPORTED = [
    ("llama", also("add_uint16", "split.count", 2), "merge"),
    ("llama", also("add_rope_scaling_type", RopeScalingType.LONGROPE), "'longrope'"),
    ("llama", also("add_head_count_kv", [2, 1]), "unequal"),
    ("llama", also("add_tensor", "blk.0.ssm_a.weight", np.ones(4, np.float32)), "blk.0.ssm_a.weight"),
    ("gpt-oss", also("add_rope_freq_base_swa", 3.0), "two RoPE bases"),
    ("gpt-oss", also("add_sliding_window_pattern", [True] * 4), "windows"),
    ("gpt-oss", also("add_rope_scaling_yarn_attn_factor", 2.0), "'yarn'"),
    ("qwen3moe", also("add_rope_scaling_type", RopeScalingType.YARN), "'yarn'"),
    ("qwen3moe", also("add_expert_weights_scale", 2.5), "scaled weights"),
    ("qwen2", also("add_expert_count", 8), "experts"),
    ("gemma3", also("add_final_logit_softcapping", 30.0), "soft cap"),
    ("gemma3", also("add_sliding_window_pattern", IRREGULAR), "irregular"),
    ("gemma2", also("add_rope_scaling_type", RopeScalingType.LINEAR), "'linear'"),
    ("phi3-longrope", also("add_rope_scaling_attn_factors", 3.0), "attention factor"),
    ("phi3", also("add_rope_dimension_count", 32), "RoPE or standard size 32"),
    ("olmo2", also("add_sliding_window", 64), "sliding window"),
    ("granite", also("add_key_length", 32), "head size 32"),
]
# A block of 32 has 40 bytes: ggml computes with this type, but no model is stored in it.
UNREADABLE = instead("blk.0.ffn_up.weight", np.zeros((96, 80), np.uint8), T.Q8_1)
REFUSED = [
    *((name, without(lacks), ModelLoadError, f"no {lacks}") for name, lacks in MISSING),
    *((name, prepare, UnsupportedModelError, words) for name, prepare, words in UNSUPPORTED),
    ("llama", UNREADABLE, ModelLoadError, "tensor 'blk.0.ffn_up.weight' has the type Q8_1"),
]


@pytest.mark.parametrize(("name", "prepare", "error", "words"), REFUSED)
def test_refused_with_the_reason(
    tmp_path: Path, name: str, prepare: Prepare, error: type[ModelLoadError], words: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIGS[name], prepare=prepare)
    with pytest.raises(error) as caught:
        load_gguf_model(path, mx.float32, dequantize=True)
    message = str(caught.value)
    assert words in message and "m.gguf" in message
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize("name", ["mamba", "gemma4"])
def test_other_architectures_are_refused(tmp_path: Path, name: str) -> None:
    path = finish(GGUFWriter(tmp_path / "m.gguf", name), tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=f"{name}.*is not supported.*gpt-oss"):
        load_gguf_model(path, mx.float32, dequantize=True)


@pytest.mark.parametrize("tensor", ["blk.0.attn_k.weight", "blk.1.ffn_gate_exps.weight", "output_norm.weight"])
def test_other_shapes_than_the_metadata_are_refused(tmp_path: Path, tensor: str) -> None:
    """They are refused before any weight is read."""

    def other_shape(writer: GGUFWriter) -> None:
        shape = writer.tensors[0][tensor].shape
        instead(tensor, np.zeros([*shape[:-1], shape[-1] + 32], np.float32))(writer)

    path = write_gguf(tmp_path / "m.gguf", CONFIGS["qwen3moe"], prepare=other_shape)
    with pytest.raises(ModelLoadError, match=rf"tensor '{tensor}' is \[.*\], but its metadata imply \["):
        load_gguf_model(path, mx.float32, dequantize=True)


HUGE = [
    ("qwen3moe", "add_expert_count", 1 << 30, "its metadata imply"),
    ("qwen3moe", "add_expert_feed_forward_length", 1 << 31, "OverflowError"),
    ("qwen3moe", "add_embedding_length", 1 << 30, "its metadata imply"),
    ("gpt-oss", "add_head_count", 1 << 24, "its metadata imply"),
    ("gpt-oss", "add_expert_used_count", 1 << 31, "2147483648 of 4 experts"),
    ("gemma3", "add_sliding_window_pattern", 1 << 31, "windows 2147483648"),
    ("gemma3", "add_sliding_window_pattern", 0, "ZeroDivisionError"),
    ("phi3", "add_feed_forward_length", 1 << 29, "its metadata imply"),
    ("phi3-longrope", "add_rope_dimension_count", 1 << 31, "RoPE or standard size"),
]


@pytest.mark.parametrize(("name", "method", "value", "words"), HUGE)
def test_huge_sizes_are_refused(tmp_path: Path, name: str, method: str, value: int, words: str) -> None:
    """The loader refuses them in one line, without allocations of the claimed sizes."""

    def prepare(writer: GGUFWriter) -> None:
        add_tokenizer(writer)
        getattr(writer, method)(value)

    path = write_gguf(tmp_path / "m.gguf", CONFIGS[name], prepare=prepare)
    before = mx.get_peak_memory()
    with pytest.raises(ModelLoadError) as caught:
        load(EngineArgs(model=str(path)), DeviceInfo(kind="cpu", name="t", compute="t", memory_bytes=1 << 34))
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 400
    assert mx.get_peak_memory() - before < 1 << 22


@pytest.mark.full
@NAMES
def test_fixture_logits_equal_the_results_of_llama_cpp(tmp_path: Path, name: str) -> None:
    """Fails without ``llama-cpp-python``; it is not skipped."""
    from tools.fixtures.llama_cpp import LlamaCpp

    llama = LlamaCpp(write_gguf(tmp_path / "m.gguf", CONFIGS[name], prepare=add_tokenizer))
    for case in FIXTURE["cases"][name]["prompts"]:
        assert np.abs(llama.logits(case["token_ids"]) - case["logits"]).max() < GELU.get(name, CLOSE)
