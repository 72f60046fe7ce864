"""Supported architectures of GGUF files: for each architecture, mlx-lm's module, the names of tensors, and settings.

Names, units and permutations follow llama.cpp's ``convert_hf_to_gguf.py``. If that script omits a value from a file,
the value is llama.cpp's default. An architecture is supported if mlx-lm's module computes the same as llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from metal_engine.checkpoints.gguf.header import GgufHeader
from metal_engine.errors import UnsupportedModelError, short

Config = dict[str, Any]

_EMBEDDINGS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_DENSE = {**_EMBEDDINGS, **_ATTENTION, **_MLP, **_NORMS}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_DENSE, **_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}


def _experts(router: str, experts: str) -> dict[str, str]:
    """Return a map from the tensors of a layer's router and experts to modules, in the form of `Architecture.modules`.

    One tensor holds all experts of a layer.

    Args:
        router: module of the router.
        experts: parent module of the experts' projections.
    """
    stacked = {f"ffn_{part}_exps": f"{experts}.{part}_proj" for part in ("gate", "up", "down")}
    return {"ffn_gate_inp": router, **stacked}


_SHARED_EXPERT = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True)
class Architecture:
    """Information needed to load an architecture as a model of mlx-lm.

    Attributes:
        model_type: mlx-lm's module.
        modules: name of a tensor without its layer and without ``.weight`` or ``.bias`` -> module of the model or the
            layer, e.g. ``attn_q`` -> ``self_attn.q_proj``. A name with ``.weight`` or ``.bias`` maps to a parameter.
        settings: function of the header that returns the fields of the configuration that only this architecture has.
        own_head_dim: True if the size of heads may differ from ``hidden_size / num_attention_heads``.
        rope_scaling: kinds of RoPE scaling that the module supports.
        interleaved: True if the rows of q and k are in llama.cpp's order, see :func:`gguf_config`.
        rope_traditional: True if the module can rotate neighbouring elements, so that rows can stay in llama.cpp's
            order.
        norm_offset: number that the converter added to the weights of norms. mlx-lm's module adds it at run time.
        needs_bfloat16: True if activations can exceed the range of float16.
    """

    model_type: str
    modules: Mapping[str, str] = field(default_factory=lambda: _DENSE)
    settings: Callable[[GgufHeader], Config] = lambda header: {}
    own_head_dim: bool = True
    rope_scaling: tuple[str, ...] = ("linear", "yarn")
    interleaved: bool = False
    rope_traditional: bool = False
    norm_offset: float = 0.0
    needs_bfloat16: bool = False


def find_architecture(header: GgufHeader) -> Architecture:
    """Return the architecture that a file names. A ``llama`` file with experts has Mixtral's architecture.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """
    name = header.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{header.path.name}: GGUF architecture {short(name)} is not supported ({known} are)"
        )
    architecture = ARCHITECTURES[name]
    has_experts = bool(header.value("expert_count", 0))
    if name == "llama" and has_experts:
        return _MIXTRAL
    if has_experts and "ffn_gate_inp" not in architecture.modules:
        raise UnsupportedModelError(f"{header.path.name}: {name} with experts is not supported as GGUF")
    return architecture


# --- settings of single architectures ---


def _sliding_layers(header: GgufHeader, period: int) -> list[bool]:
    """Return one value for each layer in order: True if the layer attends only to a window.

    The file has one value per layer, or the number of layers in a group whose last layer attends to all tokens. If the
    file has neither, groups have ``period`` layers.

    Raises:
        UnsupportedModelError: the values do not fit the number of layers, or no layer attends to all tokens.
    """
    pattern = header.value("attention.sliding_window_pattern", period)
    num_layers = header.num_layers
    if isinstance(pattern, list):
        layers = [bool(sliding) for sliding in pattern[:num_layers]]
    else:
        layers = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if len(layers) != num_layers or all(layers):
        raise UnsupportedModelError(
            f"{header.path.name}: {header.architecture} with {num_layers} layers and the windows {short(pattern)} "
            "is not supported"
        )
    return layers


def _gemma2(header: GgufHeader) -> Config:
    return {
        "query_pre_attn_scalar": _gemma_query_scalar(header, layers_of_the_largest=46),
        "attn_logit_softcapping": header.value("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.value("final_logit_softcapping", 30.0),
    }


def _gemma3(header: GgufHeader) -> Config:
    if header.value("final_logit_softcapping", 0.0):
        raise UnsupportedModelError(f"{header.path.name}: gemma3 with a soft cap on logits is not supported")
    config: Config = {
        "query_pre_attn_scalar": _gemma_query_scalar(header, layers_of_the_largest=62),
        "rope_local_base_freq": header.value("rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": 1,
    }
    window = header.value("attention.sliding_window", 0)
    if window:
        sliding = _sliding_layers(header, period=6)
        period = sliding.index(False) + 1
        if sliding != [(layer + 1) % period != 0 for layer in range(len(sliding))]:
            raise UnsupportedModelError(f"{header.path.name}: gemma3 with windows on irregular layers is not supported")
        config |= {"sliding_window": window, "sliding_window_pattern": period}
    return config


def _gemma_query_scalar(header: GgufHeader, layers_of_the_largest: int) -> float:
    """Return the number by whose square root queries are divided. The file does not contain this number.

    As in llama.cpp, the number is the head size. For the largest model, which is recognized by its number of layers,
    the number is the hidden size divided by the number of heads.
    """
    if header.num_layers == layers_of_the_largest:
        return float(header.require_value("embedding_length") // header.require_value("attention.head_count"))
    return float(header.head_dim)


def _phi3(header: GgufHeader) -> Config:
    original = header.value("rope.scaling.original_context_length", header.require_value("context_length"))
    return {
        "original_max_position_embeddings": original,
        "partial_rotary_factor": header.value("rope.dimension_count", header.head_dim) / header.head_dim,
    }


def _routing(header: GgufHeader, experts: str) -> Config:
    """Return the number of experts under the key ``experts``, and the number of experts for each token.

    E.g. ``{"num_experts": 128, "num_experts_per_tok": 8}``.

    Raises:
        UnsupportedModelError: the numbers do not fit each other.
        ModelLoadError: a number is missing.
    """
    count, used = header.require_value("expert_count"), header.require_value("expert_used_count")
    if not 0 < used <= count:
        raise UnsupportedModelError(
            f"{header.path.name}: {header.architecture} with {short(used)} of {short(count)} experts is not supported"
        )
    return {experts: count, "num_experts_per_tok": used}


def _gpt_oss(header: GgufHeader) -> Config:
    kinds = {True: "sliding_attention", False: "full_attention"}
    layers = [kinds[sliding] for sliding in _sliding_layers(header, period=2)]
    if header.value("rope.freq_base_swa", header.rope_theta) != header.rope_theta:
        raise UnsupportedModelError(f"{header.path.name}: gpt-oss with two RoPE bases is not supported")
    return {
        **_routing(header, "num_local_experts"),
        "intermediate_size": header.require_value("expert_feed_forward_length"),
        "sliding_window": header.require_value("attention.sliding_window"),
        "layer_types": layers,
    }


def _mixtral(header: GgufHeader) -> Config:
    return _routing(header, "num_local_experts")


def _qwen_experts(header: GgufHeader) -> Config:
    routing = _routing(header, "num_experts")
    inner = header.require_value("feed_forward_length")
    return {
        **routing,
        "moe_intermediate_size": header.value("expert_feed_forward_length", inner // routing["num_experts_per_tok"]),
        # For qwen2moe: an expert that every token uses.
        "shared_expert_intermediate_size": header.value("expert_shared_feed_forward_length", inner),
        # For qwen3moe: experts in every layer. llama.cpp always normalizes their weights to a sum of 1.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _granite(header: GgufHeader) -> Config:
    return {
        "attention_multiplier": header.value("attention.scale") or header.head_dim**-0.5,
        "embedding_multiplier": header.value("embedding_scale") or 1.0,
        "residual_multiplier": header.value("residual_scale") or 1.0,
        "logits_scaling": header.require_value("logit_scale"),
    }


def _olmo2(header: GgufHeader) -> Config:
    if header.value("attention.sliding_window", 0):
        raise UnsupportedModelError(
            f"{header.path.name}: olmo2 with a sliding window (Olmo 3) is not supported as GGUF"
        )
    return {}


_PHI3 = {**_DENSE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OLMO2 = {**_EMBEDDINGS, **_ATTENTION, **_MLP, **_NORMS_AFTER}
_GPT_OSS = {
    **_EMBEDDINGS,
    **_ATTENTION,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    **_experts("mlp.router", "mlp.experts"),
}
_QWEN_EXPERTS = {**_DENSE, **_experts("mlp.gate", "mlp.switch_mlp")}
_MIXTRAL = Architecture(
    "mixtral",
    {**_DENSE, **_experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp")},
    _mixtral,
    own_head_dim=False,
    rope_scaling=(),
    interleaved=True,
    rope_traditional=True,
)
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, rope_traditional=True),
    "qwen2": Architecture("qwen2", own_head_dim=False),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_QWEN_EXPERTS, **_SHARED_EXPERT, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        _qwen_experts,
        own_head_dim=False,
        rope_scaling=(),
    ),
    "qwen3moe": Architecture("qwen3_moe", _QWEN_EXPERTS, _qwen_experts, rope_scaling=()),
    "gemma2": Architecture("gemma2", _GEMMA, _gemma2, rope_scaling=(), norm_offset=1.0, needs_bfloat16=True),
    "gemma3": Architecture("gemma3_text", _GEMMA, _gemma3, norm_offset=1.0, needs_bfloat16=True),
    "phi3": Architecture("phi3", _PHI3, _phi3, own_head_dim=False, rope_scaling=("longrope",)),
    "gpt-oss": Architecture("gpt_oss", _GPT_OSS, _gpt_oss, needs_bfloat16=True),
    "granite": Architecture("granite", settings=_granite, own_head_dim=False, interleaved=True),
    "olmo2": Architecture("olmo2", _OLMO2, _olmo2),
    "smollm3": Architecture("smollm3", interleaved=True, rope_traditional=True),
}
