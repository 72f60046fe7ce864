"""Several ranks give the tokens of one process: tiny models, over the loopback interface."""

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
    *(
        RankCase(parallel=p, ahead=a, num_blocks=n)
        for p in ("tensor", "pipeline")
        for a in (False, True)
        for n in (256, TIGHT)
    ),
    RankCase(architecture="qwen3", kv_cache_dtype="int8"),
    RankCase(requests="pooled"),
    # Its LM head is divided, too.
    RankCase(architecture="qwen3_5", requests="scored"),
    RankCase(architecture="qwen3_5", requests="scored", ahead=True),
    RankCase(refused=4),
    RankCase(refused=5, ahead=True),
    RankCase(aborted="1"),
    RankCase(aborted="1", ahead=True),
    RankCase(late=True),
    RankCase(late=True, ahead=True),
]
# Models that two ranks cannot share: what they say of it.
UNEVEN = {
    RankCase(architecture="llama", heads=(9, 9)): "its layer 0 has 9 heads and 9 KV heads of 8, which 2",
    RankCase(architecture="llama", heads=(9, 3)): "its layer 0 has 9 heads and 3 KV heads of 8, which 2",
    RankCase(architecture="llama", heads=(6, 3)): "its layer 0 has 6 heads and 3 KV heads of 8, which 2",
    RankCase(architecture="llama", intermediate=129): "2 machines cannot share its layers (",
    RankCase(architecture="gemma"): "it has no shard()",
    RankCase(architecture="llama", parallel="pipeline"): "its trunk has no pipeline()",
}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[RankCase, Any]:
    cases = [*CASES, *UNEVEN]
    return dict(zip(cases, run_on_ranks(cases, tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_outputs(case: RankCase, on_ranks: dict[RankCase, Any]) -> None:
    found = on_ranks[case]
    expected = run_case(case, make_runner(case))
    check_equal(case, expected, found)
    assert (found["preemptions"] > 0) == (case.num_blocks == TIGHT)
    assert found["cached"]
    failed = [error for error in found["errors"] if error is not None]
    assert bool(failed) == (case.refused is not None), failed
    assert all("as asked for" in error for error in failed)


@pytest.mark.parametrize("case", UNEVEN, ids=lambda case: case.name)
def test_models_that_cannot_be_shared_evenly_are_refused(case: RankCase, on_ranks: dict[RankCase, Any]) -> None:
    assert UNEVEN[case] in on_ranks[case]


def check_equal(case: RankCase, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """The same tokens, log probabilities and vectors, but for requests that failed."""
    num_same = 0
    for i, (prompt, params) in enumerate(requests_of(case)):
        if isinstance(params, PoolingParams):
            continue
        a, b = expected["tokens"][i], found["tokens"][i]
        if found["errors"][i] is not None or case.aborted == str(i):
            assert a[: len(b)] == b
            continue
        num_same += a == b
        if a != b:
            assert params.is_greedy and not params.edits_logits, "only rounding may make for other tokens"
            model = make_model(case)
            assert compare_outputs(model, prompt, a, b).equal
            continue
        of_one, of_ranks = expected["logprobs"][i], found["logprobs"][i]
        assert [token for token, _ in of_one] == [token for token, _ in of_ranks]
        np.testing.assert_allclose([p for _, p in of_one], [p for _, p in of_ranks], atol=1e-3)
    assert num_same >= 2
    for of_one, of_ranks in zip(expected["pooled"], found["pooled"], strict=True):
        np.testing.assert_allclose(of_one, of_ranks, atol=1e-4)
