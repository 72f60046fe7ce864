"""Watching an engine's process: its limits, its hangs and its last words. No process is started."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import termios
import time
from types import SimpleNamespace
from typing import Any

import pytest

from metal_engine.engine.device_access import FULL_ACCESS
from metal_engine.engine.process import error_output, wire
from metal_engine.engine.process.channel import Channel
from metal_engine.engine.process.error_output import ErrorOutput
from metal_engine.engine.process.hang_monitor import HangMonitor
from metal_engine.engine.process.limits import ProcessLimits
from metal_engine.engine.process.restartable_process import RestartableProcess
from metal_engine.engine.process.spawner import Spawner
from metal_engine.scheduling.stats import SchedulerStats
from tests.support.serving import wait_until


def words_of(data: bytes) -> str:
    """Return the last words of a process that has written some bytes."""
    errors = ErrorOutput()
    descriptor = os.dup(errors.descriptor)
    errors.start()
    with open(descriptor, "wb") as stream:
        stream.write(data)
    errors.wait()
    return errors.last_words()


def test_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert words_of(b"") == ""
    assert words_of(b"one\n\n two\r\nthree\nf\xffur") == "two | three | f\ufffdur"
    assert words_of(b"\x1b[1;31mred\x1b[0m\x00\n") == "red"
    dump = b'Fatal Python error: Aborted\n\nCurrent thread 0x00 (most recent call first):\n  File "a"\n'
    assert words_of(b"terminate called\n" + dump) == "terminate called | Fatal Python error: Aborted"
    assert len(words_of(b"x" * 1_000_000 + b"\ny\n" + b"z" * 1_000_000)) < 1000
    assert capfd.readouterr().err.startswith("one\n\n two\r\nthree\nf")


def test_last_words_are_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ErrorOutput()
    descriptor = os.dup(errors.descriptor)
    errors.start()
    os.write(descriptor, b"long ago\n")
    wait_until(lambda: bool(errors._lines), "the line")
    monkeypatch.setattr(error_output, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0))
    os.write(descriptor, b"now\n")
    os.close(descriptor)
    errors.wait()
    assert errors.last_words() == "now"


def test_a_hang_is_reported_once() -> None:
    hangs: list[str] = []
    monitor = HangMonitor(hangs.append, 0.2)
    monitor.start()
    monitor.set_limit(0.2, "it sleeps")
    for _ in range(30):
        monitor.progressed()
        time.sleep(0.01)
    assert not hangs
    wait_until(lambda: bool(hangs), "the hang")
    time.sleep(0.5)
    assert hangs == ["it sleeps for 0.2 s"]
    monitor.set_limit(0.2, "it sleeps again")
    monitor.clear_limit()
    time.sleep(0.5)
    assert len(hangs) == 1
    monitor.close()
    monitor._thread.join(5.0)
    assert not monitor._thread.is_alive()


class ClearedMonitor(HangMonitor):
    """Monitor whose limit is cleared immediately after each read."""

    _stored: tuple[float, str] | None = None

    @property
    def _limit(self) -> tuple[float, str] | None:  # type: ignore[override]
        limit, self._stored = self._stored, None
        return limit

    @_limit.setter
    def _limit(self, limit: tuple[float, str] | None) -> None:
        self._stored = limit


def test_a_limit_that_is_cleared_while_it_is_checked_does_not_end_the_thread() -> None:
    hangs: list[str] = []
    monitor = ClearedMonitor(hangs.append, 0.2)
    monitor.set_limit(-1.0, "it sleeps")
    monitor.start()
    wait_until(lambda: bool(hangs) or not monitor._thread.is_alive(), "the check")
    assert hangs == ["it sleeps for -1 s"] and monitor._thread.is_alive()
    monitor.close()


def test_no_spare_process_after_a_stop() -> None:
    restartable = RestartableProcess(Spawner("none", wire.Start([], "", "")), {}, FULL_ACCESS)
    restartable._spare_time = 0.0
    restartable.stop()
    restartable.kill()
    stats = SchedulerStats(0, 0, 0, 64, 0, 0)
    restartable.record_stats(stats, stats, has_requests=False)


def test_a_channel_to_a_process_that_has_ended() -> None:
    """macOS refuses to set options of such a socket."""

    class Refusing(socket.socket):
        def setsockopt(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    ours, theirs = socket.socketpair()
    theirs.close()
    with Refusing(fileno=ours.detach()) as sock, pytest.raises(EOFError):
        Channel(sock, 1.0).receive()


def test_limits_follow_the_model() -> None:
    limits = ProcessLimits()
    assert limits.of_steps(0.5, 4.0) == 60.0 and limits.of_steps(60.0, 70.0) == 600.0
    assert limits.of_steps(0.5, 200.0) == 400.0  # a machine that compiles slowly
    assert limits.of_load(10.0) == 600.0 and limits.of_load(600.0) == 2400.0


def test_the_standard_error_is_a_terminal_if_the_servers_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = os.openpty()
    monkeypatch.setattr(error_output, "_STDERR", terminal)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
    errors = ErrorOutput()
    descriptor = os.dup(errors.descriptor)
    errors.start()
    assert os.isatty(descriptor) and os.get_terminal_size(descriptor).columns == 100
    os.write(descriptor, b"a line\n")
    assert b"a line" in os.read(ours, 100)
    for one in (descriptor, terminal, ours):
        os.close(one)
    errors.wait()
    assert errors.last_words() == "a line"
