"""Agreement of ranks at the start, and the frames that rank 0 sends."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.digests import file_digests
from metal_engine.distributed import group as group_module
from metal_engine.distributed import launch
from metal_engine.distributed import leader as leader_module
from metal_engine.distributed.channel import FrameKind, Link
from metal_engine.distributed.follower import run_frame
from metal_engine.distributed.group import RankGroup, _pass_on
from metal_engine.distributed.launch import free_ports
from metal_engine.distributed.leader import LeaderRunner
from metal_engine.distributed.rank_failure import RankFailureMonitor, StepTimeout
from metal_engine.distributed.ranks import SeveralRanks
from metal_engine.distributed.wire import decode_ids
from metal_engine.errors import ConfigError, ModelLoadError, UnsupportedModelError
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.args import EngineArgs
from metal_engine.step import RunnerLostError, SchedulerOutput
from tests.distributed.test_channel import tcp_pair
from tests.support.checkpoint_files import write_checkpoint
from tools.fixtures.architectures import configuration
from tools.fixtures.tiny_models import random_model

ROOT = Path(__file__).parents[2]


class Watched(RankFailureMonitor):
    """RankFailureMonitor that does not end the process."""

    def lose(self, message: str) -> None:
        self.error = RunnerLostError(message)


def linked(rank: int = 1) -> tuple[Link, Link]:
    """Return a link to another rank, and that rank's link to rank 0."""
    one, other = tcp_pair()
    links = Link(one, f"rank {rank} (here)", 60, lambda _: None), Link(other, "rank 0 (here)", 60, lambda _: None)
    for link in links:
        link.start()
    return links


@pytest.fixture
def groups() -> Iterator[list[RankGroup]]:
    """Return two ranks in one process, which compute nothing."""
    args = EngineArgs(model="none", tensor_parallel_size=2, distributed_timeout_seconds=1.5)
    found = []
    links = linked()
    for rank, link in enumerate(links):
        communication: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        found.append(RankGroup(args, communication, [link], Watched(rank, 0), None))
    yield found
    for link in links:
        link.close()


def both(groups: list[RankGroup], *work: Callable[[RankGroup], Any]) -> list[Any]:
    """Run the work of both ranks. Return the result or the error of each."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = work[rank](groups[rank])
        except (RunnerLostError, ModelLoadError, ConfigError) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[0].join(60)
    return found


def test_ranks_that_exchange_different_facts_get_an_error(groups: list[RankGroup]) -> None:
    assert both(groups, lambda g: g.max_over_ranks("a", 3), lambda g: g.max_over_ranks("a", 5))[0] == 5
    error, _ = both(groups, lambda g: g.max_over_ranks("bytes", 3), lambda g: g.max_over_ranks("tokens", 5))
    assert str(error) == "rank 1 (here) is at 'tokens', and rank 0 at 'bytes'"


def test_rank_0_decides(groups: list[RankGroup]) -> None:
    """Only rank 0 calls the function."""
    choices = {"a layer": {"cut": None, "speedup": 2.5}}
    found: queue.Queue[Any] = queue.Queue()

    def decide(group: RankGroup) -> None:
        own = (lambda: choices) if group.rank == 0 else lambda: pytest.fail("rank 1 measures")
        found.put(SeveralRanks(group).from_rank_zero("choices", own))

    both(groups, decide, decide)
    assert [found.get(timeout=60) for _ in range(2)] == [choices, choices]


def test_a_barrier_times_out_and_names_the_missing_rank(groups: list[RankGroup]) -> None:
    error, _ = both(groups, lambda g: g.barrier("a place"), lambda g: None)
    assert str(error) == "rank 1 (here) has not reached 'a place' within 1.5 s"


def test_settings_that_differ_between_ranks_are_named_by_flag(groups: list[RankGroup]) -> None:
    """A setting without a flag has no dashes."""
    for name, shown in (("max_num_seqs", "--max-num-seqs"), ("max_attention_work", "max-attention-work")):
        groups[1].args = replace(groups[0].args, **{name: 7})
        error, _ = both(groups, RankGroup.check_settings, RankGroup.check_settings)
        assert str(error) == f"{shown} is 7 on rank 1, and None on rank 0"


def test_a_follower_of_a_lost_group_ends_with_status_1(groups: list[RankGroup]) -> None:
    """The log names the loss. It is not an error of loading the model."""
    groups[0]._links[0].send(FrameKind.FIGURES, b"[]")  # a frame that cannot be computed
    with pytest.raises(SystemExit) as end:
        SeveralRanks(groups[1]).run_as_follower(cast(Any, _Runner()))
    assert end.value.code == 1


def test_ranks_of_two_groups_that_have_connected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over the ranks then contains the ports and secrets of both groups."""
    communication: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    for foreign in (70_000, 200):
        monkeypatch.setattr(group_module.mx.distributed, "all_sum", lambda mine, group, n=foreign: mine + 2 * n)
        with pytest.raises(ModelLoadError, match="rank 1 has connected to ranks of another group"):
            group_module._connect_ranks(communication, "127.0.0.1", 1.0, Watched(1, 0))


def test_started_ranks_end_if_the_group_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    local = SimpleNamespace(stop=lambda: ended.append("stop"), end=lambda: ended.append("end"), kill=None)

    def lose(*_: Any) -> list[Link]:
        raise RunnerLostError("rank 1 has not connected within 1 s")

    for name, value in {
        "_joined": [],
        "launched_rank": lambda: None,
        "start_local_ranks": lambda args: local,
        "leader_host": lambda flag: "127.0.0.1",
        "_monitored_rendezvous": lambda rank, local: nullcontext(),
        "_connect_ranks": lose,
        "atexit": SimpleNamespace(register=lambda call: None),
    }.items():
        monkeypatch.setattr(group_module, name, value)
    monkeypatch.setattr(group_module.mx.distributed, "init", lambda strict: SimpleNamespace(size=lambda: 2))
    with pytest.raises(ModelLoadError, match="rank 1 has not connected"):
        group_module.open_group(EngineArgs(model="none", tensor_parallel_size=2))
    assert ended == ["stop", "end"]


def test_a_rank_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    popen, started = subprocess.Popen, []

    def start_one(*_: Any, **options: Any) -> Any:
        if started:
            raise BlockingIOError("no more processes")
        started.append(popen([sys.executable, "-c", "import sys; sys.stdin.read()"], **options))
        return started[0]

    monkeypatch.setattr(launch.subprocess, "Popen", start_one)
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BlockingIOError):
        launch.start_local_ranks(EngineArgs(model="none", tensor_parallel_size=3))
    assert started[0].wait(60) and not list(tmp_path.iterdir()) and launch.launched_rank() is None


def test_rank_ports_are_unused_and_below_the_ephemeral_range() -> None:
    """Systems choose ports from 32,768 on. A port that a program uses is left out."""
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as used:
        ports = free_ports(11_000)
        assert len(set(ports)) == 11_000 and min(ports) >= 20_000 and max(ports) < 32_768
        assert used.getsockname()[1] not in free_ports(11_000)
    with pytest.raises(ModelLoadError, match="need a free port each"):
        free_ports(13_000)


def test_ranks_with_other_weights_are_refused(groups: list[RankGroup], tmp_path: Path) -> None:
    """Only the weights differ: configuration, file names and file sizes are equal."""
    folders = [write_checkpoint(tmp_path / name) for name in ("a", "b")]
    weights = folders[1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    found = both(groups, *(lambda g, f=f: SeveralRanks(g).same_files(f) for f in folders))
    problem = "model.safetensors of the model on rank 1 is not what it is on rank 0: copy it to all machines"
    assert str(found[0]) == problem


def test_prints_tell_files_apart(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", num_shards=2)
    digests = file_digests(folder)
    assert len(digests) == 3 and digests == file_digests(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert [name for name in digests if digests[name] != file_digests(folder)[name]] == ["config.json"]
    large = tmp_path / "large.gguf"
    large.write_bytes(bytes(3 << 20))
    before = file_digests(large)
    with large.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert file_digests(large) != before


def test_all_ranks_try_logits_again_or_none() -> None:
    """If another rank's logits are wrong, this rank, whose logits are right, continues the check with it."""
    told: list[tuple[str, int]] = []

    def max_over_ranks(what: str, number: int) -> int:
        told.append((what, number))
        return 1 if what == "logits that are off" else number

    with pytest.raises(UnsupportedModelError, match="off from mlx-lm's own on another rank"):
        check_paged_model(
            PagedModel(random_model(configuration("llama"))), PortableBackend(), 97, max_over_ranks=max_over_ranks
        )
    assert told[-1] == ("logits that are off", 0)


class _Runner:
    """Runner that accepts all plans."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def execute(self, plan: SchedulerOutput, on_built: Callable[[], None]) -> None:
        raise AssertionError("a plan that cannot be sent was started")

    def forget(self, req_ids: list[str]) -> None:
        self.forgotten += req_ids


def test_a_plan_too_large_to_send_still_drops_requests_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(plan: SchedulerOutput) -> bytes:
        raise ValueError("a plan of 300000000 bytes is too large for the other ranks")

    monkeypatch.setattr(leader_module, "encode_plan", too_large)
    ours, theirs = linked()
    runner: Any = _Runner()
    leader = LeaderRunner(runner, [ours], Watched(0, 0), StepTimeout(Watched(0, 0), [ours], 600))
    with pytest.raises(ValueError, match="too large"):
        leader.execute(SchedulerOutput(3, {"a": 5}, dropped_req_ids=["x", "y"]))
    kind, content = theirs.receive(60)
    assert (kind, decode_ids(content)) == (FrameKind.DROP, ["x", "y", "a"])
    assert runner.forgotten == ["x", "y"]
    for link in (ours, theirs):
        link.close()


def test_a_blocked_rank_does_not_delay_loss_reports_to_other_ranks() -> None:
    stopped, reader = tcp_pair()
    full = Link(stopped, "rank 1 (here)", 60, lambda _: None)
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    one, other = tcp_pair()
    ours, theirs = Link(one, "rank 2 (here)", 60, lambda _: None), Link(other, "rank 0 (here)", 60, heard.put)
    theirs.start()

    def fill() -> None:
        with suppress(RunnerLostError):  # the link closes at the end of this test
            full.send(FrameKind.PLAN, bytes(64 << 20))

    threading.Thread(target=fill, daemon=True).start()
    threading.Thread(target=_pass_on, args=([full, ours], RunnerLostError("rank 3 has gone")), daemon=True).start()
    assert heard.get(timeout=30) == "rank 3 has gone"
    reader.close()


def test_a_step_that_never_ends_is_a_loss() -> None:
    """A step never ends although all ranks send heartbeats, because one rank has stopped computing."""
    watch = Watched(0, 0)
    ours, theirs = linked()
    leader = LeaderRunner(_Runner(), [ours], watch, StepTimeout(watch, [ours], 0.4))
    leader._step_timeout.start()
    never = threading.Event()
    step: Any = SimpleNamespace(sampling=SimpleNamespace(late_req_ids=[]), result=never.wait)
    threading.Thread(target=leader.finish, args=(step,), daemon=True).start()
    deadline = time.monotonic() + 60
    while watch.error is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "rank 0 has waited 0 s for a step that all ranks are in" in str(watch.error)
    never.set()
    for link in (ours, theirs):
        link.close()


class _Hanging:
    """Runner whose steps wait for other ranks, or that hangs before."""

    def __init__(self, until: threading.Event, *, is_behind: bool = False) -> None:
        self._until = until
        self._is_behind = is_behind

    def execute(self, plan: SchedulerOutput, on_built: Callable[[], None]) -> Any:
        if self._is_behind and plan.step_id == 2:
            self._until.wait()
        on_built()
        result = self._until.wait if plan.step_id == 2 else lambda: None
        return SimpleNamespace(
            sampling=SimpleNamespace(late_req_ids=[], set_late_requests=lambda ids: None), result=result
        )


def test_a_rank_that_does_not_go_on_is_named() -> None:
    """The hanging rank still sends heartbeats, which show less progress than the other ranks' heartbeats."""
    until = threading.Event()
    pairs = [linked(rank) for rank in (1, 2, 3)]
    watch = Watched(0, 0)
    steps = StepTimeout(watch, [ours for ours, _ in pairs], 100)
    runner: Any = _Hanging(until)
    leader = LeaderRunner(runner, [ours for ours, _ in pairs], watch, steps)

    def run(link: Link, runner: Any) -> None:
        in_flight: deque[Any] = deque()
        for _ in range(4):
            run_frame(runner, in_flight, link, *link.receive())

    def lead() -> None:
        for step_id in (1, 2):
            leader.execute(SchedulerOutput(step_id, {})).result()

    for rank, (_, theirs) in enumerate(pairs, 1):
        work = (theirs, _Hanging(until, is_behind=rank == 2))
        threading.Thread(target=run, args=work, daemon=True).start()
    threading.Thread(target=lead, daemon=True).start()
    deadline = time.monotonic() + 60
    while [ours.their_progress for ours, _ in pairs] != [3, 2, 3] and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(21):
        steps.count()
    assert str(watch.error) == "rank 2 (here) has made no progress, and rank 0 has waited 100 s for a step"
    until.set()
    for link in (link for pair in pairs for link in pair):
        link.close()


def test_steps_that_end_are_no_loss() -> None:
    """The time limit applies to a single step, not to several steps or to the pauses between them."""
    watch = Watched(0, 0)
    steps = StepTimeout(watch, [], 100)
    for _ in range(5):
        with steps:
            for _ in range(19):
                steps.count()
    for _ in range(50):
        steps.count()
    assert watch.error is None
    with steps:
        for _ in range(21):
            steps.count()
    assert watch.error is not None


def test_a_rank_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A rank ends with its parent even while it is blocked. Here, its main thread waits forever."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text("[]")
    program = (
        "import os, sys, threading; from metal_engine.distributed.launch import end_with\n"
        f"os.environ['MLX_HOSTFILE'] = {str(hosts)!r}; sys.stdin.readline(); end_with(0); threading.Event().wait()"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE)
    rank.stdin.write(b"settings\n")
    rank.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(3)
    rank.stdin.close()
    assert rank.wait(60) == 1
    assert not hosts.exists()
