import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.simulate.test_prefix_tree import chain
from tools.simulate.routing import POLICIES, Ask, RouterConfig, is_overloaded, make_policy, spills


def policy(name, num_replicas=4, num_cached=lambda replica, hashes: 0, **limits):
    return make_policy(name, num_replicas, RouterConfig(**limits), num_cached)


ALL = range(4)
EVEN = [0, 0, 0, 0]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25)
@given(data=st.data())
def test_a_request_goes_to_a_replica_that_is_healthy(name, data):
    chooser = policy(name, balance_abs=data.draw(st.integers(0, 8)))
    for _ in range(data.draw(st.integers(1, 12))):
        healthy = sorted(data.draw(st.sets(st.sampled_from(ALL), min_size=1)))
        loads = data.draw(st.lists(st.integers(0, 20), min_size=4, max_size=4))
        ask = Ask(data.draw(st.integers(0, 5)), chain(*data.draw(st.lists(st.integers(0, 2), max_size=4))))
        assert chooser.choose(ask, healthy, loads) in healthy


def test_round_robin_sends_the_same_number_to_each():
    chooser = policy("round_robin")
    sent = [chooser.choose(Ask(0, ()), ALL, [9, 0, 0, 0]) for _ in range(40)]
    assert [sent.count(replica) for replica in ALL] == [10, 10, 10, 10]


def test_a_user_stays_at_one_replica_and_moves_only_if_that_is_lost():
    chooser = policy("session", 8)
    before = {user: chooser.choose(Ask(user, ()), range(8), [0] * 8) for user in range(2000)}
    assert all(chooser.choose(Ask(user, ()), range(8), [5] * 8) == at for user, at in before.items())
    counts = [list(before.values()).count(replica) for replica in range(8)]
    assert min(counts) > 180 and max(counts) < 320  # 250 expected, within four standard deviations
    after = {user: chooser.choose(Ask(user, ()), range(1, 8), [0] * 8) for user in range(2000)}
    assert all(after[user] == at for user, at in before.items() if at != 0)
    # its users are distributed among the other replicas
    assert len({after[user] for user, at in before.items() if at == 0}) == 7


def test_least_loaded_picks_the_lowest_load_and_rotates_among_equals():
    chooser = policy("least_loaded")
    assert chooser.choose(Ask(0, ()), ALL, [3, 1, 2, 1]) == 1
    assert chooser.choose(Ask(0, ()), ALL, [3, 1, 2, 1]) == 3
    assert chooser.choose(Ask(0, ()), [0, 2], [3, 1, 2, 1]) == 2


def test_cache_aware_routing_keeps_the_replica_of_a_chat_until_overload():
    chooser = policy("cache_aware", balance_abs=3, balance_rel=1.5)
    first = chooser.choose(Ask(0, chain(1, 2)), ALL, EVEN)
    others = [chooser.choose(Ask(1, chain(9, i)), ALL, EVEN) for i in (1,)]
    assert others != [first]
    busy = [4 if replica == first else 0 for replica in ALL]
    assert chooser.choose(Ask(0, chain(1, 2, 3)), ALL, busy) == first
    others = [0 if replica == first else 9 for replica in ALL]
    assert chooser.choose(Ask(0, chain(1, 2, 3)), ALL, others) == first  # changes on other replicas do not matter
    busy = [5 if replica == first else 0 for replica in ALL]
    assert chooser.choose(Ask(0, chain(1, 2, 3, 4)), ALL, busy) != first


def test_too_little_of_a_prompt_in_common_does_not_count():
    chooser = policy("cache_aware", cache_threshold=0.5)
    first = chooser.choose(Ask(0, chain(1, 2)), ALL, EVEN)
    assert chooser.choose(Ask(1, chain(1, 2, 3, 4)), ALL, EVEN) != first  # the match must be more than half
    chooser = policy("cache_aware", cache_threshold=0.5)
    first = chooser.choose(Ask(0, chain(1, 2)), ALL, EVEN)
    assert chooser.choose(Ask(1, chain(1, 2, 3)), ALL, EVEN) == first


def test_exact_routing_asks_the_replicas_and_breaks_ties_by_load():
    cached = {0: 1, 1: 3, 2: 3, 3: 0}
    chooser = policy("exact", num_cached=lambda replica, hashes: cached[replica], balance_abs=3)
    assert chooser.choose(Ask(0, chain(1)), ALL, [0, 3, 2, 0]) == 2
    assert chooser.choose(Ask(0, chain(1)), [0, 3], [0, 3, 2, 0]) == 0
    assert chooser.choose(Ask(0, chain(1)), ALL, [1, 9, 9, 0]) == 3  # too uneven


def test_a_replica_spills_that_is_above_the_mean_by_both_measures():
    config = RouterConfig(balance_abs=10, balance_rel=1.5, balance_capped=False)
    two = range(2)
    assert spills(1, two, [0, 21], config)  # the mean is 10.5
    assert not spills(1, two, [0, 20], config) and not spills(0, two, [0, 21], config)
    assert not spills(1, two, [100, 122], config) and not spills(1, two, [11, 33], config)
    assert spills(1, two, [11, 34], config)
    assert spills(1, two, [0, 21, 99], config)  # the third replica is not healthy
    # A limit below the default's cap holds.
    many, loads = range(100), [3] + [0] * 99
    assert spills(0, many, loads, RouterConfig(balance_abs=2))
    assert not spills(0, many, loads, RouterConfig(balance_abs=64))


@pytest.mark.parametrize(("mean", "margin"), [(1, 4), (4, 4), (9, 6), (100, 50), (1600, 800)])
def test_the_default_balance_limit_is_capped_at_random_load_variation(mean, margin):
    """The cap is two standard deviations, but at least four. At high loads, the relative limit is higher."""
    config = RouterConfig()
    num_others = 1000  # the busy replica hardly changes the mean of this many
    for more, expected in ((margin * 0.9, False), (margin * 1.1 + 1, True)):
        loads = [mean] * num_others + [mean + more]
        assert spills(num_others, range(num_others + 1), loads, config) is expected


def test_the_guard_looks_at_waiting_requests_and_at_the_cache():
    config = RouterConfig()
    assert is_overloaded(8, 0.0, config) and is_overloaded(0, 0.8, config)
    assert not is_overloaded(7, 0.79, config)
    assert not is_overloaded(99, 1.0, RouterConfig(guarded=False))
