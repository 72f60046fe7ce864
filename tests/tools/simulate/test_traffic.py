import statistics

import pytest

from tools.simulate.traffic import TrafficConfig, make_chats

CONFIG = TrafficConfig(num_users=2000, chats_per_day=200.0)


@pytest.fixture(scope="module")
def chats():
    return make_chats(CONFIG, 1000.0, seed=3)


def test_traffic_depends_on_the_seed_alone(chats):
    assert make_chats(CONFIG, 1000.0, seed=3) == chats
    assert make_chats(CONFIG, 1000.0, seed=4) != chats


def test_chats_arrive_in_order_at_the_configured_rate(chats):
    times = [chat.at for chat in chats]
    assert times == sorted(times) and times[-1] < 1000.0
    expected = 1000.0 * CONFIG.chats_per_second
    assert abs(len(chats) - expected) < 4 * expected**0.5


def test_lengths_have_the_means_that_are_documented(chats):
    turns = [turn for chat in chats for turn in chat.turns]
    assert statistics.mean(len(chat.turns) for chat in chats) == pytest.approx(2.5, abs=0.2)
    assert statistics.mean(turn.num_message_tokens for turn in turns) == pytest.approx(100, abs=5)
    assert statistics.mean(turn.num_answer_tokens for turn in turns) == pytest.approx(207, abs=8)
    assert statistics.median(turn.pause for turn in turns) == pytest.approx(45, abs=3)
    assert all(200 <= chat.num_system_tokens <= 2000 for chat in chats)
    frequent, second = (sum(chat.system == system for chat in chats) for system in (0, 1))
    assert frequent / second == pytest.approx(2.0, abs=0.35)


def test_prompts_start_with_history_and_share_only_the_system_prompt(chats):
    same = [chat for chat in chats if chat.system == 0][:2]
    prompts = [chat.prompt([], 0) for chat in same]
    shared = same[0].num_system_tokens
    assert prompts[0][:shared] == prompts[1][:shared] and prompts[0][shared] != prompts[1][shared]
    later = next(chat for chat in chats if len(chat.turns) > 1)
    history = [*later.prompt([], 0), 7, 7]
    prompt = later.prompt(history, 1)
    assert prompt[: len(history)] == history
    assert len(prompt) == len(history) + later.turns[1].num_message_tokens
