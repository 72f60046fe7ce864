"""Several tiny checkpoints in processes of their own: right outputs, memory within the budget, no process left."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.utils import load_model

from metal_engine.cli import engine_launch
from metal_engine.cli.serve_multi_model import source_of
from metal_engine.engine.process.limits import ProcessLimits
from metal_engine.engine.process.spawner import Spawner
from metal_engine.engine.process.wire import Start
from metal_engine.errors import LoadCancelledError, ModelLoadError, ModelTooLargeError
from metal_engine.model_pool.model_entry import ModelEntry
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.server_args import ServerArgs
from tests.support import checkpoint_files
from tests.support.engine_child import is_running, pid_of
from tests.support.registry import until
from tests.support.serving import DEADLINE
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.architectures import configuration
from tools.fixtures.tiny_models import tiny_model

PROMPTS = [[7 + i, 3 * i, 60, i] * (1 + i % 5) for i in range(4)]
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three checkpoints of similar size. The requests of b run over mlx-lm's own caches."""
    folder = tmp_path_factory.mktemp("models")
    alone = {**configuration("deepseek_v41"), "vocab_size": checkpoint_files.VOCAB_SIZE}
    for seed, name in enumerate("abc"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_files, "tiny_model", partial(tiny_model, seed))
            checkpoint_files.write_checkpoint(folder / name, config=alone if name == "b" else None)
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> dict[str, Any]:
    """Return mlx-lm's models of the same checkpoints."""
    return {name: load_model(folder / name)[0] for name in "abc"}


def check_answers(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    """Check that mlx-lm's model prefers the tokens of the answers."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == LONG.max_tokens
        logits = model(mx.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
        compared = compare_outputs(model, prompt, answer, mx.argmax(logits, axis=-1).tolist())
        assert compared.equal, compared


def args_of(path: Path, num_blocks: int = 512) -> EngineArgs:
    return EngineArgs(model=str(path), num_gpu_blocks_override=num_blocks, max_num_seqs=8, max_num_batched_tokens=64)


def pid(entry: ModelEntry) -> int:
    assert entry.loaded_engine is not None
    return pid_of(entry.loaded_engine.engine)


class Models:
    """Models in processes.

    Attributes:
        pids: ids of all processes that have been started.
        num_deaths: number of first processes that are killed before they load a model.
    """

    def __init__(self, models: dict[str, EngineArgs], memory_bytes: int) -> None:
        start = Start([msgspec.to_builtins(args) for args in models.values()], "warning", "text")
        self.spawner = Spawner(engine_launch.MODULE, start, ProcessLimits(spare_delay=math.inf), is_shared=True)
        self.pids: list[int] = []
        self.num_deaths = 0
        self._numbers = itertools.count()
        spawn = self.spawner._spawn

        def spawn_and_list() -> Any:
            process = spawn()
            self.pids.append(process.popen.pid)
            if len(self.pids) <= self.num_deaths:
                process.popen.kill()
            return process

        self.spawner._spawn = spawn_and_list  # type: ignore[method-assign]
        self.registry = ModelRegistry(memory_bytes)
        for name, args in models.items():
            self.registry.add(name, source_of(args, ServerArgs(), self.spawner))

    def __getitem__(self, name: str) -> ModelEntry:
        entry = self.registry.find(name)
        assert entry is not None
        return entry

    @property
    def loaded(self) -> str:
        return "".join(one.name for one in self.registry.entries if one.loaded_engine is not None)

    async def answer(self, name: str, prompts: Sequence[list[int]], received: list[str]) -> list[list[int]]:
        """Return the outputs of a model. Its name is appended to ``received`` with each part."""
        loaded = await self.registry.use(self[name])
        try:
            prepared = await asyncio.to_thread(loaded.engine.preparer.prepare_all, list(prompts), LONG)

            async def one(index: int) -> list[int]:
                tokens = []
                request_id = str(next(self._numbers))
                async for output in loaded.engine.generate(request_id, prepared[index]):
                    assert output.error is None, output.error
                    tokens += output.token_ids
                    received.append(name)
                return tokens

            return await asyncio.gather(*map(one, range(len(prompts))))
        finally:
            self.registry.release(self[name])


@asynccontextmanager
async def in_processes(models: dict[str, EngineArgs], memory_bytes: int = 1 << 30) -> AsyncIterator[Models]:
    made = Models(models, memory_bytes)
    try:
        yield made
    finally:
        assert await asyncio.to_thread(made.registry.shutdown, DEADLINE)
        made.spawner.close()
    assert not [one for one in made.pids if is_running(one)]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(4 * DEADLINE):
            await test()

    asyncio.run(main())


def test_a_dead_model_process_does_not_affect_other_models(folder: Path, own: dict[str, Any]) -> None:
    """Answers in flight survive. A third model ends the process of the least recently used model."""

    async def test() -> None:
        async with in_processes({name: args_of(folder / name) for name in "abc"}) as models:
            assert models.spawner.device().kind == "cpu"
            await models.registry.load(models["a"])
            assert pid(models["a"]) == models.pids[0], "the spare process has loaded it"
            models.registry.budget.memory_bytes = int(2.5 * models["a"].num_bytes)
            await models.registry.load(models["b"])
            first, other = pid(models["a"]), pid(models["b"])
            received: list[str] = []
            asked = asyncio.gather(*(models.answer(name, PROMPTS, received) for name in "ab"))
            await until(lambda: {"a", "b"} <= set(received), "answers in flight")
            os.kill(first, signal.SIGKILL)
            for name, answers in zip("ab", await asked, strict=True):
                check_answers(own[name], PROMPTS, answers)
            second = pid(models["a"])
            assert second != first and pid(models["b"]) == other and not is_running(first)
            engines = [models[name].loaded_engine.engine for name in "ab"]  # type: ignore[union-attr]
            resumed, of_other = (engine.metrics.num_resumed_requests for engine in engines)
            assert 0 < resumed <= len(PROMPTS) and of_other == 0, "one at least was in flight"
            models["a"].last_used -= 60.0
            await models.answer("c", PROMPTS[:1], received)
            assert models.loaded == "bc" and not is_running(second) and is_running(other)
            assert models["a"].num_bytes == 0
            await models.registry.unload(models["b"])
            assert models.loaded == "c" and not is_running(other)

    run(test)


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_process_that_dies_while_loading_is_replaced_once(folder: Path, own: dict[str, Any], num_deaths: int) -> None:
    """The second process answers the request that waits."""

    async def test() -> None:
        async with in_processes({"a": args_of(folder / "a")}) as models:
            models.num_deaths = num_deaths
            if num_deaths == 1:
                check_answers(own["a"], PROMPTS, await models.answer("a", PROMPTS, []))
            else:
                with pytest.raises(ModelLoadError, match="has ended with SIGKILL"):
                    await models.answer("a", PROMPTS, [])
                assert not models["a"].num_bytes
            assert len(models.pids) == 2

    run(test)


def test_loads_that_fail_end_their_processes(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "c").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])

    async def test() -> None:
        models = {"large": args_of(folder / "a", 1 << 20), "nothing": args_of(folder / "x"), "b": args_of(folder / "b")}
        models["corrupt"] = args_of(tmp_path)
        async with in_processes(models, 64 << 20) as made:
            with pytest.raises(ModelTooLargeError, match=r"large takes .* \(--models-memory\): .* are missing"):
                await made.registry.load(made["large"])
            with pytest.raises(ModelLoadError, match="x"):
                await made.registry.load(made["nothing"])
            with pytest.raises(ModelLoadError, match="safetensors"):
                await made.registry.load(made["corrupt"])
            assert made.registry.budget.taken_bytes == 0 and not any(map(is_running, made.pids))

            load = asyncio.ensure_future(made.registry.load(made["b"]))
            await until(lambda: len(made.pids) == 4, "the process")
            await made.registry.unload(made["b"])
            with pytest.raises(LoadCancelledError):
                await load
            assert made.registry.budget.taken_bytes == 0 and not any(map(is_running, made.pids))

    run(test)
