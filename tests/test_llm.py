"""The offline API on a tiny model: several outputs, log probabilities, prompts of any integer type."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import AddedToken

from metal_engine import llm as llm_module
from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.tool_plan import plan_tools
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.errors import ParameterError
from metal_engine.llm import LLM
from metal_engine.output_phases import OutputPhases, ReasoningPhase
from metal_engine.pooling_params import PoolingParams
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.text.tokenizer import Tokenizer
from tests.support.golden import GOLDEN_TOOLS, GoldenCase, calling_cases
from tests.support.serving import MODEL, serve
from tests.support.splitting import answer_format
from tests.support.sweeps import sweep
from tests.support.tiny_engine import tiny_engine, tiny_reference
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import (
    TOOL_TEMPLATE,
    VOCAB_SIZE,
    FakeRunner,
    NextToken,
    byte_ids,
    fake_config,
    script,
    tiny_tokenizer,
)
from tools.fixtures.stepped_engine import SteppedEngine


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(llm_module, "build_engine", lambda args: tiny_engine())
    with LLM("tiny") as llm:
        yield llm


_UNCLOSED = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if thread.name == "engine"]))
from metal_engine import llm
from tests.support.tiny_engine import tiny_engine
llm.build_engine = lambda args: tiny_engine()
unclosed = llm.LLM("tiny")
print(unclosed.generate("a", use_tqdm=False)[0].finish_reason)
"""


def test_a_program_without_close_ends_the_engine_before_python_ends() -> None:
    done = subprocess.run([sys.executable, "-c", _UNCLOSED], capture_output=True, text=True, check=True)
    assert done.stdout == "length\n[]\n"


def test_an_llm_that_the_program_drops_ends_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "build_engine", lambda args: tiny_engine())
    llm = LLM("tiny")
    generate(llm, "a", SamplingParams(max_tokens=2))
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def generate(llm: LLM, prompts: Any, *params: Any) -> Any:
    return llm.generate(prompts, *params, use_tqdm=False)


def test_n_outputs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, temperature=1.5, ignore_eos=True)
    results = generate(llm, ["one", "two"], params)
    assert [[output.index for output in result.outputs] for result in results] == [[0, 1, 2]] * 2
    assert len({tuple(output.token_ids) for result in results for output in result.outputs}) == 6
    for result, prompt in zip(results, ["one", "two"], strict=True):
        assert result.text == result.outputs[0].text and result.token_ids == result.outputs[0].token_ids
        for i, output in enumerate(result.outputs):
            (alone,) = generate(
                llm, [prompt], SamplingParams(seed=5 + i, max_tokens=8, temperature=1.5, ignore_eos=True)
            )
            assert alone.token_ids == output.token_ids
    (unseeded,) = generate(llm, ["x"], SamplingParams(n=4, max_tokens=8, temperature=2, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in unseeded.outputs}) == 4


def test_logprobs(llm: LLM) -> None:
    (result,) = generate(llm, "abc", SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=0))
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert all(entry.rank == 1 and entry.top[0][0] == entry.token_id for entry in result.logprobs)
    first, *others = result.prompt_logprobs
    assert first is None and [entry.token_id for entry in others] == result.prompt_token_ids[1:]
    (plain,) = generate(llm, "abc", SamplingParams(temperature=0, max_tokens=6))
    assert plain.logprobs is None and plain.prompt_logprobs is None and plain.token_ids == result.token_ids


@pytest.mark.parametrize(
    "prompt", [np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8), [np.int64(1), 2, np.int32(3)], (1, 2, 3)]
)
def test_prompts_of_any_integers(llm: LLM, prompt: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = generate(llm, [1, 2, 3], params)[0].token_ids
    assert generate(llm, prompt, params)[0].token_ids == expected
    assert [r.token_ids for r in generate(llm, [prompt, prompt], params)] == [expected] * 2
    (result,) = generate(llm, [prompt], params)
    assert result.prompt_token_ids == [1, 2, 3] and all(type(i) is int for i in result.prompt_token_ids)


@pytest.mark.parametrize("prompt", [[1.0], ["a", 1], [None], [-1], [VOCAB_SIZE], [2**70], np.array([0.5])], ids=str)
def test_an_invalid_prompt_is_rejected_before_any_request_runs(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError):
        generate(llm, [byte_ids("fine"), prompt])
    assert llm.stats.num_running == 0 and llm._core.num_steps == 0
    assert len(generate(llm, "still fine", SamplingParams(max_tokens=2))) == 1


def test_an_overlong_prompt_is_rejected_before_any_request_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="maximum context length"):
        generate(llm, ["fine", [5] * 9000])
    for given in ({"prompt": "a"}, [{"prompt_token_ids": [1]}]):  # vLLM's forms
        with pytest.raises(ValueError, match="not a dictionary"):
            generate(llm, given)
    with pytest.raises(ValueError, match="2 prompts but 1"):
        generate(llm, ["a", "b"], [SamplingParams()])
    assert llm.stats.num_running == 0 and llm._core.num_steps == 0


def test_closing_a_stream_aborts_the_request(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    generate(llm, "x", SamplingParams(max_tokens=1))
    assert llm.stats.num_used_blocks == 0


def test_invalid_parameters_are_rejected_before_any_request_runs(llm: LLM) -> None:
    bad: list[Any] = [
        SamplingParams(logit_bias={VOCAB_SIZE: 1}),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")),
        SamplingParams(truncate_prompt_tokens=10**6),
        {"temperature": 1},
    ]
    for params in bad:
        with pytest.raises(ValueError):
            generate(llm, ["a", "b"], [SamplingParams(), params])
    assert llm._core.num_steps == 0
    with pytest.raises(ValueError, match="n must be 1"):
        next(llm.stream("a", SamplingParams(n=2)))


def test_truncation_and_structure(llm: LLM) -> None:
    (result,) = generate(llm, list(range(50)), SamplingParams(max_tokens=2, truncate_prompt_tokens=5))
    assert result.prompt_token_ids == list(range(45, 50))
    params = SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(choice=("left", "right")))
    assert generate(llm, "which?", params)[0].text in ("left", "right")


def test_a_request_that_cannot_be_added_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine survives any error while a request is added."""
    scheduler = llm._core.scheduler
    add = scheduler.add_request

    def broken(request: Any) -> None:
        if request.token_ids[0] == 7:
            raise ZeroDivisionError("a mistake")
        add(request)

    monkeypatch.setattr(scheduler, "add_request", broken)
    with pytest.raises(RuntimeError, match="could not be added: ZeroDivisionError: a mistake"):
        generate(llm, [7, 8])
    (result,) = generate(llm, [8, 9], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(result.token_ids) == 3
    scheduler.check_integrity()


# --- chats ---

USER: list[Any] = [{"role": "user", "content": "hi"}]
ROOMY = fake_config(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=2048)


def answering(
    monkeypatch: pytest.MonkeyPatch, next_token: NextToken, tokenizer: Tokenizer | None = None, **settings: Any
) -> LLM:
    """Return an LLM whose model generates these tokens."""
    runner = FakeRunner(ROOMY.cache.block_size, next_token)
    tokenizer = tokenizer or tiny_tokenizer(TOOL_TEMPLATE)
    config = replace(ROOMY, model=replace(ROOMY.model, vocab_size=len(tokenizer.hf_tokenizer)))
    monkeypatch.setattr(llm_module, "build_engine", lambda args: SteppedEngine(config, runner, tokenizer))
    return LLM("fake", **settings)


@pytest.mark.parametrize(
    "recorded",
    sweep(calling_cases(), lambda case: case.parser in ("json_tools", "qwen3_coder", "pythonic", "kimi_k2")),
    ids=str,
)
def test_chat_output_is_parsed_as_by_the_server(recorded: GoldenCase, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"<think>\nhm\n</think>\n{recorded.text}"
    names = {"tool_call_parser": recorded.parser, "reasoning_parser": "think"}
    with answering(monkeypatch, script(text), **names) as llm:
        (result,) = llm.chat(USER, SamplingParams(n=2, max_tokens=1000), tools=GOLDEN_TOOLS, use_tqdm=False)
        (cut,) = llm.chat(USER, SamplingParams(max_tokens=10), tools=GOLDEN_TOOLS, use_tqdm=False)
        (plain,) = llm.chat(USER, use_tqdm=False, sampling_params=SamplingParams(max_tokens=1000))
    served: Any = {"model": MODEL, "messages": USER, "tools": GOLDEN_TOOLS}
    with serve(
        script(text),
        config=ROOMY,
        tokenizer=tiny_tokenizer(TOOL_TEMPLATE),
        answer_format=answer_format(recorded.parser),
    ) as s:
        message: Any = s.client().chat.completions.create(**served).choices[0].message
    for output in result.outputs:
        assert (output.text, output.finish_reason) == (text, "stop")
        assert (output.content, output.reasoning) == (message.content, message.reasoning)
        assert [(call.name, call.arguments) for call in output.tool_calls] == [
            (call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    assert (result.content, result.reasoning) == (recorded.content, "hm")
    assert [call.name for call in result.tool_calls] == [name for name, _ in recorded.calls]
    assert (cut.text, cut.content, cut.reasoning, cut.tool_calls) == (text[:10], "", "hm", ())
    # Without tools, calls are not parsed.
    assert (plain.content, plain.reasoning, plain.tool_calls) == (recorded.text, "hm", ())


def test_chat_answer_format_is_detected_from_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format's marks are special tokens, and the template starts the reasoning."""
    hf: Any = tiny_tokenizer("{{ messages[0].content }}{{ '[TOOL_CALLS]' if tools }}[THINK]").hf_tokenizer
    marks = [AddedToken(mark, special=True) for mark in ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")]
    hf.add_tokens(marks, special_tokens=True)
    tokenizer = Tokenizer(hf)
    tokens = tokenizer.encode('hm[/THINK]Yes.[TOOL_CALLS]find_trains[ARGS]{"city": "Rome"}')
    tokens.append(min(tokenizer.eos_token_ids))

    def next_token(so_far: list[int], num_prompt_tokens: int) -> int:
        return tokens[len(so_far) - num_prompt_tokens]

    with answering(monkeypatch, next_token, tokenizer) as llm:
        with recorded_preparations() as prepare_all:
            both = llm.chat([USER, USER], SamplingParams(max_tokens=100), tools=TOOLS, use_tqdm=False)
        prepare_all.assert_called_once()  # chats that share their parameters are prepared together
        (generated,) = generate(llm, "hi", SamplingParams(max_tokens=100))
    for result in both:
        assert (result.content, result.reasoning) == ("Yes.", "hm")
        assert [(c.name, c.arguments) for c in result.tool_calls] == [("find_trains", '{"city": "Rome"}')]
    assert generated.text == 'hmYes.find_trains{"city": "Rome"}'
    assert (generated.content, generated.reasoning, generated.tool_calls) == (None, None, ())


def recorded_preparations() -> Any:
    """Record the calls of all preparers in the context. An argument list begins with the preparer."""
    return patch.object(RequestPreparer, "prepare_all", autospec=True, side_effect=RequestPreparer.prepare_all)


def phases_of_chat(llm: LLM, params: Any, number: int = 1, **more: Any) -> list[OutputPhases | None]:
    """Return the phases of the requests of a chat."""
    with recorded_preparations() as prepare_all:
        llm.chat([USER] * number, params, use_tqdm=False, **more)
    return [call.args[2].phases for call in prepare_all.call_args_list for _ in call.args[1]]


def test_limits_of_the_reasoning_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    template = "{{ messages[0].content }}{{ tools }}<think>{% if enable_thinking is false %}</think>{% endif %}"
    for can_turn_off in (True, False):
        tokenizer = tiny_tokenizer(template if can_turn_off else "{{ messages[0].content }}{{ tools }}<think>")
        with answering(monkeypatch, script("</think>Yes."), tokenizer, **names) as llm:
            limited, free = SamplingParams(thinking_token_budget=30, max_tokens=50), SamplingParams(max_tokens=50)
            off = replace(free, thinking_token_budget=0)
            phase = ReasoningPhase("<think>", "</think>", begins_inside=True, budget=30)
            none = None if can_turn_off else OutputPhases(replace(phase, budget=0))
            found = phases_of_chat(llm, [limited, free, off, limited], 4)
            assert sorted(map(str, found)) == sorted(map(str, [OutputPhases(phase), None, none, OutputPhases(phase)]))
            assert phases_of_chat(llm, free, enable_thinking=False) == [none]
            assert phases_of_chat(llm, free, chat_template_kwargs={"enable_thinking": False}) == [none]
            (with_tools,) = phases_of_chat(llm, free, tools=TOOLS)
            assert with_tools is not None and with_tools.calls is not None and with_tools.reasoning is not None
            with pytest.raises(ParameterError, match="needs a chat"):
                generate(llm, "a", limited)
            with pytest.raises(ParameterError, match="needs a chat"):
                next(llm.stream("a", limited))


def test_structured_output_of_a_chat_applies_after_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer("{{ messages[0].content }}<think>\n")
    params = SamplingParams(max_tokens=50, structured_outputs=StructuredOutputsParams(json_object=True))
    with answering(monkeypatch, script("hm</think>\n{}"), tokenizer, reasoning_parser="think") as llm:
        (result,) = llm.chat(USER, params, use_tqdm=False)
    assert (result.content, result.reasoning) == ("{}", "hm")


CALL = '<tool_call>{"name": "find_trains", "arguments": {"city": "Rome"}}</tool_call>'


def test_a_template_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system message describes the tools, as in the server."""
    tokenizer = tiny_tokenizer()
    with answering(monkeypatch, script(f"Well. {CALL}"), tokenizer, reasoning_parser="none") as llm:
        for messages in (USER, [{"role": "system", "content": "Be kind."}, *USER]):
            (result,) = llm.chat(messages, SamplingParams(max_tokens=1000), tools=TOOLS, use_tqdm=False)
            assert result.content == "Well."
            assert [(call.name, call.arguments) for call in result.tool_calls] == [("find_trains", '{"city": "Rome"}')]
            told = plan_tools(TOOLS, "auto", AnswerFormat(), template_takes_tools=False, auto_tool_choice=True)
            assert told.instructions is not None
            prompt = tokenizer.decode(result.prompt_token_ids)
            assert told.instructions in prompt and ("Be kind.\n\n" in prompt) == (len(messages) > 1)


def test_calls_that_stay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=1000)
    with answering(monkeypatch, script(CALL), tool_call_parser="none", reasoning_parser="none") as llm:
        (result,) = llm.chat(USER, params, tools=TOOLS, use_tqdm=False)
        assert (result.content, result.tool_calls) == (CALL, ())
        assert "find_trains" in llm.tokenizer.decode(result.prompt_token_ids)
    with (
        answering(monkeypatch, script(CALL), tiny_tokenizer(), tool_call_parser="none") as llm,
        pytest.raises(ValueError, match=r"tools need a model .* --tool-call-parser"),
    ):
        llm.chat(USER, params, tools=TOOLS, use_tqdm=False)


def test_vectors_of_texts_and_tokens(llm: LLM) -> None:
    model = tiny_reference()

    def expected(tokens: list[int]) -> np.ndarray:
        hidden = np.array(model.model(mx.array(tokens)[None])[0, -1]).astype(np.float64)
        return hidden / np.linalg.norm(hidden)

    ids = byte_ids("A fox and a crow")
    by_text, by_ids = llm.embed(["A fox and a crow", np.array(ids)], use_tqdm=False)
    for result in (by_text, by_ids):
        assert result.prompt_token_ids == llm.tokenizer.encode("A fox and a crow")
        assert float(np.array(result.outputs.embedding) @ expected(result.prompt_token_ids)) >= 0.9999
    (cut,) = llm.embed(ids, pooling_params=PoolingParams(dimensions=7), use_tqdm=False)
    assert len(cut.outputs.embedding) == 7
    params = [PoolingParams(pooling_type="MEAN"), PoolingParams(pooling_type="CLS")]
    mean, cls = llm.embed([ids, ids], pooling_params=params, use_tqdm=False)
    assert mean.outputs.embedding != cls.outputs.embedding
    assert llm.embed([], use_tqdm=False) == []
    with pytest.raises(ValueError, match="no tokens"):
        llm.embed([ids, []], use_tqdm=False)
    for num_params in (1, 0):
        with pytest.raises(ValueError, match=f"2 prompts but {num_params} pooling_params"):
            llm.embed([ids, ids], pooling_params=params[:num_params], use_tqdm=False)
    assert llm.stats.num_used_blocks == 0
