"""Finds draft heads outside their model's checkpoint: on this machine, in the hub's cache, or on the hub.

Downloads only the files with weights of the head and ``config.json``, even from the repository of a whole model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from metal_engine.checkpoints.draft_heads.names import HEAD_PATTERNS, find_head
from metal_engine.checkpoints.file_checks import MAX_HEADER_BYTES
from metal_engine.checkpoints.find import fetch_repo
from metal_engine.checkpoints.hub.download import download
from metal_engine.checkpoints.hub.preflight import remote_tensors
from metal_engine.checkpoints.hub.repository import (
    HubRepo,
    cached_folder,
    cached_path,
    find_repo,
    is_offline,
    read_range,
)
from metal_engine.checkpoints.metadata import INDEX, OWN_WEIGHTS
from metal_engine.checkpoints.model_names import HubName, is_local, parse_hub_name
from metal_engine.errors import ModelLoadError
from metal_engine.local_paths import local_path


def find_sidecar(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the file or folder of a draft head. Download missing files from the hub.

    Does not check that a local path has a draft head. If the hub cannot be used, does not check the cached folder.

    Args:
        name: a path, or a repository on the hub as REPO or REPO@REVISION.
        revision: revision on the hub; None for the revision in ``name``, or else the default branch.
        download_dir: folder of the cache; None for the hub's default.

    Raises:
        ModelLoadError: the path does not exist, or the repository is not available or has no draft head. The message
            gives the reason.
    """
    if is_local(name):
        path = local_path(name)
        if not os.path.exists(path):
            raise ModelLoadError(f"{name} is not a file or a folder")
        return path
    parsed = parse_hub_name(name)
    repo_name = HubName(parsed.repo, revision or parsed.revision)
    return fetch_repo(
        repo_name,
        download_dir,
        lambda repo: _fetch(repo, download_dir),
        lambda: cached_folder(repo_name.repo, repo_name.revision, download_dir, []),
    )


def pull_only_head(name: HubName, download_dir: str | None) -> Path | None:
    """Download the draft head of a repository that has only a draft head.

    Returns:
        Folder of the draft head. If the repository has a model, lacks a draft head or cannot be read, nothing is
        downloaded, and the result is None.

    Raises:
        Exception: the download failed (:func:`metal_engine.checkpoints.hub.download.download`).
    """
    if is_offline():
        return None
    try:
        repo = find_repo(name.repo, name.revision)
        is_only_head = _has_only_head(repo)
    except Exception:  # noqa: BLE001  (the caller's next request to the hub fails in the same way, and is reported)
        return None
    return _fetch(repo, download_dir) if is_only_head else None


def _fetch(repo: HubRepo, download_dir: str | None) -> Path:
    weights = _files_with_head(repo)
    if not weights:
        raise ModelLoadError(f"{repo.name} has no weights of a draft head")
    wanted = weights + repo.matching(["config.json"])
    if any(cached_path(repo, file, download_dir) is None for file in wanted):
        download(repo, wanted, download_dir)
    path = cached_path(repo, weights[0], download_dir)
    if path is None:
        raise ModelLoadError(f"{repo.name} has changed on the hub during the download: start again")
    return path.parents[weights[0].count("/")]


def _files_with_head(repo: HubRepo) -> list[str]:
    if found := repo.matching(HEAD_PATTERNS):
        return found
    by_name = _files_by_tensor(repo)
    head = find_head(by_name)
    return [] if head is None else sorted({by_name[name] for name in (*head.published, *head.copies.values())})


def _has_only_head(repo: HubRepo) -> bool:
    if repo.matching(HEAD_PATTERNS):
        return not repo.matching([OWN_WEIGHTS, "*.gguf"])
    names = _files_by_tensor(repo)
    head = find_head(names)
    return head is not None and names.keys() == {*head.published, *head.copies.values()}


def _files_by_tensor(repo: HubRepo) -> dict[str, str]:
    """Return a map from the name of each tensor to the name of its file, from the index or from the files' headers.

    Raises:
        ModelLoadError: the index or a header is invalid.
        Exception: any error of the hub's client.
    """
    if INDEX in repo.files:
        size = min(repo.files[INDEX].size or MAX_HEADER_BYTES, MAX_HEADER_BYTES)
        try:
            weight_map = json.loads(read_range(repo, INDEX, 0, size))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items() if file in repo.files}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"{repo.name}/{INDEX} is not an index of weights: {error}") from error
    files = [file for file in repo.matching(["*.safetensors"]) if "/" not in file]
    return {tensor.name: file for file in files for tensor in remote_tensors(repo, file)}
