"""The layers of a model that LoRA adapters add to, for every architecture, and the products."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.lora import layers as models_adapters
from metal_engine.lora.layers import AdaptedLayer, AdapterRows, Weights
from metal_engine.models.lora_targets import adapter_targets
from metal_engine.models.paged_model import PagedModel
from metal_engine.request import TokenLogprobs
from metal_engine.sampling_params import SamplingParams
from tests.support import adapters
from tests.support.tiny_engine import log_softmax, tiny_reference
from tools.fixtures.architectures import SUPPORTED
from tools.fixtures.lora_adapters import products_for

MAX_LORAS, MAX_RANK, INPUTS, OUTPUTS = 3, 4, 6, 5


def put(layer: AdaptedLayer, slot: int, weights: Weights | None) -> int:
    """Write weights to a slot. Return the number of parts."""
    return len(list(layer.set_weights(slot, weights)))


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("shape", [(7, 1), (1, 7), (7,)])
def test_products(shape: tuple[int, ...], is_sorted: bool, everywhere: bool) -> None:
    """Each row gets its own adapter's addition, compared with NumPy. Ranks differ; one adapter adds nothing here."""
    rng = np.random.default_rng(0)
    layer = AdaptedLayer((INPUTS, OUTPUTS), MAX_LORAS, MAX_RANK, mx.float32)
    weights = {slot: (rng.normal(size=(INPUTS, r)), rng.normal(size=(r, OUTPUTS))) for slot, r in ((1, 2), (3, 4))}
    for slot, (a, b) in weights.items():
        put(layer, slot, (a.astype(np.float32), b.astype(np.float32)))
    slots = np.array([0, 3, 1, 0, 2, 3, 1], np.int32)
    x, y = rng.normal(size=(7, INPUTS)), rng.normal(size=(7, OUTPUTS))
    rows = AdapterRows(slots, is_sorted=is_sorted, everywhere=everywhere)
    given = mx.array(x.astype(np.float32)).reshape(*shape, INPUTS)
    found = rows.added(layer, given, mx.array(y.astype(np.float32)).reshape(*shape, OUTPUTS))
    expected = np.array([row if s not in weights else row + x[i] @ weights[s][0] @ weights[s][1]
                         for i, (s, row) in enumerate(zip(slots.tolist(), y, strict=True))])  # fmt: skip
    assert found.shape == (*shape, OUTPUTS)
    np.testing.assert_allclose(np.array(found).reshape(7, OUTPUTS), expected, atol=1e-5)
    # Another input of the same step, then the first input again.
    again = rows.added(layer, given * 2, mx.zeros((*shape, OUTPUTS)))
    np.testing.assert_allclose(np.array(again).reshape(7, OUTPUTS), 2 * (expected - y), atol=1e-5)
    with pytest.raises(ValueError, match="for 7 rows"):
        rows.added(layer, mx.zeros((6, 1, INPUTS)), mx.zeros((6, 1, OUTPUTS)))


def test_setting_slot_weights_does_not_change_other_slots_or_earlier_steps() -> None:
    layer = AdaptedLayer((INPUTS, OUTPUTS), MAX_LORAS, MAX_RANK, mx.float32)
    ones = np.ones((INPUTS, 1), np.float32), np.ones((1, OUTPUTS), np.float32)
    put(layer, 1, ones)
    put(layer, 2, (2 * ones[0], ones[1]))
    x, y = mx.ones((2, 1, INPUTS)), mx.zeros((2, 1, OUTPUTS))
    rows = AdapterRows(np.array([1, 2], np.int32), is_sorted=False)
    in_flight = rows.added(layer, x, y)  # built, not computed
    put(layer, 2, None)
    assert layer.slots == {1}
    assert np.array(rows.added(layer, x, y))[:, 0, 0].tolist() == [INPUTS, 0]
    assert np.array(in_flight)[:, 0, 0].tolist() == [INPUTS, 2 * INPUTS]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_weights_are_put_in_place_part_by_part(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    """Writing a part takes about the part's own memory, not the stacks', even if a step in flight reads the stacks."""
    part_bytes, inputs, outputs, max_rank = 1 << 14, 300, 500, 32
    monkeypatch.setattr(models_adapters, "PART_BYTES", part_bytes)
    rng = np.random.default_rng(0)
    layer = AdaptedLayer((inputs, outputs), 20, max_rank, dtype)
    old = rng.normal(size=(inputs, 32)).astype(np.float32), rng.normal(size=(32, outputs)).astype(np.float32)
    new = rng.normal(size=(inputs, 5)).astype(np.float32), rng.normal(size=(5, outputs)).astype(np.float32)
    put(layer, 2, old)
    put(layer, 3, old)
    in_flight = mx.exp(layer.a[2]).sum() + mx.exp(layer.b[2]).sum()
    mx.async_eval(in_flight)
    num_bytes = 4 * max_rank * (inputs + outputs)
    for weights in (new, None, old, new):
        parts = layer.set_weights(3, weights)
        sizes = []
        while True:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            size = next(parts, None)
            assert mx.get_peak_memory() - before <= 4 * part_bytes < layer.a.nbytes
            if size is None:
                break
            sizes.append(size)
        assert sum(sizes) == num_bytes and max(sizes) <= part_bytes
    for stack, (first, second) in ((layer.a, (old[0], new[0])), (layer.b, (old[1], new[1]))):
        expected = np.zeros(stack.shape, np.float32)
        expected[2], expected[3, : second.shape[0], : second.shape[1]] = first, second
        np.testing.assert_array_equal(np.array(stack.astype(mx.float32)), rounded(expected, dtype))


def test_a_slot_that_was_put_in_half_is_cleared() -> None:
    """The next adapter in the slot clears it, even if this adapter does not add to the layer."""
    layer = AdaptedLayer((INPUTS, OUTPUTS), MAX_LORAS, MAX_RANK, mx.float32)
    next(layer.set_weights(1, (np.ones((INPUTS, 1), np.float32), np.ones((1, OUTPUTS), np.float32))))
    assert layer.slots == {1} and np.array(layer.a).any()
    put(layer, 1, None)
    assert layer.slots == frozenset() and not np.array(layer.a).any()
    assert put(layer, 1, None) == 0


def rounded(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    return np.array(mx.array(array).astype(dtype).astype(mx.float32))


def test_targets_of_a_llama() -> None:
    targets = adapter_targets(PagedModel(tiny_reference()))
    assert len(targets.shapes) == 14 and targets.shapes["model.layers.1.mlp.down_proj"] == (128, 64)
    assert targets.refused == {"model.embed_tokens": "adapters of embeddings are not supported"}


# Softcapped attention, layers that share KV, experts, latent attention, recurrent layers by function and by module.
_OFTEN = ("gemma2", "gemma3n", "qwen3_moe", "deepseek_v2", "qwen3_5", "rwkv7")
# Layers of gemma3n whose weights the model reads directly. mlx-lm's LoRALinear does not expose its weights.
_NOT_IN_MLX_LM = ("correction_coefs", "prediction_coefs")
_FEWEST_TOKENS = 64  # smallest vocabulary, also for embeddings per layer
_PROMPT_ONLY = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@pytest.mark.parametrize(
    "architecture",
    [name if name in _OFTEN else pytest.param(name, marks=pytest.mark.full) for name in sorted(SUPPORTED)],
)
def test_an_adapter_of_all_targets_gives_the_logprobs_of_mlx_lm(architecture: str, tmp_path: Path) -> None:
    """An adapter of every possible layer, compared with mlx-lm's LoRA layers, in a step with rows of the base model."""
    paged = PagedModel(tiny_reference(architecture=architecture))
    targets = adapter_targets(paged)
    assert set(targets.shapes).isdisjoint(targets.refused)
    assert set(targets.refused) <= {name for name, _ in paged.model.named_modules()}
    if not targets.shapes:
        assert "it runs apart for each group of requests, where adapters are not supported" in targets.refused.values()
        return
    shapes = {name: shape for name, shape in targets.shapes.items() if not name.endswith(_NOT_IN_MLX_LM)}
    folder = adapters.write_mlx_lm(tmp_path, products_for(shapes, rank=2, seed=0), scale=1.0)
    num_state_slots = 12 if paged.pool.is_recurrent else 0
    engine = adapters.adapted_engine(
        {"a": folder},
        architecture=architecture,
        num_state_slots=num_state_slots,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    prompt = np.random.default_rng(0).integers(0, _FEWEST_TOKENS, 21).tolist()
    for name in ("a", "base"):
        (prepared,) = engine.prepare_all([prompt], _PROMPT_ONLY, adapter=engine.adapters.find(name))
        engine.add_request(name, prepared)
    found: dict[str, list[TokenLogprobs | None]] = {}
    while engine.has_requests:
        for output in engine.step():
            assert output.error is None and output.prompt_logprobs is not None, output.error
            found[output.request_id] = output.prompt_logprobs
    for name, path in (("a", folder), ("base", None)):
        model = adapters.mlx_lms(tiny_reference(architecture=architecture), path)
        # Without a cache, gemma3n's layers that share KV would have no KV to share.
        logits = model(mx.array([prompt]), cache=make_prompt_cache(model))[0].astype(mx.float32)
        expected = log_softmax(np.array(logits).astype(np.float64))[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose([one.logprob for one in found[name] if one is not None], expected, atol=1e-3)
