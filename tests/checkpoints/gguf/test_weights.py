"""Headers and tensors of GGUF files, compared with ``gguf``'s reader and dequantization, and with ``mx.load``."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, GGUFWriter, quants

from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.checkpoints.gguf.weights import QuantizedTensor, load_tensor
from tests.support.gguf_files import finish
from tools.fixtures.gguf_checkpoints import write_gguf
from tools.fixtures.hf_checkpoints import CONFIGS


def test_header_agrees_with_the_reader_of_gguf(tmp_path: Path) -> None:
    def all_kinds(writer: GGUFWriter) -> None:
        writer.add_token_list(["a", "é", "", "日本"])
        writer.add_token_types([1, -1, 1, 6])
        writer.add_token_scores([0.5, -1.0, 0.0, 3.0])
        for number, kind in enumerate(("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")):
            getattr(writer, f"add_{kind}")(f"x.{kind}", 100 + number)
        writer.add_float64("x.float64", 0.1)
        writer.add_bool("x.bool", True)

    path = write_gguf(tmp_path / "m.gguf", CONFIGS["llama"], lambda name: T.Q4_0, all_kinds)
    header, reader = read_gguf_header(path), GGUFReader(path)
    assert header.metadata == {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.type, ours.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)


def test_tensors_of_the_demo_model_equal_mx_loads(demo_path: Path) -> None:
    theirs, header = mx.load(str(demo_path)), read_gguf_header(demo_path)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        ours = load_tensor(header, name, mx.float16, dequantize=False)
        assert isinstance(ours, QuantizedTensor)
        assert mx.array_equal(ours.weight, theirs[name])
        assert mx.array_equal(ours.scales, theirs[name.replace("weight", "scales")])
        assert mx.array_equal(ours.biases, theirs[name.replace("weight", "biases")])
        full = load_tensor(header, name, mx.float32, dequantize=True)
        assert np.array_equal(full, quants.dequantize(header.rows(name), header.tensors[name].type))


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
    header = read_gguf_header(finish(writer, tmp_path / "m.gguf"))
    tensor = load_tensor(header, "a.weight", dtype, dequantize=False)
    assert isinstance(tensor, QuantizedTensor) and tensor.scales.shape == (2, 3, 16)
    scales, biases = (array.astype(mx.float32) for array in (tensor.scales, tensor.biases))
    full = mx.dequantize(tensor.weight, scales, biases, 32, 4)
    difference = np.abs(np.array(full) - quants.dequantize(blocks, T.Q4_K).reshape(2, 3, -1)).reshape(2, 3, 16, 32)
    largest = 15 * np.abs(np.array(scales)) + np.abs(np.array(biases))
    assert (difference.max(axis=-1) <= largest * {mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype] * 1.01).all()


@pytest.mark.parametrize("kind", [T.Q4_K, T.Q5_K, T.Q6_K])
@pytest.mark.parametrize("dequantize", [True, False])
def test_k_quants(tmp_path: Path, kind: T, dequantize: bool) -> None:
    """``mx.load`` returns wrong weights for these types without an error. MLX can store only Q4_K as it is."""
    name, blocks = "blk.1.ffn_down.weight", k_quant_blocks(kind, 64, 256)

    def replace(writer: GGUFWriter) -> None:
        del writer.tensors[0][name]
        writer.add_tensor(name, blocks, raw_dtype=kind)

    config = CONFIGS["qwen2"] | {"intermediate_size": 256}
    model, _ = load_gguf_model(write_gguf(tmp_path / "m.gguf", config, prepare=replace), mx.float32, dequantize)
    module = model.layers[1].mlp.down_proj
    weight = module.weight
    assert isinstance(module, nn.QuantizedLinear) == (kind == T.Q4_K and not dequantize)
    if isinstance(module, nn.QuantizedLinear):
        weight = mx.dequantize(weight, module.scales, module.biases, 32, 4)
    assert np.array_equal(np.array(weight), quants.dequantize(blocks, kind))
