"""Several tokens of a request per step, over HTTP: text, stops, usage and streams equal those without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from metal_engine.request import RequestOptions
from metal_engine.scheduling.speculation.ngram import NgramProposer
from tests.server.status.test_metrics import scrape, value
from tests.support.serving import MODEL, Served, serve
from tests.support.speculation import propose_from, speculative_config
from tools.fixtures.fake_engine import SPECIAL_TOKENS, VOCAB_SIZE, echo, fake_config, script, tiny_tokenizer

TEXT = "the first part, the second part, the third part: grüße, 東京 and 👩‍👩‍👧‍👦. the first part, the second end"


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serve(echo) as served:
        yield served


@pytest.fixture(scope="module")
def speculating() -> Iterator[Served]:
    config = speculative_config(6, longest=4, shortest=2)
    with serve(echo, config=fake_config(speculative=config)) as served:
        propose_from(served.core, NgramProposer(config))
        yield served


@pytest.mark.parametrize("case", [
    {},
    {"max_tokens": 29},
    {"stop": ["second part"]},
    {"stop": ["nd part, the th", "東"]},
    {"stop": ["ü"], "include_stop_str_in_output": True},
    {"stop_token_ids": [ord(":")]},
    {"stop": ["the"], "min_tokens": 20},
    {"n": 3},
], ids=str)  # fmt: skip
def test_responses_equal_responses_without_speculation(
    plain: Served, speculating: Served, case: dict[str, Any]
) -> None:
    known = {"n", "stop", "max_tokens"}
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 300, **{k: v for k, v in case.items() if k in known}}
    body["extra_body"] = {k: v for k, v in case.items() if k not in known}
    answers, streams = [], []
    for served in (plain, speculating):
        answer = served.client().completions.create(**body)
        answers.append([(c.index, c.text, c.finish_reason) for c in answer.choices])
        assert answer.usage is not None
        answers[-1].append(answer.usage.model_dump())
        texts: dict[int, str] = {}
        for chunk in served.client().completions.create(**body, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        streams.append(texts)
    assert answers[0] == answers[1]
    assert streams[0] == streams[1] == {index: text for index, text, _ in answers[0][:-1]}


def test_steps_planned_ahead_are_counted_apart(plain: Served) -> None:
    """Outputs that repeat earlier text have drafts. Steps of other outputs are planned asynchronously."""
    config = speculative_config(6, longest=4, shortest=2)
    with serve(echo, config=fake_config(speculative=config, async_scheduling=True)) as served:
        propose_from(served.core, NgramProposer(config))
        for text in (TEXT, "nothing: 0123456789"):
            texts = [s.client().completions.create(model=MODEL, prompt=text).choices[0].text for s in (plain, served)]
            assert texts[0] == texts[1]
        served.wait_until_idle()
        found = scrape(served)
        assert found["steps_total"].keys() == {("ahead",), ("after",)} and min(found["steps_total"].values()) > 0
        assert sum(found["steps_total"].values()) == served.runner.num_steps
        assert value(found, "spec_decode_num_accepted_tokens_total") > 0
    assert "steps_total" not in scrape(plain)


def test_steps_are_fewer_and_counted(plain: Served, speculating: Served) -> None:
    before = scrape(speculating)
    counts = [served.runner.num_steps for served in (plain, speculating)]
    for served in (plain, speculating):
        served.client().completions.create(model=MODEL, prompt=TEXT, max_tokens=100)
        served.wait_until_idle()
    steps = [s.runner.num_steps - n for s, n in zip((plain, speculating), counts, strict=True)]
    assert steps[1] < steps[0] / 2
    after = scrape(speculating)

    def gained(name: str, *labels: str) -> float:
        return value(after, name, *labels) - before.get(name, {}).get(labels, 0)

    accepted = gained("spec_decode_num_accepted_tokens_total")
    assert accepted > 50
    positions = after["spec_decode_num_accepted_tokens_per_pos_total"]
    by_position = [gained("spec_decode_num_accepted_tokens_per_pos_total", str(i)) for i in range(len(positions))]
    assert len(positions) == 6 and by_position == sorted(by_position, reverse=True) and sum(by_position) == accepted
    assert accepted <= gained("spec_decode_num_draft_tokens_total") == gained("step_rows_total", "draft")
    assert gained("spec_decode_num_drafts_total") <= steps[1]
    assert gained("generation_tokens_total") == 100
    assert not any(name.startswith("spec_decode") for name in scrape(plain))
    shown = [httpx.get(f"{served.url}/health").json().get("speculation") for served in (plain, speculating)]
    assert shown == [None, "ngram"]


def test_a_request_can_do_without(speculating: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RequestOptions] = []
    scheduler = speculating.core.scheduler
    add = scheduler.add_request
    monkeypatch.setattr(scheduler, "add_request", lambda r: (add(r), seen.append(r.options)))
    before = scrape(speculating)
    for given in (False, True, None):
        extra = {"use_speculation": given}
        speculating.client().completions.create(model=MODEL, prompt=TEXT, max_tokens=30, extra_body=extra)
        if given is False:
            name = "spec_decode_num_drafts_total"
            assert value(scrape(speculating), name) == value(before, name)
    assert [options.use_speculation for options in seen] == [False, True, True]
    response = speculating.post("/v1/completions", {"prompt": "a", "use_speculation": "maybe"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "use_speculation"


# --- predicted outputs --------------------------------------------------------------------------------------


def chat(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 60, "temperature": 0, **fields}
    return dict(served.post("/v1/chat/completions", body).json())


PREDICTED = "what is predicted comes first, and then some that is not; at the end it is right again."
ANSWER = PREDICTED.replace("some that is not", "a surprise")


@pytest.fixture(scope="module")
def predicting() -> Iterator[Served]:
    config = speculative_config(4, longest=3, shortest=2)
    with serve(script(ANSWER), config=fake_config(speculative=config)) as served:
        propose_from(served.core, NgramProposer(config))
        yield served


def test_a_prediction_is_proposed_and_counted(predicting: Served) -> None:
    plain = chat(predicting, max_tokens=len(ANSWER))
    steps = predicting.runner.num_steps
    content: Any = PREDICTED
    for content in (PREDICTED, [{"type": "text", "text": PREDICTED[:9]}, {"type": "text", "text": PREDICTED[9:]}]):
        before = predicting.runner.num_steps
        answer = chat(predicting, max_tokens=len(ANSWER), prediction={"type": "content", "content": content})
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
        assert predicting.runner.num_steps - before < 0.6 * steps
        usage, plain_usage = dict(answer["usage"]), dict(plain["usage"])
        details, plain_details = usage.pop("completion_tokens_details"), plain_usage.pop("completion_tokens_details")
        # differs, because the second prompt is partly cached
        del usage["prompt_tokens_details"], plain_usage["prompt_tokens_details"]
        assert usage == plain_usage
        accepted, rejected = details.pop("accepted_prediction_tokens"), details.pop("rejected_prediction_tokens")
        assert details == plain_details == {"reasoning_tokens": 0}
        assert 30 < accepted < len(ANSWER) and 0 < rejected < 40


def test_drafts_cut_off_by_a_stop_string_are_not_counted_as_accepted(predicting: Served) -> None:
    """The first token is sampled. Then come four drafts and a sampled token, and four more drafts, partly rejected."""
    prediction = {"type": "content", "content": PREDICTED}
    counts = []
    for stop in ("is", "is ", "is p", "is pr", "is pre"):
        usage = chat(predicting, prediction=prediction, stop=stop)["usage"]
        details = usage["completion_tokens_details"]
        assert details["rejected_prediction_tokens"] == 0
        counts.append((usage["completion_tokens"], details["accepted_prediction_tokens"]))
    assert counts == [(7, 5), (8, 6), (9, 7), (10, 8), (11, 8)]


def test_predicted_tokens_beyond_the_model_s_vocabulary_are_not_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer has special tokens that the model lacks."""
    config = fake_config(speculative=speculative_config(4), vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS))
    seen: list[RequestOptions] = []
    with serve(script("go on"), config=config, tokenizer=tiny_tokenizer("{{ messages[0].content }}")) as served:
        add = served.core.scheduler.add_request
        monkeypatch.setattr(served.core.scheduler, "add_request", lambda r: (add(r), seen.append(r.options)))
        chat(served, prediction={"type": "content", "content": f"go{SPECIAL_TOKENS[1]} on"})
    assert [bytes(options.predicted_token_ids) for options in seen] == [b"go on"]


def test_streamed_usage_reports_the_same_prediction_tokens(predicting: Served) -> None:
    prediction = {"type": "content", "content": PREDICTED}
    known = chat(predicting, prediction=prediction)["usage"]["completion_tokens_details"]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 60, "temperature": 0}
    body |= {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "prediction": prediction}
    details = list(predicting.client().chat.completions.create(**body))[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens == known["accepted_prediction_tokens"] > 20
    assert details.rejected_prediction_tokens == known["rejected_prediction_tokens"]


def test_without_speculation_a_prediction_has_no_effect(plain: Served) -> None:
    prediction = {"type": "content", "content": PREDICTED}
    assert chat(plain, prediction=prediction)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("prediction", [
    {"type": "content"},
    {"type": "image", "content": "a"},
    {"type": "content", "content": 5},
    {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
    {"type": "content", "content": "too long " * 20_000},
    "content",
], ids=lambda prediction: str(prediction)[:60])  # fmt: skip
def test_predictions_that_cannot_be_used(predicting: Served, prediction: Any) -> None:
    error = chat(predicting, prediction=prediction)["error"]
    assert error["type"] == "invalid_request_error" and error["param"].startswith("prediction")
