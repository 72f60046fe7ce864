"""tools.agents: the scripted model, and the report on recorded requests. Needs neither npm nor an agent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.deltas import assemble
from metal_engine.answers.tool_plan import plan_tools
from metal_engine.checkpoints.answer_formats import find_answer_format
from metal_engine.cli.launch_tools import RunningServer
from metal_engine.runner import model_runner
from metal_engine.sampling_params import SamplingParams
from tests.support.http_server import QuietHandler, http_server
from tests.support.tiny_engine import run_all, tiny_engine
from tools.agents.clients import AGENTS, environment
from tools.agents.formats import FORMATS, Format
from tools.agents.recorder import Exchange, read_exchanges, recording
from tools.agents.report import Turn, read_log, report, row, summary
from tools.agents.responses import received
from tools.agents.script import Output, next_output, note, task
from tools.agents.scripted_model import LoggedRequest, Script, read_script, scripted_sampling, write_checkpoint
from tools.fixtures.fake_engine import EOS, tiny_tokenizer

FILE = "note.txt"
HERMES, MISTRAL, HARMONY = FORMATS["hermes"], FORMATS["mistral"], FORMATS["harmony"]


def tool(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "</tools>", "parameters": schema}}


TEXT = {"type": "string"}
CLAUDE = [
    tool("Bash", {"command": TEXT, "description": TEXT, "mode": {"enum": ["fast"]}}, "command", "description", "mode"),
    tool("Read", {"file_path": TEXT, "limit": {"type": "integer"}}, "file_path"),
]
CODEX = [tool("shell", {"command": {"type": "array", "items": TEXT}}, "command")]
BOTH, ANSWER, RUN, READ = 4, 1, 2, 3  # turns


def rendered(
    turn: int, tools: list[dict[str, Any]] | None, *more: dict[str, Any], answer_format: Format = HERMES
) -> str:
    """Return the prompt of a turn, as the server renders it."""
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": task(turn, FILE)}, *more]
    text = tiny_tokenizer(answer_format.template).hf_tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str)
    return text


def answered(output: Output, results: int, first: int = 0) -> list[dict[str, Any]]:
    """Return the messages that an agent sends after an output: the answer, and as many results of calls."""
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(output.calls, first)
    ]
    said = {"role": "assistant", "content": output.content, "reasoning_content": output.reasoning}
    found = f"ran-{(output.turn or 0) * 7} {note(output.turn or 0)}"
    returned = [{"role": "tool", "tool_call_id": call["id"], "content": found} for call in calls[:results]]
    return [said | ({"tool_calls": calls} if calls else {}), *returned]


class TestScript:
    def test_calls_have_the_names_and_parameters_of_the_request(self) -> None:
        command = "test 1 -lt 2 && echo 'é😀 <b>' \"ran-$((4 * 7))\""
        bash = ("Bash", {"command": command, "description": "soak", "mode": "fast"})
        assert next_output(rendered(BOTH, CLAUDE), HERMES).calls == (bash, ("Read", {"file_path": FILE}))
        (run, read) = next_output(rendered(BOTH, CODEX), HERMES).calls
        assert run == ("shell", {"command": ["bash", "-c", command]})
        assert read == ("shell", {"command": ["bash", "-c", f"cat '{FILE}'"]})
        with pytest.raises(LookupError, match="no tool runs commands"):
            next_output(rendered(RUN, [tool("Write", {"command": TEXT})]), HERMES)

    @pytest.mark.parametrize("turn", [BOTH, RUN, READ, 10, 12])
    @pytest.mark.parametrize("name", ["hermes", "qwen3", "qwen3_coder", "glm", "kimi_k2", "deepseek"])
    def test_the_next_prompt_continues_prompt_and_output(self, turn: int, name: str) -> None:
        answer_format = FORMATS[name]
        prompt = rendered(turn, CLAUDE, answer_format=answer_format)
        output = next_output(prompt, answer_format)
        later = rendered(turn, CLAUDE, *answered(output, len(output.calls)), answer_format=answer_format)
        assert later.startswith(prompt + output.text + output.end)
        last = next_output(later, answer_format)
        assert last.content == f"Turn {turn} is done." and not last.calls

    @pytest.mark.parametrize("answer_format", [HARMONY, FORMATS["llama3"]], ids=["harmony", "llama3"])
    def test_one_call_at_a_time(self, answer_format: Format) -> None:
        messages: list[dict[str, Any]] = []
        written = []
        for _ in range(3):
            output = next_output(rendered(BOTH, CLAUDE, *messages, answer_format=answer_format), answer_format)
            written.append(output.calls)
            said, *results = answered(output, 1)
            # As the server renders messages with harmony's template. Other templates ignore the thinking.
            said = {**said, "content": "", "thinking": output.reasoning} if output.calls else said
            messages += [said, *results]
        assert [[name for name, _ in calls] for calls in written] == [["Bash"], ["Read"], []]
        assert output.content == "Turn 4 is done." and output.end == answer_format.end

    def test_a_missing_result_is_reported(self) -> None:
        said = {"role": "assistant", "content": "x"}
        output = next_output(rendered(BOTH, CLAUDE, said, {"role": "tool", "content": "ran-28"}), HERMES)
        assert output.content == "Turn 4 lacks ['note-4-end']."


@pytest.mark.parametrize("answer_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("turn", [ANSWER, RUN, BOTH, 15])
def test_the_engine_parses_scripted_model_output(answer_format: Format, turn: int) -> None:
    tokenizer = tiny_tokenizer(answer_format.template)
    found = find_answer_format(tokenizer.hf_tokenizer, answer_format.tool_parser, answer_format.reasoning_parser)
    prompt = rendered(turn, CLAUDE, answer_format=answer_format)
    output = next_output(prompt, answer_format)
    plan = plan_tools(CLAUDE, "auto", found, template_takes_tools=True, auto_tool_choice=True)
    answers = ChatAnswers.for_prompt(found, plan, tokenizer.encode(prompt), tokenizer.decode)
    answer = assemble(answers.reader(incremental=False).add(output.text + output.end, [], "stop"))
    reasoning = (answer.reasoning or "").strip()
    assert ((answer.content or "").removesuffix(output.end).strip(), reasoning) == (output.content, output.reasoning)
    assert tuple((call.name, json.loads(call.arguments)) for call in answer.tool_calls) == output.calls


def test_the_engine_generates_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(HERMES.template)
    backend = tokenizer.hf_tokenizer.backend_tokenizer
    script = Script(backend, HERMES, tmp_path / "log.jsonl")
    monkeypatch.setattr(model_runner, "StepSampling", scripted_sampling(script))
    engine = tiny_engine(ahead=True, max_model_len=4096, num_blocks=1024, tokenizer=tokenizer)
    prompts = [backend.encode(rendered(turn, CODEX)).ids for turn in (RUN, ANSWER)]
    params = SamplingParams(max_tokens=1000, skip_special_tokens=False)
    texts = ["".join(one.text for one in outputs) for outputs in run_all(engine, [(p, params) for p in prompts])]
    expected = [next_output(rendered(turn, CODEX), HERMES) for turn in (RUN, ANSWER)]
    assert texts == [one.text for one in expected]
    run_all(engine, [([*prompts[0], *backend.encode(texts[0]).ids, EOS], params)])
    *_, last = logged = read_log(tmp_path / "log.jsonl")
    assert [one.calls for one in logged[:2]] == [one.calls for one in expected]
    assert last.num_known_tokens == last.num_prompt_tokens == last.num_earlier_tokens
    assert last.num_known_tokens - last.num_cached_tokens <= 8 and not last.was


@pytest.mark.parametrize("answer_format", FORMATS.values(), ids=FORMATS)
def test_checkpoint(tmp_path: Path, answer_format: Format) -> None:
    folder = write_checkpoint(tmp_path / "model", tiny_tokenizer().hf_tokenizer, answer_format)
    tokenizer = read_script(folder, tmp_path / "log.jsonl", answer_format).tokenizer
    added = tokenizer.get_added_tokens_decoder()
    for mark in (*answer_format.special, *answer_format.added):
        (token_id,) = tokenizer.encode(mark).ids
        assert added[token_id].special == (mark in answer_format.special)
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert tokenizer.decode(ends, skip_special_tokens=False) == answer_format.end + answer_format.call_end


# --- responses and reports ------------------------------------------------------------------------------------

CALL = ("Bash", {"command": "é"})
ARGUMENTS = json.dumps(CALL[1])


def stream(*events: dict[str, Any]) -> str:
    return "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in events)


CHAT = (
    stream(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning": "so"}}]},
        {"choices": [{"delta": {"content": "Let me "}}]},
        {"choices": [{"delta": {"content": "look."}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "Bash", "arguments": ""}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS}}]}}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}},
    )
    + "data: [DONE]\n\n"
)
MESSAGES = stream(
    {"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "so"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Let me look."}},
    {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "name": "Bash", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ARGUMENTS}},
    {"type": "message_stop"},
)
RESPONSE = {
    "object": "response",
    "status": "completed",
    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}},
    "output": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "name": "Bash", "arguments": ARGUMENTS},
    ],
}
RESPONSES = stream({"type": "response.created"}, {"type": "response.completed", "response": RESPONSE})


def exchange(path: str, response: str, status: int = 200) -> Exchange:
    return Exchange(1.5, "POST", path, "{}", status, response)


RECORDED = [
    exchange("/v1/chat/completions", CHAT),
    exchange("/v1/messages?beta=true", MESSAGES),
    exchange("/v1/responses", RESPONSES),
    exchange("/v1/responses", json.dumps(RESPONSE)),
]


@pytest.mark.parametrize("recorded", RECORDED)
def test_responses_are_read(recorded: Exchange) -> None:
    found = received(recorded)
    assert (found.text, found.reasoning, found.error) == ("Let me look.", "so", None)
    assert found.calls == [("Bash", ARGUMENTS)] and found.usage == (9, 4)


@pytest.mark.parametrize(
    ("recorded", "error"),
    [
        (exchange("/v1/messages", "no", 400), "status 400: no"),
        (exchange("/v1/chat/completions", stream({"error": {"message": "x"}})), '{"message": "x"}'),
        (exchange("/v1/messages", stream({"type": "error", "error": "x"})), '"x"'),
        (exchange("/v1/responses", stream({"response": {"status": "failed"}})), "status failed: null"),
        (exchange("/v1/responses", "data: {"), "cannot be read"),
        (exchange("/v1/responses", ""), "cannot be read"),
    ],
)
def test_errors_in_responses(recorded: Exchange, error: str) -> None:
    assert error in (received(recorded).error or "")


LOGGED = LoggedRequest(
    time=1.2, turn=1, num_prompt_tokens=1000, num_cached_tokens=880, num_known_tokens=890, num_earlier_tokens=890,
    num_output_tokens=20, content="Let me look.", calls=(CALL,), reasoning="so", was="", now="",
)  # fmt: skip
TURN = Turn(1, 1.0, 2.0, "x\nTurn 1 is done.\n")


def test_report_of_a_good_turn_has_counts_and_no_problems() -> None:
    title = exchange("/v1/messages", stream({"type": "message_start", "message": {"usage": {"input_tokens": 5}}}))
    other_turn = replace(LOGGED, time=2.5)
    found = report(
        TURN,
        [LOGGED, replace(LOGGED, turn=None, content="", calls=(), reasoning=""), other_turn],
        [RECORDED[0], title],
        HERMES.marks,
    )
    assert found.problems == []
    assert (found.num_requests, found.num_calls, found.num_prompt_tokens) == (2, 1, 1000)
    assert row(found) == "| 1 | 2 | 1,000 | 890 | 880 | 0 | 0 | 1 | 0 | 0 | 0 |"
    assert summary("Agent", "1.0", [found, found]).endswith(
        "| 2 | 4 | 1,000 to 1,000 | 98.9% | 88.0% | 2 | 0 | 0 | 0 |"
    )


@pytest.mark.parametrize(
    ("changes", "response", "problem"),
    [
        ({"num_cached_tokens": 800}, CHAT, "90 known tokens were not cached"),
        ({"calls": (CALL, CALL)}, CHAT, "lost call"),
        ({"calls": ()}, CHAT, "not written"),
        ({}, CHAT.replace("\\\\u00e9", "e"), "not written"),
        ({}, CHAT.replace('\\"}', '\\"'), "lost call"),
        ({"content": "<tool_call>"}, CHAT.replace("Let me look.", "<tool_call>").replace("look.", "</think>"), "leak"),
        ({"content": "Look"}, CHAT, "text differs"),
        ({"reasoning": "x"}, CHAT, "text differs"),
    ],
)
def test_problems(changes: dict[str, Any], response: str, problem: str) -> None:
    found = report(TURN, [replace(LOGGED, **changes)], [exchange("/v1/chat/completions", response)], HERMES.marks)
    assert any(problem in one for one in found.problems), found.problems


def test_problems_of_the_agent() -> None:
    turn = Turn(2, 1.0, 2.0, "no", "exit status 1: x")
    found = report(turn, [], [Exchange(1.5, "GET", "/v1/other", "", 404, "no")], HERMES.marks)
    assert found.errors[0] == "exit status 1: x" and "did not print 'Turn 2 is done.'" in found.errors[1]
    assert found.errors[2] == "GET /v1/other: status 404: no"


def test_changed_prefixes() -> None:
    changed = replace(LOGGED, num_earlier_tokens=900, was="a", now="b")
    found = report(replace(TURN, number=2), [changed], [], HERMES.marks)
    assert (found.num_changed_tokens, found.changes) == (10, [("a", "b")])
    assert not report(TURN, [changed], [], HERMES.marks).changes  # another conversation


# --- recorder and agents --------------------------------------------------------------------------------------


class _Upstream(QuietHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("x-key", self.headers["authorization"])
        self.end_headers()
        self.wfile.write(b"data: " + body)


def test_recording(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with http_server(_Upstream) as upstream, recording(upstream, log) as url:
        response = httpx.post(f"{url}/v1/x?a=1", content="é", headers={"authorization": "k"})
        assert (response.text, response.headers["x-key"]) == ("data: é", "k")
    (one,) = read_exchanges(log)
    assert (one.method, one.path, one.request, one.status, one.response) == ("POST", "/v1/x?a=1", "é", 200, "data: é")
    assert read_exchanges(tmp_path / "none") == []


@pytest.mark.parametrize("name", AGENTS)
def test_agents_get_the_server_and_none_of_this_shells_keys(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    agent, server = AGENTS[name], RunningServer("http://127.0.0.1:9", "none", "soak", 65_536)
    given = environment(agent, server, tmp_path / "home")
    assert given["HOME"] == str(tmp_path / "home") and "HTTP_PROXY" not in given
    assert "a secret" not in given.values()
    configured = [*given.values(), *agent.first(server, "hi")]
    configured += [path.read_text() for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert any("127.0.0.1:9" in value for value in configured)
    assert "hi" in agent.first(server, "hi") and "hi" in agent.later(server, "hi")
    assert agent.first(server, "hi") != agent.later(server, "hi")
