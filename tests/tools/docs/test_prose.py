"""Detector of hard sentences: patterns, sentence splitting, changed lines in a git repository, and exit status."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tools.docs import prose
from tools.docs.prose_patterns import ADVICE, score
from tools.docs.prose_sentences import Sentence, markdown_sentences, plain, python_sentences

# Pattern, a sentence that matches it and is flagged, and its rewriting.
PAIRS = [
    ("free-relative", "What tells this machine from others.", "Return the host name of this machine."),
    ("no-referent", "Those of steps that failed, and of others.", "Entries of failed steps."),
    ("agency", "End a load; who waits for it is told.", "Finish a load and resolve the future of its waiters."),
    ("idiom", "the states from which a step's groups go on", "the initial states of a step's groups"),
    (
        "inversion",
        "Of several models it tells only sums to those who do not send the key.",
        "With several models, clients without the key get totals only.",
    ),
    ("fragment", "under which it is served.", "name under which the adapter is served."),
    ("ellipsis", "If nothing else has, it is as it was, and the rest likewise.", "The pool is otherwise unchanged."),
    (
        "long",
        "Where a request that has been preempted is scheduled again before its blocks have been given to another, it "
        "takes them back with all that they hold, so that none of its tokens, nor those of the prompt before them, "
        "need to be computed again.",
        "A preempted request reuses its cached blocks when it is scheduled again.",
    ),
    ("negations", "It is not that nothing is replayed where none is.", "Replay is enabled for this step."),
    ("pronouns", "It has them if they have it, and then it is as this one is.", "The two pools have the same blocks."),
    ("empty-words", "as many as are left of what there was before", "number of free blocks"),
    ("chaining", "Nothing of it is there: it was made anew; others are not: they go on.", "The pool is reallocated."),
]


def _flagged(text: str) -> tuple[bool, list[str]]:
    total, names = score(plain(text), is_first=True)
    return total >= prose.MIN_SCORE, names


@pytest.mark.parametrize(("pattern", "bad", "good"), PAIRS, ids=[f"{pair[0]}-{i}" for i, pair in enumerate(PAIRS)])
def test_bad_sentences_are_flagged_and_rewritten_ones_are_not(pattern: str, bad: str, good: str) -> None:
    is_flagged, names = _flagged(bad)
    assert is_flagged and pattern in names, names
    assert not _flagged(good)[0], _flagged(good)


def test_every_pattern_has_a_pair() -> None:
    assert {pair[0] for pair in PAIRS} == set(ADVICE)


SOURCE = '''"""Reads the file. Skips comments.

Code::

    what it is that those who ask for it come to

Args:
    name: name of the file.
    under: under which it is served,
        on two lines.
"""

# A comment on
# two lines of text.
x = 1  # noqa: E501 not a sentence of prose


class Answer:
    raise ValueError(f"the file {x} does not exist")
    pattern = r"(?:words that are) in a regular expression"
'''


def _texts(sentences: list[Sentence]) -> list[tuple[int, int, str, str]]:
    return [(s.first_line, s.last_line, s.kind, s.text) for s in sentences]


def test_sentences_of_python() -> None:
    expected = [
        (8, 8, "entry", "name of the file."),
        (9, 10, "entry", "under which it is served, on two lines."),
        (13, 14, "comment", "A comment on two lines of text."),
        (19, 19, "message", "the file X does not exist"),
    ]
    assert _texts(list(python_sentences("a.py", SOURCE))) == expected
    assert _texts(list(python_sentences("a.py", SOURCE, messages=False))) == expected[:-1]
    assert list(python_sentences("a.py", "def broken(:")) == []


def test_sentences_of_markdown() -> None:
    page = """# A heading of several words

The first sentence is here. The second sentence
has two lines.

```
code in a fence is not read
```

<!-- a comment in HTML
that has two lines -->
- An item of a list.

| cell | A cell of at least eight words is read as a sentence. |
"""
    assert _texts(list(markdown_sentences("a.md", page))) == [
        (3, 3, "markdown", "The first sentence is here."),
        (3, 4, "markdown", "The second sentence has two lines."),
        (12, 12, "markdown", "An item of a list."),
        (14, 14, "markdown", "A cell of at least eight words is read as a sentence."),
    ]


def test_code_links_and_flags_are_not_prose() -> None:
    assert plain("See :func:`~a.what` and `those of` in [the page](https://a.org/x), with --max-len N.") == (
        "See X and X in the page, with X."
    )


def _git(folder: Path, *args: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgSign=false"]
    subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True)


def _write(path: Path, *sentences: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(sentences) + "\n")


GOOD = "The pool stores the keys and values of each block."
BAD = "What tells this machine from others is of those who ask for it."


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Git repository with one commit, whose page has a bad sentence; the current folder is the repository."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    _git(tmp_path, "init", "-b", "main")
    _write(tmp_path / "docs/a page.md", BAD, GOOD)
    _write(tmp_path / "gone.md", BAD)
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "Pages")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_only_added_lines_are_read(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    since = ["--changed-since", "HEAD"]
    assert prose.main([*since, "--max-per-1000", "0"]) == 0
    assert "0 of 0 sentences" in capsys.readouterr().err

    _write(repository / "docs/a page.md", BAD, GOOD, f"New: {BAD}")
    (repository / "gone.md").unlink()
    (repository / "data.txt").write_text(BAD)
    _git(repository, "add", "--all")
    assert prose.main(since) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"docs/a page\.md:5: [\d.]+ \[.+\] New: What tells .*\n", out)
    assert "1 of 1 sentences" in err
    assert prose.main([*since, "docs"]) == 0
    assert "1 of 1 sentences" in capsys.readouterr().err
    assert prose.main([*since, "elsewhere"]) == 0
    assert "0 of 0 sentences" in capsys.readouterr().err

    _git(repository, "commit", "-m", "More")
    _write(repository / "docs/a page.md", GOOD)  # revisions are read, not this
    assert prose.main(["--changed-since", "HEAD~1..HEAD", "--json"]) == 0
    flagged = json.loads(capsys.readouterr().out)
    assert (flagged["path"], flagged["first_line"], flagged["kind"]) == ("docs/a page.md", 5, "markdown")


def test_a_rate_needs_some_sentences(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = repository / "docs/a page.md"
    command = ["--changed-since", "HEAD", "--max-per-1000", "70"]

    def status(num_good: int, num_bad: int) -> int:
        _write(page, BAD, GOOD, *[GOOD] * num_good, *[BAD] * num_bad)
        return prose.main(command)

    assert status(0, 1) == 0 and status(11, 1) == 0
    assert status(12, 1) == 1  # 77 per 1,000
    assert status(14, 1) == 0 and status(0, 2) == 1
    assert "free-relative: name the thing" in capsys.readouterr().err
    assert prose.main(["docs", "--max-per-1000", "70"]) == 1  # a rate of all sentences allows none
    assert prose.main(["docs", "--max-per-1000", "900"]) == 0


def test_a_path_that_does_not_exist_is_an_error(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main(["docs", "dcos", "--max-per-1000", "900"]) == 2
    assert capsys.readouterr().err == "not found: dcos\n"


def test_an_unknown_revision_is_an_error(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main(["--changed-since", "no-such-revision"]) == 2
    assert "no-such-revision" in capsys.readouterr().err
