"""Writes constraints.txt, the exact versions that the tests ran on, from the installed packages, and checks the file.

    .venv/bin/python -m tools.constraints            # after `make test` has passed: write the file
    .venv/bin/python -m tools.constraints --check    # compare the file with the installed packages

`make` installs with the file, so that all tests run on the same versions. `make CONSTRAINTS= test` takes the newest
versions that pyproject.toml allows. The file lists all direct and indirect dependencies of the project and its extras
on this platform. A dependency of another platform is listed only if a package requires one exact version of it, as mlx
does for mlx-metal. The installer chooses the versions of unlisted packages. These are other dependencies of another
platform, and the packages of extras in OPTIONAL that are not installed.
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
# Installed only by `make test-full`.
OPTIONAL = ("full",)
# Extra that `make test` installs without dependencies: the encoders run with the project's own dependencies.
WITHOUT_DEPENDENCIES = "vision"
HERE = dict(default_environment())
# The other supported platform: the file is made on Linux.
ELSEWHERE = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)$", re.MULTILINE)


def project_requirements(extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """Return the requirements in pyproject.toml: the project's own and those of the given extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for requirements in lists for line in requirements]


def needed_here(extras: tuple[str, ...] = EXTRAS) -> tuple[dict[str, str], list[str]]:
    """Resolve the project's requirements. Return versions and missing names, as :func:`needed` does.

    The packages of the extra WITHOUT_DEPENDENCIES are included without their dependencies.
    """
    versions, missing = needed(project_requirements(extras))
    for requirement in project_requirements((WITHOUT_DEPENDENCIES,)):
        name = canonicalize_name(requirement.name)
        installed = _installed(name)
        if installed is not None:
            versions.setdefault(name, installed[0])
        elif name not in missing:
            missing.append(name)
    return versions, sorted(missing)


def needed(requirements: list[Requirement]) -> tuple[dict[str, str], list[str]]:
    """Resolve requirements through the metadata of the installed packages.

    Returns:
        Version of each distribution by its normalized name, and names of distributions that are not installed.
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
    """Return the version and all requirements of a distribution, including extras; None if it is missing."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return distribution.version, [Requirement(line) for line in distribution.requires or ()]


def _applies(requirement: Requirement, extra: str, changes: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**HERE, **changes, "extra": extra})


def _only_version(requirement: Requirement) -> str | None:
    """Return the version of `name==version`; None if several versions are allowed."""
    specifiers = list(requirement.specifier)
    exact = len(specifiers) == 1 and specifiers[0].operator == "==" and "*" not in specifiers[0].version
    return specifiers[0].version if exact else None


def constraints(versions: dict[str, str]) -> str:
    """Return the contents of constraints.txt for versions by name."""
    return _head() + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _head() -> str:
    version = ".".join(platform.python_version_tuple()[:2])
    here = f"CPython {version} on {platform.system()} {platform.machine()}"
    return f"# The versions that the tests ran on, with {here}.\n# Made by `python -m tools.constraints`; see there.\n"


def disagreements(text: str) -> Iterator[str]:
    """Yield one line for each difference between a file of constraints and the required and installed packages.

    On a platform that differs from the platform in the file, only versions are compared, because dependencies differ.
    """
    listed = dict(_PIN.findall(text))
    versions, _ = needed_here()
    _, missing = needed_here(tuple(extra for extra in EXTRAS if extra not in OPTIONAL))
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
        ):  # other entries belong to another platform, or to an extra that is not installed
            yield f"{name} is listed and not needed"


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="print how the file differs; status 1 if it does")
    if parser.parse_args().check:
        found = list(disagreements(FILE.read_text(encoding="utf-8")))
        print("\n".join([f"{FILE.name}: {line}" for line in found]) or f"{FILE.name} says what is installed")
        return 1 if found else 0
    versions, missing = needed_here()
    FILE.write_text(constraints(versions), encoding="utf-8")
    print(f"{len(versions)} versions" + (f"; not installed: {', '.join(missing)}" if missing else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
