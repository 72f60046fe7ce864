"""Fetching a repository from the Hugging Face hub, or finding it in the hub's local cache."""

from __future__ import annotations

from pathlib import Path

from metal_engine.errors import ModelLoadError, one_line

# What a checkpoint's weights and tokenizer are made of; the rest of a repository is not fetched.
TOKENIZER_PATTERNS = ["*.json", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
MODEL_PATTERNS = [*TOKENIZER_PATTERNS, "model*.safetensors"]

_LOCAL = "give a local directory or a .gguf file instead, or `demo` for the demo model"


def fetch_from_hub(
    repo: str, revision: str | None, download_dir: str | None, patterns: list[str] = MODEL_PATTERNS
) -> Path:
    """The local folder of a repository's files, fetched unless they are in the cache already.

    ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` mean what they mean to ``huggingface_hub``.

    Args:
        revision: branch, tag or commit; the default branch if None.
        download_dir: the cache's folder, if not the hub's own.
        patterns: names of the files that are wanted.

    Raises:
        ModelLoadError: it cannot be had; the message says why and what to do.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(repo, revision=revision, cache_dir=download_dir, allow_patterns=patterns)
        )
    except HFValidationError as error:
        raise ModelLoadError(
            f"{repo!r} names no model: not a path, and no repository id; {_LOCAL}"
        ) from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{repo} is gated: accept its terms on its page on the hub, and set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo} has no revision {revision!r} (--revision)") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no repository {repo} on the Hugging Face hub, or it is private and HF_TOKEN gives no access; {_LOCAL}"
        ) from error
    except DisabledRepoError as error:
        raise ModelLoadError(f"{repo} has been disabled on the Hugging Face hub") from error
    except IncompleteSnapshotError as error:
        raise ModelLoadError(
            f"{repo} is only half-downloaded, and the Hugging Face hub cannot be reached to get the rest; {_LOCAL}"
        ) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelLoadError(
                f"{repo} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it; {_LOCAL}"
            ) from error
        answer = error.__cause__
        problem = f"says {one_line(answer)}" if isinstance(answer, HfHubHTTPError) else "cannot be reached"
        raise ModelLoadError(
            f"cannot fetch {repo}: the Hugging Face hub {problem}, and it is not in the local cache; {_LOCAL}"
        ) from error
    except HfHubHTTPError as error:
        raise ModelLoadError(f"cannot fetch {repo}: the Hugging Face hub says {one_line(error)}") from error
    except Exception as error:  # of the file system or the network: the hub's client passes many through
        raise ModelLoadError(f"cannot fetch {repo}: {one_line(error)}; {_LOCAL}") from error
