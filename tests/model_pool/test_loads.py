"""Loads that wait, are cancelled, or fail: their victims, their order, and their errors."""

from __future__ import annotations

import asyncio
import time

import pytest

from metal_engine.errors import LoadCancelledError, ModelLoadError, ModelTooLargeError
from metal_engine.model_pool import registry as registry_module
from metal_engine.model_pool.model_entry import ModelState
from tests.support.registry import RegistryOfFakes, run_with_fakes, until, with_fakes
from tests.support.serving import DEADLINE


def test_unloading_cancels_a_running_load_with_a_retryable_error(caplog: pytest.LogCaptureFixture) -> None:
    """Waiting requests get a retryable error at once. It does not count as a failure of the model."""

    async def test(made: RegistryOfFakes) -> None:
        made.models["b"].gate.clear()
        waiting = [asyncio.ensure_future(made.ask("b", [i])) for i in range(3)]
        await until(made.models["b"].began.is_set, "loading")
        await made.registry.unload(made["b"])
        for one in waiting:
            with pytest.raises(LoadCancelledError, match="was to be unloaded"):
                await one
        assert made.loaded == "" and made["b"].num_bytes == 0
        assert made["b"].error is None and made["b"].failed is None
        made.models["b"].gate.set()
        assert await made.ask("b", [2]) == made.answer("b", [2])

    with caplog.at_level("WARNING"):
        run_with_fakes(test)
    assert not caplog.records


@with_fakes("ab", 100)
async def test_unloading_cancels_a_load_that_waits_for_memory_at_once(made: RegistryOfFakes) -> None:
    await made.registry.use(made["a"])
    waiting = asyncio.ensure_future(made.ask("b", [2]))
    await until(lambda: made["a"].is_closing, "a to be marked")
    assert made["b"].state is ModelState.UNLOADED, "a waiting load uses no thread"
    unloading = asyncio.ensure_future(made.registry.unload(made["b"]))
    with pytest.raises(LoadCancelledError):
        await waiting
    await unloading
    assert made["b"].load is None
    assert not made["a"].is_closing and made.registry.is_ready(made["a"]), "a stays loaded"
    made.registry.release(made["a"])
    assert await made.ask("a", [1]) == made.answer("a", [1])
    assert made["a"].num_loads == 1


@with_fakes("ab", 100)
async def test_a_load_that_waits_for_the_same_model_to_unload_is_cancelled_at_once(made: RegistryOfFakes) -> None:
    """The cancelled load waits for its own model to be unloaded, for another model or on request."""
    for name in ("", "b"):
        await made.registry.use(made["a"])
        other = asyncio.ensure_future(made.ask(name, [1]) if name else made.registry.unload(made["a"]))
        await until(lambda: made["a"].is_closing, "a to be marked")
        late = asyncio.ensure_future(made.ask("a", [2]))
        await until(lambda: made["a"].num_waiting == 1, "one that waits for a to come back")
        unloading = asyncio.ensure_future(made.registry.unload(made["a"]))
        await asyncio.wait([late], timeout=DEADLINE)
        assert isinstance(late.exception(), LoadCancelledError)
        assert not unloading.done()
        made.registry.release(made["a"])
        await asyncio.gather(other, unloading)
        assert made["a"].state is ModelState.UNLOADED and made["a"].load is None
    assert made["a"].num_loads == 2


@with_fakes("abcd", 300)
async def test_requests_for_a_model_that_stays_loaded_run_while_another_model_loads(made: RegistryOfFakes) -> None:
    for name in "ab":
        await made.registry.use(made[name])
    for name in "cd":
        made[name].known_bytes = 100
        made.models[name].gate.clear()
    given_up = asyncio.ensure_future(made.ask("d", [1]))
    await until(lambda: made["d"].num_bytes == 100, "d to have its memory")
    loaded = asyncio.ensure_future(made.ask("c", [1]))
    await until(lambda: made["a"].is_closing, "a to be marked for c")
    late = asyncio.ensure_future(made.ask("a", [2]))
    await until(lambda: made["a"].num_waiting == 1, "one that waits for a to come back")
    given_up.cancel()  # after that, c fits, and a stays
    assert await asyncio.wait_for(late, DEADLINE) == made.answer("a", [2])
    assert made["c"].state is ModelState.LOADING and made["a"].num_loads == 1
    made.models["c"].gate.set()
    assert await loaded == made.answer("c", [1])
    for name in "ab":
        made.registry.release(made[name])


@with_fakes("abc", 100)
async def test_a_load_is_cancelled_when_all_clients_disconnect(made: RegistryOfFakes) -> None:
    """A load without clients is cancelled while it waits or runs, and no model is unloaded for it."""
    await made.registry.use(made["a"])
    for name in "bc":
        left = [asyncio.ensure_future(made.ask(name, [i])) for i in range(3)]
        await until(lambda: made["a"].is_closing, "a to be marked")
        late = asyncio.ensure_future(made.ask("a", [7]))
        await until(lambda: made["a"].num_waiting == 1, "one that waits for a to come back")
        for task in left:
            task.cancel()
        assert await late == made.answer("a", [7]), "a stays, and serves its waiting requests"
        assert not made["a"].is_closing and made[name].load is None
    made.registry.release(made["a"])
    # While it runs: its thread detects the cancellation, and releases its memory.
    made.registry.budget.memory_bytes = 200
    made.models["b"].gate.clear()
    made.models["b"].began.clear()
    gone = asyncio.ensure_future(made.ask("b", [1]))
    await until(made.models["b"].began.is_set, "loading")
    gone.cancel()
    await until(lambda: made["b"].state is ModelState.UNLOADED, "the load to end")
    assert [one.num_loads for one in made.registry.entries] == [1, 0, 0]
    assert made["b"].error is None and made.loaded == "a"


@with_fakes()
async def test_a_new_request_for_a_model_with_a_load_being_cancelled_is_served(made: RegistryOfFakes) -> None:
    for has_noticed in (False, True):
        made.models["b"].gate.clear()
        made.models["b"].began.clear()
        left = asyncio.ensure_future(made.ask("b", [1]))
        await until(made.models["b"].began.is_set, "loading")
        left.cancel()
        await asyncio.wait([left])
        starting = made["b"].starting
        assert starting is not None
        if has_noticed:  # in the model's thread, before the event loop notices
            with pytest.raises(LoadCancelledError):
                starting.result(DEADLINE)
        again = asyncio.ensure_future(made.ask("b", [2]))
        await asyncio.sleep(0.01)
        made.models["b"].gate.set()
        assert await again == made.answer("b", [2])
        await made.registry.unload(made["b"])


@with_fakes("ulst", 200)
async def test_small_models_load_while_a_large_model_waits_for_memory(made: RegistryOfFakes) -> None:
    made.models["l"].num_bytes = 150
    made.models["s"].num_bytes = made.models["t"].num_bytes = 50
    made.models["l"].gate.clear()  # l is blocked after it has got memory
    used = await made.registry.use(made["u"])
    large = asyncio.ensure_future(made.ask("l", [1]))
    await until(lambda: made["u"].is_closing, "u to be marked")
    for name in "sts":  # each fits while the other is idle
        assert await made.ask(name, [2]) == made.answer(name, [2])
    assert not large.done() and made["u"].loaded_engine is used
    held = await made.registry.use(made["s"])
    late = asyncio.ensure_future(made.ask("u", [3]))
    made.registry.release(made["u"])
    await until(lambda: made["u"].state is ModelState.UNLOADED, "u to go")
    assert await made.ask("s", [9]) == made.answer("s", [9]), "50 of 200 bytes are free, so no model is unloaded"
    made.models["l"].gate.set()
    assert await large == made.answer("l", [1])
    assert made["s"].loaded_engine is held, "s was not unloaded"
    assert not late.done() or made["u"].num_loads == 2
    made.registry.release(made["s"])
    assert await late == made.answer("u", [3])
    assert made["u"].num_loads == 2


@with_fakes()
async def test_no_model_is_unloaded_for_a_model_that_still_would_not_fit(made: RegistryOfFakes) -> None:
    for name in "ab":
        await made.ask(name, [1])
    made.models["c"].num_bytes = 201
    with pytest.raises(ModelTooLargeError):
        await made.ask("c", [1])
    assert made.loaded == "ab"
    # Unloading the idle model would not free enough memory, so it stays.
    made.models["c"].num_bytes = 200
    made["c"].failed = None
    await made.registry.use(made["b"])
    waiting = asyncio.ensure_future(made.ask("c", [1]))
    await until(lambda: made["b"].is_closing, "b to be marked")
    assert await made.ask("a", [4]) == made.answer("a", [4])
    assert made.loaded == "ab" and made["a"].num_loads == 1
    made.registry.release(made["b"])
    assert await waiting == made.answer("c", [1])
    assert made.loaded == "c"


@with_fakes()
async def test_a_model_that_could_not_be_loaded_is_not_read_again_at_once(
    made: RegistryOfFakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made.ask("a", [1])
    model, began = made.models["b"], 0
    model.problem = "its weights are cut short"

    async def ask() -> int:
        """Request the model. Return the number of times its files were read."""
        nonlocal began
        model.began.clear()
        with pytest.raises(ModelLoadError, match="cut short"):
            await made.ask("b", [1])
        began += model.began.is_set()
        return began

    assert [await ask() for _ in range(5)] == [1] * 5
    assert made["b"].num_bytes == 0 and "cut short" in (made["b"].error or "") and made.loaded == "a"
    model.problem += " elsewhere"  # the model's files have changed
    assert [await ask() for _ in range(5)] == [2] * 5
    assert made["b"].failed is not None and made["b"].failed.until <= time.monotonic() + 10
    monkeypatch.setattr(registry_module, "RETRY_SECONDS", 0.0)
    model.problem += "!"
    assert [await ask() for _ in range(3)] == [3, 4, 5], "it is tried again after the retry delay"
    model.problem = None
    assert await made.ask("b", [1]) == made.answer("b", [1])
    assert made["b"].error is None
    # A model that is too large gives the same error again.
    made.models["c"].num_bytes = 300
    for _ in range(2):
        monkeypatch.setattr(registry_module, "RETRY_SECONDS", 60.0)
        with pytest.raises(ModelTooLargeError) as told:
            await made.ask("c", [1])
        assert told.value.missing_bytes == 100
