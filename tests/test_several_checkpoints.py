"""Several tiny checkpoints in one process: right outputs for each model, memory within the budget, no leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from metal_engine.checkpoints import loader
from metal_engine.cli.models_dir import models_in
from metal_engine.cli.serve_multi_model import engine_threads, load_named, source_of
from metal_engine.device.blas.load import load_optimized_blas
from metal_engine.device.info import device_info
from metal_engine.errors import ModelLoadError, ModelTooLargeError
from metal_engine.model_pool import registry as registry_module
from metal_engine.model_pool.model_entry import ModelSource
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner import step_memory
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs, ServerArgs
from metal_engine.settings.fields import parse_size
from tests.support import checkpoint_files
from tests.support.rounded_cache import own_caches
from tests.support.serving import DEADLINE
from tests.support.several import ServedModels, serve_models
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.tiny_models import tiny_model

NAMES = ("a", "b", "c")
# Token ids of the checkpoints' tokenizer are bytes.
NUM_TOKENS = 6
# Bytes that are negligible next to a model: arrays of a few numbers.
SMALL = 1024
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three checkpoints of equal size and different weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        write_seeded(folder / name, seed)
    return folder


def write_seeded(folder: Path, seed: int, config: dict[str, Any] | None = None) -> Path:
    def seeded(dtype: mx.Dtype, **config: Any) -> Any:
        return tiny_model(seed=seed, dtype=dtype, **config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "tiny_model", seeded)
        return checkpoint_files.write_checkpoint(folder, config=config)


@pytest.fixture(scope="module")
def own(folder: Path) -> dict[str, Any]:
    """Return mlx-lm's models of the same checkpoints."""
    return {name: load_model(folder / name)[0] for name in NAMES}


def starts(folder: Path, num_blocks: int = 64) -> dict[str, ModelSource]:
    def of(path: Path) -> ModelSource:
        sizes = {"num_gpu_blocks_override": num_blocks, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        args = EngineArgs(model=str(path), **sizes)  # type: ignore[arg-type]
        return source_of(args, ServerArgs())

    return {name: of(path) for name, path in models_in(folder).items()}


@pytest.fixture(scope="module")
def num_bytes(folder: Path) -> int:
    """Return the memory of one model in bytes."""
    return taken_by_one(starts(folder))


def taken_by_one(sources: dict[str, ModelSource]) -> int:
    async def load() -> int:
        registry = ModelRegistry(1 << 30, threads=engine_threads())
        entry = registry.add("a", sources["a"])
        await registry.load(entry)
        taken = entry.num_bytes
        await registry.unload(entry)
        registry.shutdown(DEADLINE)
        return taken

    return asyncio.run(load())


@contextmanager
def watched_memory(registry: ModelRegistry) -> Iterator[list[int]]:
    """Sample MLX's active memory continuously. Yields the list of increases over the start."""
    gc.collect()
    before, ends, seen = mx.get_active_memory(), threading.Event(), [0]

    def look() -> None:
        while not ends.wait(0.002):
            seen.append(mx.get_active_memory() - before)
            assert sum(one.num_bytes for one in registry.entries) <= registry.memory_bytes

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ends.set()
        thread.join()


async def ask(registry: ModelRegistry, name: str, prompt: list[int], request_id: str) -> list[int]:
    entry = registry.find(name)
    assert entry is not None
    loaded = await registry.use(entry)
    try:
        (prepared,) = loaded.engine.preparer.prepare_all([prompt], GREEDY)
        tokens = []
        async for output in loaded.engine.generate(request_id, prepared):
            assert output.error is None, output.error
            tokens += output.token_ids
        return tokens
    finally:
        registry.release(entry)


def own_answer(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the tokens that mlx-lm's model prefers at each position of ``answer``.

    Equal if the model generated them.
    """
    logits = model(mx.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
    preferred: list[int] = mx.argmax(logits, axis=-1).tolist()
    return preferred


def test_three_hundred_requests_with_room_for_two(folder: Path, own: dict[str, Any], num_bytes: int) -> None:
    # In three waves, because one load of each model would serve all requests at once.
    prompts = [[7 + i % 200, 3 * i % 251, 60, i % 17] * (1 + i % 5) for i in range(300)]
    answers: list[list[int]] = []

    async def main() -> ModelRegistry:
        registry = ModelRegistry(int(2.5 * num_bytes), threads=engine_threads())
        for name, start in starts(folder).items():
            registry.add(name, start)
        with watched_memory(registry) as seen:
            for wave in range(3):
                wanted = range(100 * wave, 100 * wave + 100)
                asked = [ask(registry, NAMES[i % 3], prompts[i], str(i)) for i in wanted]
                answers.extend(await asyncio.gather(*asked))
        assert 0 < max(seen) <= registry.memory_bytes, (max(seen), registry.memory_bytes)
        assert sum(one.loaded_engine is not None for one in registry.entries) == 2
        return registry

    registry = asyncio.run(main())
    assert registry.shutdown(DEADLINE)
    num_close = 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer) == NUM_TOKENS
        model = own[NAMES[i % 3]]
        compared = compare_outputs(model, prompt, answer, own_answer(model, prompt, answer))
        assert compared.equal, (i, compared)
        num_close += not compared.same
    assert num_close <= 3


def test_each_keeps_kv_in_a_type_of_its_own(tmp_path: Path) -> None:
    """Models run side by side. A model whose head size fits no quantization group is refused while others serve."""
    wide, narrow = (write_seeded(tmp_path / str(n), 5, {"head_dim": n}) for n in (64, 24))
    prompts = [[7 + i, 3 * i, 60, i] * (1 + i % 5) for i in range(12)]
    types = ("int8", "auto", "int4")

    def source(path: Path, kv_cache_dtype: str) -> ModelSource:
        sizes: dict[str, int] = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        return source_of(EngineArgs(model=str(path), kv_cache_dtype=kv_cache_dtype, **sizes), ServerArgs())  # type: ignore[arg-type]

    async def main() -> list[list[int]]:
        registry = ModelRegistry(1 << 30)
        for kv_cache_dtype in types:
            registry.add(kv_cache_dtype, source(wide, kv_cache_dtype))
        refused = registry.add("refused", source(narrow, "int8"))
        asked = asyncio.gather(*(ask(registry, types[i % 3], prompt, str(i)) for i, prompt in enumerate(prompts)))
        with pytest.raises(ModelLoadError, match=r"--kv-cache-dtype int8 .* \(head_dim 24\); choose auto"):
            await registry.load(refused)
        answers = await asked
        assert registry.shutdown(DEADLINE)
        return answers

    rounding = {kv_cache_dtype: rounded(wide, kv_cache_dtype) for kv_cache_dtype in types}
    for i, (prompt, answer) in enumerate(zip(prompts, asyncio.run(main()), strict=True)):
        model = rounding[types[i % 3]]
        assert compare_outputs(model, prompt, answer, own_answer(model, prompt, answer)).equal, (i, types[i % 3])


def rounded(folder: Path, kv_cache_dtype: str) -> Callable[[mx.array], mx.array]:
    """Return mlx-lm's model of a checkpoint with K and V rounded as in the KV cache."""
    specs = [state.spec for state in PagedModel(load_model(folder)[0], kv_cache_dtype=kv_cache_dtype).pool.states]
    model = load_model(folder)[0]
    return lambda tokens: model(tokens, cache=own_caches(model, specs))


@pytest.mark.parametrize("size", [{"kv_cache_memory_bytes": 1 << 40}, {"num_gpu_blocks_override": 1 << 20}])
def test_one_that_is_too_large_is_refused_before_it_takes_anything(
    folder: Path, num_bytes: int, size: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "RETRY_SECONDS", 0.0)

    async def main() -> None:
        registry = ModelRegistry(int(1.5 * num_bytes), threads=engine_threads())
        registry.add("a", starts(folder)["a"])
        args = EngineArgs(model=str(folder / "b"), max_num_seqs=8, max_num_batched_tokens=64, **size)  # type: ignore[arg-type]
        large = registry.add("b", source_of(args, ServerArgs()))
        first = await ask(registry, "a", [1, 2, 3], "0")
        problem = r"b takes .* \(--models-memory\): .* are missing"
        gc.collect()
        left = [mx.get_active_memory()]
        for _ in range(3):
            with watched_memory(registry) as seen, pytest.raises(ModelTooLargeError, match=problem):
                await registry.load(large)
            assert max(seen) < registry.memory_bytes
            left.append(mx.get_active_memory())
        assert left[1] <= left[0] + SMALL, "it gave back what it had"
        assert max(left[2:]) <= left[1], "what its thread keeps is made once"
        assert large.num_bytes == 0
        assert await ask(registry, "a", [1, 2, 3], "1") == first
        assert registry.entries[0].num_loads == 1
        assert registry.shutdown(DEADLINE)

    asyncio.run(main())


def test_what_is_missing_is_all_that_is_missing(folder: Path) -> None:
    """The missing bytes include the KV cache for every way of giving its size, even if the weights alone do not fit."""
    facts = []
    loader.load(EngineArgs(model=str(folder / "a")), device_info(load_optimized_blas()), facts.append)
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4  # tokens, K and V, layers, heads, numbers, bytes

    async def missing(memory_bytes: int, **size: int) -> int:
        registry = ModelRegistry(memory_bytes, threads=engine_threads())
        args = EngineArgs(model=str(folder / "a"), max_num_seqs=8, max_num_batched_tokens=64, **size)  # type: ignore[arg-type]
        with pytest.raises(ModelTooLargeError) as refused:
            await registry.load(registry.add("a", source_of(args, ServerArgs())))
        assert registry.shutdown(DEADLINE)
        return refused.value.missing_bytes

    weights = facts[0].weight_bytes
    for memory_bytes in (weights // 2, weights + 100 * block_bytes):
        expected = weights + 128 * block_bytes - memory_bytes
        assert asyncio.run(missing(memory_bytes, num_gpu_blocks_override=128)) == expected
        assert asyncio.run(missing(memory_bytes, kv_cache_memory_bytes=128 * block_bytes)) == expected


def complete(served: ServedModels, name: str) -> int:
    body = {"model": name, "prompt": "abc", "max_tokens": 4, "temperature": 0}
    return served.post("/v1/completions", body).status_code


def test_a_file_that_is_corrupt_leaves_the_others_serving(folder: Path, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        for file in (folder / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "c" / "model.safetensors"
    whole = weights.read_bytes()
    with serve_models(starts(tmp_path), 1 << 30, threads=engine_threads()) as served:
        with ThreadPoolExecutor(4) as pool:
            for i, broken in enumerate([whole[: len(whole) // 2], b"", b"\xff" * 100, whole[:8] + b"[" + whole[9:]]):
                weights.write_bytes(broken)
                asked = [pool.submit(complete, served, name) for name in ("a", "b", "c", "a", "b")]
                assert [one.result() for one in asked] == [200, 200, 500, 200, 200], i
        held = sum(one.num_bytes for one in served.registry.entries)
        assert held == sum(served.registry.find(name).num_bytes for name in "ab")  # type: ignore[union-attr]
        weights.write_bytes(whole)
        assert complete(served, "c") == 200


def test_those_that_are_named_are_loaded_at_the_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The KV cache is large, because measurements of a step vary and the step must be small in comparison.
    sources = starts(folder, num_blocks=4096)
    num_bytes = taken_by_one(sources)

    async def prepare(registry: ModelRegistry) -> None:
        await load_named(registry, NAMES, "--num-gpu-blocks-override")

    with serve_models(sources, int(2.5 * num_bytes), prepare=prepare, threads=engine_threads()) as served:
        assert served.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert complete(served, "c") == 200
    (told,) = (record.getMessage() for record in caplog.records if "is loaded on its first" in record.getMessage())
    found = re.fullmatch(
        r"c takes up to (\S+ \w+) during loading \(an estimate, since its largest step is not measured yet\), and "
        r"(\S+ \w+) are available while the loaded models stay in memory: (\S+ \w+) are missing; it is loaded on "
        r"its first request; to load it at the start, raise --models-memory or lower --num-gpu-blocks-override",
        told,
    )
    assert found, told
    takes, free, missing = (parse_size(size.replace(" ", "")) for size in found.groups())
    assert 0 < missing < takes and abs(takes - free - missing) < 1 << 21, "they are rounded"

    async def fails() -> None:
        registry = ModelRegistry(num_bytes, threads=engine_threads())
        registry.add("a", source_of(EngineArgs(model=str(folder / "nothing")), ServerArgs()))
        try:
            with pytest.raises(ModelLoadError, match="nothing"):
                await load_named(registry, ("a",))
        finally:
            registry.shutdown(DEADLINE)

    asyncio.run(fails())


def resources() -> tuple[int, int, int]:
    """Return bytes allocated by MLX, threads of the process except the registry's own, and open files."""
    gc.collect()
    own_few = sum(one.name.startswith("models") for one in threading.enumerate())
    tasks = Path("/proc/self/task")
    num_threads = len(os.listdir(tasks)) if tasks.exists() else threading.active_count()
    return mx.get_active_memory(), num_threads - own_few, len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("num_loads", [6, pytest.param(50, marks=pytest.mark.full)])
def test_loads_and_unloads_leave_nothing_behind(folder: Path, num_loads: int) -> None:
    """Memory is freed immediately, without the garbage collector."""

    async def main() -> None:
        registry = ModelRegistry(1 << 30, threads=engine_threads())
        for name, start in starts(folder).items():
            registry.add(name, start)
        entries = registry.entries
        gc.collect()
        held = mx.get_active_memory()
        before = (0, 0, 0)
        for i in range(num_loads + 2):
            if i == 2:  # objects that are created once exist now
                before = resources()
            assert await ask(registry, entries[i % 2].name, [1, 2, 3], str(i))
            await registry.unload(entries[i % 2])
            assert mx.get_active_memory() <= held + SMALL, i
        after = resources()
        assert after[0] <= before[0] and after[1:] == before[1:], (before, after)
        assert registry.shutdown(DEADLINE)

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_loads_that_fail_or_are_given_up_leave_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves before the files are read, while they are read, or while the model is tried."""
    monkeypatch.setattr(registry_module, "RETRY_SECONDS", 0.0)
    (tmp_path / "c").mkdir()
    for file in (folder / "c").iterdir():
        (tmp_path / "c" / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])

    async def main() -> None:
        registry = ModelRegistry(1 << 30, threads=engine_threads())
        a, b = (registry.add(name, starts(folder)[name]) for name in "ab")
        corrupt = registry.add("c", starts(tmp_path)["c"])
        first = await ask(registry, "a", [1, 2, 3], "first")
        before = (0, 0, 0)
        for i in range(14):
            if i == 2:  # objects that are created once exist now
                before = resources()
            with pytest.raises(ModelLoadError):
                await registry.load(corrupt)
            load = asyncio.ensure_future(registry.load(b))
            await asyncio.sleep(0.012 * i)
            load.cancel()
            await asyncio.wait([load])
            await registry.unload(b)
            assert (b.num_bytes, corrupt.num_bytes, b.error) == (0, 0, None)
            assert await ask(registry, "a", [1, 2, 3], str(i)) == first
        after = resources()
        assert after[0] <= before[0] + SMALL and after[1:] == before[1:], (before, after)
        assert a.num_loads == 1 and b.num_loads < 14
        assert registry.shutdown(DEADLINE)

    asyncio.run(main())


@pytest.mark.full
def test_memory_of_the_process_does_not_grow(folder: Path) -> None:
    """After 20 loads, 50 more take less than 61 KiB each. A leaked MLX thread would take three times as much."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("reads /proc")

    async def main() -> int:
        registry = ModelRegistry(1 << 30, threads=engine_threads())
        entry = registry.add("a", starts(folder)["a"])
        before = 0
        for i in range(70):
            if i == 20:
                gc.collect()
                before = resident()
            await registry.load(entry)
            await registry.unload(entry)
        gc.collect()
        assert registry.shutdown(DEADLINE)
        return resident() - before

    assert asyncio.run(main()) < 3 << 20


def test_models_in_a_folder(folder: Path, tmp_path: Path) -> None:
    for path in ("one/config.json", "org/two/config.json", "three.gguf", "org/four.gguf", ".hidden/config.json", "x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    (tmp_path / "empty").mkdir()
    assert list(models_in(tmp_path)) == ["one", "org/four", "org/two", "three"]
    assert set(models_in(folder)) == set(NAMES)


@pytest.mark.parametrize(
    "stored",
    [
        {"config": {"vocab_size": 20000}},
        {"config": {"hidden_size": 256, "intermediate_size": 1024}, "dtype": mx.bfloat16},
        {"config": {"hidden_size": 256, "intermediate_size": 1024}, "bits": 4},
    ],
    ids=["vocabulary", "bfloat16", "quantized"],
)
def test_what_a_load_takes_is_claimed_before(
    stored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked while weights are read and while the step is measured, for an unknown and for a known model."""
    checkpoint_files.write_checkpoint(tmp_path, **stored)
    args = EngineArgs(model=str(tmp_path), num_gpu_blocks_override=64, max_num_seqs=64, max_num_batched_tokens=64)
    registry = ModelRegistry(1 << 30, threads=engine_threads())
    entry = registry.add("a", source_of(args, ServerArgs()))
    seen: list[tuple[str, int, int]] = []

    def look_after(module: Any, name: str) -> None:
        function = getattr(module, name)

        def look(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            seen.append((name, mx.get_peak_memory() - before, entry.num_bytes))
            return result

        monkeypatch.setattr(module, name, look)

    look_after(loader, "load")
    look_after(step_memory, "measure_step_bytes")
    for _ in range(2):
        gc.collect()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        asyncio.run(registry.load(entry))
        asyncio.run(registry.unload(entry))
    assert [name for name, *_ in seen] == ["load", "measure_step_bytes"] * 2
    for name, held, claimed in seen:
        # This includes memory that threads of other tests freed in the meantime, well below the size of a layer.
        assert 0 < held <= 1.01 * claimed + SMALL, (name, held, claimed)
    first_claim, total = seen[0][2], entry.known_bytes
    assert first_claim <= 2 * total, "and no more than it may come to"
    assert registry.shutdown(DEADLINE)
