"""Tries LangChain with its OpenAI and its Anthropic package."""

from __future__ import annotations

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from tried import KEY, MODEL, PERSON_TEXT, QUESTION, URL, expect, expect_paris, try_all

model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=60, max_retries=0)


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


class Person(BaseModel):
    name: str
    age: int


def chat() -> None:
    expect_paris(model.invoke(QUESTION).content)


def stream() -> None:
    expect_paris("".join(chunk.content for chunk in model.stream(QUESTION)))


def tools() -> None:
    answer = model.bind_tools([get_weather], tool_choice="required").invoke("What is the weather in Rome?")
    call, *_ = answer.tool_calls
    expect(call["name"] == "get_weather" and isinstance(call["args"]["city"], str), call)


def structured_output() -> None:
    person = model.with_structured_output(Person).invoke(PERSON_TEXT)
    expect(isinstance(person, Person), person)


def anthropic_chat() -> None:
    anthropic = ChatAnthropic(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=20, max_retries=0)
    expect_paris(anthropic.invoke(QUESTION).content)


def embeddings() -> None:
    # By default, this class sends token ids of OpenAI's tokenizer.
    embedder = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    first, second = embedder.embed_documents(["a cat", "a kitten"])
    expect(len(first) == len(second) > 1, len(first))
    query = embedder.embed_query("a cat")
    expect(max(abs(a - b) for a, b in zip(first, query, strict=True)) < 1e-4, "a text alone and in a batch differ")


if __name__ == "__main__":
    try_all(chat, stream, tools, structured_output, anthropic_chat, embeddings)
