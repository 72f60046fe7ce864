"""Tests of each sampling parameter with the whole engine on a tiny model, against mlx-lm's logits and NumPy."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from metal_engine.engine.token_rules_maker import TokenRulesMaker
from metal_engine.errors import ParameterError
from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.runner.test_sampler import assert_distributed, reference_probs
from tests.support.tiny_engine import log_softmax, reference_logits, run_all, tiny_engine, tiny_reference, token_ids
from tools.fixtures.fake_engine import EOS, VOCAB_SIZE, byte_ids

PROMPT = byte_ids("the thing in the string")


def edited(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Return logits [V] with the edits that the documentation describes, token by token."""
    logits = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(logits)):
            if token not in params.allowed_token_ids:
                logits[token] = -np.inf
    if len(output) < params.min_tokens:
        for token in {EOS, *params.stop_token_ids}:
            logits[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits


CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.7, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {5: 4.0, 97: -100.0, 200: 3.5}},
    {"allowed_token_ids": (3, 9, 27, 81, 243)},
    {"min_tokens": 12, "stop_token_ids": (3, 100), "logit_bias": {EOS: 8.0, 3: 8.0, 100: 8.0}},
    {"allowed_token_ids": range(90, 130), "repetition_penalty": 1.3, "logit_bias": {91: 2, 95: -3}},
]
CUTS: list[dict[str, Any]] = [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "temperature": 1.5}]
# The full test run uses all pairs. `make test` runs A_FEW: indices of controls of each kind and of their cuts.
A_FEW = ((0, 0), (3, 3), (5, 1), (6, 2), (8, 0))
CONTROLS_AND_CUTS = [
    pytest.param(
        control,
        cut,
        id=f"{'-'.join(cut) or 'all'}-{'-'.join(control)}",
        marks=[] if (i, j) in A_FEW else [pytest.mark.full],
    )
    for i, control in enumerate(CONTROLS)
    for j, cut in enumerate(CUTS)
]


@cache
def plain_tokens() -> list[int]:
    return token_ids(run_all(tiny_engine(), [(PROMPT, SamplingParams(temperature=0, max_tokens=14))])[0])


@pytest.mark.parametrize(
    "control",
    [
        pytest.param(control, id="-".join(control), marks=[] if i in dict(A_FEW) else [pytest.mark.full])
        for i, control in enumerate(CONTROLS)
    ],
)
def test_greedy_follows_the_edited_logits(control: dict[str, Any]) -> None:
    """Each greedy token is the largest of mlx-lm's logits with the documented edits, alone and in a batch."""
    params = SamplingParams(temperature=0, max_tokens=14, **control)
    company = [(byte_ids("another one"), SamplingParams(seed=1, max_tokens=20))] * 2
    company += [(byte_ids("third"), SamplingParams(temperature=0, max_tokens=9, presence_penalty=1))]
    alone = token_ids(run_all(tiny_engine(), [(PROMPT, params)])[0])
    for ahead in (False, True):
        assert token_ids(run_all(tiny_engine(ahead=ahead), [*company, (PROMPT, params)])[-1]) == alone
    model = tiny_reference()
    for i, token in enumerate(alone):
        logits = edited(reference_logits(model, PROMPT + alone[:i])[-1], params, PROMPT, alone[:i])
        assert logits[token] >= logits.max() - 1e-3, f"token {i}"
    assert alone != plain_tokens(), "the control does nothing here"


@pytest.mark.parametrize(("control", "cut"), CONTROLS_AND_CUTS)
def test_frequencies_of_the_second_token(control: dict[str, Any], cut: dict[str, Any]) -> None:
    """Chi-square test over many seeds. The first token is forced, so that the output has a token to penalize."""
    first = 97
    model = tiny_reference()
    engine = tiny_engine(max_num_seqs=512, num_blocks=2048, max_num_batched_tokens=512)
    controls = {**control, **cut}
    if "min_tokens" in controls:
        controls["min_tokens"] = 2
    # The request resumes with one output token, as after preemption, so no other step runs before the tested step.
    prompt = [1, 2, first]
    tokens = second_tokens(engine, prompt, first, controls, 1500)
    params = SamplingParams(seed=0, **controls)
    logits = edited(reference_logits(model, [*prompt, first])[-1], params, prompt, [first])
    probs, near = reference_probs(logits.astype(np.float32), params)
    assert not near.any(), "choose other limits"
    assert_distributed(tokens, probs)


def second_tokens(engine: Any, prompt: list[int], first: int, controls: dict[str, Any], num: int) -> np.ndarray:
    """Return the second token of ``num`` outputs with different seeds, all of which start with ``first``."""
    ids = [str(i) for i in range(num)]
    for i, request_id in enumerate(ids):
        params = SamplingParams(seed=i, max_tokens=2, ignore_eos=False, **controls)
        engine.add_request(request_id, engine.prepare(prompt, params))
    for request in list(engine.scheduler.requests.values()):
        request.token_ids.append(first)
    tokens: dict[str, int] = {}
    while engine.has_requests:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] = output.token_ids[0]
    return np.array([tokens[i] for i in ids])


# --- log probabilities --------------------------------------------------------------------------------------


def check_logprobs(outputs: list[RequestOutput], prompt: list[int], num_top: int) -> None:
    tokens = token_ids(outputs)
    found = [entry for output in outputs for entry in output.logprobs or ()]
    assert [entry.token_id for entry in found] == tokens
    logits = reference_logits(tiny_reference(), prompt + tokens[:-1])[len(prompt) - 1 :]
    for entry, row in zip(found, log_softmax(logits), strict=True):
        check_entry(entry, row, num_top)


def check_entry(entry: Any, row: np.ndarray, num_top: int) -> None:
    assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
    chosen = row[entry.token_id]
    assert (row > chosen + 1e-4).sum() < entry.rank <= (row >= chosen - 1e-4).sum()
    assert len(entry.top) == num_top
    values = [logprob for _, logprob in entry.top]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(np.sort(row)[::-1][:num_top].tolist(), abs=1e-4)
    assert [row[i] for i, _ in entry.top] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_logprobs(ahead: bool) -> None:
    """Log probabilities are of the model's own distribution, regardless of edits of the logits before sampling."""
    requests = [
        (PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)),
        (byte_ids("other"), SamplingParams(seed=3, max_tokens=9, ignore_eos=True)),
        (byte_ids("in"), SamplingParams(seed=4, max_tokens=9, ignore_eos=True, logprobs=0)),
        (
            byte_ids("third"),
            SamplingParams(
                seed=1, max_tokens=15, logprobs=20, ignore_eos=True, presence_penalty=1, temperature=3, top_k=9
            ),
        ),
    ]
    outputs = run_all(tiny_engine(ahead=ahead), requests)
    assert all(output.logprobs is None and output.text_logprobs is None for output in outputs[1])
    for i in (0, 2, 3):
        check_logprobs(outputs[i], requests[i][0], requests[i][1].logprobs or 0)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 12}, {"ahead": True, "max_num_batched_tokens": 16}],
    ids=str,
)
def test_prompt_logprobs(config: dict[str, Any]) -> None:
    """Prompts are computed whole, in chunks, with preemption and in a batch. Cached prefixes are not used."""
    engine = tiny_engine(**config)
    first = (PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    run_all(engine, [first])
    wanted = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=3)
    outputs = run_all(engine, [first, (PROMPT, wanted), (byte_ids("abc"), first[1]), (PROMPT[:1], wanted)])
    assert outputs[0][0].num_cached_tokens > 0 and outputs[0][0].prompt_logprobs is None
    assert outputs[1][0].num_cached_tokens == 0
    assert token_ids(outputs[1]) == token_ids(outputs[0])
    assert [output.prompt_logprobs for output in outputs[1][1:]] == [None] * (len(outputs[1]) - 1)
    found = outputs[1][0].prompt_logprobs
    assert found is not None and len(found) == len(PROMPT) and found[0] is None
    rows = log_softmax(reference_logits(tiny_reference(), PROMPT[:-1]))
    for token, entry, row in zip(PROMPT[1:], found[1:], rows, strict=True):
        assert entry is not None and entry.token_id == token
        check_entry(entry, row, 3)
    assert outputs[3][0].prompt_logprobs == [None]


# --- words, lengths, seeds ----------------------------------------------------------------------------------


def test_bad_words_of_one_and_of_several_tokens() -> None:
    engine = tiny_engine()
    bias = {97: 100.0, 98: 99.0}  # with a penalty, the output alternates between a and b
    free = SamplingParams(temperature=0, max_tokens=8, logit_bias=bias, presence_penalty=2)
    (outputs,) = run_all(engine, [(PROMPT, free)])
    assert "ab" in "".join(output.text for output in outputs)
    banned = SamplingParams(temperature=0, max_tokens=8, logit_bias=bias, presence_penalty=2, bad_words=["ab"])
    for ahead in (False, True):
        (outputs,) = run_all(tiny_engine(ahead=ahead), [(PROMPT, banned)])
        assert "ab" not in "".join(output.text for output in outputs)
        assert "a" in "".join(output.text for output in outputs)
    single = SamplingParams(temperature=0, max_tokens=8, logit_bias=bias, bad_words=["a"])
    (outputs,) = run_all(engine, [(PROMPT, single)])
    assert set(token_ids(outputs)) == {98}


def test_a_request_that_excludes_every_token_fails_alone() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[97], bad_words=["aa"])
    fine = SamplingParams(temperature=0, max_tokens=5)
    failed, others = run_all(tiny_engine(), [(PROMPT, params), (PROMPT, fine)])
    assert [output.finish_reason for output in failed] == [None, "error"]
    assert "leave no token" in (failed[1].error or "") and failed[1].caused_by_request
    assert others[-1].finish_reason in ("length", "stop")


def test_min_tokens_hold_back_stop_strings() -> None:
    params = {"temperature": 0, "max_tokens": 12, "logit_bias": {97: 100.0}, "stop": "aa"}
    (outputs,) = run_all(tiny_engine(), [(PROMPT, SamplingParams(**params))])
    assert ("".join(output.text for output in outputs), len(token_ids(outputs))) == ("", 2)
    (outputs,) = run_all(tiny_engine(), [(PROMPT, SamplingParams(**params, min_tokens=7))])
    # The stop string may begin within the first 7 tokens.
    assert ("".join(output.text for output in outputs), len(token_ids(outputs))) == ("a" * 6, 8)


def test_stop_string_in_the_output() -> None:
    params = {"temperature": 0, "max_tokens": 12, "logit_bias": {97: 100.0}, "include_stop_str_in_output": True}
    (outputs,) = run_all(tiny_engine(), [(PROMPT, SamplingParams(**params, stop="aaa"))])
    assert "".join(output.text for output in outputs) == "aaa"
    (outputs,) = run_all(tiny_engine(), [(PROMPT, SamplingParams(**params, stop_token_ids=[97]))])
    assert "".join(output.text for output in outputs) == "a"


def test_text_logprobs_go_with_the_text() -> None:
    """Tokens of a stop string are not reported.

    Tokens held back because of a possible stop string are reported with their text.
    """
    params = SamplingParams(
        temperature=0, max_tokens=12, logit_bias={97: 100.0}, stop="aaaab", logprobs=0, stop_token_ids=[98]
    )
    (outputs,) = run_all(tiny_engine(), [(PROMPT, params)])
    told = [entry for output in outputs for entry in output.text_logprobs or ()]
    assert len(told) == len("".join(output.text for output in outputs)) == 12
    assert outputs[0].text_logprobs == []
    cut = SamplingParams(temperature=0, max_tokens=12, logit_bias={97: 100.0}, stop="aaa", logprobs=0)
    (outputs,) = run_all(tiny_engine(), [(PROMPT, cut)])
    assert sum(len(output.logprobs or ()) for output in outputs) == 3
    assert [entry for output in outputs for entry in output.text_logprobs or ()] == []


def test_truncated_prompts() -> None:
    engine = tiny_engine()
    prompt = list(range(100))

    def truncated(prompt: list[int], limit: int, max_tokens: int = 1) -> list[int]:
        params = SamplingParams(truncate_prompt_tokens=limit, max_tokens=max_tokens)
        return engine.prepare(prompt, params).prompt_token_ids

    assert truncated(prompt, 7) == prompt[-7:] and truncated(prompt, 200) == prompt
    assert truncated(prompt * 6, -1, max_tokens=12) == (prompt * 6)[-500:]
    with pytest.raises(ParameterError, match="maximum context length") as caught:
        truncated(prompt, 10_000)
    assert caught.value.name == "truncate_prompt_tokens"


def test_vocabulary_is_checked() -> None:
    engine = tiny_engine()
    for params in (SamplingParams(logit_bias={VOCAB_SIZE: 1}), SamplingParams(allowed_token_ids=[1, VOCAB_SIZE])):
        with pytest.raises(ParameterError, match="outside the vocabulary"):
            engine.prepare(PROMPT, params)
    for prompt in ([-1], [VOCAB_SIZE]):
        with pytest.raises(ParameterError, match="outside the vocabulary"):
            engine.prepare(prompt, SamplingParams())
    for token_id in (2**31, 2**63, 10**400):
        with pytest.raises(ParameterError, match="outside the vocabulary") as caught:
            engine.prepare(PROMPT, SamplingParams(allowed_token_ids=[1, token_id]))
        assert caught.value.name == "allowed_token_ids"
    for name in ("allowed_token_ids", "stop_token_ids"):
        with pytest.raises(ParameterError, match="as many as the vocabulary") as caught:
            engine.prepare(PROMPT, SamplingParams(**{name: [1] * (VOCAB_SIZE + 1)}))
        assert caught.value.name == name


def test_bad_words_ending_in_a_token_beyond_the_logits_are_ignored() -> None:
    """A tokenizer may have more tokens than the model has logits."""
    rules = TokenRulesMaker(tiny_engine().tokenizer, vocab_size=98)
    made = rules.rules_for(SamplingParams(bad_words=["b", "ac", "ca", "aa"]))
    assert {*made.bad_words} == {(97,), (99,)} and made.bad_words[99,] == [97] and made.bad_words[97,] == [97]
    rules.close()


def test_bad_words_that_leave_no_token() -> None:
    rules = TokenRulesMaker(tiny_engine().tokenizer, vocab_size=9)
    with pytest.raises(ParameterError, match="leaves no token") as caught:
        rules.rules_for(SamplingParams(bad_words=[chr(i) for i in range(9)]))
    assert caught.value.name == "bad_words"
    rules.close()


# --- structured output --------------------------------------------------------------------------------------

STRUCTURED = {
    "regex": (StructuredOutputsParams(regex="[0-9]{3}-(é|ß)+x"), r"[0-9]{3}-(é|ß)+x"),
    "choice": (StructuredOutputsParams(choice=('say "hi"', "日本", "a\nb")), '(say "hi"|日本|a\nb)'),
    "lark": (StructuredOutputsParams(grammar='start: "<" B ">"\nB: /[a-c]{2,5}/'), "<[a-c]{2,5}>"),
    "gbnf": (StructuredOutputsParams(grammar='root ::= "<" [a-c] [a-c] ">"'), "<[a-c][a-c]>"),
}


@cache
def structured_requests() -> tuple[list[tuple[list[int], SamplingParams]], list[list[int]]]:
    """Return requests with grammars and one without, and the tokens of each alone."""
    requests = [
        (byte_ids(f"prompt {i} {name}"), SamplingParams(seed=i, max_tokens=60, structured_outputs=params))
        for i, (name, (params, _)) in enumerate(list(STRUCTURED.items()) * 2)
    ]
    requests.append((PROMPT, SamplingParams(seed=99, max_tokens=60, ignore_eos=True)))
    return requests, [token_ids(run_all(tiny_engine(), [request])[0]) for request in requests]


@pytest.mark.parametrize("ahead", [False, True])
def test_structured_output_beside_other_requests(ahead: bool) -> None:
    """A model with random weights cannot follow a grammar, so a match shows that masks work, also after preemption."""
    requests, alone = structured_requests()
    engine = tiny_engine(ahead=ahead, num_blocks=20, max_num_batched_tokens=32)
    together = run_all(engine, requests)
    assert engine.stats.num_preemptions
    assert [token_ids(outputs) for outputs in together] == alone
    num_complete = 0
    for outputs, (_, pattern) in zip(together[:-1], list(STRUCTURED.values()) * 2, strict=True):
        text = "".join(output.text for output in outputs)
        if outputs[-1].finish_reason == "stop":
            assert re.fullmatch(pattern, text), text
            num_complete += 1
    assert num_complete >= 6


def test_min_tokens_keep_a_grammar_from_ending() -> None:
    structured = StructuredOutputsParams(regex="a{1,30}")
    for min_tokens in (5, 29, 40):
        params = SamplingParams(
            temperature=0, max_tokens=60, min_tokens=min_tokens, structured_outputs=structured,
            logit_bias={EOS: 50.0},
        )  # fmt: skip
        (outputs,) = run_all(tiny_engine(), [(PROMPT, params)])
        assert outputs[-1].finish_reason == "stop"
        assert "".join(output.text for output in outputs) == "a" * min(min_tokens, 30)


def test_probabilities_within_a_grammar() -> None:
    params = SamplingParams(seed=0, structured_outputs=StructuredOutputsParams(regex="[acegikmoqsuwy]"))
    engine = tiny_engine(max_num_seqs=512, num_blocks=2048, max_num_batched_tokens=512)
    requests = [
        (PROMPT, SamplingParams(seed=i, max_tokens=1, structured_outputs=params.structured_outputs))
        for i in range(1500)
    ]
    tokens = np.array([token_ids(outputs)[0] for outputs in run_all(engine, requests)])
    logits = reference_logits(tiny_reference(), PROMPT)[-1]
    excluded = [token for token in range(VOCAB_SIZE) if token not in byte_ids("acegikmoqsuwy")]
    logits[excluded] = -np.inf
    assert_distributed(tokens, np.exp(log_softmax(logits)))
    assert math.isclose(np.exp(log_softmax(logits)).sum(), 1.0)
