"""Checks the files of a tokenizer before a library reads them: a few bytes in them can demand any amount of memory.

The ``tokenizers`` library allocates tables up to the largest id, and applies the file's normalization rules to each
text in sequence.
"""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metal_engine.checkpoints.file_checks import MAX_HEADER_BYTES, check_readable
from metal_engine.errors import ModelLoadError

# Limit of token ids, and of the length to which a text is padded. Published vocabularies have 262,144 tokens.
_MAX_ID = 1 << 22
# Limit of entries in lists and objects. Published files have 1.5 million.
_MAX_ENTRIES = 1 << 23
# Limit of characters that rules may produce from one character, by replacing and prepending. Published files reach 10.
# Unicode's own normalization multiplies this once more, by up to `_UNICODE_CHARS`.
_MAX_GROWTH = 16
# Maximum number of characters that Unicode's own normalization produces from one character (U+FDFA). The tables in
# published tokenizers do not exceed it.
_UNICODE_CHARS = 18
# Maximum number of characters that ByteLevel produces from one character, because it writes each UTF-8 byte as a
# character. NFKD may then turn each of these characters into three, as for U+00BC.
_BYTE_CHARS = 4
_NORMALIZED_BYTE_CHARS = 12
# Sections with rules that are applied to a text, or to an output.
_RULES = ("normalizer", "pre_tokenizer", "decoder")
# Fields of a sequence with its steps.
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")


def check_tokenizer_file(path: Path) -> None:
    """Refuse a ``tokenizer.json`` that needs much more memory than its own size, or that would cause a panic.

    The ``tokenizers`` library reports other errors in the file.

    Raises:
        ModelLoadError: the file cannot be opened, needs too much memory, is nested too deeply, or has a template that
            would make the library panic. The message is one line.
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


def check_vocabulary_files(folder: Path) -> None:
    """Refuse too large token ids in ``vocab.json``, ``added_tokens.json`` and ``tokenizer_config.json``.

    ``transformers`` reads these files in addition to ``tokenizer.json`` or instead of it. Other errors in the files are
    left to ``transformers``.

    Raises:
        ModelLoadError: an id is too large, or a file cannot be opened or is too large. The message is one line.
    """
    for name in ("vocab.json", "added_tokens.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        check_readable(path, MAX_HEADER_BYTES)
        try:
            content = json.loads(path.read_bytes())
            ids = (
                (int(id_) for id_ in content.get("added_tokens_decoder") or ())
                if "config" in name
                else content.values()
            )
            largest = max((id_ for id_ in ids if isinstance(id_, int)), default=0)
        except (AttributeError, OSError, TypeError, ValueError, RecursionError):
            continue  # transformers reports the error
        if largest >= _MAX_ID:
            problem = f"{name} has the token id {largest}, and ids must be below {_MAX_ID}"
            raise ModelLoadError(f"cannot load the tokenizer of {folder}: {problem}")


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
    if problem := _template_problem(content.get("post_processor") or {}):
        return problem
    for name in _RULES:
        if (growth := _growth(name, content.get(name) or {})) > _MAX_GROWTH:
            return f"has a {name} that may make {growth:.3g} characters of one; the limit is {_MAX_GROWTH}"
    return ""


def _ids(content: dict[str, Any]) -> Iterator[int]:
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict):  # ids in a list are its indices
        yield from vocabulary.values()
    yield from (token["id"] for token in content.get("added_tokens") or ())
    for step in _steps(content.get("post_processor") or {}):
        for token in (step.get("special_tokens") or {}).values():
            yield from token["ids"]


def _template_problem(processor: dict[str, Any]) -> str:
    """Return a description of the template that would make the library panic; "" if no template would.

    A template puts special tokens around the tokens of one text (``single``, sequence A) or of two texts (``pair``,
    sequences A and B).
    """
    for step in _steps(processor):
        known = step.get("special_tokens") or {}
        for name in ("single", "pair"):
            for piece in step.get(name) or ():
                token = piece.get("SpecialToken", {}).get("id")
                if token is not None and token not in known:
                    return f"has a post_processor whose {name!r} uses {token!r}, which is not among its special_tokens"
                if name == "single" and piece.get("Sequence", {}).get("id") == "B":
                    return "has a post_processor whose 'single' uses a second text (B)"
    return ""


def _padded_length(padding: dict[str, Any]) -> int:
    strategy = padding.get("strategy")
    fixed = strategy.get("Fixed", 0) if isinstance(strategy, dict) else 0
    return max(fixed, padding.get("pad_to_multiple_of") or 0)


def _growth(section: str, rule: dict[str, Any]) -> float:
    """Return the largest number of characters that a section's rules may produce from one character.

    The growth of a sequence is the product of its steps' growth. Unicode normalization and lowercasing are not counted:
    together they produce at most ``_UNICODE_CHARS`` characters from one, in any order and number. A text that a rule
    inserts counts in its longest normal form, because later steps may normalize it.

    Args:
        section: name of the section, e.g. ``normalizer``.
        rule: content of the section.
    """
    steps = list(_steps(rule))
    tables = [
        step for step in steps if step.get("type", "Precompiled") == "Precompiled" and "precompiled_charsmap" in step
    ]
    growth = math.prod(_step_growth(section, step) for step in steps)
    # The first table may grow a text as much as Unicode normalization does. That factor is not counted.
    return growth / min(_step_growth(section, tables[0]), _UNICODE_CHARS) if tables else growth


def _steps(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a rule and the rules inside it."""
    yield rule
    for name in _SEQUENCES:
        for inner in rule.get(name) or ():
            yield from _steps(inner)


def _step_growth(section: str, rule: dict[str, Any]) -> float:
    """Return the largest number of characters that one rule produces from one character, without its inner rules."""
    # The library accepts some rules without their type, and ignores fields of other types. So all fields count.
    growth: float = 1
    match rule:
        case {"pattern": {"String": str(found)}, "content": str(inserted)} if found:
            growth = max(growth, _longest_form(inserted) / len(found))
        case {"pattern": _, "content": str(inserted)}:  # a regular expression may match between any two characters
            growth = 1 + _longest_form(inserted)
    match rule:
        case {"prepend": str(inserted)}:
            growth = max(growth, 1 + _longest_form(inserted))
    match rule:
        case {"precompiled_charsmap": str(encoded)}:
            growth = max(growth, max(map(_longest_form, _table_texts(encoded)), default=1))
    if rule.get("suffix") == "" or rule.get("word_delimiter_token") == "":
        growth = max(growth, 2)  # the decoder inserts a space between any two characters: it replaces an empty text
    if rule.get("handle_chinese_chars"):
        growth = max(growth, 3)  # a space on both sides
    match section, rule.get("type"):
        case "normalizer", "ByteLevel":
            growth = max(growth, _NORMALIZED_BYTE_CHARS)
        case "pre_tokenizer", "ByteLevel":
            growth = max(growth, _BYTE_CHARS + bool(rule.get("add_prefix_space", True)))
        case ("pre_tokenizer", "Metaspace") | ("decoder", "WordPiece"):
            growth = max(growth, 2)  # a character before each word or token
    return growth


def _table_texts(encoded: str) -> list[str]:
    """Return the replacement texts in a base64-encoded table of characters.

    Returns an empty list if ``encoded`` is not base64: the tokenizers library refuses such a table.
    """
    try:
        table = base64.b64decode(encoded)
    except ValueError:
        return []
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return [text.decode(errors="replace") for text in texts]


def _longest_form(text: str) -> int:
    """Return the largest number of characters of a text after Unicode normalization and lowercasing, in any order."""
    while (form := unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).lower())) != text:
        text = form
    return len(text)
