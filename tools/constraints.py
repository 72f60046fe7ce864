"""The exact versions that the tests ran on, as constraints.txt: written from what is installed, and checked against it.

    .venv/bin/python -m tools.constraints            # after `make test` has passed: write the file
    .venv/bin/python -m tools.constraints --check    # does it say what is installed?

`make` installs with the file, so that everybody's tests run on the same versions; `make CONSTRAINTS= test` takes the
newest that pyproject.toml allows. It lists what the project and its extras need, directly or not, on this platform.
What only another one needs is listed where somebody names its one version (as mlx does for mlx-metal), and is otherwise
left to the installer; so is what the extras of OPTIONAL need where they are not installed.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints.txt"
EXTRAS = ("dev", "full", "gateway", "plots", "valkey")
# Installed by `make test-full` alone.
OPTIONAL = ("full",)
HERE = dict(default_environment())
# Where it runs beside the platform that the file is made on.
ELSEWHERE = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)$", re.MULTILINE)


def project_requirements(extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """What pyproject.toml asks for, with some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for requirements in lists for line in requirements]


def needed(requirements: list[Requirement]) -> tuple[dict[str, str], list[str]]:
    """What some requirements lead to, through the metadata of what is installed.

    Returns:
        The version of each distribution by its normalized name, and the names of those that are missing here.
    """
    versions: dict[str, str] = {}
    missing: list[str] = []
    seen: set[tuple[str, str]] = set()  # (name, extra)
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, for_extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if not _applies(requirement, for_extra, {}):
            version = _only_version(requirement)
            if version is not None and _applies(requirement, for_extra, ELSEWHERE):
                versions.setdefault(name, version)
            continue
        installed = _installed(name)
        if installed is None:
            missing.append(name)
            continue
        versions[name], its_requirements = installed
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(one, extra) for one in its_requirements]
    return versions, sorted(set(missing))


@cache
def _installed(name: str) -> tuple[str, list[Requirement]] | None:
    """A distribution's version and requirements, those of its extras included; None if it is not there."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return distribution.version, [Requirement(line) for line in distribution.requires or ()]


def _applies(requirement: Requirement, extra: str, changes: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**HERE, **changes, "extra": extra})


def _only_version(requirement: Requirement) -> str | None:
    """The version of `name==version`; None where there is a choice."""
    specifiers = list(requirement.specifier)
    exact = len(specifiers) == 1 and specifiers[0].operator == "==" and "*" not in specifiers[0].version
    return specifiers[0].version if exact else None


def constraints(versions: dict[str, str]) -> str:
    """The text of the file."""
    return _head() + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _head() -> str:
    version = ".".join(platform.python_version_tuple()[:2])
    here = f"CPython {version} on {platform.system()} {platform.machine()}"
    return f"# The versions that the tests ran on, with {here}.\n# Made by `python -m tools.constraints`; see there.\n"


def disagreements(text: str) -> Iterator[str]:
    """Says in a line each how a file of constraints differs from what is needed and installed.

    On another platform than the file was made on, other distributions may be needed; only versions are compared.
    """
    listed = dict(_PIN.findall(text))
    versions, _ = needed(project_requirements())
    _, missing = needed(project_requirements(tuple(extra for extra in EXTRAS if extra not in OPTIONAL)))
    yield from (f"{name} is needed and not installed" for name in missing)
    made_here = text.startswith(_head())
    for name, version in sorted(versions.items()):
        if listed.get(name, version) != version:
            yield f"{name} is {version} here and {listed[name]} in the file"
        elif name not in listed and made_here:
            yield f"{name} {version} is needed and not listed"
    for name in sorted(listed.keys() - versions.keys()):
        if (
            made_here and _installed(name) is not None
        ):  # others are of another platform, or of an extra that is not installed
            yield f"{name} is listed and not needed"


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="say how the file differs; status 1 if it does")
    if parser.parse_args().check:
        found = list(disagreements(FILE.read_text(encoding="utf-8")))
        print("\n".join([f"{FILE.name}: {line}" for line in found]) or f"{FILE.name} says what is installed")
        return 1 if found else 0
    versions, missing = needed(project_requirements())
    FILE.write_text(constraints(versions), encoding="utf-8")
    print(f"{len(versions)} versions" + (f"; not installed: {', '.join(missing)}" if missing else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
