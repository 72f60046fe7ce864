"""Files, modules, headings and make targets named in README.md, docs/ and the tools exist."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("metal_engine", "kernels", "tools", "tests", "docs")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Their comments and docstrings contain commands and paths too.
SOURCES = [ROOT / "Makefile", *sorted((ROOT / "kernels").glob("*.metal")), *sorted((ROOT / "tools").rglob("*.py"))]
PACKAGE = sorted((ROOT / "metal_engine").rglob("*.py"))

# A script or module, by its path or the end of its path. Parts of longer names, URLs and globs do not count.
FILE = re.compile(r"(?<![\w*./~-])[\w-][\w/-]*\.(?:py|sh)\b")
# A module in a docstring or comment of the package: "``batch.py``".
QUOTED = re.compile(r"``([\w/-]+\.py)``")
# Any path inside one of the project's folders.
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/](?![\w*])")
MODULE = re.compile(r"(?<![\w./-])(?:tools|tests|metal_engine)(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)\s]+)\)")
TARGET = re.compile(r"`make ([a-z-]+)")


@cache
def _files() -> set[str]:
    """Return every file of the tree under each ending of its path: a/b.py and b.py."""
    paths = [p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    return {"/".join(path.parts[i:]) for path in paths for i in range(len(path.parts))}


def _is_module(name: str) -> bool:
    """Return True if ``name`` is a module, a package, or names inside one, as in metal_engine.step.Runner.execute."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:i])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.is_file():
            return all(re.search(rf"\b{defined}\b", source.read_text()) for defined in parts[i:])
    return False


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_names(text: str) -> list[str]:
    """Return the paths and modules in a text that do not exist in the tree."""
    paths = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    return paths + [name for name in MODULE.findall(text) if not _is_module(name)]


def wrong_files(text: str) -> list[str]:
    """Return the Python files and scripts in a text that match no ending of a path in the tree."""
    return [name for name in FILE.findall(text) if name not in _files()]


@pytest.mark.parametrize("page", [*PAGES, *SOURCES], ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist(page: Path) -> None:
    assert wrong_names(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_links_and_targets_exist(page: Path) -> None:
    text = page.read_text()
    assert wrong_files(text) == []
    links = [link for link in LINK.findall(text) if not link.startswith(("http:", "https:"))]
    for link in links:
        name, _, anchor = link.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), link
        assert not anchor or anchor in _anchors(linked), link
    makefile = (ROOT / "Makefile").read_text()
    for target in TARGET.findall(text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_modules_named_in_the_package_exist() -> None:
    of_llama_cpp = {"convert_hf_to_gguf.py"}
    names = {name: path for path in PACKAGE for name in QUOTED.findall(path.read_text())}
    assert {name: path for name, path in names.items() if name not in _files() | of_llama_cpp} == {}
    assert len(names) > 5


def test_the_table_of_layers_is_import_linters() -> None:
    page = (ROOT / "docs/dev/architecture.md").read_text()
    rows = re.findall(r"^\|(.*?)\|", page.partition("## Layers")[2].partition("\n- ")[0], re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["metal_engine"])
    level_of = {name: level for level, layer in enumerate(layers) for name in layer.split(" | ")}
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert {"__main__", *names} == level_of.keys()
    assert names == sorted(names, key=lambda name: level_of[name])


def test_wrong_names_are_noticed() -> None:
    right = "tools/metal_sim/ docs/cli.md `python -m tools.docs.cli` metal_engine.step.Runner.execute engine/core.py"
    assert wrong_names(right) == wrong_files(right) == []
    wrong = ["tests/kernels", "docs/none.png", "tools.bench_steps", "metal_engine.step.Stop"]
    assert wrong_names("; ".join(wrong)) == wrong
    assert wrong_files("`mlx_plan.py`, platform/blas.py.") == ["mlx_plan.py", "platform/blas.py"]
