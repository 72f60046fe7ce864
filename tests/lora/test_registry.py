"""LoRA adapters in the whole engine: many in a step, compared with mlx-lm with one adapter at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_engine.errors import AdapterError
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.prefix_cache import root_hash
from metal_engine.scheduling.speculation.ngram import NgramProposer
from tests.lora.test_layers import rounded
from tests.support import adapters
from tests.support.draft_heads import draft_always, random_head
from tests.support.running import drain
from tests.support.speculation import draft_for_free, draft_model_config, head_config, propose_from, speculative_config
from tests.support.tiny_engine import reference_logits, tiny_reference
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.lora_adapters import write_peft
from tools.fixtures.stepped_engine import SteppedEngine

# Outputs for each text, by adapter. None: without.
Answers = dict[str | None, list[list[int]]]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TEXTS = [
    "Once upon a time there was a fox who",
    "1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,",
    "The capital of France is the city which",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of eight adapters with different ranks and targets. One of them targets the last layer only."""
    base = tmp_path_factory.mktemp("adapters")
    model = tiny_reference()
    made = {}
    for i in range(8):
        keys = adapters.ALL if i % 2 else adapters.ATTENTION
        weights = adapters.products(model, keys, rank=1 + i, seed=i, layers=(1,) if i == 3 else (0, 1))
        config = {"num_layers": 1} if i == 3 else {}
        made[f"adapter-{i}"] = adapters.write_mlx_lm(base / str(i), weights, **config)
    return made


@pytest.fixture(scope="module")
def golden(folders: dict[str, Path]) -> Answers:
    """Return mlx-lm's outputs for each text, with each adapter and without."""
    found: Answers = {}
    for name in (None, *folders):
        model = adapters.mlx_lms(tiny_reference(), None if name is None else folders[name])
        found[name] = [adapters.mlx_lm_answer(model, byte_ids(text), NUM_TOKENS) for text in TEXTS]
    return found


def add(engine: SteppedEngine, request_id: str, text: str, name: str | None, params: SamplingParams = GREEDY) -> None:
    adapter = None if engine.adapters is None else engine.adapters.find(name)
    (prepared,) = engine.prepare_all([byte_ids(text)], params, adapter=adapter)
    engine.add_request(request_id, prepared)


def run_out(engine: SteppedEngine, preempt_every: int = 0) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_requests:
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if preempt_every and engine.num_steps % preempt_every == 0:
            engine.scheduler.preempt_all()
        engine.scheduler.check_integrity()
    return tokens


def check(engine: SteppedEngine, folders: dict[str, Path], golden: Answers, preempt_every: int = 0) -> None:
    """Check every text with every adapter and without, all in one batch."""
    names: list[str | None] = [None, *folders]
    for i in range(len(TEXTS)):
        for name in names:
            add(engine, f"{i} {name}", TEXTS[i], name)
    found = run_out(engine, preempt_every)
    for i, text in enumerate(TEXTS):
        for name in names:
            expected, got = golden[name][i], found[f"{i} {name}"]
            if got != expected:
                model = adapters.mlx_lms(tiny_reference(), None if name is None else folders[name])
                assert compare_outputs(model, byte_ids(text), expected, got).equal, (name, text)


def test_the_adapters_make_a_difference(golden: Answers) -> None:
    assert len({str(answer) for answer in golden.values()}) == 9


@pytest.mark.parametrize(
    ("config", "preempt_every"),
    [
        pytest.param({"max_num_batched_tokens": 2048, "max_num_seqs": 32}, 0, id="packed"),
        pytest.param({"max_num_batched_tokens": 61, "max_num_seqs": 32}, 0, id="chunked"),
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 16}, 5, id="cut off"),
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 32, "num_blocks": 40}, 0, id="preempted"),
        pytest.param({"max_num_batched_tokens": 512, "max_num_seqs": 32, "ahead": True}, 0, id="ahead"),
        pytest.param({"max_num_batched_tokens": 37, "max_num_seqs": 5}, 3, id="few", marks=pytest.mark.full),
    ],
)
def test_eight_and_the_base_in_one_step(
    folders: dict[str, Path], golden: Answers, config: dict[str, Any], preempt_every: int
) -> None:
    engine = adapters.adapted_engine(folders, **{"num_blocks": 400, **config})
    check(engine, folders, golden, preempt_every)
    assert (engine.stats.num_preemptions > 0) == (preempt_every > 0 or "num_blocks" in config)


def test_speculation(folders: dict[str, Path], golden: Answers) -> None:
    settings = speculative_config(4, longest=3, shortest=1)
    engine = adapters.adapted_engine(
        folders, num_blocks=400, max_num_batched_tokens=512, max_num_seqs=32, speculative=settings
    )
    propose_from(engine, NgramProposer(settings))
    check(engine, folders, golden)
    assert 0 < sum(engine.metrics.num_accepted_tokens) < engine.metrics.num_draft_tokens


@pytest.mark.parametrize("config", [{"num_blocks": 400}, {"num_blocks": 60}])
def test_a_draft_model(folders: dict[str, Path], golden: Answers, config: dict[str, Any]) -> None:
    """The draft model is the base model. Its drafts are often wrong for requests with an adapter."""
    sizes = {"max_num_batched_tokens": 512, "max_num_seqs": 32, **config}
    engine = adapters.adapted_engine(folders, speculative=draft_model_config(4), draft=tiny_reference(), **sizes)
    draft_for_free(engine)
    check(engine, folders, golden)
    assert 0 < sum(engine.metrics.num_accepted_tokens) < engine.metrics.num_draft_tokens
    assert (engine.stats.num_preemptions > 0) == (config["num_blocks"] < 400)


@pytest.mark.parametrize(
    "config", [pytest.param({"num_blocks": 400}, marks=pytest.mark.full), {"num_blocks": 60, "ahead": True}]
)
def test_a_draft_head(folders: dict[str, Path], golden: Answers, config: dict[str, Any]) -> None:
    """The head reads the hidden states of the adapted model, and has no adapter itself."""
    sizes = {"max_num_batched_tokens": 512, "max_num_seqs": 32, **config}
    engine = adapters.adapted_engine(folders, speculative=head_config(3), make_head=random_head, **sizes)
    draft_for_free(engine)
    draft_always(engine)
    check(engine, folders, golden)
    assert engine.metrics.num_draft_tokens > 100
    assert (engine.stats.num_preemptions > 0) == (config["num_blocks"] < 400)


def test_rows_are_sorted_on_a_gpu(folders: dict[str, Path], golden: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_engine.lora.layers.MIN_SORTED_ROWS", 4)
    monkeypatch.setattr("metal_engine.lora.layers.computes_on_cpu", lambda: False)
    engine = adapters.adapted_engine(folders, num_blocks=400, max_num_batched_tokens=100, max_num_seqs=32)
    check(engine, folders, golden)


def test_a_quantized_base(tmp_path: Path) -> None:
    """Compare the engine with the logits of mlx-lm's LoRALinear around a quantized layer."""

    def quantized() -> nn.Module:
        model = tiny_reference()
        nn.quantize(model, group_size=32, bits=4)
        return model

    folder = adapters.write_mlx_lm(tmp_path / "a", adapters.products(quantized(), adapters.ALL, rank=4, seed=1))
    monkey = pytest.MonkeyPatch()
    monkey.setattr("tests.support.tiny_engine.tiny_reference", lambda *_, **config: quantized())
    try:
        engine = adapters.adapted_engine({"a": folder}, num_blocks=200)
    finally:
        monkey.undo()
    for i, text in enumerate(TEXTS):
        add(engine, f"a{i}", text, "a")
        add(engine, f"base{i}", text, None)
    found = run_out(engine)
    for kind, model in (("a", adapters.mlx_lms(quantized(), folder)), ("base", quantized())):
        for i, text in enumerate(TEXTS):
            expected = adapters.mlx_lm_answer(model, byte_ids(text), NUM_TOKENS)
            assert compare_outputs(model, byte_ids(text), expected, found[f"{kind}{i}"]).equal
    assert found["a0"] != found["base0"]


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_pefts_formula(tmp_path: Path, dtype: mx.Dtype, use_rslora: bool) -> None:
    """PEFT's adapters are merged into the weights by its documented formula: W + B A alpha / r, or alpha / sqrt(r)."""
    rank, alpha = 4, 6.0
    made = adapters.products(tiny_reference(), adapters.ALL, rank, seed=3)
    made = {n: tuple(rounded(one, dtype) for one in ab) for n, ab in made.items()}  # type: ignore[misc]
    folder = write_peft(tmp_path / "p", made, alpha, dtype, use_rslora=use_rslora)
    merged = tiny_reference()
    modules = dict(merged.named_modules())
    for name, (a, b) in made.items():
        modules[name].weight = modules[name].weight + mx.array(
            (a @ b).T * (alpha / rank**0.5 if use_rslora else alpha / rank)
        )
    engine = adapters.adapted_engine({"p": folder})
    add(engine, "p", TEXTS[0], "p")
    expected = adapters.mlx_lm_answer(merged, byte_ids(TEXTS[0]), NUM_TOKENS)
    assert compare_outputs(merged, byte_ids(TEXTS[0]), expected, run_out(engine)["p"]).equal


def test_prompt_logprobs_and_pooling_go_through_the_adapter(folders: dict[str, Path]) -> None:
    engine = adapters.adapted_engine(folders)
    vectors = []
    for name in (None, "adapter-1"):
        (prepared,) = engine.prepare_pooling([byte_ids(TEXTS[0])], PoolingParams(), adapter=engine.adapters.find(name))
        engine.add_request("one", prepared)
        outputs = [output for _ in range(3) for output in engine.step()]
        vectors.append(outputs[0].pooled)
    model = adapters.mlx_lms(tiny_reference(), folders["adapter-1"])
    hidden = model.model(mx.array(byte_ids(TEXTS[0]))[None])[0, -1]
    expected = hidden / mx.linalg.norm(hidden)
    assert vectors[0] is not None and vectors[1] is not None
    assert abs(vectors[1] - expected).max().item() < 1e-4 < abs(vectors[0] - expected).max().item()


# --- prefixes ---


def first_output(engine: SteppedEngine) -> RequestOutput:
    ((first, *_),) = drain(engine).values()
    return first


def test_prefixes_are_shared_within_an_adapter_only(folders: dict[str, Path], golden: Answers) -> None:
    engine = adapters.adapted_engine(folders, num_blocks=400)
    for name in (None, "adapter-0", "adapter-1"):
        for is_second in (False, True):
            add(engine, "one", TEXTS[0], name)
            assert (first_output(engine).num_cached_tokens > 0) == is_second, name
    # The shared blocks have the right contents.
    for name in ("adapter-1", None, "adapter-0"):
        add(engine, "one", TEXTS[0], name)
        assert run_out(engine)["one"] == golden[name][0]


def test_a_replaced_adapter_does_not_hit_prefixes_of_the_old_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = adapters.adapted_engine({"a": folders["adapter-0"]}, max_loras=3)
    add(engine, "one", TEXTS[0], "a")
    run_out(engine)
    adapters.load(engine, "a", folders["adapter-2"], in_place=True)
    add(engine, "one", TEXTS[0], "a")
    assert first_output(engine).num_cached_tokens == 0
    adapters.load(engine, "a", folders["adapter-0"], in_place=True)  # the same files as before
    add(engine, "one", TEXTS[0], "a")
    assert first_output(engine).num_cached_tokens > 0


def test_block_hashes_without_an_adapter_stay_compatible() -> None:
    """KV stores that were filled before adapters were supported remain valid."""
    assert root_hash("model", "salt") == sha256(sha256(b"model").digest() + sha256(b"salt").digest()).digest()
    assert len({root_hash("model", "salt", adapter) for adapter in ("", "a", "b")}) == 3


# --- slots ---


def test_running_requests_of_an_unloaded_adapter_finish(folders: dict[str, Path], golden: Answers) -> None:
    engine = adapters.adapted_engine({"a": folders["adapter-1"]}, max_loras=1)
    add(engine, "one", TEXTS[0], "a")
    outputs = [output for _ in range(4) for output in engine.step()]
    assert engine.adapters.unload("a") and not engine.adapters.unload("a") and engine.adapters.find("a") is None
    with pytest.raises(AdapterError, match="no room for the LoRA adapter 'b': all 1 of --max-loras are in use"):
        adapters.load(engine, "b", folders["adapter-2"])
    tokens = [token for output in outputs for token in output.token_ids] + run_out(engine)["one"]
    assert tokens == golden["adapter-1"][0]
    del outputs
    gc.collect()
    # This adapter has fewer layers than the slot's previous adapter, whose remaining weights must be cleared.
    adapters.load(engine, "b", folders["adapter-2"])
    add(engine, "one", TEXTS[1], "b")
    assert run_out(engine)["one"] == golden["adapter-2"][1]


def test_replacing_an_adapter_does_not_change_running_requests(folders: dict[str, Path], golden: Answers) -> None:
    engine = adapters.adapted_engine({"a": folders["adapter-1"]}, max_loras=2, ahead=True)
    add(engine, "old", TEXTS[0], "a")
    found: dict[str, list[int]] = {"old": [], "new": []}
    for _ in range(4):
        for output in engine.step():
            found["old"] += output.token_ids
    with pytest.raises(AdapterError, match="already been loaded"):
        adapters.load(engine, "a", folders["adapter-2"])
    adapters.load(engine, "a", folders["adapter-2"], in_place=True)
    add(engine, "new", TEXTS[0], "a")
    for request_id, tokens in run_out(engine).items():
        found[request_id] += tokens
    assert found == {"old": golden["adapter-1"][0], "new": golden["adapter-2"][0]}


def test_an_adapter_load_is_split_into_pieces_between_steps(
    folders: dict[str, Path], golden: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load is split between steps, even for large layers, or if much of the slot's last adapter must be cleared."""
    monkeypatch.setattr("metal_engine.lora.registry._PIECE_BYTES", 4096)
    monkeypatch.setattr("metal_engine.lora.layers.PART_BYTES", 1024)
    engine = adapters.adapted_engine({"a": folders["adapter-7"]}, max_loras=1)
    assert engine.adapters is not None and engine.adapters.unload("a")
    gc.collect()
    sizes: list[int] = []
    put = engine.adapters._set_weights

    def counting(*args: Any) -> Iterator[int]:
        for size in put(*args):
            sizes[-1] += size
            yield size

    def between_steps(function: Callable[[], None]) -> None:
        sizes.append(0)
        function()

    monkeypatch.setattr(engine.adapters, "_set_weights", counting)
    engine.adapters.load("b", str(folders["adapter-3"]), between_steps)
    assert max(sizes) <= 4096 + 1024 and sum(sizes) > 10 * 4096
    add(engine, "one", TEXTS[0], "b")
    assert run_out(engine)["one"] == golden["adapter-3"][0]


def test_a_load_that_fails_gives_its_slot_back(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = adapters.adapted_engine({}, max_loras=1, max_rank=4)
    with pytest.raises(AdapterError, match="has rank 8, more than the 4 of --max-lora-rank"):
        adapters.load(engine, "a", folders["adapter-7"])

    def fail(function: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        engine.adapters.load("a", str(folders["adapter-1"]), fail)
    with pytest.raises(AdapterError, match="~no-such-user/x is not a directory"):
        engine.adapters.load("a", "~no-such-user/x", fail)
    adapters.load(engine, "a", folders["adapter-1"])


def test_steps_without_adapters_build_no_lora_products(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gathered product is built for steps whose rows have no adapter, nor for layers without LoRA weights."""
    calls = 0
    gather_mm = mx.gather_mm

    def counting(*args: Any, **kwargs: Any) -> mx.array:
        nonlocal calls
        calls += 1
        return gather_mm(*args, **kwargs)

    monkeypatch.setattr(mx, "gather_mm", counting)
    engine = adapters.adapted_engine(folders, num_blocks=400)
    add(engine, "base", TEXTS[0], None)
    run_out(engine)
    assert calls == 0
    add(engine, "one", TEXTS[0], "adapter-0", GREEDY.changed(max_tokens=1))
    add(engine, "other", TEXTS[1], "adapter-2", GREEDY.changed(max_tokens=1))
    add(engine, "base", TEXTS[2], None, GREEDY.changed(max_tokens=1))
    engine.step()
    assert calls == 2 * 2 * len(adapters.ATTENTION)  # two products in each of two layers, for all rows at once
    run_out(engine)


def test_logits_are_mlx_lms(folders: dict[str, Path]) -> None:
    """Compare log probabilities of a prompt, which is stricter than comparing tokens."""
    engine = adapters.adapted_engine(folders, max_num_batched_tokens=512, max_num_partial_prefills=4)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    add(engine, "one", TEXTS[2], "adapter-7", params)
    add(engine, "two", TEXTS[1], "adapter-4", params)
    outputs = {output.request_id: output for output in engine.step()}
    for request_id, text, name in (("one", TEXTS[2], "adapter-7"), ("two", TEXTS[1], "adapter-4")):
        tokens = byte_ids(text)
        logits = mx.array(reference_logits(adapters.mlx_lms(tiny_reference(), folders[name]), tokens))
        expected = nn.log_softmax(logits)
        for i, one in enumerate(outputs[request_id].prompt_logprobs[1:], 1):
            assert one is not None and abs(one.logprob - expected[i - 1, tokens[i]].item()) < 1e-3
