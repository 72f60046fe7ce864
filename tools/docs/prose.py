"""Finds sentences that a reader has to read twice, in docstrings, comments, messages and Markdown.

Each sentence is scored against the patterns and measures of :mod:`tools.docs.prose_patterns`. A sentence that reaches
``--min-score`` is flagged. `make lint` checks the changed sentences of the working tree.

    python -m tools.docs.prose PATH...                       list flagged sentences, highest score first
    python -m tools.docs.prose PATH... --summary             rates by folder, counts by pattern
    python -m tools.docs.prose --changed-since main          only sentences on lines added since main
    python -m tools.docs.prose --changed-since A..B          only sentences on lines added between A and B
    python -m tools.docs.prose PATH... --max-per-1000 60     exit with status 1 if the rate is higher
    python -m tools.docs.prose --labels labels.tsv           precision and recall on labelled sentences
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.docs.prose_patterns import ADVICE, score
from tools.docs.prose_sentences import Sentence, plain, sentences_of

MIN_SCORE = 2.5
# Below this number of changed sentences a rate is meaningless, and --max-per-1000 allows one flagged sentence.
FEW_SENTENCES = 13
SUFFIXES = (".py", ".md")
SKIPPED_FOLDERS = {".git", ".venv", "venv", "node_modules", "__pycache__", "build", "dist", ".mypy_cache"}


@dataclass(frozen=True)
class Flagged:
    """A sentence whose score reaches the minimum, with the names of the patterns that it matches."""

    sentence: Sentence
    score: float
    patterns: list[str]


@dataclass
class Result:
    """Sentences read and sentences flagged.

    Attributes:
        num_sentences: number of sentences by folder.
        flagged: flagged sentences in reading order.
    """

    num_sentences: Counter[str] = field(default_factory=Counter)
    flagged: list[Flagged] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of sentences read."""
        return sum(self.num_sentences.values())

    @property
    def per_1000(self) -> float:
        """Flagged sentences per 1,000 sentences."""
        return 1000 * len(self.flagged) / max(self.total, 1)

    def exceeds(self, max_per_1000: float, *, only_changes: bool = False) -> bool:
        """Return True if more than ``max_per_1000`` of 1,000 sentences are flagged.

        With ``only_changes``, one flagged sentence among fewer than ``FEW_SENTENCES`` is allowed.
        """
        if only_changes and self.total < FEW_SENTENCES and len(self.flagged) <= 1:
            return False
        return self.per_1000 > max_per_1000


def check(sentences: Iterable[Sentence], min_score: float = MIN_SCORE, depth: int = 2) -> Result:
    """Score sentences.

    Args:
        min_score: score from which a sentence is flagged.
        depth: number of folder levels by which the result counts sentences; 2 counts by ``tools/docs``.
    """
    result = Result()
    for sentence in sentences:
        result.num_sentences[_folder_of(sentence.path, depth)] += 1
        total, names = score(plain(sentence.text), is_first=sentence.is_first)
        if total >= min_score:
            result.flagged.append(Flagged(sentence, total, names))
    return result


def find_files(paths: list[str]) -> list[Path]:
    """Return the files in ``paths``, and the Python and Markdown files under its folders, sorted."""
    found: set[Path] = set()
    for name in paths:
        path = Path(name)
        if path.is_file():
            found.add(path)
            continue
        for file in path.rglob("*"):
            if file.suffix in SUFFIXES and not SKIPPED_FOLDERS.intersection(file.parts):
                found.add(file)
    return sorted(found)


def is_in_git() -> bool:
    """Return True if git is installed and the current folder belongs to a working tree."""
    command = ["git", "rev-parse", "--is-inside-work-tree"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "true"
    except FileNotFoundError:
        return False


def added_lines(revisions: str) -> dict[str, set[int]]:
    """Return the line numbers that ``git diff REVISIONS`` adds, by path relative to the current folder.

    Raises:
        subprocess.CalledProcessError: git does not know a revision.
    """
    options = ["--unified=0", "--no-color", "--no-ext-diff", "--relative", "--src-prefix=a/", "--dst-prefix=b/"]
    command = ["git", "-c", "core.quotePath=off", "diff", *options, revisions, "--"]
    diff = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout
    added: dict[str, set[int]] = {}
    path = ""
    for line in diff.split("\n"):
        if line.startswith("+++ "):
            path = line[6:].rstrip("\t")  # git appends a tab to a name with spaces
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk.group(1)), int(hunk.group(2) or 1)
            added.setdefault(path, set()).update(range(start, start + count))
    return added


def _read(path: Path, revisions: str | None) -> str:
    """Return a file's text: from revision B if ``revisions`` is ``A..B``, otherwise from disk."""
    if revisions and ".." in revisions:
        newer = revisions.split("..")[-1].lstrip(".") or "HEAD"
        command = ["git", "show", f"{newer}:./{path.as_posix()}"]
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout
    return path.read_text(encoding="utf-8", errors="replace")


def all_sentences(paths: list[str], *, messages: bool = True) -> Iterator[Sentence]:
    """Yield the sentences of the files and folders in ``paths``.

    Args:
        messages: False to skip strings that are not docstrings.
    """
    for path in find_files(paths):
        yield from sentences_of(path, _read(path, None), messages=messages)


def changed_sentences(paths: list[str], revisions: str, *, messages: bool = True) -> Iterator[Sentence]:
    """Yield the sentences on lines that ``git diff REVISIONS`` adds, in the files and folders in ``paths``.

    Args:
        messages: False to skip strings that are not docstrings.

    Raises:
        subprocess.CalledProcessError: git does not know a revision.
    """
    added = added_lines(revisions)
    roots = [Path(name) for name in paths]
    for path in sorted(map(Path, added)):
        if path.suffix not in SUFFIXES or not any(root in (path, *path.parents) for root in roots):
            continue
        try:
            source = _read(path, revisions)
        except (OSError, subprocess.CalledProcessError):
            continue  # deleted
        for sentence in sentences_of(path, source, messages=messages):
            if added[path.as_posix()].intersection(range(sentence.first_line, sentence.last_line + 1)):
                yield sentence


def _folder_of(path: str, depth: int) -> str:
    """Return the first ``depth`` parts of a path, without the name of the file."""
    parts = Path(path).parts
    return "/".join(parts[: min(depth, len(parts) - 1)]) or "."


def _print_summary(result: Result, depth: int) -> None:
    """Print rates by folder and counts by pattern."""
    by_folder = Counter(_folder_of(one.sentence.path, depth) for one in result.flagged)
    print(f"{'folder':44} {'sentences':>9} {'flagged':>8} {'per 1,000':>9}")
    for folder, count in sorted(result.num_sentences.items()):
        print(f"{folder:44} {count:9} {by_folder[folder]:8} {1000 * by_folder[folder] / count:9.0f}")
    print(f"{'all':44} {result.total:9} {len(result.flagged):8} {result.per_1000:9.0f}")
    print("\npattern (a sentence can match several)")
    for name, count in Counter(name for one in result.flagged for name in one.patterns).most_common():
        print(f"  {name:14} {count:6}  {ADVICE.get(name, '')}")


def evaluate(path: str, min_score: float) -> None:
    """Print precision and recall on labelled sentences, for each half of the file and for the whole file.

    Args:
        path: table with a header and the columns ``half`` (tune or test), ``label`` (riddle, awkward or clear),
            ``is_first`` (1 or 0) and ``sentence``, separated by tabs.
        min_score: score from which a sentence is flagged.
    """
    lines = [line.split("\t") for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    for half in ("tune", "test", "all"):
        counts: Counter[tuple[str, bool]] = Counter()
        for row in rows:
            if half in ("all", row["half"]):
                total, _ = score(plain(row["sentence"]), is_first=row["is_first"] == "1")
                counts[row["label"], total >= min_score] += 1
        flagged = sum(count for (_, is_flagged), count in counts.items() if is_flagged)
        found, missed = counts["riddle", True], counts["riddle", False]
        precision, recall = found / max(flagged, 1), found / max(found + missed, 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        of = {name: f"{counts[name, True]} of {counts[name, True] + counts[name, False]}" for name, _ in counts}
        print(
            f"{half:5} n={sum(counts.values()):3}  precision {precision:.2f}"
            f" (with awkward sentences {(found + counts['awkward', True]) / max(flagged, 1):.2f})"
            f"  recall {recall:.2f}  F1 {f1:.2f}"
            f"  flagged: {', '.join(f'{name} {text}' for name, text in of.items())}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders to read (default: this folder)")
    parser.add_argument(
        "--min-score", type=float, default=MIN_SCORE, help="lowest score flagged (default: %(default)s)"
    )
    parser.add_argument("--changed-since", metavar="REV", help="read only lines that `git diff REV` adds (REV or A..B)")
    parser.add_argument("--summary", action="store_true", help="print rates by folder and counts by pattern")
    parser.add_argument("--depth", type=int, default=2, help="folder levels in the summary (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per flagged sentence")
    parser.add_argument("--no-messages", action="store_true", help="skip strings that are not docstrings")
    parser.add_argument("--max-per-1000", type=float, metavar="N", help="exit with status 1 above this rate")
    parser.add_argument("--labels", metavar="FILE", help="print precision and recall on labelled sentences")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Return the exit status: 1 above ``--max-per-1000``, 2 if a path does not exist or git does not know the revision.
    """
    args = _parser().parse_args(argv)
    if args.labels:
        evaluate(args.labels, args.min_score)
        return 0
    paths, messages = args.paths or ["."], not args.no_messages
    if args.changed_since and not is_in_git():
        print("no changes to check: this folder is not in a git working tree", file=sys.stderr)
        return 0
    missing = [path for path in paths if not Path(path).exists()]
    if missing and not args.changed_since:  # a revision may have other paths
        print(f"not found: {', '.join(missing)}", file=sys.stderr)
        return 2
    try:
        sentences = (
            changed_sentences(paths, args.changed_since, messages=messages)
            if args.changed_since
            else all_sentences(paths, messages=messages)
        )
        result = check(sentences, args.min_score, args.depth)
    except subprocess.CalledProcessError as error:
        print(error.stderr.strip(), file=sys.stderr)
        return 2

    if args.summary:
        _print_summary(result, args.depth)
    else:
        for one in sorted(result.flagged, key=lambda one: (-one.score, one.sentence.path, one.sentence.first_line)):
            if args.json:
                print(json.dumps({**asdict(one.sentence), "score": one.score, "patterns": one.patterns}))
            else:
                names = ", ".join(one.patterns)
                print(f"{one.sentence.path}:{one.sentence.first_line}: {one.score:.1f} [{names}] {one.sentence.text}")
        if not args.json:
            counts = f"{len(result.flagged)} of {result.total} sentences flagged: {result.per_1000:.0f} per 1,000"
            print(counts, file=sys.stderr)
    if args.max_per_1000 is not None and result.exceeds(args.max_per_1000, only_changes=bool(args.changed_since)):
        print(f"more than {args.max_per_1000:g} of 1,000 sentences are hard to read; rewrite them:", file=sys.stderr)
        for name in dict.fromkeys(name for one in result.flagged for name in one.patterns if name in ADVICE):
            print(f"  {name}: {ADVICE[name]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
