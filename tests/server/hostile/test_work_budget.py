"""Fuzzing with a work budget per byte: the time for a body may grow only in proportion to its size.

Every field of every endpoint is filled with many elements of each kind, at three sizes
(:mod:`tests.support.work_budget`). Further tests undo a fix and check that the budget detects the defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from metal_engine.sampling_params import SamplingParams
from metal_engine.server.generation import parameters, preparation
from metal_engine.server.protocol import ChatMessage, GenerationBody
from tests.server.hostile.cases import FIELDS
from tests.support.fillers import CHAT, COMPLETIONS, FILLERS, MESSAGES, RESPONSES, SHAPES, Endpoint
from tests.support.fuzzing import growing
from tests.support.sweeps import sweep
from tests.support.work_budget import MAX_GROWTH, Application, application, filled


@pytest.fixture(scope="module")
def app() -> Iterator[Application]:
    with application() as app:
        yield app


SEED = 20261122
QUICK = (
    (COMPLETIONS, "prompt", "lists"),
    (COMPLETIONS, "allowed_token_ids", "numbers"),
    (COMPLETIONS, "logit_bias", "names"),
    (CHAT, "messages", "messages"),
    (CHAT, "response_format", "depth"),
    (RESPONSES, "include", "texts"),
    (MESSAGES, "system", "parts"),
)

QUICK_SHAPES = (
    "/v1/chat/completions, unknown names",
    "/api/chat, unknown names",
    "unknown fields of a part",
    "unknown options",
    "allowed tokens and n",
    "arguments of a call",
)


def check(app: Application, path: str, make: Callable[[int], bytes]) -> None:
    work = app.work(path, make)
    assert work.is_within_budget, work


@pytest.mark.parametrize(("endpoint", "field", "filler"), QUICK, ids=[f"{e.path} {f} {x}" for e, f, x in QUICK])
def test_a_field(app: Application, endpoint: Endpoint, field: str, filler: str) -> None:
    check(app, endpoint.path, filled(endpoint, field, filler))


@pytest.mark.full
@pytest.mark.parametrize(("endpoint", "field"), FIELDS, ids=[f"{e.path} {f}" for e, f in FIELDS])
def test_every_field(app: Application, endpoint: Endpoint, field: str) -> None:
    for filler in FILLERS:
        check(app, endpoint.path, filled(endpoint, field, filler))


@pytest.mark.parametrize("name", sweep(SHAPES, lambda name: name in QUICK_SHAPES))
def test_a_body_that_grows_elsewhere(app: Application, name: str) -> None:
    endpoint, make = SHAPES[name]
    check(app, endpoint.path, make)


@pytest.mark.parametrize("number", [4, pytest.param(400, marks=pytest.mark.full)])
def test_random_places(app: Application, number: int) -> None:
    for body in growing(SEED, number):
        work = app.work(body.path, body)
        assert work.is_within_budget, (body, work)


# --- what it finds when a mending is taken out -------------------------------------------------------------

# Without the large bodies, because the defects make them slow.
ONCE = (0,)
# If work stays linear without the fix, it must exceed the work with the fix by this factor (measured: 29 and 7).
MANY_TIMES = 3


def _unknown_by_scanning(body: GenerationBody) -> list[str]:
    """Search for each name among all earlier names, which is quadratic."""
    unknown: list[str] = []
    for name in body.model_extra or {}:
        if name not in unknown:
            unknown.append(name)
    for part in getattr(body, "messages", [ChatMessage(role="user", content=[])])[0].content or ():
        for name in () if isinstance(part, str) else part.model_extra or {}:
            if name not in unknown:
                unknown.append(name)
    return unknown


@pytest.mark.parametrize("name", ["/v1/chat/completions, unknown names", "unknown fields of a part"])
def test_work_budget_detects_name_lookups_by_list_scan(
    app: Application, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(parameters, "unknown_parameters", _unknown_by_scanning)
    endpoint, make = SHAPES[name]
    for _ in range(3):  # a busy machine may slow the work on the small body, which hides the growth
        work = app.work(endpoint.path, make, attempts=ONCE)
        if not work.is_within_budget and work.growth > MAX_GROWTH:
            return
    pytest.fail(f"not found: {work}")


def test_work_budget_detects_parameter_checks_repeated_per_output(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_params = preparation.sampling_params

    def for_each(body: GenerationBody, defaults: Mapping[str, Any]) -> SamplingParams:
        return [make_params(body, defaults) for _ in range(body.n or 1)].pop()

    endpoint, make = SHAPES["allowed tokens and n"]
    # The smallest of several counts: a garbage collection in a worker with many objects takes longer than the request.
    mended = min((app.work(endpoint.path, make, attempts=ONCE) for _ in range(3)), key=lambda work: work.rounds[1])
    monkeypatch.setattr(preparation, "sampling_params", for_each)
    work = app.work(endpoint.path, make, attempts=ONCE)
    assert work.rounds[1] > MANY_TIMES * mended.rounds[1], (work, mended)
