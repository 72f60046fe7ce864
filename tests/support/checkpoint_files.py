"""Small checkpoints on disk in the published format: a llama of a few kilobytes and a byte-level tokenizer."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tools.fixtures.tiny_models import TINY_LLAMA, tiny_model

CHAT_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
EOS = "<|end|>"
# 256 bytes and one special token.
VOCAB_SIZE = 257

CONFIG: dict[str, Any] = {
    **TINY_LLAMA,
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": VOCAB_SIZE - 1,
}


# Entries of a model with experts.
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "head_dim": 16, "decoder_sparse_step": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip


def write_checkpoint(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    num_shards: int = 1,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: bool = False,
    mixed_bits: bool = False,
    dtype: mx.Dtype = mx.float32,
    single_experts: bool = False,
) -> Path:
    """Write a complete checkpoint into ``folder`` and return it.

    Args:
        config: entries that differ from ``CONFIG``.
        num_shards: number of weight files.
        bits: bits per weight of mlx-lm's quantization; None for weights in ``dtype``.
        mode: MLX's quantization mode. The modes mxfp4, mxfp8 and nvfp4 have a fixed group size.
        global_scale: store one more scale for each expert (nvfp4).
        mixed_bits: quantize every other layer with 8 bits and keep the embedding unquantized.
        single_experts: store each expert as a tensor of its own, as transformers does, instead of stacked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full = {**CONFIG, **(config or {})}
    model = tiny_model(dtype=dtype, **full)
    if bits is not None:

        def choose(path: str, module: Any) -> bool | dict[str, int]:
            if not hasattr(module, "to_quantized"):
                return False
            if mixed_bits and "embed_tokens" in path:
                return False
            return {"group_size": 32, "bits": 8} if mixed_bits and "layers.1" in path else True

        group_size = 32 if mode == "affine" else None
        options = {"mode": mode, "global_scale": global_scale, "quant_predicate": choose}
        model, full = quantize_model(model, full, group_size, bits, **options)
    weights = dict(tree_flatten(model.parameters()))
    if single_experts:
        for name in [name for name in weights if ".switch_mlp." in name]:
            for expert, array in enumerate(weights.pop(name)):
                weights[name.replace("switch_mlp", f"experts.{expert}")] = mx.contiguous(array)
    write_weights(folder, weights, num_shards)
    (folder / "config.json").write_text(json.dumps(full))
    write_tokenizer(folder)
    return folder


def write_weights(folder: Path, weights: dict[str, mx.array], num_shards: int) -> None:
    if num_shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        return
    names = sorted(weights)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_sparse_weights(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], element_bytes: int = 2) -> None:
    """Write a sparse safetensors file of any size: a valid header, then a hole in place of the data."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * element_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_tokenizer(folder: Path, **config: Any) -> None:
    """Write a tokenizer whose tokens are bytes. ``config`` goes into tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    full = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(full))


def write_modules(folder: Path, pooling: dict[str, Any] | None, *others: dict[str, Any]) -> Path:
    """Write sentence-transformers' list of modules to ``folder``, and return the folder.

    Args:
        pooling: settings of the pooling module, written to a folder of their own; None to omit the module.
        others: entries of further modules.
    """
    folder.mkdir(parents=True, exist_ok=True)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    if pooling is not None:
        kind = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": kind})
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps([*modules, *others]))
    return folder
