"""Those who look at what the engine does: each has a stream of events, and none can hold up the engine or another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.step_observer import Frame
from metal_engine.server.errors import APIError
from metal_engine.server.generation.streaming import sse
from metal_engine.server.page.events import event, frame_data, piece_data, snapshot, stats
from metal_engine.server.page.pool_mirror import PoolMirror

MAX_VIEWERS = 16
# What waits for one viewer, in events and bytes. One with more is told everything anew when it has read what it has.
MAX_UNREAD = 64
MAX_UNREAD_BYTES = 1 << 20


class Viewer:
    """What is on its way to one who looks.

    Attributes:
        must_begin: whether it has to be told everything, at first or because it was too slow.
    """

    def __init__(self) -> None:
        self.must_begin = True
        self._unread: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_more = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Add an event; without room for it, all is to be told anew."""
        if not self.must_begin:
            self._unread.append(data)
            self._num_bytes += len(data)
            if len(self._unread) > MAX_UNREAD or self._num_bytes > MAX_UNREAD_BYTES:
                self.begin_again()
        self._has_more.set()

    def begin_again(self) -> None:
        """Drop what has not been read, and have everything told anew."""
        self.must_begin = True
        self._unread.clear()
        self._num_bytes = 0
        self._has_more.set()

    async def wait(self) -> None:
        """Wait for something to tell."""
        await self._has_more.wait()

    def take(self) -> bytes:
        """Returns all that has come."""
        data = b"".join(self._unread)
        self._unread.clear()
        self._num_bytes = 0
        self._has_more.clear()
        return data


class Viewers:
    """Has the engine watched while somebody looks, and hands each frame to all. Belongs to the event loop.

    Args:
        names: what the model is called in the API.
    """

    def __init__(self, engine: AsyncEngine, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._viewers: set[Viewer] = set()
        self._mirror = PoolMirror(0)
        self._num_watches = 0
        self._closed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._viewers)

    def check_room(self) -> None:
        """Raises APIError, a 503, if as many look as may."""
        if len(self._viewers) >= MAX_VIEWERS:
            problem = f"{MAX_VIEWERS} viewers look already"
            raise APIError(503, problem, code="overloaded", headers={"retry-after": "10"})

    def close(self) -> None:
        """End all streams."""
        self._closed.set()
        for viewer in self._viewers:
            viewer.begin_again()

    async def events(self, seconds: float | None = None) -> AsyncGenerator[bytes, None]:
        """The events of one more viewer: a snapshot, then frames, for so many seconds or until the server ends."""
        try:
            self.check_room()
        except APIError as error:  # others were faster
            yield sse(error.body)
            return
        viewer = self._join()
        end = None if seconds is None else asyncio.get_running_loop().time() + seconds
        try:
            while not self._closed.is_set():
                if viewer.must_begin:
                    async for piece in self._snapshot(viewer):
                        yield piece
                try:
                    async with asyncio.timeout_at(end):
                        await viewer.wait()
                except TimeoutError:
                    return
                if data := viewer.take():
                    yield data
        finally:
            self._leave(viewer)

    async def _snapshot(self, viewer: Viewer) -> AsyncGenerator[bytes, None]:
        """Everything that has been told so far, in the state of now; frames from now on wait behind it."""
        viewer.take()
        viewer.must_begin = False
        mirror = self._mirror
        pieces, is_whole = list(mirror.pieces()), mirror.is_whole
        yield event("snapshot", snapshot(self._engine, self._names, list(mirror.requests.values())))
        for i, (tables, cached) in enumerate(pieces, start=1):
            yield event("frame", piece_data(tables, cached, is_whole and i == len(pieces)))
            await asyncio.sleep(0)

    def _join(self) -> Viewer:
        if not self._viewers:
            self._num_watches += 1
            self._mirror = PoolMirror(self._engine.config.cache.num_blocks)
            self._engine.watch(partial(self._on_frame, self._num_watches))
        viewer = Viewer()
        self._viewers.add(viewer)
        return viewer

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self._engine.unwatch()
            self._mirror = PoolMirror(0)

    def _on_frame(self, watch: int, frame: Frame) -> None:
        if not self._viewers or watch != self._num_watches:
            return  # it was on its way when the last one left
        self._mirror.apply(frame)
        if frame.forget:
            for viewer in self._viewers:
                viewer.begin_again()
            return
        data = event("frame", frame_data(frame, stats(self._engine)))
        for viewer in self._viewers:
            viewer.put(data)
