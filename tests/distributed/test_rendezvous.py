"""Joining a group while MLX holds the GIL: if one rank is lost, all other ranks end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkpoint_files import write_checkpoint
from tests.support.ranked_server import children_of, command_of, is_alive

ROOT = Path(__file__).parents[2]

# Both ranks wait like MLX, holding the GIL. Rank 1 has only one end of a pipe.
LOCKED = """
import ctypes, os, subprocess, sys
from pathlib import Path
from metal_engine.distributed.rendezvous import Watched, ended_by_hang_up, monitored_rendezvous

def wait():
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).pause()

if sys.argv[1:] == ["follower"]:
    with ended_by_hang_up():
        wait()
end, held = os.pipe()
follower = subprocess.Popen([sys.executable, __file__, "follower"], pass_fds=[held])
os.close(held)
others = [Watched("rank 1 (here)", follower.pid, end)]
with monitored_rendezvous("rank 0 (here)", others, float(sys.argv[1]), Path(sys.argv[2])):
    wait()
"""


class Locked:
    """Two ranks that wait forever.

    Attributes:
        leader: process of rank 0.
        pids: process ids of both ranks, by rank.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(exist_ok=True)
        program, self.leftover = folder / "locked.py", folder / "hosts.json"
        program.write_text(LOCKED)
        self.leftover.write_text("[]")
        command = [sys.executable, str(program), str(seconds), str(self.leftover)]
        self.leader = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        waiting = {int(self.leader.stdout.readline()) for _ in range(2)}
        self.pids = [self.leader.pid, *(waiting - {self.leader.pid})]

    def end(self) -> str:
        """Wait until both ranks have ended. Return their messages."""
        said = self.leader.stderr.read()  # until all processes have closed it
        self.leader.wait()
        wait_for_end(self.pids)
        assert not self.leftover.exists()
        return said


def wait_for_end(pids: list[int]) -> None:
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.02)


def test_a_rank_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    ranks = Locked(tmp_path, 600)
    os.kill(ranks.pids[1], signal.SIGKILL)
    said = ranks.end()
    assert ranks.leader.returncode == 1
    (line,) = said.splitlines()
    assert line.endswith("rank 1 (here) has gone while the ranks were joining their group: all of them end")


def test_ranks_end_with_rank_0(tmp_path: Path) -> None:
    ranks = Locked(tmp_path, 600)
    os.kill(ranks.pids[0], signal.SIGKILL)
    (line,) = ranks.end().splitlines()
    assert line.endswith("rank 0 (here) has gone while the ranks were joining their group: all of them end")


def test_a_rank_that_has_stopped_is_not_waited_for(tmp_path: Path) -> None:
    """The message names the stopped rank. The monitor kills it and the other rank."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    groups = []
    for stopped, folder in enumerate(folders):  # stop the rank at once: its time limit runs already
        groups.append(Locked(folder, 3))
        os.kill(groups[-1].pids[stopped], signal.SIGSTOP)
    for stopped, ranks in enumerate(groups):
        (line,) = ranks.end().splitlines()
        problem = f"rank {stopped} (here) has stopped: the ranks have not found each other within 3 s"
        assert line.endswith(f"{problem}: all of them end")
        assert ranks.leader.returncode == (1 if stopped else -signal.SIGKILL)


def test_the_monitor_ends_no_process_after_a_successful_rendezvous(tmp_path: Path) -> None:
    """The monitor ends no process after a successful join, even if it is late. The handler of SIGHUP is restored."""
    program = (
        "import os, signal, time; from metal_engine.distributed.rendezvous import monitored_rendezvous\n"
        "heard = []; signal.signal(signal.SIGHUP, lambda *_: heard.append(1))\n"
        "with monitored_rendezvous('rank 0', [], 1, None): pass\n"
        "time.sleep(2.5); os.kill(os.getpid(), signal.SIGHUP); print(heard)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1]\n", "")


JOINING = """
import threading
import mlx.core as mx
from metal_engine.distributed import group
from metal_engine.settings.args import EngineArgs

group._RENDEZVOUS_SECONDS = {seconds}
init = mx.distributed.init

def joining(**options):
    print("joining", flush=True)
    return init(**options)

mx.distributed.init = joining
group.open_group(EngineArgs(model={model!r}, tensor_parallel_size=2, distributed_timeout_seconds={silence}))
print("met", flush=True)
threading.Event().wait()  # and rank 1 waits for what this one has to tell
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


class Joining:
    """Two ranks: rank 0 is about to join, and rank 1 is starting.

    Args:
        seconds: time limit of the monitor.
        silence: time limit in seconds of a rank that connects to another rank, and of a rank's silence.
    """

    def __init__(self, model: Path, seconds: float = 600, silence: float = 8) -> None:
        program = JOINING.format(model=str(model), seconds=seconds, silence=silence)
        self.leader = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.leader.stdout is not None and self.leader.stdout.readline() == "joining\n"
        self.began = time.monotonic()
        (follower,) = (pid for pid in children_of(self.leader.pid) if b"metal_engine.rank_worker" in command_of(pid))
        self.pids = [self.leader.pid, follower]

    def seconds_until_met(self) -> float:
        assert self.leader.stdout is not None and self.leader.stdout.readline() == "met\n"
        return time.monotonic() - self.began

    def lose(self, rank: int, how: signal.Signals) -> str:
        """Lose a rank, and wait for the end of the other rank. Return the messages of rank 0."""
        os.kill(self.pids[rank], how)
        other = self.pids[1 - rank]
        if rank:
            self.leader.wait()
        wait_for_end([other])
        if is_alive(self.pids[rank]):  # the rank was stopped after both ranks had joined
            os.kill(self.pids[rank], signal.SIGKILL)
        said = self.leader.stderr.read()
        self.leader.wait()
        return said


def test_the_leader_reports_a_rank_that_dies_before_joining(model: Path) -> None:
    ranks = Joining(model)
    said = ranks.lose(1, signal.SIGKILL)
    assert ranks.leader.returncode == 1
    lines = [line for line in said.splitlines() if "rank 1" in line]
    assert len(lines) == 1 and "rank 1 (127.0.0.1) has gone while the ranks were joining" in lines[0], said


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_at_any_moment_of_the_start(model: Path, lost: int, how: signal.Signals) -> None:
    """Lose a rank at ten moments, from before it joins until after both have joined."""
    first = Joining(model)
    whole = first.seconds_until_met()
    first.lose(1, signal.SIGKILL)
    for tenth in range(10):
        # The monitor has the shorter limit. At its own limit, a rank ends, and the monitor could report the wrong rank.
        ranks = Joining(model, seconds=8 + 3 * whole, silence=18 + 3 * whole)
        time.sleep(max(ranks.began + whole * tenth / 9 - time.monotonic(), 0))
        said = ranks.lose(lost, how)
        if lost:
            assert ranks.leader.returncode == 1
        lines = [line for line in said.splitlines() if re.search(rf"rank {lost} \(127\.0\.0\.1\) has ", line)]
        assert len(lines) == 1, (tenth, said)
