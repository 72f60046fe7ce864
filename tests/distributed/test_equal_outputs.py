"""Several ranks produce the same tokens as one process: tiny models, over the loopback interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_engine.pooling_params import PoolingParams
from tests.support.rank_cases import RankCase, make_model, make_runner, requests_of, run_case
from tests.support.ranks import run_on_ranks
from tools.compare.equal_outputs import compare_outputs

TIGHT = 24
CASES = [
    RankCase(ahead=True, num_blocks=TIGHT),
    RankCase(parallel="pipeline", num_blocks=TIGHT),
    RankCase(architecture="qwen3", kv_cache_dtype="int8"),
    RankCase(architecture="deepseek_v32", requests="short", ahead=True),
    RankCase(requests="pooled"),
    # Its LM head is sharded, too.
    RankCase(architecture="qwen3_5", requests="scored", ahead=True),
    RankCase(refused=5, ahead=True),
    RankCase(aborted="1", late=True, ahead=True),
]
MORE_CASES = [
    RankCase(),
    RankCase(parallel="pipeline", ahead=True),
    RankCase(architecture="qwen3_5", requests="scored"),
    RankCase(refused=4),
    RankCase(aborted="1"),
    RankCase(num_blocks=TIGHT),
    RankCase(ahead=True),
    RankCase(parallel="pipeline"),
    RankCase(parallel="pipeline", ahead=True, num_blocks=TIGHT),
    RankCase(late=True),
    RankCase(aborted="1", ahead=True),
    RankCase(late=True, ahead=True),
]
# Chunks, mixed steps and decodes. Each cache array is large compared with all other memory of a step.
LONG, MORE_LONG = (
    [RankCase(requests="long", parallel=p, ahead=p == ahead, num_blocks=16_384) for p in ("tensor", "pipeline")]
    for ahead in ("tensor", "pipeline")
)
# Models that two ranks cannot share, with the error.
UNEVEN = {
    RankCase(architecture="llama", heads=(9, 9)): "its layer 0 has 9 heads and 9 KV heads of 8, which 2",
    RankCase(architecture="llama", heads=(9, 3)): "its layer 0 has 9 heads and 3 KV heads of 8, which 2",
    RankCase(architecture="llama", heads=(6, 3)): "its layer 0 has 6 heads and 3 KV heads of 8, which 2",
    RankCase(architecture="llama", intermediate=129): "2 machines cannot share its layers (",
    RankCase(architecture="gemma"): "it has no shard()",
    RankCase(architecture="llama", parallel="pipeline"): "its trunk has no pipeline()",
}


def with_more(cases: list[RankCase], more: list[RankCase]) -> list[Any]:
    return [*cases, *(pytest.param(case, marks=pytest.mark.full) for case in more)]


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[RankCase, Any]:
    """Return the results of the cases of all selected tests of this file."""
    selected: list[Any] = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in selected if hasattr(item, "callspec")]
    return dict(zip(cases, run_on_ranks(cases, tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.mark.parametrize("case", with_more(CASES, MORE_CASES), ids=lambda case: case.name)
def test_equal_outputs(case: RankCase, on_ranks: dict[RankCase, Any]) -> None:
    found = on_ranks[case]
    check_equal(case, run_case(case, make_runner(case)), found)
    # The requests of a refused step are preempted and computed again.
    assert (found["preemptions"] > 0) == (case.num_blocks == TIGHT or case.refused is not None)
    assert found["cached"]
    assert not any(found["errors"])


@pytest.mark.parametrize("case", with_more(LONG, MORE_LONG), ids=lambda case: case.name)
def test_writes_stay_in_place_on_each_rank(case: RankCase, on_ranks: dict[RankCase, Any]) -> None:
    for memory in on_ranks[case]["memory"]:
        assert memory["array"] >= 4 << 20 and memory["now"] < memory["array"] / 4
        assert memory["most"] < memory["array"] / 2, "a step held a second copy of a cache array"


@pytest.mark.parametrize("case", UNEVEN, ids=lambda case: case.name)
def test_models_that_cannot_be_shared_evenly_are_refused(case: RankCase, on_ranks: dict[RankCase, Any]) -> None:
    assert UNEVEN[case] in on_ranks[case]


def check_equal(case: RankCase, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Check that tokens, log probabilities and vectors are equal, except those of failed requests."""
    num_same = 0
    # Sums of ranks round differently, and a number in the middle of two codes of 8 bits can get either code.
    tolerance = 1e-3 if case.kv_cache_dtype == "auto" else 5e-3
    for i, (prompt, params) in enumerate(requests_of(case)):
        if isinstance(params, PoolingParams):
            continue
        a, b = expected["tokens"][i], found["tokens"][i]
        if found["errors"][i] is not None or case.aborted == str(i):
            assert a[: len(b)] == b
            continue
        num_same += a == b
        if a != b:
            assert params.is_greedy and not params.edits_logits, "tokens may differ by rounding only"
            assert compare_outputs(make_model(case), prompt, a, b).equal
            continue
        of_one, of_ranks = expected["logprobs"][i], found["logprobs"][i]
        assert [token for token, _ in of_one] == [token for token, _ in of_ranks]
        np.testing.assert_allclose([p for _, p in of_one], [p for _, p in of_ranks], atol=tolerance)
    assert num_same >= 2
    for of_one, of_ranks in zip(expected["pooled"], found["pooled"], strict=True):
        np.testing.assert_allclose(of_one, of_ranks, atol=1e-4)
