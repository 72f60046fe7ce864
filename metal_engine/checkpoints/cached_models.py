"""Lists and removes the models on this machine: the models in the hub's cache, and the demo model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metal_engine.checkpoints.demo import demo_path
from metal_engine.checkpoints.hub.repository import cache_folder, cached_repos
from metal_engine.checkpoints.metadata import weight_files
from metal_engine.checkpoints.model_names import DEMO_MODEL, HubName, did_you_mean, gguf_models, parse_hub_name
from metal_engine.errors import ModelLoadError, one_line

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True)
class CachedModel:
    """A model on this machine.

    Attributes:
        name: name for the `serve` command.
        path: directory or GGUF file of the model.
        commit: commit of the repository; None for the demo model.
        size: size on disk in bytes, with all files of a split GGUF model.
        last_used: latest access time of its files, in seconds since the epoch. File systems that do not record reads
            give the time of the download.
        is_complete: True for a GGUF file. For other models, False if there are no weights, or if the repository has an
            unfinished download and the model lacks files.
    """

    name: str
    path: Path
    commit: str | None
    size: int
    last_used: float
    is_complete: bool = True


def cached_models(download_dir: str | None) -> list[CachedModel]:
    """Return the models on this machine, sorted by name.

    Args:
        download_dir: folder of the cache; None for the hub's default.

    Raises:
        ModelLoadError: the cache cannot be read, or there is no folder for the demo model (:func:`demo_path`).
    """
    cache = _scan(download_dir)
    repos = [] if cache is None else [repo for repo in cache.repos if repo.repo_type == "model"]
    found = [model for repo in repos for revision in repo.revisions for model in _models(repo, revision)]
    demo = demo_path()
    if demo.is_file():
        status = demo.stat()
        found.append(CachedModel(DEMO_MODEL, demo, None, status.st_size, status.st_atime))
    return sorted(found, key=lambda model: model.name.lower())


def _scan(download_dir: str | None) -> HFCacheInfo | None:
    from huggingface_hub import scan_cache_dir

    folder = cache_folder(download_dir)
    try:
        return scan_cache_dir(folder) if folder.is_dir() else None
    except OSError as error:
        raise ModelLoadError(f"cannot read the cache {folder}: {one_line(error)}") from error


def _models(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> list[CachedModel]:
    """Return the models in a revision: one model of safetensors, or one model for each GGUF file.

    Without any weights, return an incomplete model if a download is unfinished, otherwise an empty list.
    """
    refs = sorted(revision.refs, key=lambda ref: (ref != "main", ref))
    name = (
        repo.repo_id
        if "main" in refs or len(repo.revisions) == 1
        else f"{repo.repo_id}@{(*refs, revision.commit_hash)[0]}"
    )
    files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
    ggufs = [] if "config.json" in files else gguf_models(list(files))
    if ggufs:
        return [
            CachedModel(
                f"{name}:{model.quantization}" if model.quantization else name,
                files[model.name].file_path,
                revision.commit_hash,
                sum(files[name].size_on_disk for name in model.files),
                files[model.name].blob_last_accessed,
            )
            for model in ggufs
        ]
    has_weights = any(file.endswith(".safetensors") for file in files)
    partial = _partial_bytes(repo)
    if not has_weights and partial is None:
        return []  # only a tokenizer, or files of another library
    # The partial files may belong to another revision, or be left over from a download that began again.
    complete = has_weights and (partial is None or _has_all_weights(revision.snapshot_path))
    size = revision.size_on_disk + (0 if complete else partial or 0)
    last_used = max((file.blob_last_accessed for file in revision.files), default=repo.last_accessed)
    return [CachedModel(name, revision.snapshot_path, revision.commit_hash, size, last_used, complete)]


def _partial_bytes(repo: CachedRepoInfo) -> int | None:
    """Return the size of a repository's unfinished downloads in bytes; None without unfinished downloads."""
    sizes = [part.stat().st_size for part in (repo.repo_path / "blobs").glob("*.incomplete")]
    return sum(sizes) if sizes else None


def _has_all_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except ModelLoadError:
        return False


def find_cached(name: str, download_dir: str | None) -> CachedModel | None:
    """Return the model on this machine that is called ``name``, ignoring case; None if there is no such model.

    A name without a quantization also finds the GGUF file of a repository, unless the repository has several. Raises as
    :func:`cached_models`.
    """
    models = cached_models(download_dir)
    exact = [model for model in models if model.name.lower() == name.lower()]
    ggufs = [model for model in models if model.name.lower().startswith(f"{name.lower()}:")]
    return exact[0] if exact else ggufs[0] if len(ggufs) == 1 else None


# --- removing ---


@dataclass(frozen=True)
class Removal:
    """Planned removal of cached files.

    Attributes:
        what: name of the model, as the user gave it.
        size: number of bytes that the removal frees.
        strategy: removal strategy of ``huggingface_hub``; None for the demo model.
    """

    what: str
    size: int
    strategy: Any

    def execute(self) -> None:
        """Remove the files.

        Raises:
            ModelLoadError: the file system refuses the removal.
        """
        try:
            if self.strategy is None:
                demo_path().unlink()
            else:
                self.strategy.execute()
        except OSError as error:
            raise ModelLoadError(f"cannot remove {self.what}: {one_line(error)}") from error


def plan_removal(name: str, download_dir: str | None) -> Removal:
    """Plan the removal of a repository, one of its revisions, or one GGUF model. Removes nothing yet.

    The removal deletes links, and keeps their targets outside the cache, as in ``huggingface_hub``.

    Args:
        name: ``demo``, or ``repo[@revision][:quantization]`` with the repository and the quantization in upper or lower
            case.
        download_dir: folder of the cache; None for the hub's default.

    Raises:
        ModelLoadError: the model, the revision or the GGUF file is not in the cache, the cache cannot be read, or the
            repository's folder is a link.
    """
    if name == DEMO_MODEL:
        if not demo_path().is_file():
            raise ModelLoadError("the demo model is not in the cache")
        return Removal(name, demo_path().stat().st_size, None)
    wanted = parse_hub_name(name)
    cache = _scan(download_dir)
    repos = [] if cache is None else [repo for repo in cache.repos if repo.repo_id.lower() == wanted.repo.lower()]
    repos = [repo for repo in repos if repo.repo_type == "model"]
    if cache is None or not repos:
        raise ModelLoadError(_not_there(wanted, cache, download_dir))
    repo = repos[0]
    if repo.repo_path.is_symlink():
        raise ModelLoadError(f"{repo.repo_path} is a link to {repo.repo_path.resolve()}: remove it yourself")
    revisions = [
        revision
        for revision in repo.revisions
        if wanted.revision is None or wanted.revision in revision.refs or wanted.revision == revision.commit_hash
    ]
    if not revisions:
        there = ", ".join(sorted(repo.refs)) or "none with a name"
        raise ModelLoadError(f"{repo.repo_id} has no revision {wanted.revision!r} in the cache; there are {there}")
    if wanted.quantization is None:
        strategy = cache.delete_revisions(*(revision.commit_hash for revision in revisions))
        return Removal(name, strategy.expected_freed_size + (_partial_bytes(repo) or 0), strategy)
    files = [file for revision in revisions for file in revision.files]
    models = gguf_models([file.file_name for file in files])
    labels = {name: model.quantization for model in models for name in model.files}
    chosen = [file for file in files if labels.get(file.file_name) == wanted.quantization.upper()]
    if not chosen:
        there = ", ".join(sorted(set(labels.values()))) or "none"
        raise ModelLoadError(f"{repo.repo_id} has no {wanted.quantization} GGUF file in the cache; there are {there}")
    strategy = cache.delete_files(*chosen)
    return Removal(name, strategy.expected_freed_size, strategy)


def _not_there(wanted: HubName, cache: HFCacheInfo | None, download_dir: str | None) -> str:
    folder = cache_folder(download_dir) / f"models--{wanted.repo.replace('/', '--')}"
    if folder.exists():
        reasons = [one_line(warning) for warning in (cache.warnings if cache else []) if str(folder) in str(warning)]
        return f"{wanted.repo} is damaged in the cache{f' ({reasons[0]})' if reasons else ''}: remove {folder} yourself"
    hint = did_you_mean(wanted.repo, cached_repos(download_dir))
    return f"{wanted.repo} is not in the cache {cache_folder(download_dir)}{hint}"
