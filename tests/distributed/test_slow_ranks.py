"""A slow rank is not lost. A rank that hangs is lost, and the message names it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.checkpoint_files import write_checkpoint
from tests.support.ranks import ROOT, start_ranks, write_hosts

TIMEOUT, SLOW, STEP = 6, 14, 60
# Prompts whose lengths tell rank 1's test code to be slow or to hang.
SLOW_PROMPT, HANGING_PROMPT = 33, 35

PROGRAM = f"""
import os, sys, threading, time

from metal_engine.device.blas.load import load_optimized_blas

load_optimized_blas()
from metal_engine import LLM, SamplingParams
from metal_engine.distributed import ranks
from metal_engine.runner.model_runner import ModelRunner

ranks._LEAST_STEP_SECONDS, ranks._LONG_CONTEXT = {STEP}, 0.0
evaluate, execute = ranks.evaluate_one_by_one, ModelRunner.execute

def slow_evaluate(model):
    time.sleep({SLOW})
    evaluate(model)

def slow_execute(self, plan, **options):
    lengths = [one.num_prompt_tokens for one in plan.new_requests]
    if {SLOW_PROMPT} in lengths:
        time.sleep({SLOW})
    if {HANGING_PROMPT} in lengths:
        threading.Event().wait()
    return execute(self, plan, **options)

if os.environ["MLX_RANK"] == "1":
    ranks.evaluate_one_by_one, ModelRunner.execute = slow_evaluate, slow_execute
llm = LLM(sys.argv[1], max_model_len=64, tensor_parallel_size=2, distributed_timeout_seconds={TIMEOUT})
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
for length in ({SLOW_PROMPT}, {HANGING_PROMPT}):
    (result,) = llm.generate([[5] * length], params, use_tqdm=False)
    print(len(result.outputs[0].token_ids), flush=True)
"""


@pytest.mark.full
def test_a_slow_rank_is_not_lost_and_one_that_hangs_is_named(tmp_path: Path) -> None:
    """Loading and a step take longer than the silence timeout. Then a step never ends."""
    command = ["-c", PROGRAM, str(write_checkpoint(tmp_path / "m"))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT}
    ranks = start_ranks(command, write_hosts(tmp_path / "hosts.json", 2), 2, **pipes)
    told = [rank.communicate() for rank in ranks]
    assert told[0][0] == "4\n", told
    assert [rank.returncode for rank in ranks] == [1, 1]
    for rank, (_, said) in enumerate(told):
        problem = rf"rank 1 \(127\.0\.0\.1\) has made no progress, and rank 0 has waited {STEP} s for a step"
        assert len(re.findall(rf"{problem}: rank {rank} ends", said)) == 1, said
        assert "silent" not in said
