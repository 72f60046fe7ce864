"""Several models: loading, eviction, waiting requests, and cleanup after failures."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from metal_engine.cli.serve_multi_model import load_named
from metal_engine.errors import InsufficientMemoryError, ModelLoadError
from metal_engine.model_pool.model_entry import LoadedEngine
from tests.support.registry import RegistryOfFakes, until, with_fakes


@with_fakes()
async def test_the_least_recently_used_model_is_unloaded(made: RegistryOfFakes) -> None:
    for name, loaded in [("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("c", "bc"), ("a", "ac")]:
        assert await made.ask(name, [1, 2, 3]) == made.answer(name, [1, 2, 3])
        assert made.loaded == loaded
    assert [one.num_loads for one in made.registry.entries] == [2, 2, 1]


@with_fakes("ab", 100)
async def test_one_that_is_used_is_not_interrupted_and_not_kept_for_ever(made: RegistryOfFakes) -> None:
    """Only one model fits. New requests for the used model wait until the other model's request is served."""
    await made.registry.load(made["a"])
    (runner,) = made.models["a"].runners
    runner.running.clear()
    first = asyncio.ensure_future(made.ask("a", [1], 40))
    await until(lambda: made["a"].num_leases, "the first")
    other = asyncio.ensure_future(made.ask("b", [2]))
    await until(lambda: made["a"].is_closing, "a to be marked")
    runner.running.set()
    late = asyncio.ensure_future(made.ask("a", [3]))
    order: list[str] = []
    for name, task in (("first", first), ("other", other), ("late", late)):
        task.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    assert await first == made.answer("a", [1], 40)
    assert await other == made.answer("b", [2])
    assert await late == made.answer("a", [3])
    await asyncio.sleep(0)
    assert order == ["first", "other", "late"]
    assert (made["a"].num_loads, made["b"].num_loads, made.loaded) == (2, 1, "a")


@with_fakes()
async def test_hundreds_of_requests_over_three_models_with_room_for_two(made: RegistryOfFakes) -> None:
    asked = [("abc"[i % 3], [i % 256, i // 256, 7]) for i in range(300)]
    answers = await asyncio.gather(*(made.ask(name, prompt) for name, prompt in asked))
    assert answers == [made.answer(name, prompt) for name, prompt in asked]
    # A load serves all requests that wait for it.
    assert sum(one.num_loads for one in made.registry.entries) <= 6
    waves = [made.ask(name, [wave, 9]) for wave in range(20) for name in "abc"]
    for i in range(0, len(waves), 3):
        await asyncio.gather(*waves[i : i + 3])
    made.check()
    assert all(one.num_leases == 0 and one.load is None for one in made.registry.entries)


@with_fakes()
async def test_a_load_without_eviction_unloads_no_model(made: RegistryOfFakes) -> None:
    for name in "ab":
        await made.registry.load(made[name], may_evict=False)
    with pytest.raises(InsufficientMemoryError):
        await made.registry.load(made["c"], may_evict=False)
    assert made.loaded == "ab" and made["c"].error is None


@with_fakes(keep_alive=0.05)
async def test_idle_models_are_unloaded_after_a_while(made: RegistryOfFakes) -> None:
    await asyncio.gather(made.ask("a", [1]), made.ask("b", [1]))
    loaded = await made.registry.use(made["b"])
    await until(lambda: made.loaded == "b", "a to go")
    await asyncio.sleep(0.1)
    assert made.loaded == "b" and made["b"].loaded_engine is loaded, "b is in use"
    made.registry.release(made["b"])
    await until(lambda: made.loaded == "", "b to go")
    assert await made.ask("a", [1]) == made.answer("a", [1])


@with_fakes(keep_alive=0.05)
async def test_a_model_loaded_after_all_clients_left_expires_by_keep_alive(made: RegistryOfFakes) -> None:
    waiting = asyncio.ensure_future(made.ask("a", [1]))
    await until(lambda: made["a"].num_loads, "the load")
    waiting.cancel()
    await until(lambda: made.loaded == "", "a to go")
    assert made["a"].num_loads == 1


@with_fakes()
async def test_a_failed_unload_does_not_block_later_loads(made: RegistryOfFakes) -> None:
    def fail(loaded: LoadedEngine) -> None:
        raise ValueError("who counts requests has a mistake")

    made.registry.at_unload.append(fail)
    for name in "abcabc":
        assert await made.ask(name, [1]) == made.answer(name, [1])
    loaded = made["c"].loaded_engine
    assert loaded is not None
    shutdown = loaded.engine.shutdown

    def fails_late(timeout: float | None) -> bool:
        shutdown(timeout)
        raise OSError("no")

    loaded.engine.shutdown = fails_late  # type: ignore[method-assign, assignment]
    await made.registry.unload(made["c"])
    assert "unloaded properly: no" in (made["c"].error or "")
    assert await made.ask("c", [1]) == made.answer("c", [1])
    assert made["c"].error is None


@with_fakes()
async def test_an_unloaded_engine_is_garbage_collected(made: RegistryOfFakes) -> None:
    loaded = await made.registry.use(made["a"])
    engine, core = weakref.ref(loaded.engine), weakref.ref(loaded.engine._started.core)  # type: ignore[type-var]
    del loaded
    made.registry.release(made["a"])
    await made.registry.unload(made["a"])
    made.models["a"].runners.clear()
    # The thread that has unloaded it may still reference its work.
    await until(lambda: gc.collect() >= 0 and engine() is None and core() is None, "both to be forgotten")


@with_fakes()
async def test_an_unloaded_engine_is_collected_soon(made: RegistryOfFakes) -> None:
    """Python's own collections are rare, and tokenizers take tens of MiB."""
    loaded = await made.registry.use(made["a"])
    engine = weakref.ref(loaded.engine)
    loaded.engine.cycle = loaded.engine  # type: ignore[attr-defined]  # as engines in processes have
    del loaded
    made.registry.release(made["a"])
    gc.disable()
    try:
        await made.registry.unload(made["a"])
        made.models["a"].runners.clear()
        await until(lambda: engine() is None, "the collection")
    finally:
        gc.enable()


def test_names() -> None:
    made = RegistryOfFakes("ab", 200)
    made.registry.add_name("alias", made["b"])
    assert made.registry.names == ("a", "b", "alias")
    assert made.registry.find("alias") is made["b"] and made.registry.find("c") is None
    with pytest.raises(ValueError, match="taken"):
        made.registry.add("alias", made.models["a"].source)
    assert made.registry.shutdown(1)


@with_fakes()
async def test_idle_models_are_unloaded_if_memory_is_short(made: RegistryOfFakes) -> None:
    """Models in use and models that have just been used stay, unless the pressure is critical."""
    for name in "ab":
        await made.ask(name, [1, 2, 3])
    made["a"].last_used -= 20.0
    made.registry.unload_idle(10.0)
    await until(lambda: made.loaded == "b", "the end of a")
    runner = made.models["b"].runners[-1]
    runner.running.clear()
    request = asyncio.ensure_future(made.ask("b", [1], 40))
    await until(lambda: made["b"].num_leases, "the request")
    made.registry.unload_idle(0.0)
    runner.running.set()
    assert await request == made.answer("b", [1], 40)
    assert made.loaded == "b"
    made.registry.unload_idle(0.0)
    await until(lambda: made.loaded == "", "the end of b")
    assert await made.ask("b", [4]) == made.answer("b", [4])


@with_fakes()
async def test_named_models_that_fit_together_are_loaded(
    made: RegistryOfFakes, caplog: pytest.LogCaptureFixture
) -> None:
    await load_named(made.registry, ("a", "b", "c"), "--num-gpu-blocks-override")
    assert made.loaded == "ab"
    (line,) = caplog.messages
    assert line == (
        "c takes up to 100 bytes during loading (an estimate, since its largest step is not measured yet), and 0 bytes "
        "are available while the loaded models stay in memory: 100 bytes are missing; it is loaded on its first "
        "request; to load it at the start, raise --models-memory or lower --num-gpu-blocks-override"
    )
    await made.registry.unload(made["a"])
    made.models["a"].problem = "its weights are cut short"
    with pytest.raises(ModelLoadError, match="cut short"):
        await load_named(made.registry, ("b", "a"))
