"""Choice of the attention backend for each layer at load time: the kernel where it works, else MLX's operations."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.choice import BackendChoice, choose_backend
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable_fallback import FallbackBackend
from metal_engine.doctor.examine import OK, examine
from metal_engine.errors import ConfigError, UnsupportedModelError
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import KVSpec, LatentSpec, QuantizedKVSpec, kv_cache_spec
from metal_engine.loading.build import build_engine
from metal_engine.models.attention_kinds import attention_kinds
from metal_engine.models.check import check_paged_model
from metal_engine.models.layer_cache import LayerCache
from metal_engine.models.paged_model import PagedModel
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import AttentionLayers
from tests.support.checkpoint_files import write_checkpoint
from tests.support.demo import engine_for
from tests.support.running import run
from tests.support.tiny_engine import greedy_tokens
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.architectures import VOCAB_SIZE, configuration
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.packed_step import make_step
from tools.fixtures.tiny_models import random_model
from tools.metal_sim import metal_kernel, record_launches
from tools.metal_sim.tensor_mutants import factory_in

COMPILE_ERROR = """[metal::Device] Unable to build metal library from source
program_source:88:14: error: use of undeclared identifier 'simdgroup_multiply'
    simdgroup_multiply(c, a, b);
    ^
program_source:120:3: error: no matching function for call to 'fma'
"""
# MLX raises this error as a ValueError.
TOO_MANY_THREADS = "Thread group size (256) is greater than  the maximum allowed threads per threadgroup (192)."


# The quantization groups of the position part are not aligned with a lane's loads.
QUANTIZED = kv_cache_spec(LatentSpec(40, 24, mx.float16), "int8")
assert isinstance(QUANTIZED, QuantizedKVSpec)


def kind(head_dim: int = 64, dtype: mx.Dtype = mx.float16, **more: Any) -> AttentionKind:
    return AttentionKind(KVSpec(2, head_dim, head_dim, dtype), 4, more.pop("q_dtype", dtype), **more)


def failing(error: Exception, **template: Any) -> Callable[..., Any]:
    """Return a factory of kernels that fail to build for the given template arguments, or for all if none are given."""

    def factory(**constructor: Any) -> Callable[..., Any]:
        kernel = metal_kernel(**constructor)

        def call(**launch: Any) -> list[mx.array]:
            if template.items() <= dict(launch["template"]).items():
                raise error
            return kernel(**launch)

        return call

    return factory


def auto(factory: Callable[..., Any] = metal_kernel) -> BackendChoice:
    return BackendChoice(MetalBackend(factory))


def strict(factory: Callable[..., Any] = metal_kernel) -> BackendChoice:
    return BackendChoice(MetalBackend(factory), is_strict=True)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("mlx", 16).metal is None
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert choose_backend("auto", 12).metal is None
    with pytest.raises(ConfigError, match="--attention-backend"):
        choose_backend("metal", 16)


def test_all_layers_are_covered(caplog: pytest.LogCaptureFixture) -> None:
    for choice in (auto(), strict()):
        chosen = choice.for_layers([kind(), kind(has_window=True), kind()], 16)
        assert chosen.backend is choice.metal and chosen.layers == AttentionLayers(metal=3)
    assert not caplog.records


def test_without_metal_all_layers_are_portable(caplog: pytest.LogCaptureFixture) -> None:
    chosen = BackendChoice(None).for_layers([kind(), kind(512)], 16)
    assert chosen.backend.name == "mlx" and chosen.layers == AttentionLayers(portable=2)
    assert not caplog.records


@pytest.mark.parametrize(
    "uncovered, block_size, what",
    [
        (kind(520), 16, "head_dim 520"),
        (kind(has_window=True, q_dtype=mx.float32), 16, "float32 queries over float16 keys"),
        (kind(has_window=True), 12, "block size 12"),
        (AttentionKind(LatentSpec(2000, 64, mx.float16), 4, mx.float16), 16, "latent 2000 + 64"),
        (AttentionKind(KVSpec(2, 520, 20, mx.float16), 4, mx.float16), 16, "head_dim 520 of K, 20 of V"),
        (AttentionKind(QUANTIZED, 4, mx.float16), 16, "int8 in groups of 64, latent 40 + 24"),
    ],
)
def test_unsupported_layers_use_mlx_operations_with_one_warning(
    uncovered: AttentionKind, block_size: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning covers all such layers."""
    kinds = [kind(), uncovered, kind(), uncovered]
    chosen = auto().for_layers(kinds, block_size)
    assert isinstance(chosen.backend, FallbackBackend) and chosen.backend.name == "metal"
    num_portable = 4 if block_size == 12 else 2
    assert chosen.layers == AttentionLayers(metal=4 - num_portable, portable=num_portable, not_covered=(what,))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{num_portable} of 4 layers" in record.message and str(uncovered) in record.message
    with pytest.raises(UnsupportedAttentionError, match="--attention-backend"):
        strict().for_layers(kinds, block_size)


@pytest.mark.parametrize("error", [RuntimeError(COMPILE_ERROR), ValueError(TOO_MANY_THREADS)])
def test_layers_whose_kernel_fails_to_build_use_mlx_operations(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Metal's message is logged whole, with advice. An explicit ``metal`` setting raises an error instead."""
    factory = failing(error, HAS_WINDOW=True)
    kinds = [kind(), kind(has_window=True), kind(has_window=True)]
    chosen = auto(factory).for_layers(kinds, 16)
    what = "head_dim 64, for which the kernel does not run on this device"
    assert chosen.layers == AttentionLayers(metal=1, portable=2, not_covered=(what,))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert str(error) in record.message and "a window" in record.message and "doctor" in record.message
    assert "MLX's operations compute them instead" in record.message

    caplog.clear()
    with pytest.raises(UnsupportedAttentionError, match="--attention-backend auto or mlx") as caught:
        strict(factory).for_layers(kinds, 16)
    assert " ".join(str(error).split("\n")[0].split()) in str(caught.value) and "\n" not in str(caught.value)
    (record,) = caplog.records
    assert str(error) in record.message and "--attention-backend" in record.message


def test_fallback_messages_count_the_layers_of_each_cause_separately(caplog: pytest.LogCaptureFixture) -> None:
    choice = auto(failing(RuntimeError(COMPILE_ERROR), HAS_WINDOW=True))
    chosen = choice.for_layers([kind(520), kind(has_window=True), kind(has_window=True), kind()], 16)
    assert (chosen.layers.metal, chosen.layers.portable) == (1, 3)
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "1 of 4 layers" in warning.message


def test_a_merge_that_does_not_build_is_found_at_load() -> None:
    """Serving needs the merge kernel only for long contexts, long after load."""

    def factory(**constructor: Any) -> Callable[..., Any]:
        wanted = failing(RuntimeError("merge")) if constructor["name"] == "merge_splits" else metal_kernel
        return wanted(**constructor)

    assert auto(factory).for_layers([kind()], 16).layers.portable == 1


@pytest.mark.parametrize("name", ["paged_attention", "merge_splits"])
@pytest.mark.parametrize("wrong", [lambda out: out * 1.03, lambda out: mx.full(out.shape, mx.nan, out.dtype)])
def test_wrong_results_are_found_at_load(
    name: str, wrong: Callable[[mx.array], mx.array], caplog: pytest.LogCaptureFixture
) -> None:
    def factory(**constructor: Any) -> Callable[..., Any]:
        kernel = metal_kernel(**constructor)

        def call(**launch: Any) -> list[mx.array]:
            out, *others = kernel(**launch)
            return [wrong(out) if constructor["name"] == name else out, *others]

        return call

    chosen = auto(factory).for_layers([kind()], 16)
    assert chosen.layers.portable == 1
    assert "gives wrong results on this device" in chosen.layers.not_covered[0]
    assert "gives wrong results" in caplog.text


def tensor_kernel(call: Callable[..., list[mx.array]]) -> Callable[..., Any]:
    """Return a factory whose kernel on tensor operations is ``call``.

    The first argument of ``call`` is the simulator's kernel. Names of launched kernels are appended to
    ``factory.launched``.
    """

    def factory(**constructor: Any) -> Callable[..., Any]:
        kernel = factory_in(1, metal_kernel)(**constructor)

        def launch(**options: Any) -> list[mx.array]:
            factory.launched.append(constructor["name"])  # type: ignore[attr-defined]
            if constructor["name"] == "paged_attention_tensor":
                return call(kernel, **options)
            return kernel(**options)

        return launch

    factory.launched = []  # type: ignore[attr-defined]
    return factory


def test_tensor_operations_that_work_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """Tensor operations are tried with several tiles and stages, in addition to every kernel's trials.

    Other layers are unaffected.
    """
    queries: list[int] = []

    def call(kernel: Callable[..., Any], **launch: Any) -> list[mx.array]:
        queries.append(launch["inputs"][0].shape[0])
        return kernel(**launch)

    factory = tensor_kernel(call)
    metal = MetalBackend(factory, tensor_ops=True)
    fitting = AttentionKind(
        KVSpec(1, 64, 64, mx.float16), 4, mx.float16, has_window=True, has_softcap=True, sinks=mx.float16
    )
    chosen = BackendChoice(metal).for_layers([fitting, kind(64, mx.float32)], 16)
    assert chosen.backend is metal and metal.has_tensor_ops
    assert chosen.layers == AttentionLayers(metal=2)
    assert queries == [1, 13, 70]
    assert factory.launched.count("paged_attention") == 3  # type: ignore[attr-defined]
    assert not caplog.records


def fail(_: Callable[..., Any], **launch: Any) -> list[mx.array]:
    raise RuntimeError(COMPILE_ERROR)


def be_wrong(_: Callable[..., Any], **launch: Any) -> list[mx.array]:
    return [
        mx.ones(shape, dtype) for shape, dtype in zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
    ]


@pytest.mark.parametrize(("call", "is_strict"), [(fail, False), (be_wrong, True)])
def test_tensor_operations_that_do_not_work_leave_the_kernel(
    call: Callable[..., list[mx.array]], is_strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All layers use the kernel for other GPUs and none uses MLX's operations. There is one warning."""
    factory = tensor_kernel(call)
    choice = BackendChoice(MetalBackend(factory, tensor_ops=True), is_strict)
    chosen = choice.for_layers([kind(), kind(64, mx.float32), kind()], 16)
    assert isinstance(chosen.backend, MetalBackend) and not chosen.backend.has_tensor_ops
    assert chosen.layers == AttentionLayers(metal=3, tensor_ops=chosen.layers.tensor_ops)
    assert chosen.layers.tensor_ops.startswith("off: with them, the kernel ")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "without Metal's tensor operations" in record.message and "doctor" in record.message
    assert call is be_wrong or COMPILE_ERROR in record.message
    assert factory.launched.count("paged_attention_tensor") == 1  # type: ignore[attr-defined]
    step = make_step([(40, 9)], head_dim=64, dtype=mx.float16)
    chosen.backend.for_step(step.rows).attend(step.q, step.state, scale=1.0)
    assert factory.launched[-1] == "paged_attention"  # type: ignore[attr-defined]


def test_tensor_operations_whose_check_takes_too_long_are_off(caplog: pytest.LogCaptureFixture) -> None:
    seconds = itertools.count(step=31)
    choice = BackendChoice(MetalBackend(metal_kernel, tensor_ops=True), clock=lambda: next(seconds))
    chosen = choice.for_layers([kind(128)], 16)
    assert isinstance(chosen.backend, MetalBackend) and not chosen.backend.has_tensor_ops
    assert "takes more than 30 s" in chosen.layers.tensor_ops
    assert len(caplog.records) == 1


def test_a_kernel_that_fails_without_tensor_operations_too_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    choice = BackendChoice(MetalBackend(failing(RuntimeError(COMPILE_ERROR)), tensor_ops=True))
    assert choice.for_layers([kind()], 16).layers.portable == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]


@pytest.mark.parametrize("has", [False, True])
def test_tensor_operations_are_tried_where_the_device_has_them(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr("metal_engine.attention.choice.gpu_core_count", lambda: 10)
    monkeypatch.setattr("metal_engine.attention.choice.has_tensor_ops", lambda: has)
    for setting in ("auto", "metal"):
        choice = choose_backend(setting, 16)
        assert choice.metal is not None and choice.metal.has_tensor_ops == has
        assert choice.tensor_ops == ("on, checked at the start" if has else "")


@pytest.mark.parametrize("block_size, dtype", [(8, mx.float32), (32, mx.bfloat16)])
def test_kernel_selftest_uses_dtype_block_size_and_features_of_serving(block_size: int, dtype: mx.Dtype) -> None:
    """The trial runs a decode of one row, a step with a chunk, and a forced split with its merge.

    It uses the server's block size, dtype and group, and the layers' window, softcap and sinks.
    """
    launches: list[tuple[str, dict[str, Any], dict[str, mx.array]]] = []

    def factory(**constructor: Any) -> Callable[..., Any]:
        kernel = metal_kernel(**constructor)

        def call(**launch: Any) -> list[mx.array]:
            inputs = dict(zip(constructor["input_names"], launch["inputs"], strict=True))
            launches.append((constructor["name"], dict(launch["template"]), inputs))
            return kernel(**launch)

        return call

    wanted = AttentionKind(KVSpec(2, 64, 64, dtype), 6, dtype, has_window=True, has_softcap=True, sinks=mx.float16)
    assert auto(factory).for_layers([wanted], block_size).layers == AttentionLayers(metal=1)
    alone, mixed, merge = launches
    assert [name for name, _, _ in launches] == ["paged_attention", "paged_attention", "merge_splits"]
    for _, template, inputs in (alone, mixed):
        assert template["T"] == dtype and template["G"] == 3 and template["BLOCK_SIZE"] == block_size
        assert template["HAS_WINDOW"] and template["HAS_SOFTCAP"] and template["HAS_SINKS"]
        assert inputs["sinks"].dtype == mx.float16 and inputs["sinks"].size == 6
        assert inputs["k_cache"].shape[1:] == (2, 64)
    assert alone[2]["q"].shape[0] == 1
    assert mixed[2]["q"].shape[0] > 2
    assert merge[1]["T"] == dtype and merge[1]["HAS_SINKS"]


def test_a_failure_in_a_step_is_not_a_reason_to_change() -> None:
    """The choice made at load stays. An error in a later step is raised."""
    chosen = auto(failing(RuntimeError("out of luck"), HAS_SOFTCAP=True)).for_layers([kind(), kind(520)], 16)
    assert chosen.layers.metal == 1
    step = make_step([(1, 5)], head_dim=64, dtype=mx.float16)
    with pytest.raises(RuntimeError, match="out of luck"):
        chosen.backend.for_step(step.rows).attend(step.q, step.state, scale=1.0, softcap=20.0)


# --- what layers ask for ---


def kinds_of(model_type: str) -> list[AttentionKind]:
    paged = PagedModel(random_model(configuration(model_type)))
    kinds = attention_kinds(paged)
    assert not paged.pool.is_allocated
    return kinds


def test_kinds_of_layers() -> None:
    full = AttentionKind(KVSpec(2, 8, 8, mx.float32), 4, mx.float32)
    window = dataclasses.replace(full, has_window=True)
    assert kinds_of("llama") == [full] * 4 and kinds_of("gemma3_text") == [window, full] * 2
    assert kinds_of("gemma2") == [dataclasses.replace(full, has_softcap=True)] * 4
    assert {k.sinks for k in kinds_of("gpt_oss")} == {mx.float32}
    assert kinds_of("deepseek_v3") == [AttentionKind(LatentSpec(16, 4, mx.float32), 4, mx.float32)] * 4
    assert {k.spec.head_dim for k in kinds_of("gemma4")} == {8, 16}
    assert len(kinds_of("gemma4")) == 6  # 2 of the 6 have no keys of their own
    assert len(kinds_of("qwen3_next")) == 2  # the other layers are recurrent
    assert kinds_of("mamba2") == []


def test_a_model_that_does_not_run_is_refused_as_by_the_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is one line. The full text is logged."""

    def fail(*_: object) -> None:
        raise RuntimeError(COMPILE_ERROR)

    paged = PagedModel(random_model(configuration("llama")))
    monkeypatch.setattr(LayerCache, "attend", fail)
    refusals = []
    for look in (attention_kinds, lambda p: check_paged_model(p, PortableBackend(), VOCAB_SIZE)):
        with pytest.raises(UnsupportedModelError, match="its forward does not run over a paged cache") as caught:
            look(paged)
        refusals.append(str(caught.value))
        assert caplog.records[-1].message.endswith(COMPILE_ERROR.rstrip("\n"))
    assert refusals[0] == refusals[1] and "\n" not in refusals[0]
    assert not paged.pool.is_allocated


@pytest.mark.parametrize("block_size, used, num_tokens", [(8, 8, 16), (16, 16, 24), (32, 32, 40), (256, 32, 40)])
def test_the_check_uses_the_servers_blocks(block_size: int, used: int, num_tokens: int) -> None:
    """Requests extend into a second block, in chunks and with a decode of one row."""
    steps: list[StepRows] = []

    class Recording(PortableBackend):
        def for_step(self, rows: StepRows) -> Any:
            steps.append(rows)
            return super().for_step(rows)

    check_paged_model(PagedModel(random_model(configuration("llama"))), Recording(), VOCAB_SIZE, block_size)
    assert {rows.block_size for rows in steps} == {used}
    assert max(rows.seq_lens.max() for rows in steps) == num_tokens > used
    assert [rows.query_lens.min() == 1 for rows in steps] == [False, False, True]


# --- a model with both ---


def test_greedy_tokens_of_a_model_with_both_kinds_of_layers() -> None:
    """gemma4's full-attention layers have larger heads than its windowed layers. One backend does not support them."""
    config = configuration("gemma4_text") | {"head_dim": 64, "global_head_dim": 520}
    paged = PagedModel(random_model(config))
    kinds = attention_kinds(paged)
    chosen = auto().for_layers(kinds, 8)
    assert (chosen.layers.metal, chosen.layers.portable) == (4, 2)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 90, n).tolist() for n in (37, 3, 18)]
    engine = engine_for(
        paged, tiny_tokenizer(), vocab_size=97, budget=24, block_size=8, num_blocks=30, max_num_seqs=8,
        attention=chosen.backend,
    )  # fmt: skip
    with record_launches() as launches:
        outputs = run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert "paged_attention" in {launch.kernel for launch in launches}
    reference = random_model(config)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert compare_outputs(reference, prompt, greedy_tokens(reference, prompt, 8), output).equal


@pytest.mark.parametrize("setting", ["auto", "metal"])
def test_loading_a_model(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``auto``, all layers that MLX's operations support load.

    ``metal`` is strict. doctor reports the backend of each layer.
    """
    folder = write_checkpoint(tmp_path, config={"head_dim": 6})
    choice = strict() if setting == "metal" else auto()
    monkeypatch.setattr("metal_engine.attention.choice.choose_backend", lambda *_: choice)
    args = EngineArgs(model=str(folder), num_gpu_blocks_override=64, max_model_len=1024)
    if setting == "metal":
        with pytest.raises(UnsupportedModelError, match="--attention-backend mlx"):
            build_engine(args)
        return
    engine = build_engine(args)
    engine.close()
    config = engine.core.config
    assert config.attention_backend == "metal"
    head_dim, total = config.model.head_dim, config.model.num_layers
    words = f"metal; portable for {total} of {total} layers (head_dim {head_dim})"
    assert config.attention == words
    found = []
    for check in ("_tiny_model", "_quantized_kv"):
        monkeypatch.setattr(f"metal_engine.doctor.examine.{check}", lambda: iter(()))
    examine(found.append, [str(folder)])
    (finding,) = (one for one in found if one.label == str(folder))
    assert finding.status == OK and f"attention by {words}" in finding.text
