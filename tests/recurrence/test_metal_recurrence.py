"""The kernels of recurrent layers in the simulator: results compared with float64 NumPy, and accessed states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.doctor.references.recurrence import TOLERANCE, relative_errors
from metal_engine.doctor.sections.common import tolerance
from metal_engine.recurrence.metal import KERNEL_SIZES, MAX_STATE_PER_LANE, MetalRecurrence, lanes_of_state_row
from tests.attention.test_metal_host import arrays_in_memory
from tools.fixtures.recurrent_step import ConvolutionStep, GatedDeltaStep, SegmentLayout, SSMStep
from tools.metal_sim import metal_kernel
from tools.metal_sim.build import build
from tools.metal_sim.recurrence_mutants import LENGTHS, MUTANTS, READS, Step, caught, run_case

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# (lengths, reads)
MIXES = {
    "decodes": ((1,) * 9, (3, 1, 0, 2, 3, 3, 1, 0, 2)),
    "one fresh prompt": ((21,), (-1,)),
    "one chunk": ((8,), (1,)),
    "one decode": ((1,), (2,)),
    "all of them": (LENGTHS, READS),
}


@cache
def recurrence() -> MetalRecurrence:
    return MetalRecurrence(metal_kernel)


def wrong(step: Step) -> str | None:
    """Return a description of an error in the kernel's result or in its accesses to states, or None."""
    return run_case(recurrence(), step)


# --- results, and bytes of states ---------------------------------------------------------------------------------

# (dtype, vector gate, (Hk, Hv), (Dk, Dv))
RULES = [
    ("float32", False, (2, 4), (64, 10)),
    ("float16", True, (1, 3), (160, 5)),
    ("bfloat16", False, (2, 2), (32, 9)),
]
EVERY_RULE = list(itertools.product(DTYPES, [False, True], [(1, 1), (2, 6)], [(d, 7) for d in range(32, 257, 32)]))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype, vector_gate, heads, dims", RULES)
def test_gated_delta(dtype, vector_gate, heads, dims, mix):
    step = GatedDeltaStep.make(*MIXES[mix], heads=heads, dims=dims, vector_gate=vector_gate, dtype=DTYPES[dtype])
    assert wrong(step) is None


@pytest.mark.full
@pytest.mark.parametrize("dtype, vector_gate, heads, dims", EVERY_RULE)
def test_gated_delta_of_every_shape(dtype, vector_gate, heads, dims):
    for mix in (MIXES["all of them"], MIXES["decodes"]):
        options = {"heads": heads, "dims": dims, "vector_gate": vector_gate, "dtype": DTYPES[dtype]}
        assert wrong(GatedDeltaStep.make(*mix, **options)) is None


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype, heads, dims", [("float32", (2, 4), (64, 10)), ("bfloat16", (1, 3), (160, 5))])
def test_ssm_update(dtype, heads, dims, mix):
    assert wrong(SSMStep.make(*MIXES[mix], heads=heads, dims=dims, dtype=DTYPES[dtype])) is None


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)])
@pytest.mark.parametrize("columns", range(32, 257, 32))
def test_ssm_update_of_every_shape(dtype, heads, columns):
    for mix in (MIXES["all of them"], MIXES["decodes"]):
        assert wrong(SSMStep.make(*mix, heads=heads, dims=(columns, 9), dtype=DTYPES[dtype])) is None


# (dtype, K, bias, SiLU)
CONVOLUTIONS = [("float32", 4, True, True), ("float16", 2, False, True), ("bfloat16", 8, False, False)]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype, kernel_size, bias, silu", CONVOLUTIONS)
def test_convolution(dtype, kernel_size, bias, silu, mix):
    step = ConvolutionStep.make(*MIXES[mix], kernel_size=kernel_size, bias=bias, silu=silu, dtype=DTYPES[dtype])
    assert wrong(step) is None


@pytest.mark.full
@pytest.mark.parametrize("dtype, kernel_size", list(itertools.product(DTYPES, KERNEL_SIZES)))
@pytest.mark.parametrize("bias, silu", list(itertools.product([False, True], repeat=2)))
def test_convolution_of_every_shape(dtype, kernel_size, bias, silu):
    options = {"kernel_size": kernel_size, "bias": bias, "silu": silu, "dtype": DTYPES[dtype]}
    for channels, mix in itertools.product([1, 33, 300], MIXES.values()):
        assert wrong(ConvolutionStep.make(*mix, channels=channels, **options)) is None


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_random_segments(seed):
    """Each tile and each state finds its segment, for any number and any order of segments."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 1, 1, 2, 3, 7, 8, 9, 16, 40], rng.integers(1, 30))
    lengths[rng.integers(len(lengths))] += 1  # a step has at least one row
    segments = lengths.tolist(), rng.integers(-1, 5, len(lengths)).tolist()
    assert wrong(ConvolutionStep.make(*segments, channels=9, num_states=5, seed=seed)) is None
    assert wrong(GatedDeltaStep.make(*segments, dims=(32, 3), num_states=5, seed=seed)) is None
    assert wrong(SSMStep.make(*segments, dims=(32, 3), num_states=5, seed=seed)) is None


KINDS = [GatedDeltaStep, SSMStep, ConvolutionStep]
every_kernel = pytest.mark.parametrize("make", [kind.make for kind in KINDS], ids=[kind.__name__ for kind in KINDS])


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint32))


@every_kernel
def test_output_and_state_bits_do_not_depend_on_the_batch(make):
    """A segment has bitwise the same result in every batch."""
    step = make(LENGTHS, READS)
    out, new_states = step.run(recurrence())
    for i, (rows, read) in enumerate(step.segments.each()):
        if rows.start < rows.stop:
            alone, state = step.part(rows, read).run(recurrence())
            np.testing.assert_array_equal(bits(alone), bits(out[rows]))
            np.testing.assert_array_equal(bits(state[0]), bits(new_states[i]))


@every_kernel
@pytest.mark.parametrize("cut", [1, 2, 8, 20])
def test_chunks_equal_the_whole(make, cut):
    """A prompt in two chunks has bitwise the same result as in one: the second chunk starts from the first's state."""
    step = make((21,), (-1,))
    whole, state_of_whole = step.run(recurrence())
    first, state = step.part(slice(0, cut), -1).run(recurrence())
    second, state = step.part(slice(cut, 21), 0, state).run(recurrence())
    np.testing.assert_array_equal(bits(mx.concatenate([first, second])), bits(whole))
    np.testing.assert_array_equal(bits(state), bits(state_of_whole))


def test_inputs_that_are_slices():
    """As in layers, where the output of one convolution is split into q, k and v."""
    step = GatedDeltaStep.make(LENGTHS, READS)
    y, new_states = step.run(recurrence())
    sizes = [array[0].size for array in (step.q, step.k, step.v)]
    together = mx.concatenate([array.reshape(len(array), -1) for array in (step.q, step.k, step.v)], axis=1)
    split = mx.split(together, list(itertools.accumulate(sizes[:-1])), axis=1)
    q, k, v = (part.reshape(array.shape) for part, array in zip(split, (step.q, step.k, step.v), strict=True))
    segments = step.segments
    got = recurrence().gated_delta(q, k, v, step.g, step.beta, step.states, segments.cu_seqlens, segments.reads)
    np.testing.assert_array_equal(bits(got[0]), bits(y))
    np.testing.assert_array_equal(bits(got[1]), bits(new_states))


# --- mutants -----------------------------------------------------------------------------------------------------

# No decay (in either rule), wrong heads, a neighbour's state, a zero state in place of a state and the reverse, a row
# left out. For the convolution, a state in place of zeros, and a state that is shifted when it is read or written.
SAMPLE = [
    next(i for i, m in enumerate(MUTANTS) if (m.kernel, m.new) == mutant)
    for mutant in (
        ("gated_delta", ": 1.0f;"),
        ("gated_delta", "v_head % Hk"),
        ("gated_delta", "reads[max(segment, 1) - 1]"),
        ("gated_delta", "read > 0 ?"),
        ("gated_delta", "true ?"),
        ("gated_delta", "t < end - 1"),
        ("ssm_update", "state[i]"),
        ("short_convolution", "float(states[(ulong(max(read, 0))"),
        ("short_convolution", "(K - 2 + row)"),
        ("short_convolution", "inputs[rows + j - 1]"),
    )
]


def test_the_kernels_themselves_pass():
    assert caught(None) is None


@pytest.mark.parametrize("i", SAMPLE, ids=lambda i: MUTANTS[i].name)
def test_sample_of_mutants(i):
    assert caught(MUTANTS[i])


@pytest.mark.mutants
@pytest.mark.parametrize("i", range(len(MUTANTS)), ids=lambda i: MUTANTS[i].name)
def test_every_mutant(i):
    assert bool(caught(MUTANTS[i])) != bool(MUTANTS[i].equivalent)


# --- host side ---------------------------------------------------------------------------------------------------


def recording_factory(calls: list[dict[str, Any]]) -> Callable[..., Any]:
    """Return a factory whose kernels record their calls."""

    def factory(**constructor: Any) -> Callable[..., Any]:
        kernel = metal_kernel(**constructor)

        def recorded(**call: Any) -> Any:
            calls.append(call)
            return kernel(**call)

        return recorded

    return factory


@pytest.mark.parametrize("num_segments", [1, 3, 7, 8, 40])
@every_kernel
def test_small_steps_run_the_same_kernel_as_large_ones(make, num_segments):
    """MLX puts inputs below 8 elements into constant memory, which changes the signature and forces a compilation."""
    calls: list[dict[str, Any]] = []
    step = make([1 + i % 3 for i in range(num_segments)], [i % 4 - 1 for i in range(num_segments)])
    assert run_case(MetalRecurrence(recording_factory(calls)), step) is None
    (call,) = calls
    assert all(table.size >= 8 for table in call["inputs"][-2:])


def test_layers_share_the_segment_tables_of_a_step():
    calls: list[dict[str, Any]] = []
    own = MetalRecurrence(recording_factory(calls))
    segments = SegmentLayout.of((2, 1), (-1, 0))
    layers = [replace(kind.make((2, 1), (-1, 0)), segments=segments) for kind in KINDS]
    assert [run_case(own, layer) for layer in layers * 2] == [None] * 6
    for table in (-1, -2):
        assert all(call["inputs"][table] is calls[0]["inputs"][table] for call in calls)


def test_kernels_support_only_the_expected_shapes_and_dtypes():
    does = recurrence().supports_gated_delta

    def rule(**changed):
        shape = {"q": (3, 2, 64), "k": (3, 2, 64), "v": (3, 4, 5), "g": (3, 4)}
        arrays = {name: mx.zeros(size, changed.pop(name + "_dtype", mx.float32)) for name, size in shape.items()}
        arrays |= {name: mx.zeros(size) for name, size in changed.items()}
        return arrays.values()

    assert does(*rule(), mx.float32)
    assert does(*rule(q_dtype=mx.bfloat16, k_dtype=mx.float16, v_dtype=mx.float32), mx.float32)
    assert does(*rule(g=(3, 4, 64)), mx.float32)
    assert does(*rule(q=(3, 4, 256), k=(3, 4, 256)), mx.float32)
    for changed in (
        {"q": (3, 2, 48), "k": (3, 2, 48)},
        {"q": (3, 2, 288), "k": (3, 2, 288)},
        {"q": (3, 3, 64), "k": (3, 3, 64)},
        {"q": (3, 8, 64), "k": (3, 8, 64)},
        {"k": (3, 2, 32)},
        {"q": (1, 3, 2, 64), "k": (1, 3, 2, 64)},
        {"v": (2, 4, 5)},
        {"g": (3, 2)},
        {"g": (3, 4, 1)},
        {"g_dtype": mx.bfloat16},
        {"v_dtype": mx.int8},
    ):
        assert not does(*rule(**changed), mx.float32), changed
    # Gates are indexed with 32 bits. Nothing is evaluated here.
    for tokens in ((1 << 20) - 1, 1 << 20):
        many = rule(q=(tokens, 32, 128), k=(tokens, 32, 128), v=(tokens, 32, 5), g=(tokens, 32, 128))
        assert does(*many, mx.float32) == (tokens < 1 << 20)
    assert not does(*rule(), mx.bfloat16)

    scans = recurrence().supports_ssm_update
    x, mixing = mx.zeros((3, 4, 5), mx.bfloat16), mx.zeros((3, 2, 128), mx.bfloat16)
    assert scans(x, mixing, mixing, mx.float32) and not scans(x, mixing, mixing, mx.bfloat16)
    assert not scans(x, mixing, mixing[:, :1], mx.float32)
    assert not scans(x[:2], mixing, mixing, mx.float32)
    assert not scans(x[:, :3], mixing, mixing, mx.float32)
    assert not scans(x[None], mixing[None], mixing[None], mx.float32)
    assert not scans(x, mixing[..., :16], mixing[..., :16], mx.float32)

    convolves = recurrence().supports_convolution
    x = mx.zeros((3, 40), mx.float16)
    assert all(convolves(x, mx.zeros((40, k), mx.float16)) for k in KERNEL_SIZES)
    for shape, dtype in (((40, 1), mx.float16), ((40, 9), mx.float16), ((39, 4), mx.float16), ((40, 4), mx.float32)):
        assert not convolves(x, mx.zeros(shape, dtype))
    assert not convolves(x[None], mx.zeros((40, 4), mx.float16))
    assert not convolves(x.astype(mx.int8), mx.zeros((40, 4), mx.int8))


@pytest.mark.parametrize("key_dim", range(32, 257, 32))
def test_lanes_share_a_row_of_the_state(key_dim):
    lanes = lanes_of_state_row(key_dim)
    assert key_dim % (4 * lanes) == 0 and key_dim // lanes <= MAX_STATE_PER_LANE


@pytest.mark.parametrize(
    "segments, message",
    [
        (SegmentLayout.of([2, 2], [0, 1]), "3 rows do not belong to segments of 4"),
        (SegmentLayout.of([2, 1], [0, 4]), "row 4 is read, but there are 4 states"),
        (SegmentLayout.of([2, 1], [0, -2]), "-1"),
        (SegmentLayout.of([4, -1], [0, 1]), "follow each other"),
        (SegmentLayout.of([2, 1], [0]), "do not match"),
        (SegmentLayout.of([], []), "do not match"),
        (SegmentLayout(mx.array([0, 2, 3]), mx.array([0.0, 1.0])), "float32"),
    ],
)
@every_kernel
def test_a_step_that_contradicts_itself_does_not_run(make, segments, message):
    step = replace(make((2, 1), (0, 1)), segments=segments)
    with pytest.raises(ValueError, match=message):
        step.run(recurrence())


@every_kernel
def test_states_must_fit(make):
    step = make((2, 1), (0, 1))
    for states in (step.states[:, :1], step.states.astype(mx.float16), step.states[:0]):
        with pytest.raises(ValueError, match="states"):
            replace(step, states=states).run(recurrence())


# Shapes that other tests also compile.
WIDE = [
    GatedDeltaStep.make((2, 1), (0, 1), heads=(1, 3), dims=(160, 5), vector_gate=True, dtype=mx.float16),
    SSMStep.make((2, 1), (0, 1), heads=(1, 3), dims=(160, 5), dtype=mx.bfloat16),
    ConvolutionStep.make((2, 1), (0, 1), kernel_size=8, bias=False, silu=False, dtype=mx.bfloat16),
]


@pytest.mark.parametrize("step", WIDE, ids=lambda step: type(step).__name__)
def test_arrays_stay_in_registers(step, monkeypatch, tmp_path):
    """A GPU's registers cannot be indexed, so an optimized kernel must not have an array in memory."""
    units = []
    monkeypatch.setattr("tools.metal_sim.kernel.build", lambda unit, name: units.append(unit) or build(unit, name))
    step.run(MetalRecurrence(metal_kernel))

    assert not arrays_in_memory(units[0], tmp_path)


@pytest.mark.metal
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@every_kernel
def test_on_a_mac(make, dtype):
    """Run the real compiler and GPU with the simulator's error bounds."""
    lengths, reads = (1, 300, 1, 64, 5, *[1] * 12), (0, -1, 7, 3, 3, *range(12))
    if make == ConvolutionStep.make:
        variants = [{"kernel_size": k, "bias": b, "silu": b} for k in KERNEL_SIZES for b in (False, True)]
    else:
        variants = [{"heads": (4, 8), "dims": dims} for dims in ((64, 64), (128, 128), (256, 9))]
    if make == GatedDeltaStep.make:
        variants = [{**variant, "vector_gate": gate} for variant in variants for gate in (False, True)]
    for variant in variants:
        step = make(lengths, reads, dtype=dtype, num_states=12, **variant)
        for got, expected in zip(step.run(MetalRecurrence()), step.reference(), strict=True):
            assert relative_errors(got, expected).max() <= tolerance(TOLERANCE[got.dtype])
