"""Tests of drafts by prompt lookup, against a scan of the whole sequence at every step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_engine.request import Request, RequestOptions
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.speculation import ngram
from metal_engine.scheduling.speculation.ngram import MAX_CANDIDATES, NgramIndex, NgramProposer, PredictedText
from tests.support.speculation import speculative_config


def naive_place(tokens: list[int], shortest: int, longest: int) -> int | None:
    """Return the latest place with the longest match for the last tokens, by a scan for each length."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if length <= len(tokens) and tokens[place - length : place] == tokens[-length:]:
                return place
    return None


def naive_drafts(tokens: list[int], shortest: int, longest: int, num_tokens: int) -> list[int]:
    """Return the tokens that followed the match, continued as if they had been generated."""
    place = naive_place(tokens, shortest, longest)
    if place is None:
        return []
    copied = list(tokens)
    for i in range(num_tokens):
        copied.append(copied[place + i])
    return copied[len(tokens) :]


@given(
    data=st.data(),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    num_tokens=st.integers(1, 8),
    alphabet=st.integers(1, 6),
)
def test_ngram_drafts_equal_drafts_from_a_full_scan(
    data: st.DataObject, shortest: int, more: int, num_tokens: int, alphabet: int
) -> None:
    # Short enough that no chain is longer than MAX_CANDIDATES.
    tokens = data.draw(st.lists(st.integers(0, alphabet), max_size=MAX_CANDIDATES + shortest), label="tokens")
    index = NgramIndex(shortest, shortest + more, 64)
    known: list[int] = []
    while True:
        index.extend(known, len(known))
        assert index.num_missing(known) == 0
        assert index.find(known, known) == naive_place(known, shortest, shortest + more)
        assert index.propose(known, num_tokens) == naive_drafts(known, shortest, shortest + more, num_tokens)
        if len(known) == len(tokens):
            break
        known += tokens[len(known) : len(known) + data.draw(st.integers(1, 5), label="tokens of a step")]


def test_ngrams_in_one_hash_bucket_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has a single bucket, so all places form one chain."""
    monkeypatch.setattr(ngram, "_MIN_BUCKETS", 1)
    monkeypatch.setattr(ngram, "_MAX_BUCKETS", 1)
    index = NgramIndex(2, 3, 1)
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    index.extend(tokens, len(tokens))
    assert index.propose(tokens, 3) == [3, 4, 5] and index.propose([*tokens[:-1], 9], 3) == []


class CountedTokens(list):
    """List that counts reads of single tokens."""

    num_reads = 0

    def __getitem__(self, key: object) -> object:
        self.num_reads += 1
        return super().__getitem__(key)  # type: ignore[index]


@pytest.mark.parametrize("period", [1, 3, 100])
def test_a_proposal_costs_the_same_however_long_the_sequence_is(period: int) -> None:
    reads = []
    for length in (5_000, 50_000):
        # The last tokens occur very often, but never after the token before them.
        tokens = CountedTokens([*(i % period for i in range(length)), -1, 0, 1 % period])
        index = NgramIndex(2, 8, length)
        index.extend(tokens, length + 3)
        tokens.num_reads = 0
        index.propose(tokens, 4)
        reads.append(tokens.num_reads)
    assert max(reads) <= 2 * (MAX_CANDIDATES + 1) * 9
    assert reads[1] <= reads[0] + 2


def request_with(prompt: list[int], request_id: str = "a") -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens=50), max_tokens=50)


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "TOKENS_PER_STEP", 100)
    proposer = NgramProposer(speculative_config())
    requests = [request_with([*range(150)] * 2 + [7, 8], str(i)) for i in range(2)]
    proposed = []
    for _ in range(8):
        proposer.begin_step()
        proposed.append([proposer.propose(request, 3) for request in requests])
    # 300 places for each request, in sequence.
    assert [len(first) for first, _ in proposed] == [0, 0, 3, 3, 3, 3, 3, 3]
    assert [len(second) for _, second in proposed] == [0, 0, 0, 0, 0, 3, 3, 3]
    assert proposed[-1] == [[9, 10, 11]] * 2


def test_ngram_index_includes_tokens_appended_between_steps() -> None:
    proposer = NgramProposer(speculative_config(longest=3, shortest=2))
    request = request_with([1, 2, 3, 4])
    proposer.begin_step()
    assert proposer.propose(request, 4) == []
    request.token_ids += [9, 2, 3]
    proposer.begin_step()
    assert proposer.propose(request, 3) == [4, 9, 2]
    request.token_ids += [4, 9]
    assert proposer.propose(request, 4) == [2, 3, 4, 9]
    proposer.forget("a")
    assert not proposer._indexes


def test_ngram_index_grows_and_uses_at_most_12_bytes_per_token() -> None:
    proposer = NgramProposer(speculative_config())
    request = request_with([i * 7919 % 1000 for i in range(700)])
    sizes = []
    for _ in range(60):
        request.token_ids += [len(request.token_ids) * 7919 % 1000] * 100
        proposer.begin_step()
        proposer.propose(request, 3)
        index = proposer._indexes["a"]
        assert index.num_missing(request.token_ids) == 0
        sizes.append(len(index._heads))
        assert 4 * (len(index._heads) + len(index._earlier)) <= 12 * request.num_tokens
    assert sizes[0] == 1024 and sizes[-1] >= 4096 and len(set(sizes)) <= 4


def test_predicted_text_drafts_stop_at_a_mismatch_and_resume_later() -> None:
    prediction = PredictedText(range(10, 30), speculative_config(shortest=2, longest=4), num_prompt_tokens=3)
    prediction.index(100)
    tokens = [1, 2, 3]
    assert prediction.propose(tokens, 2) == [10, 11]
    tokens += [10, 11, 12]
    assert prediction.propose(tokens, 3) == [13, 14, 15]
    tokens += [13, 99]  # a token that differs from the text
    assert prediction.propose(tokens, 3) == []
    tokens += [15, 16]  # the next tokens of the text
    assert prediction.propose(tokens, 3) == [17, 18, 19]
    tokens += [17, 18, 24]
    assert prediction.propose(tokens, 3) == []
    tokens += [25, 26, 27, 28]  # the output omits a passage of the text
    assert prediction.propose(tokens, 3) == [29]
    tokens += [29]
    assert prediction.propose(tokens, 3) == []


def test_a_long_prediction_is_indexed_over_several_steps() -> None:
    prediction = PredictedText(range(50), speculative_config(shortest=2, longest=2), num_prompt_tokens=1)
    assert [prediction.index(20) for _ in range(4)] == [20, 20, 8, 0]


def test_drafts_are_predicted_or_repeated_and_the_former_are_counted() -> None:
    proposer = NgramProposer(speculative_config(shortest=2, longest=3))
    options = RequestOptions(predicted_token_ids=(20, 21, 22, 23, 24))
    request = Request("a", [5, 6, 7, 8, 5, 6], SamplingParams(max_tokens=40), max_tokens=40, options=options)

    def propose() -> list[int]:
        proposer.begin_step()
        return proposer.propose(request, 3)

    assert propose() == [20, 21, 22]
    proposer.record_result(request, 3, 2)
    request.token_ids += [20, 21, 5, 6]
    assert propose() == [20, 21, 5]  # the latest place
    proposer.record_result(request, 3, 1)
    assert request.num_predicted_tokens == (2, 1)
    request.token_ids += [21, 22]
    assert propose() == [23, 24]
    proposer.record_result(request, 1, 1)
    assert request.num_predicted_tokens == (3, 1)
    proposer.forget("a")
    assert not proposer._indexes and not proposer._predicted_texts
