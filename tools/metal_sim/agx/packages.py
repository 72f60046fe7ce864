"""Debian's packages with Mesa's compiler, clang and llvm-spirv, in a private root under the cache directory.

apt downloads the packages once, without root rights, from the Debian mirror in this machine's apt configuration.
``packages()`` raises ToolchainError with the reason if the download is impossible.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import ToolchainError
from ..toolchain import cache_dir

SUITE = "trixie"
BACKPORTS = f"{SUITE}-backports"
# Packages to install with their dependencies.
WITH_DEPENDENCIES = ("mesa-opencl-icd", "ocl-icd-libopencl1", "llvm-spirv-19", "opencl-c-headers", "linux-libc-dev")
# Packages to install without their dependencies: clang's dependencies include the development files of a C library.
ALONE = ("clang-19", "libdrm-dev")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True)
class Packages:
    """Unpacked Debian packages of Mesa's compiler. ``listing`` has their file names, which contain the versions."""

    root: Path
    listing: str

    @property
    def key(self) -> str:
        """Digest that changes with the versions."""
        return hashlib.sha256(self.listing.encode()).hexdigest()[:16]

    @property
    def libraries(self) -> Path:
        return self.root / _LIBRARIES

    def command(self, program: Path | str) -> list[str]:
        """Return the command that runs a program with this root's dynamic linker and libraries."""
        loader = self.libraries / "ld-linux-x86-64.so.2"
        paths = f"{self.libraries}:{self.root / 'usr/lib/llvm-19/lib'}"
        return [str(loader), "--library-path", paths, str(self.root / program)]

    def run(
        self, program: str, arguments: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.command(program), *arguments], capture_output=True, text=True, env=environment)

    def run_clang(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        resources = self.root / "usr/lib/llvm-19/lib/clang/19"
        return self.run("usr/lib/llvm-19/bin/clang", ["-resource-dir", str(resources), *arguments])


def _mirror() -> str:
    """Return the URL of the Debian mirror in this machine's apt configuration. Raises ToolchainError without one."""
    done = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if re.search(r"/debian/?$", line):
            return line.rstrip("/")
    raise ToolchainError("this machine's apt has no Debian mirror")


def _fetch(folder: Path) -> list[Path]:
    """Download the packages into ``folder``, and the dependencies of ``WITH_DEPENDENCIES``. Return their paths.

    Raises:
        ToolchainError: apt failed, or has no Debian mirror.
    """
    for name in ("lists/partial", "archives/partial", "sources"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources" / "debian.sources").write_text(
        f"Types: deb\nURIs: {_mirror()}\nSuites: {SUITE} {BACKPORTS}\nComponents: main\nSigned-By: {KEYRING}\n"
    )
    settings = {
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": folder / "sources",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        "APT::Default-Release": BACKPORTS,
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    for command in (["update"], ["install", "--yes", "--download-only", *WITH_DEPENDENCIES], ["download", *ALONE]):
        done = subprocess.run(
            ["apt-get", "-q", *options, *command], capture_output=True, text=True, cwd=folder / "archives"
        )
        # apt-get update exits with status 0 even if it reached no server.
        if done.returncode or re.search(r"^(E|W|Err)\b.*(Failed to fetch|Could not)", done.stderr + done.stdout, re.M):
            raise ToolchainError(f"apt-get {command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return sorted((folder / "archives").glob("*.deb"))


@cache
def packages() -> Packages:
    """Return the packages. Download them at first use: 80 MB, 400 MB unpacked.

    Raises:
        ToolchainError: the download is impossible on this machine.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ToolchainError("Mesa's compiler is taken from packages for Linux on x86_64")
    wanted = hashlib.sha256(repr((SUITE, WITH_DEPENDENCIES, ALONE)).encode()).hexdigest()[:8]
    root = cache_dir() / f"agx-root-{wanted}"
    listing = root / "packages"
    if not listing.exists():
        missing = [name for name in ("apt-get", "dpkg-deb") if not shutil.which(name)]
        if missing or not KEYRING.exists():
            raise ToolchainError(f"no {missing[0] if missing else KEYRING} here, which fetches Debian's packages")
        _make_root(root, listing.name)
    return Packages(root, listing.read_text())


def _make_root(root: Path, listing: str) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        found = _fetch(Path(tmp) / "apt")
        made = Path(tmp) / "root"
        for package in found:
            subprocess.run(["dpkg-deb", "--extract", str(package), str(made)], check=True)
        (made / listing).write_text("".join(f"{package.name}\n" for package in found))
        try:
            os.rename(made, root)
        except OSError:
            if not (root / listing).exists():  # otherwise another process has made it first
                raise
