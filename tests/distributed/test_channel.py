"""The side channel: frames, unknown connections, and silent ranks."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_engine.distributed.channel import (
    MAX_FRAME,
    TOKEN_BYTES,
    FrameKind,
    Link,
    _receive_by,
    accept_ranks,
    connect,
    listen,
    read_frame,
)
from metal_engine.distributed.launch import refuse_ranks_without_size
from metal_engine.distributed.wire import decode_plan, encode_plan
from metal_engine.errors import ConfigError
from metal_engine.pooling_params import PoolingParams
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import ImageToEncode, NewRequestData, RunnerLostError, SchedulerOutput

TOKEN = bytes(range(TOKEN_BYTES))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    both = socket.socketpair()
    yield both
    for one in both:
        one.close()


class Watched(Link):
    """Link that records reported losses."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__(connection, "rank 1 (here)", timeout, self.lost.put)
        self.start()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with listen("127.0.0.1") as listening:
        return socket.create_connection(listening.getsockname()), listening.accept()[0]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> tuple[Watched, Watched, float]:
    """Return two linked ranks that send no frames, and the value of ``time.monotonic`` when the link was made."""
    a, b = tcp_pair()
    return Watched(a, 3), Watched(b, 3), time.monotonic()


def test_frames_arrive_in_order_and_heartbeats_do_not() -> None:
    a, b = tcp_pair()
    one, other = Watched(a, 60), Watched(b, 60)
    sent = [(FrameKind.PLAN, b"x" * 300_000), (FrameKind.FINISH, b"[]"), (FrameKind.PLAN, b"")]
    for _ in range(3):
        other.send(FrameKind.BEAT, bytes(8))
        for frame in sent:
            one.send(*frame)
        assert [other.receive() for _ in sent] == sent
    assert one.lost.empty() and other.lost.empty()


def test_a_rank_that_ends_is_lost_at_once() -> None:
    a, b = tcp_pair()
    link = Watched(a, 600)
    b.close()
    assert link.lost.get(timeout=60) == "rank 1 (here) has gone (the connection was closed)"
    with pytest.raises(RunnerLostError, match="rank 1"):
        for _ in range(100):  # the kernel accepts the first frames
            link.send(FrameKind.PLAN, b"x" * 1000)
            time.sleep(0.01)


def test_a_rank_that_is_silent_is_lost_after_the_timeout() -> None:
    a, b = tcp_pair()
    link = Watched(a, 1.5)
    assert link.lost.get(timeout=60) == "rank 1 (here) has been silent for 1.5 s"
    b.close()


def test_a_rank_that_quits_on_request_is_not_reported_as_lost() -> None:
    a, b = tcp_pair()
    one, other = Watched(a, 60), Watched(b, 60)
    one.close()
    one.send(FrameKind.QUIT)
    assert other.receive() == (FrameKind.QUIT, b"")
    a.shutdown(socket.SHUT_RDWR)
    with pytest.raises(queue.Empty):
        other.lost.get(timeout=0.5)
    assert one.lost.empty()


@pytest.mark.parametrize("header", [struct.pack(">IB", MAX_FRAME + 1, FrameKind.PLAN), struct.pack(">IB", 0, 99)])
def test_an_invalid_frame_header_is_refused_before_the_body_is_read(
    header: bytes, pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[0].sendall(header)
    with pytest.raises(ValueError, match="an invalid frame"):
        read_frame(pair[1], 60)


def test_unknown_connections_do_not_keep_ranks_from_joining() -> None:
    listening = listen("127.0.0.1")
    port = listening.getsockname()[1]
    found: queue.SimpleQueue[dict[int, socket.socket]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(accept_ranks(listening, TOKEN, 3, 60)), daemon=True).start()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for said in (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", bytes(TOKEN_BYTES) + bytes(4), TOKEN + struct.pack(">I", 3)):
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(said)
        silent.append(stranger)
    ranks = {rank: connect("127.0.0.1", port, TOKEN, rank, 60) for rank in (2, 1)}
    connections = found.get(timeout=60)
    assert sorted(connections) == [1, 2]
    for rank, connection in connections.items():
        assert connection.getpeername() == ranks[rank].getsockname()
    with pytest.raises(OSError):  # no further connection is accepted
        socket.create_connection(("127.0.0.1", port), 1)
    for one in [*silent, *ranks.values(), *connections.values()]:
        one.close()


def test_a_rank_that_does_not_connect_is_named_in_the_error() -> None:
    listening = listen("127.0.0.1")
    with pytest.raises(RunnerLostError, match=r"^rank 1, 2 has not connected within 0.3 s$"):
        accept_ranks(listening, TOKEN, 3, 0.3)


def test_an_aborted_connection_does_not_end_the_wait_for_ranks() -> None:
    class Aborting(socket.socket):
        num_calls = 0

        def accept(self) -> Any:
            self.num_calls += 1
            raise ConnectionAbortedError if self.num_calls == 1 else TimeoutError

    listening = Aborting(fileno=listen("127.0.0.1").detach())
    with pytest.raises(RunnerLostError, match="has not connected"):
        accept_ranks(listening, TOKEN, 2, 0.1)
    assert listening.num_calls > 1


def test_the_channel_listens_on_the_address_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link-local address of IPv6 has the number of its interface."""
    with listen("127.0.0.1") as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    asked: list[Any] = []
    found = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 7))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found])
    monkeypatch.setattr(socket, "create_server", lambda address, family: asked.append((address, family)))
    listen("fe80::1%lo")
    assert asked == [(found[4], socket.AF_INET6)]


def test_a_plan_survives_encoding_and_decoding() -> None:
    new = NewRequestData("b#1", [5, 6, 7], 3, 1, [4, 9], SamplingParams(prompt_logprobs=3, temperature=0.7, seed=1))
    plan = SchedulerOutput(
        step_id=7, num_scheduled_tokens={"a#0": 1, "b#1": 2, "c#2": 4}, new_requests=[new],
        new_block_ids={"a#0": [3]}, new_state_slots={"a#0": 2}, sampled_req_ids=["a#0", "b#1"],
        pooled_req_ids=["c#2"], dropped_req_ids=["x#9"],
    )  # fmt: skip
    read = decode_plan(encode_plan(plan))
    (same,) = read.new_requests
    assert list(read.num_scheduled_tokens.items()) == [("a#0", 1), ("b#1", 2), ("c#2", 4)]
    assert (read.step_id, read.new_block_ids, read.new_state_slots) == (7, {"a#0": [3]}, {"a#0": 2})
    assert read.pooled_req_ids == ["c#2"]
    assert (read.sampled_req_ids, read.dropped_req_ids) == (["a#0", "b#1"], ["x#9"])
    assert (same.token_ids, same.num_prompt_tokens, same.num_computed_tokens) == ([5, 6, 7], 3, 1)
    assert (same.block_ids, same.state_slots) == ([4, 9], (0, 0))
    assert same.sampling_params.prompt_logprobs == 0  # its logits are computed, but rank 0 samples
    assert same.sampling_params.is_greedy and not same.sampling_params.edits_logits


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"sampled_req_ids": ["a"], "scheduled_spec_decode_tokens": {"a": [4]}}, "drafts"),
        ({"images_to_encode": [ImageToEncode(b"a", 1, {})]}, "images"),
    ],
)
def test_plans_with_drafts_or_images_are_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        encode_plan(SchedulerOutput(0, {"a": 2}, **more))


def test_a_rank_connects_while_90_silent_connections_are_open() -> None:
    listening = listen("127.0.0.1")
    port = listening.getsockname()[1]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(90)]
    found: queue.SimpleQueue[dict[int, socket.socket]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(accept_ranks(listening, TOKEN, 2, 60)), daemon=True).start()
    rank = connect("127.0.0.1", port, TOKEN, 1, 60)
    (connection,) = found.get(timeout=60).values()
    assert connection.getpeername() == rank.getsockname()
    for one in [*silent, rank, connection]:
        one.close()


def test_a_greeting_has_one_time_in_all() -> None:
    """A single time limit applies to all bytes of the greeting."""
    a, b = tcp_pair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.2):
            a.sendall(b"x")

    threading.Thread(target=drip, daemon=True).start()
    with pytest.raises(TimeoutError):
        _receive_by(b, 1 << 20, time.monotonic() + 1)
    stop.set()


def test_a_rank_reconnects_after_a_closed_connection() -> None:
    listening = listen("127.0.0.1")
    port = listening.getsockname()[1]
    with listening:
        found: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        threading.Thread(target=lambda: found.put(connect("127.0.0.1", port, TOKEN, 1, 60)), daemon=True).start()
        listening.accept()[0].close()
        again, _ = listening.accept()
        again.sendall(b"\x01")
        assert found.get(timeout=60).getsockname() == again.getpeername()


@pytest.mark.parametrize(("size", "is_refused"), [(1, False), (2, True), (None, True)])
def test_a_launcher_with_several_processes_asks_for_a_size(size: int | None, is_refused: bool, tmp_path: Path) -> None:
    """Without a size, each process would be a separate server."""
    environment = {"MLX_RANK": "0"}
    refuse_ranks_without_size({})
    if size is not None:
        environment["MLX_HOSTFILE"] = str(tmp_path / "hosts.json")
        (tmp_path / "hosts.json").write_text(json.dumps([["127.0.0.1:1"]] * size))
    if not is_refused:
        refuse_ranks_without_size(environment)
        return
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size .*is missing: a launcher .* as rank 0"):
        refuse_ranks_without_size(environment)


def test_plans_include_pooled_requests_and_pooling_parameters() -> None:
    """All ranks compute the requested logits, because each may have some columns of the LM head."""
    scored = NewRequestData("s", [5], 1, 0, [4], SamplingParams(), pooling_params=PoolingParams(token_ids=(7, 9)))
    mean = NewRequestData("m", [5], 1, 0, [5], SamplingParams(), pooling_params=PoolingParams(pooling_type="MEAN"))
    plan = SchedulerOutput(7, {"s": 1, "m": 1}, new_requests=[scored, mean], pooled_req_ids=["s", "m"])
    read = decode_plan(encode_plan(plan))
    assert read.pooled_req_ids == ["s", "m"]
    assert [one.pooling_params for one in read.new_requests] == [scored.pooling_params, mean.pooling_params]


def test_heartbeats_keep_an_idle_rank_connected(quiet: tuple[Watched, Watched, float]) -> None:
    """Five seconds without frames. The earlier tests of this file run during most of them."""
    one, other, start = quiet
    time.sleep(max(0.0, start + 5 - time.monotonic()))
    assert one.lost.empty() and other.lost.empty()
