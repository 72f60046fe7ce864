"""Several models: who is loaded, who has to go, who waits, and what is left of those that fail."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from metal_engine.engine import registry as registry_module
from metal_engine.engine.model_entry import ModelEntry, ModelState, RunningModel
from metal_engine.engine.registry import ModelRegistry, RegistryClosedError
from metal_engine.errors import LoadCancelledError, ModelLoadError, ModelTooLargeError, NoRoomError
from metal_engine.sampling_params import SamplingParams
from tests.support.serving import DEADLINE
from tests.support.several import FakeModel, salted
from tools.fixtures.fake_engine import generated

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


async def until(condition: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.002)
    assert condition(), what


class Fixture:
    """A registry with fake models of 100 bytes, by name."""

    def __init__(self, names: str, memory_bytes: int, keep_alive: float = 0.0) -> None:
        self.registry = ModelRegistry(memory_bytes, keep_alive)
        self.models = {name: FakeModel(salt) for salt, name in enumerate(names)}
        self.entries = {name: self.registry.add(name, model.source) for name, model in self.models.items()}

    def __getitem__(self, name: str) -> ModelEntry:
        return self.entries[name]

    @property
    def loaded(self) -> str:
        self.check()
        return "".join(name for name, one in self.entries.items() if one.state is ModelState.LOADED)

    def check(self) -> None:
        taken = sum(one.num_bytes for one in self.registry.entries)
        assert taken <= self.registry.memory_bytes
        for one in self.registry.entries:
            assert (one.num_bytes == 0) == (one.state is ModelState.UNLOADED) or one.state is ModelState.LOADING

    async def ask(self, name: str, prompt: list[int], num_tokens: int = 6) -> list[int]:
        """A request's answer."""
        running = await self.registry.use(self[name])
        try:
            self.check()
            params = PARAMS.changed(max_tokens=num_tokens)
            (prepared,) = running.engine.prepare_all([prompt], params)
            tokens = []
            async for output in running.engine.generate(f"{name}{prompt}", prepared):
                assert output.error is None, output.error
                tokens += output.token_ids
            return tokens
        finally:
            self.registry.release(self[name])

    def answer(self, name: str, prompt: list[int], num_tokens: int = 6) -> list[int]:
        return generated(prompt, num_tokens, salted(self.models[name].salt))


def run(test: Callable[[Fixture], Any], names: str = "abc", memory_bytes: int = 200, keep_alive: float = 0.0) -> None:
    async def main() -> Fixture:
        made = Fixture(names, memory_bytes, keep_alive)
        try:
            await test(made)
        finally:
            for model in made.models.values():
                model.gate.set()
        return made

    made = asyncio.run(main())
    assert made.registry.shutdown(DEADLINE)


def test_the_least_recently_used_goes() -> None:
    async def test(made: Fixture) -> None:
        for name, loaded in [("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("c", "bc"), ("a", "ac")]:
            assert await made.ask(name, [1, 2, 3]) == made.answer(name, [1, 2, 3])
            assert made.loaded == loaded
        assert [one.num_loads for one in made.registry.entries] == [2, 2, 1]

    run(test)


def test_one_that_is_used_is_not_interrupted_and_not_kept_for_ever() -> None:
    """Room for one. New requests for it wait, behind those for which it has to go."""

    async def test(made: Fixture) -> None:
        made.models["a"].step_time = 0.005
        first = asyncio.ensure_future(made.ask("a", [1], 40))
        await until(lambda: made["a"].num_leases, "the first")
        other = asyncio.ensure_future(made.ask("b", [2]))
        await until(lambda: made["a"].is_closing, "a to be marked")
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

    run(test, "ab", 100)


def test_hundreds_of_requests_over_three_models_with_room_for_two() -> None:
    async def test(made: Fixture) -> None:
        asked = [("abc"[i % 3], [i % 256, i // 256, 7]) for i in range(300)]
        answers = await asyncio.gather(*(made.ask(name, prompt) for name, prompt in asked))
        assert answers == [made.answer(name, prompt) for name, prompt in asked]
        # All that waited for a load were served by it.
        assert sum(one.num_loads for one in made.registry.entries) <= 6
        waves = [made.ask(name, [wave, 9]) for wave in range(20) for name in "abc"]
        for i in range(0, len(waves), 3):
            await asyncio.gather(*waves[i : i + 3])
        made.check()
        assert all(one.num_leases == 0 and one.load is None for one in made.registry.entries)

    run(test)


def test_others_are_served_while_one_is_loaded() -> None:
    async def test(made: Fixture) -> None:
        await made.ask("a", [1])
        made.models["b"].gate.clear()
        waiting = asyncio.ensure_future(made.ask("b", [2]))
        await until(made.models["b"].began.is_set, "loading")
        for i in range(20):
            assert await made.ask("a", [i]) == made.answer("a", [i])
        assert not waiting.done() and made["b"].state is ModelState.LOADING
        made.models["b"].gate.set()
        assert await waiting == made.answer("b", [2])

    run(test)


def test_a_model_that_cannot_be_loaded_takes_nobody_with_it() -> None:
    async def test(made: Fixture) -> None:
        await made.ask("a", [1])
        made.models["b"].problem = "its weights are cut short"
        for _ in range(2):
            asked = [made.ask("b", [i]) for i in range(3)]
            told = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, ModelLoadError) and "cut short" in str(one) for one in told)
        assert made["b"].num_bytes == 0 and "cut short" in (made["b"].error or "")
        assert await made.ask("a", [5]) == made.answer("a", [5])
        made.models["b"].problem = None
        assert await made.ask("b", [5]) == made.answer("b", [5])
        assert made["b"].error is None and made.loaded == "ab"

    run(test)


def test_a_load_may_be_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Those who wait are told at once that they may ask again; it is no failure of the model's."""

    async def test(made: Fixture) -> None:
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
        run(test)
    assert not caplog.records


def test_a_load_that_waits_for_room_is_given_up_at_once() -> None:
    async def test(made: Fixture) -> None:
        await made.registry.use(made["a"])
        waiting = asyncio.ensure_future(made.ask("b", [2]))
        await until(lambda: made["a"].is_closing, "a to be marked")
        assert made["b"].state is ModelState.UNLOADED, "it keeps no thread meanwhile"
        unloading = asyncio.ensure_future(made.registry.unload(made["b"]))
        with pytest.raises(LoadCancelledError):
            await waiting
        await unloading
        assert made["b"].load is None
        assert not made["a"].is_closing and made.registry.is_ready(made["a"]), "a need not go any more"
        made.registry.release(made["a"])
        assert await made.ask("a", [1]) == made.answer("a", [1])
        assert made["a"].num_loads == 1

    run(test, "ab", 100)


def test_what_clients_that_left_asked_for_is_not_loaded() -> None:
    """Neither while it waits for room, nor while it is under way; nobody goes for it."""

    async def test(made: Fixture) -> None:
        await made.registry.use(made["a"])
        for name in "bc":
            left = [asyncio.ensure_future(made.ask(name, [i])) for i in range(3)]
            await until(lambda: made["a"].is_closing, "a to be marked")
            late = asyncio.ensure_future(made.ask("a", [7]))
            await until(lambda: made["a"].num_waiting == 1, "one that waits for a to come back")
            for task in left:
                task.cancel()
            assert await late == made.answer("a", [7]), "a stays, and serves who waited for it"
            assert not made["a"].is_closing and made[name].load is None
        made.registry.release(made["a"])
        # Under way: its thread notices, and gives back what it had claimed.
        made.registry.budget.memory_bytes = 200
        made.models["b"].gate.clear()
        made.models["b"].began.clear()
        gone = asyncio.ensure_future(made.ask("b", [1]))
        await until(made.models["b"].began.is_set, "loading")
        gone.cancel()
        await until(lambda: made["b"].state is ModelState.UNLOADED, "the load to end")
        assert [one.num_loads for one in made.registry.entries] == [1, 0, 0]
        assert made["b"].error is None and made.loaded == "a"

    run(test, "abc", 100)


def test_one_who_asks_again_for_a_load_that_is_being_given_up_gets_it() -> None:
    async def test(made: Fixture) -> None:
        for has_noticed in (False, True):
            made.models["b"].gate.clear()
            made.models["b"].began.clear()
            left = asyncio.ensure_future(made.ask("b", [1]))
            await until(made.models["b"].began.is_set, "loading")
            left.cancel()
            await asyncio.wait([left])
            starting = made["b"].starting
            assert starting is not None
            if has_noticed:  # in the model's thread; the event loop does not know yet
                with pytest.raises(LoadCancelledError):
                    starting.result(DEADLINE)
            again = asyncio.ensure_future(made.ask("b", [2]))
            await asyncio.sleep(0.01)
            made.models["b"].gate.set()
            assert await again == made.answer("b", [2])
            await made.registry.unload(made["b"])

    run(test)


def test_small_ones_are_loaded_while_a_large_one_waits_for_room() -> None:
    async def test(made: Fixture) -> None:
        made.models["l"].num_bytes = 150
        made.models["s"].num_bytes = made.models["t"].num_bytes = 50
        used = await made.registry.use(made["u"])
        large = asyncio.ensure_future(made.ask("l", [1]))
        await until(lambda: made["u"].is_closing, "u to be marked")
        for name in "sts":  # room for both, one after the other where the other is idle
            assert await made.ask(name, [2]) == made.answer(name, [2])
        assert not large.done() and made["u"].running is used
        held = await made.registry.use(made["s"])
        late = asyncio.ensure_future(made.ask("u", [3]))
        made.registry.release(made["u"])
        await until(lambda: made["u"].state is ModelState.UNLOADED, "u to go")
        assert await made.ask("s", [9]) == made.answer("s", [9]), "50 of 200 need not go for it"
        assert await large == made.answer("l", [1])
        assert made["s"].running is held, "it did not have to go"
        assert not late.done() or made["u"].num_loads == 2
        made.registry.release(made["s"])
        assert await late == made.answer("u", [3])
        assert made["u"].num_loads == 2

    run(test, "ulst", 200)


def test_nobody_goes_for_what_would_not_fit_all_the_same() -> None:
    async def test(made: Fixture) -> None:
        for name in "ab":
            await made.ask(name, [1])
        made.models["c"].num_bytes = 201
        with pytest.raises(ModelTooLargeError):
            await made.ask("c", [1])
        assert made.loaded == "ab"
        # One idle one is not enough, and the other is used: both stay as long as it is.
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

    run(test)


def test_whoever_leaves_while_a_model_is_loaded_holds_nothing() -> None:
    async def test(made: Fixture) -> None:
        made.models["b"].gate.clear()
        tasks = [asyncio.ensure_future(made.ask("b", [i])) for i in range(4)]
        await until(made.models["b"].began.is_set, "loading")
        for task in tasks[:3]:
            task.cancel()
        made.models["b"].gate.set()
        assert await tasks[3] == made.answer("b", [3])
        assert made["b"].is_idle
        await made.registry.unload(made["b"])
        assert made.loaded == ""

    run(test)


def test_what_never_fits_is_told_with_what_is_missing() -> None:
    async def test(made: Fixture) -> None:
        await made.ask("a", [1])
        made.models["c"].num_bytes = (2 << 20) + made.registry.memory_bytes
        with pytest.raises(ModelTooLargeError, match=r"c takes .* \(--models-memory\): 2 MiB are missing") as told:
            await made.ask("c", [1])
        assert told.value.missing_bytes == (2 << 20)
        assert made.loaded == "a", "nobody had to go for it"

    run(test)


def test_where_none_is_to_go_none_goes() -> None:
    async def test(made: Fixture) -> None:
        for name in "ab":
            await made.registry.load(made[name], may_evict=False)
        with pytest.raises(NoRoomError):
            await made.registry.load(made["c"], may_evict=False)
        assert made.loaded == "ab" and made["c"].error is None

    run(test)


def test_idle_models_are_unloaded_after_a_while() -> None:
    async def test(made: Fixture) -> None:
        await asyncio.gather(made.ask("a", [1]), made.ask("b", [1]))
        running = await made.registry.use(made["b"])
        await until(lambda: made.loaded == "b", "a to go")
        await asyncio.sleep(0.1)
        assert made.loaded == "b" and made["b"].running is running, "it is used"
        made.registry.release(made["b"])
        await until(lambda: made.loaded == "", "b to go")
        assert await made.ask("a", [1]) == made.answer("a", [1])

    run(test, keep_alive=0.05)


def test_one_whose_clients_have_all_left_when_it_was_loaded_is_unloaded_too() -> None:
    async def test(made: Fixture) -> None:
        waiting = asyncio.ensure_future(made.ask("a", [1]))
        await until(lambda: made["a"].state is ModelState.LOADED, "the load")
        waiting.cancel()
        await until(lambda: made.loaded == "", "a to go")
        assert made["a"].num_loads == 1

    run(test, keep_alive=0.05)


def test_an_unload_that_fails_holds_up_nobody() -> None:
    async def test(made: Fixture) -> None:
        def fail(running: RunningModel) -> None:
            raise ValueError("who counts requests has a mistake")

        made.registry.at_unload.append(fail)
        for name in "abcabc":
            assert await made.ask(name, [1]) == made.answer(name, [1])
        running = made["c"].running
        assert running is not None
        shutdown = running.engine.shutdown

        def fails_late(timeout: float | None) -> bool:
            shutdown(timeout)
            raise OSError("no")

        running.engine.shutdown = fails_late  # type: ignore[method-assign, assignment]
        await made.registry.unload(made["c"])
        assert "unloaded properly: no" in (made["c"].error or "")
        assert await made.ask("c", [1]) == made.answer("c", [1])
        assert made["c"].error is None

    run(test)


def test_a_model_that_could_not_be_loaded_is_not_read_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: Fixture) -> None:
        model, began = made.models["b"], 0
        model.problem = "its weights are cut short"

        async def ask() -> int:
            """Returns how often it has been read."""
            nonlocal began
            model.began.clear()
            with pytest.raises(ModelLoadError, match="cut short"):
                await made.ask("b", [1])
            began += model.began.is_set()
            return began

        assert [await ask() for _ in range(5)] == [1] * 5
        model.problem += " elsewhere"  # the file has changed
        assert [await ask() for _ in range(5)] == [2] * 5
        assert made["b"].failed is not None and made["b"].failed.until <= time.monotonic() + 10
        monkeypatch.setattr(registry_module, "RETRY_SECONDS", 0.0)
        model.problem += "!"
        assert [await ask() for _ in range(3)] == [3, 4, 5], "or after a while"
        model.problem = None
        assert await made.ask("b", [1]) == made.answer("b", [1])
        # What is too large is told again in the same way.
        made.models["c"].num_bytes = 300
        for _ in range(2):
            monkeypatch.setattr(registry_module, "RETRY_SECONDS", 60.0)
            with pytest.raises(ModelTooLargeError) as told:
                await made.ask("c", [1])
            assert told.value.missing_bytes == 100

    run(test)


def test_an_engine_that_has_died_is_made_anew() -> None:
    async def test(made: Fixture) -> None:
        await asyncio.gather(made.ask("a", [1]), made.ask("b", [1]))
        core: Any = made["a"].running.engine._core  # type: ignore[union-attr]
        core.scheduler.schedule = core.scheduler.check_integrity = lambda: 1 / 0
        with pytest.raises(AssertionError, match="stopped"):
            await made.ask("a", [2])
        assert made["a"].failure is not None
        assert await made.ask("b", [3]) == made.answer("b", [3])
        assert await made.ask("a", [4]) == made.answer("a", [4])
        assert made["a"].num_loads == 2 and made["a"].failure is None

    run(test)


def test_nothing_is_kept_of_what_was_unloaded() -> None:
    async def test(made: Fixture) -> None:
        running = await made.registry.use(made["a"])
        engine, core = weakref.ref(running.engine), weakref.ref(running.engine._core)  # type: ignore[type-var]
        del running
        made.registry.release(made["a"])
        await made.registry.unload(made["a"])
        made.models["a"].runners.clear()
        # The thread that has unloaded it may still be about to let go of what it was asked to do.
        await until(lambda: gc.collect() >= 0 and engine() is None and core() is None, "both to be forgotten")

    run(test)


def test_the_end() -> None:
    """Who waits for a model is told, and nothing is loaded any more."""

    async def test(made: Fixture) -> None:
        await made.ask("a", [1])
        made.models["b"].gate.clear()
        waiting = asyncio.ensure_future(made.ask("b", [2]))
        await until(made.models["b"].began.is_set, "loading")
        made.registry.cut("the server is shutting down")
        for task in (waiting, asyncio.ensure_future(made.ask("c", [1]))):
            with pytest.raises(RegistryClosedError):
                await task
        assert made["b"].state is ModelState.LOADING  # its thread is waited for, as those of engines are

    run(test)


def test_names() -> None:
    made = Fixture("ab", 200)
    made.registry.add_name("alias", made["b"])
    assert made.registry.names == ("a", "b", "alias")
    assert made.registry.find("alias") is made["b"] and made.registry.find("c") is None
    with pytest.raises(ValueError, match="taken"):
        made.registry.add("alias", made.models["a"].source)
    assert made.registry.shutdown(1)
