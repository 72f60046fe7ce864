"""Choice among cuts of the kernel's work with a fake clock: measuring, storing, validating and discarding results."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.attention import choice_file, tuning
from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.choice import BackendChoice, choose_backend
from metal_engine.attention.choice_file import TunedChoice, TunedChoiceFile, describe_machine, name_of
from metal_engine.attention.kernel_selftest import KernelFailedError, try_kernel
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.cuts import DEFAULT_CUT, Cut
from metal_engine.attention.portable_fallback import FallbackBackend
from metal_engine.attention.tuning import TUNING_SECONDS, Tuner
from metal_engine.errors import ConfigError
from metal_engine.kv_cache.spec import KVSpec
from metal_engine.settings.config import AttentionLayers
from tools.metal_sim import metal_kernel

BLOCK_SIZE = 16
KIND = AttentionKind(KVSpec(2, 64, 64, mx.float16), 4, mx.float16)
OTHER = replace(KIND, has_window=True)
MACHINE = {"gpu": "M1, 8 cores", "macos": "26.2", "mlx": "0.32.4", "kernels": "0123"}
MS = 1e-3
SHORT_STEPS = (((1, 16_383),), ((1, 1023),) * 4, ((40, 0),))

# Seconds of a launch, from its template arguments and number of work items.
Cost = Callable[[dict[str, Any], int], float]


@dataclass
class FakeGpu:
    """A GPU that computes zeros, and a clock that only its kernels move.

    Attributes:
        cost: seconds of a launch of the attention kernel.
        mlx: seconds of attention by MLX's operations.
        launched: template arguments of each launch.
        does_compute: whether kernels compute, in the simulator.
    """

    cost: Cost
    mlx: float = 1.0
    now: float = 0.0
    does_compute: bool = False

    def __post_init__(self) -> None:
        self.launched: list[dict[str, Any]] = []

    def clock(self) -> float:
        return self.now

    def kernels(self, **constructor: Any) -> Callable[..., list[mx.array]]:
        kernel = metal_kernel(**constructor)

        def call(**launch: Any) -> list[mx.array]:
            if constructor["name"] != "merge_splits":
                self.launched.append(dict(launch["template"]))
                self.now += self.cost(self.launched[-1], launch["grid"][0] // 256)
            if self.does_compute:
                return kernel(**launch)
            return [mx.zeros(*out) for out in zip(launch["output_shapes"], launch["output_dtypes"], strict=True)]

        return call

    def backend(self) -> MetalBackend:
        return MetalBackend(self.kernels)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    """Return a function that makes a fake GPU. Candidates are not tried, and the clock counts MLX's operations too."""

    def make(cost: Cost, mlx: float = 1.0) -> FakeGpu:
        gpu = FakeGpu(cost, mlx)

        class Portable:
            def for_step(self, rows: Any) -> Portable:
                return self

            def attend(self, q: mx.array, state: Any, **_: Any) -> mx.array:
                gpu.now += gpu.mlx
                return mx.zeros_like(q)

        monkeypatch.setattr(tuning, "PortableBackend", Portable)
        monkeypatch.setattr(tuning, "try_kernel", lambda *_: None)
        monkeypatch.setattr(tuning, "STEPS", SHORT_STEPS)
        return gpu

    return make


def choose(gpu: FakeGpu, folder: Path, kinds: tuple[AttentionKind, ...] = (KIND,), **options: Any) -> list[TunedChoice]:
    tuner = Tuner(TunedChoiceFile(folder, options.pop("machine", MACHINE)), gpu.clock, options.pop("seconds", 1e6))
    chosen = tuner.choose(gpu.backend(), kinds, BLOCK_SIZE, may_use_mlx=options.pop("may_use_mlx", True), **options)
    return [chosen[name_of(kind, BLOCK_SIZE)] for kind in kinds]


def by_held(**seconds: float) -> Cost:
    return lambda template, _: seconds[f"held_{template['HELD']}"]


def same(template: dict[str, Any], num_items: int) -> float:
    return MS


def test_the_fastest_is_chosen(on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are measured in steps that resemble serving."""
    steps = tuning.STEPS
    gpu = on(by_held(held_2=3 * MS, held_1=2 * MS))
    monkeypatch.setattr(tuning, "STEPS", steps)
    (choice,) = choose(gpu, tmp_path)
    assert choice.cut == Cut(most_held=1) and choice.speedup == pytest.approx(1.5)
    assert str(choice) == "at most 1 key fragment held (1.50 times as fast)"


def test_every_kind_of_candidate_can_win(on: Any, tmp_path: Path) -> None:
    """Candidates with fewer or more threadgroups per core, other tile rows, or only the direct method can win."""
    costs: dict[Cut, Cost] = {
        Cut(threadgroups_per_core=16): lambda template, num_items: (
            MS / num_items if template["STAGED_PARTS"] == 1 else MS
        ),
        Cut(threadgroups_per_core=4): lambda _, num_items: MS * num_items,
        Cut(staged_parts=2): lambda template, _: MS * (2 - (template["STAGED_PARTS"] == 2)),
        Cut(staged_parts=0): lambda template, _: MS * (2 - (template["STAGED_PARTS"] == 0)),
    }
    for number, (cut, cost) in enumerate(costs.items()):
        assert choose(on(cost), tmp_path / str(number))[0].cut == cut
    # 16 query heads of a KV head use the direct method in two strips, or the staged method.
    many = replace(KIND, num_heads=32)
    (choice,) = choose(on(lambda template, _: MS * template["STRIPS"]), tmp_path / "many", (many,))
    assert choice.cut == Cut(most_strips=1)


@pytest.mark.parametrize("gain", [0.0, 0.02])
def test_a_tie_stays_with_the_default(gain: float, on: Any, tmp_path: Path) -> None:
    """A gain of 2% may be noise."""
    gpu = on(lambda template, _: MS * (1 - gain * (template["HELD"] < 2)))
    assert choose(gpu, tmp_path) == [TunedChoice()]
    assert {template["HELD"] for template in gpu.launched} == {1, 2}


def test_a_gpu_that_warms_up_does_not_change_the_tuned_choice(on: Any, tmp_path: Path) -> None:
    """The default is measured first, when the clock rate is low, and again beside each candidate."""
    gpu = on(same)
    gpu.cost = lambda template, num_items: MS * (5 if gpu.now < 0.2 else 1)
    assert choose(gpu, tmp_path) == [TunedChoice()]


@pytest.mark.parametrize("mlx, wins", [(0.4 * MS, True), (0.6 * MS, False)])
def test_mlx_s_operations_must_take_less_than_half(mlx: float, wins: bool, on: Any, tmp_path: Path) -> None:
    (choice,) = choose(on(same, mlx), tmp_path)
    assert choice == (TunedChoice(None, pytest.approx(2.5)) if wins else TunedChoice())
    for folder in ("strict", ""):  # without and with the choice of the start above
        (strict,) = choose(on(same, mlx), tmp_path / folder, may_use_mlx=False)
        assert strict == TunedChoice()


# --- candidates that fail ---


def raising(template: dict[str, Any], num_items: int) -> float:
    if (template["HELD"], template["STAGED_PARTS"]) == (1, 1):
        raise RuntimeError("[metal::Device] Unable to load kernel\nerror: too many registers")
    return by_tiles(template, num_items)


def by_tiles(template: dict[str, Any], num_items: int) -> float:
    return MS * {(2, 1): 4, (1, 1): 1}.get((template["HELD"], template["STAGED_PARTS"]), 2)


def test_a_candidate_that_raises_is_dropped(on: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (choice,) = choose(on(raising), tmp_path)
    assert choice.cut == Cut(staged_parts=2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "at most 1 key fragment held" in record.message and "too many registers" in record.message
    assert str(KIND) in record.message


@pytest.mark.parametrize("what", ["wrong", "raises"])
def test_a_candidate_with_wrong_results_or_a_compile_error_is_not_chosen(
    what: str, on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the simulator: a candidate that is fast and wrong, or that does not compile, is not chosen."""
    monkeypatch.setattr(tuning, "TRIED", {"most_held": (2, 1), "staged_parts": (1, 2)})
    gpu = on(by_tiles)
    tried = []

    def try_in_simulator(metal: MetalBackend, kind: AttentionKind, block_size: int) -> None:
        (cut,) = metal.cuts.values()
        tried.append(cut)
        gpu.does_compute = what == "raises" or cut.most_held == 2
        if what == "raises" and cut.most_held == 1:
            gpu.cost = raising
        try:
            try_kernel(metal, kind, block_size)
        finally:
            gpu.does_compute = False
            gpu.cost = by_tiles

    monkeypatch.setattr(tuning, "try_kernel", try_in_simulator)
    (choice,) = choose(gpu, tmp_path)
    assert choice.cut == Cut(staged_parts=2)
    assert tried == [Cut(most_held=1), Cut(staged_parts=2)]
    (record,) = caplog.records
    assert ("gives wrong results" if what == "wrong" else "too many registers") in record.message


def test_a_default_that_cannot_be_timed_stays(on: Any, tmp_path: Path) -> None:
    """The steps may need too much memory."""

    def cost(template: dict[str, Any], num_items: int) -> float:
        raise RuntimeError("[malloc] Unable to allocate")

    assert choose(on(cost), tmp_path) == [TunedChoice()]


# --- time ---


@pytest.mark.parametrize("seconds_of_launch", [0.05, 0.3])
def test_measuring_ends_in_time(seconds_of_launch: float, on: Any, tmp_path: Path) -> None:
    """Kinds of layers share the time. Results of finished candidates count."""
    gpu = on(lambda template, _: seconds_of_launch / (1 + (template["HELD"] < 2)), mlx=3.0)
    choices = choose(gpu, tmp_path, (KIND, OTHER), seconds=TUNING_SECONDS)
    assert gpu.now <= TUNING_SECONDS + 3.0  # a last run
    assert gpu.now > TUNING_SECONDS / 3
    assert all(choice.cut in (Cut(most_held=1), DEFAULT_CUT) for choice in choices)


def test_no_candidate_is_begun_that_would_take_too_long(
    on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate for a candidate is the time of the longest earlier candidate. Compilation cannot be interrupted."""
    gpu = on(same, mlx=MS)

    def compile_and_try(*_: Any) -> None:
        gpu.now += 1.5

    monkeypatch.setattr(tuning, "try_kernel", compile_and_try)
    choose(gpu, tmp_path, (KIND, OTHER), seconds=TUNING_SECONDS)
    assert TUNING_SECONDS - 4 <= gpu.now <= TUNING_SECONDS


def test_models_of_a_start_share_the_time(on: Any, tmp_path: Path) -> None:
    gpu = on(lambda *_: 1.0)
    tuner = Tuner(TunedChoiceFile(tmp_path, MACHINE), gpu.clock, 10.0)
    for kind in (KIND, OTHER):
        tuner.choose(gpu.backend(), [kind], BLOCK_SIZE, may_use_mlx=False)
    first = gpu.now
    left_out = replace(KIND, has_softcap=True)
    chosen = tuner.choose(gpu.backend(), [left_out], BLOCK_SIZE, may_use_mlx=False)
    assert gpu.now - first <= 1  # a first run
    # The next start measures it.
    assert chosen == {name_of(left_out, BLOCK_SIZE): TunedChoice()} and not chosen.keys() & tuner.file.read().keys()


# --- the file ---


def test_tuned_choices_are_stored_and_not_measured_again(on: Any, tmp_path: Path) -> None:
    first = choose(on(by_held(held_2=3 * MS, held_1=2 * MS)), tmp_path)
    later = on(lambda *_: pytest.fail("it is measured again"))
    assert choose(later, tmp_path) == first
    # Other kinds of layers and other block sizes are measured. The first choice is kept.
    assert choose(on(same), tmp_path, (KIND, OTHER)) == [*first, TunedChoice()]
    assert choose(later, tmp_path, (OTHER, KIND)) == [TunedChoice(), *first]
    tuner = Tuner(TunedChoiceFile(tmp_path, MACHINE), later.clock)
    with pytest.raises(pytest.fail.Exception):
        tuner.choose(later.backend(), [KIND], 2 * BLOCK_SIZE, may_use_mlx=False)


@pytest.mark.parametrize("fact", MACHINE)
def test_tuned_choices_are_stored_per_machine(fact: str, on: Any, tmp_path: Path) -> None:
    """Every fact about the machine counts. The first machine keeps its choice."""
    choose(on(by_held(held_2=3 * MS, held_1=2 * MS)), tmp_path)
    other = on(same)
    assert choose(other, tmp_path, machine=MACHINE | {fact: "other"}) == [TunedChoice()]
    assert other.launched
    again = on(same)
    assert choose(again, tmp_path)[0].cut == Cut(most_held=1) and not again.launched


def changed(**fields: Any) -> Callable[[dict[str, Any]], bytes]:
    def change(content: dict[str, Any]) -> bytes:
        (choice,) = content["choices"].values()
        choice["cut"].update(fields)
        return json.dumps(content).encode()

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: json.dumps(content).encode()[:-20],
        lambda content: b"[" * 100_000,
        lambda content: json.dumps(content | {"machine": MACHINE | {"macos": "14.0"}}).encode(),
        lambda content: json.dumps(content | {"choices": {name_of(KIND, BLOCK_SIZE): None}}).encode(),
        changed(most_held=3),
        changed(most_held=True),
        changed(threadgroups_per_core=1 << 40),
        changed(more=1),
    ],
)
def test_a_file_that_is_wrong_is_not_believed(
    change: Callable[[dict[str, Any]], bytes], on: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start logs a warning, measures and repairs the file."""
    cost = by_held(held_2=3 * MS, held_1=2 * MS)
    expected = choose(on(cost), tmp_path)
    path = TunedChoiceFile(tmp_path, MACHINE).path
    path.write_bytes(change(json.loads(path.read_bytes())))
    gpu = on(cost)
    assert choose(gpu, tmp_path) == expected and gpu.launched
    (record,) = caplog.records
    assert str(path) in record.message and "measured again" in record.message
    assert choose(on(lambda *_: pytest.fail("it is measured again")), tmp_path) == expected


def test_tuned_choice_file_is_replaced_atomically(
    on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that fails leaves the old file; the choice counts for this start."""
    choose(on(same), tmp_path)
    path = TunedChoiceFile(tmp_path, MACHINE).path
    before = path.read_bytes()

    def fail(source: str, target: Path) -> None:
        written = json.loads(Path(source).read_text())  # complete at this point
        assert len(written["choices"]) == 2 and target == path
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        cost = by_held(held_2=3 * MS, held_1=2 * MS)
        assert choose(on(cost), tmp_path, (OTHER,))[0].cut == Cut(most_held=1)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    assert "no space left" in caplog.text


def test_a_cache_path_that_is_not_a_folder_is_logged(on: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert choose(on(same), tmp_path / "file" / "attention") == [TunedChoice()]
    assert "will be measured at each start" in caplog.records[-1].message


def test_the_first_process_decides(on: Any, tmp_path: Path) -> None:
    """Two processes measure at the same time. Both use the choice that was stored first."""
    gpu = on(same)
    first = TunedChoice(Cut(most_held=1), 1.25)

    def cost(template: dict[str, Any], num_items: int) -> float:
        if not gpu.now:
            TunedChoiceFile(tmp_path, MACHINE).add(
                {name_of(KIND, BLOCK_SIZE): first, name_of(OTHER, BLOCK_SIZE): first}
            )
        return MS

    gpu.cost = cost
    assert choose(gpu, tmp_path) == [first]
    assert set(TunedChoiceFile(tmp_path, MACHINE).read()) == {name_of(KIND, BLOCK_SIZE), name_of(OTHER, BLOCK_SIZE)}


def test_machine_description_covers_gpu_cores_macos_mlx_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"device_name": "Apple M1", "architecture": "applegpu_g13g"}
    monkeypatch.setattr(mx, "device_info", lambda device: gpu)
    monkeypatch.setattr("platform.mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    machine = describe_machine(8)
    assert machine["gpu"] == "Apple M1, applegpu_g13g, 8 cores" and machine["macos"] == "26.2"
    assert machine["mlx"] and machine == describe_machine(8) != describe_machine(7)
    text = choice_file.kernel_text
    for name in ("paged_attention", "attention_direct", "attention_quantized", "attention_tensor", "merge_splits"):
        with monkeypatch.context() as patched:
            own = text(f"{name}.metal")
            patched.setattr(choice_file, "kernel_text", lambda file, own=own: text(file).replace(own, own + "\n"))
            assert describe_machine(8)["kernels"] != machine["kernels"], name


# --- what computes a model's layers ---


def backend_choice(gpu: FakeGpu, folder: Path, **options: Any) -> BackendChoice:
    return BackendChoice(gpu.backend(), tuner=Tuner(TunedChoiceFile(folder, MACHINE), gpu.clock, 1e6), **options)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_engine.attention.choice.try_kernel", lambda *_: None)


def test_tuned_cuts_apply_only_to_layers_of_the_same_kind(untried: None, on: Any, tmp_path: Path) -> None:
    def cost(template: dict[str, Any], num_items: int) -> float:
        return MS * (2 if template["HAS_WINDOW"] and template["HELD"] == 2 else 1)

    choice = backend_choice(on(cost), tmp_path)
    plain = choice.for_layers([KIND, OTHER, KIND], BLOCK_SIZE)
    tuned = choice.tuned(plain, BLOCK_SIZE)
    assert isinstance(tuned.backend, MetalBackend) and tuned.backend.cuts == {OTHER: Cut(most_held=1)}
    assert plain.backend is choice.metal and choice.metal is not None and not choice.metal.cuts
    words = f"at most 1 key fragment held (2.00 times as fast) for {OTHER}"
    (identity,) = tuned.layers.tuned
    assert tuned.layers == AttentionLayers(metal=3, tuning=words, tuned=(identity,))
    assert repr(OTHER) in identity and repr(Cut(most_held=1)) in identity and "2.0" not in identity
    for kind, held in ((KIND, 2), (OTHER, 1)):
        has_window = kind.has_window
        key = (kind.dtype, kind.num_heads, kind.spec, BLOCK_SIZE)
        assert tuned.backend.kind_of(key, has_window, False, None).variant.held == held


def test_layer_kinds_that_are_faster_with_mlx_use_mlx_operations(untried: None, on: Any, tmp_path: Path) -> None:
    choice = backend_choice(on(lambda template, _: MS * (10 if template["HAS_WINDOW"] else 1), mlx=2 * MS), tmp_path)
    tuned = choice.tuned(choice.for_layers([KIND, OTHER], BLOCK_SIZE), BLOCK_SIZE)
    assert isinstance(tuned.backend, FallbackBackend) and tuned.backend.on_portable == {OTHER}
    assert (tuned.layers.metal, tuned.layers.portable) == (1, 1)
    assert tuned.layers.not_covered == ("head_dim 64, faster with MLX's operations",)
    assert len(tuned.layers.tuned) == 1
    strict = backend_choice(on(lambda template, _: MS * 10, mlx=MS), tmp_path / "strict", is_strict=True)
    assert strict.tuned(strict.for_layers([KIND], BLOCK_SIZE), BLOCK_SIZE).layers.portable == 0


def test_all_ranks_use_the_tuned_choices_of_rank_0(untried: None, on: Any, tmp_path: Path) -> None:
    """Rank 1 does not measure. Kinds of layers that rank 0 lacks use the default."""
    cost = by_held(held_2=3 * MS, held_1=2 * MS)
    told: dict[str, Any] = {}

    def lead(what: str, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        told.update(json.loads(json.dumps(own())))
        return told

    leader = backend_choice(on(cost), tmp_path / "0")
    first = leader.tuned(leader.for_layers([KIND], BLOCK_SIZE), BLOCK_SIZE, from_rank_zero=lead)
    gpu = on(lambda *_: pytest.fail("it is measured"))
    follower = backend_choice(gpu, tmp_path / "1")
    chosen = follower.for_layers([KIND, OTHER], BLOCK_SIZE)
    second = follower.tuned(chosen, BLOCK_SIZE, from_rank_zero=lambda what, own: told)
    assert first.backend.cuts == second.backend.cuts == {KIND: Cut(most_held=1)}  # type: ignore[attr-defined]
    assert first.layers.tuned == second.layers.tuned


@pytest.mark.parametrize("fails_here", [True, False])
def test_a_kept_choice_that_fails_is_not_used(
    fails_here: bool, untried: None, on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A failure on one rank gives all ranks the default."""
    choice = backend_choice(on(by_held(held_2=3 * MS, held_1=2 * MS)), tmp_path)
    plain = choice.for_layers([KIND], BLOCK_SIZE)

    def fail(metal: MetalBackend, kind: AttentionKind, block_size: int) -> None:
        assert metal.cuts[kind] == Cut(most_held=1)
        raise KernelFailedError("does not run", "error: of Metal's compiler")

    if fails_here:
        monkeypatch.setattr("metal_engine.attention.choice.try_kernel", fail)
    told = []
    tuned = choice.tuned(plain, BLOCK_SIZE, max_over_ranks=lambda what, number: told.append(number) or 1 - (not told))
    assert told == [int(fails_here)]
    assert tuned.layers == AttentionLayers(metal=1, tuning="the default") and tuned.backend is choice.metal
    assert str(tmp_path) in caplog.text and ("of Metal's compiler" in caplog.text) == fails_here


def test_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no tuner with ``never`` or without Metal."""
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path))
    assert choose_backend("auto", 16, "auto").tuner is None or mx.metal.is_available()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda *_: {"device_name": "Apple M1", "architecture": "applegpu_g13g"})
    monkeypatch.setattr("metal_engine.attention.choice.gpu_core_count", lambda: 8)
    assert choose_backend("mlx", 16, "auto").tuner is None
    never, auto = choose_backend("auto", 16, "never"), choose_backend("auto", 16, "auto")
    assert never.tuner is None and auto.tuner is not None
    assert auto.tuner.file.path.parent == tmp_path / "attention"
    monkeypatch.setenv("METAL_ENGINE_CACHE", "~no-such-user/cache")
    with pytest.raises(ConfigError, match=r"--attention-tuning.*METAL_ENGINE_CACHE"):
        choose_backend("auto", 16, "auto")
