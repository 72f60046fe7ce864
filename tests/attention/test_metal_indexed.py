"""The kernels that select keys and attend to them, in the simulator: against NumPy in float64 and MLX's operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.choice import BackendChoice, ChosenAttention
from metal_engine.attention.index_selftest import IndexKind
from metal_engine.attention.indexed import IndexQueries, SelectionSize, plan_selection
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable.indexed import select_keys
from metal_engine.attention.portable_fallback import FallbackBackend
from metal_engine.doctor.figures import Figure, Verdict
from metal_engine.doctor.references.attention import selected_keys
from metal_engine.doctor.sections.kernels import index_errors
from metal_engine.kv_cache.spec import IndexSpec, LatentSpec
from metal_engine.kv_cache.state import IndexState, StateSnapshot
from tests.support.simulated import TOLERANCE, backend, relative_error
from tools.fixtures.packed_step import PackedStep, make_step
from tools.metal_sim import MetalSimError, metal_kernel, record_launches
from tools.metal_sim.mutants import Mutant, factory_of

# (rows, context): dense rows, decodes of similar and different lengths, drafts, chunks that cross the top-k.
SEGMENTS = [(1, 3), (5, 0), (1, 40), (1, 43), (1, 200), (4, 30), (11, 4), (1, 7), (1, 8), (70, 25)]
SMALL = {"num_heads": 4, "head_dim": 12, "v_head_dim": 8}
MIDDLE = {"num_heads": 20, "head_dim": 48, "v_head_dim": 32}
DEEPSEEK = {"num_heads": 20, "head_dim": 576, "v_head_dim": 512}
NAN_IN_SLOT_0 = 9  # a seed; a kernel that reads this slot for missing keys fails
FEW_CORES = 8  # threadgroups that fill the GPU: each computes all heads
# 28 heads need two tiles of 24 heads. The last 8 heads are incomplete.
MANY_HEADS = {"num_heads": 28, "head_dim": 144, "v_head_dim": 128}


@dataclass
class Step:
    """A packed step with an index. Slots without a key contain NaN."""

    packed: PackedStep
    index: IndexQueries
    state: IndexState

    @classmethod
    def random(
        cls,
        segments: list[tuple[int, int]],
        top_k: int,
        heads: int,
        dim: int,
        dtype: mx.Dtype,
        blocks: SelectionSize | None = None,
        **sizes: Any,
    ) -> Step:
        """Return a step whose index has small integers: sums are exact in any order, and many scores are equal.

        Args:
            blocks: size of a selection of blocks for each KV head, instead of ``top_k`` latents.
        """
        kv_heads = heads if blocks else 1
        packed = make_step(segments, num_kv_heads=kv_heads, is_latent=blocks is None, dtype=dtype, **sizes)
        rows, rng = packed.rows, np.random.default_rng(0)
        keys = np.full((len(packed.state.keys), dim), np.nan, np.float32)
        for request, seq_len in enumerate(rows.seq_lens.tolist()):
            keys[rows.slots(request, np.arange(seq_len))] = rng.integers(-2, 3, (seq_len, dim))
        state = IndexState(IndexSpec(dim, dtype))
        state.allocate(len(keys) // rows.block_size, rows.block_size)
        state.restore(StateSnapshot({"index_keys": mx.array(keys).astype(dtype)}))
        queries, weights = (
            rng.integers(-2, 3, (rows.num_tokens, heads, dim)),
            rng.integers(-1, 3, (len(rows.positions), heads)),
        )
        given, factors = (mx.array(array.astype(np.float32)).astype(dtype) for array in (queries, weights))
        size = blocks or SelectionSize(top_k)
        return cls(packed, IndexQueries(given, None if blocks else factors, size), state)

    @property
    def scale(self) -> float:
        """Return the usual scale. A larger scale gives a few keys nearly all the weight, which hides other errors."""
        return float(self.packed.q.shape[-1] ** -0.5)

    def attend(self, attention: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected positions, [N, G, num_keys], and the output."""
        plan = plan_selection(self.packed.rows, self.index.size.num_keys, self.index.dims)
        assert plan is not None
        step = attention.for_step(self.packed.rows)
        selection = step.select_keys(plan, self.index, self.state, lambda positions: positions)
        out = step.attend(self.packed.q, self.packed.state, scale=self.scale, selection=selection)
        return selection.by_row(), np.array(out.astype(mx.float32))[..., : self.packed.latent_dim]

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the same, computed by NumPy in float64. Of equal scores, the lowest positions are selected."""
        arrays = (self.index.queries, self.index.weights, self.state.arrays["index_keys"])
        numbers = (None if array is None else np.array(array.astype(mx.float32)) for array in arrays)
        picks = selected_keys(self.packed.rows, self.index.size, *numbers)
        return picks, self.packed.reference(scale=self.scale, selected=picks)


CASES: dict[str, tuple[Any, ...]] = {
    "many requests": (SEGMENTS, 8, 2, 8, mx.float32, SMALL),
    "half": (SEGMENTS, 8, 12, 40, mx.float16, MIDDLE),
    "two tiles of index heads": ([(1, 40), (35, 9)], 9, 70, 136, mx.float32, SMALL),
    "decode of many index heads": ([(1, 1299)], 9, 70, 136, mx.float32, SMALL),
    "split lists": ([(1, 2200), (3, 700)], 520, 9, 128, mx.bfloat16, DEEPSEEK),
    "many heads": ([(1, 300), (6, 70)], 72, 9, 64, mx.float16, MANY_HEADS | {"seed": NAN_IN_SLOT_0}),
    "DeepSeek's many heads": ([(1, 300)], 150, 9, 64, mx.bfloat16, DEEPSEEK | {"num_heads": 28}),
    "blocks": (SEGMENTS, 0, 2, 40, mx.float32,
               {"num_heads": 6, "head_dim": 16, "blocks": SelectionSize(4, 8, 2)}),
    "MiniMax's blocks": ([(1, 1400), (3, 700)], 0, 2, 128, mx.float16,
                         {"num_heads": 32, "head_dim": 128, "blocks": SelectionSize(5, 128, 1)}),
    "int8": ([(1, 300), (3, 70)], 64, 9, 64, mx.float16,
             {"num_heads": 4, "head_dim": 192, "v_head_dim": 128, "quantized": (8, 64)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_attend_to_the_keys_with_the_largest_scores(name: str) -> None:
    *arguments, sizes = CASES[name]
    step = Step.random(*arguments, **sizes)
    with record_launches() as launches:
        picks, out = step.attend(backend(1000))
    expected, outputs = step.reference()
    assert np.array_equal(picks, expected)
    assert relative_error(out, outputs) <= TOLERANCE[step.packed.q.dtype]
    own = {launch.kernel for launch in launches} - {"merge_splits", "paged_attention", "paged_attention_quantized"}
    has_many_heads = "many heads" in name
    kernel = "selected_latents" if has_many_heads else "paged_attention_selected" + "_quantized" * (name == "int8")
    assert own == {"index_scores", "index_select", kernel}
    assert ("merge_splits" in {launch.kernel for launch in launches}) == (
        has_many_heads or name in ("split lists", "MiniMax's blocks")
    )
    mlx_picks, _ = step.attend(PortableBackend())
    assert np.array_equal(np.sort(picks), np.sort(mlx_picks))


@pytest.mark.parametrize("sizes", [MIDDLE, MANY_HEADS], ids=["a tile of heads", "many heads"])
def test_a_decode_has_the_same_bits_in_every_batch(sizes: dict[str, int]) -> None:
    """With many heads, the threadgroups of the batch compute all heads, and those of the single decode some of them."""
    step = Step.random([(1, 700), (1, 640), (2, 900), (1, 3)], 520, 4, 16, mx.float16, **sizes)
    _, out = step.attend(backend(FEW_CORES))
    assert relative_error(out, step.reference()[1]) <= TOLERANCE[mx.float16]
    alone = step.packed.alone(1)
    index = replace(step.index, queries=step.index.queries[1:2], weights=step.index.weights[1:2])
    assert np.array_equal(Step(alone, index, step.state).attend(backend(1000))[1][0], out[1])


SCORES, SELECT, ITEM, DIRECT, ROWS, LATENTS_ONCE = (
    "index_scores", "index_select", "paged_attention", "attention_direct", "attention_rows", "selected_latents",
)  # fmt: skip
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MUTANTS = (
    Mutant(SCORES, "max(products[h].thread_elements()[1], 0.0f)", "products[h].thread_elements()[1]"),
    Mutant(SCORES, "rows[(end_row - 1) * 3 + 1] + 1)", "rows[(end_row - 1) * 3 + 1])"),
    Mutant(SCORES, "rows[first_row * 3 + 2]", "0"),  # keys of another request
    Mutant(SCORES, "uint(rows[row * 3])", "uint(rows[first_row * 3])"),
    Mutant(SCORES, "head + own < H && column", "column"),
    Mutant(SCORES, "H <= HEADS && end_row", "end_row"),
    Mutant(SCORES, "end_row - first_row == 1", "true"),
    Mutant(SCORES, "key <= last_key", "key < last_key", which=1),  # not scores of blocks: the own block is local
    Mutant(SCORES, "ushort(8)", "ushort(2)"),
    *(Mutant(SCORES, f"most, ushort({bit})", "most, ushort(1)") for bit in (2, 4, 16)),
    Mutant(SCORES, "own < H && key", "key"),
    Mutant(SCORES, "(ulong(row) * H + own)", "(ulong(row) * H)"),
    Mutant(ITEM, "list_row * num_kv_heads + kv_head", "list_row * num_kv_heads"),
    Mutant(SELECT, "* 3 + 1]) + 1;", "* 3 + 1]) + 2;"),  # a key after the row
    Mutant(SELECT, "* 3 + 1]) + 1;", "* 3 + 1]);"),  # not the row's own key
    Mutant(SELECT, "num_keys <= top_k", "true"),  # no selection
    Mutant(SELECT, "larger + own[i] >= left", "larger + own[i] > left"),
    Mutant(SELECT, "min(equal_up_to, left)", "equal_up_to"),
    Mutant(SELECT, "equal_up_to <= left)", "equal_up_to + left > equal_before)"),  # the highest of equal scores
    Mutant(SELECT, "equal_before += all >> 16", "equal_before += 0"),
    Mutant(SELECT, "shift == 0 ? 1023 : 2047", "shift == 0 ? 511 : 2047"),
    Mutant(
        "index_order", "score >= 0.0f", "as_type<int>(score) >= 0", equivalent="a sum that begins with 0 is never -0"
    ),
    Mutant(ROWS, "at >= begin && at < end ? slot", "at < end + 1 ? slot"),
    Mutant(ROWS, "uint(list[at])", "uint(at)"),  # the first keys
    Mutant(ITEM, "list_rows[list_row * 2 + 1]", "0"),
    Mutant(ITEM, "(list_rows[list_row * 2] - list_row)", "0"),
    Mutant(ITEM, "selected + (list_row *", "selected + (0 *"),
    Mutant(DIRECT, "uint(cache_slot[h]) *", "uint(cache_slot[h] + 1) *"),
    Mutant(DIRECT, "uint(num_kv_heads) + uint(kv_head);", "uint(num_kv_heads);"),  # keys of one KV head
    *(Mutant(LATENTS_ONCE, _BARRIER, "", which=i) for i in range(5)),
    Mutant(LATENTS_ONCE, "key_begin + (slot * HELD + h) * 8", "key_begin + h * 8"),
    Mutant(LATENTS_ONCE, "key < key_end, k_loaded", "true, k_loaded"),
    Mutant(
        LATENTS_ONCE,
        "key < key_end, rest_loaded",
        "true, rest_loaded",
        equivalent="the position part only makes scores, and those of missing keys are replaced",
    ),
    Mutant(LATENTS_ONCE, "own_key < key_end ? score", "own_key <= key_end ? score"),
    Mutant(LATENTS_ONCE, "list_rows[list_row * 2 + 1]", "0"),
    Mutant(LATENTS_ONCE, "uint(list_rows[list_row * 2])", "0"),
    Mutant(LATENTS_ONCE, "selected + list_row * ", "selected + 0 * "),
    Mutant(LATENTS_ONCE, "lane % 8 * 8 + own_key", "own_key * 8 + lane % 8"),
    Mutant(LATENTS_ONCE, "peak = max(peak, peaks[g * 8 + lane % 8]);", ""),
    Mutant(LATENTS_ONCE, "ushort(16)", "ushort(4)", which=0),
    Mutant(LATENTS_ONCE, "ushort(16)", "ushort(4)", which=1),
    Mutant(LATENTS_ONCE, "head < H && column", "column"),
    Mutant(LATENTS_ONCE, "(strip + 1) * 8 + own", "strip * 8 + own"),
    Mutant(LATENTS_ONCE, "in_chunk / columns * 2", "in_chunk / columns"),
    Mutant(LATENTS_ONCE, "d / OWN == slot", "d / OWN == 0"),
    Mutant(LATENTS_ONCE, "(1 - slot) * PARTS", "slot * PARTS"),
    Mutant(LATENTS_ONCE, "1.0f / total", "1.0f"),
    Mutant(LATENTS_ONCE, "i < left && column", "column"),
    Mutant(LATENTS_ONCE, "[1] + of_this[i * 64 + 1]", "[1]"),
    Mutant(LATENTS_ONCE, "if (head < H) {", "{"),
    Mutant(LATENTS_ONCE, "peak + precise::log2(sum)", "precise::log2(sum)"),
    Mutant(
        LATENTS_ONCE,
        "precise::log2(sum) - WEIGHT_SHIFT",
        "precise::log2(sum)",
        equivalent="the merge compares the splits of this kernel only",
    ),
)


def caught(mutant: Mutant | None) -> bool:
    has_many_heads = mutant is not None and mutant.kernel == LATENTS_ONCE
    metal = MetalBackend(factory_of(mutant), target_threadgroups=FEW_CORES if has_many_heads else 1000)
    of_index = ("many requests", "two tiles of index heads", "decode of many index heads", "blocks")
    for name in ("many heads",) if has_many_heads else of_index:
        *arguments, sizes = CASES[name]
        step = Step.random(*arguments, **sizes)
        try:
            picks, out = step.attend(metal)
        except MetalSimError:
            return True
        expected, outputs = step.reference()
        if not np.array_equal(picks, expected) or not np.isfinite(out).all():
            return True
        if relative_error(out, outputs) > TOLERANCE[step.packed.q.dtype]:
            return True
    return False


# The order of ties, a missing selection, the causal edge, and the keys of another request. The other mutants need more
# compilations. Wrong slots are tested at load.
SAMPLE = [MUTANTS[i] for i in (2, 16, 17, 20)]


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda mutant: mutant.name)
def test_mutants(mutant: Mutant) -> None:
    assert caught(mutant)


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda mutant: mutant.name if mutant else "none")
def test_every_mutant(mutant: Mutant | None) -> None:
    assert caught(mutant) == (mutant is not None and not mutant.equivalent)


LATENTS = AttentionKind(LatentSpec(32, 16, mx.float16), 20, mx.float16)
INDEX = IndexKind(12, IndexSpec(40, mx.float16), SelectionSize(2048), has_weights=True)


def chosen(factory: Any, index: IndexKind, kind: AttentionKind = LATENTS) -> ChosenAttention:
    metal = MetalBackend(factory)
    return BackendChoice(metal).for_index(ChosenAttention.of(metal, [kind], {}), index, 16)


def doctors_figures(factory: Any, index: IndexKind) -> list[Figure]:
    return list(index_errors(MetalBackend(factory), index, [LATENTS]))


def test_the_check_at_load(caplog: pytest.LogCaptureFixture) -> None:
    assert not chosen(metal_kernel, INDEX).layers.no_index_kernels and not caplog.records
    assert [figure.verdict for figure in doctors_figures(metal_kernel, INDEX)] == [Verdict.AS_PROMISED] * 2


@pytest.mark.parametrize(
    ("mutant", "why"),
    [
        (Mutant(SCORES, "ushort(8)", "ushort(2)"), "the kernel selects other keys"),
        (Mutant(ROWS, "uint(list[at])", "uint(at)"), "the kernel gives wrong results"),
    ],
    ids=["selection", "slots"],
)  # fmt: skip
def test_wrong_kernels_are_refused_at_load(mutant: Mutant, why: str, caplog: pytest.LogCaptureFixture) -> None:
    refused = chosen(factory_of(mutant), INDEX)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert why in refused.layers.no_index_kernels
    assert any(figure.is_failure for figure in doctors_figures(factory_of(mutant), INDEX))
    step = Step.random([(1, 40)], 8, 12, 40, mx.float16, **MIDDLE)
    with record_launches() as launches:
        picks, _ = step.attend(refused.backend)
    assert not launches and np.array_equal(np.sort(picks), step.reference()[0])


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (replace(INDEX, size=SelectionSize(16, 128), has_weights=False), "of which 0 are local"),
        (replace(INDEX, size=SelectionSize(16, 12, 1), has_weights=False), "blocks of 12 keys"),
        (replace(INDEX, size=SelectionSize(16, 128, 1), has_weights=False), "the layers of the index"),
        (replace(INDEX, spec=IndexSpec(41, mx.float16)), "head_dim 41"),
        (replace(INDEX, size=SelectionSize(5)), "a selection of 5 keys"),
    ],
)
def test_unsupported_index_kinds_use_mlx_operations(
    index: IndexKind, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert why in chosen(metal_kernel, index).layers.no_index_kernels
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (figure,) = doctors_figures(metal_kernel, index)
    assert figure.verdict is Verdict.NOT_MEASURED and why in figure.note


def test_layers_of_the_portable_backend_attend_to_the_kernels_selection() -> None:
    step = Step.random(SEGMENTS, 8, 2, 8, mx.float32, **SMALL)
    kind = AttentionKind.of(step.packed.q, step.packed.state, None, None, None)
    mixed = FallbackBackend(backend(), PortableBackend(), frozenset({kind}))
    with record_launches() as launches:
        picks, out = step.attend(mixed)
    assert {launch.kernel for launch in launches} == {"index_scores", "index_select"}
    expected, outputs = step.reference()
    assert np.array_equal(picks, expected) and relative_error(out, outputs) < 1e-5


def test_the_kernels_select_as_mlx_in_random_numbers() -> None:
    """Scores round differently. Only keys with nearly equal scores may differ."""
    step = Step.random([(1, 300)], 64, 16, 64, mx.float32, **SMALL)
    index = replace(step.index, queries=mx.random.normal(step.index.queries.shape, key=mx.random.key(1)))
    plan = plan_selection(step.packed.rows, 64, index.dims)
    assert plan is not None
    own = backend().for_step(step.packed.rows).select_keys(plan, index, step.state, lambda positions: positions)
    assert len(np.intersect1d(own.by_row(), select_keys(plan, index, step.state).by_row())) >= 63
