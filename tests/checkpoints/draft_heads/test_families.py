"""Draft heads of several families, from checkpoints with their published names, beside a computation of their own.

The computation follows each family's published definition in float64. Only the blocks are mlx-lm layers, from a
larger model. They run without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from metal_engine.checkpoints.draft_heads.weights import read_head
from metal_engine.errors import ModelLoadError
from metal_engine.models.draft_head import DraftHead, load_head
from tests.runner.test_speculation import check_same, params
from tests.support.draft_heads import watch_drafts
from tests.support.speculation import draft_for_free, head_config
from tests.support.tiny_engine import run_all, tiny_engine, tiny_reference
from tools.fixtures.architecture_parts import LATENT, MOE, YARN, Config
from tools.fixtures.architectures import configuration
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.tiny_models import random_model

Weights = dict[str, mx.array]
PARTS = ("embedding norm", "hidden norm", "projection", "last norm")
NEMOTRON = configuration("nemotron_h")


@dataclass(frozen=True)
class Family:
    """Published head of a family.

    Attributes:
        config: tiny configuration of the model.
        more: changes that give the configuration the head's blocks as further layers.
        parts: published names of :data:`PARTS`; None for a part that the head lacks.
        blocks: published prefixes of the head's blocks.
        hidden_first: True if the projection reads the hidden state first.
        options: options of the engine.
    """

    config: Config
    more: Config
    parts: tuple[str, str, str, str | None]
    blocks: tuple[str, ...]
    hidden_first: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def appended(config: Config) -> Family:
    """Return the form of DeepSeek and GLM: one layer after the model's last."""
    place = f"model.layers.{config['num_hidden_layers']}"
    parts = (f"{place}.enorm", f"{place}.hnorm", f"{place}.eh_proj", f"{place}.shared_head.norm")
    return Family(config, {"num_hidden_layers": config["num_hidden_layers"] + 1}, parts, (place,))


FAMILIES = {
    "deepseek_v3": appended({**configuration("deepseek_v3"), **MOE, **LATENT, "rope_scaling": YARN}),
    "deepseek_v32": appended(configuration("deepseek_v32")),
    "glm4_moe": appended(configuration("glm4_moe")),
    "glm4_moe_lite": appended(configuration("glm4_moe_lite")),
    "mimo": Family(
        configuration("mimo"),
        {"num_hidden_layers": 5},
        (
            "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
            "model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm",
        ),
        ("model.mtp_layers.0",),
        hidden_first=True,
    ),
    # The block is dense, like the model's first layer. The last norm is the model's.
    "ernie4_5_moe": Family(
        {**configuration("ernie4_5_moe"), "moe_layer_start_index": 1, "moe_layer_end_index": 3},
        {"num_hidden_layers": 5},
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None),
        ("model.mtp_block.0",),
    ),
    "nemotron_h": Family(
        {
            **NEMOTRON, **MOE, "moe_shared_expert_intermediate_size": 16,
            "hybrid_override_pattern": ["M", "*", "E", "M", "*"],
        },
        {"hybrid_override_pattern": ["M", "*", "E", "M", "*", "*", "E"]},
        ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm"),
        ("mtp.layers.0", "mtp.layers.1"),
        options={"num_state_slots": 200},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Model and head of a family, with random weights.

    Attributes:
        model: the model.
        larger: model of more layers, which are the head's blocks.
        parts: weights by :data:`PARTS`.
        weights: weights of the head by their published names.
    """

    family: Family
    model: nn.Module
    larger: nn.Module
    parts: Weights
    weights: Weights

    @property
    def blocks(self) -> list[nn.Module]:
        return self.larger.layers[len(self.model.layers) :]

    def write(self, folder: Path, more: Weights) -> Path:
        """Write the head's weights among some of the model's."""
        others = {"model.layers.0.input_layernorm.weight": mx.zeros(4), "lm_head.weight": mx.zeros((4, 4))}
        mx.save_safetensors(str(folder / "model.safetensors"), self.weights | others | more)
        return folder


def published_block(block: nn.Module) -> Weights:
    """Return a block's weights as they are published: single experts, and latents in one matrix."""
    flat: Any = tree_flatten(block.parameters())
    found: Weights = {}
    for name, array in flat:
        if ".switch_mlp." in name:
            single = name.replace("fc1", "up_proj").replace("fc2", "down_proj")
            found |= {single.replace("switch_mlp", f"experts.{i}"): mx.contiguous(one) for i, one in enumerate(array)}
        elif name == "self_attn.embed_q.weight":
            up = dict(flat)["self_attn.unembed_out.weight"]
            both = mx.concatenate([array.swapaxes(-1, -2), up], axis=1)
            found["self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
        elif name != "self_attn.unembed_out.weight":
            found[name] = array
    return found


@cache
def published(name: str) -> Published:
    family = FAMILIES[name]
    model = tiny_reference(architecture=family.config)
    larger = random_model({**family.config, **family.more}, seed=3)
    size = family.config["hidden_size"]
    mx.random.seed(4)
    parts = {part: mx.random.normal((size,)) * 0.3 + 1.0 for part in PARTS}
    parts["projection"] = mx.random.normal((size, 2 * size)) * 0.2
    weights = {f"{name}.weight": parts[part] for part, name in zip(PARTS, family.parts, strict=True) if name}
    for place, block in zip(family.blocks, larger.layers[len(model.layers) :], strict=True):
        weights |= {f"{place}.{own}": array for own, array in published_block(block).items()}
    return Published(family, model, larger, parts, weights)


def rms_norm(x: np.ndarray, weight: mx.array, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.array(weight).astype(np.float64)


class Reference:
    """Output of a family's head for one sequence, without a cache, by its published definition."""

    def __init__(self, name: str) -> None:
        self.head = published(name)
        self.model = self.head.model
        config = self.head.family.config
        self.eps = config["layer_norm_epsilon"] if name == "nemotron_h" else config["rms_norm_eps"]
        trunk = self.model.backbone if name == "nemotron_h" else self.model.model
        self.trunk, self.table = (
            trunk,
            np.array(next(trunk[n] for n in ("embed_tokens", "embeddings") if n in trunk).weight),
        )
        self.lm_head = np.array(self.model.lm_head.weight).astype(np.float64)

    def hidden(self, token_ids: list[int]) -> np.ndarray:
        """Return the hidden states that the head is trained on: Ernie's from before the last norm, [T, H]."""
        if self.head.family.parts[3] is None:
            norm, self.trunk.norm = self.trunk.norm, nn.Identity()
            try:
                return np.array(self.trunk(mx.array(token_ids)[None])[0]).astype(np.float64)
            finally:
                self.trunk.norm = norm
        return np.array(self.trunk(mx.array(token_ids)[None])[0]).astype(np.float64)

    def states(self, following: list[int], hidden: np.ndarray) -> np.ndarray:
        """Return the states after the blocks, [T, H]."""
        parts = self.head.parts
        inputs = [
            rms_norm(self.table[following].astype(np.float64), parts["embedding norm"], self.eps),
            rms_norm(hidden, parts["hidden norm"], self.eps),
        ]
        joined = np.concatenate(inputs[::-1] if self.head.family.hidden_first else inputs, -1)
        x = mx.array((joined @ np.array(parts["projection"]).T.astype(np.float64)).astype(np.float32))[None]
        mask = mx.tril(mx.ones((len(following), len(following)), mx.bool_))
        for block in self.head.blocks:
            x = block(x, mask)
        return np.array(x[0]).astype(np.float64)

    def normed(self, states: np.ndarray) -> np.ndarray:
        is_own = self.head.family.parts[3] is not None
        return rms_norm(states, self.head.parts["last norm"] if is_own else self.trunk.norm.weight, self.eps)

    def gap(self, known: list[int], drafts: list[int]) -> float:
        """Return the largest gap between the best logit and a draft's logit, relative to the largest logit."""
        hidden, following, gaps = self.hidden(known[:-1]), list(known[1:]), []
        chains_normed = self.head.family.parts[3] is not None
        for draft in drafts:
            states = self.states(following, hidden)
            logits = self.normed(states)[-1] @ self.lm_head.T
            gaps.append((logits.max() - logits[draft]) / np.abs(logits).max())
            chained = (self.normed(states) if chains_normed else states)[-1:]
            hidden, following = np.concatenate([hidden, chained]), [*following, draft]
        return float(max(gaps))


def loaded(name: str, folder: Path) -> Callable[[nn.Module], DraftHead]:
    place = published(name).write(folder, {})
    return lambda model: load_head(model, read_head(place, model), mx.float32, dequantize=False)


def error_of(name: str, head: DraftHead) -> float:
    """Return the largest difference of the head's logits from the definition's, relative to the largest logit."""
    reference, token_ids = Reference(name), byte_ids("a text of some tokens")
    known, following = token_ids[:-1], token_ids[1:]
    expected = reference.normed(reference.states(following, reference.hidden(known))) @ reference.lm_head.T
    embeddings, hidden = mx.array(reference.table[following])[None], reference.trunk(mx.array(known)[None])
    mask = mx.tril(mx.ones((len(known), len(known)), mx.bool_))
    found = np.array(head(embeddings, hidden, mask)[0]) @ reference.lm_head.T
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_draft_head_logits_equal_the_published_definition(name: str, tmp_path: Path) -> None:
    assert error_of(name, loaded(name, tmp_path)(published(name).model)) < 1e-4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name.startswith("glm4") else []) for name in FAMILIES]
)
def test_drafts_equal_the_definition_and_do_not_change_outputs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    requests = [(byte_ids(f"{i} goes on " * (1 + i)), params(temperature=0, max_tokens=8)) for i in range(2)]
    options: dict[str, Any] = {"architecture": family.config, "max_num_batched_tokens": 24, **family.options}
    expected = run_all(tiny_engine(**options), requests)
    engine = tiny_engine(speculative=head_config(2), make_head=loaded(name, tmp_path), **options)
    draft_for_free(engine)
    found = watch_drafts(monkeypatch)
    check_same(run_all(engine, requests), expected)
    assert len(found) > 5 and max(len(drafts) for _, drafts in found) == 2
    reference = Reference(name)
    assert max(reference.gap(known, drafts) for known, drafts in found) < 1e-4


def test_repeated_weights_must_be_the_model_s(tmp_path: Path) -> None:
    """DeepSeek's and GLM's checkpoints repeat the embedding table and the LM head."""
    head = published("glm4_moe")
    place = head.family.blocks[0]
    table, lm_head = head.model.model.embed_tokens.weight, head.model.lm_head.weight
    copies = {f"{place}.embed_tokens.weight": table, f"{place}.shared_head.head.weight": lm_head}
    (right := tmp_path / "right").mkdir()
    assert read_head(head.write(right, copies), head.model).arrays
    (wrong := tmp_path / "wrong").mkdir()
    with pytest.raises(ModelLoadError, match=r"shared_head.head.weight is not a copy of the model's"):
        read_head(head.write(wrong, {**copies, f"{place}.shared_head.head.weight": table}), head.model)


def test_a_quantized_head_with_latents(tmp_path: Path) -> None:
    """Quantized latents are split, and quantized experts are stacked, with the bits of the stored arrays."""
    head = published("glm4_moe_lite")
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size")
    full = {**head.family.config, **dict.fromkeys(sizes, 32)}
    model, larger = tiny_reference(architecture=full), random_model({**full, "num_hidden_layers": 5}, seed=3)
    place = head.family.blocks[0]
    weights = {
        name: array for name, array in head.weights.items() if name in [f"{part}.weight" for part in head.family.parts]
    }
    for name, array in published_block(larger.layers[4]).items():
        if array.ndim == 2 and "gate.weight" not in name:
            packed, scales, biases = mx.quantize(array, group_size=32, bits=8)
            module = f"{place}.{name.removesuffix('.weight')}"
            weights |= {f"{module}.weight": packed, f"{module}.scales": scales, f"{module}.biases": biases}
        else:
            weights[f"{place}.{name}"] = array
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), weights)
    found = load_head(model, read_head(tmp_path, model), mx.float32, dequantize=False)
    assert isinstance(found.layers[0].mlp.switch_mlp.up_proj, QuantizedSwitchLinear)
    x = mx.random.normal((1, 3, full["hidden_size"]))
    mask = mx.tril(mx.ones((3, 3), mx.bool_))
    np.testing.assert_allclose(found.layers[0](x, mask), larger.layers[4](x, mask), atol=0.3)
