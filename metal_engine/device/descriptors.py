"""Limit of the process's open files and connections."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_file_limit(wanted: int) -> int:
    """Raise the soft limit of open descriptors to ``wanted``, or to the hard limit if the hard limit is lower.

    A soft limit above ``wanted`` is not changed.

    Returns:
        The resulting soft limit, or ``wanted`` if there is no limit. Below ``wanted`` if the hard limit is lower or the
        system refuses the change.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _below(soft, wanted):
        return wanted if soft == resource.RLIM_INFINITY else soft
    raised = hard if _below(hard, wanted) else wanted
    with suppress(ValueError, OSError):  # macOS has another limit below the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted


@contextmanager
def keep_open_file_limit() -> Iterator[None]:
    """Make calls of ``resource.setrlimit`` do nothing within this context.

    Importing mlx-lm would otherwise lower the limit of open files.
    """
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
