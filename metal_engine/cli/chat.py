"""Conversation of ``metal-engine chat``."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from metal_engine.cli.chat_backends import (
    AnswerError,
    ChatBackend,
    LocalModel,
    Message,
    RemoteModel,
    ServerError,
    served_models,
)
from metal_engine.cli.chat_input import Input, history_path, open_input
from metal_engine.cli.chat_output import AnswerView
from metal_engine.cli.options import NO_MODEL
from metal_engine.cli.server_address import OWNER, base_url, find_card, first_key
from metal_engine.errors import ConfigError, ParameterError
from metal_engine.local_paths import local_path
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.chat_args import ChatArgs
from metal_engine.settings.fields import flag

# Styles of notes on a terminal.
_DIM, _BOLD = "2", "1"
# Sampling defaults if neither the user nor the checkpoint sets any.
_SAMPLING = {"temperature": 0.7, "top_p": 0.95}

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_HELP = """\
/clear         delete the conversation (also /reset)
/system TEXT   set the system prompt; without TEXT, show it
/save FILE     write the conversation to FILE: JSON if its name ends with .json, else Markdown
/exit          end the chat (also Ctrl-D, or Ctrl-C at an empty prompt)
Enter sends; Alt-Enter, or Enter after a backslash, starts a new line. Ctrl-C stops the current answer.
A message that begins with a slash needs a space before it."""


def chat(chat_args: ChatArgs, args: EngineArgs) -> bool:
    """Chat until the user ends it. Return True if every message was answered.

    Raises:
        ConfigError: there is no server and no model, or settings are invalid.
        ModelLoadError: the model cannot be loaded.
    """
    found = _find_server(chat_args, args)
    if isinstance(found, RemoteModel):
        _note(f"Talking to {found.name}; the server's own settings apply.")
        return _talk(found, chat_args)
    from metal_engine.cli.early_checks import check_engine_args
    from metal_engine.sampling_params import SamplingParams

    check_engine_args(args)
    given = _given_sampling(chat_args)
    try:
        SamplingParams(**given)
    except ParameterError as error:
        raise ConfigError(flag(error.name), error.message) from error
    _announce(found)
    _announce(f"Loading {args.model} into this process, which takes its own memory for weights and KV cache.")
    from metal_engine.llm import LLM
    from metal_engine.text.default_sampling import default_sampling_text

    with LLM(**vars(args)) as llm:
        defaults = llm.config.model.default_sampling or _SAMPLING
        sampling = {"max_tokens": None, **defaults, **given}
        model = LocalModel(llm, SamplingParams(**sampling))
        _note(f"Talking to {model.name}, with {default_sampling_text(sampling)}.")
        return _talk(model, chat_args)


def _talk(backend: ChatBackend, chat_args: ChatArgs) -> bool:
    source = open_input(history_path())
    return ChatHistory(backend, source, AnswerView(sys.stdout), chat_args.system).run()


# --- choice of the backend ---


def _find_server(chat_args: ChatArgs, args: EngineArgs) -> RemoteModel | str:
    """Return the server at ``--url``, or a metal-engine server at ``--host`` and ``--port`` that serves the model.

    If this process must load the model, return the reason as text. Without ``--url``, this process loads the model in
    two cases:

    - A model and engine settings are given. A running server would ignore the settings.
    - A model is given, and no metal-engine server at the address serves it.

    Raises:
        ConfigError: the server at ``--url`` cannot be used, or no server answers and no model is named.
    """
    url = base_url(chat_args.host, chat_args.port, chat_args.url)
    key = first_key(chat_args.api_key) or None
    has_settings = args != EngineArgs(model=args.model)
    if chat_args.url is None and has_settings and args.model:
        return "Flags of the engine are given, so no running server is used."
    try:
        cards = served_models(url, key)
        card = _usable_card(cards, url, args.model, is_any_server=chat_args.url is not None)
    except ServerError as error:
        if chat_args.url is not None:
            raise ConfigError("--url", f"{error} (--url)") from error
        if not args.model:
            raise ConfigError(None, f"{NO_MODEL}; {error} (--port or --url names another server)") from error
        return f"No running server is used: {error}."
    if has_settings:
        _note("Settings of the engine have no effect on a running server.")
    return RemoteModel(url, {"model": card["id"], **_given_sampling(chat_args)}, key)


def _usable_card(cards: list[dict[str, Any]], url: str, model: str, *, is_any_server: bool) -> dict[str, Any]:
    """Return the entry of ``/v1/models`` to use. Raise ServerError if this server cannot be used.

    Args:
        model: the user's MODEL; empty for any.
        is_any_server: True if the server may be another program than metal-engine.
    """
    if not is_any_server and all(card.get("owned_by") != OWNER for card in cards):
        raise ServerError(f"{url} is not a metal-engine server")
    card = find_card(cards, model)
    if card is None:
        served = ", ".join(one["id"] for one in cards) or "nothing"
        raise ServerError(f"{url} serves {served}, not {model or 'a model'}")
    return card


def _given_sampling(chat_args: ChatArgs) -> dict[str, Any]:
    names = ("temperature", "top_p", "max_tokens")
    return {name: value for name in names if (value := getattr(chat_args, name)) is not None}


def _note(text: str, style: str = _DIM) -> None:
    """Print to standard error a text that is not part of an answer."""
    # A server's text may contain control characters for terminals.
    text = "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
    is_styled = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[{style}m{text}\x1b[22m" if is_styled else text, file=sys.stderr, flush=True)


def _announce(text: str) -> None:
    """Print to standard error, in bold, a text about something that takes memory or time."""
    _note(text, _BOLD)


# --- the conversation ---


class ChatHistory:
    """Conversation of one chat. Reads messages and commands from ``source``, and shows answers in ``view``.

    Args:
        system: system prompt, if any.
    """

    def __init__(self, backend: ChatBackend, source: Input, view: AnswerView, system: str | None = None) -> None:
        self._backend = backend
        self._source = source
        self._view = view
        self._system = system
        self._messages: list[Message] = []
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: _note(_HELP),
            "clear": self._clear,
            "reset": self._clear,
            "system": self._set_system,
            "save": self._save,
        }

    def run(self) -> bool:
        """Read and answer messages until the user ends the chat. Return True if every message was answered."""
        all_answered = True
        while (text := self._source.read()) is not None:
            command = _COMMAND.fullmatch(text.rstrip())
            if command is None:
                if text.strip():
                    all_answered &= self._ask(text.strip())
            elif command[1] == "exit":
                break
            elif command[1] in self._commands:
                self._commands[command[1]](command[2] or "")
            else:
                _note(f"There is no command /{command[1]}; /help lists them. Put a space before a message.")
        return all_answered

    @property
    def messages(self) -> list[Message]:
        """Conversation so far, beginning with the system prompt."""
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._messages

    def _ask(self, text: str) -> bool:
        """Answer a message. Return False if the backend failed. The user may stop an answer with Ctrl-C.

        A stopped answer stays in the conversation. If the backend fails or the answer is empty, the message is removed
        from the conversation.
        """
        self._messages.append({"role": "user", "content": text})
        answer = ""
        speed = _Speed()
        problem = None
        try:
            with closing(self._backend.answer(self.messages)) as pieces:
                for piece in pieces:
                    speed.count(piece.num_tokens)
                    self._view.add(piece.text, is_reasoning=piece.is_reasoning)
                    answer += "" if piece.is_reasoning else piece.text
        except KeyboardInterrupt:
            pass  # ends this answer, but not the conversation
        except AnswerError as error:
            problem = str(error)
        self._view.finish()
        if problem is not None:
            _note(f"[{problem}; /clear starts over]")
        elif summary := speed.summary():
            _note(summary)
        if answer and problem is None:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()
        return problem is None

    def _clear(self, _: str) -> None:
        self._messages.clear()
        _note("A new conversation begins.")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            _note("The system prompt is set.")
        else:
            _note(self._system or "There is no system prompt.")

    def _save(self, name: str) -> None:
        if not name.strip():
            _note("/save needs the name of a file.")
            return
        path = local_path(name.strip())
        as_json = path.suffix == ".json"
        text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n" if as_json else self._markdown()
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                self._saved.add(path)  # before the write, which may fail: the user can then save again
                file.write(text)
        except FileExistsError:
            _note(f"{path} exists already: choose another name.")
        except (OSError, RuntimeError, ValueError) as error:
            _note(f"Cannot write {path}: {error}")
        else:
            _note(f"Saved {len(self.messages)} messages to {path}.")

    def _markdown(self) -> str:
        return "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in self.messages)


class _Speed:
    """Measures the speed of an answer: the time to the first tokens, and the tokens per second afterwards."""

    def __init__(self) -> None:
        self._start = self._last_time = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Record that the answer has ``num_tokens`` tokens so far."""
        if num_tokens > self._num_tokens:
            self._num_tokens, self._last_time = num_tokens, time.monotonic()
            self._first = self._first or (num_tokens, self._last_time)

    def summary(self) -> str:
        """Return a summary in one line; empty for an answer without tokens."""
        if self._first is None:
            return ""
        (num_first, first_time), num_tokens = self._first, self._num_tokens
        if num_tokens > num_first:
            rate = (num_tokens - num_first) / max(self._last_time - first_time, 1e-6)
        else:  # all tokens arrived at once
            rate = num_tokens / max(first_time - self._start, 1e-6)
        tokens = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
        return f"[{tokens}, the first after {first_time - self._start:.2f} s, {rate:.1f} tokens/s]"
