"""One planted bug of each kind: the simulator must find it and report the buffer, the index and the line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.tools.metal_sim.helpers import line_of, run
from tools.metal_sim import CheckError, MetalSimError

X = np.arange(64, dtype=np.float32)


def find(source, *args, **kwargs):
    with pytest.raises(MetalSimError) as caught:
        run(source, *args, **kwargs)
    error = caught.value
    if "BUG" in source:
        # A race has two places. The order of the threads decides which place is found first.
        places = [error.place, error.other_place if error.kind == "race" else None]
        assert f"kernel:source:{line_of(source, 'BUG')}" in [str(p) for p in places], error
    return error


@dataclass(frozen=True)
class Fault:
    """A kernel with a planted bug in the line marked BUG, and the error that the simulator must report.

    Attributes:
        buffer, index: place of the error. None is not checked.
        text: part of the error's message.
        inp: input of that name. None for a kernel without input.
        options: more arguments of :func:`run`.
    """

    source: str
    kind: str
    buffer: str | None = None
    index: int | None = None
    text: str = ""
    inp: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)


TWO_GROUPS = {"outputs": {"out": ((64,), mx.float32)}, "grid": (64, 1, 1)}
BOTH = {**TWO_GROUPS, "threadgroup": (64, 1, 1)}

OUT_OF_BOUNDS = {
    "read past the end": Fault(
        "out[thread_position_in_grid.x] = inp[thread_position_in_grid.x + 40]; // BUG",
        "out of bounds", "inp", 64, inp=X,
    ),
    "read before the start": Fault(
        """
        int i = thread_position_in_grid.x;
        out[i] = inp[i - 1]; // BUG
        """,
        "out of bounds", "inp", -1, inp=X,
    ),
    "read gigabytes away": Fault(
        "out[thread_position_in_grid.x] = inp[thread_position_in_grid.x + 1000000000ul]; // BUG",
        "out of bounds", "inp", 1000000000, inp=X,
    ),
    "write past the end": Fault("out[thread_position_in_grid.x + 1] = 0; // BUG", "out of bounds", "out", 32),
    "small input in constant memory": Fault(
        "out[thread_position_in_grid.x] = inp[thread_position_in_grid.x]; // BUG",
        "out of bounds", "inp", 5, inp=X[:5],
    ),
    "vector load that straddles the end": Fault(
        """
        // metal_sim: never small: inp
        const device float4* v = (const device float4*)inp;
        out[thread_position_in_grid.x] = v[thread_position_in_grid.x].x; // BUG
        """,
        "out of bounds", "inp", 60, inp=X[:62],
    ),
    "threadgroup variable past the end": Fault(
        """
        threadgroup float first[32];
        threadgroup float second[32];
        uint i = thread_position_in_grid.x;
        threadgroup float* p = first;
        second[i] = i;
        p[i + 1] = i; // BUG
        out[i] = second[i];
        """,
        "out of bounds", "first", 128,
    ),
    "inner dimension of an array": Fault(
        """
        threadgroup float tile[4][8];
        uint i = thread_position_in_grid.x;
        if (i < 9) tile[1][i] = 0; // BUG
        """,
        "out of bounds",
    ),
    "thread array": Fault(
        """
        float a[4] = {0, 1, 2, 3};
        uint i = thread_position_in_grid.x;
        out[i] = a[i]; // BUG
        """,
        "out of bounds",
    ),
    "simdgroup load past the end": Fault(
        """
        // metal_sim: never small: inp
        simdgroup_float8x8 m;
        simdgroup_load(m, inp, 9); // BUG
        simdgroup_store(m, out, 8);
        """,
        "out of bounds", "inp", inp=X, options={"outputs": {"out": ((64,), mx.float32)}},
    ),
}  # fmt: skip

NEVER_WRITTEN = {
    "threadgroup memory": Fault(
        """
        threadgroup float tile[32];
        uint i = thread_position_in_grid.x;
        if (i != 7) tile[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = tile[i]; // BUG
        """,
        "uninitialised read", "tile", 28,
    ),
    "threadgroup memory of another threadgroup": Fault(
        """
        threadgroup float tile[32];
        uint i = thread_position_in_threadgroup.x;
        if (threadgroup_position_in_grid.x == 0) tile[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = tile[i]; // BUG
        """,
        "uninitialised read", "tile", options=TWO_GROUPS,
    ),
    "output": Fault("out[thread_position_in_grid.x] += 1; // BUG", "uninitialised read", "out", 0),
}  # fmt: skip

RACES = {
    "two threads write one element": Fault(
        """
        threadgroup float flag[1];
        flag[0] = thread_position_in_grid.x; // BUG
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = flag[0];
        """,
        "race", "flag", 0,
    ),
    "two threadgroups write one element": Fault(
        "if (thread_position_in_threadgroup.x == 0) out[0] = threadgroup_position_in_grid.x; // BUG",
        "race", "out", 0, "another threadgroup", options={"grid": (64, 1, 1)},
    ),
    "one threadgroup reads what another wrote": Fault(
        """
        uint g = threadgroup_position_in_grid.x;
        if (thread_position_in_threadgroup.x == 0) {
          if (g == 0) out[1] = 5;
          else out[2] = out[1]; // BUG
        }
        """,
        "race", "out", 1, options={"grid": (64, 1, 1)},
    ),
    "a threadgroup's own read does not hide another's": Fault(
        """
        uint g = threadgroup_position_in_grid.x;
        if (thread_position_in_threadgroup.x == 0) {
          if (g == 0) out[1] = out[0];
          else out[0] = out[0] + 1; // BUG
        }
        """,
        "race", "out", 0, "another threadgroup", options={"grid": (64, 1, 1), "init_value": 0},
    ),
}  # fmt: skip

DIVERGENCE = {
    "barrier that some lanes skip": Fault(
        """
        uint i = thread_position_in_grid.x;
        if (i < 16) {
          threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
        }
        out[i] = 0;
        """,
        "barrier divergence",
    ),
    "barrier that a whole SIMD group skips": Fault(
        """
        uint i = thread_position_in_grid.x;
        if (simdgroup_index_in_threadgroup == 0) {
          threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
        }
        out[i] = 0;
        """,
        "barrier divergence", options=BOTH,
    ),
    "different barriers": Fault(
        """
        uint i = thread_position_in_grid.x;
        if (i < 32) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[i] = 1;
        } else {
          out[i] = 2;
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        """,
        "barrier divergence", options=BOTH,
    ),
    "early return before a barrier": Fault(
        """
        uint i = thread_position_in_grid.x;
        if (i >= 20) return;
        threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
        out[i] = 0;
        """,
        "barrier divergence",
    ),
    "SIMD operation in divergent flow": Fault(
        """
        uint i = thread_position_in_grid.x;
        float x = 0;
        if (i % 2 == 0) {
          x = simd_sum(1.0f); // BUG
        }
        out[i] = x;
        """,
        "SIMD divergence",
    ),
    "SIMD operation in a loop of uneven length": Fault(
        """
        uint i = thread_position_in_grid.x;
        float x = 0;
        for (uint k = 0; k <= i / 16; ++k) {
          x += simd_max(float(k)); // BUG
        }
        out[i] = x;
        """,
        "SIMD divergence",
    ),
    "simdgroup_store by half a group": Fault(
        """
        simdgroup_float8x8 m(1.0f);
        if (thread_index_in_simdgroup < 16) {
          simdgroup_store(m, out); // BUG
        }
        """,
        "SIMD divergence", options={"outputs": {"out": ((64,), mx.float32)}},
    ),
    "shuffle from a lane without a thread": Fault(
        "out[thread_position_in_grid.x] = simd_shuffle(1.0f, ushort(31)); // BUG",
        "missing lane",
        options={"outputs": {"out": ((20,), mx.float32)}, "grid": (20, 1, 1), "threadgroup": (20, 1, 1)},
    ),
}  # fmt: skip

OTHER = {
    "misaligned vector": Fault(
        """
        // metal_sim: never small: inp
        const device float4* v = (const device float4*)(inp + 1);
        out[thread_position_in_grid.x] = v[0].x; // BUG
        """,
        "misaligned access", inp=X,
    ),
    "integer division by zero": Fault(
        "out[thread_position_in_grid.x] = 7 / inp[thread_position_in_grid.x]; // BUG",
        "arithmetic", inp=np.zeros(32, np.int32),
    ),
    "write to an input through a cast": Fault(
        """
        // metal_sim: never small: inp
        device float* p = (device float*)inp;
        p[0] = 1; // BUG
        """,
        "write to input", "inp", inp=X, options={"grid": (1, 1, 1)},
    ),
}  # fmt: skip

FAULTS = OUT_OF_BOUNDS | NEVER_WRITTEN | RACES | DIVERGENCE | OTHER


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    fault = FAULTS[name]
    error = find(fault.source, None if fault.inp is None else {"inp": fault.inp}, **fault.options)
    assert error.kind == fault.kind
    assert fault.buffer in (None, error.buffer)
    assert fault.index in (None, error.index) and fault.text in str(error)


# --- out of bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "float a[4] = {0, 1, 2, 3}; thread float* p = a; out[i] = p[i]; // BUG",
        "float a[4] = {0, 1, 2, 3}; out[i] = pick(a, i);",
        # One past the end, where a member function is called.
        "simdgroup_float8x8 m[2]; m[0] = m[1] = simdgroup_float8x8(1); out[i] = m[i / 11].thread_elements()[0]; // BUG",
        "float2 v[2]; v[0] = v[1] = float2(1); v[i / 11].x += i; out[i] = v[0].x + v[1].y;",
    ],
)
def test_thread_array_through_a_pointer(source):
    header = "METAL_FUNC float pick(thread float* p, uint i) { return p[i]; }"
    assert find(f"uint i = thread_position_in_grid.x; {source}", header=header).kind == "out of bounds"


def test_helper_in_the_header_is_named():
    header = """
    METAL_FUNC float pick(const device float* p, uint i) {
      return p[i + 64];
    }
    """
    source = "// metal_sim: never small: inp\n out[thread_position_in_grid.x] = pick(inp, thread_position_in_grid.x);"
    with pytest.raises(MetalSimError) as caught:
        run(source, {"inp": X}, header=header)
    assert str(caught.value.place) == "kernel:header:3"


# --- memory that nothing wrote ------------------------------------------------------------------------------


def test_initialised_output_may_be_read():
    np.testing.assert_array_equal(run("out[thread_position_in_grid.x] += 1;", init_value=2), np.full(32, 3))


# --- races --------------------------------------------------------------------------------------------------

REVERSE = """
threadgroup float tile[64];
uint i = thread_position_in_threadgroup.x;
tile[i] = inp[i];
{barrier}
out[i] = tile[63 - i]; {mark}
"""


def test_missing_barrier():
    # In the first SIMD group, the first lane reads before any write. The error is either an uninitialised read or a
    # race.
    error = find(REVERSE.format(barrier="", mark="// BUG"), {"inp": X}, **BOTH)
    assert error.kind in ("race", "uninitialised read") and error.buffer == "tile"


def test_barrier_for_the_wrong_memory():
    error = find(
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_device);", mark="// BUG"), {"inp": X}, **BOTH
    )
    assert (error.kind, error.buffer) == ("race", "tile")
    assert error.other_place.line == 4


def test_simdgroup_barrier_is_not_enough_for_two_groups():
    begin = """
        threadgroup float tile[64];
        uint i = thread_position_in_threadgroup.x;
        tile[i] = inp[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    """
    out = run(f"{begin} tile[63 - i] = i; out[i] = 0;", {"inp": X}, **BOTH)  # every element has one writer: no race
    assert (out == 0).all()
    error = find(
        f"""{begin}
        float x = tile[63 - i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        tile[i] = x; // BUG
        out[i] = x;
        """,
        {"inp": X},
        **BOTH,
    )
    assert (error.kind, error.buffer) == ("race", "tile")
    assert {error.line, error.other_place.line} == {7, 9}


def test_simdgroup_barrier_is_enough_inside_a_group():
    source = """
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    tile[i] = inp[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float x = tile[i ^ 1];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    tile[i] = x;
    out[i] = x;
    """
    np.testing.assert_array_equal(run(source, {"inp": X}, **BOTH), X[np.arange(64) ^ 1])
    error = find(source.replace("simdgroup_barrier(mem_flags::mem_threadgroup);\n    tile[i] = x;",
                                "tile[i] = x; // BUG"), {"inp": X}, **BOTH)  # fmt: skip
    assert (error.kind, error.buffer) == ("race", "tile")


def test_neighbouring_bytes_do_not_race():
    source = """
    threadgroup uchar flags[32];
    uint i = thread_position_in_grid.x;
    flags[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = flags[31 - i];
    """
    np.testing.assert_array_equal(run(source), np.arange(32)[::-1])


def test_lanes_may_read_and_then_write_between_barriers_of_their_group():
    source = """
    threadgroup float s[64];
    uint i = thread_position_in_grid.x;
    s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float x = s[i ^ 1];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    s[OTHER] = s[OTHER] + x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = s[i];
    """
    i = np.arange(64)
    np.testing.assert_array_equal(run(source.replace("OTHER", "i"), **BOTH), i + (i ^ 1))
    # This group's barrier does not order reads of the other group.
    assert find(source.replace("OTHER", "i ^ 32"), **BOTH).kind == "race"


def test_device_memory_inside_a_threadgroup():
    source = """
    uint i = thread_position_in_grid.x;
    scratch[i] = i;
    threadgroup_barrier(mem_flags::{flags});
    out[i] = scratch[31 - i]; // BUG
    """
    outputs = {"out": ((32,), mx.float32), "scratch": ((32,), mx.float32)}
    out, _ = run(source.format(flags="mem_device"), outputs=outputs)
    np.testing.assert_array_equal(out, np.arange(32)[::-1])
    error = find(source.format(flags="mem_threadgroup"), outputs=outputs)
    assert (error.kind, error.buffer) == ("race", "scratch")


# --- divergence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["threadgroup_barrier(mem_flags::mem_threadgroup);", "meet();"])
@pytest.mark.parametrize("condition", ["i < 16", "i < 32"])
def test_a_barrier_in_both_branches_is_reported_as_divergence(call, condition):
    error = find(
        f"uint i = thread_position_in_grid.x; if ({condition}) {{ {call} }} else {{ {call} }} out[i % 32] = 0;",
        header="void meet() { threadgroup_barrier(mem_flags::mem_threadgroup); }",
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
    )
    assert error.kind == "barrier divergence"


def test_uniform_branches_of_groups_are_fine():
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = simdgroup_index_in_threadgroup == 0 ? simd_sum(1.0f) : simd_max(float(i));
    """
    np.testing.assert_array_equal(run(source, **BOTH), [32] * 32 + [63] * 32)


# --- other ----------------------------------------------------------------------------------------------------


def test_too_much_threadgroup_memory():
    source = "threadgroup float a[8192]; threadgroup float b[4]; a[0] = 0; b[0] = 1; out[0] = a[0] + b[0];"
    with pytest.raises(CheckError, match=r"32784 bytes of threadgroup memory.*a 32768, b 16"):
        run(source, grid=(1, 1, 1))
    # Exactly 32 KiB is allowed.
    run("threadgroup float a[8192]; a[0] = 3; out[0] = a[0];", grid=(1, 1, 1))


@pytest.mark.parametrize(
    "grid, threadgroup, message",
    [
        ((0, 1, 1), (32, 1, 1), "three positive sizes"),
        ((32, 1, 1), (32, 0, 1), "three positive sizes"),
        ((2048, 1, 1), (1025, 1, 1), "1025 threads"),
        ((2048, 4, 1), (512, 4, 1), "2048 threads"),
    ],
)
def test_sizes_that_metal_refuses(grid, threadgroup, message):
    with pytest.raises(CheckError, match=message):
        run("", grid=grid, threadgroup=threadgroup)


def test_too_many_buffers():
    inputs = {f"in{i}": X for i in range(31)}
    with pytest.raises(CheckError, match="32 buffers"):
        run("out[0] = " + " + ".join(f"{n}[0]" for n in inputs) + ";", inputs, grid=(1, 1, 1))
