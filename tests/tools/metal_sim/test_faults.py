"""One planted bug of each kind: the simulator must find it and report the buffer, the index and the line."""

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


# --- out of bounds ------------------------------------------------------------------------------------------


def test_read_past_the_end():
    error = find("out[thread_position_in_grid.x] = inp[thread_position_in_grid.x + 40]; // BUG", {"inp": X})
    assert (error.kind, error.buffer, error.index) == ("out of bounds", "inp", 64)


def test_read_before_the_start():
    error = find(
        """
        int i = thread_position_in_grid.x;
        out[i] = inp[i - 1]; // BUG
        """,
        {"inp": X},
    )
    assert (error.kind, error.buffer, error.index) == ("out of bounds", "inp", -1)


def test_read_gigabytes_away():
    error = find("out[thread_position_in_grid.x] = inp[thread_position_in_grid.x + 1000000000ul]; // BUG", {"inp": X})
    assert (error.kind, error.buffer, error.index) == ("out of bounds", "inp", 1000000000)


def test_write_past_the_end():
    error = find("out[thread_position_in_grid.x + 1] = 0; // BUG")
    assert (error.kind, error.buffer, error.index) == ("out of bounds", "out", 32)


def test_small_input_in_constant_memory():
    error = find("out[thread_position_in_grid.x] = inp[thread_position_in_grid.x]; // BUG", {"inp": X[:5]})
    assert (error.kind, error.buffer, error.index) == ("out of bounds", "inp", 5)


def test_vector_load_that_straddles_the_end():
    error = find(
        """
        // metal_sim: never small: inp
        const device float4* v = (const device float4*)inp;
        out[thread_position_in_grid.x] = v[thread_position_in_grid.x].x; // BUG
        """,
        {"inp": X[:62]},
    )
    assert (error.kind, error.buffer, error.index) == ("out of bounds", "inp", 60)


def test_threadgroup_variable_past_the_end():
    error = find(
        """
        threadgroup float first[32];
        threadgroup float second[32];
        uint i = thread_position_in_grid.x;
        threadgroup float* p = first;
        second[i] = i;
        p[i + 1] = i; // BUG
        out[i] = second[i];
        """
    )
    assert (error.kind, error.buffer, error.index) == ("out of bounds", "first", 128)


def test_inner_dimension_of_an_array():
    error = find(
        """
        threadgroup float tile[4][8];
        uint i = thread_position_in_grid.x;
        if (i < 9) tile[1][i] = 0; // BUG
        """
    )
    assert error.kind == "out of bounds"


def test_thread_array():
    error = find(
        """
        float a[4] = {0, 1, 2, 3};
        uint i = thread_position_in_grid.x;
        out[i] = a[i]; // BUG
        """
    )
    assert error.kind == "out of bounds"


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


def test_simdgroup_load_past_the_end():
    source = """
    // metal_sim: never small: inp
    simdgroup_float8x8 m;
    simdgroup_load(m, inp, 9); // BUG
    simdgroup_store(m, out, 8);
    """
    error = find(source, {"inp": X}, {"out": ((64,), mx.float32)})
    assert (error.kind, error.buffer) == ("out of bounds", "inp")


# --- memory that nothing wrote ------------------------------------------------------------------------------


def test_uninitialised_threadgroup_memory():
    error = find(
        """
        threadgroup float tile[32];
        uint i = thread_position_in_grid.x;
        if (i != 7) tile[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = tile[i]; // BUG
        """
    )
    assert (error.kind, error.buffer, error.index) == ("uninitialised read", "tile", 28)


def test_threadgroup_memory_does_not_survive_a_threadgroup():
    error = find(
        """
        threadgroup float tile[32];
        uint i = thread_position_in_threadgroup.x;
        if (threadgroup_position_in_grid.x == 0) tile[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = tile[i]; // BUG
        """,
        outputs={"out": ((64,), mx.float32)},
        grid=(64, 1, 1),
    )
    assert (error.kind, error.buffer) == ("uninitialised read", "tile")


def test_uninitialised_output():
    error = find("out[thread_position_in_grid.x] += 1; // BUG")
    assert (error.kind, error.buffer, error.index) == ("uninitialised read", "out", 0)


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
BOTH = {"outputs": {"out": ((64,), mx.float32)}, "grid": (64, 1, 1), "threadgroup": (64, 1, 1)}


def test_missing_barrier():
    # In the first SIMD group, the first lane reads before any write. The error is either an uninitialised read or a
    # race.
    error = find(REVERSE.format(barrier="", mark="// BUG"), {"inp": X}, **BOTH)
    assert error.kind in ("race", "uninitialised read")
    assert error.buffer == "tile"


def test_barrier_for_the_wrong_memory():
    error = find(
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_device);", mark="// BUG"), {"inp": X}, **BOTH
    )
    assert (error.kind, error.buffer) == ("race", "tile")
    assert error.other_place.line == 4


def test_simdgroup_barrier_is_not_enough_for_two_groups():
    source = """
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    tile[i] = inp[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile[63 - i] = out_of(i); // BUG
    """
    source = source.replace("out_of(i)", "i")
    out = run(source + "out[i] = 0;", {"inp": X}, **BOTH)  # every element has one writer: no race
    assert (out == 0).all()
    error = find(
        """
        threadgroup float tile[64];
        uint i = thread_position_in_threadgroup.x;
        tile[i] = inp[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = tile[63 - i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        tile[i] = x; // BUG
        out[i] = x;
        """,
        {"inp": X},
        **BOTH,
    )
    assert (error.kind, error.buffer) == ("race", "tile")
    assert {error.line, error.other_place.line} == {6, 8}


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


def test_two_threads_write_one_element():
    error = find(
        """
        threadgroup float flag[1];
        flag[0] = thread_position_in_grid.x; // BUG
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = flag[0];
        """
    )
    assert (error.kind, error.buffer, error.index) == ("race", "flag", 0)


def test_neighbouring_bytes_do_not_race():
    source = """
    threadgroup uchar flags[32];
    uint i = thread_position_in_grid.x;
    flags[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = flags[31 - i];
    """
    np.testing.assert_array_equal(run(source), np.arange(32)[::-1])


def test_two_threadgroups_write_one_element():
    error = find(
        "if (thread_position_in_threadgroup.x == 0) out[0] = threadgroup_position_in_grid.x; // BUG", grid=(64, 1, 1)
    )
    assert (error.kind, error.buffer, error.index) == ("race", "out", 0)
    assert "another threadgroup" in str(error)


def test_one_threadgroup_reads_what_another_wrote():
    error = find(
        """
        uint g = threadgroup_position_in_grid.x;
        if (thread_position_in_threadgroup.x == 0) {
          if (g == 0) out[1] = 5;
          else out[2] = out[1]; // BUG
        }
        """,
        grid=(64, 1, 1),
    )
    assert (error.kind, error.buffer, error.index) == ("race", "out", 1)


def test_own_read_does_not_hide_that_of_another_threadgroup():
    error = find(
        """
        uint g = threadgroup_position_in_grid.x;
        if (thread_position_in_threadgroup.x == 0) {
          if (g == 0) out[1] = out[0];
          else out[0] = out[0] + 1; // BUG
        }
        """,
        grid=(64, 1, 1),
        init_value=0,
    )
    assert (error.kind, error.buffer, error.index) == ("race", "out", 0)
    assert "another threadgroup" in str(error)


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
    outputs = {"out": ((64,), mx.float32)}
    both = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "outputs": outputs}
    i = np.arange(64)
    np.testing.assert_array_equal(run(source.replace("OTHER", "i"), **both), i + (i ^ 1))
    # This group's barrier does not order reads of the other group.
    assert find(source.replace("OTHER", "i ^ 32"), **both).kind == "race"


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


def test_barrier_that_some_lanes_skip():
    error = find(
        """
        uint i = thread_position_in_grid.x;
        if (i < 16) {
          threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
        }
        out[i] = 0;
        """
    )
    assert error.kind == "barrier divergence"


def test_barrier_that_a_whole_group_skips():
    error = find(
        """
        uint i = thread_position_in_grid.x;
        if (simdgroup_index_in_threadgroup == 0) {
          threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
        }
        out[i] = 0;
        """,
        **BOTH,
    )
    assert error.kind == "barrier divergence"


def test_different_barriers():
    error = find(
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
        **BOTH,
    )
    assert error.kind == "barrier divergence"


@pytest.mark.parametrize("call", ["threadgroup_barrier(mem_flags::mem_threadgroup);", "meet();"])
@pytest.mark.parametrize("condition", ["i < 16", "i < 32"])
def test_the_same_barrier_in_both_branches(call, condition):
    error = find(
        f"uint i = thread_position_in_grid.x; if ({condition}) {{ {call} }} else {{ {call} }} out[i % 32] = 0;",
        header="void meet() { threadgroup_barrier(mem_flags::mem_threadgroup); }",
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
    )
    assert error.kind == "barrier divergence"


def test_early_return_before_a_barrier():
    error = find(
        """
        uint i = thread_position_in_grid.x;
        if (i >= 20) return;
        threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
        out[i] = 0;
        """
    )
    assert error.kind == "barrier divergence"


def test_simd_operation_in_divergent_flow():
    error = find(
        """
        uint i = thread_position_in_grid.x;
        float x = 0;
        if (i % 2 == 0) {
          x = simd_sum(1.0f); // BUG
        }
        out[i] = x;
        """
    )
    assert error.kind == "SIMD divergence"


def test_simd_operation_in_a_loop_of_uneven_length():
    error = find(
        """
        uint i = thread_position_in_grid.x;
        float x = 0;
        for (uint k = 0; k <= i / 16; ++k) {
          x += simd_max(float(k)); // BUG
        }
        out[i] = x;
        """
    )
    assert error.kind == "SIMD divergence"


def test_simdgroup_store_by_half_a_group():
    error = find(
        """
        simdgroup_float8x8 m(1.0f);
        if (thread_index_in_simdgroup < 16) {
          simdgroup_store(m, out); // BUG
        }
        """,
        outputs={"out": ((64,), mx.float32)},
    )
    assert error.kind == "SIMD divergence"


def test_uniform_branches_of_groups_are_fine():
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = simdgroup_index_in_threadgroup == 0 ? simd_sum(1.0f) : simd_max(float(i));
    """
    np.testing.assert_array_equal(run(source, **BOTH), [32] * 32 + [63] * 32)


def test_shuffle_from_a_lane_without_a_thread():
    error = find(
        "out[thread_position_in_grid.x] = simd_shuffle(1.0f, ushort(31)); // BUG",
        outputs={"out": ((20,), mx.float32)},
        grid=(20, 1, 1),
        threadgroup=(20, 1, 1),
    )
    assert error.kind == "missing lane"


# --- other ----------------------------------------------------------------------------------------------------


def test_misaligned_vector():
    error = find(
        """
        // metal_sim: never small: inp
        const device float4* v = (const device float4*)(inp + 1);
        out[thread_position_in_grid.x] = v[0].x; // BUG
        """,
        {"inp": X},
    )
    assert error.kind == "misaligned access"


def test_integer_division_by_zero():
    error = find("out[thread_position_in_grid.x] = 7 / inp[thread_position_in_grid.x]; // BUG",
                 {"inp": np.zeros(32, np.int32)})  # fmt: skip
    assert error.kind == "arithmetic"


def test_write_to_an_input_through_a_cast():
    error = find(
        """
        // metal_sim: never small: inp
        device float* p = (device float*)inp;
        p[0] = 1; // BUG
        """,
        {"inp": X},
        grid=(1, 1, 1),
    )
    assert (error.kind, error.buffer) == ("write to input", "inp")


def test_the_simulator_works_after_a_fault():
    find("out[thread_position_in_grid.x + 1] = 0; // BUG")
    np.testing.assert_array_equal(run("out[thread_position_in_grid.x] = 4;"), np.full(32, 4))


def test_too_much_threadgroup_memory():
    source = "threadgroup float a[8192]; threadgroup float b[4]; a[0] = 0; b[0] = 1; out[0] = a[0] + b[0];"
    with pytest.raises(CheckError, match=r"32784 bytes of threadgroup memory.*a 32768, b 16"):
        run(source, grid=(1, 1, 1))


def test_exactly_32_kib_is_allowed():
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
