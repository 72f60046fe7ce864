"""Shapes of published checkpoints for the architectures of docs/models.md. Kernels are compiled for these shapes.

An attention layer has a row of text, ``shapes | kinds``, with one or more shapes::

    32/8x128             32 query heads, 8 KV heads, head_dim 128
    16/16x192:128        K has 192 numbers a head, V has 128
    128xlatent512+64     128 query heads over one latent of 512 numbers and a position part of 64
    | window full        layers of both kinds; default: full
    | window+sinks       other properties of the layers: softcap, sinks

An architecture with many sizes has one shape for each ratio of heads and each head_dim. If no checkpoint defines sizes,
the row has the defaults of mlx-lm's configuration, or sizes of a similar model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from metal_engine.attention.indexed import SelectionSize


@dataclass(frozen=True)
class Attention:
    """Attention layer.

    If ``rope_dim`` is above 0, all heads read one latent of ``head_dim`` numbers and ``rope_dim`` position numbers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_dim: int = 0
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def is_latent(self) -> bool:
        return self.rope_dim > 0

    def __str__(self) -> str:
        size = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}:{self.v_head_dim}"
        size = f"latent{self.head_dim}+{self.rope_dim}" if self.is_latent else size
        heads = f"{self.num_heads}" if self.is_latent else f"{self.num_heads}/{self.num_kv_heads}"
        return "+".join([f"{heads}x{size}", *(n for n in ("window", "softcap", "sinks") if getattr(self, n))])


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule: key and value heads, their sizes, and whether each column has its own decay."""

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    vector_gate: bool = False


@dataclass(frozen=True)
class Mamba2:
    """Mamba2's recurrence: heads, groups of heads that share B and C, and the size of a head's state."""

    num_heads: int
    num_groups: int
    head_dim: int
    columns: int


@dataclass(frozen=True)
class Convolution:
    """Short convolution over each channel."""

    kernel_size: int
    bias: bool


Layer = Attention | GatedDelta | Mamba2 | Convolution

_LATENT = "16xlatent512+64 20xlatent512+64 32xlatent512+64 64xlatent512+64 128xlatent512+64"
_LLAMA = (
    "32/32x128 40/40x128 32/8x128 24/8x128 40/8x128 64/8x128 56/8x128 128/8x128 32/8x64 32/4x64 32/32x64 9/3x64 "
    "15/5x64 32/32x80 32/8x120 32/32x100 6/6x48"
)
_QWEN3 = "16/8x128 32/8x128 40/8x128 64/8x128"
_QWEN3_MOE = "32/4x128 64/4x128"
_MISTRAL = "32/8x128 96/8x128"

# model_type -> rows.
ATTENTION: dict[str, tuple[str, ...]] = {
    "afm7": ("16/2x128",),
    "afmoe": ("8/2x128 32/4x128 48/8x128 | full window",),
    "apertus": ("32/8x128 64/8x128",),
    "baichuan_m1": ("32/8x128 | full window",),  # a common shape: the published heads are not known here
    "bailing_hybrid": (_LATENT,),
    "bailing_moe": ("16/4x128 64/8x128",),
    "bailing_moe_linear": ("16/4x128 32/4x128",),
    "bailing_moe_v3": (_LATENT,),
    "cohere": ("32/8x128 64/8x128 64/64x128 96/8x128",),
    "cohere2": ("32/8x128 96/8x128 | full window",),
    "dbrx": ("48/8x128",),
    "deepseek": ("16/16x128",),
    "deepseek_v2": ("16/16x192:128 128/128x192:128",),
    "deepseek_v3": (_LATENT,),
    "deepseek_v32": (_LATENT,),
    "dots1": ("32/32x128",),
    "ernie4_5": ("16/2x128",),
    "ernie4_5_moe": ("20/4x128 64/8x128",),
    "exaone": ("32/8x80 32/8x128 40/8x128",),
    "exaone4": ("32/8x64 40/8x128 | full window",),
    "exaone_moe": ("64/8x128 | full window",),
    "falcon_h1": ("8/2x64 8/2x128 10/2x128 12/2x128 20/4x128",),
    "gear": ("32/8x64 | full window",),
    "gemma": ("8/1x256 16/16x256",),
    "gemma2": ("8/4x256 16/8x256 32/16x128 | softcap",),
    "gemma3": ("4/1x256 8/4x256 16/8x256 32/16x128 | full window",),
    "gemma3_text": ("4/1x256 8/4x256 16/8x256 32/16x128 | full window",),
    "gemma3n": ("8/2x256 | full window",),
    "gemma4": ("8/1x256 8/2x256 16/8x256 32/16x256 | window", "8/1x512 8/2x512 16/2x512 32/4x512"),
    "gemma4_text": ("8/1x256 8/2x256 16/8x256 32/16x256 | window", "8/1x512 8/2x512 16/2x512 32/4x512"),
    "glm": ("32/2x128 16/4x128 24/6x128",),
    "glm4": ("32/2x128 48/2x128 48/8x128",),
    "glm4_moe": ("96/8x128",),
    "glm4_moe_lite": (_LATENT,),
    "glm_moe_dsa": (_LATENT,),
    "gpt2": ("12/12x64",),
    "gpt_bigcode": ("16/1x128 32/1x128 48/1x128",),
    "gpt_neox": ("8/8x64 4/4x32 16/16x128 32/32x80 64/64x96 8/8x256",),
    "gpt_oss": ("64/8x64 | full+sinks window+sinks",),
    "gptj": ("16/16x256",),
    "granite": ("32/8x64 32/8x128",),
    "granitemoe": ("16/8x64 24/8x64",),
    "granitemoehybrid": ("12/4x128 32/8x128 40/8x64 16/4x64",),
    "helium": ("16/8x128 20/20x128",),
    "hunyuan": ("80/8x128 32/8x128",),
    "hunyuan_v1_dense": ("16/8x128 32/8x128",),
    "internlm2": ("16/8x128 32/8x128 48/8x128",),
    "internlm3": ("32/2x128",),
    "iquestloopcoder": ("40/8x128 | full window",),
    "jamba": ("32/8x128 20/1x128",),
    "kimi_k25": (_LATENT,),
    "kimi_k3": (_LATENT, "96xlatent512+64"),
    "kimi_linear": (_LATENT,),
    "kimi_vl": (_LATENT,),
    "Klear": ("32/4x64 32/4x128",),
    "laguna": ("48/8x128 | full window",),
    "lfm2": ("16/8x64 32/8x64",),
    "lfm2-vl": ("16/8x64 32/8x64",),
    "lfm2_moe": ("32/8x64",),
    "lille-130m": ("12/4x64",),
    "llama": (_LLAMA,),
    "llama4": ("40/8x128",),
    "llama4_text": ("40/8x128 24/6x64",),
    "longcat_flash": (_LATENT,),
    "longcat_flash_ngram": (_LATENT,),
    "mellum": ("32/4x128 | full window",),
    "mimo": ("32/8x128",),
    "mimo_v2_flash": ("64/4x192:128", "64/8x192:128 | window+sinks"),
    "minicpm": ("36/36x64 24/8x64 16/2x64 32/2x128",),
    "minicpm3": ("40/40x96:64",),
    "minimax": ("48/8x128",),
    "minimax_m3_vl": ("64/4x128",),
    "ministral3": ("32/8x128",),
    "mistral": (_MISTRAL,),
    "mistral3": (f"{_MISTRAL} | full window",),
    "mistral4": ("32xlatent256+64", _LATENT),
    "mixtral": ("32/8x128 48/8x128",),
    "muse_glimmer": ("32/2x128 | full window",),
    "nanbeige": ("20/4x128",),
    "nanochat": ("10/10x128",),
    "nemotron": ("24/8x128 32/8x128 48/8x128",),
    "nemotron-nas": ("64/8x128 64/4x128",),
    "nemotron_h": ("32/8x128 40/8x128 32/2x128",),
    "olmo2": ("16/16x128 32/32x128 40/8x128",),
    "olmo3": ("32/32x128 40/8x128 | full window",),
    "olmo_hybrid": ("30/30x128",),
    "olmoe": ("16/16x128",),
    "openelm": ("12/3x64 24/6x128",),
    "phi": ("32/32x64 32/32x80",),
    "phi3": ("32/32x96 40/10x128 24/8x128",),
    "phimoe": ("32/8x128",),
    "phixtral": ("32/32x80",),
    "pixtral": ("32/8x128",),
    "plamo": ("40/5x128",),
    "plamo2": ("32/4x128",),
    "plamo3": ("32/4x128 | full window",),
    "prism_hadamard_qwen35": ("8/2x256 16/4x256 24/4x256",),
    "qwen": ("16/16x128 32/32x128",),
    "qwen2": ("14/2x64 12/2x128 16/2x128 28/4x128 40/8x128 64/8x128",),
    "qwen2_moe": ("16/16x128 28/4x128",),
    "qwen2_vl": ("12/2x128 28/4x128 64/8x128",),
    "qwen3": (_QWEN3,),
    "qwen3_5": ("8/2x256 16/4x256 24/4x256",),
    "qwen3_5_moe": ("16/2x256 32/2x256",),
    "qwen3_moe": (_QWEN3_MOE,),
    "qwen3_next": ("16/2x256",),
    "qwen3_vl": (_QWEN3,),
    "qwen3_vl_moe": (_QWEN3_MOE,),
    "recurrent_gemma": ("10/1x256 16/1x256 | window",),
    "seed_oss": ("80/8x128",),
    "smollm3": ("16/4x128",),
    "solar_open": ("64/8x128",),
    "spark2_5": ("16/4x256 | full window",),
    "stablelm": ("32/32x64 32/32x80 32/8x160",),
    "starcoder2": ("24/2x128 36/4x128 48/4x128",),
    "step3p5": ("64/8x128", "96/8x128 | window"),
    "talkie": ("40/40x128",),
    "telechat3": ("48/8x128",),
    "youtu_llm": ("16/16x192:128",),
}

# model_type -> heads and head_dim of an index, and the number of keys that a row selects. Heads of an index of blocks
# have scores of their own.
INDEXES: dict[str, tuple[int, int, SelectionSize]] = {
    "deepseek_v32": (64, 128, SelectionSize(2048)),
    "glm_moe_dsa": (32, 128, SelectionSize(2048)),
    "minimax_m3_vl": (4, 128, SelectionSize(16, 128, 1)),
}

# model_type -> recurrent layers. Architectures whose recurrences use mlx-lm's own functions have only their
# convolutions here, if any.
RECURRENT: dict[str, tuple[Layer, ...]] = {
    "baichuan_m1": (),
    "bailing_hybrid": (),
    "bailing_moe_linear": (),
    "bailing_moe_v3": (GatedDelta(16, 16, 128, 128, vector_gate=True), Convolution(4, bias=False)),
    "falcon_h1": (
        Mamba2(24, 1, 64, 128), Mamba2(32, 1, 96, 256), Mamba2(24, 1, 128, 256), Mamba2(32, 2, 128, 256),
        Convolution(4, bias=True),
    ),
    "gear": (Convolution(3, bias=False),),
    "granitemoehybrid": (
        Mamba2(48, 1, 64, 128), Mamba2(64, 1, 64, 128), Mamba2(128, 1, 64, 128), Convolution(4, bias=True),
    ),
    "jamba": (Convolution(4, bias=True),),
    "kimi_k3": (GatedDelta(96, 96, 128, 128, vector_gate=True), Convolution(4, bias=False)),
    "kimi_linear": (GatedDelta(32, 32, 128, 128, vector_gate=True), Convolution(4, bias=False)),
    "lfm2": (Convolution(3, bias=False),),
    "lfm2-vl": (Convolution(3, bias=False),),
    "lfm2_moe": (Convolution(3, bias=False),),
    "longcat_flash_ngram": (),
    "mamba": (Convolution(4, bias=True),),
    "mamba2": (Mamba2(24, 1, 64, 128), Mamba2(80, 1, 64, 128), Mamba2(128, 8, 64, 128), Convolution(4, bias=True)),
    "nemotron_h": (Mamba2(128, 8, 64, 128), Mamba2(128, 8, 80, 128), Mamba2(64, 8, 64, 128), Convolution(4, bias=True)),
    "olmo_hybrid": (GatedDelta(30, 30, 96, 192), Convolution(4, bias=False)),
    "plamo2": (Mamba2(64, 1, 128, 64), Convolution(4, bias=False)),
    "prism_hadamard_qwen35": (
        GatedDelta(16, 16, 128, 128), GatedDelta(16, 32, 128, 128), GatedDelta(16, 48, 128, 128),
        Convolution(4, bias=False),
    ),
    "qwen3_5": (
        GatedDelta(16, 16, 128, 128), GatedDelta(16, 32, 128, 128), GatedDelta(16, 48, 128, 128),
        Convolution(4, bias=False),
    ),
    "qwen3_5_moe": (GatedDelta(16, 32, 128, 128), GatedDelta(16, 64, 128, 128), Convolution(4, bias=False)),
    "qwen3_next": (GatedDelta(16, 32, 128, 128), Convolution(4, bias=False)),
    "recurrent_gemma": (),
    "rwkv7": (),
}  # fmt: skip

_LATENT_SIZE = re.compile(r"(\d+)xlatent(\d+)\+(\d+)")
_SIZE = re.compile(r"(\d+)/(\d+)x(\d+)(?::(\d+))?")


def attention_layers(row: str) -> Iterator[Attention]:
    """Yield the layers of a row of ATTENTION. The module's docstring explains the format.

    Raises ValueError if a shape has another format.
    """
    sizes, _, kinds = row.partition("|")
    for size in sizes.split():
        for kind in kinds.split() or ["full"]:
            has = {name: True for name in kind.split("+") if name != "full"}
            if found := _LATENT_SIZE.fullmatch(size):
                heads, latent, rope = map(int, found.groups())
                yield Attention(heads, 1, latent, latent, rope, **has)
            elif found := _SIZE.fullmatch(size):
                heads, kv_heads, head_dim = map(int, found.groups()[:3])
                yield Attention(heads, kv_heads, head_dim, int(found[4] or head_dim), **has)
            else:
                raise ValueError(f"{size!r} is no attention shape")


def layers_by_model() -> dict[str, list[Layer]]:
    """Return a map from each model_type to the layers that its published checkpoints have, without duplicates."""
    found: dict[str, list[Layer]] = {}
    for model_type in sorted({*ATTENTION, *RECURRENT}, key=str.lower):
        attention = [layer for row in ATTENTION.get(model_type, ()) for layer in attention_layers(row)]
        found[model_type] = list(dict.fromkeys([*attention, *RECURRENT.get(model_type, ())]))
    return found
