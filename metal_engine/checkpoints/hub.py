"""The Hugging Face hub: whether it can be reached, what a repository has, and what the local cache has of it.

Every question is asked with a limit of time. ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` mean
what they mean to ``huggingface_hub``.
"""

from __future__ import annotations

import re
import socket
import threading
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metal_engine.checkpoints.names import did_you_mean
from metal_engine.errors import ModelLoadError, one_line

# What a checkpoint's weights and tokenizer are made of; the rest of a repository is not fetched.
TOKENIZER_PATTERNS = ["*.json", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
MODEL_PATTERNS = [*TOKENIZER_PATTERNS, "model*.safetensors"]

# For the name of the hub to be found and one of its addresses to connect, all together; and then for a first answer.
CONNECT_SECONDS = 3.0
# To connect, for an answer to go on, to send, and to wait for a connection: as httpx takes them.
_TIMEOUT: Any = (CONNECT_SECONDS, 10.0, 10.0, 10.0)
_CHUNK_BYTES = 1 << 16

# They become names of files here.
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What the HTTP client adds to an error.
_MORE = "For more information check:"

_HUB = "the Hugging Face hub"
_LOCAL = "give a local directory or a .gguf file instead, or `demo` for the demo model"


class HubUnreachableError(Exception):
    """Nobody answers where the hub should be; the message says more, if more is known."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its bytes, and their SHA-256 where the hub says it (of large files)."""

    size: int
    sha256: str | None


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit.

    Attributes:
        name: as in ``Qwen/Qwen3-0.6B``.
        revision: branch, tag or commit that was asked for; None for the default branch.
        commit: what that is now.
        files: by name.
    """

    name: str
    revision: str | None
    commit: str
    files: dict[str, HubFile]

    def matching(self, patterns: list[str]) -> list[str]:
        """Names of the files that match one of the patterns."""
        from huggingface_hub.utils import filter_repo_objects

        return list(filter_repo_objects(self.files, allow_patterns=patterns))


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids to ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def check_reachable() -> None:
    """Connects to the hub, or to the proxy on the way there, and hangs up; then asks it for something small.

    ``huggingface_hub`` would wait for a resolver that is silent, for each address in turn, and 3 s for a list of
    agents before it asks for what is wanted.

    Raises:
        HubUnreachableError: either takes more than ``CONNECT_SECONDS``, or fails.
    """
    from huggingface_hub import constants

    url = urllib.parse.urlsplit(constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
    troubles: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
        except OSError as error:
            troubles.append(one_line(error))

    # A resolver cannot be told to hurry. The thread ends when it gives up, or with the process.
    attempt = threading.Thread(target=connect, name="hub-connect", daemon=True)
    attempt.start()
    attempt.join(CONNECT_SECONDS)
    if attempt.is_alive() or troubles:
        raise HubUnreachableError(troubles[0] if troubles else f"no answer within {CONNECT_SECONDS:.0f} s")
    _check_answers()


def _check_answers() -> None:
    """Any answer will do, whatever its status. Raises as :func:`check_reachable`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    timeout: Any = (CONNECT_SECONDS,) * 4
    try:
        get_session().head(f"{constants.ENDPOINT}/robots.txt", timeout=timeout, follow_redirects=False)
    except Exception as error:  # the HTTP client's, which are of no common type
        raise HubUnreachableError(f"the hub does not answer: {one_line(error)}") from error


def find_repo(repo: str, revision: str | None) -> HubRepo:
    """What a repository has now: one small answer of the hub.

    Raises:
        Exception: what the hub's client raises, or HubUnreachableError; :func:`hub_problem` says what it means.
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
        raise HubUnreachableError("what answers there is no hub")
    return HubRepo(repo, revision, str(info.sha), files)


def read_range(repo: HubRepo, name: str, first: int, end: int) -> bytes:
    """Bytes ``first`` to ``end`` (exclusive) of a file, or fewer if it is shorter; no more of it is sent.

    Raises:
        Exception: as :func:`find_repo`.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    wanted = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo.name, name, revision=repo.commit)
    headers = {**build_hf_headers(), **wanted}
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as response:
        hf_raise_for_status(response)
        skipped = first if response.status_code == 200 else 0  # a server without ranges sends it from the beginning
        data = bytearray()
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            data += chunk
            if len(data) >= skipped + end - first:
                break
    return bytes(data[skipped : skipped + end - first])


# --- the local cache ---


def cached_folder(repo: str, revision: str | None, download_dir: str | None, patterns: list[str]) -> Path:
    """The folder of a repository's files in the cache; all that match the patterns are there, as far as it can tell.

    Raises:
        Exception: LocalEntryNotFoundError or IncompleteSnapshotError of ``huggingface_hub``.
    """
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo, revision=revision, cache_dir=download_dir, allow_patterns=patterns, local_files_only=True
        )
    )


def cached_path(repo: HubRepo, name: str, download_dir: str | None) -> Path | None:
    """Where the cache has a file of this commit; None if it has not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo.name, name, cache_dir=download_dir, revision=repo.commit)
    return Path(found) if isinstance(found, str) else None


def cache_folder(download_dir: str | None) -> Path:
    """The folder of the cache itself, which may not exist yet."""
    from huggingface_hub import constants

    return Path(download_dir or constants.HF_HUB_CACHE).expanduser()


def cached_repos(download_dir: str | None) -> list[str]:
    """The names of the repositories in the cache, from the names of their folders."""
    folders = cache_folder(download_dir).glob("models--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)


def fetch_tokenizer(repo: str, download_dir: str | None) -> Path:
    """The local folder of a repository's tokenizer, fetched unless it is in the cache already.

    Args:
        download_dir: the cache's folder, if not the hub's own.

    Raises:
        ModelLoadError: it cannot be had; the message says why and what to do.
    """
    from huggingface_hub import snapshot_download

    trouble: Exception | None = None
    try:
        if not is_offline():
            check_reachable()
            folder = snapshot_download(repo, cache_dir=download_dir, allow_patterns=TOKENIZER_PATTERNS)
            return Path(folder)
    except Exception as error:  # noqa: BLE001  (it is told if the cache has nothing)
        trouble = error
    try:
        return cached_folder(repo, None, download_dir, TOKENIZER_PATTERNS)
    except Exception as error:
        raise ModelLoadError(hub_problem(trouble or error, error, repo, None, download_dir)) from error


# --- what errors mean ---


def hub_problem(
    error: Exception, cache_error: Exception | None, repo: str, revision: str | None, download_dir: str | None
) -> str:
    """Says what an error of the hub's client means, and what to do about it.

    Args:
        cache_error: why the cache could not help; None if it was not asked.
    """
    from huggingface_hub import errors

    hint = did_you_mean(repo, cached_repos(download_dir)) or f"; {_LOCAL}"
    match error:
        case errors.HFValidationError():
            return f"{repo!r} names no model: not a path, and no repository id{hint}"
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
        return f"{repo} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it{hint}"
    not_cached = "" if cache_error is None else ", and it is not in the local cache"
    match error:
        case errors.HfHubHTTPError(response=response):
            said = one_line(error, 1000).partition(_MORE)[0].rstrip()
            advice = hint if response.status_code == 404 else f"; {_LOCAL}"
            return f"cannot fetch {repo}: {_HUB} says {said}{not_cached}{advice}"
        case HubUnreachableError():
            return f"cannot fetch {repo}: {_HUB} cannot be reached ({error}){not_cached}{hint}"
    return f"cannot fetch {repo}: {one_line(error)}{not_cached}; {_LOCAL}"
