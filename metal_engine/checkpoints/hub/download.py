"""Downloads files of a repository into the hub's cache. Interrupted downloads resume.

``huggingface_hub`` restarts an interrupted file from the beginning. This module therefore downloads large files itself,
to the paths where the cache stores contents by their SHA-256. ``huggingface_hub`` then finds the large files at these
paths, links them, and downloads the small files.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from metal_engine.checkpoints.hub.repository import HubRepo, cache_folder, cached_path
from metal_engine.errors import ModelLoadError
from metal_engine.settings.fields import format_size

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18
_NUM_CONNECTIONS = 8
_MAX_ATTEMPTS = 5  # consecutive attempts that receive no byte
# The hub does not send larger files over plain HTTP. `huggingface_hub` has another protocol for them.
_MAX_BYTES = 50_000_000_000

_LOCK_SECONDS = 1.0  # interval at which a wait for another process checks whether to stop
_SMALL_BYTES = 50_000_000  # downloads below this size have no progress bar

Report = Callable[[int], None]


def download(repo: HubRepo, names: list[str], download_dir: str | None) -> None:
    """Download the files that the cache lacks, with a progress bar.

    Args:
        repo: repository of the files.
        names: names of the files in the repository.
        download_dir: folder of the cache; None for the hub's default.

    Raises:
        ModelLoadError: the disk does not have enough space, or a file has the wrong SHA-256.
        Exception: any error of the hub's client, the network or the file system.
    """
    blobs = cache_folder(download_dir) / f"models--{repo.name.replace('/', '--')}" / "blobs"
    large = {}
    for name in names:
        sha256 = repo.files[name].sha256
        # `huggingface_hub` downloads files of unknown size, too.
        if sha256 and 0 < repo.files[name].size <= _MAX_BYTES and cached_path(repo, name, download_dir) is None:
            large[sha256] = name  # one entry even if two names have the same content
    large = {sha256: name for sha256, name in large.items() if not (blobs / sha256).exists()}
    partial = {sha256: _size_of(blobs / f"{sha256}.incomplete") for sha256 in large}
    missing = sum(repo.files[name].size for name in large.values()) - sum(partial.values())
    _check_space(repo, missing, cache_folder(download_dir))
    # Created before the weights, so that the cache knows the repository even if the download fails.
    (blobs.parent / "snapshots" / repo.commit).mkdir(parents=True, exist_ok=True)
    if small := [name for name in names if name not in large.values()]:
        _snapshot(repo, small, download_dir, quiet=sum(repo.files[name].size for name in small) < _SMALL_BYTES)
    if large:
        resumed = f", {format_size(sum(partial.values()))} of it already present" if any(partial.values()) else ""
        size = sum(repo.files[name].size for name in large.values())
        logger.info("downloading %s: %s in %d files%s", repo.name, format_size(size), len(large), resumed)
        began = time.monotonic()
        blobs.mkdir(parents=True, exist_ok=True)
        with _progress(repo.name, size, sum(partial.values())) as report:
            _fetch_all(repo, large, blobs, report)
        seconds = time.monotonic() - began
        speed = format_size(int(missing / max(seconds, 1e-3)))
        logger.info("downloaded %s in %.1f s (%s/s)", format_size(missing), seconds, speed)
        _snapshot(repo, names, download_dir, quiet=True)


def _snapshot(repo: HubRepo, names: list[str], download_dir: str | None, *, quiet: bool) -> None:
    """Let ``huggingface_hub`` link files in its cache, after it has downloaded missing files.

    Shows progress bars unless ``quiet``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    patterns = [glob.escape(name) for name in names]
    with disable_progress_bars() if quiet else contextlib.nullcontext():
        snapshot_download(repo.name, revision=repo.revision, cache_dir=download_dir, allow_patterns=patterns)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_space(repo: HubRepo, missing: int, folder: Path) -> None:
    existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise ModelLoadError(
            f"no space for {repo.name}: it needs {format_size(missing)} more, and {existing} has {format_size(free)} "
            "free; `metal-engine list` shows models to remove, --download-dir selects another disk"
        )


@contextlib.contextmanager
def _progress(name: str, total: int, done: int) -> Iterator[Report]:
    """Show a progress bar if standard error is a terminal, unless the hub's progress bars are disabled.

    Yields the function that reports downloaded bytes.

    Args:
        total: size of all files in bytes.
        done: number of bytes that are already present.
    """
    from huggingface_hub.utils import are_progress_bars_disabled

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal or are_progress_bars_disabled()
    with Progress(TextColumn("{task.description}"), *columns, console=console, disable=hidden) as bar:
        task = bar.add_task(name.rpartition("/")[2], total=total, completed=done)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _fetch_all(repo: HubRepo, large: dict[str, str], blobs: Path, report: Report) -> None:
    """Download several files at a time. The first error or interrupt stops all downloads.

    Args:
        large: names of the files by SHA-256.
        blobs: folder of the cache for contents by SHA-256.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="download") as pool:
        try:
            fetched = [pool.submit(_fetch, repo, name, sha256, blobs, report, stop) for sha256, name in large.items()]
            for one in fetched:
                one.result()
        finally:
            stop.set()


def _fetch(repo: HubRepo, name: str, sha256: str, blobs: Path, report: Report, stop: threading.Event) -> None:
    """Download a file, or the rest of a partial download, to the place where the cache stores its content.

    Returns early if ``stop`` is set. Raises ModelLoadError if the SHA-256 of the result is wrong.
    """
    from huggingface_hub.utils import WeakFileLock

    lock = blobs.parent.parent / ".locks" / blobs.parent.name / f"{sha256}.lock"  # the cache's lock for this file
    lock.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        is_held = False
        while not is_held and not stop.is_set():  # another process may hold the lock for hours
            with contextlib.suppress(TimeoutError):
                held.enter_context(WeakFileLock(lock, timeout=_LOCK_SECONDS))
                is_held = True
        if not is_held or (blobs / sha256).exists():  # another process was faster
            return
        part = blobs / f"{sha256}.incomplete"
        _fetch_rest(repo, name, part, report, stop)
        if stop.is_set():
            return
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            part.unlink()
            raise ModelLoadError(f"{repo.name}: {name} arrived damaged (its SHA-256 is {found}): download it again")
        os.replace(part, blobs / sha256)


def _fetch_rest(repo: HubRepo, name: str, part: Path, report: Report, stop: threading.Event) -> None:
    """Append the missing bytes to ``part``. Returns early if ``stop`` is set.

    Reconnects after an error of the HTTP client, and after an incomplete response. Gives up after ``_MAX_ATTEMPTS``
    consecutive attempts that received no byte.

    Raises:
        ModelLoadError: the last attempt received no byte, without an error.
        Exception: the HTTP client's error in the last attempt. An error of the file system or an HTTP error status is
            raised at once, without further attempts.
    """
    from huggingface_hub.errors import HfHubHTTPError

    size, attempts = repo.files[name].size, 0
    with part.open("ab", buffering=0) as out:
        if out.tell() > size:
            report(-out.tell())
            out.truncate(0)
        while (before := out.seek(0, os.SEEK_END)) < size and not stop.is_set():
            problem: Exception = ModelLoadError(f"{repo.name}: the hub sends no byte of {name}")
            try:
                _append(repo, name, out, report, stop)
            except (OSError, HfHubHTTPError):
                raise
            except Exception as error:  # noqa: BLE001  (errors of the HTTP client have no common base class)
                problem = error
            else:
                if out.tell() > before:
                    continue
            attempts = 0 if out.tell() > before else attempts + 1
            if attempts == _MAX_ATTEMPTS:
                raise problem
            logger.info("the download of %s was interrupted (%s) and resumes", name, problem)
            stop.wait(max(attempts, 1))


def _append(repo: HubRepo, name: str, out: Any, report: Report, stop: threading.Event) -> None:
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    first = out.tell()
    headers = {**build_hf_headers(), "Range": f"bytes={first}-", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo.name, name, revision=repo.commit)
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    statuses = (408, 429)  # responses that tell the client to retry later
    with http_stream_backoff(
        "GET", url, headers=headers, timeout=timeout, retry_on_exceptions=(), retry_on_status_codes=statuses
    ) as response:
        hf_raise_for_status(response)
        if first and response.status_code == 200:  # the server does not support ranges
            report(-first)
            out.truncate(0)
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            out.write(chunk)
            report(len(chunk))
            if stop.is_set():
                return
