"""Registry of fake models with predictable outputs."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from metal_engine.model_pool.model_entry import ModelEntry, ModelState
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.sampling_params import SamplingParams
from tests.support.serving import DEADLINE
from tests.support.several_models import FakeModel, salted
from tools.fixtures.fake_engine import generated

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


async def until(condition: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.002)
    assert condition(), what


class RegistryOfFakes:
    """Registry of fake models of 100 bytes each, by name. Each character of ``names`` is the name of a model."""

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
        assert taken <= self.registry.budget.memory_bytes
        for one in self.registry.entries:
            assert (one.num_bytes == 0) == (one.state is ModelState.UNLOADED) or one.state is ModelState.LOADING

    async def ask(self, name: str, prompt: list[int], num_tokens: int = 6) -> list[int]:
        """Return the tokens that a model generates for a request."""
        loaded = await self.registry.use(self[name])
        try:
            self.check()
            params = PARAMS.changed(max_tokens=num_tokens)
            (prepared,) = loaded.engine.preparer.prepare_all([prompt], params)
            tokens = []
            async for output in loaded.engine.generate(f"{name}{prompt}", prepared):
                assert output.error is None, output.error
                tokens += output.token_ids
            return tokens
        finally:
            self.registry.release(self[name])

    def answer(self, name: str, prompt: list[int], num_tokens: int = 6) -> list[int]:
        return generated(prompt, num_tokens, salted(self.models[name].salt))


def run_with_fakes(
    test: Callable[[RegistryOfFakes], Any], names: str = "abc", memory_bytes: int = 200, keep_alive: float = 0.0
) -> None:
    async def main() -> RegistryOfFakes:
        made = RegistryOfFakes(names, memory_bytes, keep_alive)
        try:
            await test(made)
        finally:
            for model in made.models.values():
                model.gate.set()
        return made

    made = asyncio.run(main())
    assert made.registry.shutdown(DEADLINE)


def with_fakes(*args: Any, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Return a decorator for an async test whose first parameter is a :class:`RegistryOfFakes`.

    The arguments are those of :func:`run_with_fakes` after the test. All other parameters of the test are fixtures.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            run_with_fakes(lambda made: test(made, **fixtures), *args, **more)

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return run

    return decorate
