"""Preemption: requests that do not fit into the KV cache together have the same outputs as alone."""

from __future__ import annotations

from collections.abc import Iterator

from metal_engine.bench.offline import run_requests
from metal_engine.doctor.figures import Figure, at_least
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import random_prompts, use_engine
from metal_engine.engine.built_engine import BuiltEngine

_NUM_REQUESTS, _PROMPT_TOKENS, _BLOCK_SIZE = 4, 16, 16
_MORE_TOKENS = 32  # output tokens beyond the plan's, so that requests need further blocks


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the number of preemptions, and of outputs that equal the outputs of requests run alone."""
    output_len = plan.output_tokens + _MORE_TOKENS
    blocks_of_one = -(-(_PROMPT_TOKENS + output_len) // _BLOCK_SIZE)
    num_preemptions, num_equal = use_engine(
        plan,
        lambda engine: _run(engine, output_len),
        model,
        num_gpu_blocks_override=2 * blocks_of_one,  # for half of the requests
        max_num_seqs=_NUM_REQUESTS,
        block_size=_BLOCK_SIZE,
        max_model_len=_PROMPT_TOKENS + output_len,
        enable_prefix_caching=False,
    )
    yield Figure("preemptions", num_preemptions, promise=at_least(1, required=True))
    note = "in half precision, a tie may be decided otherwise in another batch"
    yield Figure("outputs equal to requests alone", num_equal, promise=at_least(_NUM_REQUESTS), note=note)


def _run(engine: BuiltEngine, output_len: int) -> tuple[int, int]:
    """Run the requests alone, then together. Return the number of preemptions, and of equal outputs."""
    prompts = random_prompts(_NUM_REQUESTS, _PROMPT_TOKENS, engine.core.config.model.vocab_size, seed=0)
    alone = [run_requests(engine, [prompt], [output_len]).token_ids[0] for prompt in prompts]
    before = engine.core.stats.num_preemptions
    together = run_requests(engine, prompts, [output_len] * _NUM_REQUESTS).token_ids
    num_equal = sum(a == b for a, b in zip(alone, together, strict=True))
    return engine.core.stats.num_preemptions - before, num_equal
