"""Tests `metal-engine chat`: conversation, commands, the choice of the server or model, and word wrapping."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

from metal_engine.cli import chat as chat_module
from metal_engine.cli.chat import ChatHistory, chat
from metal_engine.cli.chat_backends import AnswerError, LocalModel, Piece, RemoteModel, ServerError, served_models
from metal_engine.cli.chat_input import PipeInput
from metal_engine.cli.chat_output import AnswerView, WordWrapper
from metal_engine.cli.main import app
from metal_engine.cli.server_address import find_card
from metal_engine.errors import ConfigError
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.chat_args import ChatArgs
from tests.support.http_server import QuietHandler, http_server
from tests.support.serving import MODEL, Served
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


# --- the conversation ---


class Scripted:
    """Answers with given texts, and records the conversations that it received."""

    name = "a script"

    def __init__(self, *answers: Callable[[], Iterator[Piece]]) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self._answers = iter(answers)

    def answer(self, messages: list[dict[str, str]]) -> Generator[Piece]:
        self.asked.append([dict(message) for message in messages])
        yield from next(self._answers)()


def says(*pieces: str, then: BaseException | None = None) -> Callable[[], Iterator[Piece]]:
    def answer() -> Iterator[Piece]:
        for i, piece in enumerate(pieces):
            yield Piece(piece, i + 1)
        if then is not None:
            raise then

    return answer


def talk(text: str, *answers: Callable[[], Iterator[Piece]], system: str | None = None) -> tuple[Any, str, bool]:
    """Run a chat. Return its source of answers, its output, and whether all messages were answered."""
    model, out = Scripted(*answers), io.StringIO()
    answered = ChatHistory(model, PipeInput(io.StringIO(text)), AnswerView(out), system).run()
    return model, out.getvalue(), answered


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_grows(capsys: pytest.CaptureFixture[str]) -> None:
    model, shown, answered = talk("One?\n\nTwo?\n", says("1", "."), says("2."), system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert model.asked == [[system, user("One?")], [system, user("One?"), assistant("1."), user("Two?")]]
    assert (shown, answered) == ("1.\n2.\n", True)
    first, second = capsys.readouterr().err.splitlines()
    assert "2 tokens, the first after" in first and "tokens/s]" in first
    assert second.startswith("[1 token, the first") and "tokens/s]" in second


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_json, as_text = tmp_path / "talk.json", tmp_path / "talk.md"
    lines = ["/system", "/system Be\\", "brief.", "One?", f"/save {as_json}", f"/save {as_json}", f"/save {as_text}"]
    lines += ["/clear", "Two?", "/nothing", "/help", " /slash first", "/usr/bin?", "/exit", "Never."]
    model, shown, _ = talk("\n".join(lines), says("1."), says("2."), says("3."), says("4."))
    system = {"role": "system", "content": "Be\nbrief."}
    assert model.asked[:2] == [[system, user("One?")], [system, user("Two?")]]
    assert [messages[-1]["content"] for messages in model.asked] == ["One?", "Two?", "/slash first", "/usr/bin?"]
    assert shown == "1.\n2.\n3.\n4.\n"
    assert json.loads(as_json.read_text()) == [system, user("One?"), assistant("1.")]
    assert as_text.read_text() == "## system\n\nBe\nbrief.\n\n## user\n\nOne?\n\n## assistant\n\n1.\n"
    notes = capsys.readouterr().err
    assert "There is no system prompt." in notes
    assert "There is no command /nothing" in notes
    assert "/save FILE" in notes


def test_save_does_not_overwrite_an_existing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.md"
    other.write_text("mine")
    talk(f"/save {other}\n/save\n/save {tmp_path / 'no' / 'such'}\n")
    assert other.read_text() == "mine"
    there, unnamed, nowhere = capsys.readouterr().err.splitlines()
    assert "exists already" in there and "needs the name" in unnamed and "Cannot write" in nowhere


def test_a_save_that_failed_can_be_repeated(tmp_path: Path) -> None:
    name = tmp_path / "chat.json"
    talk(f"/save {name}\n/system ok\n/save {name}\n", system="\ud800")  # cannot be encoded
    assert json.loads(name.read_text()) == [{"role": "system", "content": "ok"}]


def test_the_received_part_of_an_interrupted_answer_stays_in_the_history() -> None:
    model, shown, answered = talk("One?\nTwo?\n", says("On", then=KeyboardInterrupt()), says("2."))
    assert model.asked[1] == [user("One?"), assistant("On"), user("Two?")]
    assert (shown, answered) == ("On\n2.\n", True)
    model, _, _ = talk("One?\nTwo?\n", says(then=KeyboardInterrupt()), says("2."))
    assert model.asked[1] == [user("Two?")]


def test_an_error_ends_the_answer_and_not_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    model, shown, answered = talk("One?\nTwo?\n", says("On", then=AnswerError("too long")), says("2."))
    assert model.asked[1] == [user("Two?")]
    assert (shown, answered) == ("On\n2.\n", False)
    assert "too long; /clear starts over" in capsys.readouterr().err


def test_reasoning_is_no_part_of_the_conversation() -> None:
    def thinks() -> Iterator[Piece]:
        yield Piece("Hm.", 1, is_reasoning=True)
        yield Piece("1.", 2)

    model, shown, _ = talk("One?\nTwo?\n", thinks, says("2."))
    assert model.asked[1] == [user("One?"), assistant("1."), user("Two?")]
    assert shown == "1.\n2.\n"  # a pipe gets the answers alone


# --- input and output ---


def wrapped(pieces: list[str], width: int) -> str:
    out = io.StringIO()
    wrapper = WordWrapper(out.write, lambda: width)
    for piece in pieces:
        wrapper.add(piece)
    wrapper.finish()
    return out.getvalue()


def test_words_stay_whole() -> None:
    assert wrapped(["The capi", "tal of Fr", "ance is", " Paris", "."], 12) == "The capital\nof France is\nParis.\n"
    assert wrapped(["def f():\n", "    return 1\n"], 20) == "def f():\n    return 1\n"
    assert wrapped(["abcdefghij"], 4) == "abcd\nefgh\nij\n"
    assert wrapped(["日本語の文"], 5) == "日本\n語の\n文\n"
    assert wrapped(["a\tb"], 20) == "a       b\n"
    assert wrapped([], 10) == ""


def test_a_terminal_of_unknown_width_wraps_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a terminal reports 0 columns. Words are wrapped at 80 columns, not after each character."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return 1

    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    out = Terminal()
    view = AnswerView(out)
    view.add("Paris is the capital of France. " * 4)
    view.finish()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and all(len(line) <= 80 for line in lines), lines


def test_a_model_has_no_power_over_the_terminal() -> None:
    assert "\x1b" not in wrapped(["\x1b]0;title\x07 \x9b2J\rx"], 40)


@given(st.text("ab \n日\t", max_size=60), st.lists(st.integers(0, 60), max_size=5), st.integers(4, 20))
def test_no_line_is_too_wide_and_no_word_is_broken(text: str, cuts: list[int], width: int) -> None:
    ends = sorted(min(cut, len(text)) for cut in cuts)
    shown = wrapped([text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)], width)
    assert shown == wrapped([text], width)  # wherever it is cut
    assert all(cell_len(line.rstrip()) <= width for line in shown.split("\n"))
    assert "".join(shown.split()) == "".join(text.split())
    words = text.replace("日", " 日 ").split()
    if all(len(word) <= width for word in words):
        assert shown.replace("日", " 日 ").split() == words


# --- who answers ---


def test_a_server_answers(echoing: Served) -> None:
    assert [(card["id"], card["owned_by"]) for card in served_models(echoing.url)] == [(MODEL, "metal-engine")]
    server = RemoteModel(f"{echoing.url}/v1/", {"model": MODEL, "temperature": 0})
    pieces = list(server.answer([user("Hello there.")]))
    answer = "".join(piece.text for piece in pieces)
    assert "Hello there." in answer
    whole = echoing.client().chat.completions.create(model=MODEL, messages=[user("Hello there.")])  # type: ignore[list-item]
    assert whole.usage is not None
    assert (answer, pieces[-1].num_tokens) == (whole.choices[0].message.content, whole.usage.completion_tokens)
    with pytest.raises(AnswerError, match="maximum context length"):
        list(server.answer([user("x" * 20_000)]))
    with pytest.raises(AnswerError, match="other"):
        list(RemoteModel(echoing.url, {"model": "other"}).answer([user("Hi")]))


class OddServer(QuietHandler):
    """Answer every request with one text."""

    body = b""

    def do_GET(self) -> None:
        self.send_body(self.body)

    do_POST = do_GET


@pytest.fixture
def odd_server() -> Iterator[str]:
    with http_server(OddServer) as url:
        yield url


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"data": 5}', b'{"data": [{}]}', b"\xff"])
def test_a_response_that_is_not_an_openai_model_list_is_refused(
    body: bytes, odd_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OddServer, "body", body)
    with pytest.raises(ServerError, match="does not speak OpenAI's API"):
        served_models(odd_server)


@pytest.mark.parametrize(("body", "message"), [
    (b"", "ended the answer early"),
    (b'data: {"choices": []}\n\n', "ended the answer early"),
    (b"data: {\n\n", "not JSON"),
    (b"data: 5\n\n", "not a JSON object"),
    (b'data: {"error": {"message": "a step\\nfailed"}}\n\n', "a step failed"),
])  # fmt: skip
def test_streams_that_go_wrong(body: bytes, message: str, odd_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OddServer, "body", body)
    with pytest.raises(AnswerError, match=message):
        list(RemoteModel(odd_server, {"model": "m"}).answer([user("Hi")]))


@pytest.mark.parametrize("usage", [{"completion_tokens": None}, {}, [1], "many", None])
def test_a_usage_without_a_number_of_tokens(usage: Any, odd_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"usage": usage, "choices": [{"delta": {"content": "Hi"}}]}
    monkeypatch.setattr(OddServer, "body", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
    assert list(RemoteModel(odd_server, {"model": "m"}).answer([user("Hi")])) == [Piece("Hi", 0)]


def test_a_loaded_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from metal_engine import llm as llm_module

    monkeypatch.setattr(llm_module, "build_engine", lambda args: tiny_engine())
    with llm_module.LLM("tiny") as llm:
        monkeypatch.setattr(llm.tokenizer, "apply_chat_template", lambda messages: [5, 6, 7])
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        pieces = list(LocalModel(llm, params).answer([user("Hi")]))
        assert "".join(piece.text for piece in pieces) == llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].text
        assert pieces[-1].num_tokens == 6
        monkeypatch.setattr(llm.tokenizer, "apply_chat_template", lambda messages: [5] * 100_000)
        with pytest.raises(AnswerError, match="maximum context length"):
            list(LocalModel(llm, params).answer([user("Hi")]))
        assert llm.stats.num_used_blocks == 0


class Chosen(Exception):
    """Raised when the chat would begin, with this model or server."""


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the server's body, or the name of the model to load, that a chat would use."""
    from metal_engine import llm as llm_module

    def loads(model: str, **_: Any) -> Any:
        raise Chosen(model)

    def talks(answerer: Any, _: ChatArgs) -> bool:
        raise Chosen(answerer._body)

    monkeypatch.setattr(llm_module, "LLM", loads)
    monkeypatch.setattr(chat_module, "_talk", talks)

    def choose(model: str, engine: dict[str, Any] | None = None, **chat_args: Any) -> Any:
        with pytest.raises(Chosen) as chosen:
            chat(ChatArgs(**chat_args), EngineArgs(model=model, **(engine or {})))
        return chosen.value.args[0]

    return choose


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_whom_a_chat_talks_to(choose: Callable[..., Any], served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    port = port_of(served.url)
    assert choose("", port=port)["model"] == MODEL
    asked = choose(MODEL, port=port, temperature=0.5, max_tokens=9)
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == (MODEL, 0.5, 9)
    assert "top_p" not in asked  # the server has its own default
    assert f"on {served.url}" in capsys.readouterr().err
    assert choose("", url=served.url)["model"] == MODEL


def test_a_model_that_is_loaded_here_is_announced(
    choose: Callable[..., Any], served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = port_of(served.url)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    other = str(tmp_path)
    assert choose(other, port=port) == other
    announced = capsys.readouterr().err
    assert f"No running server is used: {served.url} serves {MODEL}, not {other}." in announced
    assert f"Loading {other} into this process" in announced
    assert choose("demo", port=free_port()) == "demo"
    assert "No running server is used: no server responds at " in capsys.readouterr().err
    assert choose("demo", {"max_num_seqs": 3}, port=port) == "demo"
    announced = capsys.readouterr().err
    assert "Flags of the engine are given" in announced and "Loading demo" in announced
    assert choose("", {"max_num_seqs": 3}, url=served.url)["model"] == MODEL
    assert "no effect" in capsys.readouterr().err


def test_chat_reads_host_port_and_key_from_the_variables_of_serve(
    served: Served, choose: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host, port and key come from the variables of `serve`; the key is the first of several."""
    talked_to: list[tuple[str, str | None]] = []

    def talks(answerer: Any, _: ChatArgs) -> bool:
        talked_to.append((answerer.name, answerer._api_key))
        return True

    monkeypatch.setattr(chat_module, "_talk", talks)
    monkeypatch.setenv("METAL_ENGINE_HOST", "0.0.0.0")
    monkeypatch.setenv("METAL_ENGINE_PORT", str(port_of(served.url)))
    monkeypatch.setenv("METAL_ENGINE_API_KEY", "one, two")
    result = CliRunner().invoke(app, ["chat"])
    assert result.exit_code == 0, result.output
    assert talked_to == [(f"{MODEL} on {served.url}", "one")]
    monkeypatch.setenv("METAL_ENGINE_PORT", "9")
    result = CliRunner().invoke(app, ["chat", "--port", str(port_of(served.url))])
    assert result.exit_code == 0 and len(talked_to) == 2, result.output


def test_which_of_a_servers_models_is_meant() -> None:
    cards: list[dict[str, Any]] = [
        {"id": "waiting", "root": "waiting", "max_model_len": None},
        {"id": "local", "root": "org/model", "max_model_len": 9},
        {"id": "adapter", "root": "org/adapter", "parent": "local", "max_model_len": 9},
    ]
    assert (find_card(cards, "") or {})["id"] == "local", "a model that is loaded comes first"
    assert (find_card(cards, "org/model") or {})["id"] == "local", (
        "what is served under another name is not loaded twice"
    )
    assert (find_card(cards, "adapter") or {})["id"] == "adapter"
    assert find_card(cards, "org/adapter") is None and find_card([], "") is None
    assert (find_card(cards[:1], "") or {})["id"] == "waiting"


def test_whom_a_chat_cannot_talk_to(
    choose: Callable[..., Any], served: Served, odd_server: str, monkeypatch: Any
) -> None:
    port = port_of(odd_server)
    assert choose("demo", port=port) == "demo"  # another program listens there
    monkeypatch.setattr(OddServer, "body", b'{"data": [{"id": "demo", "owned_by": "somebody"}]}')
    assert choose("demo", port=port) == "demo"
    assert choose("", url=odd_server)["model"] == "demo"  # with --url, any server is accepted
    for model, url, message in (("other", served.url, "serves .*, not other"), ("", "http://127.0.0.1:9", "no server")):
        with pytest.raises(ConfigError, match=message):
            chat(ChatArgs(url=url), EngineArgs(model=model))
    with pytest.raises(ConfigError, match="give a MODEL"):
        chat(ChatArgs(port=9), EngineArgs(model=""))
    for url in ("localhost:8000", "http://", "http://host:port", "http://host:99999"):
        with pytest.raises(ConfigError, match="--url must be like"):
            ChatArgs(url=url)
    with pytest.raises(ConfigError, match="--api-key must be printable"):
        ChatArgs(api_key="a\nb")
    with pytest.raises(ConfigError, match="--top-p"):
        chat(ChatArgs(port=9, top_p=7.0), EngineArgs(model="demo"))


def test_chat_works_through_pipes_with_invalid_utf_8(echoing: Served) -> None:
    """Includes bytes that are not UTF-8. The notes are not part of the output."""
    command = [sys.executable, "-m", "metal_engine", "chat", "--url", echoing.url]
    done = subprocess.run(command, cwd=ROOT, input=b"One.\\\nTwo.\n/clear\n\xff Hi\n", capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert any("One." in line for line in lines) and any("Two." in line for line in lines)
    assert "Hi" in lines[-1]
    assert f"Talking to {MODEL} on {echoing.url}" in done.stderr.decode()
    assert done.stderr.decode().count("tokens/s]") == 2
    assert not any(module in done.stderr.decode() for module in ("Traceback", "Warning"))
