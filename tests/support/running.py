"""Runs an engine until all requests are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams
from tools.fixtures.stepped_engine import SteppedEngine

# Ways to dispatch steps, as options of :func:`tests.support.demo.engine_for`.
DISPATCHES: dict[str, dict[str, bool]] = {
    "one by one": {},
    "one ahead": {"ahead": True},
    "behind": {"ahead": True, "behind": True},
    "replayed": {"ahead": True, "behind": True, "replay": True},
}


def add_all(engine: SteppedEngine, requests: Iterable[tuple[list[int], SamplingParams]]) -> None:
    """Add requests. The id of each is its index."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), engine.prepare(prompt, params))


def drain(
    engine: SteppedEngine, step: Callable[[], list[RequestOutput]] | None = None
) -> dict[str, list[RequestOutput]]:
    """Step until no request is left. Return the outputs of each request. Checks the scheduler after every step.

    Args:
        step: runs a step. Default: :meth:`SteppedEngine.step`.
    """
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_requests:
        for output in (step or engine.step)():
            found.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    assert not engine.request_ids and engine.stats.num_used_blocks == 0
    return found


def run(
    engine: SteppedEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    at_once: int | None = None,
) -> list[list[int]]:
    """Return the tokens generated for each prompt, with at most ``at_once`` requests in the engine (default: all).

    Checks the scheduler's invariants after every step, and that all blocks are free at the end.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))[::-1]
    open_requests = 0
    while waiting or engine.has_requests:
        while waiting and (at_once is None or open_requests < at_once):
            i = waiting.pop()
            engine.add_request(str(i), engine.prepare(prompts[i], each[i]))
            open_requests += 1
        for output in engine.step():
            assert output.error is None, output.error
            outputs[int(output.request_id)] += output.token_ids
            open_requests -= output.finished
        engine.scheduler.check_integrity()
    assert engine.stats.num_used_blocks == 0
    return outputs
