"""Tries Outlines over an OpenAI client."""

from __future__ import annotations

import openai
import outlines
from pydantic import BaseModel
from tried import KEY, MODEL, PERSON_TEXT, QUESTION, URL, expect, expect_paris, try_all

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
model = outlines.from_openai(client, MODEL)


class Person(BaseModel):
    name: str
    age: int


def text() -> None:
    expect_paris(model(QUESTION, temperature=0, max_tokens=20))


def pydantic_type() -> None:
    answer = model(PERSON_TEXT, Person, temperature=0, max_tokens=120)
    expect(isinstance(Person.model_validate_json(answer), Person), answer)


def vllm_backend() -> None:
    # Outlines' backend for vLLM's own parameters, with a regular expression.
    backend = outlines.from_vllm(client, MODEL)
    answer = backend("When was the French Revolution?", outlines.types.Regex(r"1[0-9]{3}"), temperature=0, max_tokens=8)
    expect(len(answer) == 4 and answer.isdigit(), answer)


if __name__ == "__main__":
    try_all(text, pydantic_type, vllm_backend)
