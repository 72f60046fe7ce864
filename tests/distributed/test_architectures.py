"""Every architecture that mlx-lm can shard, on two ranks; the demo model on three ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import _get_classes

from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.spec import IndexSpec, StateSpec
from metal_engine.llm import LLM
from metal_engine.models import sharding
from metal_engine.models.layer_cache import RecordingCache
from metal_engine.models.mlx_lm_patch import recorded
from metal_engine.models.recurrent.recording import RecordingState
from metal_engine.models.sharding import divide_heads, divide_layers
from metal_engine.sampling_params import SamplingParams
from tests.distributed.test_equal_outputs import check_equal
from tests.support.checkpoint_files import write_checkpoint
from tests.support.rank_cases import RankCase, make_runner, run_case
from tests.support.ranks import run_on_ranks
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.architectures import SUPPORTED, configuration
from tools.fixtures.tiny_models import random_model

ROOT = Path(__file__).parents[2]
# With three layers on each of two ranks, the first shard ends with a recurrent layer. With two layers, with attention.
UNEVEN_PIPELINE = RankCase(architecture="qwen3_next", parallel="pipeline", requests="short", num_layers=6)
# Their small configurations have an odd number of KV heads, or weights that are not divided.
REFUSED = {"prism_hadamard_qwen35", "step3p5"}
# One of two layers is recurrent, and each rank of a pipeline needs a recurrent layer.
TOO_FEW_LAYERS = ("prism_hadamard_qwen35",)


def divided() -> list[RankCase]:
    """Return a case for each architecture and kind of sharding in mlx-lm, and two cases of an uneven pipeline."""
    cases = []
    for name in SUPPORTED:
        config = configuration(name)
        model_class, args_class = _get_classes(config)
        model: nn.Module = model_class(args_class.from_dict(config))
        if hasattr(model, "shard"):
            cases.append(RankCase(architecture=name, requests="short"))
        if hasattr(getattr(model, "model", None), "pipeline") and name not in TOO_FEW_LAYERS:
            cases.append(RankCase(architecture=name, parallel="pipeline", requests="short"))
    return [*cases, UNEVEN_PIPELINE, replace(UNEVEN_PIPELINE, ahead=True)]


@pytest.mark.full
def test_all_architectures_that_can_be_divided(tmp_path: Path) -> None:
    cases = divided()
    assert len({case.architecture for case in cases if case.parallel == "tensor"}) >= 16
    results = list(zip(cases, run_on_ranks(cases, tmp_path), strict=True))
    assert {case.architecture for case, found in results if isinstance(found, str)} == REFUSED
    for case, found in results:
        if not isinstance(found, str):
            check_equal(case, run_case(case, make_runner(case)), found)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace communication in a pipeline: a rank receives its own arrays."""
    for name in ("send", "recv_like", "all_gather"):
        monkeypatch.setattr(mx.distributed, name, lambda array, *_, **__: array)


def share_of(rank: int, num_ranks: int, num_layers: int) -> nn.Module:
    """Return a rank's layers of a model with every second layer recurrent. Ranks count from the end of the model."""
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: num_ranks)
    model = random_model({**configuration("qwen3_next"), "num_hidden_layers": num_layers})
    divide_layers(model, group)
    return model


@pytest.mark.usefixtures("alone")
def test_a_pipeline_trunk_is_not_recorded_as_a_user_of_recurrent_state() -> None:
    states = [one for one in recorded(share_of(1, 2, 6)) if isinstance(one, RecordingState)]
    users = [type(user).__name__ for state in states for user in state.users.values()]
    assert users == ["Qwen3NextGatedDeltaNet"] * 2


@pytest.mark.usefixtures("alone")
def test_each_rank_of_a_pipeline_needs_recurrent_layers() -> None:
    share_of(3, 4, 4)
    with pytest.raises(UnsupportedModelError, match="rank 2 of 4 machines would have none of its recurrent layers"):
        share_of(2, 4, 4)


@pytest.mark.parametrize(
    ("specs", "problem"),
    [
        ((None, None), "a KV cache that it never uses"),
        ((IndexSpec(8, mx.float32), IndexSpec(4, mx.float32)), "an index"),
    ],
)
def test_layers_that_do_not_divide_are_described(
    specs: tuple[StateSpec | None, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two specs are a layer's state before and after mlx-lm's ``shard``."""
    model, left = nn.Module(), list(specs)
    monkeypatch.setattr(nn.Module, "shard", lambda *_: None, raising=False)

    def one_recorder(_: nn.Module) -> list[RecordingCache]:
        cache = RecordingCache()
        cache.spec = left.pop(0)
        return [cache]

    monkeypatch.setattr(sharding, "recorded", one_recorder)
    group: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(UnsupportedModelError, match=f"its layer 0 has {problem}, which 2 machines cannot share"):
        divide_heads(model, group)


PROMPTS = ["The capital of France is", "Once upon a time there was a fox who lived", "1, 2, 3, 4,"]


def _outputs(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.full
def test_the_demo_model_on_three_ranks(reference_model: Any) -> None:
    """The program passes only the model's name, and starts its ranks itself.

    The heads cannot be shared by two ranks.
    """
    with LLM("demo", max_model_len=256) as alone:
        expected, prompts = _outputs(alone), [alone.tokenizer.encode(prompt) for prompt in PROMPTS]
    program = (
        "import json; from metal_engine import LLM; from tests.distributed.test_architectures import _outputs\n"
        "with LLM('demo', max_model_len=256, tensor_parallel_size=3) as llm: print(json.dumps(_outputs(llm)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for prompt, a, b in zip(prompts, expected, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert compare_outputs(reference_model, prompt, a, b).equal
    refused = subprocess.run(
        [sys.executable, "-m", "metal_engine", "bench", "latency", "demo", "--tensor-parallel-size", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 1
    assert "its layer 0 has 9 heads and 3 KV heads of 64, which 2 machines cannot share evenly" in refused.stderr
    assert "loading the weights" not in refused.stderr


@pytest.mark.full
def test_the_launcher_of_mlx(tmp_path: Path) -> None:
    """Each rank runs the same command. Only rank 0 writes output."""
    model = write_checkpoint(tmp_path / "m")
    program = [sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"]
    launcher = [*program, "-n", "2", "--env", f"PYTHONPATH={ROOT}", "--"]
    bench = [sys.executable, "-m", "metal_engine", "bench", "latency", str(model), "--tensor-parallel-size", "2"]
    sizes = ["--input-len", "8", "--output-len", "8", "--num-iters", "2", "--batch-size", "2"]
    # It reads standard input until the end, and then spins.
    done = subprocess.Popen(
        [*launcher, *bench, *sizes], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = done.stdout.read()
    assert done.wait() == 0
    assert said.count("Latency:") == 1 and "mean seconds" in said, said
