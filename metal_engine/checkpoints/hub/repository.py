"""Checks that the Hugging Face hub is reachable, and lists and reads files of its repositories and of its local cache.

Every request to the hub has a time limit. ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` have the
same meaning as in ``huggingface_hub``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import socket
import threading
import time
import urllib.parse
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from metal_engine.checkpoints.model_names import did_you_mean
from metal_engine.errors import ModelLoadError, one_line
from metal_engine.local_paths import local_path

# Files of a checkpoint's tokenizer and weights. Other files of a repository are not downloaded.
TOKENIZER_PATTERNS = ["*.json", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
MODEL_PATTERNS = [*TOKENIZER_PATTERNS, "model*.safetensors"]

# Time limit for resolving the hub's name and connecting to one of its addresses, and then for a first response.
CONNECT_SECONDS = 3.0
# httpx's time limits: connect, read, write, and wait for a connection of the pool.
_TIMEOUT: Any = (CONNECT_SECONDS, 10.0, 10.0, 10.0)
_CHUNK_BYTES = 1 << 16

# Commits and hashes from the hub must match these patterns, because they become parts of file names in the cache.
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Start of the text that the HTTP client appends to an error.
_MORE = "For more information check:"

_HUB = "the Hugging Face hub"
_LOCAL = "give a local directory or a .gguf file instead, or `demo` for the demo model"


class HubUnreachableError(Exception):
    """The hub cannot be reached, or is not a hub. The message gives the cause."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    Attributes:
        size: size in bytes; 0 if the hub does not provide it.
        sha256: SHA-256 of the content, which the hub provides for large files; otherwise None.
    """

    size: int
    sha256: str | None


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit.

    Attributes:
        name: name such as ``Qwen/Qwen3-0.6B``.
        revision: requested branch, tag or commit; None for the default branch.
        commit: commit hash of the revision.
        files: files by name.
    """

    name: str
    revision: str | None
    commit: str
    files: dict[str, HubFile]

    def matching(self, patterns: list[str]) -> list[str]:
        """Return the names of the files that match a pattern, e.g. ``mtp*.safetensors``. ``*`` also matches ``/``."""
        from huggingface_hub.utils import filter_repo_objects

        return list(filter_repo_objects(self.files, allow_patterns=patterns))


def is_offline() -> bool:
    """Return True if ``HF_HUB_OFFLINE`` forbids requests to the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def check_reachable() -> None:
    """Check that the hub, or the proxy on the way to it, accepts connections, and that the hub responds.

    Without this check, ``huggingface_hub`` waits for an unresponsive name server once per address. Before its first
    request, it also waits up to 3 s for the hub's list of AI agents.

    Raises:
        HubUnreachableError: the connection or the response takes more than ``CONNECT_SECONDS``, or fails.
    """
    from huggingface_hub import constants

    url = urllib.parse.urlsplit(constants.ENDPOINT)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    deadline = time.monotonic() + CONNECT_SECONDS
    found: Future[list[Any]] = Future()

    def resolve() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # no such name, or not a name
            found.set_exception(error)

    # A name lookup has no time limit. Its thread ends when the lookup fails, or with the process.
    threading.Thread(target=resolve, name="hub-lookup", daemon=True).start()
    try:
        _connect_to_any(found.result(CONNECT_SECONDS), deadline)
    except TimeoutError as error:
        raise HubUnreachableError(f"no answer within {CONNECT_SECONDS:.0f} s") from error
    except (OSError, UnicodeError) as error:
        raise HubUnreachableError(one_line(error)) from error
    _check_answers()


def _connect_to_any(addresses: list[Any], deadline: float) -> None:
    """Connect to one of a host's addresses, and close the connection.

    Tries all addresses at the same time: some networks drop the packets of one family of addresses, often IPv6.

    Args:
        addresses: results of ``socket.getaddrinfo``.
        deadline: end of the wait in seconds of ``time.monotonic``.

    Raises:
        TimeoutError: no address has answered.
        OSError: no address accepts a connection. Gives the reason of the last address that has answered.
    """
    problem: OSError = TimeoutError()
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for family, kind, protocol, _, address in addresses:
            connection = opened.enter_context(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            code = connection.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_WRITE)
            else:
                problem = OSError(code, os.strerror(code))
        while selector.get_map() and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                connection = cast(socket.socket, key.fileobj)
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    return
                problem = OSError(code, os.strerror(code))
                selector.unregister(connection)
    raise problem


def _check_answers() -> None:
    """Check that the hub sends a response, regardless of its status. Raises as :func:`check_reachable`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    timeout: Any = (CONNECT_SECONDS,) * 4
    try:
        get_session().head(f"{constants.ENDPOINT}/robots.txt", timeout=timeout, follow_redirects=False)
    except Exception as error:  # errors of the HTTP client, which have no common base class
        raise HubUnreachableError(f"the hub does not answer: {one_line(error)}") from error


def find_repo(repo: str, revision: str | None) -> HubRepo:
    """Return a repository at the current commit of a revision. Check first that the hub is reachable.

    Args:
        repo: name of the repository.
        revision: branch, tag or commit; None for the default branch.

    Raises:
        Exception: HubUnreachableError, or any error of the hub's client. :func:`hub_problem` describes it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo)
    check_reachable()
    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    files = {}
    for sibling in info.siblings or []:
        sha256 = sibling.lfs.sha256 if sibling.lfs else ""
        files[sibling.rfilename] = HubFile(sibling.size or 0, sha256 if _SHA256.fullmatch(sha256) else None)
    if not _COMMIT.fullmatch(info.sha or ""):
        raise HubUnreachableError("the server there is not a hub")
    return HubRepo(repo, revision, str(info.sha), files)


def read_range(repo: HubRepo, name: str, first: int, end: int) -> bytes:
    """Return bytes ``first`` to ``end`` (exclusive) of a file, or fewer at its end.

    Only these bytes are transferred if the server supports ranges. Otherwise, the transfer starts at byte 0.

    Raises:
        Exception: any error of the hub's client. :func:`hub_problem` describes it.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    wanted = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo.name, name, revision=repo.commit)
    headers = {**build_hf_headers(), **wanted}
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as response:
        hf_raise_for_status(response)
        skipped = first if response.status_code == 200 else 0  # without support for ranges, the whole file is sent
        data = bytearray()
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            data += chunk
            if len(data) >= skipped + end - first:
                break
    return bytes(data[skipped : skipped + end - first])


# --- the local cache ---


def cached_folder(repo: str, revision: str | None, download_dir: str | None, patterns: list[str]) -> Path:
    """Return the folder of a repository's revision in the cache, without a request to the hub.

    Args:
        patterns: patterns of the files that the folder must have; an empty list to require no files.

    Raises:
        Exception: LocalEntryNotFoundError or IncompleteSnapshotError of ``huggingface_hub``, if the cache lacks the
            repository, or seems to lack files that match the patterns.
    """
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo, revision=revision, cache_dir=download_dir, allow_patterns=patterns, local_files_only=True
        )
    )


def cached_path(repo: HubRepo, name: str, download_dir: str | None) -> Path | None:
    """Return the path in the cache of a file at the repository's commit; None if the cache lacks it."""
    from huggingface_hub import try_to_load_from_cache

    # Unlike snapshot_download, this function does not expand "~".
    found = try_to_load_from_cache(repo.name, name, cache_dir=cache_folder(download_dir), revision=repo.commit)
    return Path(found) if isinstance(found, str) else None


def cache_folder(download_dir: str | None) -> Path:
    """Return the folder of the cache, which may not exist yet. A leading ``~`` becomes the home directory, if any."""
    from huggingface_hub import constants

    return local_path(download_dir or constants.HF_HUB_CACHE)


def cached_repos(download_dir: str | None) -> list[str]:
    """Return the names of the repositories in the cache, from the names of their folders."""
    folders = cache_folder(download_dir).glob("models--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)


def fetch_tokenizer(repo: str, download_dir: str | None) -> Path:
    """Return the local folder of a repository's tokenizer.

    Downloads files that the cache lacks, or has in an older version. If the hub cannot be used, returns the folder with
    the cached files.

    Args:
        repo: name of the repository.
        download_dir: folder of the cache; None for the hub's default.

    Raises:
        ModelLoadError: the tokenizer is not available. The message gives the reason and a remedy.
    """
    from huggingface_hub import snapshot_download

    trouble: Exception | None = None
    try:
        if not is_offline():
            check_reachable()
            folder = snapshot_download(repo, cache_dir=download_dir, allow_patterns=TOKENIZER_PATTERNS)
            return Path(folder)
    except Exception as error:  # noqa: BLE001  (reported if the cache has nothing)
        trouble = error
    try:
        return cached_folder(repo, None, download_dir, TOKENIZER_PATTERNS)
    except Exception as error:
        raise ModelLoadError(hub_problem(trouble or error, error, repo, None, download_dir)) from error


# --- error messages ---


def hub_problem(
    error: Exception, cache_error: Exception | None, repo: str, revision: str | None, download_dir: str | None
) -> str:
    """Return a message about an error of the hub's client, with a remedy.

    Args:
        error: error of the request to the hub, or of the cache lookup if requests are forbidden.
        cache_error: error of the cache lookup; None if there was no lookup.
        repo: name of the repository.
        revision: requested revision.
        download_dir: folder of the cache.
    """
    from huggingface_hub import errors

    hint = did_you_mean(repo, cached_repos(download_dir)) or f"; {_LOCAL}"
    match error:
        case errors.HFValidationError():
            return f"{repo!r} names no model: it is neither a path nor a repository id{hint}"
        case errors.GatedRepoError():
            advice = "accept its terms on its page on the hub, and set HF_TOKEN to a token of that account"
            return f"{repo} is gated: {advice}"
        case errors.RevisionNotFoundError():
            return f"{repo} has no revision {revision!r} (--revision)"
        case errors.RepositoryNotFoundError():
            return f"no repository {repo} on {_HUB}, or it is private and HF_TOKEN gives no access{hint}"
        case errors.DisabledRepoError():
            return f"{repo} has been disabled on {_HUB}"
    if isinstance(cache_error, errors.IncompleteSnapshotError):
        return f"{repo} is only half-downloaded, and {_HUB} cannot be reached to get the rest; {_LOCAL}"
    if is_offline():
        return f"{repo} is not in the local cache, and HF_HUB_OFFLINE forbids downloads{hint}"
    not_cached = "" if cache_error is None else ", and it is not in the local cache"
    match error:
        case errors.HfHubHTTPError(response=response):
            said = one_line(error, 1000).partition(_MORE)[0].rstrip()
            advice = hint if response.status_code == 404 else f"; {_LOCAL}"
            return f"cannot fetch {repo}: {_HUB} says {said}{not_cached}{advice}"
        case HubUnreachableError():
            return f"cannot fetch {repo}: {_HUB} cannot be reached ({error}){not_cached}{hint}"
    return f"cannot fetch {repo}: {one_line(error)}{not_cached}; {_LOCAL}"
