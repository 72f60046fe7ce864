"""Tries OpenAI's own client."""

from __future__ import annotations

import json

import openai
from tried import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, expect, expect_paris, try_all

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
MESSAGES = [{"role": "user", "content": QUESTION}]


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20)
    expect_paris(answer.choices[0].message.content)
    expect(answer.usage.completion_tokens > 0, answer.usage)


def stream() -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(chunks)
    expect_paris("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    expect(chunks[-1].usage.completion_tokens > 0, chunks[-1])


def ask_with_tool(tool_choice: str) -> openai.types.chat.ChatCompletionMessage:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": CITY_SCHEMA}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[tool],
        tool_choice=tool_choice,
        temperature=0,
        max_tokens=60,
    )
    return answer.choices[0].message


def tools_auto() -> None:
    message = ask_with_tool("auto")
    # A model as small as the demo's may answer without a call.
    expect(message.tool_calls or message.content, message)


def tools_required() -> None:
    call, *_ = ask_with_tool("required").tool_calls
    expect(call.function.name == "get_weather", call)
    expect(isinstance(json.loads(call.function.arguments)["city"], str), call)


def structured_output() -> None:
    schema = {"name": "place", "schema": {**CITY_SCHEMA, "additionalProperties": False}, "strict": True}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    expect(isinstance(json.loads(answer.choices[0].message.content)["city"], str), answer)


def responses() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20)
    expect_paris(answer.output_text)


def completions_with_log_probabilities() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=2, logprobs=2
    )
    expect_paris(answer.choices[0].text)
    expect(all(value <= 0 for value in answer.choices[0].logprobs.token_logprobs), answer.choices[0].logprobs)


def embeddings() -> None:
    # By default, the client requests base64 and decodes it.
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a kitten"])
    first, second = (item.embedding for item in answer.data)
    expect(len(first) == len(second) > 1, len(first))
    as_floats = client.embeddings.create(model=MODEL, input="a cat", encoding_format="float").data[0].embedding
    expect(max(abs(a - b) for a, b in zip(first, as_floats, strict=True)) < 1e-4, "base64 and float differ")


if __name__ == "__main__":
    try_all(
        chat,
        stream,
        tools_auto,
        tools_required,
        structured_output,
        responses,
        completions_with_log_probabilities,
        embeddings,
    )
