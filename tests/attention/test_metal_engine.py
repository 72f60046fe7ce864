"""Simulated kernel inside the engine: greedy tokens, and real activations of the demo model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.backend import AttentionBackend, StepAttention
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids, load_gguf_tokenizer
from metal_engine.kv_cache.rows import StepRows
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.sampling_params import SamplingParams
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import engine_for
from tests.support.running import run
from tests.support.simulated import TOLERANCE, attend, backend, relative_error
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.packed_step import PackedStep
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import tiny_model
from tools.metal_sim import record_launches

SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
}


def make_engine(
    paged: PagedModel,
    attention: AttentionBackend,
    tokenizer: Tokenizer,
    *,
    budget: int,
    num_blocks: int,
    vocab_size: int = 256,
) -> SteppedEngine:
    return engine_for(
        paged, tokenizer, vocab_size=vocab_size, budget=budget, block_size=8, num_blocks=num_blocks, max_num_seqs=16,
        attention=attention,
    )  # fmt: skip


@pytest.mark.parametrize("sliding", [False, True])
def test_greedy_tokens_equal_mlx_ops(sliding: bool) -> None:
    """Steps are chunked (budget 24) and mixed.

    The blocks are too few for all requests, which causes preemptions.
    """
    config: dict[str, object] = {**SHAPE}
    if sliding:  # two kinds of layers: full attention, and a window
        config |= {
            "model_type": "gemma3_text",
            "head_dim": 64,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 64,
        }
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 256, n).tolist() for n in (37, 3, 18, 50, 9, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    outputs = []
    for attention in (PortableBackend(), backend()):
        engine = make_engine(PagedModel(tiny_model(**config)), attention, tiny_tokenizer(), budget=24, num_blocks=10)
        with record_launches() as launches:
            outputs.append(run(engine, prompts, params))
        if attention.name == "metal":
            assert engine.stats.num_preemptions > 0
            # Every attention of the model went through the kernel, in steps with several kinds of work.
            assert {c.kernel for c in launches} == {"paged_attention"}
            assert max(c.grid[0] // 256 for c in launches) >= 3
    reference = tiny_model(**config)
    for prompt, a, b in zip(prompts, *outputs, strict=True):
        assert compare_outputs(reference, prompt, a, b).equal


@pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("int4", marks=pytest.mark.full)])
def test_greedy_tokens_over_quantized_keys_and_values(kv_cache_dtype: str) -> None:
    """Rows of the current step are read in quantized form too, in chunks and in mixed batches."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 256, n).tolist() for n in (37, 3, 18)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = []
    for attention in (PortableBackend(), backend()):
        paged = PagedModel(tiny_model(**SHAPE), kv_cache_dtype=kv_cache_dtype)
        engine = make_engine(paged, attention, tiny_tokenizer(), budget=24, num_blocks=10)
        with record_launches() as launches:
            outputs.append(run(engine, prompts, params))
    assert {c.kernel for c in launches} == {"paged_attention_quantized"}
    reference = tiny_model(**SHAPE)
    for prompt, a, b in zip(prompts, *outputs, strict=True):
        assert compare_outputs(reference, prompt, a, b).equal


@pytest.mark.metal
def test_greedy_tokens_on_a_mac() -> None:
    """Same test with the real compiler and GPU, again chunked, mixed and preempted."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 256, n).tolist() for n in (37, 3, 18, 50, 9, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    outputs = []
    for attention in (PortableBackend(), MetalBackend()):
        engine = make_engine(PagedModel(tiny_model(**SHAPE)), attention, tiny_tokenizer(), budget=24, num_blocks=10)
        outputs.append(run(engine, prompts, params))
    reference = tiny_model(**SHAPE)
    for prompt, a, b in zip(prompts, *outputs, strict=True):
        assert compare_outputs(reference, prompt, a, b).equal


def test_a_shape_that_the_kernel_does_not_do_is_named_at_load() -> None:
    """head_dim 18: the check at load passes the backend's message on. No other backend is used instead."""
    paged = PagedModel(tiny_model(hidden_size=72))
    with pytest.raises(UnsupportedAttentionError, match=r"head_dim 18.*--attention-backend mlx") as caught:
        check_paged_model(paged, backend(), 256)
    assert str(caught.value).startswith("the metal attention backend does not support 4 query heads")


@dataclass
class _Recorder:
    """Backend that records the inputs of a layer in each step."""

    inner: AttentionBackend
    name: str = "recorder"
    seen: list[tuple[PackedStep, dict[str, object]]] = field(default_factory=list)

    def for_step(self, rows: StepRows) -> StepAttention:
        attention = self.inner.for_step(rows)
        recorder = self

        class Recording:
            def attend(self, q, state, **options):
                # Copied, because later steps write the states in place.
                blocks = state.block_arrays()
                arrays = [mx.array(np.array(a)) for a in (q, blocks["keys"], blocks["values"])]
                recorder.seen.append((PackedStep(rows, *arrays), options))
                return attention.attend(q, state, **options)

        return Recording()


@pytest.mark.parametrize("dtype", [pytest.param(mx.float32, marks=pytest.mark.full), mx.bfloat16])
def test_real_activations_of_the_demo_model(demo_path: Path, dtype: mx.Dtype) -> None:
    """Compares q, K and V of the first and the last layer, from a step with decodes, a chunk and a fresh prompt."""
    paged = PagedModel(load_gguf_model(demo_path, dtype=mx.float32, dequantize=True)[0])
    tokenizer = Tokenizer(load_gguf_tokenizer(demo_path), gguf_eos_token_ids(read_gguf_header(demo_path)))
    recorder = _Recorder(PortableBackend())
    engine = make_engine(paged, recorder, tokenizer, budget=48, num_blocks=128, vocab_size=49152)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for i, n in enumerate((20, 7, 90)):
        engine.add_request(str(i), engine.prepare(rng.integers(100, 40_000, n).tolist(), params))
    layers = len(paged.pool.states)
    for _ in range(12):
        recorder.seen.clear()
        engine.step()
        lengths = recorder.seen[0][0].rows.query_lens
        if (lengths == 1).any() and (lengths > 1).any():
            break
    else:
        pytest.fail("no mixed step came")
    for step, options in (recorder.seen[0], recorder.seen[layers - 1]):
        cast = PackedStep(step.rows, *(a.astype(dtype) for a in (step.q, step.k_cache, step.v_cache)))
        assert {k for k, v in options.items() if v is not None} == {"scale"}
        out, _ = attend(cast, scale=options["scale"])
        assert relative_error(out, cast.reference(scale=options["scale"])) <= TOLERANCE[dtype]
