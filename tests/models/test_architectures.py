"""Every architecture in the table, packed, chunked and interleaved, compared with mlx-lm's own forward pass."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.kernels
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models import bitlinear_layers, deepseek_v41, llama
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.find import check_architecture
from metal_engine.checkpoints.metadata import StoredTensor
from metal_engine.checkpoints.requirements import safetensors_requirements
from metal_engine.checkpoints.shared_indexes import check_indexes
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.rows import step_rows
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.kv_cache.spec import LatentSpec
from metal_engine.models.check import check_paged_model
from metal_engine.models.layer_cache import Attention, AttentionCall, AttentionMask, ChunkedLayerCache, LayerCache
from metal_engine.models.own_caches_model import open_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.support.sweeps import diagonal
from tools.docs.models import DOC, models_doc, supported_row
from tools.fixtures.architectures import METAL_ONLY, OWN_CACHES, SUPPORTED, UNSUPPORTED, VOCAB_SIZE, configuration
from tools.fixtures.tiny_models import open_model, random_model
from tools.metal_sim import metal_kernel

BLOCK_SIZE = 4
TOLERANCE = 1e-4  # difference of logits, relative to the largest logit of a row
# (request, tokens) of each segment in each step, in packing order: prefills, later chunks and decodes mixed.
STEPS = [
    [(0, 7), (1, 3)],
    [(1, 4), (2, 1), (0, 9)],
    [(2, 11), (0, 1), (1, 1)],
    [(0, 1), (2, 5), (1, 13)],
    [(1, 1), (2, 1), (0, 1)],
]
LENGTHS = [sum(n for step in STEPS for r, n in step if r == request) for request in range(3)]


@dataclass
class PackedRun:
    """Requests of random tokens in blocks of a shuffled pool, with their progress."""

    paged: PagedModel
    tokens: list[np.ndarray]
    block_table: np.ndarray = field(init=False)  # [B, max_blocks]
    computed: list[int] = field(init=False)
    slots: np.ndarray = field(init=False)  # [B] slots of recurrent states, shuffled

    def __post_init__(self) -> None:
        max_blocks = -(-max(map(len, self.tokens)) // BLOCK_SIZE)
        blocks = np.random.default_rng(1).permutation(len(self.tokens) * max_blocks)
        self.block_table = blocks.reshape(len(self.tokens), max_blocks).astype(np.int32)
        self.computed = [0] * len(self.tokens)
        self.slots = 1 + np.random.default_rng(2).permutation(len(self.tokens) + 3)[: len(self.tokens)].astype(np.int32)
        self.paged.pool.allocate(blocks.size, BLOCK_SIZE, len(self.tokens) + 3)

    def step(self, shares: list[tuple[int, int]], num_samples: list[int] | None = None) -> np.ndarray:
        """Run one step. Return the logits of the last row, or the last ``num_samples`` rows, of each segment."""
        order, lengths = [r for r, _ in shares], [n for _, n in shares]
        context_lens = np.array([self.computed[r] for r in order], np.int32)
        slots = self.slots[order]
        state_slots = np.where(context_lens > 0, slots, ZERO_STATE_SLOT), slots
        table = self.block_table[order]
        rows = step_rows(table, context_lens, lengths, BLOCK_SIZE, num_samples=num_samples, state_slots=state_slots)
        ids = [self.tokens[r][self.computed[r] : self.computed[r] + n] for r, n in shares]
        for r, n in shares:
            self.computed[r] += n
        input_ids = mx.array(np.concatenate(ids).astype(np.int32))
        return np.array(self.paged(input_ids, rows, PortableBackend().for_step(rows)))


def largest_error(model: nn.Module, paged: PagedModel) -> float:
    """Return the largest relative difference of logits between the packed run and mlx-lm's own forward pass."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB_SIZE, n) for n in LENGTHS]
    expected = [np.array(model(mx.array(t)[None], cache=make_prompt_cache(model))[0]) for t in tokens]
    run = PackedRun(paged, tokens)
    errors = []
    for shares in STEPS:
        for (request, _), logits in zip(shares, run.step(shares), strict=True):
            own = expected[request][run.computed[request] - 1]
            errors.append(np.abs(logits - own).max() / np.abs(own).max())
    return float(np.max(errors))  # NaN if any is


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_packed_equals_mlx_lm(model_type: str) -> None:
    model = random_model(configuration(model_type))
    paged = PagedModel(model)
    assert largest_error(model, paged) < TOLERANCE
    for layer in paged.layer_caches:
        assert layer.num_writes == len(STEPS)
        # There are more reads if other layers share the layer's K and V.
        assert layer.num_reads in (len(STEPS), 2 * len(STEPS))
    check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize("model_type", OWN_CACHES)
def test_architectures_over_mlx_lm_caches_give_the_logits_of_mlx_lm(model_type: str) -> None:
    """Compare with mlx-lm in the same chunks. With other chunks, mlx-lm rounds some cached values differently."""
    model = random_model(configuration(model_type))
    paged = open_paged_model(model)
    assert paged.own_caches_reason
    rng = np.random.default_rng(0)
    run = PackedRun(paged, [rng.integers(0, VOCAB_SIZE, n) for n in LENGTHS])
    caches = [make_prompt_cache(model) for _ in LENGTHS]
    for shares in STEPS:
        firsts = [run.computed[request] for request, _ in shares]
        for (request, n), first, logits in zip(shares, firsts, run.step(shares), strict=True):
            tokens = run.tokens[request][first : first + n]
            own = np.array(model(mx.array(tokens)[None], cache=caches[request])[0, -1])
            assert np.abs(logits - own).max() <= 1e-6 * np.abs(own).max()
    check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


def test_a_model_is_refused_if_a_later_token_changes_earlier_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a model with caches of its own attend to the next token of a chunk, which a chunk's last token cannot."""
    original = deepseek_v41._window_indices

    def to_the_next(*, previous: int, length: int, window: int) -> mx.array:
        indices = original(previous=previous, length=length, window=window)
        return mx.where(indices < 0, -1, mx.minimum(indices + 1, previous + length - 1))

    monkeypatch.setattr(deepseek_v41, "_window_indices", to_the_next)
    with pytest.raises(UnsupportedModelError, match="off from mlx-lm's own"):
        open_model(configuration("deepseek_v41"))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "deepseek_v41"])
def test_a_request_may_sample_at_several_rows(model_type: str) -> None:
    """Sample at the last rows of each segment. The segments sample at no row, one row, some rows and all rows."""
    model = random_model(configuration(model_type))
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB_SIZE, 12) for _ in range(4)]
    expected = [np.array(model(mx.array(t)[None], cache=make_prompt_cache(model))[0]) for t in tokens]
    run = PackedRun(open_paged_model(model), tokens)
    run.step([(0, 7), (1, 5), (2, 3), (3, 4)], [0, 1, 0, 4])
    got = run.step([(2, 6), (0, 1), (3, 3), (1, 7)], [3, 1, 0, 7])
    wanted = [(2, 6), (2, 7), (2, 8), (0, 7), *((1, p) for p in range(5, 12))]
    assert len(got) == len(wanted)
    for logits, (request, position) in zip(got, wanted, strict=True):
        own = expected[request][position]
        assert np.abs(logits - own).max() / np.abs(own).max() < TOLERANCE


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_architectures_are_refused_with_the_reason(model_type: str) -> None:
    reason = UNSUPPORTED[model_type][1]
    with pytest.raises(UnsupportedModelError) as refusal:
        open_model(configuration(model_type))
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "fields", [{"indexer_types": ["full", "shared"] * 2}, {"index_topk_freq": 4.0}, {"index_topk_pattern": "FSSS"}]
)
def test_layers_that_share_picks_are_refused_with_that_reason(fields: dict[str, Any]) -> None:
    """GLM-5.2's checkpoints have an index in few layers. mlx-lm's architecture has one in each."""
    with pytest.raises(UnsupportedModelError, match=r"another layer's index picks.* needs an index in each layer"):
        open_model(configuration("glm_moe_dsa") | fields)
    with pytest.raises(UnsupportedModelError, match="another layer's index picks"):
        check_indexes("x", {"model_type": "glm5v", "text_config": configuration("glm_moe_dsa") | fields})
    check_indexes("x", configuration("glm_moe_dsa") | {"index_topk_freq": 1, "index_topk_pattern": "FFFF"})
    check_indexes("x", configuration("glm_moe_dsa") | {"index_topk_freq": "1", "index_topk_pattern": 5})


def test_a_variant_that_mlx_lm_does_not_support_is_refused_by_its_configuration() -> None:
    with pytest.raises(UnsupportedModelError, match="engram memory"):
        check_architecture(configuration("deepseek_v41") | {"engram_layer_ids": [1]}, EngineArgs(model="x"))


def test_a_checkpoint_without_an_index_in_each_layer_is_refused_before_its_weights_are_read() -> None:
    """Some copies of GLM-5.2 may lack the setting in their configuration."""
    config = configuration("glm_moe_dsa")
    names = [f"model.layers.{layer}.self_attn.indexer.wk.weight" for layer in range(config["num_hidden_layers"] + 1)]
    tensors = [StoredTensor(name, "BF16", (8, 8)) for name in names]
    args, device = EngineArgs(model="a/copy"), DeviceInfo(kind="cpu", name="", compute="", memory_bytes=1 << 40)
    safetensors_requirements(config, tensors, args, device)
    for missing in (1, 3):
        with pytest.raises(UnsupportedModelError, match=r"a/copy: some layers attend to .* needs an index in each"):
            safetensors_requirements(config, [t for t in tensors if t.name != names[missing]], args, device)


def reload_kernels() -> None:
    """Make mlx-lm create its own Metal kernels again."""
    kernels = [f"mlx_lm.kernels.{module.name}" for module in pkgutil.iter_modules(mlx_lm.kernels.__path__)]
    models = [f"mlx_lm.models.{model_type}" for model_type in METAL_ONLY]
    for name in (*kernels, "mlx_lm.kernels", "mlx_lm.models.bitlinear_layers", *models):
        importlib.reload(importlib.import_module(name))


@pytest.fixture
def simulated_kernels() -> Iterator[None]:
    """Run mlx-lm's own Metal kernels in the simulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", metal_kernel)
        reload_kernels()
    yield
    reload_kernels()


@pytest.mark.usefixtures("simulated_kernels")
@pytest.mark.parametrize("model_type", METAL_ONLY)
def test_architectures_with_metal_kernels_of_mlx_lm(model_type: str) -> None:
    model = random_model(configuration(model_type))
    for module in model.modules():
        if isinstance(module, bitlinear_layers.BitLinear):
            module.weight = mx.random.randint(0, 3, module.weight.shape).astype(mx.uint8) * 21  # -1, 0 or 1
    paged = PagedModel(model)
    assert largest_error(model, paged) < TOLERANCE
    check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    diagonal(["llama", "gemma3_text", "gemma2", "gemma4", "olmo3", "youtu_llm", "dbrx"], [mx.float16, mx.bfloat16]),
)
def test_half_precision_passes_the_check_at_load(model_type: str, dtype: mx.Dtype) -> None:
    for seed in range(3):
        paged = PagedModel(random_model(configuration(model_type), seed, dtype))
        check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize("model_type", ["mixtral", "phixtral", "qwen3_next", "granitemoehybrid"])
def test_bfloat16_experts_on_a_cpu_are_refused_with_the_flag_to_change(model_type: str) -> None:
    """MLX cannot multiply experts in half precision on a CPU."""
    if mx.metal.is_available():
        pytest.skip("there it has")
    with pytest.raises(UnsupportedModelError) as refusal:
        PagedModel(random_model(configuration(model_type), dtype=mx.bfloat16))
    assert str(refusal.value) == "its experts are in bfloat16, and MLX on a CPU needs --dtype float32 for them"


def test_an_error_while_opening_a_model_becomes_an_unsupported_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of recurrent layers are computed at that time."""

    def fail(*arrays: mx.array) -> None:
        raise RuntimeError("the device cannot do it")

    model = random_model(configuration("mamba2"))
    monkeypatch.setattr(mx, "eval", fail)
    with pytest.raises(UnsupportedModelError, match="the device cannot do it"):
        PagedModel(model)


def test_operations_that_fail_later_are_a_refusal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an operation fails when it runs. A conversion to NumPy then gives zeros, in both passes of the check."""
    paged = PagedModel(random_model(configuration("llama")))
    forward = llama.Model.__call__

    def failing(*args: Any, **options: Any) -> mx.array:
        return forward(*args, **options) + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]

    monkeypatch.setattr(llama.Model, "__call__", failing)
    with pytest.raises(UnsupportedModelError, match="LU factorization failed"):
        check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_check_notices_mistakes_in_any_precision(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedModel(random_model(configuration("gemma3_text"), dtype=dtype))
    attend = LayerCache.attend

    def without_window(self: LayerCache, call: AttentionCall, original: Attention) -> mx.array:
        return attend(self, replace(call, mask=AttentionMask(None)), original)

    monkeypatch.setattr(LayerCache, "attend", without_window)
    with pytest.raises(UnsupportedModelError, match="logits through the paged cache are off"):
        check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


def test_the_check_notices_a_wrong_chunk_of_8192(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request of the check is that long, so it shortens the chunks, and the scale of queries by position."""
    config = configuration("llama4")
    published = {"attention_chunk_size": 8192, "floor_scale": 8192}
    paged = PagedModel(random_model({**config, "text_config": {**config["text_config"], **published}}))
    check_paged_model(paged, PortableBackend(), VOCAB_SIZE)
    caches = [cache for cache in paged.layer_caches if isinstance(cache, ChunkedLayerCache)]
    trunk = paged.model.language_model.model
    assert {cache.chunk for cache in caches} == {trunk.attention_chunk_size} == {8192}
    assert {layer.self_attn.floor_scale for layer in trunk.layers} == {8192}
    attend = LayerCache.attend

    def with_another_chunk(self: LayerCache, call: AttentionCall, original: Attention) -> mx.array:
        mask = call.mask
        return attend(self, replace(call, mask=replace(mask, chunk=mask.chunk and mask.chunk + 1)), original)

    monkeypatch.setattr(LayerCache, "attend", with_another_chunk)
    with pytest.raises(UnsupportedModelError, match="logits through the paged cache are off"):
        check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


def test_layers_with_several_sizes_of_chunks_are_refused() -> None:
    paged = PagedModel(random_model(configuration("llama4")))
    first = next(cache for cache in paged.layer_caches if isinstance(cache, ChunkedLayerCache))
    first.chunk = 4
    paged.model.language_model.model.layers[0].attention_chunk_size = 4
    with pytest.raises(UnsupportedModelError, match=r"\(\[4, 9\] tokens\) cannot be shortened"):
        check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


def test_the_compared_architectures_include_windows_sinks_and_latents() -> None:
    """The comparison is only meaningful if windows are crossed, and if some layers have sinks and latents."""
    opened = {t: PagedModel(random_model(configuration(t))) for t in ("gpt_oss", "gemma3_text", "deepseek_v3")}
    assert opened["gpt_oss"].windows == opened["gemma3_text"].windows == {6}
    assert max(LENGTHS) > 3 * 6
    assert "sinks" in dict(opened["gpt_oss"].model.layers[0].self_attn.parameters())
    latent = opened["deepseek_v3"].pool.states[0].spec
    assert isinstance(latent, LatentSpec) and latent.latent_dim == 16


def test_docs_have_a_row_for_each_architecture_of_mlx_lm() -> None:
    """Search mlx-lm's files for models: some files need packages that are missing here."""
    text = DOC.read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|", text.partition("## GGUF files")[0], re.MULTILINE)
    rows = [name for name in rows if name != "model_type"]  # heads of the tables
    assert sorted(rows) == sorted([*SUPPORTED, *OWN_CACHES, *METAL_ONLY, *UNSUPPORTED])
    sources = {path.stem: path.read_text() for path in Path(mlx_lm.models.__path__[0]).glob("*.py")}
    models = {name for name, source in sources.items() if re.search(r"^class Model", source, re.MULTILINE)}
    assert len(models) > 100 and models - set(rows) == set()
    for name in ("llama", "gemma3n", "deepseek_v32", "llama4", "qwen3_next", "mamba"):
        assert f"{supported_row(name)}\n" in text, "run python -m tools.docs.models"


@pytest.mark.full
def test_docs_are_up_to_date() -> None:
    assert DOC.read_text() == models_doc(), "run python -m tools.docs.models"
