"""Fetches a repository from the Hugging Face hub, or finds it in the hub's local cache."""

from __future__ import annotations

from pathlib import Path

from metal_engine.errors import ModelLoadError, one_line

# What a checkpoint's weights and tokenizer are made of; the rest of a repository is not fetched.
TOKENIZER_PATTERNS = ["*.json", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
MODEL_PATTERNS = [*TOKENIZER_PATTERNS, "model*.safetensors"]

_HUB = "the Hugging Face hub"
_LOCAL = "give a local directory or a .gguf file instead, or `demo` for the demo model"


def fetch_from_hub(
    repo: str, revision: str | None, download_dir: str | None, patterns: list[str] = MODEL_PATTERNS
) -> Path:
    """Returns the local folder of a repository's files, fetched unless they are in the cache already.

    ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` mean what they mean to ``huggingface_hub``.

    Args:
        revision: branch, tag or commit; the default branch if None.
        download_dir: the cache's folder, if not the hub's own.
        patterns: names of the files that are wanted.

    Raises:
        ModelLoadError: it cannot be had; the message says why and what to do.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, cache_dir=download_dir, allow_patterns=patterns))
    except Exception as error:  # of the file system or the network, too: the hub's client passes many through
        raise ModelLoadError(_problem(error, repo, revision)) from error


def _problem(error: Exception, repo: str, revision: str | None) -> str:
    """Says what an error of the hub's client means, and what to do about it."""
    from huggingface_hub import constants, errors

    match error:
        case errors.HFValidationError():
            return f"{repo!r} names no model: not a path, and no repository id; {_LOCAL}"
        case errors.GatedRepoError():
            advice = "accept its terms on its page on the hub, and set HF_TOKEN to a token of that account"
            return f"{repo} is gated: {advice}"
        case errors.RevisionNotFoundError():
            return f"{repo} has no revision {revision!r} (--revision)"
        case errors.RepositoryNotFoundError():
            return f"no repository {repo} on {_HUB}, or it is private and HF_TOKEN gives no access; {_LOCAL}"
        case errors.DisabledRepoError():
            return f"{repo} has been disabled on {_HUB}"
        case errors.IncompleteSnapshotError():
            return f"{repo} is only half-downloaded, and {_HUB} cannot be reached to get the rest; {_LOCAL}"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return f"{repo} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it; {_LOCAL}"
        case errors.LocalEntryNotFoundError():
            answer = error.__cause__
            trouble = "cannot be reached"
            if isinstance(answer, errors.HfHubHTTPError):
                trouble = f"says {one_line(answer)}"
            return f"cannot fetch {repo}: {_HUB} {trouble}, and it is not in the local cache; {_LOCAL}"
        case errors.HfHubHTTPError():
            return f"cannot fetch {repo}: {_HUB} says {one_line(error)}"
    return f"cannot fetch {repo}: {one_line(error)}; {_LOCAL}"
