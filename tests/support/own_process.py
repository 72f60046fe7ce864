"""Runs each test marked `own_process` in a process of its own.

On Linux, a process for each file imports the file, and forks a process for each test before MLX starts a thread.
Importing takes longer than most of these tests. Metal does not work in forks, so a Mac imports the file for each test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

# Environment variable of processes that run marked tests: path of a file with a line of JSON, [id, failure], per test.
RESULTS = "METAL_ENGINE_OWN_PROCESS_RESULTS"
FORKS = sys.platform == "linux"
SECONDS = 600  # for one test

_results = pytest.StashKey[dict[str, str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report the result of a marked test, which another process runs.

    On Linux, the first marked test of a file starts a process that runs all marked tests of the file.
    """
    if RESULTS in os.environ or not _is_marked(pyfuncitem):
        return None
    results = pyfuncitem.session.stash.setdefault(_results, {})
    if pyfuncitem.nodeid not in results:
        together = [item for item in pyfuncitem.session.items if item.path == pyfuncitem.path and _is_marked(item)]
        results |= _run(
            [item.nodeid for item in together] if FORKS else [pyfuncitem.nodeid], pyfuncitem.config.rootpath
        )
    if failure := results[pyfuncitem.nodeid]:
        pytest.fail(failure, pytrace=False)
    return True


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("own_process") is not None


def _run(ids: list[str], root: Path) -> dict[str, str]:
    """Run tests of a file in a new process. Return each test's failure as text by test id; empty for a passed test."""
    with tempfile.NamedTemporaryFile("r") as results:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", *ids],
            cwd=root,
            # Loading plugins takes longer than these tests.
            env={**os.environ, RESULTS: results.name, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
        found = dict(json.loads(line) for line in results)
    return {one: found.get(one, f"no result:\n{done.stdout}{done.stderr}") for one in ids}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a marked test in this process or in a fork, if this process was started for marked tests."""
    if RESULTS not in os.environ:
        return None
    pid = os.fork() if FORKS else 0
    if not pid:
        signal.alarm(SECONDS)
        failed = [report for report in runtestprotocol(item, log=False) if report.failed]
        _write(item, "\n".join(f"{report.longreprtext}\n{report.caplog}\n{report.capstderr}" for report in failed))
        if FORKS:
            os._exit(0)
    elif status := os.waitpid(pid, 0)[1]:
        _write(item, f"the test's process has ended with status {status}")
    return True


def _write(item: pytest.Item, failure: str) -> None:
    with open(os.environ[RESULTS], "a") as results:
        print(json.dumps([item.nodeid, failure]), file=results)
