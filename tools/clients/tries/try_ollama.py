"""Tries Ollama's own client. Some tools support only Ollama's API."""

from __future__ import annotations

import ollama
from tried import MODEL, QUESTION, URL, expect, expect_paris, try_all

client = ollama.Client(host=URL, timeout=300)
GREEDY = {"temperature": 0, "num_predict": 20}
MESSAGES = [{"role": "user", "content": QUESTION}]


def list_models() -> None:
    names = [model.model for model in client.list().models]
    expect(any(name.split(":")[0] == MODEL for name in names), names)


def chat() -> None:
    expect_paris(client.chat(model=MODEL, messages=MESSAGES, options=GREEDY).message.content)


def stream() -> None:
    parts = list(client.chat(model=MODEL, messages=MESSAGES, options=GREEDY, stream=True))
    expect_paris("".join(part.message.content or "" for part in parts))
    expect(parts[-1].done, parts[-1])


def generate() -> None:
    answer = client.generate(model=MODEL, prompt=QUESTION, options=GREEDY)
    expect_paris(answer.response)


def show() -> None:
    expect(client.show(MODEL).details is not None, client.show(MODEL))


def embed() -> None:
    first, second = client.embed(model=MODEL, input=["a cat", "a kitten"]).embeddings
    expect(len(first) == len(second) > 1, len(first))


if __name__ == "__main__":
    try_all(list_models, chat, stream, generate, show, embed)
