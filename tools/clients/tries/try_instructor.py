"""Tries Instructor in each of its JSON modes, and in its tool modes."""

from __future__ import annotations

from collections.abc import Callable

import instructor
import openai
from pydantic import BaseModel
from tried import KEY, MODEL, PERSON_TEXT, URL, expect, try_all

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
MODES = ("JSON", "JSON_O1", "JSON_SCHEMA", "MD_JSON", "TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS")
# JSON and MD_JSON only ask for JSON and give the schema. A model as small as the demo's needs an example to answer with
# data instead of a schema.
HOW = 'Answer as before, with {"name": …, "age": …}.'
EXAMPLE = [
    {"role": "user", "content": f"Extract the person: Ben is 7 years old. {HOW}"},
    {"role": "assistant", "content": '```json\n{"name": "Ben", "age": 7}\n```'},
]


class Person(BaseModel):
    name: str
    age: int


def extract(mode: str) -> None:
    extractor = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    person = extractor.create(
        model=MODEL,
        messages=[*EXAMPLE, {"role": "user", "content": f"{PERSON_TEXT} {HOW}"}],
        response_model=Person,
        temperature=0,
        max_tokens=120,
        max_retries=1,
    )
    expect(isinstance(person, Person), person)


def attempt(mode: str) -> Callable[[], None]:
    def one() -> None:
        extract(mode)

    one.__name__ = mode
    return one


if __name__ == "__main__":
    try_all(*map(attempt, MODES))
