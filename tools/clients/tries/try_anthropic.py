"""Tries Anthropic's own client."""

from __future__ import annotations

import anthropic
from tried import CITY_SCHEMA, KEY, MODEL, QUESTION, URL, expect, expect_paris, try_all

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
# The server accepts a temperature, but the methods of this client do not.
GREEDY = {"temperature": 0}
MESSAGES = [{"role": "user", "content": QUESTION}]


def messages() -> None:
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=20, extra_body=GREEDY)
    expect_paris(answer.content[0].text)
    expect(answer.usage.output_tokens > 0, answer.usage)


def stream() -> None:
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=20, extra_body=GREEDY) as events:
        expect_paris("".join(events.text_stream))
        expect(events.get_final_message().stop_reason == "end_turn", events.get_final_message())


def tools() -> None:
    tool = {"name": "get_weather", "description": "The weather in a city", "input_schema": CITY_SCHEMA}
    answer = client.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[tool],
        # A model as small as the demo's keeps calling the tool if it is allowed to.
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=60,
        extra_body=GREEDY,
    )
    call, *_ = [block for block in answer.content if block.type == "tool_use"]
    expect(call.name == "get_weather" and isinstance(call.input["city"], str), call)
    expect(answer.stop_reason == "tool_use", answer.stop_reason)


def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    usage = answer.usage
    expect(counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0), (counted, usage))


if __name__ == "__main__":
    try_all(messages, stream, tools, count_tokens)
