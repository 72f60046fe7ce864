"""Loaded GGUF files, compared with ``gguf``'s reader and dequantization, and with mlx-lm's models."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, GGUFWriter, RopeScalingType, quants
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE

from metal_engine.checkpoints.gguf.config import gguf_config
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.checkpoints.gguf.weights import QuantizedTensor, load_tensor
from metal_engine.errors import ModelLoadError, UnsupportedModelError
from tests.support.gguf_files import ARCHITECTURES, GgufFile, build, logits, random_weights, tiny_config

# Both sides use float32, with the same operations or with RoPE's pairs in another order, so only rounding differs.
# Logits are of order 1, float32's relative rounding is 6e-8, and sums have at most 128 terms in 2 layers.
CLOSE = 2e-5


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


# --- the demo model ---


@pytest.fixture(scope="module")
def reader(demo_path: Path) -> GGUFReader:
    return GGUFReader(demo_path)


def test_header_agrees_with_the_reader_of_gguf(demo_path: Path, reader: GGUFReader) -> None:
    header = read_gguf_header(demo_path)
    expected = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == expected
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.type == tensor.tensor_type
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.offset == tensor.data_offset
        assert ours.nbytes == tensor.n_bytes


def test_demo_weights_equal_the_dequantization_of_gguf(demo_path: Path, reader: GGUFReader) -> None:
    """Tensors are bitwise equal, in every sixth layer. q and k keep the file's order, and RoPE is configured for it."""
    model, config = load_gguf_model(demo_path, mx.float32, dequantize=True)
    modules = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        "attn_output": "self_attn.o_proj",
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    loaded = parameters(model)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{modules[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"
        array = loaded.pop(name)
        assert array.dtype == mx.float32
        if parts[0] == "blk" and int(parts[1]) % 6:
            continue
        assert np.array_equal(np.array(array), quants.dequantize(tensor.data, tensor.tensor_type)), tensor.name
    assert not loaded
    assert config["rope_traditional"]
    assert config["tie_word_embeddings"]


def test_demo_configuration(demo_path: Path) -> None:
    """The values equal the model's published config.json."""
    config = gguf_config(read_gguf_header(demo_path))
    published = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100000,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {key: config[key] for key in published} == published
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_demo_kept_quantized_equals_mx_load_and_agrees_with_dequantized(demo_path: Path) -> None:
    theirs = mx.load(str(demo_path))
    header = read_gguf_header(demo_path)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        ours = load_tensor(header, name, mx.float16, dequantize=False)
        assert isinstance(ours, QuantizedTensor)
        assert mx.array_equal(ours.weight, theirs[name])
        assert mx.array_equal(ours.scales, theirs[name.replace("weight", "scales")])
        assert mx.array_equal(ours.biases, theirs[name.replace("weight", "biases")])
    kept, config = load_gguf_model(demo_path, mx.float32, dequantize=False)
    assert isinstance(kept.layers[3].self_attn.q_proj, nn.QuantizedLinear)
    assert isinstance(kept.model.embed_tokens, nn.QuantizedEmbedding)
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    full, _ = load_gguf_model(demo_path, mx.float32, dequantize=True)
    ids = mx.array([[1, 9690, 198, 2683, 359, 253, 5356, 5646]])
    # The same weights, with float32 sums in another order, through 30 layers. Logits reach 40.
    assert float(mx.abs(kept(ids) - full(ids)).max()) < 2e-3


# --- tiny models of every architecture and storage type ---


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_mlx_lm(tmp_path: Path, architecture: str, kind: T) -> None:
    config = tiny_config(architecture)
    file = GgufFile(config, random_weights(config), type_of=lambda name: kind)
    path = file.write(tmp_path / "model.gguf")
    expected = logits(file.reference())
    assert expected.std() > 0.1
    for dequantize in (True, False):
        model, _ = load_gguf_model(path, mx.float32, dequantize=dequantize)
        kept = any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
        assert kept == (not dequantize and kind in (T.Q4_0, T.Q4_1, T.Q8_0))
        assert np.abs(logits(model) - expected).max() < CLOSE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_untied_head_and_biases(tmp_path: Path, architecture: str) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if architecture == "llama" else {}
    config = tiny_config(architecture, tie_word_embeddings=False, **biases)
    file = GgufFile(config, random_weights(config))
    assert "lm_head.weight" in file.weights
    model, loaded = load_gguf_model(file.write(tmp_path / "m.gguf"), mx.float32, dequantize=True)
    assert not loaded["tie_word_embeddings"]
    assert np.abs(logits(model) - logits(file.reference())).max() < CLOSE


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("dequantize", [True, False])
def test_dtype(tmp_path: Path, dtype: mx.Dtype, dequantize: bool) -> None:
    """All floating-point parameters, and therefore the activations, have the requested type."""
    config = tiny_config("llama")
    types = {"attn_q": T.Q4_0, "attn_k": T.Q5_0, "attn_v": T.F16, "attn_output": T.BF16, "ffn_up": T.Q8_0}
    file = GgufFile(config, random_weights(config), type_of=lambda name: types.get(name.split(".")[-2], T.Q4_1))
    model, _ = load_gguf_model(file.write(tmp_path / "m.gguf"), dtype, dequantize)
    floats = {a.dtype for a in parameters(model).values() if mx.issubdtype(a.dtype, mx.floating)}
    assert floats == {dtype}
    assert model(mx.array([[1, 2, 3]])).dtype == dtype
    # Half precision has 11 or 8 significant bits. Logits are of order 1.
    tolerance = {mx.float32: CLOSE, mx.float16: 2e-2, mx.bfloat16: 2e-1}[dtype]
    assert np.abs(logits(model) - logits(file.reference())).max() < tolerance


def k_quant_blocks(kind: T, rows: int, columns: int) -> np.ndarray:
    """Return random blocks of a K-quant as bytes [rows, bytes], which ``gguf`` cannot create from floats."""
    generator = np.random.default_rng(3)
    size, scale_at = {T.Q4_K: (144, (0, 2)), T.Q5_K: (176, (0, 2)), T.Q6_K: (210, (208,))}[kind]
    blocks = generator.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    for offset in scale_at:
        halves = generator.uniform(1e-4, 1e-3, (rows, columns // 256, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_q4_k_scales_are_rounded_alone(tmp_path: Path, dtype: mx.Dtype) -> None:
    """The error comes from rounding scales to half precision: a 2^11th or a 2^8th of 15 scales and of an offset."""
    blocks = k_quant_blocks(T.Q4_K, 6, 512)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a.weight", blocks.reshape(2, 3, -1), raw_dtype=T.Q4_K)  # two experts
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = load_tensor(read_gguf_header(tmp_path / "m.gguf"), "a.weight", dtype, dequantize=False)
    assert isinstance(tensor, QuantizedTensor) and tensor.scales.shape == (2, 3, 16)
    full = mx.dequantize(tensor.weight, *(a.astype(mx.float32) for a in (tensor.scales, tensor.biases)), 32, 4)
    difference = np.abs(np.array(full) - quants.dequantize(blocks, T.Q4_K).reshape(2, 3, -1)).reshape(2, 3, 16, 32)
    largest = 15 * np.abs(np.array(tensor.scales.astype(mx.float32))) + np.abs(
        np.array(tensor.biases.astype(mx.float32))
    )
    assert (difference.max(axis=-1) <= largest * {mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype] * 1.01).all()


@pytest.mark.parametrize("kind", [T.Q4_K, T.Q5_K, T.Q6_K])
@pytest.mark.parametrize("dequantize", [True, False])
def test_k_quants(tmp_path: Path, kind: T, dequantize: bool) -> None:
    """``mx.load`` returns wrong weights for these types without an error. MLX can store only Q4_K as it is."""
    config = tiny_config("qwen2", intermediate_size=256)
    weights = random_weights(config)
    del weights["model.layers.1.mlp.down_proj.weight"]
    blocks = k_quant_blocks(kind, 64, 256)

    def add_tensor(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.1.ffn_down.weight", blocks, raw_dtype=kind)

    path = GgufFile(config, weights, type_of=lambda name: T.Q8_0, prepare=add_tensor).write(tmp_path / "m.gguf")
    model, _ = load_gguf_model(path, mx.float32, dequantize)
    module = model.layers[1].mlp.down_proj
    weight = module.weight
    assert isinstance(module, nn.QuantizedLinear) == (kind == T.Q4_K and not dequantize)
    if isinstance(module, nn.QuantizedLinear):
        weight = mx.dequantize(weight, module.scales, module.biases, 32, 4)
    assert np.array_equal(np.array(weight), quants.dequantize(blocks, kind))
    assert isinstance(model.layers[0].mlp.down_proj, nn.Linear if dequantize else nn.QuantizedLinear)


# --- RoPE ---


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, architecture: str, scaling: str) -> None:
    settings = {"type": scaling, "factor": 4.0, "original_max_position_embeddings": 8}
    config = tiny_config(architecture, rope_scaling=settings)

    def add_scaling(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType(scaling))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(8)

    file = GgufFile(config, random_weights(config), prepare=add_scaling)
    model, _ = load_gguf_model(file.write(tmp_path / "m.gguf"), mx.float32, dequantize=True)
    expected = logits(file.reference())
    assert np.abs(logits(model) - expected).max() < CLOSE
    unscaled = build({**config, "rope_scaling": None})
    unscaled.load_weights([(name, mx.array(array)) for name, array in file.stored.items()])
    assert np.abs(logits(unscaled) - expected).max() > 100 * CLOSE


def test_llama3_frequency_factors(tmp_path: Path) -> None:
    """A tensor of factors replaces ``llama3`` scaling. Here, it comes from mlx-lm's frequencies."""
    settings = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config("llama", rope_scaling=settings)
    plain = config["rope_theta"] ** (np.arange(0, 16, 2) / 16)
    scaled = Llama3RoPE(16, base=config["rope_theta"], scaling_config=settings)._freqs
    factors = (np.array(scaled) / plain).astype(np.float32)
    assert factors.min() == pytest.approx(1.0)
    assert factors.max() == pytest.approx(8.0)
    file = GgufFile(
        config, random_weights(config), prepare=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    model, _ = load_gguf_model(file.write(tmp_path / "m.gguf"), mx.float32, dequantize=True)
    assert np.abs(logits(model, 100) - logits(file.reference(), 100)).max() < CLOSE
    assert not any("freqs" in name for name in parameters(model))


# --- files that are refused with a one-line reason ---


def assert_refused(path: Path, error: type[ModelLoadError], *words: str) -> None:
    with pytest.raises(error) as caught:
        load_gguf_model(path, mx.float32, dequantize=True)
    message = str(caught.value)
    assert "\n" not in message
    for word in (path.name, *words):
        assert word in message


def test_unknown_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_refused(tmp_path / "m.gguf", UnsupportedModelError, "'mamba'")


@pytest.mark.parametrize(
    ("prepare", "word"),
    [
        (lambda w: w.add_uint16("split.count", 2), "merge"),
        (lambda w: w.add_rope_scaling_type(RopeScalingType.LONGROPE), "'longrope'"),
        (lambda w: w.add_rope_dimension_count(8), "8"),
        (lambda w: w.add_tensor("blk.0.ssm_a.weight", np.ones(4, np.float32)), "blk.0.ssm_a.weight"),
    ],
)
def test_unsupported_variants(tmp_path: Path, prepare, word: str) -> None:
    config = tiny_config("llama")
    path = GgufFile(config, random_weights(config), prepare=prepare).write(tmp_path / "m.gguf")
    assert_refused(path, UnsupportedModelError, word)


def test_layers_of_unequal_sizes(tmp_path: Path) -> None:
    config = tiny_config("llama", num_key_value_heads=[2, 1])
    weights = random_weights(tiny_config("llama"))
    weights = {name: array for name, array in weights.items() if "k_proj" not in name}
    assert_refused(GgufFile(config, weights).write(tmp_path / "m.gguf"), UnsupportedModelError, "unequal")


def test_unreadable_tensor_type(tmp_path: Path) -> None:
    config = tiny_config("llama")
    weights = random_weights(config)
    del weights["model.layers.0.mlp.up_proj.weight"]

    def add_tensor(writer: GGUFWriter) -> None:
        # A block of 32 has 40 bytes: ggml computes with this type, but no model is stored in it.
        writer.add_tensor("blk.0.ffn_up.weight", np.zeros((96, 80), np.uint8), raw_dtype=T.Q8_1)

    path = GgufFile(config, weights, prepare=add_tensor).write(tmp_path / "m.gguf")
    assert_refused(path, ModelLoadError, "blk.0.ffn_up.weight", "Q8_1")


def test_missing_tensor(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    weights = random_weights(config)
    del weights["model.layers.1.self_attn.q_norm.weight"]
    path = GgufFile(config, weights).write(tmp_path / "m.gguf")
    assert_refused(path, ModelLoadError, "blk.1.attn_q_norm.weight")


# --- damaged files ---


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = tiny_config("llama")
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"

    def prepare(writer: GGUFWriter) -> None:
        writer.add_token_list(["a", "b"])
        writer.add_token_types([1, 1])

    return GgufFile(config, random_weights(config), prepare=prepare).write(path).read_bytes()


def test_any_truncation_is_noticed(tmp_path: Path, small_file: bytes) -> None:
    path = tmp_path / "cut.gguf"
    # Every 7th length within the header, and some within the weights. The end of the file is padding.
    cuts = [*range(0, 3000, 7), *np.linspace(3000, len(small_file) - 64, 20, dtype=int)]
    for length in cuts:
        path.write_bytes(small_file[:length])
        with pytest.raises(ModelLoadError):
            read_gguf_header(path)


def test_damaged_headers_never_raise_anything_else(tmp_path: Path, small_file: bytes) -> None:
    generator = np.random.default_rng(11)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        data = bytearray(small_file)
        for offset in generator.integers(0, 3000, 2):
            data[offset] = generator.integers(0, 256)
        path.write_bytes(data)
        try:
            header = read_gguf_header(path)
            # All tensors lie within the file.
            assert all(math.prod(header.rows(name).shape) == t.nbytes for name, t in header.tensors.items())
        except ModelLoadError:
            refused += 1
    assert 0 < refused < 400


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"not a model at all", b"GGUF" + bytes(20)])
def test_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"x\.gguf"):
        read_gguf_header(path)
    with pytest.raises(ModelLoadError, match=r"nothing\.gguf"):
        read_gguf_header(tmp_path / "nothing.gguf")
