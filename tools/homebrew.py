"""Writes a Homebrew formula for a release, with a wheel of each dependency in the version of constraints.txt.

    python -m tools.homebrew dist/metal_engine-0.1.0-py3-none-any.whl --url URL --homepage URL > metal-engine.rb

Homebrew builds Python packages from source, which MLX does not allow without Xcode's Metal compiler. This formula
installs wheels instead. pip resolves the dependencies, so run the tool on a Mac with the Python that the formula names.
Uses the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = "3.13"
_WHEEL = re.compile(r"^metal_engine-(?P<version>[^-]+)-py3-none-any\.whl$")
_PLAIN = re.compile(r"[\w.+:/%~-]+")  # text that needs no escapes in a Ruby string


@dataclass(frozen=True)
class Wheel:
    """File that the formula downloads.

    Attributes:
        name: name of the package.
        url: address of the wheel.
        sha256: digest of the wheel in hexadecimal.
    """

    name: str
    url: str
    sha256: str


def dependencies(report: dict[str, Any]) -> list[Wheel]:
    """Return the wheels in a report of ``pip install --report``, sorted by name. metal-engine's own is left out.

    Raises:
        ValueError: the URL of a package is not an ``https`` URL of a wheel, or its SHA-256 is missing.
    """
    wheels = []
    for item in report["install"]:
        name, info = item["metadata"]["name"], item["download_info"]
        if _normalized(name) == "metal-engine":
            continue
        url, digest = info["url"], info.get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if not (url.startswith("https://") and url.endswith(".whl") and _PLAIN.fullmatch(url)):
            raise ValueError(f"{name} is not a wheel on the web: {url}")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"{name} has no SHA-256")
        wheels.append(Wheel(_normalized(name), url, digest))
    return sorted(wheels, key=lambda wheel: wheel.name)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def formula(own: Wheel, version: str, homepage: str, others: Iterable[Wheel]) -> str:
    """Return the text of the Homebrew formula.

    Args:
        own: metal-engine's wheel.
        others: wheels of its dependencies.

    Raises:
        ValueError: an address or the version has characters that a Ruby string would interpret.
    """
    for text in (own.url, version, homepage):
        if not _PLAIN.fullmatch(text):
            raise ValueError(f"{text!r} cannot be in a formula")
    resources = "".join(
        f'  resource "{wheel.name}" do\n    url "{wheel.url}", using: :nounzip\n    sha256 "{wheel.sha256}"\n  end\n\n'
        for wheel in others
    )
    return f"""# Made by `python -m tools.homebrew` from constraints.txt. Do not edit.
class MetalEngine < Formula
  desc "LLM inference server for Apple Silicon"
  homepage "{homepage}"
  url "{own.url}", using: :nounzip
  version "{version}"
  sha256 "{own.sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{PYTHON}"

{resources}  def install
    wheels = buildpath/"wheels"
    wheels.mkpath
    cp cached_download, wheels/File.basename(stable.url)
    resources.each do |package|
      package.fetch
      cp package.cached_download, wheels/File.basename(package.url)
    end
    system Formula["python@{PYTHON}"].opt_bin/"python{PYTHON}", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-index", "--no-deps", *Dir[wheels/"*.whl"]
    bin.install_symlink libexec/"bin/metal-engine"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/metal-engine --version")
  end
end
"""


def resolve(wheel: Path) -> dict[str, Any]:
    """Resolve a wheel's dependencies for this machine with pip. Return pip's report. Installs nothing.

    Raises:
        SystemExit: pip failed. The message is its error output.
    """
    options = ["--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, "-c", str(CONSTRAINTS), str(wheel)]
    # Settings of this machine could name other indexes.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(command, capture_output=True, text=True, env={**env, "PIP_CONFIG_FILE": os.devnull})
    if done.returncode:
        raise SystemExit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="wheel of metal-engine")
    parser.add_argument("--url", required=True, help="address from which Homebrew downloads this wheel")
    parser.add_argument("--homepage", required=True, help="address of the project")
    args = parser.parse_args()
    named = _WHEEL.match(args.wheel.name)
    if named is None:
        parser.error(f"{args.wheel.name} is not the name of a wheel of metal-engine")
    here = sys.platform, platform.machine(), ".".join(platform.python_version_tuple()[:2])
    if here != ("darwin", "arm64", PYTHON):
        parser.error(f"dependencies differ by machine: run this on an arm64 Mac with Python {PYTHON}, not {here}")
    own = Wheel("metal-engine", args.url, hashlib.sha256(args.wheel.read_bytes()).hexdigest())
    print(formula(own, named["version"], args.homepage, dependencies(resolve(args.wheel))), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
