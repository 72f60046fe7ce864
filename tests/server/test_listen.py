"""A server removes only its own socket when it ends, not another file at the same path."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_engine.errors import ConfigError
from metal_engine.server.listen import listen
from metal_engine.settings.args import ServerArgs


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a short path, as sockets require."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "socket")


def test_the_servers_own_socket_is_removed(path: Path) -> None:
    with listen(ServerArgs(uds=str(path))):
        assert path.is_socket()
    assert not path.exists()


def test_what_was_put_in_its_place_stays(path: Path) -> None:
    with listen(ServerArgs(uds=str(path))):
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"


def test_a_socket_that_nobody_listens_on_makes_way_and_a_file_does_not(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listen(ServerArgs(uds=str(path))):
        pass
    path.write_text("mine")
    with pytest.raises(ConfigError, match="--uds"), listen(ServerArgs(uds=str(path))):
        pass
    assert path.read_text() == "mine"
