"""Whole fleets of small size."""

from functools import cache

import pytest

from tests.support.sweeps import sweep
from tools.benchmarks.simulate_scheduler import MIXED, make_arrivals, make_config, simulate
from tools.benchmarks.step_time_model import StepTimeModel
from tools.simulate.routing import POLICIES, RouterConfig
from tools.simulate.scenario import Loss, SimulatedFleet, SimulatedScenario
from tools.simulate.store import StoreConfig
from tools.simulate.summary import summarize
from tools.simulate.traffic import Chat, TrafficConfig, Turn, make_chats

MODEL = StepTimeModel(per_step=0.18, per_row=0.0063, per_prefill_pair=2.5e-6, per_decode=0.0043)
STORE = StoreConfig(bandwidth=2e8, block_bytes=16 * 46_080)
LOSS = Loss(num_replicas=2, at=100.0, noticed_after=50.0, seconds=100.0)


@cache
def run(num_replicas=4, policy="cache_aware", seed=0, chats_per_second=0.15, pool_blocks=1024, **changes):
    """Run a fleet and return it. All its requests count."""
    values = {"warm_up": 0.0, "period": 300.0, "scheduler": make_config(max_num_partial_prefills=4)}
    scenario = SimulatedScenario(
        num_replicas=num_replicas, policy=policy, pool_blocks=pool_blocks, **(values | changes)
    )
    traffic = TrafficConfig(num_users=200, chats_per_day=86_400 * chats_per_second / 200)
    fleet = SimulatedFleet(scenario, MODEL, make_chats(traffic, scenario.period, seed))
    fleet.run()
    for replica in fleet.replicas:
        replica.scheduler.check_integrity()
        assert not replica.scheduler.has_requests
    return fleet


def fates(fleet):
    return [(s.asked_at, s.first_token_at, s.ended_at, s.replica, s.outcome, s.num_cached_tokens) for s in fleet.served]


def check_conservation(fleet):
    """Check that every request ended once and in order, and that caches gave no more tokens than possible."""
    assert len(fleet.served) > 50 and len({s.request_id for s in fleet.served}) == len(fleet.served)
    for served in fleet.served:
        assert served.outcome in ("finished", "broken")
        assert 0 <= served.asked_at < served.first_token_at <= served.ended_at
        assert 0 <= served.num_external_tokens <= served.num_cached_tokens < served.num_prompt_tokens
    summary = summarize([fleet])
    assert 0 < summary.hit_rate <= summary.possible < 1
    assert summary.num_requests == len(fleet.served)
    # Turns come in order, and a broken turn is repeated.
    by_chat = {}
    for served in fleet.served:
        by_chat.setdefault(served.chat.chat_id, []).append(served)
    for of_chat in by_chat.values():
        expected = 0
        for served in of_chat:
            assert served.turn == expected
            expected += served.outcome == "finished"
    return summary


@pytest.mark.parametrize("policy", sweep(POLICIES, lambda policy: policy in ("cache_aware", "session")))
def test_every_request_ends_once_and_hits_stay_within_possible_hits(policy):
    assert check_conservation(run(policy=policy)).num_broken == 0


@pytest.mark.parametrize("policy", sweep(POLICIES, lambda policy: policy in ("cache_aware", "session")))
def test_every_request_ends_once_with_a_store_and_lost_replicas(policy):
    fleet = run(policy=policy, store=STORE, loss=LOSS)
    assert check_conservation(fleet).num_broken > 0
    assert any(s.num_retries for s in fleet.served)
    # During the outage, no request ended on these replicas.
    away = (LOSS.at, LOSS.at + LOSS.seconds)
    assert not [
        s for s in fleet.served if s.outcome == "finished" and s.replica < 2 and away[0] < s.ended_at <= away[1]
    ]
    assert [s for s in fleet.served if s.replica < 2 and s.asked_at > away[1]]  # both get requests again


def test_one_replica_gives_the_first_token_times_of_the_plain_simulator():
    output = 20
    config = make_config(max_num_partial_prefills=4)
    arrivals, _ = make_arrivals(MIXED, 150, output, MODEL, 0.8)
    expected = simulate(arrivals, output, MODEL, config)
    chats = [
        Chat(number, number, arrival.at, 0, 0, (Turn(arrival.num_prompt_tokens, output, 1.0),))
        for number, arrival in enumerate(arrivals)
    ]
    scenario = SimulatedScenario(
        num_replicas=1, policy="cache_aware", warm_up=0.0, period=1e9, scheduler=config, pool_blocks=16_384
    )
    served = SimulatedFleet(scenario, MODEL, chats).run()
    assert [s.first_token_at - s.asked_at for s in served] == expected.ttfts


def test_a_run_depends_on_its_seed_alone():
    first, again, other = (fates(run.__wrapped__(store=STORE, loss=LOSS, seed=seed)) for seed in (1, 1, 2))
    assert first == again and first != other


def test_hit_rates_rise_from_round_robin_to_session_to_cache_aware():
    hits = {policy: summarize([run(policy=policy)]).hit_rate for policy in POLICIES}
    assert hits["round_robin"] < hits["session"] < hits["cache_aware"]
    assert hits["cache_aware"] <= summarize([run(policy="exact")]).possible


def test_one_replica_with_a_large_pool_gets_nearly_every_possible_hit():
    summary = summarize([run(num_replicas=1, chats_per_second=0.03, pool_blocks=16_384)])
    assert summary.possible - 0.01 <= summary.hit_rate <= summary.possible


def test_a_store_brings_other_replicas_blocks_and_a_slow_one_fewer():
    without = summarize([run(policy="round_robin")])
    fast = summarize([run(policy="round_robin", store=STORE)])
    slow = summarize([run(policy="round_robin", store=StoreConfig(bandwidth=3e5, block_bytes=16 * 46_080))])
    assert without.from_store == 0 < slow.from_store < fast.from_store
    assert without.hit_rate < fast.hit_rate
    assert fast.store_bytes_per_second[0] > 0 and fast.store_bytes_per_second[1] > 0


def test_a_loss_that_is_noticed_later_makes_more_requests_wait():
    waits = []
    for noticed_after in (1.0, 100.0):
        loss = Loss(num_replicas=1, at=100.0, noticed_after=noticed_after, seconds=120.0)
        waits.append(sum(s.num_retries for s in run(policy="round_robin", loss=loss).served))
    assert waits[0] < waits[1]


def test_the_overload_guard_balances_load_after_the_next_router_poll():
    """All requests share one system prompt, so one replica would get all of them without the guard."""
    chats = [Chat(number, number, 0.5 * number, 0, 800, (Turn(300, 200, 1.0),)) for number in range(120)]
    shares = []
    for guarded in (True, False):
        router = RouterConfig(guarded=guarded, balance_capped=False)
        scenario = SimulatedScenario(
            num_replicas=2, policy="cache_aware", warm_up=0.0, period=300.0, pool_blocks=1024, router=router,
            scheduler=make_config(max_num_partial_prefills=4),
        )  # fmt: skip
        served = SimulatedFleet(scenario, MODEL, chats).run()
        assert all(one.outcome == "finished" for one in served)
        first = served[0].replica
        assert all(one.replica == first for one in served if one.asked_at < 10)  # the router has not polled yet
        shares.append(sum(one.replica == first for one in served) / len(served))
    assert 0.3 < shares[0] < 0.7 and shares[1] > 0.8


def test_the_least_loaded_replica_is_used_if_all_are_overloaded():
    router = RouterConfig(overload_usage=1e-9, poll_interval=1.0)
    summary = check_conservation(run(policy="session", router=router))
    assert summary.busiest < summarize([run(policy="session", router=RouterConfig(guarded=False))]).busiest
