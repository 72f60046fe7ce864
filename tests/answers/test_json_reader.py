"""The incremental JSON parser compared with Python's parser."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.answers.json_reader import JSONObjectReader

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(parts: list[str]) -> tuple[int, JSONObjectReader]:
    reader = JSONObjectReader()
    return sum(reader.add(part) for part in parts), reader


@given(st.dictionaries(st.text(), VALUES), st.booleans(), st.sampled_from([None, 2]), st.integers(1, 9))
def test_objects_are_read_to_their_end(value: dict[str, Any], ascii_only: bool, indent: int | None, size: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for followed in ("", "}", " x"):
        whole = text + followed
        taken, reader = read([whole[i : i + size] for i in range(0, len(whole), size)])
        assert (taken, reader.done, reader.bad) == (len(text), True, False)


# Possible endings of the innermost value, and the brackets after it.
ENDS = ["", '"', '""', "0", ":0", '":0', '"":0', "rue", "ue", "e", "alse", "ull", "ll", "l", 'n"', 'n":0', ',"":0']
ENDS += [zeros * "0" + end for zeros in range(1, 5) for end in ('"', '":0')]
CLOSERS = ["".join(closers) for number in range(6) for closers in itertools.product("}]", repeat=number)]


def is_begun(text: str) -> bool:
    """Return True if some ending completes the text to an object. Tries all endings."""
    for end, closers in itertools.product(ENDS, CLOSERS):
        try:
            value = json.loads(text + end + closers)
        except ValueError:
            continue
        if isinstance(value, dict):
            return True
    return False


ALPHABET = '{}[]":,\\ u0a1-.eEtrn\n'


@settings(max_examples=150)
@given(st.text(alphabet=ALPHABET, max_size=7))
def test_accepted_text_is_always_a_prefix_of_a_json_object(text: str) -> None:
    text = "{" + text
    taken, reader = read(list(text))
    assert taken <= len(text)
    if reader.done:
        assert isinstance(json.loads(text[:taken]), dict)
    elif reader.bad:
        assert not is_begun(text[: taken + 1])
        assert is_begun(text[:taken])
    else:
        assert taken == len(text) and is_begun(text)


@pytest.mark.parametrize(
    "text", ["[1]", '"a"', "5", "nullx", '{"a": Rome}', '{"a": NaN}', '{"a": 01}', '{a: 1}', '{"a": "\n"}',
             '{"a": 1,}', '{,}', '{"a" 1}', '{"a": [1,]}', '{"a": .5}', '{"a": 1.}', '{"a": -}', '{"a": "\\x"}']
)  # fmt: skip
def test_text_that_is_not_a_json_object_is_rejected(text: str) -> None:
    taken, reader = read([text])
    assert reader.bad and not reader.done and taken < len(text)


@pytest.mark.parametrize("number", ["{}", "-1{}.0{}e-0{}"])
def test_long_numbers_are_read_once(number: str) -> None:
    """A quadratic search would take minutes."""
    text = '{"a": ' + number.replace("{}", "1" * 200_000)
    taken, reader = read([*text, "}"])
    assert (taken, reader.done, reader.bad) == (len(text) + 1, True, False)
    taken, reader = read([*text, "x"])
    assert (taken, reader.bad) == (len(text), True)
