"""Tests of the proposer of a draft head: lookups where they match and have been right, the head otherwise."""

from __future__ import annotations

import pytest

from metal_engine.request import Request
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.speculation.draft_costs import HeadCosts, HeadProposer
from metal_engine.scheduling.speculation.proposals import Proposals, make_costs, make_proposer
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.step import UNKNOWN_DRAFT, Drafting

CONFIG = SpeculativeConfig(method="mtp", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=3)
REPEATING, NEW = [1, 2, 3, 4, 5, 6, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]
OF_HEAD = [UNKNOWN_DRAFT] * 3


def proposer_for(tokens: list[int]) -> tuple[HeadProposer, Request]:
    proposer = make_proposer(CONFIG)
    assert isinstance(proposer, HeadProposer)
    return proposer, Request("a", tokens, SamplingParams(max_tokens=50), max_tokens=50)


def propose(proposer: HeadProposer, request: Request) -> list[int]:
    proposer.begin_step()
    return proposer.propose(request, 3)


def test_prompt_lookup_drafts_take_precedence_over_the_draft_head() -> None:
    assert propose(*proposer_for(REPEATING)) == [4, 5, 6] and propose(*proposer_for(NEW)) == OF_HEAD


def test_the_source_that_was_right_more_often_is_used() -> None:
    proposer, request = proposer_for(REPEATING)
    lookups, head = proposer.acceptance.lookups, proposer.acceptance.computed
    assert lookups.of("a") > head.of("a"), "lookups are tried first, and a head is expected to be wrong"
    for _ in range(2):
        lookups.tried("a", 3, 0)
    assert propose(proposer, request) == [4, 5, 6]
    head.tried("a", 3, 3)
    assert propose(proposer, request) == OF_HEAD
    lookups.tried("a", 3, 3)
    head.tried("a", 3, 0)
    assert propose(proposer, request) == [4, 5, 6]
    lookups.tried("a", 1, 0)
    lookups.tried("a", 1, 0)
    assert propose(proposer, request) == OF_HEAD
    proposer.acceptance.forget("a")
    assert propose(proposer, request) == [4, 5, 6]


def test_results_count_for_their_source() -> None:
    proposer, request = proposer_for(REPEATING)
    proposals = Proposals(CONFIG, proposer, HeadCosts())
    lookups, head = proposer.acceptance.lookups.of("a"), proposer.acceptance.computed.of("a")
    proposals.record_result(request, OF_HEAD, 3, 0)
    assert proposer.acceptance.lookups.of("a") == lookups and proposer.acceptance.computed.of("a") < head
    head = proposer.acceptance.computed.of("a")
    proposals.record_result(request, [4, 5, 6], 3, 3)
    assert proposer.acceptance.lookups.of("a") > lookups and proposer.acceptance.computed.of("a") == head


def test_lookups_are_proposed_though_the_head_does_not_pay() -> None:
    """Lookups cost no time before a step, so they pay at a lower acceptance than the head's drafts."""
    costs = HeadCosts()
    for _ in range(2):
        costs.measured(1.0, Drafting({"a": [1]}, num_forwards=1, forward_seconds=0.5, seconds=0.5), ("a",))
    times = [1.0, 1.1, 1.2, 1.3]
    for tokens, proposed in ((REPEATING, [4, 5, 6]), (NEW, None)):
        proposer, request = proposer_for(tokens)
        proposer.acceptance.lookups.tried("a", 1, 0)
        assert 0.3 < proposer.acceptance.lookups.of("a") < 0.6
        request.num_output_placeholders = 1
        proposals = Proposals(CONFIG, proposer, costs)
        proposals.begin_step()
        drafts, others = proposals.select([request], 1, times)
        assert drafts == ({} if proposed is None else {request: proposed}) and others == (
            [request] if not drafts else []
        )


def test_a_draft_head_has_no_catch_up_cost() -> None:
    costs = make_costs(CONFIG)
    assert isinstance(costs, HeadCosts) and not costs.has_prefill
    request = Request("a", [1] * 1000, SamplingParams(max_tokens=50), max_tokens=50)
    assert costs.catching_up_seconds(request) == 0 and not costs.are_known
    for _ in range(2):
        costs.measured(1.0, Drafting({"a": [1]}, num_forwards=1, forward_seconds=0.01, seconds=0.01), ("a",))
    assert costs.forward_seconds == pytest.approx(0.01) and costs.may_probe(request)
    costs.measured(1.0, None, (), probe_seconds=1.0)
    assert not costs.may_probe(request)


def test_a_probe_without_a_carried_output_is_repeated_once() -> None:
    costs, request = HeadCosts(), Request("a", [1, 2, 3], SamplingParams(max_tokens=50), max_tokens=50)
    costs.measured(1.0, Drafting({"a": [1]}, num_forwards=1, forward_seconds=1.0, seconds=1.0), ("a",))
    costs.measured(1.0, Drafting({"a": []}), ("a",), probe_seconds=1.0)
    assert costs.may_probe(request)
    costs.measured(1.0, Drafting({"a": []}), ("a",), probe_seconds=1.0)
    assert not costs.may_probe(request)
