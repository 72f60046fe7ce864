"""KV from a store never changes the output, for every mix of stored and missing blocks and for every fault."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.kv_transfer import runner_side
from metal_engine.kv_transfer.fingerprint import kv_fingerprint
from metal_engine.kv_transfer.layout import KVPart
from metal_engine.kv_transfer.stores.base import StoreError
from metal_engine.kv_transfer.stores.disk import DiskStore
from metal_engine.kv_transfer.stores.valkey import ValkeyStore
from metal_engine.runner.pending_step import PendingStep
from metal_engine.sampling_params import SamplingParams
from metal_engine.text.tokenizer import Tokenizer
from tests.support.kv_engines import KVEngine, MakeEngine, kv_engine
from tests.support.memory import settled_memory
from tests.support.running import drain
from tests.support.sweeps import sweep
from tests.support.valkey_server import ValkeyServer
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.tiny_models import tiny_model

BLOCK_SIZE = 8
LENGTHS = (50, 65, 41, 17, 8, 7, 90, 33)


def make_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


# The last two prompts share a prefix with the first two.
PROMPTS = [make_prompt(i, n) for i, n in enumerate(LENGTHS)]
PROMPTS += [PROMPTS[0][:40] + make_prompt(100, 20), PROMPTS[1] + make_prompt(101, 30)]


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> list[list[int]]:
    return kv_engine(tokenizer, None).run(PROMPTS)


@pytest.fixture
def check(reference: Any, plain: list[list[int]]) -> Callable[[list[list[int]]], None]:
    def check(outputs: list[list[int]]) -> None:
        for prompt, a, b in zip(PROMPTS, plain, outputs, strict=True):
            assert compare_outputs(reference, prompt, a, b).equal

    return check


Check = Callable[[list[list[int]]], None]


def check_replayed(engine: KVEngine, dispatch: dict[str, bool]) -> None:
    """Steps that load are built, and later steps are replayed."""
    assert (engine.core.metrics.num_decode_forwards["replayed"] > 0) == dispatch.get("replay", False)


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


DISPATCH = pytest.mark.parametrize(
    "dispatch",
    sweep(
        ({}, {"ahead": True}, {"ahead": True, "behind": True}, {"ahead": True, "behind": True, "replay": True}),
        lambda dispatch: len(dispatch) in (1, 3),
    ),
    ids=["one by one", "one ahead", "behind", "replayed"],
)


# --- equal outputs ------------------------------------------------------------------------------------------


def test_kv_saved_by_another_process_is_loaded(make: MakeEngine, check: Check, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.kv_transfer.test_engines import PROMPTS; "
        "from tests.support.kv_engines import kv_engine; from tools.fixtures.fake_engine import tiny_tokenizer; "
        "engine = kv_engine(tiny_tokenizer(), pathlib.Path(sys.argv[1]), budget=48); "
        "engine.run(PROMPTS); engine.core.close()"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], check=True, env=environment)
    engine = make()
    check(engine.run(PROMPTS))
    assert engine.stats.prompt_tokens_computed == sum((len(p) - 1) % BLOCK_SIZE + 1 for p in PROMPTS)
    assert engine.stats.blocks_saved == 0, "what is generated was stored by the other, too"


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_loaded_half_precision_kv_gives_the_same_outputs(
    make: MakeEngine, tokenizer: Tokenizer, dtype: mx.Dtype
) -> None:
    outputs = make(dtype=dtype).run([PROMPTS[0]])
    engine = make(dtype=dtype)
    assert engine.run([PROMPTS[0]]) == outputs and engine.stats.blocks_loaded == 6
    # Compares the KV itself, not only tokens: the loaded KV equals the KV that the first engine wrote.
    assert engine.layout.parts[0].dtype == str(dtype).removeprefix("mlx.core.")


@DISPATCH
def test_loading_and_saving_leave_the_cache_in_place(make: MakeEngine, dispatch: dict[str, bool]) -> None:
    """A copy of a layer's array would take 2 MB. Everything else in these steps is much smaller."""
    settings = {"num_blocks": 2048, "model": tiny_model(num_hidden_layers=1), **dispatch}
    make(**settings).run(PROMPTS)
    engine = make(**settings)
    array_bytes = 2048 * BLOCK_SIZE * 2 * 16 * 4
    # With replay, the padding block is counted, too.
    num_padding_blocks = int(dispatch.get("replay", False))
    assert engine.paged.pool.states[0].arrays["keys"].nbytes * 2048 == array_bytes * (2048 + num_padding_blocks)
    engine.run([make_prompt(77, 30)])
    before = settled_memory()
    engine.run([*PROMPTS, make_prompt(50, 60)])
    assert engine.stats.blocks_loaded > 20 and engine.stats.blocks_saved > 5
    assert mx.get_peak_memory() - before < array_bytes
    check_replayed(engine, dispatch)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_steps_that_load_or_save_have_the_device_alone(
    make: MakeEngine, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load writes to the cache's memory from the host, and blocks to save are gathered from the cache."""
    make().run(PROMPTS)
    engine = make(ahead=True, behind=True, kv_role=role)
    runner: Any = engine.core.runner
    dispatch = runner._dispatch
    seen: set[tuple[bool, bool]] = set()  # (step is behind another, a step in flight uses the store)

    def uses_store(step: PendingStep) -> bool:
        return bool(step.loads) or (step.saves is not None and bool(step.saves.arrays))

    def checked(step: PendingStep, *args: Any) -> None:
        seen.add((runner._steps[0] is not step, any(map(uses_store, runner._steps))))
        dispatch(step, *args)

    monkeypatch.setattr(runner, "_dispatch", checked)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for request_id, prompt in (("decodes", make_prompt(9, 7)), ("loads or saves", PROMPTS[0])):
        engine.core.add_request(request_id, engine.core.prepare(prompt, greedy))
        for _ in range(6):
            engine.core.step()
    drain(engine.core)
    assert seen == {(False, False), (False, True), (True, False)}


def test_loaded_kv_of_queued_requests_stays_within_the_host_memory_limit(
    make: MakeEngine, tokenizer: Tokenizer
) -> None:
    """The pool holds two of the requests at a time. The KV of the others waits in host memory or in the store."""
    prompts = [make_prompt(1000 + i, 200) for i in range(12)]
    expected = make(num_blocks=60).run(prompts)
    engine = make(num_blocks=60, max_load_bytes=60 * make().layout.nbytes)
    connector, largest = engine.core.scheduler.connector, 0
    step = engine.core.step

    def counting_step() -> Any:
        nonlocal largest
        outputs = step()
        largest = max(largest, sum(len(arrived.blocks) for arrived in connector._arrived.values()))
        return outputs

    engine.core.step = counting_step  # type: ignore[method-assign]
    assert engine.run(prompts) == expected
    assert 0 < largest <= 60 and engine.stats.loads_deferred > 0
    assert engine.stats.prompt_tokens_store == 12 * 192, "those who had to wait for memory have loaded, too"


# --- faults -------------------------------------------------------------------------------------------------


def _truncate(root: Path) -> None:
    for path in files(root)[::3]:
        os.truncate(path, path.stat().st_size // 2)


def _flip_a_byte(root: Path) -> None:
    for i, path in enumerate(files(root)[::3]):
        data = bytearray(path.read_bytes())
        data[(i * 997) % len(data)] ^= 0x10
        path.write_bytes(data)


def _empty(root: Path) -> None:
    for path in files(root)[::2]:
        path.write_bytes(b"")


def _swap_blocks(root: Path) -> None:
    a, b, *_ = files(root)
    a_bytes, b_bytes = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_bytes)
    b.write_bytes(a_bytes)


def _replace_by_directories(root: Path) -> None:
    for path in files(root)[::4]:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("spoil", [_truncate, _flip_a_byte, _empty, _swap_blocks, _replace_by_directories])
def test_spoilt_files(make: MakeEngine, check: Check, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    make().run(PROMPTS)
    spoil(tmp_path)
    engine = make()
    check(engine.run(PROMPTS))
    assert engine.stats.blocks_corrupt + engine.stats.store_errors > 0
    if engine.stats.blocks_corrupt:
        # Blocks after a bad one were computed, and every bad block that was read has been replaced.
        mended = make()
        for _ in range(3):
            check(mended.run(PROMPTS))
        assert mended.stats.loads_failed == mended.stats.blocks_corrupt


def test_kv_of_another_model_in_the_wrong_place_is_refused(make: MakeEngine, check: Check, tmp_path: Path) -> None:
    make(model=tiny_model(seed=1)).run(PROMPTS)
    engine = make()
    (wrong,) = {path.parent.parent for path in files(tmp_path)}
    # Block hashes depend on the fingerprint, so these blocks would not be requested even from the right folder.
    shutil.copytree(wrong, tmp_path / "kv" / engine.layout.fingerprint)
    check(engine.run(PROMPTS))
    assert engine.stats.blocks_loaded == 0


def raising(error: Exception) -> Callable[..., None]:
    """Return a function that raises ``error``."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    return refuse


ALL_CALLS = range(1 << 30)


class Disturbed:
    """Wrapper of a store that runs an action before some calls of an operation. ``get`` returns at most two blocks."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._actions: dict[str, tuple[Callable[[], object], range]] = {}
        self._num_calls: Counter[str] = Counter()

    def disturb(self, operation: str, action: Callable[[], object], calls: range = ALL_CALLS) -> None:
        self._actions[operation] = (action, calls)

    def _before(self, operation: str) -> None:
        action, calls = self._actions.get(operation, (None, ALL_CALLS))
        self._num_calls[operation] += 1
        if action is not None and self._num_calls[operation] - 1 in calls:
            action()

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        self._before("contains")
        return self.inner.contains(hashes)

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        self._before("get")
        return self.inner.get(hashes[:2])

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        self._before("put")
        self.inner.put(blocks)

    def discard(self, block_hash: bytes) -> None:
        self.inner.discard(block_hash)

    def close(self) -> None:
        pass


@pytest.fixture
def disturbed(make: MakeEngine, tmp_path: Path) -> Disturbed:
    """A filled store whose operations can be disturbed, with the fingerprint that all engines here have."""
    engine = make()
    engine.run(PROMPTS)
    return Disturbed(DiskStore(tmp_path / "kv", engine.layout.fingerprint))


@pytest.fixture
def release(make: MakeEngine) -> Iterator[threading.Event]:
    """Event that lets hanging calls of a store go on. Set before the engines close."""
    event = threading.Event()
    yield event
    event.set()


def test_the_directory_vanishes_while_running(
    make: MakeEngine, check: Check, disturbed: Disturbed, tmp_path: Path
) -> None:
    disturbed.disturb("get", lambda: (tmp_path / "kv").rename(tmp_path / "gone"), calls=range(4, 5))
    engine = make(disturbed, io_threads=1)
    check(engine.run(PROMPTS))
    assert engine.stats.store_errors == 0 and engine.stats.blocks_saved > 0
    check(make().run(PROMPTS))


@pytest.mark.parametrize("operation", ["get", "contains", "put"])
def test_no_permission(make: MakeEngine, check: Check, disturbed: Disturbed, operation: str) -> None:
    disturbed.disturb(operation, raising(StoreError("cannot read x: Permission denied")))
    if operation == "put":
        shutil.rmtree(disturbed.inner.root)
    engine = make(disturbed)
    check(engine.run([*PROMPTS]))
    engine.run([make_prompt(500, 40)])  # ensures that there is something to save
    assert engine.stats.store_errors > 0


def test_loads_slower_than_the_deadline(
    make: MakeEngine, check: Check, disturbed: Disturbed, release: threading.Event
) -> None:
    """The store hangs after a few blocks. Arrived blocks are used, the rest is computed, and other requests run."""
    disturbed.disturb("get", lambda: release.wait(60), calls=ALL_CALLS[6:])
    engine = make(disturbed, load_timeout=0.2)
    engine.transfer._blocks_per_call = 2  # type: ignore[union-attr]
    check(engine.run(PROMPTS))
    assert engine.stats.loads_timed_out > 0


def test_a_store_that_hangs_does_not_slow_saving(
    make: MakeEngine, check: Check, disturbed: Disturbed, release: threading.Event
) -> None:
    disturbed.disturb("contains", lambda: release.wait(60))
    shutil.rmtree(disturbed.inner.root)
    engine = make(disturbed, max_save_bytes=20_000)
    check(engine.run(PROMPTS, flush=False))
    assert engine.stats.blocks_dropped > 0


def test_no_memory_for_saving_costs_no_token(make: MakeEngine, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_side, "np", SimpleNamespace(**vars(np) | {"empty": raising(MemoryError())}))
    engine = make()
    check(engine.run(PROMPTS))
    assert engine.stats.blocks_saved == 0 and engine.stats.blocks_failed > 20


def test_through_a_server_that_is_killed_while_loading(make: MakeEngine, check: Check) -> None:
    server = ValkeyServer()
    try:
        fingerprint = make().layout.fingerprint
        check(make(ValkeyStore(server.url, fingerprint)).run(PROMPTS))
        second = make(Disturbed(ValkeyStore(server.url, fingerprint)))
        check(second.run(PROMPTS))
        assert second.stats.blocks_loaded > 0
        store = Disturbed(ValkeyStore(server.url, fingerprint))
        store.disturb("get", server.kill, calls=range(5, 6))
        third = make(store, io_threads=1)
        third.transfer._blocks_per_call = 2  # type: ignore[union-attr]
        check(third.run(PROMPTS))
        assert third.stats.store_errors > 0 and third.stats.blocks_loaded > 0
    finally:
        server.kill()


def test_the_policy_fail_ends_requests_whose_load_failed(
    make: MakeEngine, plain: list[list[int]], disturbed: Disturbed
) -> None:
    disturbed.disturb("get", raising(StoreError("connection lost")))
    engine = make(disturbed, kv_load_failure_policy="fail")
    engine.add([PROMPTS[0], PROMPTS[5]])  # the second is too short for a stored block
    outputs = []
    while engine.core.has_requests:
        outputs += engine.core.step()
    (failed,) = [output for output in outputs if output.request_id == "0"]
    assert failed.finish_reason == "error" and "connection lost" in (failed.error or "")
    assert [t for o in outputs if o.request_id == "1" for t in o.token_ids] == plain[5]
    engine.core.scheduler.check_integrity()
    assert engine.core.stats.num_used_blocks == 0


@pytest.mark.parametrize(
    ("failing", "ahead"),
    sweep(product(range(1, 8, 2), (False, True)), lambda *case: case in ((1, True), (3, False), (7, True))),
)
def test_a_failed_step_saves_nothing(
    make: MakeEngine, check: Check, monkeypatch: pytest.MonkeyPatch, failing: int, ahead: bool
) -> None:
    """A step that fails, and the steps built after it, save nothing. Later outputs and cache hits are correct."""
    engine = make(ahead=ahead, budget=40)
    calls = iter(range(1 << 30))
    wait = PendingStep.wait

    def fail(self: PendingStep) -> None:
        wait(self)
        if next(calls) == failing:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(PendingStep, "wait", fail)
    engine.add(PROMPTS)
    while engine.core.has_requests:
        for output in engine.core.step():
            assert output.error is None, output.error
        engine.core.scheduler.check_integrity()
    assert engine.core.metrics.num_failed_steps == 1
    monkeypatch.undo()
    assert engine.transfer is not None and engine.transfer.flush(60.0)
    check(engine.run(PROMPTS))
    check(make().run(PROMPTS))


# --- the fingerprint ----------------------------------------------------------------------------------------


def test_the_fingerprint_sees_every_change() -> None:
    weights = {
        "a": mx.random.normal((300, 40), key=mx.random.key(1)),
        "b": mx.arange(7).astype(mx.bfloat16),
        "c": mx.zeros((0,)),
    }
    parts = [KVPart("k", "float32", (16, 2, 8), 1024)]
    base = ({"rope_theta": 1.0, "_name_or_path": "here"}, 16, parts)

    def of(weights: dict[str, mx.array], *rest: Any) -> str:
        return kv_fingerprint(weights.items(), *(rest or base))

    changed = mx.array(weights["a"])
    changed[299, 39] += 1e-3
    different = [
        of(weights),
        of(weights | {"a": changed}),
        of(weights | {"a": weights["a"][::-1]}),
        of(weights | {"a": weights["a"].reshape(40, 300)}),
        of(weights | {"b": weights["b"].astype(mx.float16)}),
        of({k: weights[k] for k in "ab"}),
        of(weights, {"rope_theta": 2.0}, 16, parts),
        of(weights, base[0], 8, parts),
        of(weights, base[0], 16, [KVPart("k", "float16", (16, 2, 8), 512)]),
        of(weights, *base, ["head_dim 64: 16 threadgroups a core"]),
        of(weights, *base, ["head_dim 64: 4 threadgroups a core"]),
    ]
    assert len(set(different)) == len(different)
    assert of(weights) == of(dict(reversed(weights.items())), {"rope_theta": 1.0, "_name_or_path": "x"}, 16, parts)
    assert of(weights) == of(weights, *base, ())  # default attention
