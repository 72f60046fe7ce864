"""How many files and connections the process may have open at once."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_file_limit(wanted: int) -> int:
    """Raise the soft limit of open descriptors to ``wanted``, or as far as the hard limit lets it; returns what holds.

    A limit that is higher already stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _below(soft, wanted):
        return wanted if soft == resource.RLIM_INFINITY else soft
    raised = hard if _below(hard, wanted) else wanted
    with suppress(ValueError, OSError):  # macOS has a limit of its own below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted


@contextmanager
def keep_open_file_limit() -> Iterator[None]:
    """Within it, no limit of the process changes: mlx-lm, when imported, lowers that of open files for good."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
