"""Tries LiteLLM as a library, through three of its providers."""

from __future__ import annotations

import litellm
from tried import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, expect, expect_paris, try_all

MESSAGES = [{"role": "user", "content": QUESTION}]
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0}


def complete(**options: object) -> str:
    answer = litellm.completion(messages=MESSAGES, temperature=0, max_tokens=20, **options)
    return answer.choices[0].message.content


def openai() -> None:
    expect_paris(complete(**OPENAI))


def openai_stream() -> None:
    chunks = litellm.completion(messages=MESSAGES, temperature=0, max_tokens=20, stream=True, **OPENAI)
    expect_paris("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def openai_tools() -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": CITY_SCHEMA}}
    answer = litellm.completion(
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[tool],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
        **OPENAI,
    )
    call, *_ = answer.choices[0].message.tool_calls
    expect(call.function.name == "get_weather", call)


def openai_embeddings() -> None:
    answer = litellm.embedding(input=["a cat", "a kitten"], encoding_format="float", **OPENAI)
    first, second = (item["embedding"] for item in answer.data)
    expect(len(first) == len(second) > 1, len(first))


def anthropic() -> None:
    expect_paris(complete(model=f"anthropic/{MODEL}", api_base=URL, api_key=KEY))


def ollama_chat() -> None:
    expect_paris(complete(model=f"ollama_chat/{MODEL}", api_base=URL))


def ollama_generate() -> None:
    answer = complete(model=f"ollama/{MODEL}", api_base=URL)
    expect(len(answer) > 0, answer)


if __name__ == "__main__":
    try_all(openai, openai_stream, openai_tools, openai_embeddings, anthropic, ollama_chat, ollama_generate)
