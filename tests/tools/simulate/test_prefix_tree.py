from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulate.prefix_tree import PrefixTree


def chain(*tokens: int) -> list[bytes]:
    """Return hashes of prefixes. Each hash represents all tokens up to its position."""
    return [bytes(tokens[: length + 1]) for length in range(len(tokens))]


def test_match_returns_the_longest_prefix_and_the_latest_replica():
    tree = PrefixTree(3, 100)
    tree.insert(chain(1, 2, 3), 0)
    tree.insert(chain(1, 2, 4), 2)
    assert tree.match(chain(1, 2, 3, 9)) == (3, 0) and tree.match(chain(1, 2, 9)) == (2, 2)
    assert tree.match(chain(9)) == (0, None)
    tree.insert(chain(1, 2), 0)
    assert tree.match(chain(1, 2, 9)) == (2, 0)


def test_eviction_drops_the_ends_of_least_recently_used_chains_first():
    tree = PrefixTree(1, 4)
    tree.insert(chain(1, 2), 0)
    tree.insert(chain(1, 3), 0)
    tree.insert(chain(5, 6), 0)
    assert tree.match(chain(1, 2)) == (1, 0)  # the end of the chain was evicted first
    assert tree.match(chain(1, 3)) == (2, 0) and tree.match(chain(5, 6)) == (2, 0)


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 2)), max_size=30)


@settings(max_examples=40)
@given(PROMPTS, st.integers(6, 12))
def test_the_tree_matches_a_list_of_all_inserted_prompts(prompts, max_blocks):
    tree = PrefixTree(3, max_blocks)
    roomy = PrefixTree(3, 1 << 30)
    for tokens, replica in prompts:
        tree.insert(chain(*tokens), replica)
        roomy.insert(chain(*tokens), replica)
        tree.check_integrity()
        roomy.check_integrity()
        assert tree.match(chain(*tokens))[0] == len(tokens)  # the newest chain is always stored whole
    sent = [(chain(*tokens), replica) for tokens, replica in prompts]
    for hashes, _ in sent:
        for length in range(1, len(hashes) + 1):
            last = [replica for other, replica in sent if hashes[length - 1] in other][-1]
            assert roomy.match(hashes[:length]) == (length, last)
    assert sum(tree.num_blocks(replica) for replica in range(3)) <= max_blocks
    assert all(tree.num_blocks(replica) <= roomy.num_blocks(replica) for replica in range(3))
