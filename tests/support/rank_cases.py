"""Requests on small models that must give equal outputs on one process and on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.nn as nn

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.models.paged_model import PagedModel
from metal_engine.output_phases import CallPhase, CallTrigger, OutputPhases, ReasoningPhase
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.token_broadcast import TokenBroadcast
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.settings.config import EngineConfig
from metal_engine.step import Runner
from tests.support.tiny_engine import with_vocabulary
from tools.fixtures.architectures import configuration
from tools.fixtures.fake_engine import VOCAB_SIZE, fake_config, tiny_tokenizer
from tools.fixtures.recurrent_architectures import RECURRENT
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import random_model

GUIDE = list(b"The mill opens at eight, the bakery at six, the shop by the river when it wants to. ")
STORY = list(b"Once upon a time there was a fox who lived at the edge of a wide and quiet forest. ")
DIGITS = StructuredOutputsParams(regex="[a-f]{3}[0-9]{9}")
# So many marks that a random model often writes one of them.
PHASES = OutputPhases(
    reasoning=ReasoningPhase("<r>", "</r>", begins_inside=True, budget=6),
    calls=CallPhase(tuple(CallTrigger(mark, 'call: /[a-c]{1,3}/ "=" /[0-9]{1,4}/ ")"') for mark in "klpquvwyz!?0123")),
)


@dataclass(frozen=True)
class RankCase:
    """Configuration of an engine and its requests.

    Attributes:
        parallel: ``tensor`` or ``pipeline``.
        ahead: True for asynchronous scheduling.
        num_blocks: number of blocks of the KV cache. A small number causes preemptions.
        requests: kind of requests: ``mixed``, ``short``, ``long``, ``scored`` or ``pooled``.
        refused: index of the plan that fails while rank 0 builds it.
        aborted: request that is aborted after some steps.
        intermediate: intermediate size of an MLP. Default: from the architecture's configuration.
        late: True to never wait for a grammar, so that most masks are late.
        num_layers: number of layers of the model. Default: from the architecture's configuration.
        heads: number of heads and of KV heads of a layer, each of size 8. Default: from the architecture's
            configuration.
    """

    architecture: str = "qwen2"
    parallel: str = "tensor"
    ahead: bool = False
    num_blocks: int = 256
    kv_cache_dtype: str = "auto"
    requests: str = "mixed"
    refused: int | None = None
    aborted: str | None = None
    heads: tuple[int, int] | None = None
    intermediate: int | None = None
    num_layers: int | None = None
    late: bool = False

    @property
    def name(self) -> str:
        defaults = RankCase()
        values = {k: v for k, v in asdict(self).items() if v != getattr(defaults, k)}
        return "-".join(f"{k}={v}" for k, v in values.items()) or "plain"

    @property
    def config(self) -> dict[str, Any]:
        """Return the changes to the architecture's configuration."""
        own = {} if self.intermediate is None else {"intermediate_size": self.intermediate}
        if self.num_layers is not None:
            own["num_hidden_layers"] = self.num_layers
        if self.heads is None:
            return own
        heads, kv_heads = self.heads
        return {**own, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def requests_of(case: RankCase) -> list[tuple[list[int], SamplingParams | PoolingParams]]:
    """Return prompts that are cut into chunks and share prefixes, with every kind of request parameter."""
    if case.requests == "short":
        return [(GUIDE + STORY, greedy(6)), (STORY[:20], greedy(8)), (GUIDE[:3], greedy(4))]
    if case.requests == "long":
        return [(list(bytes(range(length))), greedy(30)) for length in (20, 27, 80)]
    mixed: list[tuple[list[int], SamplingParams | PoolingParams]] = [
        (GUIDE + list(b"Where do I get bread?"), greedy(12)),
        (STORY, greedy(9, prompt_logprobs=2, logprobs=3)),
        (list(b"Tides are"), SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=11, ignore_eos=True)),
        (GUIDE + list(b"When does the mill open?"), greedy(10, repetition_penalty=1.3, logit_bias={65: 2.0})),
        (STORY[:30], SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=DIGITS)),
        (GUIDE + STORY, greedy(7)),
        (GUIDE + STORY, SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=10, ignore_eos=True)),
        (list(b"a"), greedy(1)),
        (list(b"Foxes"), greedy(22)),
        (list(b"Millers"), SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)),
        (list(b"Bakers"), SamplingParams(temperature=0.9, seed=2, max_tokens=30, phases=PHASES)),
    ]
    if case.requests == "scored":
        scored = PoolingParams(token_ids=(66, 200))
        return [(STORY[:30], scored), *mixed[:2], (GUIDE + STORY, scored), (STORY, PoolingParams())]
    return [*mixed, (STORY, PoolingParams())] if case.requests == "pooled" else mixed


def config_of(case: RankCase) -> EngineConfig:
    config = fake_config(num_blocks=case.num_blocks, max_num_batched_tokens=40, max_num_partial_prefills=2)
    cache = replace(config.cache, num_state_slots=40 if case.architecture in RECURRENT else 0)
    return replace(config, scheduler=replace(config.scheduler, async_scheduling=case.ahead), cache=cache)


def make_model(case: RankCase) -> nn.Module:
    """Return the whole model with random weights. Quantized KV requires wider heads."""
    wide = {"head_dim": 64} if case.kv_cache_dtype != "auto" else {}
    return random_model(with_vocabulary({**configuration(case.architecture), **wide, **case.config}, VOCAB_SIZE))


def make_runner(
    case: RankCase, divide: Callable[[nn.Module], Any] = lambda model: None, broadcast: TokenBroadcast | None = None
) -> ModelRunner:
    """Return a runner on a model with random weights, or on this rank's shard of the model."""
    model = make_model(case)
    divide(model)
    paged = PagedModel(model, kv_cache_dtype=case.kv_cache_dtype)
    config = config_of(case)
    return ModelRunner(paged, PortableBackend(), config.scheduler, config.cache, broadcast=broadcast)


def run_case(case: RankCase, runner: Runner) -> dict[str, Any]:
    """Run a case's requests, adding one request per step. Return outputs and counts, in types of JSON, by name."""
    engine = SteppedEngine(config_of(case), runner, tiny_tokenizer())
    asked = requests_of(case)
    outputs: list[list[RequestOutput]] = [[] for _ in asked]
    num_asked = num_steps = 0
    while num_asked < len(asked) or engine.has_requests:
        if num_asked < len(asked):
            prompt, params = asked[num_asked]
            is_pooled = isinstance(params, PoolingParams)
            prepared = engine.prepare_pooling([prompt], params)[0] if is_pooled else engine.prepare(prompt, params)
            engine.add_request(str(num_asked), prepared)
            num_asked += 1
        if num_steps == 9 and case.aborted is not None:
            engine.abort_request(case.aborted)
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
        engine.scheduler.check_integrity()
        num_steps += 1
    assert engine.stats.num_used_blocks == 0
    return {
        "tokens": [[token for one in each for token in one.token_ids] for each in outputs],
        "errors": [next((one.error for one in each if one.error is not None), None) for each in outputs],
        "logprobs": [[pair for one in each for pair in _logprobs(one)] for each in outputs],
        "pooled": [each[-1].pooled.tolist() for each in outputs if each and each[-1].pooled is not None],
        "preemptions": engine.stats.num_preemptions,
        "cached": len(engine.scheduler.blocks._cached),
    }


def _logprobs(output: RequestOutput) -> list[Any]:
    found = [*(one for one in output.prompt_logprobs or () if one is not None), *(output.logprobs or ())]
    return [[int(one.token_id), float(one.logprob)] for one in found]
