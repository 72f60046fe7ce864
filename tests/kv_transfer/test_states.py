"""Recurrent states in a store: loaded only together with their blocks, and never a wrong state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import mlx.nn as nn
import pytest

from metal_engine.kv_transfer.stores.valkey import ValkeyStore
from tests.kv_transfer.test_engines import BLOCK_SIZE, PROMPTS, files, make_prompt
from tests.support.kv_engines import KVEngine, MakeEngine, hand_over, kv_engine
from tests.support.sweeps import sweep
from tests.support.tiny_engine import with_vocabulary
from tests.support.valkey_server import ValkeyServer
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.architectures import configuration
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.tiny_models import random_model


def hybrid(seed: int = 0) -> nn.Module:
    return random_model(with_vocabulary(configuration("qwen3_next"), 256), seed)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return kv_engine(tiny_tokenizer(), None, model=hybrid()).run(PROMPTS)


def check(plain: list[list[int]], outputs: list[list[int]]) -> None:
    reference = hybrid()
    for prompt, a, b in zip(PROMPTS, plain, outputs, strict=True):
        assert compare_outputs(reference, prompt, a, b).equal


def one_by_one(engine: KVEngine, prompts: Sequence[list[int]] = PROMPTS, max_tokens: int = 6) -> list[list[int]]:
    return [engine.run([prompt], max_tokens)[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("dispatch", "replay"),
    sweep(
        product(("one by one", "ahead", "behind"), (False, True)),
        lambda *case: case in (("ahead", False), ("behind", True)),
    ),
)
def test_cold_then_after_a_restart(make: MakeEngine, plain: list[list[int]], dispatch: str, replay: bool) -> None:
    options = {"replay": replay, "ahead": dispatch == "ahead", "behind": dispatch == "behind"}
    first = make(model=hybrid(), **options)
    check(plain, one_by_one(first))
    assert first.stats.states_loaded == 0 and first.stats.blocks_saved > 0
    second = make(model=hybrid(), **options)
    check(plain, second.run(PROMPTS))
    # The second engine's steps depend on when its loads end: often no two in a row have the same rows.
    assert (first.core.metrics.num_decode_forwards["replayed"] > 0) == replay
    stats = second.stats
    assert stats.states_loaded >= 6
    # Computed tokens are those after a prompt's last whole block, where the first engine saved a state.
    computed = sum((len(p) - 1) % BLOCK_SIZE + 1 for p in PROMPTS)
    assert stats.prompt_tokens_computed == computed
    assert stats.prompt_tokens_store > 0


def test_what_was_loaded_is_a_checkpoint_here_too(make: MakeEngine) -> None:
    one_by_one(make(model=hybrid()), PROMPTS[:1])
    engine = make(model=hybrid())
    for _ in range(3):
        one_by_one(engine, PROMPTS[:1])
    assert engine.stats.states_loaded == 1
    assert engine.core.scheduler.states.slots.num_hits == 2


@pytest.mark.parametrize("budgets", [(16, 200), pytest.param((200, 16), marks=pytest.mark.full)])
def test_different_chunks_on_each_side(make: MakeEngine, plain: list[list[int]], budgets: tuple[int, int]) -> None:
    check(plain, one_by_one(make(model=hybrid(), budget=budgets[0])))
    engine = make(model=hybrid(), budget=budgets[1])
    check(plain, engine.run(PROMPTS))
    assert engine.stats.states_loaded


def test_hand_over(make: MakeEngine, plain: list[list[int]]) -> None:
    """The consumer's requests wait for blocks, and then for the state that the producer saves during its prefill."""
    producer = make(model=hybrid(), budget=24, kv_role="kv_producer")
    consumer = make(model=hybrid(), budget=64, kv_role="kv_consumer")
    outputs = hand_over(producer, consumer, PROMPTS)
    check(plain, outputs)
    assert consumer.stats.prompt_tokens_computed == sum((len(p) - 1) % BLOCK_SIZE + 1 for p in PROMPTS)
    assert consumer.stats.loads_timed_out == 0


def test_a_second_turn_loads_the_first_answer_too(make: MakeEngine) -> None:
    first = make(model=hybrid())
    (answer,) = first.run([PROMPTS[0]], 30)
    first.run([make_prompt(9, 3)], 1)  # states of an ended request are saved with the next step
    turn = PROMPTS[0] + answer + make_prompt(7, 9)
    engine = make(model=hybrid())
    (second,) = engine.run([turn])
    assert engine.stats.prompt_tokens_store >= (len(PROMPTS[0]) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert [second] == kv_engine(tiny_tokenizer(), None, model=hybrid()).run([turn])


def state_files(root: Path, engine: KVEngine) -> list[Path]:
    """Return the files that hold states and not blocks."""
    assert engine.paged.pool.bytes_per_request > engine.layout.nbytes  # files of states are larger than files of blocks
    largest = max(path.stat().st_size for path in files(root))
    return [path for path in files(root) if path.stat().st_size == largest]


@pytest.mark.parametrize("seed", sweep(range(3), lambda seed: seed == 1))
def test_a_store_that_lost_some(make: MakeEngine, plain: list[list[int]], tmp_path: Path, seed: int) -> None:
    one_by_one(make(model=hybrid()))
    rng = random.Random(seed)
    for path in files(tmp_path):
        if rng.random() < (0.1, 0.3, 0.6)[seed]:
            path.unlink()
    check(plain, make(model=hybrid()).run(PROMPTS))


def test_states_that_are_spoilt_are_computed_again(make: MakeEngine, plain: list[list[int]], tmp_path: Path) -> None:
    first = make(model=hybrid())
    one_by_one(first)
    for path in state_files(tmp_path, first):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    engine = make(model=hybrid())
    check(plain, engine.run(PROMPTS))
    assert engine.stats.blocks_corrupt > 0 and engine.stats.states_loaded == 0


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.full), True], ids=["one by one", "one ahead"])
def test_a_tight_pool_preempts_what_was_loaded(make: MakeEngine, plain: list[list[int]], ahead: bool) -> None:
    one_by_one(make(model=hybrid(), ahead=ahead))
    engine = make(model=hybrid(), num_blocks=24, ahead=ahead)
    check(plain, engine.run(PROMPTS))
    assert engine.stats.states_loaded


def test_blocks_without_a_state_are_of_no_use(make: MakeEngine, plain: list[list[int]], tmp_path: Path) -> None:
    first = make(model=hybrid())
    one_by_one(first)
    for path in state_files(tmp_path, first):
        path.unlink()
    engine = make(model=hybrid())
    check(plain, engine.run(PROMPTS))
    assert engine.stats.states_loaded == 0 and engine.stats.blocks_loaded == 0
    assert engine.stats.blocks_unused > 0


def test_states_of_another_model_are_not_found(make: MakeEngine) -> None:
    one_by_one(make(model=hybrid()))
    engine = make(model=hybrid(seed=1))
    outputs = engine.run(PROMPTS)
    assert engine.stats.states_loaded == 0
    assert outputs == kv_engine(tiny_tokenizer(), None, model=hybrid(seed=1)).run(PROMPTS)


def test_through_a_server(make: MakeEngine, plain: list[list[int]]) -> None:
    server = ValkeyServer()
    try:
        fingerprint = make(model=hybrid()).layout.fingerprint
        one_by_one(make(ValkeyStore(server.url, fingerprint), model=hybrid()))
        engine = make(ValkeyStore(server.url, fingerprint), model=hybrid())
        check(plain, engine.run(PROMPTS))
        assert engine.stats.states_loaded
    finally:
        server.kill()
