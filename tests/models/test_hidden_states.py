"""Hidden states of every architecture in the table, compared with the LM head's input in mlx-lm's own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gpt2
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.loader import LoadedModel
from metal_engine.engine.pooling_defaults import resolve_pooling
from metal_engine.errors import ParameterError
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.models.info import model_info
from metal_engine.models.paged_model import PagedModel
from metal_engine.pooling_params import PoolingParams
from tests.support.sweeps import sweep
from tools.fixtures.architectures import SUPPORTED, VOCAB_SIZE, configuration
from tools.fixtures.tiny_models import random_model

BLOCK_SIZE = 4
LENGTHS = (7, 5)
TRUNKS = ("model", "transformer", "backbone")
# Architectures whose mlx-lm trunk does not end at the final norm.
FINAL_NORMS = {
    "gemma3n": "model.language_model.norm",
    "gpt_neox": "model.final_layer_norm",
    "lille-130m": "transformer.norm",
    "phixtral": "lm_head.ln",
}


def own_hidden_states(model: nn.Module, model_type: str, tokens: np.ndarray) -> np.ndarray:
    """Return the output of mlx-lm's trunk, [T, hidden_size], in mlx-lm's own forward pass over its own cache."""
    modules = dict(model.named_modules())
    prefix = "language_model." if "language_model" in modules else ""
    name = FINAL_NORMS.get(model_type) or next(prefix + name for name in TRUNKS if prefix + name in modules)
    module, cls = modules[name], type(modules[name])
    outputs = []

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outputs.append(cls.__call__(self, *args, **kwargs))
        return outputs[-1]

    module.__class__ = type(cls.__name__, (cls,), {"__call__": noted})
    try:
        model(mx.array(tokens)[None], cache=make_prompt_cache(model))
    finally:
        module.__class__ = cls
    (output,) = outputs
    return np.array(output[0])


def packed_hidden_states(paged: PagedModel, tokens: list[np.ndarray]) -> np.ndarray:
    """Return hidden states of the tokens of several requests in one step, [N, hidden_size]. No row uses the head."""
    max_blocks = -(-max(map(len, tokens)) // BLOCK_SIZE)
    table = np.arange(len(tokens) * max_blocks, dtype=np.int32).reshape(len(tokens), max_blocks)[:, ::-1]
    paged.pool.allocate(table.size, BLOCK_SIZE, len(tokens))
    starts, lengths = np.zeros(len(tokens), np.int32), list(map(len, tokens))
    slots = np.arange(1, len(tokens) + 1, dtype=np.int32)
    rows = step_rows(table, starts, lengths, BLOCK_SIZE, state_slots=(np.full_like(slots, ZERO_STATE_SLOT), slots))
    none, every = mx.zeros((0,), mx.int32), mx.arange(sum(lengths))
    input_ids = mx.array(np.concatenate(tokens).astype(np.int32))
    logits, hidden = paged.forward(input_ids, rows, PortableBackend().for_step(rows), none, every)
    assert logits.shape[0] == 0 and hidden is not None
    return np.array(hidden)


# Trunks of all kinds: plain, tied, within a multimodal model, scaled, per-layer inputs, recurrent, with an index.
SOME = [
    *("llama", "gpt2", "gpt_neox", "gemma3_text", "gemma3n", "gemma4", "qwen3_vl", "qwen3_5", "llama4", "minicpm"),
    *("phimoe", "mamba", "rwkv7", "falcon_h1", "kimi_k3", "deepseek_v32", "longcat_flash_ngram", "minimax_m3_vl"),
]


@pytest.mark.parametrize("model_type", sweep(zip(SUPPORTED), zip(SOME)))
def test_hidden_states_equal_the_lm_head_input_of_mlx_lm(model_type: str) -> None:
    model = random_model(configuration(model_type))
    rng = np.random.default_rng(3)
    tokens = [rng.integers(0, VOCAB_SIZE, n) for n in LENGTHS]
    expected = np.concatenate([own_hidden_states(model, model_type, ids) for ids in tokens])
    paged = PagedModel(model)
    assert paged.hidden_problem is None
    found = packed_hidden_states(paged, tokens)
    assert found.shape == expected.shape and expected.shape[-1] != VOCAB_SIZE
    for own, row in zip(expected, found, strict=True):
        assert np.abs(own - row).max() / np.abs(own).max() < 1e-4


class HeadWithNorm(gpt2.Model):
    """A model whose last norm is not a module."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.model.wte.as_linear(mx.fast.rms_norm(self.model(inputs, cache), None, 1e-6))


def test_a_model_that_normalizes_after_its_trunk_gives_no_hidden_states() -> None:
    config = configuration("gpt2")
    problem = PagedModel(HeadWithNorm(gpt2.ModelArgs.from_dict(config))).hidden_problem
    assert problem is not None and "normalized once more" in problem
    assert PagedModel(random_model(config)).hidden_problem is None


def test_a_trunk_as_wide_as_the_vocabulary_gives_no_embeddings() -> None:
    """The output might be the logits. The model still generates."""
    config = {**configuration("llama"), "vocab_size": 32}
    loaded = LoadedModel(random_model(config), config, None, Path(), frozenset(), "x")  # type: ignore[arg-type]
    info = model_info(loaded, PagedModel(loaded.model))
    with pytest.raises(ParameterError, match="gives no embeddings here: the output of its Linear is as wide"):
        resolve_pooling(PoolingParams(), info)
    assert resolve_pooling(PoolingParams(token_ids=(1, 2)), info).token_ids == (1, 2)
