"""Throughput and time to first token relative to mlx-lm's, and differences between outputs of attention backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.bench.offline import OfflineRun, run_requests
from metal_engine.checkpoints.loader import LoadedModel
from metal_engine.doctor.figures import Figure, at_least, at_most, not_measured
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import (
    MLX_FLAG,
    has_metal,
    mlx_lm_run,
    random_prompts,
    use_engine,
    use_plain_model,
)
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.models.check import LOGITS_TOLERANCE
from metal_engine.text.tokenizer import Tokenizer

_CHAT = "What is the capital of France?"
_CHAT_TOKENS = 24
_CHUNK = 2048  # tokens
_SLACK = 0.05
_PARITY = "outputs that differ between `--attention-backend metal` and `mlx` beyond ties"

Workload = dict[str, tuple[list[list[int]], int]]  # name -> prompts and number of output tokens


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield throughputs and times to first token, as ratios to mlx-lm's, and the figure of :func:`parity`."""
    facts, workload, ours = use_engine(plan, lambda engine: _run_ours(plan, engine), model)
    yield from facts
    theirs = use_plain_model(lambda loaded: _run_theirs(workload, loaded), model)
    for batch in plan.batches:
        yield _throughput(f"{batch} at once", ours[_batch(batch)], theirs[_batch(batch)])
    for length in plan.long_prompts:
        name = f"first token after a prompt of {length:,}"
        if _prompt(length) in ours:
            yield _first_token(name, ours[_prompt(length)], theirs[_prompt(length)])
        else:
            yield not_measured(name, "the model's context is shorter")
    yield parity(plan, workload, ours, model) if has_metal() else not_measured(_PARITY, "only on Metal")


def _batch(batch: int) -> str:
    return f"batch of {batch}"


def _prompt(length: int) -> str:
    return f"prompt of {length}"


def _workload(plan: Plan, engine: BuiltEngine) -> Workload:
    """Return the prompts of all measurements by name. Each prompt occurs once, so that no prefix is cached.

    Leaves out long prompts that exceed the model's context.
    """
    config = engine.core.config
    vocab_size, longest = config.model.vocab_size, config.scheduler.max_model_len
    workload: Workload = {}
    for batch in plan.batches:
        prompts = random_prompts(batch, plan.prompt_tokens, vocab_size, seed=batch)
        workload[_batch(batch)] = prompts, plan.output_tokens
    for length in plan.long_prompts:
        if length + 2 <= longest:
            workload[_prompt(length)] = random_prompts(1, length, vocab_size, seed=length), 2
    return workload


def _run_ours(plan: Plan, engine: BuiltEngine) -> tuple[list[Item], Workload, dict[str, OfflineRun]]:
    config, tokenizer = engine.core.config, engine.preparer.tokenizer
    workload = _workload(plan, engine)
    chat = run_requests(engine, [_chat_prompt(tokenizer)], [_CHAT_TOKENS])  # also warms up
    text = tokenizer.decode(chat.token_ids[0], skip_special_tokens=True)
    facts: list[Item] = [
        ("model", f"{config.model.model_type}, {config.model.dtype}, {config.model.num_layers} layers"),
        ("attention", config.attention),
        ("KV cache", f"{config.cache.num_tokens:,} tokens"),
        ("one chat", f"{_CHAT!r} -> {text!r}"),
    ]
    return facts, workload, _run(workload, engine)


def _chat_prompt(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the question. Uses the model's chat template, if any."""
    if not tokenizer.hf_tokenizer.chat_template:
        return tokenizer.encode(_CHAT)
    return tokenizer.apply_chat_template([{"role": "user", "content": _CHAT}])


def _run(workload: Workload, engine: BuiltEngine) -> dict[str, OfflineRun]:
    return {name: run_requests(engine, prompts, [n] * len(prompts)) for name, (prompts, n) in workload.items()}


def _run_theirs(workload: Workload, loaded: LoadedModel) -> dict[str, OfflineRun]:
    first, _ = next(iter(workload.values()))
    mlx_lm_run(loaded.model, first[:1], 4)  # warms up
    return {name: mlx_lm_run(loaded.model, prompts, n) for name, (prompts, n) in workload.items()}


def _throughput(name: str, ours: OfflineRun, theirs: OfflineRun) -> Figure:
    own, other = (run.num_output_tokens / run.seconds for run in (ours, theirs))
    promise = at_least(1.0, slack=_SLACK, flag=MLX_FLAG if has_metal() else "")
    note = f"{own:.1f} tokens/s beside {other:.1f}"
    return Figure(f"{name}: throughput relative to mlx-lm's", own / other, promise=promise, note=note)


def _first_token(name: str, ours: OfflineRun, theirs: OfflineRun) -> Figure:
    own, other = ours.first_token_seconds[0], theirs.first_token_seconds[0]
    promise = at_most(1.0, slack=_SLACK, flag="--max-num-batched-tokens 4096")
    note = f"{own:.3g} s beside {other:.3g} s"
    return Figure(f"{name}: time relative to mlx-lm's", own / other, promise=promise, note=note)


def parity(plan: Plan, workload: Workload, ours: dict[str, OfflineRun], model: str) -> Figure:
    """Compare greedy outputs of the default attention backend (our kernel) with greedy outputs of MLX's operations.

    Args:
        ours: runs of ``workload`` with the default backend.

    Returns:
        Figure with the number of outputs that differ, except outputs whose first difference is a tie.
    """
    others = use_engine(plan, lambda engine: _run(workload, engine), model, attention_backend="mlx")
    pairs = [
        (prompt, a, b)
        for name, (prompts, _) in workload.items()
        for prompt, a, b in zip(prompts, ours[name].token_ids, others[name].token_ids, strict=True)
    ]
    different = [pair for pair in pairs if pair[1] != pair[2]]
    wrong = use_plain_model(lambda loaded: sum(not is_tie(loaded.model, *pair) for pair in different), model)
    note = f"{len(pairs)} outputs, {len(different)} differ, of which {len(different) - wrong} at a tie"
    return Figure(_PARITY, wrong, promise=at_most(0, required=True, flag=MLX_FLAG), note=note)


def is_tie(model: Any, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return True if two outputs first differ at two tokens whose logits are equal up to rounding.

    The logits are computed by the model's own forward on the common prefix.

    Args:
        model: mlx-lm model.
        a: greedy output, as long as ``b`` and different.
    """
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    tokens, cache = [*prompt, *a[:at]], make_prompt_cache(model)
    # In chunks, as mlx-lm does. Logits of the chunks are never computed.
    for start in range(0, len(tokens) - 1, _CHUNK):
        model(mx.array([tokens[start : min(start + _CHUNK, len(tokens) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    logits = model(mx.array([tokens[-1:]]), cache=cache)[0, -1]
    gap = mx.abs(logits[a[at]] - logits[b[at]]).astype(mx.float32) / mx.abs(logits).max().astype(mx.float32)
    return float(gap) <= LOGITS_TOLERANCE[logits.dtype]
