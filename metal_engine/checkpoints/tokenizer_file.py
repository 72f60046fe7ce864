"""Checks ``tokenizer.json`` before a library reads it: a few bytes in it can demand any amount of memory.

The library allocates tables up to the largest id, and applies the file's normalization rules to each text in sequence.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metal_engine.checkpoints.files import MAX_HEADER_BYTES, check_readable
from metal_engine.errors import ModelLoadError

# Limit of token ids, and of the length to which a text is padded. Published vocabularies have 262,144 tokens.
_MAX_ID = 1 << 22
# Limit of entries in lists and objects. Published files have 1.5 million.
_MAX_ENTRIES = 1 << 23
# Limit of characters that rules may produce from one character, by replacing and prepending. Published files reach 2.
_MAX_GROWTH = 16
# Most bytes that Unicode's own normalization produces from one character (U+FDFA). Published tables have no more.
_UNICODE_BYTES = 33
# Sections with rules that are applied to a text, or to an output.
_RULES = ("normalizer", "decoder")


def check_tokenizer_file(path: Path) -> None:
    """Refuse a ``tokenizer.json`` that needs much more memory than its own size.

    The library reports other errors in the file.

    Raises:
        ModelLoadError: the file needs too much memory. The message is one line.
    """
    check_readable(path, MAX_HEADER_BYTES)
    try:
        problem = _problem(path.read_bytes())
    except RecursionError:
        problem = "is nested too deeply"
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        return
    if problem:
        raise ModelLoadError(f"cannot load the tokenizer of {path.parent}: {path.name} {problem}")


def _problem(data: bytes) -> str:
    """Return a description of the problem with the file, or "" if the file is acceptable."""
    if data.count(b",") > _MAX_ENTRIES:
        return f"has more than {_MAX_ENTRIES} entries"
    content = json.loads(data)
    largest = max(_ids(content), default=0)
    if largest >= _MAX_ID:
        return f"has the token id {largest}, and ids must be below {_MAX_ID}"
    if _padded_length(content.get("padding") or {}) > _MAX_ID:
        return f"pads texts to more than {_MAX_ID} tokens"
    for name in _RULES:
        if (growth := _growth(content.get(name) or {})) > _MAX_GROWTH:
            return f"has a {name} that may make {growth:.3g} characters of one; the limit is {_MAX_GROWTH}"
    return ""


def _ids(content: dict[str, Any]) -> Iterator[int]:
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict):  # ids in a list are its indices
        yield from vocabulary.values()
    yield from (token["id"] for token in content.get("added_tokens") or ())


def _padded_length(padding: dict[str, Any]) -> int:
    strategy = padding.get("strategy")
    fixed = strategy.get("Fixed", 0) if isinstance(strategy, dict) else 0
    return max(fixed, padding.get("pad_to_multiple_of") or 0)


def _growth(rule: dict[str, Any]) -> float:
    """Estimate the largest number of characters that a rule produces from one character, from its parameters."""
    match rule.get("type"):
        case "Sequence":
            inner = rule.get("normalizers") or rule.get("decoders") or ()
            return math.prod(map(_growth, inner))
        case "Replace":
            pattern = rule["pattern"].get("String")
            # A regular expression may match between any two characters.
            return 1 + len(rule["content"]) if not pattern else max(1, len(rule["content"]) / len(pattern))
        case "Prepend":
            return 1 + len(rule["prepend"])
        case "Precompiled":
            table = base64.b64decode(rule["precompiled_charsmap"])
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            return max(1, max(map(len, texts)) / _UNICODE_BYTES)
    return 1
