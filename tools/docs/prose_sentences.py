"""Splits docstrings, comments, messages and Markdown into sentences."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_WORDS = 4  # shorter texts are skipped


@dataclass(frozen=True)
class Sentence:
    """One sentence of prose.

    Attributes:
        path: path of the file.
        first_line: line of the file on which the sentence starts.
        last_line: line of the file on which the sentence ends.
        kind: ``doc``, ``entry`` (one item of an Args or Attributes section), ``comment``, ``message`` or ``markdown``.
        is_first: True if the sentence is the first of its docstring, comment or paragraph.
    """

    path: str
    first_line: int
    last_line: int
    kind: str
    is_first: bool
    text: str


_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|approx|Nos?|Fig|Mr|Dr|St)\.$")
_CODE = re.compile(r"``[^`]+``|`[^`\n]+`|:\w+:`[^`]+`|\[[A-Z0-9_, +*/.-]+\]")


def plain(text: str) -> str:
    """Replace code, roles and links by a placeholder noun, so that patterns see only prose."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":\w+:`[~.]?[^`]+`", "X", text)
    text = _CODE.sub("X", text)
    text = re.sub(r"https?://\S+", "X", text)
    # Standard phrases of reference documentation are clear.
    text = re.sub(r"^(?:Return True|True) if\b", "Checks that", text)
    text = re.sub(r"[;,] ?(?:else )?[Nn]one if (?:there (?:is|are) (?:none|no \w+)|absent|unknown)", "", text)
    text = re.sub(r",? if there (?:is|are) (?:one|any|none)\b", "", text)
    text = re.sub(
        r"\b(?:one or more|two or more|all of (?:the|these|its)|each of (?:the|these|its))\b", "several", text
    )
    text = re.sub(r"(?<!\w)--?[a-z][\w-]+(?:[ =][A-Z]\w*)?", "X", text)
    return re.sub(r"[*_]{1,2}([^*_]+)[*_]{1,2}", r"\1", text)


def split_sentences(lines: list[tuple[int, str]]) -> Iterator[tuple[int, int, str]]:
    """Split the numbered lines of a paragraph into sentences. Yields first line, last line and text of each."""
    words = [(number, word) for number, line in lines for word in line.split()]
    start = 0
    for i, (number, word) in enumerate(words):
        is_last = i + 1 == len(words)
        ends = re.search(r"[.!?][)\"'”`*]*$", word) and not _ABBREVIATION.search(word)
        if is_last or (ends and re.match(r"[\"'(`*“\[]*[A-Z0-9:`-]", words[i + 1][1])):
            part = words[start : i + 1]
            yield part[0][0], number, " ".join(word for _, word in part)
            start = i + 1


_SECTION = re.compile(
    r"^(Args|Arguments|Attributes|Returns|Yields|Raises|Note|Notes|Example|Examples|Parameters):\s*(.*)$"
)
_ENTRY = re.compile(r"^\*{0,2}[\w.,* `]+(?:\s*\([^)]*\))?: +(?=\S)")


def docstring_sentences(lines: list[tuple[int, str]]) -> Iterator[tuple[int, int, str, str, bool]]:
    """Split the numbered lines of a docstring into sentences. Skips code blocks and drawings.

    Yields:
        First line, last line, kind, text, and whether the sentence is the first of the docstring or of an item.
    """
    indents = [len(line) - len(line.lstrip()) for _, line in lines[1:] if line.strip()]
    base = min(indents, default=0)
    paragraph: list[tuple[int, str]] = []
    kind, is_in_section, is_in_code, is_first, entry_indent = "doc", False, False, True, 0

    def flush() -> Iterator[tuple[int, int, str, str, bool]]:
        nonlocal paragraph, is_first
        if paragraph:
            for i, (first, last, text) in enumerate(split_sentences(paragraph)):
                yield first, last, kind, text, is_first or (kind == "entry" and i == 0)
                is_first = False
        paragraph = []

    for index, (number, line) in enumerate(lines):
        stripped = line.strip()
        indent = 0 if index == 0 else len(line) - len(line.lstrip()) - base
        if not stripped:
            yield from flush()
            continue
        if is_in_code:
            if indent > 0:
                continue
            is_in_code = False
        section = _SECTION.match(stripped)
        if section and indent <= 0:
            yield from flush()
            is_in_section, entry_indent = True, 0
            kind = "entry"
            stripped = section.group(2)
            if not stripped:
                continue
        elif indent <= 0 and is_in_section:
            yield from flush()
            is_in_section, kind = False, "doc"
        if is_in_section and (entry := _ENTRY.match(stripped)) and (not entry_indent or indent <= entry_indent):
            yield from flush()
            entry_indent = indent
            stripped = stripped[entry.end() :]
        elif not is_in_section and indent > 0:
            continue  # an indented block outside a section is code or a drawing
        if re.match(r"^(?:[-*] |\d+\. )", stripped):
            yield from flush()
        paragraph.append((number, stripped))
        if stripped.endswith("::"):
            yield from flush()
            is_in_code = True
    yield from flush()


# Beginnings of comments for tools, drawings and code.
_NOT_PROSE = re.compile(r"^(?:<|noqa|type:|fmt:|pragma|pylint|mypy|ruff|!|-\*-|\[|->|-{3,}|={3,}|#|>>>|@)")


def is_prose(text: str) -> bool:
    """Return True if a text has enough ordinary words for a sentence."""
    words = re.findall(r"[A-Za-z]{2,}", plain(text))
    if len(words) < MIN_WORDS or _NOT_PROSE.match(text):
        return False
    letters = sum(ch.isalpha() or ch.isspace() for ch in text)
    return letters > 0.72 * len(text) and any(word.islower() for word in words)


def python_sentences(path: str, source: str, *, messages: bool = True) -> Iterator[Sentence]:
    """Yield the sentences of a Python file's docstrings, comments and messages; nothing if its syntax is invalid."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for i, statement in enumerate(node.body):
            # Strings between the fields of a class count too: some tools read them as documentation.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value
                if isinstance(value.value, str) and (i == 0 or isinstance(node, ast.ClassDef)):
                    docstrings.add(id(value))
                    lines = list(enumerate(value.value.split("\n"), value.lineno))
                    for first, last, kind, text, is_first in docstring_sentences(lines):
                        if is_prose(text):
                            yield Sentence(path, first, last, kind, is_first, text)
    yield from _comments(path, source)
    if messages:
        yield from _messages(path, tree, docstrings)


def _comments(path: str, source: str) -> Iterator[Sentence]:
    """Yield the sentences of comments. Adjacent comment lines form a paragraph."""
    block: list[tuple[int, str]] = []
    blocks: list[list[tuple[int, str]]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT:
                continue
            text = token.string.lstrip("#").strip()
            stands_alone = not token.line[: token.start[1]].strip()
            if stands_alone and block and block[-1][0] + 1 == token.start[0]:
                block.append((token.start[0], text))
                continue
            if block:
                blocks.append(block)
            block = [(token.start[0], text)] if stands_alone else []
            if not stands_alone:
                blocks.append([(token.start[0], text)])
    except (tokenize.TokenError, IndentationError):
        pass
    if block:
        blocks.append(block)
    for lines in blocks:
        if _NOT_PROSE.match(lines[0][1]):
            continue
        for i, (first, last, text) in enumerate(split_sentences(lines)):
            if is_prose(text):
                yield Sentence(path, first, last, "comment", i == 0, text)


def _messages(path: str, tree: ast.AST, docstrings: set[int]) -> Iterator[Sentence]:
    """Yield the sentences of strings. ``docstrings`` holds the ids of the nodes to skip."""
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = []
            for part in node.values:
                seen.add(id(part))
                parts.append(part.value if isinstance(part, ast.Constant) else "X")
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings or id(node) in seen:
                continue
            text = node.value
        else:
            continue
        if (
            "\n" in text.strip()
            or len(text) > 600
            or text.count("{") > 3
            or re.search(r" [=<>?]+ |&&|[a-z]\(|^python |^-W|\(\?[:!=<]", text)
        ):
            continue  # a template, data, code or a regular expression
        text = re.sub(r"%[-\d.]*[sdrgfx]", "X", text)
        lines = [(node.lineno, text)]
        for i, (first, last, sentence) in enumerate(split_sentences(lines)):
            if is_prose(sentence):
                yield Sentence(path, first, node.end_lineno or last, "message", i == 0, sentence)


def markdown_sentences(path: str, source: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown file.

    Skips code, headings, quotes, HTML comments, short table cells, and sentences that begin with a link.
    """
    paragraph: list[tuple[int, str]] = []
    is_in_fence = is_in_html = False

    def flush() -> Iterator[Sentence]:
        nonlocal paragraph
        for i, (first, last, text) in enumerate(split_sentences(paragraph)):
            if is_prose(text):
                yield Sentence(path, first, last, "markdown", i == 0, text)
        paragraph = []

    previous_blank = True
    for number, line in enumerate(source.split("\n"), 1):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            yield from flush()
            is_in_fence = not is_in_fence
            continue
        if is_in_fence:
            continue
        if stripped.startswith("<!--"):
            is_in_html = True
        if is_in_html:
            is_in_html = "-->" not in stripped
            continue
        if not stripped or stripped.startswith(("#", "---", "===", ">")):
            yield from flush()
            previous_blank = True
            continue
        if line.startswith("    ") and previous_blank and not paragraph and not re.match(r"[-*\d]", stripped):
            continue  # indented code
        if stripped.startswith("|"):
            yield from flush()
            for cell in stripped.strip("|").split("|"):
                if len(cell.split()) >= 8:
                    paragraph.append((number, cell.strip()))
                    yield from flush()
            continue
        if item := re.match(r"^(?:[-*+]|\d+\.) +", stripped):
            yield from flush()
            stripped = stripped[item.end() :]
        paragraph.append((number, stripped))
        previous_blank = False
    yield from flush()


def sentences_of(path: Path, source: str, *, messages: bool) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown or Python file. Messages of tests are skipped."""
    if path.suffix == ".md":
        yield from markdown_sentences(str(path), source)
    elif path.suffix == ".py":
        is_test = "tests" in path.parts or path.name.startswith("test_")
        yield from python_sentences(str(path), source, messages=messages and not is_test)
