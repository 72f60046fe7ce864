"""Order and number of dispatches to a Mac's GPU: no copy of the KV cache, and no unnecessary wait."""

from __future__ import annotations

from itertools import product

import pytest

from metal_engine.settings.config import IN_FLIGHT_STATES
from tests.support.sweeps import sweep
from tests.tools.fake_gpu.conftest import OnDevice

BOTH = (False, True)
# Number of command buffers of a step -> operations per buffer, for a model with 17 kernels in each of 24 layers.
MAX_OPS_OF = {17: 24, 13: 31, 12: 33, 11: 36, 10: 40, 8: 60}


@pytest.mark.parametrize(("late", "replay"), sweep(product(BOTH, BOTH), lambda late, replay: late != replay))
def test_queued_dispatch_copies_no_kv_cache(on_device: OnDevice, late: bool, replay: bool) -> None:
    """A late device completes nothing until the host waits for it, in MLX's throttle."""
    counts = on_device("decode", ahead=True, behind=True, late=late, replay=replay)
    assert counts["forwards"].get("replayed", 0) >= (6 if replay else 0)
    assert counts["pool_copies"] == 0 and counts["peak_arrays"] < 1
    assert counts["commits_per_step"] >= 14


def test_with_few_command_buffers_much_would_be_copied(on_device: OnDevice) -> None:
    """This shows that the test above and the check at the start can detect copies."""
    counts = on_device("decode", ahead=True, behind=True, late=True, max_ops=MAX_OPS_OF[8])
    assert counts["commits_per_step"] < 10 and counts["pool_copies"] > 0


def test_after_the_end_few_command_buffers_do_no_harm(on_device: OnDevice) -> None:
    assert on_device("decode", ahead=True, late=True, max_ops=MAX_OPS_OF[8])["pool_copies"] == 0


@pytest.mark.parametrize(
    ("late", "behind", "replay"),
    sweep(product(BOTH, BOTH, BOTH), lambda *case: case in ((False, True, True), (True, False, False))),
)
def test_dispatch_of_hybrid_models_copies_no_kv_cache(
    on_device: OnDevice, late: bool, behind: bool, replay: bool
) -> None:
    counts = on_device("decode", ahead=True, behind=behind, late=late, replay=replay, hybrid=True)
    assert counts["forwards"].get("replayed", 0) >= (6 if replay else 0)
    assert counts["pool_copies"] == 0 and counts["commits_per_step"] >= 14
    assert counts["peak_states"] < IN_FLIGHT_STATES - 1  # one was there before


@pytest.mark.parametrize("behind", [pytest.param(False, marks=pytest.mark.full), True])
def test_prefill_chunks_without_samples_are_written_in_place(on_device: OnDevice, behind: bool) -> None:
    """The output of such a step keeps the whole cache alive until it ends, so the next step is not dispatched behind
    it.
    """
    counts = on_device("prefill", behind=behind)
    assert counts["num_steps"] > 12 and counts["pool_copies"] == 0


@pytest.mark.parametrize("replay", [pytest.param(False, marks=pytest.mark.full), True], ids=["built", "replayed"])
def test_startup_check_decides_on_queued_dispatch_for_hybrid_models(on_device: OnDevice, replay: bool) -> None:
    """Queued dispatch is chosen for steps with many command buffers. Few buffers or a small cache turn it off."""
    for max_ops, num_blocks in ((24, 1 << 16), (60, 1 << 16), (24, 1 << 8)):
        chosen = on_device("choose", max_ops=max_ops, num_blocks=num_blocks, replay=replay, hybrid=True)
        assert chosen["allow_queued_dispatch"] == ((max_ops, num_blocks) == (24, 1 << 16))
        assert chosen["is_clean"] and chosen["replays"] == replay
        if num_blocks == 1 << 8:
            assert "recurrent states are too large" in chosen["dispatch"]
        else:
            assert chosen["allow_queued_dispatch"] == (chosen["pool_copies"] == 0)


@pytest.mark.parametrize(
    ("num_buffers", "replay"),
    sweep(product(MAX_OPS_OF, BOTH), lambda *case: case in ((17, True), (12, True), (8, False))),
)
def test_a_check_at_the_start_chooses(on_device: OnDevice, num_buffers: int, replay: bool) -> None:
    """Many command buffers per step avoid copies, few cause many copies. In between, a few arrays are copied, which the
    check detects.

    With replay, the check covers both built and replayed steps.
    """
    chosen = on_device("choose", max_ops=MAX_OPS_OF[num_buffers], replay=replay)
    assert chosen["replays"] == replay and chosen["num_traces"] == int(replay)
    assert chosen["allow_queued_dispatch"] == (chosen["pool_copies"] == 0) and chosen["is_clean"]
    if num_buffers in (8, 17):
        assert chosen["allow_queued_dispatch"] == (num_buffers == 17)
    if chosen["allow_queued_dispatch"]:
        assert chosen["dispatch"] == "each step is queued while the previous step runs"
    else:
        assert "after the end" in chosen["dispatch"] and "queued steps would copy" in chosen["dispatch"]


def test_queued_steps_are_dispatched_before_waiting_for_the_previous_step(on_device: OnDevice) -> None:
    """A step is dispatched in two parts. Between them, the tokens of the previous step are reported without a wait.

    The next step is planned after that, when the device has both parts.
    """
    found = on_device("order", behind=True)
    assert found["seen"] == ["give", "plan", "build", "give", "wait", "tokens"] * 3
    assert max(found["unfinished"]) > 1, "the step behind was waited for, too"  # one: of waiting itself


@pytest.mark.full
def test_unqueued_steps_are_dispatched_after_waiting_for_the_previous_step(on_device: OnDevice) -> None:
    seen = on_device("order", behind=False)["seen"]
    assert seen == ["give", "plan", "build", "wait", "give", "tokens"] * 3


def test_estimates_of_kernels_are_not_too_high(on_device: OnDevice) -> None:
    """If an estimate is too high, a step has too few command buffers."""
    counted = on_device("count_kernels_of_architectures")
    assert len(counted) >= 8
    assert not {name: numbers for name, numbers in counted.items() if numbers[0] < 14 / 16 * numbers[1]}
