"""GGUF checkpoints as mlx-lm models.

Three architectures: llama (also Mistral, SmolLM2 and others that convert to it), qwen2 and qwen3. Their
metadata becomes the configuration a Hugging Face checkpoint would have, their tensors mlx-lm's parameters.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_engine.checkpoints.gguf.header import GgufHeader, read_gguf_header
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids
from metal_engine.checkpoints.gguf.weights import GROUP_SIZE, QuantizedTensor, load_tensor
from metal_engine.errors import ModelLoadError, UnsupportedModelError, short

# mlx-lm's modules carry the same names. llama files interleave the rows of q and k (see gguf_config).
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_INTERLEAVED_ROPE = ("llama",)

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


def load_gguf_model(path: str | Path, dtype: mx.Dtype, dequantize: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Load a checkpoint.

    Args:
        path: a GGUF file.
        dtype: float32, float16 or bfloat16; of all weights, or of the scales of those that stay quantized.
        dequantize: whether Q4_0, Q4_1 and Q8_0 matrices are dequantized; other quantized types always are.

    Returns:
        The mlx-lm model, its parameters evaluated, and the configuration it was built from.

    Raises:
        UnsupportedModelError: the architecture, or a variant of it, cannot run here.
        ModelLoadError: the file cannot be read, or its tensors are not those of the architecture.
    """
    header = read_gguf_header(path)
    config = gguf_config(header)
    weights: dict[str, mx.array] = {}
    kept: dict[str, int] = {}  # module path -> bits
    for name in header.tensors:
        if name == _ROPE_FACTORS:
            continue
        parameter = _parameter_name(header, name)
        tensor = load_tensor(header, name, dtype, dequantize)
        if isinstance(tensor, QuantizedTensor):
            module = parameter.removesuffix(".weight")
            kept[module] = tensor.bits
            weights[f"{module}.scales"], weights[f"{module}.biases"] = tensor.scales, tensor.biases
            tensor = tensor.weight
        weights[parameter] = tensor
        # Now, so that the memory of what it was made from is free before the next one.
        mx.eval(tensor)
    if kept:
        config["quantization"] = {module: {"group_size": GROUP_SIZE, "bits": b} for module, b in kept.items()}
    return _build_model(header, config, weights), config


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The configuration of a Hugging Face checkpoint, from a GGUF file's metadata.

    llama files hold the rows of q and k of each head interleaved, row 2i + j for Hugging Face's row
    j * head_dim / 2 + i, because llama.cpp rotates neighbours (2i, 2i + 1) where Hugging Face rotates halves
    (i, head_dim / 2 + i). ``rope_traditional`` makes mlx-lm rotate neighbours too, so the rows stay as they
    are: q . k is a sum over a head's dimensions, whatever their order.

    Raises:
        UnsupportedModelError: the architecture, or a variant of it, cannot run here.
        ModelLoadError: a value is missing.
    """
    _check_architecture(header)
    arch = header.architecture

    def get(key: str, default: Any = None) -> Any:
        return header.metadata.get(f"{arch}.{key}", default)

    hidden_size = header.require(f"{arch}.embedding_length")
    num_heads = header.require(f"{arch}.attention.head_count")
    num_kv_heads = get("attention.head_count_kv", num_heads)
    ffn_size = header.require(f"{arch}.feed_forward_length")
    if any(isinstance(value, list) for value in (num_heads, num_kv_heads, ffn_size)):
        raise UnsupportedModelError(f"{header.path.name}: {arch} with layers of unequal sizes is not supported")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    # mlx-lm's qwen2 has no head_dim of its own; none of the three has values of another size or partial RoPE.
    others = {get("attention.value_length", head_dim), get("rope.dimension_count", head_dim)}
    if arch == "qwen2":
        others.add(hidden_size // num_heads)
    if others != {head_dim}:
        raise UnsupportedModelError(
            f"{header.path.name}: {arch} with head size {head_dim} and value, RoPE or standard size "
            f"{sorted(others - {head_dim})[0]} is not supported"
        )
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(f"{header.path.name} has no token_embd.weight: not a complete model")
    num_layers = header.require(f"{arch}.block_count")
    if num_layers > len(header.tensors):  # mlx-lm makes a module for each before it looks at the weights
        raise ModelLoadError(
            f"{header.path.name} says {short(num_layers)} layers and has {len(header.tensors)} tensors"
        )
    return {
        "model_type": arch,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": ffn_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": header.require(f"{arch}.attention.layer_norm_rms_epsilon"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": header.require(f"{arch}.context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header),
        "rope_traditional": arch in _INTERLEAVED_ROPE,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": gguf_eos_token_ids(header),
    }


def _check_architecture(header: GgufHeader) -> None:
    """Raises UnsupportedModelError unless the file holds the whole of a model that can run here."""
    arch = header.architecture
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{header.path.name}: GGUF architecture {short(arch)} is not supported ({known} are)"
        )
    if header.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(f"{header.path.name} is one part of a split GGUF: merge the parts first")
    if header.metadata.get(f"{arch}.expert_count", 0):
        raise UnsupportedModelError(f"{header.path.name}: {arch} with experts is not supported as GGUF")


def _rope_scaling(header: GgufHeader) -> dict[str, Any] | None:
    """``rope_scaling`` as mlx-lm reads it. Factors per frequency (Llama 3) are a tensor, see _FactorRoPE."""
    prefix = f"{header.architecture}.rope.scaling."
    values = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    kind = values.get("type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": values["factor"]}
    if kind == "yarn" and values.get("attn_factor", 1.0) == 1.0:
        return {
            "type": "yarn",
            "factor": values["factor"],
            "original_max_position_embeddings": values["original_context_length"],
            "beta_fast": values.get("yarn_beta_fast", 32.0),
            "beta_slow": values.get("yarn_beta_slow", 1.0),
        }
    raise UnsupportedModelError(f"{header.path.name}: RoPE scaling {short(kind)} is not supported as GGUF")


def _parameter_name(header: GgufHeader, name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    match = _TENSOR_NAME.fullmatch(name)
    module = _MODULES.get(match["module"]) if match else None
    if match is None or module is None:
        raise UnsupportedModelError(f"{header.path.name}: {header.architecture} has no place for tensor {short(name)}")
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{module}.{match['kind']}"


def _build_model(header: GgufHeader, config: dict[str, Any], weights: dict[str, mx.array]) -> nn.Module:
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(config))
    if "quantization" in config:
        nn.quantize(model, class_predicate=lambda path, _: config["quantization"].get(path, False))
    model.eval()
    try:
        model.load_weights(list(weights.items()))
    except ValueError as error:
        problem = " ".join(str(error).split())[:200]
        raise ModelLoadError(f"{header.path.name} is not a complete {header.architecture}: {problem}") from error
    if _ROPE_FACTORS in header.tensors:
        factors = load_tensor(header, _ROPE_FACTORS, mx.float32, dequantize=True)
        assert isinstance(factors, mx.array)
        for layer in model.layers:
            layer.self_attn.rope = _FactorRoPE(config, factors)
    mx.eval(model.parameters())
    return model


class _FactorRoPE(nn.Module):
    """RoPE with each frequency divided by a factor of its own, as Llama 3's GGUF files have it.

    Args:
        config: for the base, the head size and which dimensions are rotated together.
        factors: float32 [head_dim / 2].
    """

    def __init__(self, config: dict[str, Any], factors: mx.array) -> None:
        super().__init__()
        self.dims: int = config["head_dim"]
        self.traditional: bool = config["rope_traditional"]
        # mx.fast.rope takes reciprocal frequencies. The underscore keeps them out of the parameters.
        self._freqs = factors * config["rope_theta"] ** (mx.arange(0, self.dims, 2) / self.dims)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )
